// OmniKV (Hao et al., ICLR 2025), equations 1-4: filter layers attend to everything, and their
// scores choose, anew at every step, the tokens that the layers up to the next filter read. With
// dense=indexed, filters score everything by an index, and read their own choice.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "policy/omnikv/budget.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/omnikv/filter_scores.h"
#include "policy/omnikv/key_index.h"
#include "policy/omnikv/omnikv_settings.h"
#include "policy/omnikv/presets.h"
#include "policy/omnikv/sparse_prompt.h"
#include "policy/omnikv/token_lists.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {
namespace {

class Omnikv : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  int32_t Variant(const SeqLength& at) const override {
    return Shortcut(at) ? 0 : index_.ScoresUnits(at.tokens) ? kSparse | kUnits : kSparse;
  }
  Status AfterPrefill(int64_t length) override { return budget_.CheckPrompt(length); }
  void BeginStep(int32_t variant, const AttendArgs& step) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;
  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return layers_.ReadsAll(layer) || Shortcut(at) ? at.tokens : TokensChosen(at);
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override;
  int64_t StateBytesRead(int32_t layer, const SeqLength& at) const override {
    const bool reads = layers_.indexed() && layers_.Chooses(layer) && !Shortcut(at);
    return reads ? index_.RowsRead(at) * index_.RowBytes() : 0;
  }
  bool ReadsByScore() const override { return scores_.cuts(); }
  int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                             int32_t n_kv_heads) const override;
  bool Budgeted(int32_t layer) const override { return !layers_.ReadsAll(layer); }
  std::vector<StateSpec> States() const override { return index_.States(layers_); }
  void SetStates(const std::vector<StateView>& states) override { index_.SetStates(states); }
  void MakeStates(int32_t layer, const AttendArgs& attend) override {
    if (layers_.indexed() && layers_.Chooses(layer)) {
      index_.Append(layers_.ChoiceOf(layer), attend);
    }
  }
  int64_t Budget(int64_t length) const override { return budget_.At(length); }
  int64_t Besides(const SeqLength& at) const override { return budget_.Split(at).besides; }
  bool DensePrompts() const override { return !prompt_.on(); }
  int32_t PromptStepRows() const override { return prompt_.chunk(); }
  int64_t WarmRows() const override { return scores_.window(); }
  size_t Bytes() const override { return memory_.bytes(); }
  void CopyState(const Policy& from) override {
    scores_.CopyFrom(static_cast<const Omnikv&>(from).scores_);
  }
  std::string SaveState(int32_t seq, int64_t length) const override {
    return scores_.Save(seq, length);
  }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    return scores_.Load(seq, length, state);
  }
  DeclaredReads Reads() const override;
  std::optional<Selection> Selected(const LayerStep& step) const override;

 private:
  // Bits of variants: layers read what is chosen; the index is scored by units first.
  enum : int32_t { kSparse = 1, kUnits = 2 };

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
  // Not for a first step that reads everything.
  bool SelectsAtPromptEnd(const LayerStep& step) const {
    return step.wants_selection &&
           !Shortcut({.tokens = step.prompt_end + 1, .prompt = step.prompt_end});
  }
  // Before the layer's attention, by a pass for the scores alone; then it reads what it chose.
  void ChooseFirst(const LayerStep& step, int32_t choice, AttendArgs& attend) const;
  // Among all tokens before the last ones, or among these.
  void Choose(int32_t choice, const AttendArgs& attend, const SomeTokens& among = {}) const;

  PolicyContext context_;
  FilterLayers layers_;
  FilterScores scores_;
  OmnikvBudget budget_;
  KeyIndex index_;
  SparsePrompt prompt_;
  bool sparse_step_ = false;  // what is being recorded
  PolicyMemory memory_;
  TokenLists chosen_;
};

Status Omnikv::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  OKV_ASSIGN_OR_RETURN(layers_, FilterLayers::Resolve(context, settings));
  OKV_RETURN_IF_ERROR(scores_.Prepare(context, layers_.n_choices(), settings, memory_));
  OKV_ASSIGN_OR_RETURN(budget_, OmnikvBudget::Resolve(context, layers_, settings));
  OKV_RETURN_IF_ERROR(index_.Prepare(context, layers_, budget_, scores_, memory_));
  OKV_RETURN_IF_ERROR(prompt_.Prepare(context, settings, memory_));
  if (context.backend == nullptr) return {};
  return chosen_.Prepare(context, budget_.rule, budget_.capacity, layers_.n_choices(),
                         scores_.lists(), memory_);
}

int64_t Omnikv::HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                                   int32_t n_kv_heads) const {
  const bool chose = scores_.cuts() && !layers_.ReadsAll(layer) && !Shortcut(at);
  if (!chose || at.tokens <= at.prompt) return HeadTokensRead(layer, at, n_kv_heads);
  std::vector<int32_t> counts(static_cast<size_t>(scores_.lists()));
  context_.backend->Download(
      counts.data(), chosen_.Counts(layers_.ChoiceOf(layer)) + int64_t{seq} * scores_.lists(),
      counts.size() * sizeof(int32_t));
  const int64_t chosen = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return (chosen + int64_t{budget_.Split(at).recent} * scores_.lists()) *
         (n_kv_heads / scores_.lists());
}

void Omnikv::BeginStep(int32_t variant, const AttendArgs& step) {
  sparse_step_ = (variant & kSparse) != 0;
  if (!sparse_step_) return;
  chosen_.EnqueueRange(step);
  if (layers_.indexed()) index_.BeginStep(step, /*units=*/(variant & kUnits) != 0);
}

int64_t Omnikv::TokensScored(int32_t layer, const SeqLength& at) const {
  if (!layers_.ChoosesFirst(layer)) return 0;
  if (!layers_.indexed()) return Shortcut(at) ? 0 : at.tokens;
  return 1 + (Shortcut(at) ? 0 : budget_.Rescored(at));  // the step's own, for the index
}

void Omnikv::Choose(int32_t choice, const AttendArgs& attend, const SomeTokens& among) const {
  scores_.Choose(choice, chosen_.Choice(choice, attend, among));
}

void Omnikv::ChooseFirst(const LayerStep& step, int32_t choice, AttendArgs& attend) const {
  AttendArgs scores = attend;
  scores.o = nullptr;
  SomeTokens among;
  if (layers_.indexed()) {
    among = index_.Score(step, choice, scores_, scores, attend);
  } else {
    scores_.AskFor(choice, scores);
    context_.backend->Enqueue(scores);
    scores_.Reduce(choice, scores);
  }
  Choose(choice, scores, among);
  attend.plan = chosen_.Plan(choice);
}

void Omnikv::Plan(const LayerStep& step, AttendArgs& attend) {
  attend.plan = AttnPlan::Dense();
  MakeStates(step.layer, attend);
  const int32_t choice = layers_.ChoiceOf(step.layer);
  if (prompt_.Chooses(step, attend.n_rows) && layers_.IsFilter(step.layer)) {
    prompt_.AskForWeights(attend);
  } else if (prompt_.Chooses(step, attend.n_rows) && !layers_.Dense(step.layer)) {
    prompt_.Gather(step, attend);
  }
  if (step.prefill || choice < 0) return;
  if (sparse_step_ && layers_.ChoosesFirst(step.layer)) {
    ChooseFirst(step, choice, attend);
  } else if (layers_.Chooses(step.layer) && (sparse_step_ || scores_.window() > 1)) {
    scores_.AskFor(choice, attend);  // a dense step too, for the window of past queries
  } else if (sparse_step_ && !layers_.Dense(step.layer)) {
    attend.plan = chosen_.Plan(choice);
  }
}

void Omnikv::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!layers_.Chooses(step.layer)) return;
  const int32_t choice = layers_.ChoiceOf(step.layer);
  if (!step.prefill) {
    if (attend.score == ScoreKind::kNone) return;
    scores_.Reduce(choice, attend);
    if (sparse_step_) Choose(choice, attend);
    return;
  }
  const bool filters = layers_.IsFilter(step.layer);
  if (filters && prompt_.Chooses(step, attend.n_rows)) prompt_.Choose(step, attend);
  const bool selects = filters && SelectsAtPromptEnd(step);
  if (scores_.window() == 1 && !selects) return;
  // The prompt's last queries are the window's past when decoding starts: their scores, each with
  // its own position and its own causal limit, one row at a time to bound the memory.
  const int64_t first = std::max<int64_t>(0, step.prompt_end - scores_.window() - step.first_pos);
  for (int64_t r = first; r < attend.n_rows; ++r) {
    AttendArgs row = attend;
    row.q += r * attend.n_heads * attend.kv.dk;
    row.rows += r;
    row.n_rows = 1;
    row.o = nullptr;
    scores_.AskFor(choice, row);
    context_.backend->Enqueue(row);
    scores_.Reduce(choice, row);
  }
  if (!selects) return;
  if (layers_.FilterOf(step.layer) == 0) chosen_.EnqueueRange(attend);
  Choose(choice, attend);
}

DeclaredReads Omnikv::Reads() const {
  DeclaredReads reads{.gathers_prompts = prompt_.on()};
  const bool selections = !layers_.every_layer();
  if (!selections && !layers_.indexed()) return reads;  // all read everything, for the scores
  reads.max_tokens = budget_.max_tokens;
  if (selections) {
    reads.n_selections = layers_.n_filters();
    reads.by_token = !scores_.per_kv_head();
    reads.max_ahead = budget_.max_ahead;
  }
  reads.max_recent = budget_.MaxRecent();
  // A step that selects for a sequence below dense_below reads all of it as its last tokens.
  const bool whole = context_.max_seqs > 1 && budget_.rule.dense_below > 0;
  if (layers_.indexed() && !scores_.per_kv_head() && !whole && reads.max_recent > 0) {
    const RangeRule& rescored = budget_.rescored;
    reads.max_candidates = BudgetAt(rescored.budget, rescored.share, context_.max_context);
  }
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    reads.selection_of.push_back(layers_.ReadsAll(layer)               ? -1
                                 : selections && !layers_.Dense(layer) ? layers_.FilterOf(layer)
                                                                       : kFewRows);
  }
  return reads;
}

std::optional<Selection> Omnikv::Selected(const LayerStep& step) const {
  const bool selects = step.prefill ? SelectsAtPromptEnd(step) : sparse_step_;
  if (!selects || layers_.every_layer() || scores_.per_kv_head()) return std::nullopt;
  if (!layers_.IsFilter(step.layer)) return std::nullopt;
  const int32_t choice = layers_.ChoiceOf(step.layer);
  return Selection{.number = layers_.FilterOf(step.layer),
                   .plan = chosen_.Plan(choice),
                   .scores = scores_.OfStep(choice, chosen_)};
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
