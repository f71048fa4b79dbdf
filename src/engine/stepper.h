// The steps of an engine: chunks of a prompt, and decode steps, one by one or ahead of the host.
// Sessions and batches are handles on it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/row_group.h"
#include "engine/sampler.h"

namespace omnikv {

// A token that comes next in a sequence of a group.
struct NextToken {
  int32_t slot = 0;
  int32_t token = 0;
};

// Enqueues steps of one group after another into the workspace that they share. One thread drives
// it, as it drives the engine.
class Stepper {
 public:
  explicit Stepper(EngineCore& core) : core_(core) {}

  // Rows of a prompt: `tokens` from the end of the sequence on, of a prompt that ends at
  // `prompt_end`. The last n_out of them have logits, in the rows from 0 on. On failure the tokens
  // are not in context, and what is near of the sequence is lost.
  Status Chunk(RowGroup& group, int32_t slot, std::span<const int32_t> tokens, int64_t prompt_end,
               int32_t n_out);
  // The same without computing them: made-up K/V, no logits. To an empty sequence.
  Status MadeUpChunks(RowGroup& group, int32_t slot, int64_t tokens);

  // Whether a step can have these rows: kInvalidArgument without any, and for a token that is not
  // in the vocabulary.
  Status Check(std::span<const NextToken> next) const;
  // One decode step of the sequences named, each once: appends their tokens. Row r of the logits is
  // that of next[r]. On failure (a full context, a token out of range, logits that are not finite)
  // nothing has changed.
  Status Step(RowGroup& group, std::span<const NextToken> next, std::span<float* const> logits);

  // Brings a row of logits [vocab] that follows `length` tokens. kFailed where it is not finite.
  Status Logits(int32_t row, int64_t length, float* to) const;

 private:
  friend class StepsAhead;

  // A token appended to each sequence: checks them first. On failure nothing has changed.
  Status Append(RowGroup& group, std::span<const NextToken> next);
  // Forgets those, once nothing runs any more; returns `failure`.
  Status GiveUp(RowGroup& group, std::span<const NextToken> next, const Status& failure);
  // Writes the inputs of a decode step whose tokens are appended.
  void UploadDecode(const RowGroup& group, std::span<const NextToken> next);
  // Enqueues it. Its logits go to the rows from `logits_row` on.
  Status EnqueueDecode(RowGroup& group, std::span<const NextToken> next, int32_t logits_row,
                       StepEnd end);
  void Enqueue(RowGroup& group, int32_t slot, const StepShape& shape, StepEnd end);
  // tokens_, rows_ and seqs_, and the numbers of the last n_out rows.
  void Upload(int32_t n_out);

  EngineCore& core_;
  // Inputs on their way to the device.
  std::vector<int32_t> tokens_, out_rows_;
  std::vector<RowMeta> rows_;
  std::vector<SeqMeta> seqs_;  // [max_seqs]; those without a row have no tokens
};

// Steps of the same sequences that a device takes one after another by itself, each from the tokens
// that the one before chose, while the host still reads those of an earlier one. Only one of an
// engine at a time, and no other step while it goes on.
class StepsAhead {
 public:
  // Row r goes on with next[r]; samplers[r] draws what follows (null: the highest logit), and knows
  // of each token that was read.
  StepsAhead(Stepper& stepper, RowGroup& group, std::span<const NextToken> next,
             std::vector<Sampler*> samplers);

  // Takes the tokens that the rows went on with into context, and returns those that follow, one
  // per row. Up to `wanted` calls will be made in all from now on. On failure they are not in
  // context, once End was called.
  Result<std::span<const NextToken>> Read(int64_t wanted);
  // Forgets the steps that nobody read. The logits of the last one that was are in the rows from
  // logits_row() on; none was where reads() is 0.
  void End();
  uint32_t reads() const { return read_; }
  uint32_t launches() const { return launches_; }
  int32_t logits_row() const { return RowsOf(read_ - 1); }

  static constexpr uint32_t kMost = 2;  // steps launched and not read; their logits alternate

 private:
  Status Prepare();
  Status Launch();
  int32_t RowsOf(uint32_t step) const {
    return static_cast<int32_t>(step % kMost) * static_cast<int32_t>(next_.size());
  }

  Stepper& stepper_;
  RowGroup& group_;
  std::vector<NextToken> next_;  // not in context
  std::vector<Sampler*> samplers_;
  StepEnd end_;
  uint32_t launched_ = 0;                     // steps
  uint32_t read_ = 0;                         // of them
  uint32_t launches_ = 0;                     // in all, of which End forgot some
  std::array<Backend::Mark, kMost> marks_{};  // of the last steps launched, by their number
};

}  // namespace omnikv
