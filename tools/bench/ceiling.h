// What this machine can do: the ceilings that every benchmark is held against.
#pragma once

#include <cstddef>

#include "base/thread_pool.h"
#include "omnikv/status.h"

namespace omnikv::tools {

struct MemoryCeiling {
  double read_gb_s = 0;  // all threads read memory far larger than the caches
  double copy_gb_s = 0;  // bytes read plus bytes written
};

// The best of a few passes over `bytes` of huge-page memory.
Result<MemoryCeiling> MeasureMemory(ThreadPool& pool, size_t bytes);

}  // namespace omnikv::tools
