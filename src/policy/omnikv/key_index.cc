#include "policy/omnikv/key_index.h"

#include <fmt/format.h>

namespace omnikv {

Status KeyIndex::Prepare(const PolicyContext& context, const FilterLayers& layers,
                         const OmnikvBudget& budget, int32_t lists, PolicyMemory& memory) {
  context_ = context;
  rule_ = budget.rescored;
  lists_ = lists;
  capacity_ = budget.rescored_capacity;
  if (!layers.indexed()) return {};
  if (context.dk % 2 != 0) {
    return Unsupported(fmt::format(
        "policy omnikv: dense is indexed and a key of this model has {} values, expected an even "
        "number",
        context.dk));
  }
  if (context.backend == nullptr) return {};
  const auto room = [&](Buffer& buffer, int64_t n) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory.Take(*context.backend, n, "rescored tokens"));
    return {};
  };
  const int64_t seqs = context.max_seqs;
  OKV_RETURN_IF_ERROR(room(index_, seqs * lists * capacity_));
  OKV_RETURN_IF_ERROR(room(count_, seqs * lists));
  OKV_RETURN_IF_ERROR(room(bounds_, 2 * seqs));
  OKV_RETURN_IF_ERROR(room(n_candidates_, seqs));
  return room(n_pick_, seqs);
}

int64_t KeyIndex::RowBytes() const {
  return IndexRowBytes(context_.n_kv_heads, context_.dk);
}

std::vector<StateSpec> KeyIndex::States(const FilterLayers& layers) const {
  std::vector<StateSpec> states;
  for (int32_t layer = 0; layers.indexed() && layer < context_.n_layers; ++layer) {
    if (layers.Chooses(layer)) states.push_back({layer, 1, RowBytes(), "int4 K"});
  }
  return states;
}

void KeyIndex::Append(int32_t choice, const AttendArgs& attend) const {
  context_.backend->Enqueue(IndexKeysArgs{.kv = attend.kv,
                                          .seqs = attend.seqs,
                                          .out = states_[static_cast<size_t>(choice)],
                                          .n_rows = attend.n_rows,
                                          .n_seqs = attend.n_seqs});
}

void KeyIndex::EnqueueRange(const AttendArgs& step) const {
  context_.backend->Enqueue(PlanRangeArgs{.seqs = step.seqs,
                                          .n_seqs = step.n_seqs,
                                          .rule = rule_,
                                          .bounds = bounds_.as<int32_t>(),
                                          .n_candidates = n_candidates_.as<int32_t>(),
                                          .n_pick = n_pick_.as<int32_t>()});
}

void KeyIndex::Score(int32_t choice, const FilterScores& scores, AttendArgs& attend) const {
  scores.AskFor(choice, attend);
  context_.backend->Enqueue(IndexScoreArgs{.q = attend.q,
                                           .index = states_[static_cast<size_t>(choice)],
                                           .rows = attend.rows,
                                           .seqs = attend.seqs,
                                           .logits = attend.scores,
                                           .lse = attend.lse,
                                           .stride = attend.score_stride,
                                           .n_rows = attend.n_rows,
                                           .n_heads = attend.n_heads,
                                           .n_kv_heads = context_.n_kv_heads,
                                           .dk = context_.dk,
                                           .scale = attend.scale,
                                           .softcap = attend.softcap});
  scores.Reduce(choice, attend);
  scores.Choose(choice, {.seqs = attend.seqs,
                         .n_candidates = n_candidates_.as<int32_t>(),
                         .n_pick = n_pick_.as<int32_t>(),
                         .index = index_.as<int32_t>(),
                         .count = count_.as<int32_t>(),
                         .capacity = capacity_,
                         .n_seqs = attend.n_seqs});
  context_.backend->Enqueue(RescoreArgs{.q = attend.q,
                                        .kv = attend.kv,
                                        .rows = attend.rows,
                                        .seqs = attend.seqs,
                                        .index = index_.as<int32_t>(),
                                        .count = count_.as<int32_t>(),
                                        .bounds = bounds_.as<int32_t>(),
                                        .logits = attend.scores,
                                        .lse = attend.lse,
                                        .stride = attend.score_stride,
                                        .capacity = capacity_,
                                        .lists = lists_,
                                        .n_rows = attend.n_rows,
                                        .n_seqs = attend.n_seqs,
                                        .n_heads = attend.n_heads,
                                        .scale = attend.scale,
                                        .softcap = attend.softcap});
  scores.Reduce(choice, attend);
}

}  // namespace omnikv
