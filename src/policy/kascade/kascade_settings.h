// What the policy says of itself: facts, settings, and those that tests run.
#pragma once

#include <vector>

#include "policy/policy.h"

namespace omnikv {

inline constexpr const char* kTableName = "kascade.tsv";  // PathBesideModel

PolicyFacts KascadeFacts();
std::vector<SettingSpec> KascadeSettings();
// PolicyInfo::covering, test_settings.
std::vector<SettingList> KascadeCovering(int64_t length);
std::vector<SettingList> KascadeTestSettings();

}  // namespace omnikv
