#include "policy/omnikv/filter_scores.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <vector>

#include "policy/omnikv/top_p.h"

namespace omnikv {

Status FilterScores::Prepare(const PolicyContext& context, int32_t n_filters,
                             const PolicySettings& settings, PolicyMemory& memory) {
  context_ = context;
  n_filters_ = n_filters;
  softmax_ = settings.Text("score") == "softmax";
  ahead_ = settings.Text("fetch") == "ahead";
  window_ = settings.Text("selector") == "last" ? 1 : static_cast<int32_t>(settings.Int("window"));
  lists_ = settings.Text("lists") == "per_kv_head" ? context.n_kv_heads : 1;
  sinks_ = static_cast<int32_t>(settings.Int("sinks"));
  // An index gives the logits of each head.
  head_max_ = !softmax_ && lists_ == 1 && settings.Text("dense") == "exact";
  top_p_ = settings.Float("top_p");
  if (cuts() && !softmax_) {
    return InvalidArgument(
        fmt::format("policy omnikv: top_p is {} and score is raw, expected score=softmax: logits "
                    "have no sum to take a share of",
                    settings.Text("top_p")));
  }
  stride_ = (context.max_context + 15) / 16 * 16;
  if (context.backend == nullptr) return {};

  const auto seqs = int64_t{context.max_seqs};
  OKV_RETURN_IF_ERROR(memory.Take(*context.backend, "filter scores",
                                  {{logits_, seqs * (head_max_ ? 1 : context.n_heads) * stride_},
                                   {lse_, seqs * context.n_heads},
                                   {rings_, int64_t{n_filters} * seqs * lists_ * window_ * stride_},
                                   {weights_, window_}}));
  std::vector<float> weights(static_cast<size_t>(window_), 1.0f);
  if (settings.Text("selector") == "exp") {
    for (size_t age = 0; age < weights.size(); ++age) {
      weights[age] = std::exp2(-static_cast<float>(age));
    }
  }
  context.backend->Upload(weights_.as(), weights.data(), weights.size() * sizeof(float));
  return {};
}

void FilterScores::AskFor(int32_t filter, AttendArgs& attend) const {
  attend.score = head_max_ ? ScoreKind::kHeadMax : ScoreKind::kLogits;
  attend.scores = Reduces() ? logits_.as<float>() : Ring(filter);
  attend.score_stride = stride_;
  attend.lse = lse_.as<float>();
}

ScoreReduceArgs FilterScores::Reduction(const AttendArgs& attend) const {
  return {.logits = attend.scores,
          .lse = softmax_ ? attend.lse : nullptr,
          .rows = attend.rows,
          .stride = stride_,
          .ring = window_,
          .n_heads = head_max_ ? 1 : attend.n_heads,
          .lists = lists_,
          .sinks = sinks_,
          .n_rows = attend.n_rows,
          .heads = per_kv_head() ? HeadReduce::kSum : HeadReduce::kMax,
          .kv_heads = head_max_ ? HeadMask{} : attend.TakePart(),
          .n_kv_heads = attend.kv.n_kv_heads};
}

void FilterScores::Reduce(int32_t filter, const AttendArgs& attend, const SomeTokens& only,
                          bool by_token) const {
  if (!Reduces()) return;
  ScoreReduceArgs reduction = Reduction(attend);
  reduction.out = Ring(filter);
  reduction.only = only;
  reduction.by_token = by_token;
  context_.backend->Enqueue(reduction);
}

ScoreReduceArgs FilterScores::OfUnits(const AttendArgs& attend, int32_t unit) const {
  ScoreReduceArgs reduction = Reduction(attend);
  reduction.unit = unit;
  reduction.sinks = UnitsOf(sinks_, unit);
  return reduction;
}

void FilterScores::Choose(int32_t filter, const TopKArgs& choice) const {
  ChooseMost(filter, choice);
  if (!cuts()) return;
  context_.backend->Enqueue(MakeCustomArgs(kTopP, TopPArgs{.scores = Ring(filter),
                                                           .weights = weights_.as<float>(),
                                                           .seqs = choice.seqs,
                                                           .n_candidates = choice.n_candidates,
                                                           .index = choice.index,
                                                           .count = choice.count,
                                                           .stride = stride_,
                                                           .share = std::bit_cast<uint64_t>(top_p_),
                                                           .window = window_,
                                                           .lists = lists_,
                                                           .capacity = choice.capacity,
                                                           .n_seqs = choice.n_seqs}));
}

void FilterScores::ChooseMost(int32_t filter, TopKArgs choice) const {
  choice.scores = Ring(filter);
  choice.weights = weights_.as<float>();
  choice.stride = stride_;
  choice.window = window_;
  choice.lists = lists_;
  context_.backend->Enqueue(choice);
}

void FilterScores::CopyFrom(const FilterScores& other) {
  context_.backend->Upload(rings_.as(), other.rings_.as<void>(), rings_.size());
}

std::string FilterScores::Save(int32_t seq, int64_t length) const {
  const size_t bytes = static_cast<size_t>(length) * sizeof(float);
  std::string state(static_cast<size_t>(PastRows()) * bytes, '\0');
  char* to = state.data();
  ForPastRows(seq, [&](const float* row) {
    context_.backend->Download(to, row, bytes);
    to += bytes;
  });
  return state;
}

bool FilterScores::Load(int32_t seq, int64_t length, std::string_view state) {
  const size_t bytes = static_cast<size_t>(length) * sizeof(float);
  if (state.size() != static_cast<size_t>(PastRows()) * bytes) return false;
  ForPastRows(seq, [&](float* row) {
    context_.backend->Upload(row, state.data(), bytes);
    state.remove_prefix(bytes);
  });
  return true;
}

}  // namespace omnikv
