// Policies that choose once after a prompt, by the keys alone.
#pragma once

#include <string>

#include "policy/policy.h"

namespace omnikv {

// Each KV head keeps the `budget` keys with the highest scores of `kind`. `facts`: source, chooses
// and loses.
PolicyInfo KeyChoicePolicy(std::string name, std::string summary, PolicyFacts facts,
                           KeyScoreKind kind);

}  // namespace omnikv
