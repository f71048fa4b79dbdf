#pragma once

#include "backend/ops.h"
#include "base/thread_pool.h"

namespace omnikv {

void CpuCompact(const CompactArgs& a, ThreadPool& pool);

}  // namespace omnikv
