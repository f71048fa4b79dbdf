// OmniKV (Hao et al., ICLR 2025), equations 1-4: filter layers attend to everything, and their
// scores choose, anew at every step, the tokens that the layers up to the next filter read.
#include <algorithm>
#include <cmath>

#include "policy/omnikv/budget.h"
#include "policy/omnikv/filter_layers.h"
#include "policy/omnikv/omnikv_settings.h"
#include "policy/omnikv/presets.h"
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
  bool Budgeted(int32_t layer) const override { return !layers_.Dense(layer); }
  int64_t Budget(int64_t length) const override { return budget_.At(length); }
  int64_t Besides(const SeqLength& at) const override { return budget_.Split(at).besides; }
  int64_t WarmRows() const override { return window_; }
  size_t Bytes() const override { return memory_.bytes(); }
  void CopyState(const Policy& from) override;
  std::string SaveState(int64_t length) const override;
  bool LoadState(int64_t length, std::string_view state) override;
  DeclaredReads Reads() const override;
  std::optional<Selection> Selected(const LayerStep& step) const override;

 private:
  Status Allocate();
  // While everything fits, attention to everything is as good as choosing, and cheaper.
  bool Shortcut(const SeqLength& at) const {
    if (context_.force_indices) return false;
    const bool fits = at.tokens <= Budget(at.tokens) + Besides(at);
    return fits ? !context_.fetches : at.tokens <= budget_.rule.dense_below;
  }
  int64_t TokensChosen(const SeqLength& at) const {
    const RangeSplit split = budget_.Split(at);
    return split.recent + split.n_pick;
  }
  float* Ring(int32_t filter) const {  // [max_seqs, window, stride]
    return rings_.as<float>() + int64_t{filter} * context_.max_seqs * window_ * stride_;
  }
  // Rows of all rings that a later step reads; a window of 1 has none.
  int32_t PastRows() const { return window_ == 1 ? 0 : layers_.n_filters() * window_; }
  // The head maximum of one query is the reduced score already: it goes where the choice reads it.
  // Not in a batch, where the choice reads by sequence what attention writes by row.
  bool Reduces() const { return softmax_ || window_ > 1 || context_.max_seqs > 1; }
  void EnqueueRange(const AttendArgs& step) const;
  // Not for a first step that reads everything.
  bool SelectsAtPromptEnd(const LayerStep& step) const {
    return step.wants_selection &&
           !Shortcut({.tokens = step.prompt_end + 1, .prompt = step.prompt_end});
  }
  void AskForScores(int32_t filter, AttendArgs& attend) const;
  void ReduceScores(int32_t filter, const AttendArgs& attend) const;
  void Choose(int32_t filter, const AttendArgs& attend) const;
  // The lists of a filter: [max_seqs, capacity] tokens, [max_seqs].
  int32_t* Index(int32_t filter) const {
    return index_.as<int32_t>() + int64_t{filter} * context_.max_seqs * budget_.capacity;
  }
  int32_t* Count(int32_t filter) const { return count_.as<int32_t>() + filter * context_.max_seqs; }
  AttnPlan ChosenPlan(int32_t filter) const;

  PolicyContext context_;
  FilterLayers layers_;
  bool softmax_ = true;
  int32_t window_ = 1;  // past queries whose scores count, this step's included
  OmnikvBudget budget_;
  int64_t stride_ = 0;        // tokens
  bool sparse_step_ = false;  // what is being recorded
  PolicyMemory memory_;

  Buffer logits_, lse_, rings_, weights_, index_, count_, bounds_, n_candidates_, n_pick_;
};

Status Omnikv::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  OKV_ASSIGN_OR_RETURN(layers_, FilterLayers::Resolve(context, settings));
  softmax_ = settings.Text("score") == "softmax";
  window_ = settings.Text("selector") == "last" ? 1 : static_cast<int32_t>(settings.Int("window"));
  stride_ = (context.max_context + 15) / 16 * 16;
  OKV_ASSIGN_OR_RETURN(budget_, OmnikvBudget::Resolve(context, layers_, settings));
  if (context.backend == nullptr) return {};
  OKV_RETURN_IF_ERROR(Allocate());

  std::vector<float> weights(static_cast<size_t>(window_), 1.0f);
  if (settings.Text("selector") == "exp") {
    for (size_t age = 0; age < weights.size(); ++age) {
      weights[age] = std::exp2(-static_cast<float>(age));
    }
  }
  context.backend->Upload(weights_.as<void>(), weights.data(), weights.size() * sizeof(float));
  return {};
}

Status Omnikv::Allocate() {
  const auto room = [&](Buffer& buffer, int64_t n, const char* what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory_.Take(*context_.backend, n, what));
    return {};
  };
  const auto n_filters = int64_t{layers_.n_filters()};
  const int64_t heads = softmax_ ? context_.n_heads : 1;
  const auto seqs = int64_t{context_.max_seqs};
  OKV_RETURN_IF_ERROR(room(logits_, seqs * heads * stride_, "filter scores"));
  OKV_RETURN_IF_ERROR(room(lse_, seqs * context_.n_heads, "filter scores"));
  OKV_RETURN_IF_ERROR(room(rings_, n_filters * seqs * window_ * stride_, "filter scores"));
  OKV_RETURN_IF_ERROR(room(weights_, window_, "selector weights"));
  OKV_RETURN_IF_ERROR(room(index_, n_filters * seqs * budget_.capacity, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(count_, n_filters * seqs, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(bounds_, 2 * seqs, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(n_candidates_, seqs, "chosen tokens"));
  return room(n_pick_, seqs, "chosen tokens");
}

void Omnikv::BeginStep(int32_t variant, const AttendArgs& step) {
  sparse_step_ = variant == 1;
  if (sparse_step_) EnqueueRange(step);
}

void Omnikv::EnqueueRange(const AttendArgs& step) const {
  context_.backend->Enqueue(PlanRangeArgs{.seqs = step.seqs,
                                          .n_seqs = step.n_seqs,
                                          .rule = budget_.rule,
                                          .bounds = bounds_.as<int32_t>(),
                                          .n_candidates = n_candidates_.as<int32_t>(),
                                          .n_pick = n_pick_.as<int32_t>()});
}

void Omnikv::AskForScores(int32_t filter, AttendArgs& attend) const {
  attend.score = softmax_ ? ScoreKind::kLogits : ScoreKind::kHeadMax;
  attend.scores = Reduces() ? logits_.as<float>() : Ring(filter);
  attend.score_stride = stride_;
  attend.lse = lse_.as<float>();
}

void Omnikv::ReduceScores(int32_t filter, const AttendArgs& attend) const {
  if (!Reduces()) return;
  context_.backend->Enqueue(ScoreReduceArgs{.logits = attend.scores,
                                            .lse = softmax_ ? attend.lse : nullptr,
                                            .out = Ring(filter),
                                            .rows = attend.rows,
                                            .stride = stride_,
                                            .ring = window_,
                                            .n_heads = softmax_ ? attend.n_heads : 1,
                                            .n_rows = attend.n_rows});
}

void Omnikv::Choose(int32_t filter, const AttendArgs& attend) const {
  context_.backend->Enqueue(TopKArgs{.scores = Ring(filter),
                                     .weights = weights_.as<float>(),
                                     .seqs = attend.seqs,
                                     .n_candidates = n_candidates_.as<int32_t>(),
                                     .n_pick = n_pick_.as<int32_t>(),
                                     .index = Index(filter),
                                     .count = Count(filter),
                                     .stride = stride_,
                                     .window = window_,
                                     .capacity = budget_.capacity,
                                     .n_seqs = attend.n_seqs});
}

AttnPlan Omnikv::ChosenPlan(int32_t filter) const {
  PlanSegment chosen;
  chosen.kind = SegmentKind::kList;
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
  if (step.prefill || filter < 0) return;
  if (sparse_step_ &&
      layers_.every_layer()) {  // a pass for the scores alone, then the chosen tokens
    AttendArgs scores = attend;
    scores.o = nullptr;
    AskForScores(filter, scores);
    context_.backend->Enqueue(scores);
    ReduceScores(filter, scores);
    Choose(filter, scores);
    attend.plan = ChosenPlan(filter);
  } else if (layers_.IsFilter(step.layer) && (sparse_step_ || window_ > 1)) {
    AskForScores(filter, attend);  // a dense step too, for the window of past queries
  } else if (sparse_step_ && !layers_.Dense(step.layer)) {
    attend.plan = ChosenPlan(filter);
  }
}

void Omnikv::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!layers_.IsFilter(step.layer)) return;
  const int32_t filter = layers_.FilterOf(step.layer);
  if (!step.prefill) {
    if (attend.score == ScoreKind::kNone) return;
    ReduceScores(filter, attend);
    if (sparse_step_) Choose(filter, attend);
    return;
  }
  if (window_ == 1 && !SelectsAtPromptEnd(step)) return;
  // The prompt's last queries are the window's past when decoding starts: their scores, each with
  // its own position and its own causal limit, one row at a time to bound the memory.
  const int64_t first = std::max<int64_t>(0, step.prompt_end - window_ - step.first_pos);
  for (int64_t r = first; r < attend.n_rows; ++r) {
    AttendArgs row = attend;
    row.q += r * attend.n_heads * attend.kv.dk;
    row.rows += r;
    row.n_rows = 1;
    row.o = nullptr;
    AskForScores(filter, row);
    context_.backend->Enqueue(row);
    ReduceScores(filter, row);
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
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    reads.selection_of.push_back(layers_.Dense(layer) ? -1 : layers_.FilterOf(layer));
  }
  return reads;
}

std::optional<Selection> Omnikv::Selected(const LayerStep& step) const {
  const bool selects = step.prefill ? SelectsAtPromptEnd(step) : sparse_step_;
  if (!selects || layers_.every_layer() || !layers_.IsFilter(step.layer)) return std::nullopt;
  const int32_t filter = layers_.FilterOf(step.layer);
  return Selection{.number = filter, .plan = ChosenPlan(filter)};
}

void Omnikv::CopyState(const Policy& from) {
  const auto& other = static_cast<const Omnikv&>(from);
  context_.backend->Upload(rings_.as<void>(), other.rings_.as<void>(), rings_.size());
}

std::string Omnikv::SaveState(int64_t length) const {
  const size_t bytes = static_cast<size_t>(length) * sizeof(float);
  std::string state(static_cast<size_t>(PastRows()) * bytes, '\0');
  for (int32_t r = 0; r < PastRows(); ++r) {
    char* to = state.data() + static_cast<size_t>(r) * bytes;
    context_.backend->Download(to, Ring(0) + r * stride_, bytes);
  }
  return state;
}

bool Omnikv::LoadState(int64_t length, std::string_view state) {
  const size_t bytes = static_cast<size_t>(length) * sizeof(float);
  if (state.size() != static_cast<size_t>(PastRows()) * bytes) return false;
  for (int32_t r = 0; r < PastRows(); ++r) {
    const char* from = state.data() + static_cast<size_t>(r) * bytes;
    context_.backend->Upload(Ring(0) + r * stride_, from, bytes);
  }
  return true;
}

}  // namespace

PolicyInfo OmnikvPolicy() {
  return {.name = "omnikv",
          .summary = "filter layers read everything and choose what the others read (OmniKV)",
          .facts = OmnikvFacts(),
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
