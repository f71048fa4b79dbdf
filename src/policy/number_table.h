// Files of numbers that policies read: one for each KV head of each layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

// A table of text: a line a layer, a column a KV head, between tabs. kInvalidArgument, with the
// file and the line that is wrong, unless all are numbers from `min` to `max`.
Result<std::vector<double>> ReadHeadNumbers(const std::string& path, int32_t n_layers,
                                            int32_t n_kv_heads, double min, double max);

}  // namespace omnikv
