#include "policy/omnikv/token_lists.h"

namespace omnikv {

Status TokenLists::Prepare(const PolicyContext& context, const RangeRule& rule, int32_t capacity,
                           int32_t n_choices, int32_t lists, PolicyMemory& memory) {
  backend_ = context.backend;
  rule_ = rule;
  capacity_ = capacity;
  max_seqs_ = context.max_seqs;
  lists_ = lists;
  return memory.Take(*backend_, "chosen tokens",
                     {{list_, ListsBefore(n_choices) * capacity},
                      {count_, ListsBefore(n_choices)},
                      {bounds_, 2 * int64_t{max_seqs_}},
                      {n_candidates_, max_seqs_},
                      {n_pick_, max_seqs_}});
}

void TokenLists::EnqueueRange(const AttendArgs& step) const {
  backend_->Enqueue(PlanRangeArgs{.seqs = step.seqs,
                                  .n_seqs = step.n_seqs,
                                  .rule = rule_,
                                  .bounds = bounds_.as<int32_t>(),
                                  .n_candidates = n_candidates_.as<int32_t>(),
                                  .n_pick = n_pick_.as<int32_t>()});
}

TopKArgs TokenLists::Choice(int32_t choice, const AttendArgs& attend,
                            const SomeTokens& among) const {
  return {.seqs = attend.seqs,
          .n_candidates = n_candidates_.as<int32_t>(),
          .n_pick = n_pick_.as<int32_t>(),
          .index = List(choice),
          .count = Count(choice),
          .capacity = capacity_,
          .n_seqs = attend.n_seqs,
          .among = among};
}

PlanSegment TokenLists::Segment(int32_t choice) const {
  return {.kind = SegmentKind::kList,
          .lists = lists_,
          .capacity = capacity_,
          .index = List(choice),
          .count = Count(choice)};
}

AttnPlan TokenLists::Plan(int32_t choice) const {
  PlanSegment recent;
  recent.bounds = Recent();
  AttnPlan plan;
  plan.Add(Segment(choice));
  plan.Add(recent);
  return plan;
}

SomeTokens TokenLists::Tokens(int32_t choice) const {
  return {.index = List(choice), .count = Count(choice), .capacity = capacity_};
}

}  // namespace omnikv
