// Measures how many of the tokens of the highest exact scores the index of `omnikv dense=indexed`
// finds. No user chooses it, and no registry has it: the engine opens it (engine/index_recall.h).
#pragma once

#include <vector>

#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// The best `best` tokens, by exact scores of the `rescored` best by an index.
struct RecallOf {
  int32_t best = 1;
  int32_t rescored = 1;
};

// Reads everything, as `full`. After each prompt, for the last rows of it and each layer, the
// tokens of the highest scores of OmniKV (equations 3-4) are chosen exactly and by the index, with
// the ops of `omnikv`. Of one sequence. Thread-compatible.
class IndexRecall : public Policy {
 public:
  // Of each prompt, `rows` of the last rows, the last one and others every `step` before it.
  IndexRecall(std::vector<RecallOf> wanted, int32_t rows, int32_t step)
      : wanted_(std::move(wanted)), rows_(rows), step_(step) {}

  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;

  std::vector<StateSpec> States() const override;
  void SetStates(const std::vector<StateView>& states) override { states_ = states; }
  void MakeStates(int32_t layer, const AttendArgs& attend) override;
  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens; }
  int64_t TokensScored(int32_t, const SeqLength&) const override { return 1; }
  bool Budgeted(int32_t) const override { return false; }
  size_t Bytes() const override { return memory_.bytes(); }
  // The rows are computed anew for every prompt, in one step.
  int64_t WarmRows() const override { return LastRows(); }
  int32_t LastRows() const override { return (rows_ - 1) * step_ + 1; }

  // The share of the best tokens that was found, [n_layers][wanted]: the mean of all rows.
  std::vector<double> recalls() const;

 private:
  // The best `n` tokens of those that `row` has, by the scores of logits_ and lse_.
  std::vector<int32_t> Best(const AttendArgs& row, int32_t n, const SomeTokens& among = {});
  void Measure(int32_t layer, const AttendArgs& row);

  std::vector<RecallOf> wanted_;
  int32_t rows_ = 1;
  int32_t step_ = 1;
  PolicyContext context_;
  int64_t stride_ = 0;    // tokens
  int32_t capacity_ = 0;  // of the list
  PolicyMemory memory_;
  std::vector<StateView> states_;
  Buffer logits_, lse_;        // f32 [n_heads, stride], [n_heads]
  Buffer scores_;              // f32 [stride]
  Buffer weight_;              // f32 [1]: 1
  Buffer index_, count_;       // int32 [2, capacity], [2]: of all tokens, and of some
  Buffer numbers_;             // int32: candidates, and of them so many
  std::vector<double> found_;  // [n_layers, wanted]: sums over rows
  int64_t measured_ = 0;       // rows of the last layer
};

}  // namespace omnikv
