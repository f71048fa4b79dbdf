// StreamingLLM (Xiao et al. 2023): the first `sinks` tokens and a window of the last ones, in every
// layer and for every row, prompt rows included: what a cache of `budget` tokens would have held
// when each token came. `positions=cache` gives tokens their place in that cache as the published
// streaming_llm code does; `original` keeps the place in the text, as most comparisons run it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "policy/policy.h"
#include "policy/streaming/turn_back.h"

namespace omnikv {
namespace {

void TurnBack(const void* raw) {
  const auto& a = *static_cast<const TurnBackArgs*>(raw);
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const int32_t from = a.rows[r].pos;
    const int32_t to = std::min(from, a.budget - 1);
    for (int32_t i = 0; i < a.dk; ++i) {
      const bool rotated = i < 2 * a.n_freq;
      const int32_t f = i < a.n_freq ? i : i - a.n_freq;
      // The two angles as RopeTable makes them (f32 products), their difference exactly.
      const double angle = rotated
                               ? static_cast<double>(static_cast<float>(to) * a.inv_freq[f]) -
                                     static_cast<double>(static_cast<float>(from) * a.inv_freq[f])
                               : 0;
      const double c = std::cos(angle);
      const double s = i < a.n_freq ? -std::sin(angle) : std::sin(angle);
      const int32_t partner = i < a.n_freq ? i + a.n_freq : i - a.n_freq;
      for (int32_t h = 0; h < a.n_heads; ++h) {
        const int64_t at = (static_cast<int64_t>(r) * a.n_heads + h) * a.dk;
        a.out[at + i] =
            rotated ? static_cast<float>(a.q[at + i] * c + a.q[at + partner] * s) : a.q[at + i];
      }
    }
  }
}

Cost TurnBackCost(const void* raw) {
  const auto& a = *static_cast<const TurnBackArgs*>(raw);
  const auto n = static_cast<uint64_t>(a.n_rows) * static_cast<uint64_t>(a.n_heads * a.dk);
  return {.bytes_read = 4 * n, .bytes_written = 4 * n, .flops = 4 * n};
}

constexpr CustomKernels kTurnBack = {.name = "StreamingTurnBack",
                                     .ref = TurnBack,
                                     .cpu = [](const void* args, ThreadPool&) { TurnBack(args); },
#ifdef OMNIKV_HAVE_CUDA
                                     .cuda = TurnBackCuda,
#endif
                                     .cost = TurnBackCost};

class Streaming : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = settings.Int("budget");
    if (const double share = settings.Float("sink_share"); share > 0) {
      const double sinks = std::round(share * static_cast<double>(budget_));
      settings.Resolve("sinks", fmt::format("{:.0f}", std::max(1.0, sinks)));
    }
    sinks_ = settings.Int("sinks");
    if (sinks_ >= budget_) {
      return InvalidArgument(fmt::format(
          "policy streaming: sinks is {}, expected fewer than the budget of {}", sinks_, budget_));
    }
    if (settings.Text("positions") == "cache" && context.backend != nullptr) {
      const auto bytes = sizeof(float) * static_cast<size_t>(context.max_rows) *
                         static_cast<size_t>(context.n_heads * context.dk);
      OKV_ASSIGN_OR_RETURN(sink_queries_, context.backend->Allocate(bytes, "sink queries"));
    }
    return {};
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    PlanSegment sinks;
    sinks.end = static_cast<int32_t>(sinks_);
    PlanSegment window;
    window.begin = static_cast<int32_t>(sinks_);
    window.window = static_cast<int32_t>(budget_ - sinks_);
    const float* inv_freq = context_.inv_freq[static_cast<size_t>(step.layer)];
    if (sink_queries_.size() != 0 && inv_freq != nullptr) {
      sinks.q = sink_queries_.as<float>();
      const TurnBackArgs args{.q = attend.q,
                              .out = sink_queries_.as<float>(),
                              .rows = attend.rows,
                              .inv_freq = inv_freq,
                              .n_rows = attend.n_rows,
                              .n_heads = attend.n_heads,
                              .dk = attend.kv.dk,
                              .n_freq = context_.n_freq,
                              .budget = static_cast<int32_t>(budget_)};
      context_.backend->Enqueue(MakeCustomArgs(kTurnBack, args));
    }
    attend.plan = AttnPlan{};
    if (sinks_ > 0) attend.plan.Add(sinks);
    attend.plan.Add(window);
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return std::min(at.tokens, budget_);
  }
  bool DensePrompts() const override { return false; }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  TokenRange Dropped(int64_t length, int32_t) const override {
    return {sinks_, std::max(sinks_, length + 1 - (budget_ - sinks_))};
  }
  size_t Bytes() const override { return sink_queries_.size(); }

 private:
  PolicyContext context_;
  int64_t sinks_ = 0;   // tokens
  int64_t budget_ = 0;  // tokens, sinks and window
  Buffer sink_queries_;
};

}  // namespace

PolicyInfo StreamingPolicy() {
  return {.name = "streaming",
          .summary = "the first tokens and a window of the last, nothing between (StreamingLLM)",
          .facts = {.source = "StreamingLLM, Xiao et al. 2024",
                    .chooses = "never",
                    .keeps = "the first rows and the last ones, on the device",
                    .reads = "b rows",
                    .holds = "b + 64 rows",
                    .loses = "what lies between the first rows and the last (6 of 8 answers; 2 "
                             "of 2 at a quarter of what full reads)"},
          .kind = PolicyKind::kWindow,
          .knob = {.key = "budget"},
          .settings = {{.key = "sinks",
                        .type = SettingType::kInt,
                        .default_value = "4",
                        .help = "first tokens that are always read",
                        .min = 0,
                        .max = 1e6},
                       {.key = "sink_share",
                        .type = SettingType::kFloat,
                        .default_value = "0",
                        .help = "share of the budget that sinks take, one token at least, in place "
                                "of sinks; 0: none",
                        .max = 1},
                       {.key = "budget",
                        .type = SettingType::kInt,
                        .default_value = "1024",
                        .help = "tokens a layer reads, sinks and window",
                        .min = 1,
                        .max = 1e9},
                       {.key = "positions",
                        .type = SettingType::kChoice,
                        .default_value = "original",
                        .help = "where tokens stand: in the text, or in the kept cache",
                        .choices = {"original", "cache"}}},
          .make = [] { return std::make_unique<Streaming>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                const std::string budget = std::to_string(length);
                return std::vector<SettingList>{{{"budget", budget}},
                                                {{"budget", budget}, {"positions", "cache"}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}, {"positions", "cache"}},
                            {{"budget", "24"}, {"sinks", "0"}, {"positions", "cache"}},
                            {{"budget", "1"}, {"sinks", "0"}},
                            {{"budget", "24"}, {"sink_share", "0.25"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
