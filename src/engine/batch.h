// Several sequences that decode together: one step takes a token of each, so that weights are read
// once for all of them. What a server's continuous batching stands on (docs/batch.md).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/core.h"

namespace omnikv {

// Up to `max_seqs` sequences, each in a slot, of any lengths; they come and go between steps. Slots
// are numbers below max_seqs, and the index of a sequence in all that a policy keeps. One thread
// drives it and whatever else its engine has; it must not outlive the engine.
class Batch {
 public:
  // kInvalidArgument unless 1 <= max_seqs <= kMaxBatch; kUnsupported for a policy that keeps one
  // sequence's state, layers on the host, and models whose rotations depend on a prompt's length.
  static Result<std::unique_ptr<Batch>> Open(EngineCore& core, const PolicyOptions& policy,
                                             int32_t max_seqs);
  ~Batch();

  // Takes a free slot for `prompt`, computes it, and returns the slot, whose logits are then those
  // after the prompt. On failure nothing has changed. kResourceExhausted when no slot, or no
  // sequence of the bank, is free.
  Result<int32_t> Join(const std::vector<int32_t>& prompt);
  // The same over made-up K/V of `tokens` tokens, without logits: for benchmarks.
  Result<int32_t> JoinMadeUp(int64_t tokens);
  // Frees the slot and its sequence. REQUIRES a taken slot, as all below.
  void Leave(int32_t slot);

  // A token that comes next in a sequence.
  struct Next {
    int32_t slot = 0;
    int32_t token = 0;
  };
  // One decode step of the sequences named, each once: appends their tokens. Sequences that are not
  // named wait. On failure (a full context, a token out of range, logits that are not finite)
  // nothing has changed.
  Status Step(std::span<const Next> next);
  // `steps` steps, each but the first over what was the highest logit of the one before: returns
  // the token chosen after each, [next.size()][steps]; the last of them is not in context. The
  // device needs no word from the host in between.
  Result<std::vector<std::vector<int32_t>>> Greedy(std::span<const Next> next, int64_t steps);

  // [vocab]: after the sequence's last token. Valid until the next call.
  const float* logits(int32_t slot) const { return At(slot).logits.data(); }
  int64_t length(int32_t slot) const { return core_.bank->Length(At(slot).seq); }
  int32_t max_seqs() const { return static_cast<int32_t>(slots_.size()); }
  // Tokens that a layer reads in a step of the sequence as it is now, mean over layers.
  double attended_tokens(int32_t slot) const;
  const std::string& policy() const { return policy_.info->name; }
  std::string settings() const { return policy_.settings.ToString(); }

 private:
  struct Slot {
    int32_t seq = -1;        // of the bank; -1: free
    int64_t prompt_len = 0;  // tokens
    std::vector<float> logits;
  };
  // Steps launched before the tokens of the first of them are read.
  static constexpr uint32_t kStepsAhead = 2;

  explicit Batch(EngineCore& core) : core_(core) {}
  const Slot& At(int32_t slot) const;
  Result<int32_t> Take();
  // The slot if `status` is ok; else frees it.
  Result<int32_t> Taken(int32_t slot, const Status& status);
  Status Prefill(int32_t slot, const std::vector<int32_t>& prompt);
  Status FillWithNoise(int32_t slot, int64_t tokens);
  // Begins a step, or `n` in a row: checks `next`, makes room for n more tokens of each sequence in
  // it, sets lengths_ and writes the step's inputs.
  Status Begin(std::span<const Next> next, int64_t n);
  // Ends them: brings and checks the logits, gives back what the policy drops.
  Status End(std::span<const Next> next);
  // Inputs of a step whose rows are tokens_ and rows_, `n_out` of them from `first_out` on with
  // logits, of sequences seqs_.
  void Upload(int32_t first_out, int32_t n_out);
  // A decode step as it is recorded: of n_rows sequences; `chooses`: it ends in NextToken.
  Result<const Recording*> StepFor(size_t n_rows, bool chooses);
  Status EnqueueDecode(size_t n_rows, bool chooses);
  // Forgets `n` tokens of each sequence, which a step that failed was to write; returns `failure`.
  Status GiveUp(std::span<const Next> next, int64_t n, const Status& failure);
  void Drop(int32_t slot);
  StepContext Context() {
    return {.backend = *core_.backend,
            .config = core_.config,
            .weights = core_.weights,
            .work = core_.work,
            .ropes = ropes_,
            .residency = *residency_,
            .policy = *policy_.policy,
            .n_seqs = max_seqs()};
  }

  EngineCore& core_;
  RopeState ropes_;
  PreparedPolicy policy_;
  std::unique_ptr<Residency> residency_;
  std::vector<Slot> slots_;
  Buffer chosen_;      // int32 [kStepsAhead, rows], shared: tokens that steps chose
  Buffer step_count_;  // uint32 [1]
  // By the policy's variant, the rows, and whether it ends in NextToken.
  std::map<std::tuple<int32_t, size_t, bool>, std::unique_ptr<Recording>> steps_;
  // Of the sequences in the step under way.
  std::vector<SeqLength> lengths_;
  // Step inputs on their way to the device.
  std::vector<int32_t> tokens_, out_rows_;
  std::vector<RowMeta> rows_;
  std::vector<SeqMeta> seqs_;  // [max_seqs]; those without a row have no tokens
};

}  // namespace omnikv
