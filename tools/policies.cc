#include "policies.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "policy/policy.h"
#include "report.h"

namespace omnikv::tools {
namespace {

// "0 to 1", "at least 1", "last, uniform or exp": what a setting may be.
std::string Values(const SettingSpec& spec) {
  std::string values;
  switch (spec.type) {
    case SettingType::kBool:
      values = "0 or 1";
      break;
    case SettingType::kFile:
      values = "the path of a file";
      break;
    case SettingType::kChoice:
      values = fmt::format("{}", fmt::join(spec.choices, ", "));
      break;
    case SettingType::kInt:
    case SettingType::kFloat:
    case SettingType::kIntList:
      values = spec.max >= 1e15 ? fmt::format("at least {}", spec.min)
                                : fmt::format("{} to {}", spec.min, spec.max);
      if (spec.type == SettingType::kIntList) values = "a list, " + values;
  }
  return spec.allow_auto ? values + ", or auto" : values;
}

}  // namespace

Status ShowPolicies(const PolicyFlags& flags, bool json) {
  OKV_RETURN_IF_ERROR(ToPolicyOptions(flags).status());
  auto list = nlohmann::ordered_json::array();
  for (const PolicyInfo& info : AllPolicies()) {
    if (flags.policy != "auto" && flags.policy != info.name) continue;
    auto settings = nlohmann::ordered_json::array();
    for (const SettingSpec& spec : info.settings) {
      nlohmann::ordered_json setting = {
          {"key", spec.key}, {"values", Values(spec)}, {"help", spec.help}};
      if (!spec.default_value.empty()) setting["default"] = spec.default_value;
      settings.push_back(setting);
    }
    list.push_back({{"name", info.name}, {"summary", info.summary}, {"settings", settings}});
  }
  if (json) {
    fmt::print("{}\n", Dump({{"policies", list}}));
    return {};
  }
  for (const auto& policy : list) {
    fmt::print("--policy {}: {}\n", policy["name"].get<std::string>(),
               policy["summary"].get<std::string>());
    for (const auto& setting : policy["settings"]) {
      fmt::print("  --set {}={}\n      {} ({})\n", setting["key"].get<std::string>(),
                 setting.value("default", "(must be given)"), setting["help"].get<std::string>(),
                 setting["values"].get<std::string>());
    }
    fmt::print("\n");
  }
  return {};
}

}  // namespace omnikv::tools
