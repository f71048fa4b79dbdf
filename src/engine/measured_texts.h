// What measures of a model on texts share: a session under a policy of the engine's own, which sees
// the last rows of each text in one step.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/core.h"

namespace omnikv {

// How much of the texts is done, 0 to 1.
using MeasureProgress = std::function<void(double done)>;

// Ok where texts can be measured by their last `window` rows; what is found before weights load.
// kInvalidArgument for a text that is too long, or that has no more than the `least` tokens that
// `why` says ("that a streaming head reads"), and for a window of more rows than a step has.
// kUnsupported for a model without global attention.
Status CheckMeasuredTexts(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                          int64_t window, int64_t least, const std::string& why);

// Computes each text under the policy that `make` makes, and then calls `visit` with it. Texts that
// begin as the one before are computed from where they part. REQUIRES a text, and that
// CheckMeasuredTexts was ok; needs a free session.
Status MeasureTexts(EngineCore& core, std::span<const std::vector<int32_t>> texts,
                    const std::function<std::unique_ptr<Policy>()>& make,
                    const std::function<void(const Policy& policy)>& visit,
                    const MeasureProgress& progress);

}  // namespace omnikv
