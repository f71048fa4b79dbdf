// What policies share that keep everything and read blocks: for each block of tokens a few numbers
// stand for its keys, and a layer reads the blocks that these promise most of, anew at every step
// or every so many steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "policy/block_rule.h"
#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {

// Thread-compatible.
class BlockChoice : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) final;
  std::vector<StateSpec> States() const final;
  void MakeStates(int32_t layer, const AttendArgs& attend) final;
  void SetStates(const std::vector<StateView>& states) final { states_ = states; }
  // Without kChosen everything is read. A step that keeps a choice has the ops of one that chooses
  // but for the scores, so a sequence that reads everything may be in it.
  int32_t Variant(const SeqLength& at) const final {
    const int32_t completes = context_.force_indices || Completes(at) ? kCompletes : 0;
    return completes | (Shortcut(at) ? 0 : Scores(at) ? kChosen | kScores : kChosen);
  }
  void BeginStep(int32_t variant, const AttendArgs& step) final;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  DeclaredReads Reads() const final;

  int64_t TokensRead(int32_t layer, const SeqLength& at) const final {
    if (!Budgeted(layer) || Shortcut(at)) return at.tokens;
    const int64_t blocks = rule_.blocks.BlocksRead(at.tokens, at.prompt);
    return (blocks - 1) * rule_.blocks.block + InLastBlock(at);
  }
  // Of the block that the step's token completes, if it does: its summary is made.
  int64_t TokensScored(int32_t layer, const SeqLength& at) const final {
    return Chooses(layer) && Completes(at) ? UnitsOf(rule_.blocks.block, rule_.every) : 0;
  }
  int64_t StateBytesRead(int32_t layer, const SeqLength& at) const final {
    const bool reads = Chooses(layer) && !Shortcut(at) && Scores(at);
    return reads ? Blocks(at.tokens) * SummaryBytes() : 0;
  }
  bool Budgeted(int32_t layer) const final { return layer >= rule_.dense_layers; }
  int64_t Budget(int64_t) const final { return int64_t{rule_.blocks.budget} * rule_.blocks.block; }
  size_t Bytes() const final { return memory_.bytes(); }

 protected:
  struct Rule {
    BlockRule blocks;          // of WholeBlocks
    int32_t dense_layers = 0;  // the first layers, which read everything
    int32_t layer_step = 1;    // so many layers read the choice of the first of them
    SummaryKind kind = SummaryKind::kMean;
    int32_t every = 1;  // BlockSummaryArgs::every
    HeadReduce heads = HeadReduce::kSum;
    bool per_kv_head = false;  // lists of their own
    // The policy keeps what stands for blocks itself: MakeKeys and Score are its own.
    bool own_keys = false;
    int32_t key_heads = 0;  // of such keys
    bool current = true;    // blocks of generated tokens have keys that stand for them, too
  };
  // From the policy's own settings; kInvalidArgument as Prepare.
  virtual Result<Rule> ReadRule(const PolicyContext& context, PolicySettings& settings) = 0;
  // Where there is a backend, the policy's own memory.
  virtual Status Allocate() { return {}; }
  // After the range of a step that chooses or keeps.
  virtual void SplitBlocks(const AttendArgs& step) { static_cast<void>(step); }
  // Makes the keys of the blocks that the step's tokens complete, of choosing layer `chooser`.
  virtual void MakeKeys(int32_t chooser, const AttendArgs& attend);
  // Enqueues scores() of all blocks, by the step's queries.
  virtual void Score(int32_t chooser, const AttendArgs& attend);
  // ListChoice::EnqueueBest's; null: every step chooses.
  virtual const int32_t* Keep() const { return nullptr; }

  // The setting budget in blocks, whose size in tokens the policy's setting `key` is: the bank's
  // blocks are whole blocks, or these are whole blocks of the bank, where that is a power of two.
  static Result<int32_t> WholeBlocks(std::string_view policy, std::string_view key, int32_t block,
                                     const PolicySettings& settings);
  // Of the blocks whose keys lie in `summaries`, by the sequences of `seqs`.
  BlockScoreArgs ScoreOf(const StateView& summaries, const AttendArgs& attend) const;

  const PolicyContext& context() const { return context_; }
  const Rule& rule() const { return rule_; }
  PolicyMemory& memory() { return memory_; }
  const ListChoice& choice() const { return choice_; }
  float* scores() const { return scores_.as<float>(); }  // [max_seqs, lists, stride()]
  int64_t stride() const { return stride_; }             // blocks
  int32_t lists() const { return rule_.per_kv_head ? context_.n_kv_heads : 1; }
  bool Chooses(int32_t layer) const {
    return Budgeted(layer) && (layer - rule_.dense_layers) % rule_.layer_step == 0;
  }
  // The number of the layer that chooses for this one.
  int32_t ChooserOf(int32_t layer) const { return (layer - rule_.dense_layers) / rule_.layer_step; }
  int32_t n_choosers() const {
    const int32_t sparse = std::max(0, context_.n_layers - rule_.dense_layers);
    return (sparse + rule_.layer_step - 1) / rule_.layer_step;
  }

 private:
  // Bits of variants: chosen blocks are read; some sequence chooses; some completes a block.
  enum : int32_t { kChosen = 1, kScores = 2, kCompletes = 4 };

  int64_t Blocks(int64_t tokens) const { return UnitsOf(static_cast<int32_t>(tokens), Unit()); }
  int32_t Unit() const { return rule_.blocks.block; }
  int32_t Capacity() const {  // of a list
    const int64_t most = Blocks(context_.max_context);
    return static_cast<int32_t>(
        std::clamp<int64_t>(rule_.blocks.budget - rule_.blocks.recent, 1, most));
  }
  int64_t InLastBlock(const SeqLength& at) const { return (at.tokens - 1) % Unit() + 1; }
  int64_t SummaryBytes() const {
    const int64_t heads = rule_.own_keys ? rule_.key_heads : context_.n_kv_heads;
    return static_cast<int64_t>(
        DTypeBytes(Format(), static_cast<size_t>(SummaryArrays(rule_.kind) * heads * context_.dk)));
  }
  // Of summaries. Keys of the policy's own are f32.
  DType Format() const {
    return rule_.own_keys ? DType::kF32 : SummaryFormat(rule_.kind, context_.kv_dtype);
  }
  // While everything fits, attention to everything is as good as choosing, and cheaper where all of
  // it is near.
  bool Shortcut(const SeqLength& at) const {
    return !context_.force_indices && !context_.fetches &&
           Blocks(at.tokens) <= rule_.blocks.budget && rule_.blocks.Excluded(at.prompt) == 0;
  }
  // Whether a step's token completes a block that has keys.
  bool Completes(const SeqLength& at) const { return rule_.current && at.tokens % Unit() == 0; }
  // Whether a step scores blocks; where indices are forced, all do, so that one recording serves.
  bool Scores(const SeqLength& at) const {
    return context_.force_indices || rule_.blocks.ChosenAt(at.tokens, at.prompt) == at.tokens;
  }
  // Which of the choices side by side is a layer's.
  int32_t ChoiceOf(int32_t layer) const {
    return rule_.blocks.token_step > 1 ? ChooserOf(layer) : 0;
  }

  PolicyContext context_;
  Rule rule_;
  int64_t stride_ = 0;
  int32_t variant_ = 0;            // what is being recorded
  std::vector<StateView> states_;  // of the layers that choose
  // What a layer chooses stands here until the next one chooses; where it stands for several steps,
  // by layer, and twice (HoldChoice of policy blocks).
  PolicyMemory memory_;
  Buffer scores_;
  ListChoice choice_;  // lists of blocks; and the last ones
};

}  // namespace omnikv
