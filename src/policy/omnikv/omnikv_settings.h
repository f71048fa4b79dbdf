// The settings of policy omnikv, with their defaults and bounds.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "policy/policy.h"

namespace omnikv {

PolicyFacts OmnikvFacts();
std::vector<SettingSpec> OmnikvSettings();

// PolicyInfo::covering and PolicyInfo::test_settings.
std::vector<SettingList> OmnikvCovering(int64_t length);
std::vector<SettingList> OmnikvTestSettings();

// Fills in what was left to `auto`, from the model's preset.
void ResolveOmnikvAuto(std::string_view model_name, int32_t n_layers, PolicySettings& settings);

}  // namespace omnikv
