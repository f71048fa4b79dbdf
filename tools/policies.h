// omnikv info --policies: what each policy is and what its settings mean.
#pragma once

#include "flags.h"
#include "omnikv/status.h"

namespace omnikv::tools {

// On stdout: all policies, or the one that is named, with the settings given.
Status ShowPolicies(const PolicyFlags& flags, bool json);

}  // namespace omnikv::tools
