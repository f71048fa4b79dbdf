// Measures how much each query head attends to far tokens, those that a streaming head of
// DuoAttention would not read. No user chooses it, and no registry has it: the engine opens it to
// make the gates of policy `duo` (engine/head_gates.h).
#pragma once

#include <vector>

#include "policy/policy.h"
#include "policy/policy_memory.h"
#include "policy/sinks_and_recent.h"

namespace omnikv {

// Reads everything, as `full`. The last rows of a prompt attend a second time, to near tokens
// alone. Both attentions give the logarithm of the sum of their weights, and the share of the far
// tokens is 1 - exp(near - all). Of one sequence. Thread-compatible.
class FarAttention : public Policy {
 public:
  // Of each prompt, the last `window` rows.
  FarAttention(const SinksAndRecent& near, int32_t window) : near_(near), window_(window) {}

  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;
  Status AfterPrefill(int64_t context_length) override;

  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens; }
  bool Budgeted(int32_t) const override { return false; }
  size_t Bytes() const override { return memory_.bytes(); }
  // The rows are computed anew for every prompt, in one step.
  int64_t WarmRows() const override { return window_; }
  int32_t LastRows() const override { return window_; }

  // Of the last prompt: [n_layers][measured_rows()][n_heads], 0 to 1. Rows in the order of
  // positions, fewer than the window where the prompt is shorter.
  const std::vector<float>& shares() const { return shares_; }
  int32_t measured_rows() const { return measured_rows_; }

 private:
  bool Measures(const LayerStep& step, const AttendArgs& attend) const;
  float* SumsOf(const Buffer& sums, int32_t layer) const;

  SinksAndRecent near_;
  int32_t window_ = 0;
  PolicyContext context_;
  PolicyMemory memory_;
  Buffer all_, near_sums_;     // f32 [n_layers, max_rows, n_heads]: logarithms
  Buffer unused_;              // f32 [max_rows, n_heads, dk]: outputs of the second attention
  int32_t step_rows_ = 0;      // of the step that measured
  int32_t measured_rows_ = 0;  // of them, the last ones
  std::vector<float> shares_;
};

}  // namespace omnikv
