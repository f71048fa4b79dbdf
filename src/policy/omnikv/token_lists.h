// How many tokens each layer that chooses takes in a step, by a rule of the lengths alone, and the
// lists of what it took.
#pragma once

#include <cstdint>

#include "backend/ops.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. Layers that choose are named by the number of their choice.
// Thread-compatible.
class TokenLists {
 public:
  // Takes `memory` of the context's backend for `n_choices` choices of `lists` lists for each
  // sequence, of up to `capacity` tokens each.
  Status Prepare(const PolicyContext& context, const RangeRule& rule, int32_t capacity,
                 int32_t n_choices, int32_t lists, PolicyMemory& memory);

  // Of the sequences of a step, before all else.
  void EnqueueRange(const AttendArgs& step) const;
  // What chooses so many of the candidates, or among these; scores are still to be named.
  TopKArgs Choice(int32_t choice, const AttendArgs& attend, const SomeTokens& among = {}) const;
  // Tokens before the last ones of each sequence: int32 [max_seqs].
  const int32_t* NumCandidates() const { return n_candidates_.as<int32_t>(); }
  // What was chosen.
  PlanSegment Segment(int32_t choice) const;
  SomeTokens Tokens(int32_t choice) const;
  const int32_t* Counts(int32_t choice) const { return Count(choice); }  // [max_seqs, lists]
  // That, and the last tokens.
  AttnPlan Plan(int32_t choice) const;
  // The last tokens of each sequence, which are no candidates: int32 [max_seqs, 2].
  const int32_t* Recent() const { return bounds_.as<int32_t>(); }

 private:
  int64_t ListsBefore(int32_t choice) const { return int64_t{choice} * max_seqs_ * lists_; }
  int32_t* List(int32_t choice) const {
    return list_.as<int32_t>() + ListsBefore(choice) * capacity_;
  }
  int32_t* Count(int32_t choice) const { return count_.as<int32_t>() + ListsBefore(choice); }

  Backend* backend_ = nullptr;
  RangeRule rule_;
  int32_t capacity_ = 0;
  int32_t max_seqs_ = 1;
  int32_t lists_ = 1;
  Buffer list_, count_;                    // int32 [n_choices, max_seqs, lists, capacity] and such
  Buffer bounds_, n_candidates_, n_pick_;  // int32 [max_seqs, 2], [max_seqs], [max_seqs]
};

}  // namespace omnikv
