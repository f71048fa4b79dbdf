#include "bank/away_attention.h"

#include <algorithm>

namespace omnikv {

LastRowsConfig AwayAttention::LastRowsOf(const BankConfig& bank, const AwayConfig& config) {
  if (!config.attends || config.reads.max_recent == 0) {
    return {.layers = std::vector<bool>(bank.layers.size())};
  }
  return LastRows::OfSelections(bank, config.reads, config.n_seqs);
}

size_t AwayAttention::Bytes(const BankConfig& bank, const AwayConfig& config) {
  const LastRowsConfig last = LastRowsOf(bank, config);
  if (!LastRows::Any(last)) return 0;
  return LastRows::Bytes(bank, last) +
         static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.n_heads) * sizeof(float);
}

Result<std::unique_ptr<AwayAttention>> AwayAttention::Create(Backend& backend, Bank& bank,
                                                             const AwayConfig& config) {
  std::unique_ptr<AwayAttention> away(new AwayAttention(backend, bank));
  OKV_ASSIGN_OR_RETURN(away->last_,
                       LastRows::Create(backend, bank, LastRowsOf(bank.config(), config)));
  OKV_RETURN_IF_ERROR(away->Allocate(config));
  return away;
}

Status AwayAttention::Allocate(const AwayConfig& config) {
  int32_t dv = 0;
  for (const LayerSpec& layer : bank_.config().layers) dv = std::max(dv, layer.dv);
  const size_t heads = static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.n_heads);
  OKV_ASSIGN_OR_RETURN(lse_, backend_.Allocate(heads * sizeof(float), "last rows"));
  OKV_ASSIGN_OR_RETURN(away_lse_,
                       backend_.AllocateShared(heads * sizeof(float), "attention on the host"));
  OKV_ASSIGN_OR_RETURN(away_o_,
                       backend_.AllocateShared(heads * static_cast<size_t>(dv) * sizeof(float),
                                               "attention on the host"));
  return {};
}

MergeStatesArgs AwayAttention::Split(int32_t layer, AttendArgs& attend) {
  AttendArgs away = attend;
  away.kv = bank_.HostView(layer);
  away.o = away_o_.as<float>();
  away.lse = away_lse_.as<float>();
  AttnPlan here;
  away.plan = AttnPlan{};
  const auto begin = attend.plan.segments.begin();
  for (auto s = begin; s != begin + attend.plan.n_segments; ++s) {
    (s->kind == SegmentKind::kRange ? here : away.plan).Add(*s);
  }
  if (away.plan.n_segments == 0) {  // a dense step: all is at home, the step's own rows too
    std::swap(here, away.plan);
    here.Add({.end = 0});
  }
  backend_.Join(Lane::kHost, Lane::kMain);
  backend_.Enqueue(away, Lane::kHost);
  MergeStatesArgs merge{
      .parts = {{{.o = attend.o, .lse = lse_.as<float>()}, {.o = away.o, .lse = away.lse}}},
      .n_parts = 2,
      .o = attend.o,
      .lse = attend.lse,
      .n_rows = attend.n_rows,
      .n_heads = attend.n_heads,
      .dv = attend.kv.dv};
  attend.plan = here;
  attend.lse = lse_.as<float>();
  return merge;
}

}  // namespace omnikv
