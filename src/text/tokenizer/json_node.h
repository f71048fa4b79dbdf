// A value in a JSON document that knows its path, so that every complaint names the field.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/printable.h"
#include "omnikv/status.h"

namespace omnikv::tok {

class JsonNode {
 public:
  JsonNode(const nlohmann::json* value, std::string path) : value_(value), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  const nlohmann::json& value() const { return *value_; }
  bool IsNull() const { return value_->is_null(); }  // an absent field too

  // A field of an object; null where there is none (or no object).
  JsonNode Field(const std::string& key) const {
    static const nlohmann::json kNull;
    const auto it = value_->is_object() ? value_->find(key) : value_->end();
    const std::string shown = Escaped(key, kPrintableBytes);
    return {it == value_->end() ? &kNull : &*it, path_.empty() ? shown : path_ + "." + shown};
  }
  // An element. REQUIRES an array and i < size.
  JsonNode Element(size_t i) const { return {&(*value_)[i], fmt::format("{}[{}]", path_, i)}; }

  Status Wrong(std::string_view expected) const {
    return Corrupt(fmt::format("{} is {}, expected {}", path_, Shown(), expected));
  }

  Result<std::string> String() const {
    if (!value_->is_string()) return Wrong("a string");
    return value_->get<std::string>();
  }
  Result<bool> BoolOr(bool fallback) const {
    if (IsNull()) return fallback;
    if (!value_->is_boolean()) return Wrong("true or false");
    return value_->get<bool>();
  }
  // An integer in [0, limit).
  Result<int64_t> Integer(int64_t limit) const {
    if (!value_->is_number_integer() || value_->get<double>() < 0 ||
        value_->get<double>() >= static_cast<double>(limit)) {
      return Wrong(fmt::format("a number from 0 to {}", limit - 1));
    }
    return value_->get<int64_t>();
  }
  Result<size_t> ArraySize() const {
    if (!value_->is_array()) return Wrong("an array");
    return value_->size();
  }

  // The value as a message shows it.
  std::string Shown() const {
    if (value_->is_object()) return "an object";
    if (value_->is_array()) return fmt::format("an array of {}", value_->size());
    if (value_->is_string()) return Printable(value_->get_ref<const std::string&>());
    return value_->dump();
  }

 private:
  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace omnikv::tok
