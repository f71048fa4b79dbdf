// What this machine can do: the ceilings that every benchmark is held against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/thread_pool.h"
#include "omnikv/status.h"

namespace omnikv::tools {

struct MemoryCeiling {
  double read_gb_s = 0;  // all threads read memory far larger than the caches
  double copy_gb_s = 0;  // bytes read plus bytes written
};

// The best of a few passes over `bytes` of huge-page memory.
Result<MemoryCeiling> MeasureMemory(ThreadPool& pool, size_t bytes);

struct DiskCeiling {
  size_t read_bytes = 0;   // of a random read: a K/V row, in whole pages
  double random_gb_s = 0;  // many such reads at once
  double sequential_gb_s = 0;
};

// The rates at which the disk of `folder` gives a file of 1 GiB past the page cache, which is
// written there first; random reads are of `bytes`. Errors of the disk.
Result<DiskCeiling> MeasureDisk(const std::string& folder, size_t bytes);

// Bytes that this process had the system read from disks so far; 0 where the system does not say.
uint64_t BytesReadFromDisks();

}  // namespace omnikv::tools
