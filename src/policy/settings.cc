#include "policy/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/check.h"
#include "base/numbers.h"

namespace omnikv {
namespace {

std::optional<double> ToNumber(std::string_view text) {
  if (const auto whole = ParseWhole<int64_t>(text)) return static_cast<double>(*whole);
  return ParseReal(text);
}

bool InRange(const SettingSpec& spec, std::string_view text, bool whole) {
  const auto value = ToNumber(text);
  return value && *value >= spec.min && *value <= spec.max &&
         (!whole || *value == std::floor(*value));
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string Range(const SettingSpec& spec) {
  return spec.max >= 1e15 ? fmt::format("at least {}", spec.min)
                          : fmt::format("from {} to {}", spec.min, spec.max);
}

// What a value of `spec` must be, when `value` is not; empty when it is.
std::string Complaint(const SettingSpec& spec, const std::string& value) {
  if (spec.allow_auto && value == "auto") return "";
  const bool is_choice =
      std::find(spec.choices.begin(), spec.choices.end(), value) != spec.choices.end();
  switch (spec.type) {
    case SettingType::kInt:
      return is_choice || InRange(spec, value, true)
                 ? ""
                 : fmt::format("a whole number {}{}{}", Range(spec),
                               spec.choices.empty() ? "" : ", or ",
                               fmt::join(spec.choices, " or "));
    case SettingType::kFloat:
      return InRange(spec, value, false) ? "" : "a number " + Range(spec);
    case SettingType::kBool:
      return value == "0" || value == "1" ? "" : "0 or 1";
    case SettingType::kChoice:
      return is_choice ? "" : fmt::format("one of {}", fmt::join(spec.choices, ", "));
    case SettingType::kFile:
      return !value.empty() ? "" : "the path of a file";
    case SettingType::kIntList: {
      double last = -std::numeric_limits<double>::infinity();
      for (std::string_view part : Split(value, ',')) {
        if (!InRange(spec, part, true) || *ToNumber(part) <= last) {
          return "ascending whole numbers " + Range(spec) + ", separated by commas";
        }
        last = *ToNumber(part);
      }
      return "";
    }
  }
  return "";
}

}  // namespace

Result<PolicySettings> PolicySettings::Parse(std::string_view policy,
                                             const std::vector<SettingSpec>& specs,
                                             const SettingList& given) {
  PolicySettings settings;
  for (const SettingSpec& spec : specs) settings.values_[spec.key] = spec.default_value;
  for (const auto& setting : given) {  // named, for lambdas: clang 14 captures no binding
    const std::string& key = setting.first;
    const std::string& value = setting.second;
    const auto spec = std::find_if(specs.begin(), specs.end(),
                                   [&](const SettingSpec& s) { return s.key == key; });
    if (spec == specs.end()) {
      std::vector<std::string> keys;
      for (const SettingSpec& s : specs) keys.push_back(s.key);
      return InvalidArgument(
          fmt::format("policy {} has no setting '{}'; it has {}", policy, key,
                      keys.empty() ? "none" : fmt::format("{}", fmt::join(keys, ", "))));
    }
    const std::string expected = Complaint(*spec, value);
    if (!expected.empty()) {
      return InvalidArgument(fmt::format("policy {}: {} is '{}', expected {}{}", policy, key, value,
                                         expected, spec->allow_auto ? ", or auto" : ""));
    }
    settings.values_[key] = value;
  }
  return settings;
}

const std::string& PolicySettings::Text(const std::string& key) const {
  const auto it = values_.find(key);
  OKV_CHECK(it != values_.end(), "no setting {}", key);
  return it->second;
}

int64_t PolicySettings::Int(const std::string& key) const {
  return static_cast<int64_t>(Float(key));
}

double PolicySettings::Float(const std::string& key) const {
  const auto value = ToNumber(Text(key));
  OKV_CHECK(value.has_value(), "{} is '{}'", key, Text(key));
  return *value;
}

std::vector<int32_t> PolicySettings::IntList(const std::string& key) const {
  std::vector<int32_t> list;
  for (std::string_view part : Split(Text(key), ',')) {
    list.push_back(static_cast<int32_t>(*ToNumber(part)));
  }
  return list;
}

std::string PolicySettings::ToString() const {
  std::vector<std::string> parts;
  for (const auto& [key, value] : values_) parts.push_back(key + "=" + value);
  return fmt::format("{}", fmt::join(parts, " "));
}

}  // namespace omnikv
