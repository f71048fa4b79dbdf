// Scores of tokens by threads: Score.
#pragma once

#include "backend/cpu/score_kernels.h"
#include "base/thread_pool.h"

namespace omnikv {

class CpuScore {
 public:
  CpuScore(ThreadPool& pool, const Isa& isa);

  // Floats of scratch that Run of `a` needs.
  int64_t ScratchFloats(const ScoreArgs& a) const;
  void Run(const ScoreArgs& a, float* scratch);

 private:
  ThreadPool& pool_;
  const ScoreKernels& kernels_;
};

}  // namespace omnikv
