// The steps of an engine: chunks of a prompt, and decode steps, one by one or ahead of the host.
// Sessions and batches are handles on it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "engine/row_group.h"
#include "engine/sampler.h"

namespace omnikv {

// A decode row: the token that comes next in a sequence.
struct DecodeRow {
  RowGroup* group = nullptr;
  int32_t member = 0;
  int32_t token = 0;
};

// Rows of a prompt: `tokens` from the end of the sequence on, of a prompt that ends at
// `prompt_end`. The last n_out of them have logits. `one_layer` and `pass` are PromptSteps' affair.
struct PromptChunk {
  RowGroup* group = nullptr;
  int32_t member = 0;
  std::span<const int32_t> tokens;
  int64_t prompt_end = 0;
  int32_t n_out = 0;
  std::optional<OneLayer> one_layer;
  int64_t first_pos = 0;  // with it: all rows are appended
  int32_t pass = -1;      // the rows are those of a pass over the prompt, behind its end
};

// Who draws what follows the decode rows of a step, on the backend: samplers[r] (null: the highest
// logit) the one of row r, which goes to tokens[r] and is known to the sampler then. REQUIRES none
// that ChangesLogits.
struct BackendDraws {
  std::span<Sampler* const> samplers;
  std::span<int32_t> tokens;
};

// Enqueues steps into the workspace of an engine. A step may have rows of several groups, which
// follow each other; weights are read once for all of its decode rows. One thread drives it, as it
// drives the engine.
class Stepper {
 public:
  explicit Stepper(EngineCore& core) : core_(core) {}

  // A step of decode rows, each of another sequence, and at most one chunk of a prompt: appends
  // their tokens. Row r of the logits is that of rows[r]; those of the chunk come after them. On
  // failure (a full context, a token out of range, logits of a row that are not finite) nothing has
  // changed, but what was near of the chunk's sequence is lost; and all of it, where the chunk ends
  // in a choice of rows. With `draws` no logits of rows come, but tokens.
  Status Step(std::span<const DecodeRow> rows, std::span<float* const> logits,
              const PromptChunk* chunk = nullptr, const BackendDraws* draws = nullptr);
  // Is shown what decode rows read in the steps from now on, which are not recorded; null: no one.
  void set_watch(AttendWatch* watch) { watch_ = watch; }
  // A step of a chunk alone. Its logits are in the rows from 0 on.
  Status Chunk(const PromptChunk& chunk) { return Step({}, {}, &chunk); }
  // Makes the states that the group's policy keeps of all tokens of the member, which steps of
  // another policy computed: RowGroup::JoinPrefix.
  Status MakeStates(RowGroup& group, int32_t member);
  // The same without computing them: made-up K/V, no logits. To an empty sequence.
  Status MadeUpChunks(RowGroup& group, int32_t member, int64_t tokens);

  // A step of a chunk in one layer, whose rows are appended.
  Status OneLayerOf(const PromptChunk& chunk);
  // The choice that follows the passes over a first prompt, of which nothing is left. `parked`: the
  // prompt of `tokens` passed layer by layer, and its rows wait there (null: they are appended).
  Status ChooseAfterPasses(RowGroup& group, int32_t member, int64_t tokens,
                           PromptStage* parked = nullptr);

  // Brings a row of logits [vocab] that follows `length` tokens. kFailed where it is not finite.
  Status Logits(int32_t row, int64_t length, float* to) const;

 private:
  friend class PromptSteps;
  friend class StepsAhead;

  // Rows of one group, after one another.
  struct Rows {
    RowGroup* group;
    std::span<const DecodeRow> rows;
  };
  std::span<const Rows> ByGroup(std::span<const DecodeRow> rows);
  Status Check(std::span<const DecodeRow> rows, const PromptChunk* chunk) const;
  // A token appended to each sequence. On failure nothing has changed.
  Status Append(std::span<const DecodeRow> rows);
  // Forgets those, once nothing runs any more.
  void TakeBack(std::span<const DecodeRow> rows);
  // The same of a step of which something may have run; returns `failure`.
  Status GiveUp(std::span<const DecodeRow> rows, const Status& failure);
  // After a step that failed: rows may not have come to the slots that they were given.
  static void ForgetSlots(std::span<const DecodeRow> rows);
  // Writes the inputs of a step whose tokens are appended.
  void Upload(std::span<const DecodeRow> rows, const PromptChunk* chunk);
  static int64_t FirstPos(const PromptChunk& chunk);  // once its rows are appended
  void AddSeqs(const RowGroup& group);
  void AddRow(int32_t member, int64_t pos, int32_t token, size_t first_seq);
  // Enqueues it. Its logits go to the rows from `logits_row` on.
  Status EnqueueDecode(std::span<const DecodeRow> rows, int32_t logits_row, StepEnd end);
  Status EnqueueWithChunk(std::span<const DecodeRow> rows, const PromptChunk& chunk, StepEnd end);
  static StepEnd EndOf(std::span<Sampler* const> samplers);
  // What the backend draws from in a step that ends so, its number among those that do.
  Status PrepareDraws(std::span<Sampler* const> samplers, StepEnd end, uint32_t step);
  void SetGroups(std::span<const DecodeRow> rows);
  void Enqueue(int32_t logits_row, StepEnd end);

  EngineCore& core_;
  AttendWatch* watch_ = nullptr;
  // Inputs on their way to the device.
  std::vector<int32_t> tokens_, out_rows_;
  std::vector<RowMeta> rows_, group_rows_;
  std::vector<SeqMeta> seqs_;  // of each group [max_seqs]; those without a row have no tokens
  // Of the step that is being enqueued. Kept, because a step allocates nothing.
  std::vector<Rows> by_group_;
  std::vector<StepGroup> groups_;
};

// A prompt on its way in, by the steps of its schedule: chunk by chunk, all layers each, or layer
// by layer, all chunks each (docs/decisions/046). The passes over it, if its policy has any (068),
// follow the prompt, or in each layer the prompt's chunks. Other steps may come between them, but
// none of the same sequence. A prompt that does not come to its end stays up to `computed` tokens.
class PromptSteps {
 public:
  // `tokens` are those of the whole context; the sequence has the first of them already.
  // `all_logits`: every row has logits, else the last one. kResourceExhausted where there is no
  // room for them.
  static Result<PromptSteps> Begin(Stepper& stepper, RowGroup& group, int32_t member,
                                   std::span<const int32_t> tokens, bool all_logits);
  PromptSteps(PromptSteps&& from) = default;
  ~PromptSteps();

  bool done() const { return InPlace() && pass_ == passes_.size(); }
  // Decode rows of other sequences that share a step of the prompt, where their logits go or who
  // draws from them (Stepper::Step), and the most rows of the prompt in it.
  struct Company {
    std::span<const DecodeRow> rows = {};
    std::span<float* const> logits = {};
    const BackendDraws* draws = nullptr;
    int32_t most_rows = std::numeric_limits<int32_t>::max();
  };
  // Whether the next step can have `n` decode rows besides: it is of all layers, and there is room
  // for them and for the rows that the policy must see together.
  bool TakesCompany(int32_t n) const;
  // Runs the next step. After a failure no more may follow. REQUIRES TakesCompany, if there is any.
  Status Advance(const Company& company);
  Status Advance() { return Advance({}); }
  // Logits of the last step: rows from first_out() on, that follow tokens up to `pos`.
  int32_t n_out() const { return n_out_; }
  int32_t first_out() const { return first_out_; }
  int64_t pos() const { return pos_; }
  // Tokens that stay if no more steps come.
  int64_t computed() const {
    return by_layer_ != nullptr ? 0 : std::min(group_->length(member_), total());
  }
  // How far it is, in tokens of the context.
  int64_t progress() const { return (layer_ * total() + pos_) / (last_layer_ + 1); }

 private:
  // What a prompt takes that passes layer by layer.
  struct ByLayer {
    PromptStage stage;
    Buffer x;  // f32 [total and rows of passes, d_model]; with passes, in memory that is shared
  };

  PromptSteps(Stepper& stepper, RowGroup& group, int32_t member, std::span<const int32_t> tokens)
      : stepper_(&stepper), group_(&group), member_(member), tokens_(tokens) {}
  int64_t total() const { return static_cast<int64_t>(tokens_.size()); }
  // Whether all rows of the prompt itself are.
  bool InPlace() const { return pos_ == total() && layer_ == last_layer_; }
  // A step whose rows come behind `first_pos` tokens, and behind `row` rows in ByLayer::x.
  Status Run(const PromptChunk& chunk, int64_t first_pos, int64_t row, const Company& company);
  // Rows of the prompt that the policy must see in one step, at least.
  int32_t RowsTogether() const {
    return std::max(group_->policy().PromptStepRows(), group_->policy().LastRows());
  }
  static Result<ByLayer> MakeByLayer(EngineCore& core, const PromptSteps& steps);
  // The rows of a layer are computed, or of all layers where they pass together.
  Status EndLayer();
  // Sets passes_. kResourceExhausted where their rows exceed the context.
  Status PlanPasses();
  int64_t LongestPass() const;  // rows
  // The next step of the prompt, or of a pass.
  Status AdvancePrompt(const Company& company);
  Status AdvancePass();
  // Gives back what it takes; forgets what cannot stay.
  void End();

  Stepper* stepper_;
  RowGroup* group_;
  int32_t member_;
  std::span<const int32_t> tokens_;
  bool all_logits_ = false;
  int64_t pos_ = 0;                     // of the next chunk
  int32_t layer_ = 0, last_layer_ = 0;  // 0: all at once
  int32_t n_out_ = 0;
  int32_t first_out_ = 0;
  std::unique_ptr<ByLayer> by_layer_;  // null: chunk by chunk
  std::vector<std::vector<int32_t>> passes_;
  size_t pass_ = 0;      // the next step is of
  size_t pass_row_ = 0;  // and begins with
  int64_t before_ = 0;   // rows of the passes before it
};

// Steps of the same decode rows that a device takes one after another by itself, each from the
// tokens that the one before chose, while the host still reads those of an earlier one. Only one of
// an engine at a time, and no other step while it goes on.
class StepsAhead {
 public:
  // samplers[r] draws what follows row r (null: the highest logit), and knows of each token that
  // was read.
  StepsAhead(Stepper& stepper, std::vector<DecodeRow> rows, std::vector<Sampler*> samplers);

  // Takes the tokens of the rows into context, and returns the rows with those that follow. Up to
  // `wanted` calls will be made in all from now on. On failure they are not in context, once End
  // was called.
  Result<std::span<const DecodeRow>> Read(int64_t wanted);
  // Forgets the steps that nobody read. The logits of the last one that was are in the rows from
  // logits_row() on; none was where reads() is 0.
  void End();
  uint32_t reads() const { return read_; }
  uint32_t launches() const { return launches_; }
  int32_t logits_row() const { return RowOf(read_ - 1); }

  static constexpr uint32_t kMost = 2;  // steps launched and not read; their logits alternate

 private:
  Status Launch();
  // What a failure leaves, once nothing runs any more; returns it.
  Status GiveUp(const Status& failure);
  int32_t RowOf(uint32_t step) const {
    return static_cast<int32_t>(step % kMost) * static_cast<int32_t>(rows_.size());
  }

  Stepper& stepper_;
  std::vector<DecodeRow> rows_;  // whose tokens are not in context
  std::vector<Sampler*> samplers_;
  StepEnd end_;
  uint32_t launched_ = 0;                     // steps
  uint32_t read_ = 0;                         // of them
  uint32_t launches_ = 0;                     // in all, of which End forgot some
  std::array<Backend::Mark, kMost> marks_{};  // of the last steps launched, by their number
};

}  // namespace omnikv
