// What a process holds, for tests that repeat something and expect it to hold no more afterwards.
#pragma once

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>

#include "base/memory.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv {

struct Resources {
  int64_t files = 0;
  int64_t threads = 0;
  int64_t resident = 0;  // bytes, pinned memory included
  int64_t device = 0;    // bytes in use on the first card, by all processes; 0: no card

  static Resources Now() {
    const auto entries = [](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(folder), {});
    };
    malloc_trim(0);
    Resources r{.files = entries("/proc/self/fd"),
                .threads = entries("/proc/self/task"),
                .resident = static_cast<int64_t>(ResidentMemory())};
#ifdef OMNIKV_HAVE_CUDA
    r.device = static_cast<int64_t>(CudaMemoryInUse().value_or(0));
#endif
    return r;
  }
};

// Expects that nothing is held now that was not `before`, over `repeats` repetitions in between.
// Less than 320 KiB of memory lost at each would go unseen: the smallest model of these tests takes
// more. The card's memory is counted for all processes together: no other may use it meanwhile.
inline void ExpectNoLeak(const Resources& before, int repeats) {
  const Resources after = Resources::Now();
  const int64_t tolerance = std::max<int64_t>(repeats, 50) * (320 << 10);
  EXPECT_EQ(after.files, before.files) << repeats << " repetitions left files open";
  EXPECT_EQ(after.threads, before.threads) << repeats << " repetitions left threads";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // Freed memory is kept for a while; leaks are found by the sanitizer itself.
#else
  EXPECT_LT(after.resident, before.resident + tolerance) << repeats << " repetitions left memory";
#endif
  EXPECT_LT(after.device, before.device + tolerance)
      << repeats << " repetitions left memory of the card, or another process took some";
}

}  // namespace omnikv
