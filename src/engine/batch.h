// Several sequences that decode together: one step takes a token of each, so that weights are read
// once for all of them. What a server's continuous batching stands on (docs/steps.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/stepper.h"

namespace omnikv {

// A handle on the sequences of one group, which decode in common steps. One thread drives it and
// whatever else its engine has; it must not outlive the engine.
class Batch {
 public:
  // As RowGroup::Open.
  static Result<std::unique_ptr<Batch>> Open(EngineCore& core, const PolicyOptions& policy,
                                             int32_t max_seqs);

  // Computes `prompt` as a new sequence, and returns its member's number, whose logits are then
  // those after the prompt. On failure nothing has changed. kResourceExhausted when all numbers, or
  // all sequences of the bank, are taken.
  Result<int32_t> Join(const std::vector<int32_t>& prompt);
  // The same over made-up K/V of `tokens` tokens, without logits: for benchmarks.
  Result<int32_t> JoinMadeUp(int64_t tokens);
  // Frees the sequence and its number. REQUIRES the number of a member, as all below.
  void Leave(int32_t member) { group_->Leave(member); }

  // A token that comes next in a sequence.
  struct Next {
    int32_t member = 0;
    int32_t token = 0;
    Sampler* sampler = nullptr;  // draws what follows (Generate); null: the highest logit
  };
  // One decode step of the sequences named, each once: appends their tokens. Sequences that are not
  // named wait. On failure (a full context, a token out of range, logits that are not finite)
  // nothing has changed.
  Status Step(std::span<const Next> next);
  // `steps` steps, each but the first over what was drawn after the one before: returns the token
  // drawn after each, [next.size()][steps]; the last of them is not in context. The device needs no
  // word from the host in between. On failure nothing has changed but the samplers; sequences whose
  // policy gives up a row at every step keep what was generated.
  Result<std::vector<std::vector<int32_t>>> Generate(std::span<const Next> next, int64_t steps);

  // [vocab]: after the sequence's last token. Valid until the next call.
  const float* logits(int32_t member) const { return logits_[static_cast<size_t>(member)].data(); }
  int64_t length(int32_t member) const { return group_->length(member); }
  int32_t max_seqs() const { return group_->max_seqs(); }
  // Tokens that a layer reads in a step of the sequence as it is now, mean over layers.
  double attended_tokens(int32_t member) const;
  // As Residency::CountBytes, of all members.
  std::optional<SlotCounters> Count() const { return group_->residency().CountBytes(); }
  const std::string& policy() const { return group_->policy_name(); }
  std::string settings() const { return group_->settings().ToString(); }

 private:
  explicit Batch(EngineCore& core) : core_(core), stepper_(core) {}
  std::vector<DecodeRow> RowsOf(std::span<const Next> next) const;
  // The member's number if `status` is ok; else frees it.
  Result<int32_t> Taken(int32_t member, const Status& status);
  Status Prefill(int32_t member, const std::vector<int32_t>& prompt);
  Status FillWithNoise(int32_t member, int64_t tokens);

  EngineCore& core_;
  Stepper stepper_;
  std::unique_ptr<RowGroup> group_;
  std::vector<std::vector<float>> logits_;  // [max_seqs][vocab]
};

}  // namespace omnikv
