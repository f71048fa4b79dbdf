// Expected Attention (Devoto et al. 2025; kvpress's ExpectedAttentionPress): once after the prompt,
// each KV head of each layer keeps the tokens to which queries yet to come are expected to give the
// most. Those are taken for normally distributed, with the mean and the covariance of the prompt's
// queries before their rotation, and turned by the mean of the rotations at the next positions. The
// expected weight of a token is then known without a query, and is multiplied by the norm of its
// value.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "policy/prompt_choice.h"

namespace omnikv {
namespace {

class ExpectedAttention : public PromptChoice {
 public:
  void CopyState(const Policy& from) override;
  std::string SaveState(int32_t seq, int64_t length) const override;
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override;

 protected:
  Status ReadSettings(const PolicySettings& settings) override;
  Status Allocate() override;
  bool WeighsAllRows() const override { return true; }
  void Weigh(const LayerStep& step, const AttendArgs& attend) override;
  const float* Score(const LayerStep& step, const AttendArgs& attend, const SeqMeta* seq) override;

 private:
  int64_t MeanFloats() const { return int64_t{context().n_heads} * context().dk; }
  int64_t CovarianceFloats() const { return covariance_ ? MeanFloats() * context().dk : 0; }
  // Bytes of the moments of a layer of a sequence: one count, means, covariances.
  int64_t LayerFloats() const { return kCountFloats + MeanFloats() + CovarianceFloats(); }
  QueryMoments Moments(const LayerStep& step) const;
  const float* InvFreq(int32_t layer) const {
    return context().inv_freq[static_cast<size_t>(layer)];
  }
  int64_t& SeenOf(const LayerStep& step) {
    return seen_[static_cast<size_t>(step.seq * context().n_layers + step.layer)];
  }
  // SeenOf of each layer.
  std::span<int64_t> SeenOf(int32_t seq) {
    const auto n = static_cast<size_t>(context().n_layers);
    return std::span(seen_).subspan(static_cast<size_t>(seq) * n, n);
  }
  std::span<const int64_t> SeenOf(int32_t seq) const {
    return const_cast<ExpectedAttention*>(this)->SeenOf(seq);
  }
  float* MomentsOf(int32_t seq) const {
    return moments_.as<float>() + int64_t{seq} * context().n_layers * LayerFloats();
  }

  static constexpr int64_t kCountFloats = 4;  // keeps what follows at multiples of 16 bytes

  int32_t sinks_ = 0;   // first tokens: they stay, and their queries do not count
  int32_t future_ = 0;  // positions
  bool covariance_ = true;
  bool values_ = true;
  float epsilon_ = 0;
  // Where prompts pass layer by layer, one layer is enough: the first one's place serves all.
  bool one_layer_ = false;
  Buffer moments_;  // [max_seqs, n_layers], LayerFloats() each; or [1]
  Buffer logits_;   // f32 [n_heads, max_context], of one prompt at a time
  // [max_seqs, n_layers]: the tokens of the context when the last chunk of a prompt had been
  // counted in the layer; 0 where the prompt's choice was made.
  std::vector<int64_t> seen_;
};

Status ExpectedAttention::ReadSettings(const PolicySettings& settings) {
  sinks_ = static_cast<int32_t>(settings.Int("sinks"));
  future_ = static_cast<int32_t>(settings.Int("future"));
  covariance_ = settings.Bool("covariance");
  values_ = settings.Bool("vnorm");
  epsilon_ = static_cast<float>(settings.Float("epsilon"));
  if (sinks_ >= settings.Int("budget")) {
    return InvalidArgument(
        fmt::format("policy expected_attention: sinks is {}, expected fewer than the budget of {}",
                    sinks_, settings.Int("budget")));
  }
  return {};
}

Status ExpectedAttention::Allocate() {
  // Later turns pass chunk by chunk.
  one_layer_ = context().by_layer && !recompress();
  seen_.assign(static_cast<size_t>(context().max_seqs) * static_cast<size_t>(context().n_layers),
               0);
  const int64_t layers = one_layer_ ? 1 : static_cast<int64_t>(seen_.size());
  OKV_ASSIGN_OR_RETURN(moments_,
                       memory().Take(backend(), layers * LayerFloats(), "moments of queries"));
  OKV_ASSIGN_OR_RETURN(
      logits_, memory().Take(backend(), context().n_heads * context().max_context, "scores"));
  return {};
}

QueryMoments ExpectedAttention::Moments(const LayerStep& step) const {
  const int64_t layer = one_layer_ ? 0 : int64_t{step.seq} * context().n_layers + step.layer;
  float* const at = moments_.as<float>() + layer * LayerFloats();
  float* const mean = at + kCountFloats;
  return {.mean = mean,
          .covariance = covariance_ ? mean + MeanFloats() : nullptr,
          .count = reinterpret_cast<int32_t*>(at)};
}

void ExpectedAttention::Weigh(const LayerStep& step, const AttendArgs& attend) {
  int64_t& seen = SeenOf(step);
  backend().Enqueue(QueryMomentsArgs{.q = attend.q,
                                     .steps = step.steps + step.seq,
                                     .inv_freq = InvFreq(step.layer),
                                     .out = Moments(step),
                                     .n_rows = attend.n_rows,
                                     .n_heads = attend.n_heads,
                                     .dk = context().dk,
                                     .n_freq = context().n_freq,
                                     .skip = sinks_,
                                     .accumulate = seen > 0 && seen == step.first_pos});
  seen = step.chooses ? 0 : step.first_pos + attend.n_rows;
}

const float* ExpectedAttention::Score(const LayerStep& step, const AttendArgs& attend,
                                      const SeqMeta* seq) {
  backend().Enqueue(ExpectedScoreArgs{.queries = Moments(step),
                                      .kv = attend.kv,
                                      .seqs = seq,
                                      .steps = step.steps + step.seq,
                                      .inv_freq = InvFreq(step.layer),
                                      .logits = logits_.as<float>(),
                                      .out = scores(),
                                      .stride = context().max_context,
                                      .n_heads = attend.n_heads,
                                      .n_freq = context().n_freq,
                                      .future = future_,
                                      .sinks = sinks_,
                                      .scale = attend.scale,
                                      .epsilon = epsilon_,
                                      .values = values_});
  return scores();
}

void ExpectedAttention::CopyState(const Policy& from) {
  const auto& other = static_cast<const ExpectedAttention&>(from);
  seen_ = other.seen_;
  const bool in_prompt = std::ranges::count(seen_, 0) < std::ssize(seen_);
  if (in_prompt) backend().Upload(moments_.as(), other.moments_.as(), moments_.size());
}

// Of a prompt that has not come to its choice: how far each layer has counted, and the moments. One
// that passes layer by layer begins anew where it was cut short.
std::string ExpectedAttention::SaveState(int32_t seq, int64_t length) const {
  const std::span<const int64_t> seen = SeenOf(seq);
  if (one_layer_ || length == 0 || std::ranges::count(seen, length) == 0) return {};
  const auto n_layers = static_cast<size_t>(context().n_layers);
  const size_t bytes = static_cast<size_t>(LayerFloats()) * sizeof(float) * n_layers;
  std::string state(n_layers * sizeof(int64_t) + bytes, '\0');
  std::memcpy(state.data(), seen.data(), n_layers * sizeof(int64_t));
  backend().Download(state.data() + n_layers * sizeof(int64_t), MomentsOf(seq), bytes);
  return state;
}

bool ExpectedAttention::LoadState(int32_t seq, int64_t length, std::string_view state) {
  const auto n_layers = static_cast<size_t>(context().n_layers);
  const std::span<int64_t> seen = SeenOf(seq);
  std::ranges::fill(seen, 0);
  if (state.empty()) return true;
  const size_t bytes = static_cast<size_t>(LayerFloats()) * sizeof(float) * n_layers;
  if (one_layer_ || state.size() != n_layers * sizeof(int64_t) + bytes) return false;
  std::memcpy(seen.data(), state.data(), n_layers * sizeof(int64_t));
  if (std::ranges::any_of(seen, [&](int64_t n) { return n < 0 || n > length; })) return false;
  backend().Upload(MomentsOf(seq), state.data() + n_layers * sizeof(int64_t), bytes);
  return true;
}

}  // namespace

PolicyInfo ExpectedAttentionPolicy() {
  return {.name = "expected_attention",
          .summary =
              "what queries yet to come are expected to weigh most, chosen once per KV head "
              "(Expected Attention)",
          .facts = {.source = "Expected Attention, Devoto et al. 2025, as in kvpress",
                    .chooses = "once after the prompt, by the mean and covariance of its queries "
                               "and the norms of its values",
                    .keeps = "b rows of each KV head and all later ones, on the device",
                    .reads = "b rows and the later ones",
                    .holds = "b rows and the later ones",
                    .loses = "most of the prompt (8 of 8 answers)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = PromptChoiceSettings(
              {{.key = "sinks",
                .type = SettingType::kInt,
                .default_value = "4",
                .help = "first tokens, which stay and whose queries do not count",
                .min = 0,
                .max = 4096},
               {.key = "future",
                .type = SettingType::kInt,
                .default_value = "512",
                .help = "positions after the prompt over which rotations are averaged",
                .min = 1,
                .max = 1e6},
               {.key = "covariance",
                .type = SettingType::kBool,
                .default_value = "1",
                .help = "whether the covariance of the queries counts, or their mean alone"},
               {.key = "vnorm",
                .type = SettingType::kBool,
                .default_value = "1",
                .help = "whether expected weights are multiplied by the norms of the values"},
               {.key = "epsilon",
                .type = SettingType::kFloat,
                .default_value = "0",
                .help = "what is added to expected weights before that",
                .min = 0,
                .max = 1e6}},
              1),
          .make = [] { return std::make_unique<ExpectedAttention>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{
                    {{"budget", std::to_string(std::max<int64_t>(length, 5))}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}},
                            {{"budget", "24"}, {"covariance", "0"}, {"sinks", "0"}},
                            {{"budget", "30"}, {"vnorm", "0"}, {"future", "1"}},
                            {{"budget", "8"}, {"epsilon", "0.01"}, {"sinks", "7"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
