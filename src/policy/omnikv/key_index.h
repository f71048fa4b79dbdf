// dense=indexed of policy omnikv: filters and the other dense layers score the tokens by an int4
// copy of their K (backend/index_ops.h), and the best of them anew by K itself.
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
                 const OmnikvBudget& budget, int32_t lists, PolicyMemory& memory);

  // A row per token of each layer that chooses, in the order of their choices.
  std::vector<StateSpec> States(const FilterLayers& layers) const;
  void SetStates(const std::vector<StateView>& states) { states_ = states; }
  int64_t RowBytes() const;

  // The rows of the step's tokens.
  void Append(int32_t choice, const AttendArgs& attend) const;
  // How many tokens get exact scores: once per step, before the rest.
  void EnqueueRange(const AttendArgs& step) const { candidates_.EnqueueRange(step); }
  // What scores.AskFor asks for, without attention: approximate, but exact for the tokens that the
  // approximate scores choose and for the last ones, whose K is read where `reader` finds it once
  // they are near. Reduces them. Returns the first of these: the candidates of the layer's choice.
  SomeTokens Score(const LayerStep& step, int32_t choice, const FilterScores& scores,
                   AttendArgs& attend, AttendArgs& reader) const;

 private:
  PolicyContext context_;
  int32_t lists_ = 1;
  std::vector<StateView> states_;
  TokenLists candidates_;  // one choice: of the layer that scores
};

}  // namespace omnikv
