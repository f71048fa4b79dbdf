#pragma once

#include "backend/ops.h"
#include "base/thread_pool.h"

namespace omnikv {

void CpuMergeStates(const MergeStatesArgs& a, ThreadPool& pool);
void CpuPickHeads(const PickHeadsArgs& a, ThreadPool& pool);

}  // namespace omnikv
