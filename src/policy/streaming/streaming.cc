// StreamingLLM (Xiao et al. 2023): the first `sinks` tokens and a window of the last ones, in every
// layer and for every row, prompt rows included: what a cache of `budget` tokens would have held
// when each token came. `positions=cache` gives tokens their place in that cache as the published
// streaming_llm code does; `original` keeps the place in the text, as most comparisons run it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "policy/policy.h"
#include "policy/turn_queries.h"

namespace omnikv {
namespace {

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
      // Moving the window and the query together changes nothing between them: only the queries of
      // the sinks turn, back to their place in the cache.
      context_.backend->Enqueue(TurnQueries({.q = attend.q,
                                             .out = sink_queries_.as<float>(),
                                             .rows = attend.rows,
                                             .inv_freq = inv_freq,
                                             .n_rows = attend.n_rows,
                                             .n_heads = attend.n_heads,
                                             .dk = attend.kv.dk,
                                             .n_freq = context_.n_freq,
                                             .least = 0,
                                             .most = static_cast<int32_t>(budget_ - 1)}));
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
