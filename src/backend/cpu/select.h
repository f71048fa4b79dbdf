// Scores to choices: ScoreReduce, PlanRange and TopK over threads.
#pragma once

#include <span>
#include <vector>

#include "backend/cpu/select_kernels.h"
#include "base/thread_pool.h"

namespace omnikv {

class CpuSelect {
 public:
  CpuSelect(ThreadPool& pool, const Isa& isa);

  // 32-bit words of scratch that Run of `a` needs.
  size_t ScratchWords(const TopKArgs& a) const;

  void Run(const TopKArgs& a, uint32_t* scratch);
  void Run(const ScoreReduceArgs& a);

 private:
  // How the keys of one part lie to the key of rank n_pick: by digit, most significant first.
  struct KeyPart {
    int64_t begin = 0;
    int64_t end = 0;
    uint32_t bins[3][kKeyBins];
  };

  void Select(const TopKArgs& a, int32_t list, int n_parts, KeyPart* parts, uint32_t* keys);
  template <typename Body>
  void ForParts(int n_parts, const Body& body);

  ThreadPool& pool_;
  const SelectKernels& kernels_;
  std::vector<KeyPart> parts_;  // [threads]
};

// Too small to divide.
void CpuPlanRange(const PlanRangeArgs& a);
// `scratch`: vocab, where tokens are sampled.
void CpuNextToken(const NextTokenArgs& a, std::span<SampleCandidate> scratch);

}  // namespace omnikv
