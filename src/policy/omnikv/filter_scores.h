// The scores of the tokens in the filter layers of policy omnikv (equations 3-4): by the last
// query, or by a window of past ones.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "policy/omnikv/token_lists.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. Layers that choose are named by the number of their choice.
// Thread-compatible.
class FilterScores {
 public:
  // From score, selector, window, lists, sinks, top_p and dense. With a backend, takes `memory`.
  Status Prepare(const PolicyContext& context, int32_t n_filters, const PolicySettings& settings,
                 PolicyMemory& memory);

  // Past queries whose scores count, the step's included.
  int32_t window() const { return window_; }
  // Whether each KV head has scores of its own, and so a choice: else all heads share one.
  bool per_kv_head() const { return lists_ > 1; }
  int32_t lists() const { return lists_; }
  // Whether a score is the highest of the heads, by the last query, so that those of a unit of
  // tokens have a bound: and no one asks for the scores of tokens that are no candidates.
  bool bounded() const { return lists_ == 1 && window_ == 1 && !cuts() && !ahead_; }

  // Asks the attention of a filter for what Reduce reads after it.
  void AskFor(int32_t filter, AttendArgs& attend) const;
  // Of the heads that took part; with `only`, the scores of these tokens anew, whose logits may lie
  // by token.
  void Reduce(int32_t filter, const AttendArgs& attend, const SomeTokens& only = {},
              bool by_token = false) const;
  // The reduction of the logits of units of `unit` tokens. REQUIRES bounded().
  ScoreReduceArgs OfUnits(const AttendArgs& attend, int32_t unit) const;
  // Chooses by them: as many as `choice` says, or of these the fewest that hold `top_p` of what all
  // candidates have.
  void Choose(int32_t filter, const TopKArgs& choice) const;
  // As many as `choice` says.
  void ChooseMost(int32_t filter, TopKArgs choice) const;
  // Those of a step, before its last tokens. REQUIRES one list.
  StepScores OfStep(int32_t filter, const TokenLists& lists) const {
    return {Ring(filter), lists.NumCandidates(), stride_, window_};
  }
  // The weights of a window of queries, [window]: the newest first.
  const float* weights() const { return weights_.as<float>(); }
  // Whether choices depend on more than lengths.
  bool cuts() const { return top_p_ < 1; }

  void CopyFrom(const FilterScores& other);
  // What a later step reads of a sequence of `length` tokens, as bytes and back; false where the
  // bytes cannot be that.
  std::string Save(int32_t seq, int64_t length) const;
  bool Load(int32_t seq, int64_t length, std::string_view state);

 private:
  ScoreReduceArgs Reduction(const AttendArgs& attend) const;
  // [max_seqs, lists, window, stride]
  float* Ring(int32_t filter) const {
    return rings_.as<float>() + int64_t{filter} * context_.max_seqs * lists_ * window_ * stride_;
  }
  // Rows of a sequence in all rings that a later step reads; a window of 1 has none.
  int64_t PastRows() const { return window_ == 1 ? 0 : int64_t{n_filters_} * lists_ * window_; }
  // Calls visit(row) for each of them.
  template <typename Visit>
  void ForPastRows(int32_t seq, const Visit& visit) const {
    const int64_t rows = int64_t{lists_} * window_;
    for (int32_t f = 0; f < n_filters_ && window_ > 1; ++f) {
      for (int64_t r = 0; r < rows; ++r) visit(Ring(f) + (seq * rows + r) * stride_);
    }
  }
  // The head maximum of one query is the reduced score already: it goes where the choice reads it.
  // Not in a batch, where the choice reads by sequence what attention writes by row.
  bool Reduces() const { return !head_max_ || sinks_ > 0 || window_ > 1 || context_.max_seqs > 1; }

  PolicyContext context_;
  bool softmax_ = true;
  bool ahead_ = false;     // rows come ahead of their turn by the scores of all tokens
  bool head_max_ = false;  // attention itself reduces the logits of the heads that take part
  int32_t window_ = 1;
  int32_t lists_ = 1;  // 1, or n_kv_heads
  int32_t sinks_ = 0;  // first tokens, which are chosen whatever their scores
  double top_p_ = 1;
  int32_t n_filters_ = 0;
  int64_t stride_ = 0;  // tokens
  Buffer logits_, lse_, rings_, weights_;
};

}  // namespace omnikv
