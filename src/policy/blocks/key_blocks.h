// Policy blocks: how it scores and chooses, with what it keeps of a prompt.
#pragma once

#include <string>
#include <string_view>

#include "policy/block_choice.h"
#include "policy/blocks/block_ops.h"

namespace omnikv {

// Thread-compatible.
class KeyBlocks : public BlockChoice {
 public:
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;
  int32_t LastRows() const override { return queries_; }
  int64_t WarmRows() const override { return queries_; }
  void CopyState(const Policy& from) override;
  std::string SaveState(int32_t seq, int64_t length) const override;
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override;

 protected:
  Result<Rule> ReadRule(const PolicyContext& context, PolicySettings& settings) override;
  Status Allocate() override;
  void SplitBlocks(const AttendArgs& step) override;
  void MakeKeys(int32_t chooser, const AttendArgs& attend) override;
  void Score(int32_t chooser, const AttendArgs& attend) override;
  const int32_t* Keep() const override { return holds_ ? keep_.as<int32_t>() : nullptr; }

 private:
  // Of the representatives; kInvalidArgument where the settings have no such ones.
  Status ReadKeys(const PolicySettings& settings, Rule& rule);
  Status ReadPrompt(const PolicyContext& context, PolicySettings& settings, Rule& rule);

  // Whether a step has a prompt's last rows in a layer that chooses.
  bool EndsPrompt(const LayerStep& step, const AttendArgs& attend) const {
    return step.prefill && Chooses(step.layer) && step.first_pos + attend.n_rows == step.prompt_end;
  }
  bool looks_back() const { return by_weight_ || preselects_; }
  int32_t arrays() const { return SummaryArrays(rule().kind); }
  int64_t KeyWords() const {  // of a block
    return int64_t{arrays()} * rule().key_heads * context().dk;
  }
  float* Keys(int32_t chooser, int32_t seq) const {
    return keys_.as<float>() +
           (int64_t{chooser} * context().max_seqs + seq) * stride() * KeyWords();
  }
  float* Bias(int32_t chooser, int32_t seq) const {
    return bias_.as<float>() + (int64_t{chooser} * context().max_seqs + seq) * lists() * stride();
  }
  // HoldChoiceArgs::made of a place.
  int32_t* MadeAfter(size_t place, int32_t seq) const {
    return made_.as<int32_t>() + place * static_cast<size_t>(context().max_seqs) +
           static_cast<size_t>(seq);
  }
  int64_t ListWords() const { return lists() * int64_t{choice().capacity()}; }  // of a sequence
  // Lists that a preselection makes: the published code makes one for all heads.
  int32_t SelectedLists() const { return kt_ ? 1 : lists(); }
  int32_t WeightRows() const { return kt_ ? context().n_heads : context().n_kv_heads; }
  BlockKeysArgs KeysOf(int32_t chooser, const AttendArgs& attend) const;
  void EnqueueWeights(const AttendArgs& attend, const SeqMeta* seq) const;
  void Preselect(int32_t chooser, int32_t seq_number, const SeqMeta* seq) const;
  // Calls visit(values, words) for what a sequence keeps of its first `length` tokens' blocks.
  template <typename Visit>
  void ForKept(int32_t seq, int64_t length, const Visit& visit) const;

  bool kt_ = false;         // compat=kt
  bool by_weight_ = false;  // representatives by the weights of tokens
  bool preselects_ = false;
  bool holds_ = false;  // a choice stands for several steps
  BlockKeys keys_of_prompt_ = BlockKeys::kMean;
  int32_t representatives_ = 1;
  int32_t queries_ = 1;        // rows of a prompt whose weights count
  int32_t widen_ = 0;          // tokens
  int64_t weight_stride_ = 0;  // tokens

  Buffer keep_, made_;           // HoldChoiceArgs
  Buffer own_seqs_, own_table_;  // SeqMeta [max_seqs]; int32 [max_seqs, stride]: 0, 1, 2 ...
  Buffer keys_;                  // f32 [choosers, max_seqs, stride, arrays, key heads, dk]
  Buffer bias_;                  // f32 [choosers, max_seqs, lists, stride]
  Buffer of_heads_;              // f32 [max_seqs, n_heads, stride]: scores, of compat=kt
  // Of one prompt at a time:
  Buffer lse_;            // f32 [max_rows, n_heads]
  Buffer norms_;          // f32 [queries, n_heads, 2]
  Buffer weights_;        // f32 [WeightRows(), weight_stride]
  Buffer block_weights_;  // f32 [SelectedLists(), stride]
  ListChoice selected_;
};

}  // namespace omnikv
