#include "policy/omnikv/key_index.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/round.h"

namespace omnikv {
namespace {

// Units first pay where they leave few of the tokens: from so many times the candidates on.
constexpr int64_t kContextOfCandidates = 8 * kIndexUnit;

// By its name, a saved context with an index of another format is refused.
constexpr char kFormat[] = "int4 K with bf16 ranges";

}  // namespace

Status KeyIndex::Prepare(const PolicyContext& context, const FilterLayers& layers,
                         const OmnikvBudget& budget, const FilterScores& scores,
                         PolicyMemory& memory) {
  context_ = context;
  rescored_ = budget.rescored;
  lists_ = scores.lists();
  if (!layers.indexed()) return {};
  if (context.dk % 2 != 0) {
    return Unsupported(fmt::format(
        "policy omnikv: dense is indexed and a key of this model has {} values, expected an even "
        "number",
        context.dk));
  }
  // A share of the context stays one as it grows.
  const int64_t least = kContextOfCandidates * rescored_.budget;
  const bool units = scores.bounded() && rescored_.share == 0 && least <= context.max_context;
  unit_least_ = units ? least : 0;
  if (context.backend == nullptr) return {};
  OKV_RETURN_IF_ERROR(candidates_.Prepare(context, rescored_, budget.rescored_capacity,
                                          /*n_choices=*/1, lists_, memory));
  if (!units) return {};
  near_capacity_ = (rescored_.budget + 1) * kIndexUnit;
  unit_stride_ = RoundUp(context.max_context, 4 * kIndexUnit) / kIndexUnit;  // whole fours
  const auto seqs = int64_t{context.max_seqs};
  return memory.Take(*context.backend, "scores of units",
                     {{unit_logits_, seqs * context.n_heads * unit_stride_},
                      {unit_scores_, seqs * unit_stride_},
                      {near_, seqs * near_capacity_},
                      {near_count_, seqs}});
}

int64_t KeyIndex::RowsRead(const SeqLength& at) const {
  if (!ScoresUnits(at.tokens)) return at.tokens;
  const RangeSplit split =
      SplitRange(rescored_, static_cast<int32_t>(at.tokens), static_cast<int32_t>(at.prompt));
  const int64_t candidates = at.tokens - split.recent;
  const int64_t units = std::min<int64_t>(split.n_pick, candidates / kIndexUnit);
  return at.tokens + units * kIndexUnit + candidates % kIndexUnit + split.recent;
}

int64_t KeyIndex::RowBytes() const {
  return IndexRowBytes(context_.n_kv_heads, context_.dk);
}

std::vector<StateSpec> KeyIndex::States(const FilterLayers& layers) const {
  std::vector<StateSpec> states;
  for (int32_t layer = 0; layers.indexed() && layer < context_.n_layers; ++layer) {
    if (layers.Chooses(layer)) states.push_back({layer, 1, RowBytes(), kFormat});
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

SomeTokens KeyIndex::Near(const IndexScoreArgs& of_all, const FilterScores& scores,
                          const AttendArgs& attend) const {
  IndexScoreArgs of_units = of_all;
  of_units.unit = kIndexUnit;
  of_units.logits = unit_logits_.as<float>();
  of_units.stride = unit_stride_;
  context_.backend->Enqueue(of_units);
  ScoreReduceArgs reduction = scores.OfUnits(attend, kIndexUnit);
  reduction.logits = of_units.logits;
  reduction.out = unit_scores_.as<float>();
  reduction.stride = unit_stride_;
  context_.backend->Enqueue(reduction);
  // The k best tokens lie in the k best units, or in fewer.
  TopKArgs best = candidates_.Choice(0, attend);
  best.unit = kIndexUnit;
  best.scores = reduction.out;
  best.weights = scores.weights();
  best.stride = unit_stride_;
  best.index = near_.as<int32_t>();
  best.count = near_count_.as<int32_t>();
  best.capacity = near_capacity_;
  context_.backend->Enqueue(best);
  return {.index = best.index, .count = best.count, .capacity = near_capacity_, .by_place = true};
}

SomeTokens KeyIndex::Score(const LayerStep& step, int32_t choice, const FilterScores& scores,
                           AttendArgs& attend, AttendArgs& reader) const {
  scores.AskFor(choice, attend);
  IndexScoreArgs logits = {.q = attend.q,
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
                           .softcap = attend.softcap};
  const SomeTokens near = units_first_ ? Near(logits, scores, attend) : SomeTokens{};
  logits.only = near;
  logits.by_token = units_first_;
  if (units_first_) logits.only.bounds = candidates_.Recent();  // Rescore replaces theirs too
  context_.backend->Enqueue(logits);
  scores.Reduce(choice, attend, near, units_first_);
  // As many as there are to be: top_p is of the scores that come of it.
  scores.ChooseMost(choice, candidates_.Choice(0, attend, near));
  (*step.bring)(candidates_.Plan(0), reader);
  SomeTokens candidates = candidates_.Tokens(0);
  candidates.by_place = units_first_;  // so the choice gathers nothing
  SomeTokens rescored = candidates;
  rescored.bounds = candidates_.Recent();
  context_.backend->Enqueue(RescoreArgs{.q = attend.q,
                                        .kv = reader.kv,
                                        .rows = attend.rows,
                                        .seqs = reader.seqs,
                                        .tokens = rescored,
                                        .logits = attend.scores,
                                        .lse = attend.lse,
                                        .stride = attend.score_stride,
                                        .lists = lists_,
                                        .n_rows = attend.n_rows,
                                        .n_seqs = attend.n_seqs,
                                        .n_heads = attend.n_heads,
                                        .scale = attend.scale,
                                        .softcap = attend.softcap,
                                        .by_token = units_first_});
  scores.Reduce(choice, attend, rescored, units_first_);
  return candidates;
}

}  // namespace omnikv
