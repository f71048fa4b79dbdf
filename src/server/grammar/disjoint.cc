#include "server/grammar/disjoint.h"

#include <algorithm>
#include <string>

namespace omnikv::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 12;  // of $ref within one another, where overlaps are looked for
constexpr unsigned kAllTypes = 0xff;

size_t DefinitionOf(const Json& schema) {
  constexpr size_t kPrefix = 9;  // "#/$defs/r"
  return std::stoul(schema["$ref"].get_ref<const std::string&>().substr(kPrefix));
}

unsigned TypesOfSchema(const Json& schema) {
  if (const auto type = schema.find("type"); type != schema.end()) {
    return TypeBit(type->get_ref<const std::string&>());
  }
  if (const auto values = schema.find("enum"); values != schema.end()) {
    unsigned types = 0;
    for (const Json& value : *values) types |= TypesOfValue(value);
    return types;
  }
  return kAllTypes;
}

// Finds that no value fits two schemas, within so many comparisons.
class Comparison {
 public:
  explicit Comparison(const Definitions& definitions) : definitions_(definitions) {}

  bool Apart(const Json& a, const Json& b, int depth);

 private:
  bool ObjectsApart(const Json& a, const Json& b, int depth);

  const Definitions& definitions_;
  int64_t left_ = 1'000'000;
};

// Objects are the same in any order of their members.
bool SameValue(const Json& a, const Json& b) {
  return a.is_structured() ? nlohmann::json(a) == nlohmann::json(b) : a == b;
}

// Whether some property that one of them requires has different values in both.
bool Comparison::ObjectsApart(const Json& a, const Json& b, int depth) {
  const auto mine = a.find("properties");
  const auto others = b.find("properties");
  if (mine == a.end() || others == b.end()) return false;
  for (const Json* object : {&a, &b}) {
    const auto required = object->find("required");
    if (required == object->end()) continue;
    for (const Json& name : *required) {
      const auto& key = name.get_ref<const std::string&>();
      const auto left = mine->find(key);
      const auto right = others->find(key);
      if (left != mine->end() && right != others->end() && Apart(*left, *right, depth - 1)) {
        return true;
      }
    }
  }
  return false;
}

bool Comparison::Apart(const Json& a, const Json& b, int depth) {
  if (depth == 0 || --left_ < 0) return false;
  if (a.contains("$ref")) return Apart(definitions_[DefinitionOf(a)], b, depth - 1);
  if (const auto options = a.find("anyOf"); options != a.end()) {
    return std::all_of(options->begin(), options->end(),
                       [&](const Json& option) { return Apart(option, b, depth - 1); });
  }
  if (b.contains("$ref") || b.contains("anyOf")) return Apart(b, a, depth - 1);
  if ((TypesOfSchema(a) & TypesOfSchema(b)) == 0) return true;
  const auto mine = a.find("enum");
  const auto others = b.find("enum");
  if (mine != a.end() && others != b.end()) {
    left_ -= static_cast<int64_t>(mine->size() * others->size());
    return left_ >= 0 && std::none_of(mine->begin(), mine->end(), [&](const Json& value) {
             return std::any_of(others->begin(), others->end(),
                                [&](const Json& other) { return SameValue(value, other); });
           });
  }
  return ObjectsApart(a, b, depth);
}

// Marks what `schema` may be by $ref and anyOf alone.
void Follow(const Json& schema, const Definitions& definitions, std::vector<bool>* seen) {
  if (schema.contains("$ref")) {
    const size_t to = DefinitionOf(schema);
    if ((*seen)[to]) return;
    (*seen)[to] = true;
    Follow(definitions[to], definitions, seen);
  } else if (const auto options = schema.find("anyOf"); options != schema.end()) {
    for (const Json& option : *options) Follow(option, definitions, seen);
  }
}

bool Ends(const Json& schema, const std::vector<bool>& ends) {
  if (schema.contains("$ref")) return ends[DefinitionOf(schema)];
  if (const auto options = schema.find("anyOf"); options != schema.end()) {
    return std::any_of(options->begin(), options->end(),
                       [&](const Json& option) { return Ends(option, ends); });
  }
  const auto required = schema.find("required");
  if (required != schema.end() &&
      !std::all_of(required->begin(), required->end(), [&](const Json& r) {
        return Ends(schema["properties"][r.get_ref<const std::string&>()], ends);
      })) {
    return false;
  }
  if (schema.contains("minProperties")) {
    for (const char* word : {"additionalProperties", "patternProperties"}) {
      const auto values = schema.find(word);
      if (values == schema.end() || !values->is_object()) continue;
      const bool by_pattern = word[0] == 'p';
      if (!Ends(by_pattern ? *values->begin() : *values, ends)) return false;
    }
  }
  const auto least = schema.find("minItems");
  if (least == schema.end()) return true;
  auto left = least->get<size_t>();
  if (const auto prefix = schema.find("prefixItems"); prefix != schema.end()) {
    for (const Json& item : *prefix) {
      if (left == 0) break;
      if (!Ends(item, ends)) return false;
      --left;
    }
  }
  return left == 0 || Ends(schema["items"], ends);
}

}  // namespace

unsigned TypeBit(std::string_view type) {
  if (type == "null") return 1;
  if (type == "boolean") return 2;
  if (type == "object") return 4;
  if (type == "array") return 8;
  if (type == "string") return 16;
  if (type == "integer") return 32;
  return 32 | 64;  // number
}

unsigned TypesOfValue(const Json& value) {
  if (value.is_null()) return TypeBit("null");
  if (value.is_boolean()) return TypeBit("boolean");
  if (value.is_object()) return TypeBit("object");
  if (value.is_array()) return TypeBit("array");
  if (value.is_string()) return TypeBit("string");
  if (value.is_number_integer()) return TypeBit("integer");
  const double number = value.get<double>();
  return number == static_cast<double>(static_cast<int64_t>(number)) ? 32U : 64U;
}

std::optional<std::pair<size_t, size_t>> OverlapOf(const Json& options,
                                                   const Definitions& definitions) {
  Comparison comparison(definitions);
  for (size_t i = 0; i < options.size(); ++i) {
    for (size_t j = i + 1; j < options.size(); ++j) {
      if (!comparison.Apart(options[i], options[j], kMaxDepth)) return std::pair(i, j);
    }
  }
  return std::nullopt;
}

bool LeadsToItself(size_t definition, const Definitions& definitions) {
  std::vector<bool> seen(definitions.size());
  Follow(definitions[definition], definitions, &seen);
  return seen[definition];
}

std::vector<bool> WhichEnd(const Definitions& definitions) {
  std::vector<bool> ends(definitions.size());
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < definitions.size(); ++i) {
      if (ends[i] || !Ends(definitions[i], ends)) continue;
      ends[i] = changed = true;
    }
  }
  return ends;
}

}  // namespace omnikv::server
