// The choice of the best scores of each list, and of a range of the last tokens beside them: what
// policies share that choose by the scores of one step.
#pragma once

#include <cstdint>
#include <string_view>

#include "bank/declared_reads.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. A choice stands until the next one is made. Thread-compatible.
class ListChoice {
 public:
  // Of up to `n_seqs` sequences at a time: how a sequence's tokens are split (PlanRange), lists of
  // each, and indices that a list has room for; and choices that stand side by side. Takes `memory`
  // in the name of `what`.
  Status Prepare(Backend& backend, PolicyMemory& memory, const RangeRule& rule, int32_t n_seqs,
                 int32_t lists, int32_t capacity, std::string_view what, int32_t choices = 1);

  // Splits the tokens of the sequences: once per step, before the rest.
  void EnqueueRange(const SeqMeta* seqs, int32_t n_seqs) const {
    EnqueueRange(seqs, n_seqs, rule_.budget);
  }
  // The same with another budget, in a step that is not recorded. REQUIRES that the choices fit.
  void EnqueueRange(const SeqMeta* seqs, int32_t n_seqs, int32_t budget) const;
  // Chooses by scores [n_seqs, lists, stride], the lower index where equal; `by_row`: [n_rows,
  // lists, stride], of one row per sequence. Sequences with `keep` [n_seqs] not 0 keep what they
  // have.
  void EnqueueBest(const float* scores, int64_t stride, const SeqMeta* seqs, int32_t n_seqs,
                   int32_t choice = 0, const int32_t* keep = nullptr, bool by_row = false) const;

  int32_t* n_candidates() const { return n_candidates_.as<int32_t>(); }  // [n_seqs]
  int32_t* n_pick() const { return n_pick_.as<int32_t>(); }              // [n_seqs]
  int32_t capacity() const { return capacity_; }
  int32_t lists() const { return lists_; }
  int32_t* index(int32_t choice = 0) const;  // [n_seqs, lists, capacity]
  int32_t* count(int32_t choice = 0) const;  // [n_seqs, lists]
  // What was chosen, ascending; and the last tokens.
  PlanSegment List(int32_t choice = 0) const;
  PlanSegment Range() const;
  // Both, as the rows that sequence `seq` keeps after a prompt.
  Retained Kept(int32_t seq) const;

 private:
  Backend* backend_ = nullptr;
  RangeRule rule_;
  int32_t n_seqs_ = 1;
  int32_t lists_ = 1;
  int32_t capacity_ = 0;
  Buffer weight_;                 // f32 [1]: TopKArgs::weights
  Buffer index_, count_;          // int32 [choices, n_seqs, lists, capacity], [.., lists]
  Buffer bounds_;                 // int32 [n_seqs, 2]
  Buffer n_candidates_, n_pick_;  // int32 [n_seqs]
};

}  // namespace omnikv
