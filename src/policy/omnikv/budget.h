// How many tokens a sparse layer of policy omnikv reads: `budget`
// selected ones, and the last `tail` generated ones besides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/ops.h"
#include "omnikv/status.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/policy.h"

namespace omnikv {

struct OmnikvBudget {
  RangeRule rule;
  RangeRule rescored;    // of the tokens whose scores an index gives: how many get exact ones
  int32_t capacity = 0;  // tokens that a list of selected ones has room for
  int32_t rescored_capacity = 0;  // that a list of rescored ones has room for
  int64_t max_tokens = 0;         // that a layer reads at most
  int64_t max_ahead = 0;          // DeclaredReads'

  // From `budget` or `mem`, `tail`, `fetch` and the selector's window. kInvalidArgument
  // names what this model cannot have, and settings that would select nothing.
  static Result<OmnikvBudget> Resolve(const PolicyContext& context, const FilterLayers& layers,
                                      PolicySettings& settings);
  // kInvalidArgument where that is so of a prompt of `prompt` tokens.
  Status CheckPrompt(int64_t prompt) const;
  int64_t At(int64_t length) const { return BudgetAt(rule.budget, rule.share, length); }
  // DeclaredReads::max_recent.
  int64_t MaxRecent() const {
    return rule.tail == kWholeAnswer ? 0 : std::max<int64_t>(1, rule.tail + rule.min_recent);
  }
  RangeSplit Split(const SeqLength& at) const { return SplitBy(rule, at); }
  // Tokens that get exact scores, the last ones included.
  int64_t Rescored(const SeqLength& at) const {
    const RangeSplit split = SplitBy(rescored, at);
    return int64_t{split.recent} + split.n_pick;
  }

 private:
  static RangeSplit SplitBy(const RangeRule& rule, const SeqLength& at) {
    return SplitRange(rule, static_cast<int32_t>(at.tokens), static_cast<int32_t>(at.prompt));
  }
};

}  // namespace omnikv
