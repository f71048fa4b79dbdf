// Moments of queries, and scores by them, over threads.
#pragma once

#include "backend/cpu/expected_kernels.h"
#include "base/thread_pool.h"

namespace omnikv {

class CpuExpected {
 public:
  CpuExpected(ThreadPool& pool, const Isa& isa);

  // Floats of scratch that Run of `a` needs.
  int64_t ScratchFloats(const QueryMomentsArgs& a) const;
  void Run(const QueryMomentsArgs& a, float* scratch);
  int64_t ScratchFloats(const ExpectedScoreArgs& a) const;
  void Run(const ExpectedScoreArgs& a, float* scratch);

 private:
  ThreadPool& pool_;
  const ExpectedKernels& kernels_;
};

}  // namespace omnikv
