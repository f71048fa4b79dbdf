// What policies share that choose once, after a prompt: each KV head of each layer keeps `budget`
// tokens by a score of the policy, or as many as the policy says of that layer, and with them every
// token that comes later. The other rows' memory is given back.
#pragma once

#include <vector>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {

// Has the settings budget, turn and room (PromptChoiceSettings). Thread-compatible.
class PromptChoice : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) final;
  void Plan(const LayerStep& step, AttendArgs& attend) override {
    static_cast<void>(step);
    static_cast<void>(attend);
  }
  void Observe(const LayerStep& step, const AttendArgs& attend) final;

  Keeps Kept() const final { return keeps_; }
  std::optional<Retained> Retains(const LayerStep& step) const final;

  int64_t TokensRead(int32_t layer, const SeqLength& at) const final { return at.Held(layer); }
  bool Budgeted(int32_t) const final { return true; }
  int64_t Budget(int64_t) const final { return budget_; }
  // What came after the prompt.
  int64_t Besides(const SeqLength& at) const final {
    return std::max<int64_t>(0, at.tokens - at.gone - budget_);
  }
  int64_t LayerAllows(int32_t layer, const SeqLength& at) const final {
    return keeps_.LayersDiffer() ? keeps_.RowsAfter(layer, at.prompt) + at.tokens - at.prompt
                                 : Policy::LayerAllows(layer, at);
  }
  size_t Bytes() const final { return memory_.bytes(); }

 protected:
  // The policy's own settings; kInvalidArgument as Prepare. Then, where there is a backend, its
  // memory but for the scores.
  virtual Status ReadSettings(const PolicySettings& settings) {
    static_cast<void>(settings);
    return {};
  }
  virtual Status Allocate() { return {}; }
  // Sets how many rows the layers keep, if not the budget in each: what Keeps::LayersDiffer says.
  virtual void SetLayerRows(Keeps& keeps) const { static_cast<void>(keeps); }
  // The last tokens of the prompt that stay whatever their scores, in the budget.
  virtual int32_t Recent() const { return 0; }
  // Enqueues the scores of the tokens before the recent ones, by the prompt's last rows, of one
  // sequence: into scores(), or what is returned, f32 [n_kv_heads, max_context].
  virtual const float* Score(const LayerStep& step, const AttendArgs& attend,
                             const SeqMeta* seq) = 0;
  // Whether the scores come from all rows of the prompt (Keeps::sums), each of whose steps then
  // calls Weigh before the last one chooses.
  virtual bool WeighsAllRows() const { return false; }
  virtual void Weigh(const LayerStep& step, const AttendArgs& attend) {
    static_cast<void>(step);
    static_cast<void>(attend);
  }

  const PolicyContext& context() const { return context_; }
  Backend& backend() const { return *context_.backend; }
  int64_t budget() const { return budget_; }
  bool recompress() const { return !keeps_.first_prompt; }  // later turns end in a choice too
  float* scores() const { return scores_.as<float>(); }
  const int32_t* n_candidates() const { return choice_.n_candidates(); }  // [1], for Score
  Result<Buffer> TakeScores() {
    return memory_.Take(backend(), int64_t{context_.n_kv_heads} * context_.max_context, "scores");
  }
  PolicyMemory& memory() { return memory_; }

 private:
  PolicyContext context_;
  int32_t budget_ = 0;  // tokens of the prompt that each head keeps, the recent ones included
  Keeps keeps_;
  PolicyMemory memory_;
  // Of one prompt at a time.
  Buffer scores_;      // f32 [n_kv_heads, max_context]
  ListChoice choice_;  // rows that stay, a list per KV head
};

// `own`, between the budget and what follows it.
std::vector<SettingSpec> PromptChoiceSettings(std::vector<SettingSpec> own, double least_budget);

}  // namespace omnikv
