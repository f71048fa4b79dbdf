#include "policy/omnikv/key_index.h"

#include <fmt/format.h>

namespace omnikv {

Status KeyIndex::Prepare(const PolicyContext& context, const FilterLayers& layers,
                         const OmnikvBudget& budget, int32_t lists, PolicyMemory& memory) {
  context_ = context;
  lists_ = lists;
  if (!layers.indexed()) return {};
  if (context.dk % 2 != 0) {
    return Unsupported(fmt::format(
        "policy omnikv: dense is indexed and a key of this model has {} values, expected an even "
        "number",
        context.dk));
  }
  if (context.backend == nullptr) return {};
  return candidates_.Prepare(context, budget.rescored, budget.rescored_capacity, /*n_choices=*/1,
                             lists, memory);
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

SomeTokens KeyIndex::Score(const LayerStep& step, int32_t choice, const FilterScores& scores,
                           AttendArgs& attend, AttendArgs& reader) const {
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
  // As many as there are to be: top_p is of the scores that come of it.
  scores.ChooseMost(choice, candidates_.Choice(0, attend));
  (*step.bring)(candidates_.Plan(0), reader);
  const SomeTokens candidates = candidates_.Tokens(0);
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
                                        .softcap = attend.softcap});
  scores.Reduce(choice, attend, rescored);
  return candidates;
}

}  // namespace omnikv
