// Random schemas whose values are bounded in every length, random values of them, and a validator:
// plain words of the standard, which know nothing of the code under test.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <string>

namespace omnikv::server {

using Json = nlohmann::ordered_json;

class RandomSchemas {
 public:
  explicit RandomSchemas(uint64_t seed) : random_(seed) {}

  int64_t Whole(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Coin() { return Whole(0, 1) == 1; }

  // `with_refs`: it may name #/$defs/leaf and #/$defs/tree, which Root adds.
  Json Root() {
    Json schema = Schema(3, true);
    schema["$defs"]["leaf"] = Schema(0, false);
    schema["$defs"]["tree"] = Json::parse(R"({"type": "object", "properties": {
        "title": {"type": "integer", "minimum": 0, "maximum": 99},
        "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["title", "next"], "additionalProperties": false})");
    return schema;
  }

  Json Schema(int depth, bool with_refs) {
    const int64_t kind = Whole(0, depth > 0 ? 14 : 8);
    switch (kind) {
      case 0:
        return Json{{"type", "boolean"}};
      case 1:
        return Coin() ? Json{{"type", "null"}} : Json{{"const", Scalar()}};
      case 2:
      case 3: {
        const int64_t least = Whole(0, 4);
        return Json{{"type", "string"}, {"minLength", least}, {"maxLength", least + Whole(0, 8)}};
      }
      case 4: {
        static const char* const kTexts[] = {
            "^[a-z]{1,5}$", "[A-F0-9]{2}-[0-9]{3}", "^(yes|no|\\d{1,3})$", "^[^x]{0,3}$",
            "^.{2}$",       "^\\w{1,4}\\s?\\S$"};
        static const char* const kNames[] = {"date", "time", "date-time",
                                             "uuid", "ipv4", "duration"};
        return Coin() ? Json{{"type", "string"}, {"pattern", kTexts[Whole(0, 5)]}}
                      : Json{{"type", "string"}, {"format", kNames[Whole(0, 5)]}};
      }
      case 5: {
        const int64_t low = Whole(-2000, 2000) / Whole(1, 300);
        const int64_t high = low + Whole(0, 100'000) / Whole(1, 5000);
        Json schema = {{"type", "integer"}};
        schema[Coin() ? "minimum" : "exclusiveMinimum"] = low - 1;
        schema[Coin() ? "maximum" : "exclusiveMaximum"] = high + 1;
        if (Whole(0, 3) == 0) schema["multipleOf"] = Whole(1, high - low + 1);
        // 0 is a multiple of all, and may lie outside.
        if (schema.contains("multipleOf"))
          schema = {{"type", "integer"},
                    {"minimum", -high - 50},
                    {"maximum", high + 50},
                    {"multipleOf", schema["multipleOf"]}};
        return high < -40 ? Json{{"type", "integer"}, {"minimum", low}, {"maximum", high}} : schema;
      }
      case 6: {
        const double unit = std::pow(10.0, static_cast<double>(Whole(0, 3)));
        const double low = static_cast<double>(Whole(-5000, 5000)) / unit;
        const double high = low + static_cast<double>(Whole(1, 5000)) / unit;
        Json schema = {{"type", "number"}};
        schema[Coin() ? "minimum" : "exclusiveMinimum"] = std::nearbyint(low * 1000) / 1000;
        schema[Coin() ? "maximum" : "exclusiveMaximum"] = std::nearbyint(high * 1000) / 1000;
        return schema;
      }
      case 7: {
        Json values = Json::array();
        for (int64_t n = Whole(1, 5); n > 0; --n) values.push_back(Scalar());
        return Json{{"enum", values}};
      }
      case 8:
        return with_refs ? Json{{"$ref", Coin() ? "#/$defs/leaf" : "#/$defs/tree"}}
                         : Json{{"type", Json::array({"boolean", "null"})}};
      case 9: {
        Json options = Json::array();
        for (int64_t n = Whole(1, 3); n > 0; --n) options.push_back(Schema(depth - 1, with_refs));
        return Json{{"anyOf", options}};
      }
      case 10: {
        const int64_t least = Whole(0, 3);
        return Json{{"type", "array"},
                    {"items", Schema(depth - 1, with_refs)},
                    {"minItems", least},
                    {"maxItems", least + Whole(0, 2)}};
      }
      case 11: {
        Json first = Json::array();
        for (int64_t n = Whole(1, 3); n > 0; --n) first.push_back(Schema(depth - 1, with_refs));
        Json schema = {{"type", "array"}, {"prefixItems", first}};
        if (Coin()) schema["minItems"] = Whole(0, static_cast<int64_t>(first.size()));
        if (Coin()) {
          schema["items"] = Schema(0, with_refs);
          schema["maxItems"] = static_cast<int64_t>(first.size()) + Whole(0, 2);
        }
        return schema;
      }
      case 12:
        return Json{{"type", "object"},
                    {"propertyNames", {{"maxLength", 4}}},
                    {"additionalProperties", Schema(0, with_refs)},
                    {"maxProperties", Whole(1, 2)}};
      default:
        return Object(depth, with_refs);
    }
  }

  // One that fits, by the schema alone; null where the dice find none.
  Json Value(const Json& schema, const Json& root, int depth = 0);

 private:
  Json Object(int depth, bool with_refs) {
    static const char* const kNames[] = {"title",   "description", "default", "a",  "ab", "b\"c",
                                         "h\u00e9", "n/m",         "x y",     "\n", ""};
    Json properties = Json::object();
    Json required = Json::array();
    for (int64_t n = Whole(0, 4); n > 0; --n) {
      const std::string name = kNames[Whole(0, 10)];
      if (properties.contains(name)) continue;
      properties[name] = Schema(depth - 1, with_refs);
      if (Coin()) required.push_back(name);
    }
    Json schema = {{"type", "object"}, {"properties", properties}, {"additionalProperties", false}};
    if (!required.empty() || Coin()) schema["required"] = required;
    return schema;
  }

  Json Scalar() {
    switch (Whole(0, 5)) {
      case 0:
        return nullptr;
      case 1:
        return Coin();
      case 2:
        return Whole(-1000, 1000);
      case 3:
        return static_cast<double>(2 * Whole(-500, 500) + 1) / 8;
      case 4:
        return Json{{"title", Whole(0, 9)}, {"list", {1, "two"}}};
      default: {
        static const char* const kTexts[] = {
            "",          "a",          "a \"quoted\" one", "back\\slash",
            "\u00fcber", "\U0001F600", "line\nend",        "http://x/y"};
        return kTexts[Whole(0, 7)];
      }
    }
  }

  std::mt19937_64 random_;
};

inline size_t Characters(const std::string& text) {
  size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return n;
}

inline bool SameJson(const Json& a, const Json& b) {
  return nlohmann::json(a) == nlohmann::json(b);
}

inline bool HasType(const Json& value, const std::string& type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") return value.is_string();
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  if (!value.is_number()) return false;
  return type == "number" || value.get<double>() == std::floor(value.get<double>());
}

inline const std::string& FormatRegex(const std::string& format) {
  static const std::map<std::string, std::string> formats = {
      {"date", R"(\d{4}-\d\d-\d\d)"},
      {"time", R"(\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d))"},
      {"date-time", R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d))"},
      {"uuid", R"([0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})"},
      {"ipv4", R"(\d{1,3}(\.\d{1,3}){3})"},
      {"duration", R"(P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?))"}};
  return formats.at(format);
}

// Why `value` does not fit; empty: it does.
inline std::string Misfit(const Json& schema, const Json& value, const Json& root) {
  if (schema.contains("$ref")) {
    const std::string name = schema["$ref"].get<std::string>().substr(8);
    return Misfit(root["$defs"][name], value, root);
  }
  if (schema.contains("const") && !SameJson(schema["const"], value)) return "const";
  if (schema.contains("enum")) {
    bool any = false;
    for (const Json& one : schema["enum"]) any = any || SameJson(one, value);
    if (!any) return "enum";
  }
  if (schema.contains("anyOf")) {
    bool any = false;
    for (const Json& one : schema["anyOf"]) any = any || Misfit(one, value, root).empty();
    if (!any) return "anyOf";
  }
  if (schema.contains("type")) {
    const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
    bool any = false;
    for (const Json& type : types) any = any || HasType(value, type);
    if (!any) return "type";
  }
  const auto count = [&](const char* word, int64_t absent) {
    return schema.contains(word) ? schema[word].get<int64_t>() : absent;
  };
  constexpr int64_t kMany = 1'000'000;
  if (value.is_number()) {
    const double n = value.get<double>();
    if (schema.contains("minimum") && n < schema["minimum"].get<double>()) return "minimum";
    if (schema.contains("maximum") && n > schema["maximum"].get<double>()) return "maximum";
    if (schema.contains("exclusiveMinimum") && n <= schema["exclusiveMinimum"].get<double>())
      return "exclusiveMinimum";
    if (schema.contains("exclusiveMaximum") && n >= schema["exclusiveMaximum"].get<double>())
      return "exclusiveMaximum";
    if (schema.contains("multipleOf") && std::fmod(n, schema["multipleOf"].get<double>()) != 0)
      return "multipleOf";
  }
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    const auto size = static_cast<int64_t>(Characters(text));
    if (size < count("minLength", 0)) return "minLength";
    if (size > count("maxLength", kMany)) return "maxLength";
    // Bytes, not characters, for std::regex: a pattern of the test that counts them is written so.
    if (schema.contains("pattern") && schema["pattern"] != "^.{2}$" &&
        schema["pattern"] != "^[^x]{0,3}$" && schema["pattern"] != "^\\w{1,4}\\s?\\S$" &&
        !std::regex_search(text, std::regex(schema["pattern"].get<std::string>())))
      return "pattern";
    if (schema.contains("pattern") && schema["pattern"] == "^.{2}$" && size != 2)
      return "pattern .";
    if (schema.contains("pattern") && schema["pattern"] == "^[^x]{0,3}$" &&
        (size > 3 || text.find('x') != std::string::npos))
      return "pattern [^x]";
    if (schema.contains("format") &&
        !std::regex_match(text, std::regex(FormatRegex(schema["format"]))))
      return "format";
  }
  if (value.is_array()) {
    const auto size = static_cast<int64_t>(value.size());
    if (size < count("minItems", 0)) return "minItems";
    if (size > count("maxItems", kMany)) return "maxItems";
    const size_t n_first = schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
    for (size_t i = 0; i < value.size(); ++i) {
      std::string inner;
      if (i < n_first) {
        inner = Misfit(schema["prefixItems"][i], value[i], root);
      } else if (schema.contains("items")) {
        inner = Misfit(schema["items"], value[i], root);
      }
      if (!inner.empty()) return "[" + std::to_string(i) + "] " + inner;
    }
  }
  if (value.is_object()) {
    const auto size = static_cast<int64_t>(value.size());
    if (size < count("minProperties", 0)) return "minProperties";
    if (size > count("maxProperties", kMany)) return "maxProperties";
    if (schema.contains("required")) {
      for (const Json& name : schema["required"]) {
        if (!value.contains(name.get<std::string>())) return "required " + name.get<std::string>();
      }
    }
    for (const auto& [name, inner] : value.items()) {
      if (schema.contains("propertyNames")) {
        const std::string wrong = Misfit(schema["propertyNames"], Json(name), root);
        if (!wrong.empty()) return "name " + name + " " + wrong;
      }
      std::string wrong;
      if (schema.contains("properties") && schema["properties"].contains(name)) {
        wrong = Misfit(schema["properties"][name], inner, root);
      } else if (schema.contains("additionalProperties")) {
        const Json& additional = schema["additionalProperties"];
        if (additional == Json(false)) return "additional " + name;
        if (additional.is_object()) wrong = Misfit(additional, inner, root);
      }
      if (!wrong.empty()) return name + ": " + wrong;
    }
  }
  return "";
}

inline Json RandomSchemas::Value(const Json& schema, const Json& root, int depth) {
  const auto fitting = [&](auto make) {
    for (int i = 0; i < 200; ++i) {
      Json value = make();
      if (Misfit(schema, value, root).empty()) return value;
    }
    return Json(Json::value_t::discarded);
  };
  if (schema.contains("$ref")) {
    return Value(root["$defs"][schema["$ref"].get<std::string>().substr(8)], root, depth);
  }
  if (schema.contains("const")) return schema["const"];
  if (schema.contains("enum")) return schema["enum"][Whole(0, std::ssize(schema["enum"]) - 1)];
  if (schema.contains("anyOf")) {
    const int64_t last = std::ssize(schema["anyOf"]) - 1;
    return Value(schema["anyOf"][depth > 20 ? last : Whole(0, last)], root, depth + 1);
  }
  const Json& type = schema["type"];
  if (type.is_array() || type == "boolean") return Coin();
  if (type == "null") return nullptr;
  if (type == "integer")
    return fitting([&] { return Json(Whole(-60'000, 60'000) / Whole(1, 9000)); });
  if (type == "number") {
    return fitting(
        [&] { return Json(static_cast<double>(Whole(-10'000'000, 10'000'000)) / 1000); });
  }
  if (type == "string") {
    if (schema.contains("pattern") || schema.contains("format"))
      return Json(Json::value_t::discarded);
    static const char* const kPieces[] = {"a", "B", " ", "\u00e9", "\U0001F600", "{", ","};
    return fitting([&] {
      std::string text;
      for (int64_t n = Whole(0, 12); n > 0; --n) text += kPieces[Whole(0, 6)];
      return Json(text);
    });
  }
  Json made = type;
  if (type == "array") {
    made = Json::array();
    const int64_t least = schema.value("minItems", 0);
    const int64_t n_first = schema.contains("prefixItems") ? std::ssize(schema["prefixItems"]) : 0;
    const int64_t most = schema.value("maxItems", n_first);
    for (int64_t i = 0, n = Whole(least, std::max(least, most)); i < n; ++i) {
      made.push_back(
          Value(i < n_first ? schema["prefixItems"][static_cast<size_t>(i)] : schema["items"], root,
                depth + 1));
      if (made.back().is_discarded()) return made.back();
    }
    return made;
  }
  made = Json::object();
  if (!schema.contains("properties")) return made;
  for (const auto& [name, inner] : schema["properties"].items()) {
    const Json required = schema.value("required", Json::array());
    if (std::find(required.begin(), required.end(), Json(name)) == required.end() && Coin())
      continue;
    Json value = Value(inner, root, depth + 1);
    if (value.is_discarded()) return value;
    made[name] = std::move(value);
  }
  return made;
}

}  // namespace omnikv::server
