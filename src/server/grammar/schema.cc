#include "server/grammar/schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/printable.h"
#include "server/grammar/disjoint.h"
#include "server/protocol/fields.h"

namespace omnikv::server {
namespace {

constexpr int64_t kShortString = 32;        // longer ones take seconds to compile as an automaton
constexpr int64_t kMostMultiple = 1024;     // xgrammar's, of multipleOf
constexpr int64_t kMostMultiples = 10'000;  // and of the width of its range
constexpr int64_t kIntMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kIntMin = std::numeric_limits<int64_t>::min();

using Names = std::set<std::string, std::less<>>;

const Names kAnnotations = {"title",    "description", "default",    "example",   "examples",
                            "$comment", "deprecated",  "readOnly",   "writeOnly", "$schema",
                            "$id",      "$defs",       "definitions"};
const Names kStringWords = {"minLength", "maxLength", "pattern", "format"};
const Names kNumberWords = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
                            "multipleOf"};
const Names kArrayWords = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"};
const Names kObjectWords = {"properties",    "required",      "additionalProperties",
                            "minProperties", "maxProperties", "patternProperties",
                            "propertyNames"};
const Names kOtherWords = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable"};
const std::array<std::string_view, 7> kTypes = {"null",   "boolean", "object", "array",
                                                "number", "string",  "integer"};

const std::string kHost =
    "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*";
const std::string kDate =
    "([1-9][0-9]{3}|0([1-9][0-9]{2}|0([1-9][0-9]|0[1-9])))-"
    "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])";
const std::string kTime =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const std::string kByte = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
// No day after the 28th, which not every month has; no year 0000, which few clients read.
const std::map<std::string, std::string, std::less<>> kFormats = {
    {"date", kDate},
    {"time", kTime},
    {"date-time", kDate + "T" + kTime},
    {"duration",
     "P([0-9]{1,9}W|[0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D|"
     "([0-9]{1,9}D)?T([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|"
     "[0-9]{1,9}S))"},
    {"email", "[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@" + kHost},
    {"hostname", kHost},
    {"ipv4", "(" + kByte + "\\.){3}" + kByte},
    {"ipv6",
     "(([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,7}:|"
     "([0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,5}(:[0-9a-f]{1,4}){2}|"
     "([0-9a-f]{1,4}:){1,4}(:[0-9a-f]{1,4}){3}|([0-9a-f]{1,4}:){1,3}(:[0-9a-f]{1,4}){4}|"
     "([0-9a-f]{1,4}:){1,2}(:[0-9a-f]{1,4}){5}|[0-9a-f]{1,4}:(:[0-9a-f]{1,4}){6}|"
     "::([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,6})?)"},
    {"uuid", "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"},
    {"uri",
     "[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+"
     "(\\?([A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)?"
     "(#([A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)?"},
};

bool IsAnnotation(const std::string& word) {
  return kAnnotations.contains(word) || word.starts_with("x-");
}

const Json* Find(const Json& object, std::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() ? nullptr : &*found;
}

// Whether a name can be told from others by xgrammar, which compares bytes as it writes them.
bool IsPlainName(const std::string& name) {
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; });
}

std::string Join(const Names& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

class Plainer {
 public:
  Plainer(const Json& root, const SchemaLimits& limits) : root_(root), limits_(limits) {}

  Result<PlainSchema> Run();

 private:
  struct Pairs {  // of a oneOf
    std::string path;
    Json options;
  };

  Result<Json> Schema(const Json& schema, const std::string& path);
  Result<Json> Object(const Json& schema, const std::string& path);
  Result<Json> Reference(const Json& schema, const std::string& path);
  Result<Json> Values(const Json& schema, const std::string& path);
  Result<Json> Options(const Json& schema, const std::string& word, const std::string& path);
  Result<Json> Typed(const Json& schema, std::string_view type, const std::string& path);
  Result<Json> StringOf(const Json& schema, const std::string& path);
  Result<Json> IntegerOf(const Json& schema, const std::string& path);
  Result<Json> NumberOf(const Json& schema, const std::string& path);
  Result<Json> ArrayOf(const Json& schema, const std::string& path);
  Result<Json> ObjectOf(const Json& schema, const std::string& path);
  Result<Json> MapOf(const Json& schema, const std::string& path);

  Status CheckWords(const Json& schema, const std::string& path) const;
  Status CheckAlone(const Json& schema, std::string_view word, std::string_view also,
                    const std::string& path) const;
  Status Pattern(const Json& pattern, const std::string& path);
  Status CheckValue(const Json& value, const std::string& path) const;
  Result<std::vector<std::string>> TypesOf(const Json& schema, const std::string& path) const;
  // A count from 0 on; `absent` where it is not said.
  Result<int64_t> Count(const Json& schema, std::string_view word, int64_t absent,
                        const std::string& path) const;
  Result<std::optional<double>> Bound(const Json& schema, std::string_view word,
                                      const std::string& path) const;
  // xgrammar takes two schemas for the same that differ in a property named like an annotation.
  Json Marked(Json schema) {
    schema["omnikv"] = ++n_marks_;
    return schema;
  }

  const Json& root_;
  SchemaLimits limits_;
  std::vector<std::string> patterns_;
  std::map<const Json*, size_t> places_;                     // of schemas that a $ref names
  std::vector<std::pair<const Json*, std::string>> wanted_;  // with their paths
  std::vector<Pairs> one_ofs_;
  size_t n_schemas_ = 0, n_values_ = 0;
  int64_t n_marks_ = 0;
};

Result<PlainSchema> Plainer::Run() {
  OKV_ASSIGN_OR_RETURN(Json plain, Schema(root_, ""));
  std::vector<Json> definitions;
  for (size_t i = 0; i < wanted_.size(); ++i) {  // it grows
    const auto [schema, path] = wanted_[i];
    OKV_ASSIGN_OR_RETURN(Json definition, Schema(*schema, path));
    definitions.push_back(std::move(definition));
  }
  for (const Pairs& one_of : one_ofs_) {
    const std::optional<std::pair<size_t, size_t>> both = OverlapOf(one_of.options, definitions);
    if (!both) continue;
    return Unsupported(
        fmt::format("`{}` is not supported where one value might fit two of its schemas, as {} and "
                    "{} here: expected anyOf",
                    one_of.path, both->first, both->second));
  }
  for (size_t i = 0; i < definitions.size(); ++i) {
    if (!LeadsToItself(i, definitions)) continue;
    return InvalidArgument(
        fmt::format("`{}` is by $ref and anyOf the same as itself", wanted_[i].second));
  }
  const std::vector<bool> ends = WhichEnd(definitions);
  for (size_t i = 0; i < definitions.size(); ++i) {
    if (ends[i]) continue;
    return InvalidArgument(
        fmt::format("`{}` holds itself, always: no value ends", wanted_[i].second));
  }
  for (size_t i = 0; i < definitions.size(); ++i) {
    plain["$defs"][fmt::format("r{}", i)] = std::move(definitions[i]);
  }
  return PlainSchema{std::move(plain), std::move(patterns_)};
}

Result<Json> Plainer::Schema(const Json& schema, const std::string& path) {
  if (++n_schemas_ > limits_.schemas) {
    return ResourceExhausted(
        fmt::format("the schema has more than {} schemas within it", limits_.schemas));
  }
  if (schema.is_boolean()) {
    if (schema.get<bool>()) return Json::object();
    return InvalidArgument(fmt::format("`{}` is false, which no value fits", path));
  }
  if (!schema.is_object()) {
    if (path.empty()) return InvalidArgument("the schema is no object");
    return Wrong(path, schema, "a schema");
  }
  const std::string inside = path.empty() ? "" : path + ".";
  OKV_RETURN_IF_ERROR(CheckWords(schema, inside));
  const Json* nullable = Find(schema, "nullable");
  if (nullable != nullptr && !nullable->is_boolean()) {
    return Wrong(inside + "nullable", *nullable, "true or false");
  }
  OKV_ASSIGN_OR_RETURN(Json plain, Object(schema, inside));
  if (nullable == nullptr || !nullable->get<bool>()) return plain;
  return Json{{"anyOf", Json::array({std::move(plain), Json{{"type", "null"}}})}};
}

Status Plainer::CheckWords(const Json& schema, const std::string& path) const {
  for (const auto& [word, value] : schema.items()) {
    if (IsAnnotation(word) || kOtherWords.contains(word) || kStringWords.contains(word) ||
        kNumberWords.contains(word) || kArrayWords.contains(word) || kObjectWords.contains(word)) {
      continue;
    }
    return Unsupported(fmt::format(
        "`{}` is not supported in schemas, expected {}, {}, {}, {}, {} or an annotation",
        Escaped(path + word, kPrintableBytes), Join(kOtherWords), Join(kStringWords),
        Join(kNumberWords), Join(kArrayWords), Join(kObjectWords)));
  }
  const Json* unique = Find(schema, "uniqueItems");
  if (unique != nullptr && *unique != Json(false)) {
    return Unsupported(fmt::format("`{}uniqueItems` is not supported in schemas", path));
  }
  return {};
}

Status Plainer::CheckAlone(const Json& schema, std::string_view word, std::string_view also,
                           const std::string& path) const {
  for (const auto& [other, value] : schema.items()) {
    if (other == word || other == also || other == "nullable" || IsAnnotation(other)) continue;
    return Unsupported(
        fmt::format("`{}{}` beside {} is not supported in schemas", path, other, word));
  }
  return {};
}

Result<Json> Plainer::Object(const Json& schema, const std::string& path) {
  if (schema.contains("$ref")) return Reference(schema, path);
  if (schema.contains("const") || schema.contains("enum")) return Values(schema, path);
  for (const char* word : {"anyOf", "oneOf", "allOf"}) {
    if (schema.contains(word)) return Options(schema, word, path);
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<std::string> types, TypesOf(schema, path));
  if (types.empty()) return Json::object();
  if (types.size() == 1) return Typed(schema, types[0], path);
  Json options = Json::array();
  for (const std::string& type : types) {
    OKV_ASSIGN_OR_RETURN(Json option, Typed(schema, type, path));
    options.push_back(std::move(option));
  }
  return Json{{"anyOf", std::move(options)}};
}

Result<std::vector<std::string>> Plainer::TypesOf(const Json& schema,
                                                  const std::string& path) const {
  const auto known = [](const Json& type) {
    return type.is_string() && std::find(kTypes.begin(), kTypes.end(),
                                         type.get_ref<const std::string&>()) != kTypes.end();
  };
  std::vector<std::string> types;
  if (const Json* type = Find(schema, "type")) {
    const bool several = type->is_array() && !type->empty();
    for (const Json& one : several ? *type : Json::array({*type})) {
      if (!known(one)) {
        return Wrong(path + "type", one, fmt::format("{}", fmt::join(kTypes, ", ")));
      }
      types.push_back(one);
    }
    return types;
  }
  // Without a type the words of one hold for its values alone: those are what comes out.
  const std::array<std::pair<const char*, const Names*>, 4> families = {
      {{"string", &kStringWords},
       {"number", &kNumberWords},
       {"array", &kArrayWords},
       {"object", &kObjectWords}}};
  for (const auto& [type, words] : families) {
    if (std::any_of(words->begin(), words->end(),
                    [&](const std::string& word) { return schema.contains(word); })) {
      types.push_back(type);
    }
  }
  if (types.size() <= 1) return types;
  return Unsupported(fmt::format("`{}type` is missing where the schema has words of {}s and {}s",
                                 path, types[0], types[1]));
}

Result<Json> Plainer::Reference(const Json& schema, const std::string& path) {
  OKV_RETURN_IF_ERROR(CheckAlone(schema, "$ref", "", path));
  const Json& ref = schema["$ref"];
  const std::string at = path + "$ref";
  if (!ref.is_string()) return Wrong(at, ref, "a text");
  const auto& text = ref.get_ref<const std::string&>();
  if (!text.starts_with("#") || (text.size() > 1 && text[1] != '/')) {
    return Unsupported(fmt::format("`{}` is {}, expected a place in the same schema: #/$defs/NAME",
                                   at, Printable(text)));
  }
  const Json* target = &root_;
  std::string place;
  for (size_t begin = 2; begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    std::string name;
    for (size_t i = begin; i < end; ++i) {
      unsigned byte = 0;
      if (text[i] == '~' && i + 1 < end && (text[i + 1] == '0' || text[i + 1] == '1')) {
        name += text[++i] == '0' ? '~' : '/';
      } else if (text[i] == '%' && i + 2 < end &&
                 std::sscanf(text.substr(i + 1, 2).c_str(), "%2x", &byte) == 1) {
        name += static_cast<char>(byte);
        i += 2;
      } else {
        name += text[i];
      }
    }
    const bool index = target->is_array() && !name.empty() && name.size() < 7 &&
                       name.find_first_not_of("0123456789") == std::string::npos &&
                       std::stoul(name) < target->size();
    if (index) {
      target = &(*target)[std::stoul(name)];
    } else if (target->is_object() && target->contains(name)) {
      target = Find(*target, name);
    } else {
      return InvalidArgument(
          fmt::format("`{}` is {}, which is not in the schema", at, Printable(text)));
    }
    place += (place.empty() ? "" : ".") + name;
    begin = end + 1;
  }
  const auto [found, fresh] = places_.emplace(target, wanted_.size());
  if (fresh) wanted_.emplace_back(target, Escaped(place, kPrintableBytes));
  return Json{{"$ref", fmt::format("#/$defs/r{}", found->second)}};
}

Status Plainer::CheckValue(const Json& value, const std::string& path) const {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kIntMax)) {
    return Unsupported(fmt::format("`{}` holds {}, expected integers up to {}", path,
                                   value.get<uint64_t>(), kIntMax));
  }
  if (value.is_structured()) {
    for (const Json& inner : value) OKV_RETURN_IF_ERROR(CheckValue(inner, path));
  }
  return {};
}

Result<Json> Plainer::Values(const Json& schema, const std::string& path) {
  const std::string word = schema.contains("const") ? "const" : "enum";
  OKV_RETURN_IF_ERROR(CheckAlone(schema, word, "type", path));
  const Json values = word == "const" ? Json::array({schema[word]}) : schema[word];
  if (!values.is_array() || values.empty()) return Wrong(path + word, values, "an array of values");
  n_values_ += values.size();
  if (n_values_ > limits_.values) {
    return ResourceExhausted(
        fmt::format("the schema has more than {} values in enums", limits_.values));
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<std::string> types, TypesOf(schema, path));
  Json fitting = Json::array();
  for (const Json& value : values) {
    OKV_RETURN_IF_ERROR(CheckValue(value, path + word));
    const bool fits =
        types.empty() || std::any_of(types.begin(), types.end(), [&](const std::string& type) {
          return (TypesOfValue(value) & TypeBit(type)) != 0;
        });
    if (fits) fitting.push_back(value);
  }
  if (fitting.empty()) {
    return InvalidArgument(fmt::format("`{}{}` has no value of the type beside it", path, word));
  }
  return Marked(Json{{"enum", std::move(fitting)}});
}

Result<Json> Plainer::Options(const Json& schema, const std::string& word,
                              const std::string& path) {
  OKV_RETURN_IF_ERROR(CheckAlone(schema, word, "", path));
  const Json& options = schema[word];
  if (!options.is_array() || options.empty())
    return Wrong(path + word, options, "an array of schemas");
  if (word == "allOf" && options.size() > 1) {
    return Unsupported(fmt::format("`{}allOf` of more than one schema is not supported", path));
  }
  Json plain = Json::array();
  for (size_t i = 0; i < options.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(Json option, Schema(options[i], fmt::format("{}{}[{}]", path, word, i)));
    plain.push_back(std::move(option));
  }
  if (plain.size() == 1) return std::move(plain[0]);
  if (word == "oneOf") one_ofs_.push_back({path + word, plain});
  return Json{{"anyOf", std::move(plain)}};
}

Result<Json> Plainer::Typed(const Json& schema, std::string_view type, const std::string& path) {
  if (type == "string") return StringOf(schema, path);
  if (type == "integer") return IntegerOf(schema, path);
  if (type == "number") return NumberOf(schema, path);
  if (type == "array") return ArrayOf(schema, path);
  if (type == "object") return ObjectOf(schema, path);
  return Json{{"type", std::string(type)}};
}

Result<int64_t> Plainer::Count(const Json& schema, std::string_view word, int64_t absent,
                               const std::string& path) const {
  const Json* value = Find(schema, word);
  if (value == nullptr) return absent;
  const double count = value->is_number() ? value->get<double>() : -1;
  if (count < 0 || count != std::floor(count)) {
    return Wrong(path + std::string(word), *value, "a whole number from 0 on");
  }
  if (count > static_cast<double>(limits_.count)) {
    return ResourceExhausted(
        fmt::format("`{}{}` is {}, expected at most {}", path, word, count, limits_.count));
  }
  return static_cast<int64_t>(count);
}

Status Plainer::Pattern(const Json& pattern, const std::string& path) {
  if (!pattern.is_string()) return Wrong(path, pattern, "a regular expression");
  const auto& text = pattern.get_ref<const std::string&>();
  const Status good = CheckPattern(text, limits_);
  if (!good.ok()) {
    return Status(good.code(),
                  fmt::format("`{}` is {}, which {}", path, Printable(text), good.message()));
  }
  if (std::find(patterns_.begin(), patterns_.end(), text) == patterns_.end()) {
    patterns_.push_back(text);
  }
  return {};
}

Result<Json> Plainer::StringOf(const Json& schema, const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const int64_t least, Count(schema, "minLength", 0, path));
  OKV_ASSIGN_OR_RETURN(const int64_t most, Count(schema, "maxLength", -1, path));
  const Json* pattern = Find(schema, "pattern");
  const Json* format = Find(schema, "format");
  if (most >= 0 && least > most) {
    return InvalidArgument(
        fmt::format("`{}minLength` is {}, expected at most maxLength, {}", path, least, most));
  }
  const bool bounded = least > 0 || most >= 0;
  if ((pattern != nullptr) + (format != nullptr) + bounded > 1) {
    return Unsupported(fmt::format("`{}{}` beside {} is not supported in schemas", path,
                                   bounded ? (most >= 0 ? "maxLength" : "minLength") : "format",
                                   pattern != nullptr ? "pattern" : "format"));
  }
  Json plain = {{"type", "string"}};
  if (pattern != nullptr) {
    OKV_RETURN_IF_ERROR(Pattern(*pattern, path + "pattern"));
    plain["pattern"] = *pattern;
  } else if (format != nullptr) {
    const auto found =
        format->is_string() ? kFormats.find(format->get_ref<const std::string&>()) : kFormats.end();
    if (found == kFormats.end()) {
      std::vector<std::string> names;
      for (const auto& [name, regex] : kFormats) names.push_back(name);
      return Unsupported(fmt::format("`{}format` is {}, expected {}", path, Shown(*format),
                                     fmt::join(names, ", ")));
    }
    plain["pattern"] = "^(" + found->second + ")$";
  } else if (most > 0 && most <= kShortString) {
    // As an automaton: its masks take a tenth of the time.
    plain["pattern"] = fmt::format("^[^\\x00-\\x1f]{{{},{}}}$", least, most);
  } else {
    if (least > 0) plain["minLength"] = least;
    if (most >= 0) plain["maxLength"] = most;
  }
  return plain;
}

Result<std::optional<double>> Plainer::Bound(const Json& schema, std::string_view word,
                                             const std::string& path) const {
  const Json* value = Find(schema, word);
  if (value == nullptr) return std::optional<double>();
  if (!value->is_number()) return Wrong(path + std::string(word), *value, "a number");
  return std::optional<double>(value->get<double>());
}

Result<Json> Plainer::IntegerOf(const Json& schema, const std::string& path) {
  std::optional<int64_t> low, high;
  const auto at_least = [&](int64_t n) { low = std::max(low.value_or(n), n); };
  const auto at_most = [&](int64_t n) { high = std::min(high.value_or(n), n); };
  for (const char* word : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
    OKV_ASSIGN_OR_RETURN(const std::optional<double> bound, Bound(schema, word, path));
    if (!bound) continue;
    const bool lower = std::string_view(word).ends_with("inimum");
    const bool open = word[0] == 'e';
    const Json& value = schema[word];
    int64_t n = 0;
    // 2^63 as a double: from there on int64 cannot follow.
    if (std::abs(*bound) >= 0x1p63) {
      n = *bound > 0 ? kIntMax : kIntMin;
      if ((n > 0) == lower) {
        return Unsupported(fmt::format("`{}{}` is {}, which leaves only integers beyond 64 bits",
                                       path, word, Shown(value)));
      }
    } else {
      n = value.is_number_integer()
              ? value.get<int64_t>()
              : static_cast<int64_t>(lower ? std::ceil(*bound) : std::floor(*bound));
      const bool whole = value.is_number_integer() || *bound == std::floor(*bound);
      if (open && whole) {
        if (n == (lower ? kIntMax : kIntMin)) {
          return InvalidArgument(fmt::format("`{}{}` leaves no integer", path, word));
        }
        n += lower ? 1 : -1;
      }
    }
    lower ? at_least(n) : at_most(n);
  }
  if (const Json* format = Find(schema, "format")) {
    if (*format == Json("int32")) {
      at_least(std::numeric_limits<int32_t>::min());
      at_most(std::numeric_limits<int32_t>::max());
    } else if (*format == Json("int64")) {
      at_least(kIntMin);
      at_most(kIntMax);
    } else {
      return Unsupported(
          fmt::format("`{}format` is {}, expected int32 or int64", path, Shown(*format)));
    }
  }
  if (low && high && *low > *high) {
    return InvalidArgument(fmt::format("`{}minimum` and its like leave no integer", path));
  }
  Json plain = {{"type", "integer"}};
  if (low) plain["minimum"] = *low;
  if (high) plain["maximum"] = *high;
  OKV_ASSIGN_OR_RETURN(const std::optional<double> multiple, Bound(schema, "multipleOf", path));
  if (!multiple || *multiple == 1) return plain;
  if (*multiple < 1 || *multiple > kMostMultiple || *multiple != std::floor(*multiple)) {
    return Unsupported(fmt::format("`{}multipleOf` is {}, expected a whole number from 1 to {}",
                                   path, *multiple, kMostMultiple));
  }
  if (low || high) {
    // The width as an unsigned number, which cannot overflow.
    if (!low || !high ||
        static_cast<uint64_t>(*high) - static_cast<uint64_t>(*low) >
            static_cast<uint64_t>(kMostMultiples)) {
      return Unsupported(
          fmt::format("`{}multipleOf` beside a minimum or a maximum is not supported, unless both "
                      "are there and "
                      "at most {} apart",
                      path, kMostMultiples));
    }
    const auto step = static_cast<int64_t>(*multiple);
    Json values = Json::array();
    for (int64_t n = *low;; ++n) {
      if (n % step == 0) values.push_back(n);
      if (n == *high) break;
    }
    if (values.empty()) {
      return InvalidArgument(fmt::format("`{}multipleOf` has no multiple in the range", path));
    }
    return Json{{"enum", std::move(values)}};
  }
  plain["multipleOf"] = static_cast<int64_t>(*multiple);
  return plain;
}

Result<Json> Plainer::NumberOf(const Json& schema, const std::string& path) {
  if (const Json* format = Find(schema, "format")) {
    if (*format != Json("float") && *format != Json("double")) {
      return Unsupported(
          fmt::format("`{}format` is {}, expected float or double", path, Shown(*format)));
    }
  }
  OKV_ASSIGN_OR_RETURN(const std::optional<double> multiple, Bound(schema, "multipleOf", path));
  if (multiple) {
    return Unsupported(fmt::format("`{}multipleOf` is supported for integers alone", path));
  }
  Json plain = {{"type", "number"}};
  for (const char* word : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
    OKV_ASSIGN_OR_RETURN(const std::optional<double> bound, Bound(schema, word, path));
    if (!bound) continue;
    // Bounds become digits: 15 of them, of which 6 after the point.
    if (std::abs(*bound) > 1e9 || *bound * 1e6 != std::nearbyint(*bound * 1e6)) {
      const double rounded = std::nearbyint(*bound * 1e6) / 1e6;
      if (std::abs(*bound) > 1e9 || rounded != *bound) {
        return Unsupported(fmt::format(
            "`{}{}` is {}, expected a number up to 1e9 with at most 6 digits after the point", path,
            word, *bound));
      }
    }
    plain[word] = *bound;
  }
  const auto get = [&](const char* word, double absent) {
    const Json* bound = Find(plain, word);
    return bound == nullptr ? absent : bound->get<double>();
  };
  constexpr double kFar = 1e300;
  const double low = get("minimum", -kFar), high = get("maximum", kFar);
  const double above = get("exclusiveMinimum", -kFar), below = get("exclusiveMaximum", kFar);
  if (low > high || low >= below || above >= high || above >= below) {
    return InvalidArgument(fmt::format("`{}minimum` and its like leave no number", path));
  }
  return plain;
}

Result<Json> Plainer::ArrayOf(const Json& schema, const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const int64_t least, Count(schema, "minItems", 0, path));
  OKV_ASSIGN_OR_RETURN(const int64_t most, Count(schema, "maxItems", -1, path));
  if (most >= 0 && least > most) {
    return InvalidArgument(
        fmt::format("`{}minItems` is {}, expected at most maxItems, {}", path, least, most));
  }
  const Json* items = Find(schema, "items");
  const Json* prefix = Find(schema, "prefixItems");
  if (prefix != nullptr && !prefix->is_array()) {
    return Wrong(path + "prefixItems", *prefix, "an array of schemas");
  }
  if (items != nullptr && items->is_array()) {
    return Unsupported(
        fmt::format("`{}items` is an array, expected a schema, or prefixItems", path));
  }
  Json plain = {{"type", "array"}};
  Json first = Json::array();
  const size_t n_first = prefix == nullptr ? 0 : prefix->size();
  for (size_t i = 0; i < n_first; ++i) {
    if (most >= 0 && std::ssize(first) == most) break;
    OKV_ASSIGN_OR_RETURN(Json item,
                         Schema((*prefix)[i], fmt::format("{}prefixItems[{}]", path, i)));
    first.push_back(std::move(item));
  }
  const int64_t n_named = std::ssize(first);
  const bool closed = items != nullptr && *items == Json(false);
  if (closed && least > n_named) {
    return InvalidArgument(
        fmt::format("`{}minItems` is {}, expected at most {}, the items that there "
                    "can be",
                    path, least, n_named));
  }
  if (!first.empty()) plain["prefixItems"] = std::move(first);
  if (closed || (items == nullptr && n_named > 0 && least <= n_named) || most == n_named) {
    plain["items"] = false;
  } else {
    OKV_ASSIGN_OR_RETURN(Json item, Schema(items == nullptr ? Json(true) : *items, path + "items"));
    plain["items"] = std::move(item);
    if (most >= 0) plain["maxItems"] = most;
  }
  if (least > 0) plain["minItems"] = least;
  return plain;
}

Result<Json> Plainer::ObjectOf(const Json& schema, const std::string& path) {
  const Json* properties = Find(schema, "properties");
  const Json* required = Find(schema, "required");
  const Json* additional = Find(schema, "additionalProperties");
  if (properties != nullptr && !properties->is_object()) {
    return Wrong(path + "properties", *properties, "an object of schemas");
  }
  if (required != nullptr &&
      (!required->is_array() || !std::all_of(required->begin(), required->end(),
                                             [](const Json& r) { return r.is_string(); }))) {
    return Wrong(path + "required", *required, "an array of names");
  }
  const size_t n_required = required == nullptr ? 0 : required->size();
  if ((properties == nullptr || properties->empty()) && n_required == 0) {
    if (properties == nullptr || additional != nullptr) return MapOf(schema, path);
  }
  for (const char* word :
       {"patternProperties", "propertyNames", "minProperties", "maxProperties"}) {
    if (!schema.contains(word)) continue;
    return Unsupported(
        fmt::format("`{}{}` beside properties is not supported in schemas", path, word));
  }
  const bool open = additional != nullptr && *additional != Json(false);
  Json named = Json::object();
  bool plain_names = true;
  if (properties != nullptr) {
    if (properties->size() + n_required > limits_.properties) {
      return ResourceExhausted(fmt::format("`{}properties` has {}, expected at most {}", path,
                                           properties->size(), limits_.properties));
    }
    for (const auto& [name, property] : properties->items()) {
      OKV_ASSIGN_OR_RETURN(Json value,
                           Schema(property, path + "properties." + Escaped(name, kPrintableBytes)));
      plain_names = plain_names && IsPlainName(name);
      named.push_back({name, std::move(value)});
    }
  }
  Json must = Json::array();
  for (size_t i = 0; i < n_required; ++i) {
    const auto& name = (*required)[i].get_ref<const std::string&>();
    if (std::find(must.begin(), must.end(), (*required)[i]) != must.end()) continue;
    must.push_back(name);
    if (named.contains(name)) continue;
    // It is one of the additional properties.
    if (additional != nullptr && !open) {
      return InvalidArgument(fmt::format("`{}required` has {}, which is none of the properties",
                                         path, Printable(name)));
    }
    OKV_ASSIGN_OR_RETURN(Json value, Schema(additional == nullptr ? Json(true) : *additional,
                                            path + "additionalProperties"));
    plain_names = plain_names && IsPlainName(name);
    named.push_back({name, std::move(value)});
  }
  Json plain = {{"type", "object"}, {"properties", std::move(named)}};
  if (!must.empty()) plain["required"] = std::move(must);
  plain["additionalProperties"] = false;
  if (open) {
    if (!plain_names) {
      return Unsupported(
          fmt::format("`{}additionalProperties` beside properties whose names are not plain ASCII "
                      "is not supported",
                      path));
    }
    OKV_ASSIGN_OR_RETURN(plain["additionalProperties"],
                         Schema(*additional, path + "additionalProperties"));
  }
  return Marked(std::move(plain));
}

// An object of which no property is named.
Result<Json> Plainer::MapOf(const Json& schema, const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const int64_t least, Count(schema, "minProperties", 0, path));
  OKV_ASSIGN_OR_RETURN(const int64_t most, Count(schema, "maxProperties", -1, path));
  const Json* additional = Find(schema, "additionalProperties");
  const Json* by_pattern = Find(schema, "patternProperties");
  const Json* names = Find(schema, "propertyNames");
  const bool closed = additional != nullptr && *additional == Json(false);
  if (most >= 0 && least > most) {
    return InvalidArgument(fmt::format(
        "`{}minProperties` is {}, expected at most maxProperties, {}", path, least, most));
  }
  // The same key may come twice, so that two members need not be two properties.
  if (least > 1) {
    return Unsupported(fmt::format("`{}minProperties` is {}, expected 0 or 1", path, least));
  }
  Json plain = {{"type", "object"}};
  if (by_pattern != nullptr) {
    const bool alone = names == nullptr && (additional == nullptr || closed);
    if (!alone || !by_pattern->is_object() || by_pattern->size() != 1) {
      return Unsupported(
          fmt::format("`{}patternProperties` is supported with one pattern, and without "
                      "propertyNames and additionalProperties",
                      path));
    }
    const std::string& pattern = by_pattern->begin().key();
    OKV_RETURN_IF_ERROR(Pattern(pattern, path + "patternProperties"));
    OKV_ASSIGN_OR_RETURN(Json value, Schema(*by_pattern->begin(), path + "patternProperties"));
    plain["patternProperties"][pattern] = std::move(value);
    plain["additionalProperties"] = false;
  } else if (closed) {
    if (least > 0) return InvalidArgument(fmt::format("`{}minProperties` fits no object", path));
    return Json{
        {"type", "object"}, {"properties", Json::object()}, {"additionalProperties", false}};
  } else {
    if (names != nullptr) {
      OKV_ASSIGN_OR_RETURN(Json name, Schema(*names, path + "propertyNames"));
      const Json* type = Find(name, "type");
      const Json* values = Find(name, "enum");
      const bool texts =
          values != nullptr &&
          std::all_of(values->begin(), values->end(), [](const Json& v) { return v.is_string(); });
      if ((type == nullptr || *type != Json("string")) && !texts) {
        return Unsupported(
            fmt::format("`{}propertyNames` is supported as a schema of strings", path));
      }
      plain["propertyNames"] = std::move(name);
    }
    if (additional != nullptr || names != nullptr || least > 0 || most >= 0) {
      OKV_ASSIGN_OR_RETURN(
          plain["additionalProperties"],
          Schema(additional == nullptr ? Json(true) : *additional, path + "additionalProperties"));
    }
  }
  if (least > 0) plain["minProperties"] = least;
  if (most >= 0) plain["maxProperties"] = most;
  if (plain.size() == 1) return plain;  // any object, which xgrammar knows by this form
  return Marked(std::move(plain));
}

}  // namespace

Result<PlainSchema> MakePlain(const Json& schema, const SchemaLimits& limits) {
  return Plainer(schema, limits).Run();
}

Status CheckSchema(const Json& schema, const SchemaLimits& limits) {
  return MakePlain(schema, limits).status();
}

}  // namespace omnikv::server
