// Values summed by known logits, over threads.
#pragma once

#include "backend/cpu/isa.h"
#include "backend/ops.h"
#include "base/thread_pool.h"

namespace omnikv {

// The kernel of one instruction set: of the pairs (row, KV head) [begin, end), which are numbered
// row by row. `scratch`: SumScratchFloats.
using SumValuesKernel = void (*)(const SumValuesArgs& a, int64_t begin, int64_t end,
                                 float* scratch);
SumValuesKernel GetSumValuesKernel(const Isa& isa);

// That a thread needs.
int64_t SumScratchFloats(const SumValuesArgs& a);
// `scratch`: of all threads, one behind the other.
void CpuSumValues(const SumValuesArgs& a, SumValuesKernel kernel, ThreadPool& pool, float* scratch);
void CpuPickLogits(const PickLogitsArgs& a, ThreadPool& pool);

}  // namespace omnikv
