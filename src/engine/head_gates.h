// Gates of KV heads for policy `duo`, measured on texts: how much each head attends to far tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/measured_texts.h"
#include "policy/sinks_and_recent.h"

namespace omnikv {

struct HeadGatesOptions {
  SinksAndRecent near;  // tokens that a streaming head reads; the others are far
  int32_t window = 32;  // the last rows of each text, whose attention is measured
};

// Ok where texts can be measured so; what is found before weights load. kInvalidArgument for a text
// that is too long, or whose last token has no far ones, and for a window of more rows than a step
// has. kUnsupported for a model without global attention.
Status CheckHeadGates(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                      const HeadGatesOptions& options);

// A number from 0 to 1 for each KV head of each global-attention layer, [n_layers * n_kv_heads]:
// the share of a softmax that lies on far tokens, the highest of the text's rows and of the query
// heads that share the KV head, the mean of the texts (docs/decisions/052). Texts that begin as the
// one before are computed from where they part. As CheckHeadGates. REQUIRES a text; needs a free
// session.
Result<std::vector<double>> MeasureHeadGates(EngineCore& core,
                                             std::span<const std::vector<int32_t>> texts,
                                             const HeadGatesOptions& options,
                                             const MeasureProgress& progress = {});

}  // namespace omnikv
