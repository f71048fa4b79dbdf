// dense=indexed of policy omnikv: filters and the other dense layers score the tokens by an int4
// copy of their K (backend/index_ops.h), and the best of them anew by K itself. Long contexts are
// scored by units of tokens first: the best tokens lie in the best units.
#pragma once

#include <cstdint>
#include <vector>

#include "policy/omnikv/budget.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/omnikv/filter_scores.h"
#include "policy/omnikv/token_lists.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. Layers are named by the number of their choice. Thread-compatible.
class KeyIndex {
 public:
  // With a backend, takes `memory` where layers are indexed. kUnsupported for a model that has no
  // index.
  Status Prepare(const PolicyContext& context, const FilterLayers& layers,
                 const OmnikvBudget& budget, const FilterScores& scores, PolicyMemory& memory);

  // A row per token of each layer that chooses, in the order of their choices.
  std::vector<StateSpec> States(const FilterLayers& layers) const;
  void SetStates(const std::vector<StateView>& states) { states_ = states; }
  int64_t RowBytes() const;
  // Whether a step at `tokens` tokens of context scores units first, and the rows that it reads.
  bool ScoresUnits(int64_t tokens) const { return unit_least_ > 0 && tokens >= unit_least_; }
  int64_t RowsRead(const SeqLength& at) const;

  // The rows of the step's tokens.
  void Append(int32_t choice, const AttendArgs& attend) const;
  // How many tokens get exact scores: once per step, before the rest. The step scores units first
  // where `units` says so.
  void BeginStep(const AttendArgs& step, bool units) {
    candidates_.EnqueueRange(step);
    units_first_ = units;
  }
  // What scores.AskFor asks for, without attention: approximate, but exact for the tokens that the
  // approximate scores choose and for the last ones, whose K is read where `reader` finds it once
  // they are near. Reduces them. Returns the first of these: the candidates of the layer's choice.
  SomeTokens Score(const LayerStep& step, int32_t choice, const FilterScores& scores,
                   AttendArgs& attend, AttendArgs& reader) const;

 private:
  // The tokens of the units that have the best ones, by what `of_all` gives of units.
  SomeTokens Near(const IndexScoreArgs& of_all, const FilterScores& scores,
                  const AttendArgs& attend) const;

  PolicyContext context_;
  RangeRule rescored_;
  int32_t lists_ = 1;
  std::vector<StateView> states_;
  TokenLists candidates_;   // one choice: of the layer that scores
  int64_t unit_least_ = 0;  // tokens from which on steps score units first; 0: none
  bool units_first_ = false;
  int64_t unit_stride_ = 0;    // units
  int32_t near_capacity_ = 0;  // tokens
  // Logits [max_seqs, n_heads, stride] and scores [max_seqs, stride] of units; int32 tokens
  // [max_seqs, capacity] and how many [max_seqs].
  Buffer unit_logits_, unit_scores_, near_, near_count_;
};

}  // namespace omnikv
