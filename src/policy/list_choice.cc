#include "policy/list_choice.h"

namespace omnikv {

Status ListChoice::Prepare(Backend& backend, PolicyMemory& memory, const RangeRule& rule,
                           int32_t n_seqs, int32_t lists, int32_t capacity, std::string_view what) {
  backend_ = &backend;
  rule_ = rule;
  lists_ = lists;
  capacity_ = capacity;
  const int64_t all_lists = int64_t{n_seqs} * lists;
  OKV_ASSIGN_OR_RETURN(weight_, memory.Take(backend, 1, what));
  OKV_ASSIGN_OR_RETURN(index_, memory.Take(backend, all_lists * capacity, what));
  OKV_ASSIGN_OR_RETURN(count_, memory.Take(backend, all_lists, what));
  OKV_ASSIGN_OR_RETURN(bounds_, memory.Take(backend, int64_t{2} * n_seqs, what));
  OKV_ASSIGN_OR_RETURN(n_candidates_, memory.Take(backend, n_seqs, what));
  OKV_ASSIGN_OR_RETURN(n_pick_, memory.Take(backend, n_seqs, what));
  const float one = 1;
  backend.Upload(weight_.as(), &one, sizeof(one));
  return {};
}

void ListChoice::EnqueueRange(const SeqMeta* seqs, int32_t n_seqs, int32_t budget) const {
  RangeRule rule = rule_;
  rule.budget = budget;
  backend_->Enqueue(PlanRangeArgs{.seqs = seqs,
                                  .n_seqs = n_seqs,
                                  .rule = rule,
                                  .bounds = bounds_.as<int32_t>(),
                                  .n_candidates = n_candidates_.as<int32_t>(),
                                  .n_pick = n_pick_.as<int32_t>()});
}

void ListChoice::EnqueueBest(const float* scores, int64_t stride, const SeqMeta* seqs,
                             int32_t n_seqs) const {
  backend_->Enqueue(TopKArgs{.scores = scores,
                             .weights = weight_.as<float>(),
                             .seqs = seqs,
                             .n_candidates = n_candidates_.as<int32_t>(),
                             .n_pick = n_pick_.as<int32_t>(),
                             .index = index_.as<int32_t>(),
                             .count = count_.as<int32_t>(),
                             .stride = stride,
                             .lists = lists_,
                             .capacity = capacity_,
                             .n_seqs = n_seqs});
}

PlanSegment ListChoice::List() const {
  return {.kind = SegmentKind::kList,
          .unit = rule_.unit,
          .lists = lists_,
          .capacity = capacity_,
          .index = index_.as<int32_t>(),
          .count = count_.as<int32_t>()};
}

PlanSegment ListChoice::Range() const {
  return {.bounds = bounds_.as<int32_t>()};
}

Retained ListChoice::Kept(int32_t seq) const {
  Retained kept{.first_seq = seq, .n_seqs = 1};
  kept.rows.Add(List());
  kept.rows.Add(Range());
  return kept;
}

}  // namespace omnikv
