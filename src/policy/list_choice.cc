#include "policy/list_choice.h"

namespace omnikv {

Status ListChoice::Prepare(Backend& backend, PolicyMemory& memory, const RangeRule& rule,
                           int32_t n_seqs, int32_t lists, int32_t capacity, std::string_view what,
                           int32_t choices) {
  backend_ = &backend;
  rule_ = rule;
  n_seqs_ = n_seqs;
  lists_ = lists;
  capacity_ = capacity;
  const int64_t all_lists = int64_t{choices} * n_seqs * lists;
  OKV_RETURN_IF_ERROR(memory.Take(backend, what,
                                  {{weight_, 1},
                                   {index_, all_lists * capacity},
                                   {count_, all_lists},
                                   {bounds_, int64_t{2} * n_seqs},
                                   {n_candidates_, n_seqs},
                                   {n_pick_, n_seqs}}));
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
                             int32_t n_seqs, int32_t choice, const int32_t* keep,
                             bool by_row) const {
  backend_->Enqueue(TopKArgs{.scores = scores,
                             .weights = weight_.as<float>(),
                             .seqs = seqs,
                             .n_candidates = n_candidates_.as<int32_t>(),
                             .n_pick = n_pick_.as<int32_t>(),
                             .keep = keep,
                             .index = index(choice),
                             .count = count(choice),
                             .stride = stride,
                             .lists = lists_,
                             .capacity = capacity_,
                             .n_seqs = n_seqs,
                             .by_row = by_row});
}

int32_t* ListChoice::index(int32_t choice) const {
  return index_.as<int32_t>() + int64_t{choice} * n_seqs_ * lists_ * capacity_;
}

int32_t* ListChoice::count(int32_t choice) const {
  return count_.as<int32_t>() + int64_t{choice} * n_seqs_ * lists_;
}

PlanSegment ListChoice::List(int32_t choice) const {
  return {.kind = SegmentKind::kList,
          .unit = rule_.unit,
          .lists = lists_,
          .capacity = capacity_,
          .index = index(choice),
          .count = count(choice)};
}

PlanSegment ListChoice::Range() const {
  return {.bounds = bounds_.as<int32_t>(), .expected = rule_.min_recent * rule_.unit};
}

Retained ListChoice::Kept(int32_t seq) const {
  Retained kept{.first_seq = seq, .n_seqs = 1};
  kept.rows.Add(List());
  kept.rows.Add(Range());
  return kept;
}

}  // namespace omnikv
