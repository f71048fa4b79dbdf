// How many tokens a sparse layer of policy omnikv reads, and how many are kept near it.
#pragma once

#include <cstdint>

#include "backend/ops.h"
#include "omnikv/status.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/policy.h"

namespace omnikv {

struct OmnikvBudget {
  int32_t tokens = 0;    // with a share, the most it comes to
  double share = 0;      // of the context; 0: `tokens`
  int32_t capacity = 0;  // tokens that a choice has room for
  int64_t cache = 0;     // tokens of a working set; 0: as many as there is room for

  // From `budget` or `mem`, and `cache`. kInvalidArgument names what this model cannot have.
  static Result<OmnikvBudget> Resolve(const PolicyContext& context, const FilterLayers& layers,
                                      const PolicySettings& settings);
  int64_t At(int64_t length) const { return BudgetAt(tokens, share, length); }
};

}  // namespace omnikv
