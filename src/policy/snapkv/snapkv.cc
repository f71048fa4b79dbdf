// SnapKV (Li et al. 2024), in the form that keeps one set per KV head (kvpress): once after the
// prompt, each KV head of each layer keeps the last `window` tokens of it and those before them to
// which the window's queries give the most weight, smoothed over neighbours.
#include <fmt/format.h>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class SnapKv : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
    room_ = settings.Int("room");
    window_ = static_cast<int32_t>(settings.Int("window"));
    kernel_ = static_cast<int32_t>(settings.Int("kernel"));
    pool_ = settings.Text("pool") == "max" ? PoolKind::kMax : PoolKind::kMean;
    recompress_ = settings.Text("turn") == "recompress";
    if (kernel_ % 2 == 0) {
      return InvalidArgument(
          fmt::format("policy snapkv: kernel is {}, expected an odd number", kernel_));
    }
    if (window_ >= settings.Int("budget")) {
      return InvalidArgument(
          fmt::format("policy snapkv: window is {}, expected fewer than the budget of {}", window_,
                      settings.Int("budget")));
    }
    if (context.backend == nullptr) return {};
    if (window_ > context.max_rows) {
      return InvalidArgument(fmt::format(
          "policy snapkv: window is {}, expected at most the {} rows of a step (`prefill_chunk`)",
          window_, context.max_rows));
    }
    return Allocate();
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.chooses) attend.lse = lse_.as<float>();
  }

  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (!step.chooses) return;
    Backend& backend = *context_.backend;
    const SeqMeta* seq = attend.seqs + step.seq;
    backend.Enqueue(ScoreArgs{.q = attend.q,
                              .lse = attend.lse,
                              .kv = attend.kv,
                              .seqs = seq,
                              .out = scores_.as<float>(),
                              .stride = context_.max_context,
                              .n_rows = attend.n_rows,
                              .n_seqs = 1,
                              .n_heads = attend.n_heads,
                              .lists = context_.n_kv_heads,
                              .window = window_,
                              .heads = HeadReduce::kMean,
                              .queries = QueryReduce::kSum,
                              .scale = attend.scale,
                              .softcap = attend.softcap});
    choice_.EnqueueRange(seq, 1);
    backend.Enqueue(PoolArgs{.in = scores_.as<float>(),
                             .out = pooled_.as<float>(),
                             .n = choice_.n_candidates(),
                             .stride = context_.max_context,
                             .lists = context_.n_kv_heads,
                             .n_seqs = 1,
                             .kernel = kernel_,
                             .kind = pool_});
    choice_.EnqueueBest(pooled_.as<float>(), context_.max_context, seq, 1);
  }

  Keeps Kept() const override {
    return {
        .rows = budget_, .first_prompt = !recompress_, .room = room_, .lists = context_.n_kv_heads};
  }
  int32_t LastRows() const override { return window_; }
  std::optional<Retained> Retains(const LayerStep& step) const override {
    if (!step.chooses) return std::nullopt;
    Retained kept{.first_seq = step.seq, .n_seqs = 1};
    kept.rows.Add(choice_.List());
    kept.rows.Add(choice_.Range());
    return kept;
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens - at.gone; }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  // What came after the prompt.
  int64_t Besides(const SeqLength& at) const override {
    return std::max<int64_t>(0, at.tokens - at.gone - budget_);
  }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  Status Allocate() {
    Backend& backend = *context_.backend;
    const int64_t scores = int64_t{context_.n_kv_heads} * context_.max_context;
    OKV_ASSIGN_OR_RETURN(
        lse_, memory_.Take(backend, int64_t{context_.max_rows} * context_.n_heads, "sums"));
    OKV_ASSIGN_OR_RETURN(scores_, memory_.Take(backend, scores, "scores"));
    OKV_ASSIGN_OR_RETURN(pooled_, memory_.Take(backend, scores, "scores"));
    return choice_.Prepare(backend, memory_, {.budget = budget_, .min_recent = window_},
                           /*n_seqs=*/1, context_.n_kv_heads, budget_, "kept tokens");
  }

  PolicyContext context_;
  int32_t budget_ = 0;  // tokens of the prompt that each head keeps, the window's included
  int64_t room_ = 0;    // tokens
  int32_t window_ = 0;  // the prompt's last tokens, whose queries choose
  int32_t kernel_ = 1;  // tokens
  PoolKind pool_ = PoolKind::kMean;
  bool recompress_ = false;  // after each turn, not the first alone
  PolicyMemory memory_;
  // Of one prompt at a time.
  Buffer lse_;              // f32 [max_rows, n_heads]
  Buffer scores_, pooled_;  // f32 [n_kv_heads, max_context]
  ListChoice choice_;       // rows that stay, a list per KV head
};

}  // namespace

PolicyInfo SnapkvPolicy() {
  return {.name = "snapkv",
          .summary = "what the prompt's last queries weigh most, chosen once per KV head (SnapKV)",
          .settings = {{.key = "budget",
                        .type = SettingType::kInt,
                        .default_value = "1024",
                        .help = "tokens of the prompt that each KV head keeps",
                        .min = 2,
                        .max = 1e9},
                       {.key = "window",
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
                        .choices = {"mean", "max"}},
                       {.key = "turn",
                        .type = SettingType::kChoice,
                        .default_value = "append",
                        .help = "later turns: keep all of their tokens, or choose anew after each",
                        .choices = {"append", "recompress"}},
                       RoomSetting()},
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
