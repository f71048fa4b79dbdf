// Kernels of the score ops. A score's key is an unsigned number of the same order, NaN lowest.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/ops.h"

namespace omnikv {

// The digits of a key: where the rank-th key lies is found 11, 11 and 10 bits at a time.
inline constexpr int kKeyBins = 2048;

struct SelectKernels {
  // Tokens [begin, end) of list `list` of row `row`: with `only`, of those.
  void (*score_reduce)(const ScoreReduceArgs& a, int32_t row, int32_t list, int64_t begin,
                       int64_t end);
  // keys[i] of the combined scores of list `list` of all sequences' lists, candidates [begin, end).
  void (*score_keys)(const TopKArgs& a, int32_t list, int64_t begin, int64_t end, uint32_t* keys);
  // Appends t of [begin, end) where keys[t] > threshold, or where it equals it and `ties` > 0,
  // which each such token takes one from, to `out`; gives how many.
  int64_t (*collect)(const uint32_t* keys, int64_t begin, int64_t end, uint32_t threshold,
                     int64_t ties, int32_t* out);
  // out[i] = the highest of keys [i * group, (i + 1) * group), of n; gives how many.
  int64_t (*group_tops)(const uint32_t* keys, int64_t n, int64_t group, uint32_t* out);
};

const SelectKernels& GetSelectKernels(const Isa& isa);

}  // namespace omnikv
