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
  OKV_ASSIGN_OR_RETURN(rule_, ReadRule(context, settings));
  if (context.backend == nullptr) return {};
  const BlockRule& blocks = rule_.blocks;
  stride_ = (Blocks(context.max_context) + 15) / 16 * 16;
  OKV_ASSIGN_OR_RETURN(scores_,
                       memory_.Take(*context.backend, int64_t{context.max_seqs} * lists() * stride_,
                                    "block scores"));
  const RangeRule range{.budget = blocks.budget, .min_recent = blocks.recent, .unit = blocks.block};
  OKV_RETURN_IF_ERROR(choice_.Prepare(*context.backend, memory_, range, context.max_seqs, lists(),
                                      Capacity(), "chosen blocks",
                                      blocks.token_step > 1 ? 2 * n_choosers() : 1));
  return Allocate();
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
  for (int32_t layer = 0; layer < context_.n_layers && !rule_.own_keys; ++layer) {
    if (!Chooses(layer)) continue;
    states.push_back({layer, Unit(), SummaryBytes(), NameOf(rule_.kind, rule_.every)});
  }
  return states;
}

DeclaredReads BlockChoice::Reads() const {
  const int64_t all = Blocks(context_.max_context) * Unit();
  const int64_t recent = int64_t{rule_.blocks.recent} * Unit();
  DeclaredReads reads{.n_selections = n_choosers(),
                      .max_tokens = std::min(int64_t{Capacity()} * Unit() + recent, all),
                      .by_token = false,
                      .unit = rule_.per_kv_head ? 0 : Unit(),
                      .max_recent = std::min(recent, all)};
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    reads.selection_of.push_back(Budgeted(layer) ? ChooserOf(layer) : -1);
  }
  return reads;
}

void BlockChoice::BeginStep(int32_t variant, const AttendArgs& step) {
  variant_ = variant;
  if ((variant & kChosen) == 0) return;
  choice_.EnqueueRange(step.seqs, step.n_seqs);
  SplitBlocks(step);
}

void BlockChoice::MakeStates(int32_t layer, const AttendArgs& attend) {
  if (Chooses(layer)) MakeKeys(ChooserOf(layer), attend);
}

void BlockChoice::MakeKeys(int32_t chooser, const AttendArgs& attend) {
  context_.backend->Enqueue(BlockSummaryArgs{.kv = attend.kv,
                                             .seqs = attend.seqs,
                                             .out = states_[static_cast<size_t>(chooser)],
                                             .n_rows = attend.n_rows,
                                             .n_seqs = attend.n_seqs,
                                             .unit = Unit(),
                                             .every = rule_.every,
                                             .kind = rule_.kind,
                                             .format = Format()});
}

void BlockChoice::Plan(const LayerStep& step, AttendArgs& attend) {
  // Keys of the policy's own are made of a prompt when it is whole.
  if (step.prefill ? !rule_.own_keys : (variant_ & kCompletes) != 0) MakeStates(step.layer, attend);
  if (!Budgeted(step.layer) || step.prefill || (variant_ & kChosen) == 0) return;
  const int32_t choice = ChoiceOf(step.layer);
  if (Chooses(step.layer)) {
    if ((variant_ & kScores) != 0) Score(ChooserOf(step.layer), attend);
    choice_.EnqueueBest(scores(), stride_, attend.seqs, attend.n_seqs, choice, Keep());
  }
  attend.plan = AttnPlan{};
  attend.plan.Add(choice_.List(choice));
  attend.plan.Add(choice_.Range());
}

BlockScoreArgs BlockChoice::ScoreOf(const StateView& summaries, const AttendArgs& attend) const {
  return {.q = attend.q,
          .summaries = summaries,
          .seqs = attend.seqs,
          .out = scores(),
          .stride = stride_,
          .n_seqs = attend.n_seqs,
          .n_heads = attend.n_heads,
          .n_kv_heads = context_.n_kv_heads,
          .dk = context_.dk,
          .lists = lists(),
          .unit = Unit(),
          .sinks = rule_.blocks.sinks,
          .kind = rule_.kind,
          .format = Format(),
          .heads = rule_.heads};
}

void BlockChoice::Score(int32_t chooser, const AttendArgs& attend) {
  context_.backend->Enqueue(ScoreOf(states_[static_cast<size_t>(chooser)], attend));
}

}  // namespace omnikv
