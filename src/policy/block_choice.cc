#include "policy/block_choice.h"

#include <fmt/format.h>

#include <algorithm>

namespace omnikv {
namespace {

// Names that differ: sessions with other summaries must not share the memory.
std::string NameOf(SummaryKind kind, int32_t every) {
  switch (kind) {
    case SummaryKind::kMean:
      return every == 1 ? "means of K" : fmt::format("means of K, one of {}", every);
    case SummaryKind::kMax:
      return "maxima of K";
    case SummaryKind::kMinMax:
      return "bounds of K";
    case SummaryKind::kMeanStd:
      return "mean and deviation of K";
  }
  return {};
}

}  // namespace

Status BlockChoice::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  OKV_ASSIGN_OR_RETURN(rule_, ReadRule(settings));
  if (context.backend == nullptr) return {};
  const int64_t most = Blocks(context.max_context);
  stride_ = (most + 15) / 16 * 16;
  const int32_t lists = rule_.per_kv_head ? context.n_kv_heads : 1;
  const auto capacity =
      static_cast<int32_t>(std::clamp<int64_t>(rule_.budget - rule_.recent, 1, most));
  OKV_ASSIGN_OR_RETURN(
      scores_,
      memory_.Take(*context.backend, int64_t{context.max_seqs} * lists * stride_, "block scores"));
  return choice_.Prepare(*context.backend, memory_,
                         {.budget = rule_.budget, .min_recent = rule_.recent, .unit = rule_.block},
                         context.max_seqs, lists, capacity, "chosen blocks");
}

Result<int32_t> BlockChoice::WholeBlocks(std::string_view policy, std::string_view key,
                                         int32_t block, const PolicySettings& settings) {
  const int64_t budget = settings.Int("budget");
  if ((block & (block - 1)) == 0 && budget >= block) return static_cast<int32_t>(budget / block);
  return InvalidArgument(
      fmt::format("policy {}: {} is {} and budget {}, expected a power of two, and a {} at least",
                  policy, key, block, budget, key));
}

std::vector<StateSpec> BlockChoice::States() const {
  std::vector<StateSpec> states;
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    if (!Chooses(layer)) continue;
    states.push_back({layer, rule_.block, SummaryBytes(), NameOf(rule_.kind, rule_.every)});
  }
  return states;
}

DeclaredReads BlockChoice::Reads() const {
  DeclaredReads reads{.n_selections = 1,
                      .max_tokens = int64_t{rule_.budget} * rule_.block,
                      .by_token = false,
                      .max_recent = int64_t{rule_.recent} * rule_.block};
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    reads.selection_of.push_back(Budgeted(layer) ? 0 : -1);
  }
  return reads;
}

void BlockChoice::BeginStep(int32_t variant, const AttendArgs& step) {
  sparse_step_ = variant == 1;
  if (sparse_step_) choice_.EnqueueRange(step.seqs, step.n_seqs);
}

void BlockChoice::MakeStates(int32_t layer, const AttendArgs& attend) {
  if (!Chooses(layer)) return;
  context_.backend->Enqueue(BlockSummaryArgs{.kv = attend.kv,
                                             .seqs = attend.seqs,
                                             .out = Summaries(layer),
                                             .n_rows = attend.n_rows,
                                             .n_seqs = attend.n_seqs,
                                             .unit = rule_.block,
                                             .every = rule_.every,
                                             .kind = rule_.kind});
}

void BlockChoice::Plan(const LayerStep& step, AttendArgs& attend) {
  MakeStates(step.layer, attend);
  if (!Budgeted(step.layer) || step.prefill || !sparse_step_) return;
  if (Chooses(step.layer)) Choose(Summaries(step.layer), attend);
  attend.plan = AttnPlan{};
  attend.plan.Add(choice_.List());
  attend.plan.Add(choice_.Range());
}

void BlockChoice::Choose(const StateView& summaries, const AttendArgs& attend) const {
  context_.backend->Enqueue(BlockScoreArgs{.q = attend.q,
                                           .summaries = summaries,
                                           .seqs = attend.seqs,
                                           .out = scores_.as<float>(),
                                           .stride = stride_,
                                           .n_seqs = attend.n_seqs,
                                           .n_heads = attend.n_heads,
                                           .n_kv_heads = context_.n_kv_heads,
                                           .dk = context_.dk,
                                           .lists = rule_.per_kv_head ? context_.n_kv_heads : 1,
                                           .unit = rule_.block,
                                           .sinks = rule_.sinks,
                                           .kind = rule_.kind,
                                           .heads = rule_.heads});
  choice_.EnqueueBest(scores_.as<float>(), stride_, attend.seqs, attend.n_seqs);
}

}  // namespace omnikv
