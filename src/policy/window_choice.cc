#include "policy/window_choice.h"

#include <fmt/format.h>

#include <iterator>

namespace omnikv {

Status WindowChoice::ReadSettings(const PolicySettings& settings) {
  window_ = static_cast<int32_t>(settings.Int("window"));
  kernel_ = static_cast<int32_t>(settings.Int("kernel"));
  pool_ = settings.Text("pool") == "max" ? PoolKind::kMax : PoolKind::kMean;
  if (kernel_ % 2 == 0) {
    return InvalidArgument(
        fmt::format("policy {}: kernel is {}, expected an odd number", name_, kernel_));
  }
  if (window_ >= settings.Int("budget")) {
    return InvalidArgument(
        fmt::format("policy {}: window is {}, expected fewer than the budget of {}", name_, window_,
                    settings.Int("budget")));
  }
  if (context().backend != nullptr && window_ > context().max_rows) {
    return InvalidArgument(fmt::format(
        "policy {}: window is {}, expected at most the {} rows of a step (`prefill_chunk`)", name_,
        window_, context().max_rows));
  }
  return {};
}

Status WindowChoice::Allocate() {
  OKV_ASSIGN_OR_RETURN(
      lse_, memory().Take(backend(), int64_t{context().max_rows} * context().n_heads, "sums"));
  OKV_ASSIGN_OR_RETURN(pooled_, TakeScores());
  return {};
}

const float* WindowChoice::Score(const LayerStep&, const AttendArgs& attend, const SeqMeta* seq) {
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

std::vector<SettingSpec> WindowChoiceSettings(std::vector<SettingSpec> own) {
  std::vector<SettingSpec> settings = {
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
       .choices = {"mean", "max"}}};
  std::move(own.begin(), own.end(), std::back_inserter(settings));
  return PromptChoiceSettings(std::move(settings), 2);
}

}  // namespace omnikv
