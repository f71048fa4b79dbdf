#include "bank/set_simulation.h"

#include "base/check.h"

namespace omnikv {

SelectionOnHost ReadSelection(Backend& backend, const Selection& selection, const SeqMeta* seq,
                              bool with_scores) {
  const AttnPlan& plan = selection.plan;
  OKV_CHECK(plan.n_segments == 2);
  SelectionOnHost on_host;
  int32_t count = 0;
  backend.Download(&count, plan.segments[0].count, sizeof(count));
  on_host.index.resize(static_cast<size_t>(count));
  backend.Download(on_host.index.data(), plan.segments[0].index, on_host.index.size() * 4);
  backend.Download(on_host.bounds, plan.segments[1].bounds, sizeof(on_host.bounds));
  SeqMeta meta;
  backend.Download(&meta, seq, sizeof(meta));
  on_host.kv_len = meta.kv_len;
  if (!with_scores) return on_host;
  const StepScores& scores = selection.scores;
  backend.Download(&count, scores.n_candidates, sizeof(count));
  on_host.scores.resize(static_cast<size_t>(count));
  backend.Download(on_host.scores.data(),
                   scores.scores + (meta.kv_len - 1) % scores.window * scores.stride,
                   on_host.scores.size() * sizeof(float));
  return on_host;
}

SetSimulation::SetSimulation(Backend& reference, const DeclaredReads& reads, int64_t max_tokens,
                             int32_t n_slots)
    : max_tokens_(static_cast<int32_t>(max_tokens)),
      ahead_(reads.max_ahead > 0),
      slots_(reference) {
  const Status allocated = slots_.Allocate({.groups = 1,
                                            .n_slots = n_slots,
                                            .capacity = static_cast<int32_t>(reads.max_tokens),
                                            .ahead = static_cast<int32_t>(reads.max_ahead),
                                            .max_tokens = max_tokens_});
  OKV_CHECK(allocated.ok(), "{}", allocated.message());
}

void SetSimulation::Step(const SelectionOnHost& selection) {
  OKV_CHECK(selection.kv_len <= max_tokens_);
  const SeqMeta seq{.q_len = 1, .kv_len = selection.kv_len};
  const int32_t block_table = 0;  // one block holds the context: a token is its row
  const auto count = static_cast<int32_t>(selection.index.size());
  const auto n_candidates = static_cast<int32_t>(selection.scores.size());
  StepScores scores;
  if (ahead_) scores = {selection.scores.data(), &n_candidates, n_candidates};
  slots_.Update(0,
                {.seqs = &seq,
                 .index = selection.index.data(),
                 .count = &count,
                 .bounds = selection.bounds,
                 .block_table = &block_table,
                 .block_tokens = max_tokens_},
                Slots::Use::kStep, scores);
}

}  // namespace omnikv
