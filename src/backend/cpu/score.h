// The ops that score tokens, over threads.
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
  void Run(const BlockSummaryArgs& a);
  void Run(const BlockScoreArgs& a);
  int64_t ScratchFloats(const KeyScoreArgs& a) const;
  void Run(const KeyScoreArgs& a, float* scratch);
  void Run(const IndexKeysArgs& a);
  int64_t ScratchFloats(const IndexScoreArgs& a) const;
  void Run(const IndexScoreArgs& a, float* scratch);
  int64_t ScratchFloats(const RescoreArgs& a) const;
  void Run(const RescoreArgs& a, float* scratch);
  void Run(const AgedScoresArgs& a);
  void Run(const PoolArgs& a);

 private:
  ThreadPool& pool_;
  const ScoreKernels& kernels_;
};

}  // namespace omnikv
