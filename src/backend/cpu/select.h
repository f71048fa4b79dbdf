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
  static constexpr int64_t kFewKeys = 16384;

  // How the keys of one part lie to the key of rank n_pick: by digit, most significant first.
  struct KeyPart {
    int64_t begin = 0;
    int64_t end = 0;
    uint32_t bins[3][kKeyBins];
    // SelectFew: the highest keys of groups, then the keys that reach their bound; and which.
    uint32_t tops[kFewKeys];
    int32_t reach[kFewKeys];
  };

  void Select(const TopKArgs& a, int32_t list, int n_parts, KeyPart* parts, uint32_t* keys);
  // False where too many keys reach the bound: nothing is chosen.
  bool SelectFew(const uint32_t* keys, int64_t n, int64_t k, KeyPart& part, int32_t* index) const;
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
