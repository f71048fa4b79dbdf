// How well the index of `omnikv dense=indexed` finds the tokens of the highest exact scores,
// measured on texts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/measured_texts.h"
#include "policy/index_recall.h"

namespace omnikv {

struct IndexRecallOptions {
  std::vector<RecallOf> wanted = {{64, 256}, {256, 1024}};
  int32_t rows = 16;  // of the last rows of each text, which choose
  int32_t step = 8;   // from one of them to the next
};

// Ok where texts can be measured so; what is found before weights load. kInvalidArgument for a text
// that is too long, or of which all tokens would be rescored, and for rows that do not fit one
// step. kUnsupported for a model without global attention, or whose keys no index can have.
Status CheckIndexRecall(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                        const IndexRecallOptions& options);

// The share of the best tokens that the index finds, [n_layers * wanted] of the global-attention
// layers, the mean of all rows and texts. As CheckIndexRecall. REQUIRES a text; needs a free
// session.
Result<std::vector<double>> MeasureIndexRecall(EngineCore& core,
                                               std::span<const std::vector<int32_t>> texts,
                                               const IndexRecallOptions& options,
                                               const MeasureProgress& progress = {});

}  // namespace omnikv
