// What policies share that keep `budget` tokens in each layer, the same ones for all KV heads:
// after a prompt the best by a score of the policy, and then every step gives up the lowest.
#pragma once

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {

// Has the settings budget and room. Thread-compatible.
class StepChoice : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) final;
  void Plan(const LayerStep& step, AttendArgs& attend) override {
    static_cast<void>(step);
    static_cast<void>(attend);
  }
  void Observe(const LayerStep& step, const AttendArgs& attend) final;

  Keeps Kept() const final { return {.rows = budget_, .every_step = true, .room = room_}; }
  std::optional<Retained> Retains(const LayerStep& step) const final;

  int64_t TokensRead(int32_t, const SeqLength& at) const final {
    return std::min(at.tokens - at.gone, step_stride_);
  }
  bool Budgeted(int32_t) const final { return true; }
  int64_t Budget(int64_t) const final { return budget_; }
  int64_t Besides(const SeqLength&) const final { return 1; }  // the step's own token
  size_t Bytes() const final { return memory_.bytes(); }

 protected:
  // Whose tokens are scored, and where the scores go.
  struct Scored {
    const SeqMeta* seqs;   // of held rows
    const SeqMeta* steps;  // the same, of all tokens
    int32_t n_seqs;
    float* out;  // [n_seqs, stride]
    int64_t stride;
  };

  // The policy's own settings, and where there is a backend its own memory.
  virtual void ReadSettings(const PolicySettings& settings) { static_cast<void>(settings); }
  virtual Status Allocate() { return {}; }
  // Enqueues the scores of all held tokens.
  virtual void Score(const AttendArgs& attend, const Scored& scored) = 0;

  const PolicyContext& context() const { return context_; }
  int32_t budget() const { return budget_; }
  PolicyMemory& memory() { return memory_; }

 private:
  PolicyContext context_;
  int32_t budget_ = 0;       // tokens
  int64_t room_ = 0;         // tokens
  int64_t step_stride_ = 0;  // scores of a sequence in a decode step
  PolicyMemory memory_;
  Buffer scores_;       // f32 [max_context]: of a prompt
  Buffer step_scores_;  // f32 [max_seqs, budget + 1]
  ListChoice choice_;   // a prompt's rows that stay
};

}  // namespace omnikv
