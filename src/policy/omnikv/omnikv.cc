// OmniKV (Hao et al., ICLR 2025), equations 1-4: filter layers attend to everything, and their
// scores choose, anew at every step, the tokens that the layers up to the next filter read.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "policy/omnikv/budget.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/omnikv/filter_scores.h"
#include "policy/omnikv/omnikv_settings.h"
#include "policy/omnikv/presets.h"
#include "policy/omnikv/sparse_prompt.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {
namespace {

class Omnikv : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  int32_t Variant(const SeqLength& at) const override { return Shortcut(at) ? 0 : 1; }
  Status AfterPrefill(int64_t length) override { return budget_.CheckPrompt(length); }
  void BeginStep(int32_t variant, const AttendArgs& step) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;
  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return layers_.Dense(layer) || Shortcut(at) ? at.tokens : TokensChosen(at);
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return layers_.every_layer() && layers_.IsFilter(layer) && !Shortcut(at) ? at.tokens : 0;
  }
  bool ReadsByScore() const override { return scores_.cuts(); }
  int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                             int32_t n_kv_heads) const override;
  bool Budgeted(int32_t layer) const override { return !layers_.Dense(layer); }
  int64_t Budget(int64_t length) const override { return budget_.At(length); }
  int64_t Besides(const SeqLength& at) const override { return budget_.Split(at).besides; }
  bool DensePrompts() const override { return !prompt_.on(); }
  int32_t PromptStepRows() const override { return prompt_.chunk(); }
  int64_t WarmRows() const override { return scores_.window(); }
  size_t Bytes() const override { return memory_.bytes(); }
  void CopyState(const Policy& from) override {
    scores_.CopyFrom(static_cast<const Omnikv&>(from).scores_);
  }
  std::string SaveState(int64_t length) const override { return scores_.Save(length); }
  bool LoadState(int64_t length, std::string_view state) override {
    return scores_.Load(length, state);
  }
  DeclaredReads Reads() const override;
  std::optional<Selection> Selected(const LayerStep& step) const override;

 private:
  Status Allocate();
  // While everything fits, attention to everything is as good as choosing, and cheaper. Not where
  // the scores say how many tokens are enough.
  bool Shortcut(const SeqLength& at) const {
    if (context_.force_indices) return false;
    const bool fits = at.tokens <= Budget(at.tokens) + Besides(at) && !scores_.cuts();
    return fits ? !context_.fetches : at.tokens <= budget_.rule.dense_below;
  }
  int64_t TokensChosen(const SeqLength& at) const {
    const RangeSplit split = budget_.Split(at);
    return split.recent + split.n_pick;
  }
  void EnqueueRange(const AttendArgs& step) const;
  // Not for a first step that reads everything.
  bool SelectsAtPromptEnd(const LayerStep& step) const {
    return step.wants_selection &&
           !Shortcut({.tokens = step.prompt_end + 1, .prompt = step.prompt_end});
  }
  void Choose(int32_t filter, const AttendArgs& attend) const;
  bool has_wider() const { return below_ > 0; }
  PlanSegment Wider(int32_t filter) const;
  // The lists of a filter: [max_seqs, lists, capacity] tokens, [max_seqs, lists].
  int64_t Lists(int32_t filter) const {
    return int64_t{filter} * context_.max_seqs * scores_.lists();
  }
  int32_t* Index(int32_t filter) const {
    return index_.as<int32_t>() + Lists(filter) * budget_.capacity;
  }
  int32_t* Count(int32_t filter) const { return count_.as<int32_t>() + Lists(filter); }
  AttnPlan ChosenPlan(int32_t filter) const;

  PolicyContext context_;
  FilterLayers layers_;
  FilterScores scores_;
  OmnikvBudget budget_;
  SparsePrompt prompt_;
  bool sparse_step_ = false;  // what is being recorded
  PolicyMemory memory_;

  Buffer index_, count_, bounds_, n_candidates_, n_pick_;
  // What is worth having near: a choice by a larger budget, and its split of a step.
  RangeRule wider_rule_;
  double below_ = 0;  // of the budget
  Buffer wider_index_, wider_count_, wider_pick_;
};

Status Omnikv::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  OKV_ASSIGN_OR_RETURN(layers_, FilterLayers::Resolve(context, settings));
  OKV_RETURN_IF_ERROR(scores_.Prepare(context, layers_.n_filters(), settings, memory_));
  OKV_ASSIGN_OR_RETURN(budget_, OmnikvBudget::Resolve(context, layers_, settings));
  OKV_RETURN_IF_ERROR(prompt_.Prepare(context, settings, memory_));
  below_ = settings.Float("below");
  wider_rule_ = budget_.rule;
  wider_rule_.budget = static_cast<int32_t>(std::min(
      static_cast<double>(context.max_context), std::ceil((1 + below_) * budget_.rule.budget)));
  wider_rule_.share = std::min(1.0, (1 + below_) * budget_.rule.share);
  return context.backend != nullptr ? Allocate() : Status();
}

Status Omnikv::Allocate() {
  const auto room = [&](Buffer& buffer, int64_t n) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory_.Take(*context_.backend, n, "chosen tokens"));
    return {};
  };
  const auto seqs = int64_t{context_.max_seqs};
  const int64_t lists = Lists(layers_.n_filters());
  OKV_RETURN_IF_ERROR(room(index_, lists * budget_.capacity));
  OKV_RETURN_IF_ERROR(room(count_, lists));
  OKV_RETURN_IF_ERROR(room(bounds_, 2 * seqs));
  OKV_RETURN_IF_ERROR(room(n_candidates_, seqs));
  OKV_RETURN_IF_ERROR(room(n_pick_, seqs));
  if (!has_wider()) return {};
  OKV_RETURN_IF_ERROR(room(wider_index_, lists * wider_rule_.budget));
  OKV_RETURN_IF_ERROR(room(wider_count_, lists));
  return room(wider_pick_, seqs);
}

int64_t Omnikv::HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                                   int32_t n_kv_heads) const {
  const bool chose = scores_.cuts() && !layers_.Dense(layer) && !Shortcut(at);
  if (!chose || at.tokens <= at.prompt) return HeadTokensRead(layer, at, n_kv_heads);
  std::vector<int32_t> counts(static_cast<size_t>(scores_.lists()));
  context_.backend->Download(counts.data(),
                             Count(layers_.FilterOf(layer)) + int64_t{seq} * scores_.lists(),
                             counts.size() * sizeof(int32_t));
  const int64_t chosen = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return (chosen + int64_t{budget_.Split(at).recent} * scores_.lists()) *
         (n_kv_heads / scores_.lists());
}

void Omnikv::BeginStep(int32_t variant, const AttendArgs& step) {
  sparse_step_ = variant == 1;
  if (sparse_step_) EnqueueRange(step);
}

void Omnikv::EnqueueRange(const AttendArgs& step) const {
  const auto split = [&](const RangeRule& rule, const Buffer& n_pick) {
    context_.backend->Enqueue(PlanRangeArgs{.seqs = step.seqs,
                                            .n_seqs = step.n_seqs,
                                            .rule = rule,
                                            .bounds = bounds_.as<int32_t>(),
                                            .n_candidates = n_candidates_.as<int32_t>(),
                                            .n_pick = n_pick.as<int32_t>()});
  };
  if (has_wider()) split(wider_rule_, wider_pick_);  // its bounds give way to the selection's
  split(budget_.rule, n_pick_);
}

PlanSegment Omnikv::Wider(int32_t filter) const {
  if (!has_wider()) return {};
  return {.kind = SegmentKind::kList,
          .capacity = wider_rule_.budget,
          .index = wider_index_.as<int32_t>() + Lists(filter) * wider_rule_.budget,
          .count = wider_count_.as<int32_t>() + Lists(filter)};
}

void Omnikv::Choose(int32_t filter, const AttendArgs& attend) const {
  TopKArgs choice{.seqs = attend.seqs,
                  .n_candidates = n_candidates_.as<int32_t>(),
                  .n_pick = n_pick_.as<int32_t>(),
                  .index = Index(filter),
                  .count = Count(filter),
                  .capacity = budget_.capacity,
                  .n_seqs = attend.n_seqs};
  scores_.Choose(filter, choice);
  if (!has_wider()) return;
  choice.n_pick = wider_pick_.as<int32_t>();
  choice.index = wider_index_.as<int32_t>() + Lists(filter) * wider_rule_.budget;
  choice.count = wider_count_.as<int32_t>() + Lists(filter);
  choice.capacity = wider_rule_.budget;
  scores_.ChooseMost(filter, choice);
}

AttnPlan Omnikv::ChosenPlan(int32_t filter) const {
  PlanSegment chosen;
  chosen.kind = SegmentKind::kList;
  chosen.lists = scores_.lists();
  chosen.index = Index(filter);
  chosen.count = Count(filter);
  chosen.capacity = budget_.capacity;
  PlanSegment recent;
  recent.bounds = bounds_.as<int32_t>();
  AttnPlan plan;
  plan.Add(chosen);
  plan.Add(recent);
  return plan;
}

void Omnikv::Plan(const LayerStep& step, AttendArgs& attend) {
  attend.plan = AttnPlan::Dense();
  const int32_t filter = layers_.FilterOf(step.layer);
  if (prompt_.Chooses(step, attend.n_rows) && layers_.IsFilter(step.layer)) {
    prompt_.AskForWeights(attend);
  } else if (prompt_.Chooses(step, attend.n_rows) && !layers_.Dense(step.layer)) {
    prompt_.Gather(step, attend);
  }
  if (step.prefill || filter < 0) return;
  if (sparse_step_ &&
      layers_.every_layer()) {  // a pass for the scores alone, then the chosen tokens
    AttendArgs scores = attend;
    scores.o = nullptr;
    scores_.AskFor(filter, scores);
    context_.backend->Enqueue(scores);
    scores_.Reduce(filter, scores);
    Choose(filter, scores);
    attend.plan = ChosenPlan(filter);
  } else if (layers_.IsFilter(step.layer) && (sparse_step_ || scores_.window() > 1)) {
    scores_.AskFor(filter, attend);  // a dense step too, for the window of past queries
  } else if (sparse_step_ && !layers_.Dense(step.layer)) {
    attend.plan = ChosenPlan(filter);
  }
}

void Omnikv::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!layers_.IsFilter(step.layer)) return;
  const int32_t filter = layers_.FilterOf(step.layer);
  if (!step.prefill) {
    if (attend.score == ScoreKind::kNone) return;
    scores_.Reduce(filter, attend);
    if (sparse_step_) Choose(filter, attend);
    return;
  }
  if (prompt_.Chooses(step, attend.n_rows)) prompt_.Choose(step, attend);
  if (scores_.window() == 1 && !SelectsAtPromptEnd(step)) return;
  // The prompt's last queries are the window's past when decoding starts: their scores, each with
  // its own position and its own causal limit, one row at a time to bound the memory.
  const int64_t first = std::max<int64_t>(0, step.prompt_end - scores_.window() - step.first_pos);
  for (int64_t r = first; r < attend.n_rows; ++r) {
    AttendArgs row = attend;
    row.q += r * attend.n_heads * attend.kv.dk;
    row.rows += r;
    row.n_rows = 1;
    row.o = nullptr;
    scores_.AskFor(filter, row);
    context_.backend->Enqueue(row);
    scores_.Reduce(filter, row);
  }
  if (!SelectsAtPromptEnd(step)) return;
  if (filter == 0) EnqueueRange(attend);
  Choose(filter, attend);
}

DeclaredReads Omnikv::Reads() const {
  DeclaredReads reads;
  if (layers_.every_layer()) return reads;  // all of them read everything, for the scores
  reads.n_selections = layers_.n_filters();
  reads.max_tokens = budget_.max_tokens;
  reads.by_token = !scores_.per_kv_head();
  reads.max_recent = budget_.MaxRecent();
  const auto context = static_cast<int32_t>(context_.max_context);
  reads.max_below = std::max<int64_t>(
      0, BudgetAt(wider_rule_.budget, wider_rule_.share, context) - budget_.At(context));
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    reads.selection_of.push_back(layers_.Dense(layer) ? -1 : layers_.FilterOf(layer));
  }
  return reads;
}

std::optional<Selection> Omnikv::Selected(const LayerStep& step) const {
  const bool selects = step.prefill ? SelectsAtPromptEnd(step) : sparse_step_;
  if (!selects || layers_.every_layer() || scores_.per_kv_head()) return std::nullopt;
  if (!layers_.IsFilter(step.layer)) return std::nullopt;
  const int32_t filter = layers_.FilterOf(step.layer);
  return Selection{.number = filter, .plan = ChosenPlan(filter), .wider = Wider(filter)};
}

}  // namespace

PolicyInfo OmnikvPolicy() {
  return {.name = "omnikv",
          .summary = "filter layers read everything and choose what the others read (OmniKV)",
          .facts = OmnikvFacts(),
          .kind = PolicyKind::kSelects,
          .knob = {.key = "budget", .with = {{"dense_below", "0"}}},
          .settings = OmnikvSettings(),
          .make = [] { return std::make_unique<Omnikv>(); },
          .batches = true,
          .covering = OmnikvCovering,
          .exempt = "",
          .test_settings = OmnikvTestSettings(),
          .recommended =
              [](std::string_view model_name, int32_t n_layers) {
                return OmnikvPresetFor(model_name, n_layers).measured;
              }};
}

}  // namespace omnikv
