// Settings of policies as tests run them.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "policy/policy.h"
#include "test_data.h"

namespace omnikv {

inline bool HasSetting(const PolicyInfo& info, std::string_view key) {
  return std::any_of(info.settings.begin(), info.settings.end(),
                     [&](const SettingSpec& spec) { return spec.key == key; });
}

// The policy's defaults, with what they read far below 100 tokens where a setting says it.
inline SettingList SmallDefaults(const PolicyInfo& info) {
  if (HasSetting(info, "block")) {
    return {{"budget", "40"}, {"block", "8"}, {"sinks", "8"}, {"recent", "8"}};
  }
  if (HasSetting(info, "stream_recent")) {
    return {{"budget", "40"}, {"stream_sinks", "8"}, {"stream_recent", "32"}};
  }
  if (HasSetting(info, "budget")) return {{"budget", "40"}};
  if (HasSetting(info, "least")) return {{"least", "40"}};
  if (HasSetting(info, "recent")) return {{"sinks", "8"}, {"recent", "32"}};
  return {};
}

// The first of those that tests run the policy with; none where it has none.
inline SettingList FirstSettings(const PolicyInfo& info) {
  return info.test_settings.empty() ? SettingList{} : info.test_settings.front();
}

// `given`, and for each file that the policy wants and that is not given one for a model of so many
// layers and KV heads. REQUIRES one of that shape in the folder of tests/golden with the setting's
// name.
inline SettingList WithFiles(const PolicyInfo& info, SettingList given, int32_t n_layers,
                             int32_t n_kv_heads) {
  for (const SettingSpec& spec : info.settings) {
    const bool has = std::any_of(given.begin(), given.end(),
                                 [&](const auto& setting) { return setting.first == spec.key; });
    if (spec.type != SettingType::kFile || has) continue;
    given.emplace_back(spec.key,
                       TestData("tests/golden/" + spec.key + "/" + std::to_string(n_layers) + "x" +
                                std::to_string(n_kv_heads) + ".tsv"));
  }
  return given;
}

}  // namespace omnikv
