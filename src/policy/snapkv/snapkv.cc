// SnapKV (Li et al. 2024), in the form that keeps one set per KV head (kvpress): once after the
// prompt, each KV head of each layer keeps the last `window` tokens of it and those before them to
// which the window's queries give the most weight, smoothed over neighbours.
#include <fmt/format.h>

#include "policy/prompt_choice.h"

namespace omnikv {
namespace {

class SnapKv : public PromptChoice {
 public:
  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.chooses) attend.lse = lse_.as<float>();
  }
  int32_t LastRows() const override { return window_; }

 protected:
  Status ReadSettings(const PolicySettings& settings) override {
    window_ = static_cast<int32_t>(settings.Int("window"));
    kernel_ = static_cast<int32_t>(settings.Int("kernel"));
    pool_ = settings.Text("pool") == "max" ? PoolKind::kMax : PoolKind::kMean;
    if (kernel_ % 2 == 0) {
      return InvalidArgument(
          fmt::format("policy snapkv: kernel is {}, expected an odd number", kernel_));
    }
    if (window_ >= settings.Int("budget")) {
      return InvalidArgument(
          fmt::format("policy snapkv: window is {}, expected fewer than the budget of {}", window_,
                      settings.Int("budget")));
    }
    if (context().backend != nullptr && window_ > context().max_rows) {
      return InvalidArgument(fmt::format(
          "policy snapkv: window is {}, expected at most the {} rows of a step (`prefill_chunk`)",
          window_, context().max_rows));
    }
    return {};
  }

  Status Allocate() override {
    OKV_ASSIGN_OR_RETURN(
        lse_, memory().Take(backend(), int64_t{context().max_rows} * context().n_heads, "sums"));
    OKV_ASSIGN_OR_RETURN(pooled_, TakeScores());
    return {};
  }

  int32_t Recent() const override { return window_; }

  const float* Score(const LayerStep&, const AttendArgs& attend, const SeqMeta* seq) override {
    backend().Enqueue(ScoreArgs{.q = attend.q,
                                .lse = attend.lse,
                                .kv = attend.kv,
                                .seqs = seq,
                                .out = scores(),
                                .stride = context().max_context,
                                .n_rows = attend.n_rows,
                                .n_seqs = 1,
                                .n_heads = attend.n_heads,
                                .lists = context().n_kv_heads,
                                .window = window_,
                                .heads = HeadReduce::kMean,
                                .queries = QueryReduce::kSum,
                                .scale = attend.scale,
                                .softcap = attend.softcap});
    backend().Enqueue(PoolArgs{.in = scores(),
                               .out = pooled_.as<float>(),
                               .n = n_candidates(),
                               .stride = context().max_context,
                               .lists = context().n_kv_heads,
                               .n_seqs = 1,
                               .kernel = kernel_,
                               .kind = pool_});
    return pooled_.as<float>();
  }

 private:
  int32_t window_ = 0;  // the prompt's last tokens, whose queries choose
  int32_t kernel_ = 1;  // tokens
  PoolKind pool_ = PoolKind::kMean;
  Buffer lse_;     // f32 [max_rows, n_heads]
  Buffer pooled_;  // f32 [n_kv_heads, max_context]
};

}  // namespace

PolicyInfo SnapkvPolicy() {
  return {.name = "snapkv",
          .summary = "what the prompt's last queries weigh most, chosen once per KV head (SnapKV)",
          .facts = {.source = "SnapKV, Li et al. 2024; per KV head as in kvpress",
                    .chooses = "once after the prompt, by the weights of its last queries",
                    .keeps = "b rows of each KV head and all later ones, on the device",
                    .reads = "b rows and the later ones",
                    .holds = "b rows and the later ones",
                    .loses = "much of the prompt (8 of 8 answers with kernel=5, also at a "
                             "quarter of what full reads; 1 of 8 with kernel=31)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = PromptChoiceSettings(
              {{.key = "window",
                .type = SettingType::kInt,
                .default_value = "32",
                .help = "last tokens of the prompt, whose queries choose and which stay",
                .min = 1,
                .max = 4096},
               {.key = "kernel",
                .type = SettingType::kInt,
                .default_value = "5",
                .help = "neighbours over which weights are smoothed, odd",
                .min = 1,
                .max = 255},
               {.key = "pool",
                .type = SettingType::kChoice,
                .default_value = "mean",
                .help = "how they are smoothed",
                .choices = {"mean", "max"}}},
              2),
          .make = [] { return std::make_unique<SnapKv>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{
                    {{"budget", std::to_string(std::max<int64_t>(length, 8))}, {"window", "4"}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}, {"window", "8"}},
                            {{"budget", "24"}, {"window", "20"}, {"kernel", "7"}, {"pool", "max"}},
                            {{"budget", "2"}, {"window", "1"}, {"kernel", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
