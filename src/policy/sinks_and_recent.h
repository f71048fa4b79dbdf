// What a streaming head of DuoAttention reads: the first tokens (sinks) and the last ones.
#pragma once

#include <cstdint>

#include "backend/attn_plan.h"

namespace omnikv {

// Tokens; the published numbers.
struct SinksAndRecent {
  int64_t sinks = 64;
  int64_t recent = 256;  // a row's own token included

  AttnPlan Plan() const {
    PlanSegment first;
    first.end = static_cast<int32_t>(sinks);
    PlanSegment last;
    last.begin = static_cast<int32_t>(sinks);
    last.window = static_cast<int32_t>(recent);
    AttnPlan plan;
    if (sinks > 0) plan.Add(first);
    plan.Add(last);
    return plan;
  }
};

}  // namespace omnikv
