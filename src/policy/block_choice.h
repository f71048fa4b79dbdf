// What policies share that keep everything and read blocks: for each block of tokens a few numbers
// stand for its keys, and a layer reads the blocks that these promise most of, anew at every step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

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
  int32_t Variant(const SeqLength& at) const final { return Shortcut(at) ? 0 : 1; }
  void BeginStep(int32_t variant, const AttendArgs& step) final;
  void Plan(const LayerStep& step, AttendArgs& attend) final;
  DeclaredReads Reads() const final;

  int64_t TokensRead(int32_t layer, const SeqLength& at) const final {
    if (!Budgeted(layer) || Shortcut(at)) return at.tokens;
    return (std::min(Blocks(at.tokens), Most()) - 1) * rule_.block + InLastBlock(at);
  }
  // Of the block that the step's token is in, whose summary is made anew.
  int64_t TokensScored(int32_t layer, const SeqLength& at) const final {
    return Chooses(layer) ? (InLastBlock(at) + rule_.every - 1) / rule_.every : 0;
  }
  int64_t StateBytesRead(int32_t layer, const SeqLength& at) const final {
    return Chooses(layer) && !Shortcut(at) ? Blocks(at.tokens) * SummaryBytes() : 0;
  }
  bool Budgeted(int32_t layer) const final { return layer >= rule_.dense_layers; }
  int64_t Budget(int64_t) const final { return Most() * rule_.block; }
  size_t Bytes() const final { return memory_.bytes(); }

 protected:
  struct Rule {
    int32_t block = 1;         // tokens: WholeBlocks
    int32_t budget = 1;        // blocks that a layer reads, those included that it always does:
    int32_t sinks = 0;         // the first blocks
    int32_t recent = 1;        // and the last ones, 1 at least: the last block may not be full
    int32_t dense_layers = 0;  // the first layers, which read everything
    int32_t layer_step = 1;    // so many layers read the choice of the first of them
    SummaryKind kind = SummaryKind::kMean;
    int32_t every = 1;  // BlockSummaryArgs::every
    HeadReduce heads = HeadReduce::kSum;
    bool per_kv_head = false;  // lists of their own
  };
  // From the policy's own settings; kInvalidArgument as Prepare.
  virtual Result<Rule> ReadRule(const PolicySettings& settings) const = 0;
  // The setting budget in blocks, whose size in tokens the policy's setting `key` is: the bank's
  // blocks are whole blocks, or these are whole blocks of the bank, where that is a power of two.
  static Result<int32_t> WholeBlocks(std::string_view policy, std::string_view key, int32_t block,
                                     const PolicySettings& settings);

 private:
  int64_t Blocks(int64_t tokens) const { return (tokens + rule_.block - 1) / rule_.block; }
  int64_t InLastBlock(const SeqLength& at) const { return (at.tokens - 1) % rule_.block + 1; }
  int64_t Most() const { return rule_.budget; }
  int64_t SummaryBytes() const {
    return int64_t{4} * SummaryArrays(rule_.kind) * context_.n_kv_heads * context_.dk;
  }
  // While everything fits, attention to everything is as good as choosing, and cheaper where all of
  // it is near.
  bool Shortcut(const SeqLength& at) const {
    return !context_.force_indices && !context_.fetches && Blocks(at.tokens) <= Most();
  }
  bool Chooses(int32_t layer) const {
    return Budgeted(layer) && (layer - rule_.dense_layers) % rule_.layer_step == 0;
  }
  const StateView& Summaries(int32_t layer) const {
    return states_[static_cast<size_t>((layer - rule_.dense_layers) / rule_.layer_step)];
  }
  void Choose(const StateView& summaries, const AttendArgs& attend) const;

  PolicyContext context_;
  Rule rule_;
  int64_t stride_ = 0;             // blocks that a row of scores has room for
  bool sparse_step_ = false;       // what is being recorded
  std::vector<StateView> states_;  // of the layers that choose
  // What a layer chooses stands here until the next one chooses.
  PolicyMemory memory_;
  Buffer scores_;      // f32 [max_seqs, lists, stride]
  ListChoice choice_;  // lists of blocks; and the last ones
};

}  // namespace omnikv
