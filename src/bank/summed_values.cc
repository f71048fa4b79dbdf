#include "bank/summed_values.h"

#include <algorithm>

#include "bank/fetched_values.h"

namespace omnikv {

bool SummedValues::Any(const BankConfig& bank, const AwayConfig& config) {
  return config.sums_values && config.reads.gives_logits && FetchedValues::Any(bank, config.reads);
}

Result<std::unique_ptr<SummedValues>> SummedValues::Create(Backend& backend, Bank& bank,
                                                           const AwayConfig& config) {
  std::unique_ptr<SummedValues> values(new SummedValues(backend, bank, config));
  OKV_RETURN_IF_ERROR(values->Allocate(config));
  return values;
}

Status SummedValues::Allocate(const AwayConfig& config) {
  int32_t dv = 0;
  for (const LayerSpec& layer : bank_.config().layers) dv = std::max(dv, layer.dv);
  const auto take = [&](Buffer& buffer, int64_t values_of_a_head) -> Status {
    const size_t heads = static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.n_heads);
    const size_t bytes = sizeof(float) * heads * static_cast<size_t>(values_of_a_head);
    OKV_ASSIGN_OR_RETURN(buffer, backend_.AllocateShared(bytes, "sums of V on the host"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(logits_, config.reads.max_tokens));
  return take(away_o_, dv);
}

std::optional<PickHeadsArgs> SummedValues::Send(int32_t layer, const AttendArgs& attend) {
  if (attend.logits == nullptr || attend.lse != nullptr || !attend.heads.All() ||
      attend.score != ScoreKind::kNone ||
      !FetchedValues::Takes(bank_.config(), reads_, layer, attend)) {
    return {};
  }
  const PlanSegment& list = attend.plan.segments[0];
  const PickLogitsArgs pick{.logits = attend.logits,
                            .rows = attend.rows,
                            .index = list.index,
                            .count = list.count,
                            .out = logits_.as<float>(),
                            .stride = attend.logits_stride,
                            .capacity = list.capacity,
                            .lists = list.lists,
                            .n_rows = attend.n_rows,
                            .n_seqs = attend.n_seqs,
                            .n_heads = attend.n_heads};
  const SumValuesArgs sum{.logits = pick.out,
                          .lse_in = attend.lse_in,
                          .kv = bank_.HostView(layer).EachQueryHead(attend.kv.HeadRepeats()),
                          .index = list.index,
                          .count = list.count,
                          .rows = attend.rows,
                          .seqs = attend.seqs,
                          .o = away_o_.as<float>(),
                          .capacity = list.capacity,
                          .lists = list.lists,
                          .n_rows = attend.n_rows,
                          .n_seqs = attend.n_seqs,
                          .n_heads = attend.n_heads};
  backend_.Enqueue(pick);
  backend_.Join(Lane::kHost, Lane::kMain);
  backend_.Enqueue(sum, Lane::kHost);
  return PickHeadsArgs{.from = sum.o,
                       .to = attend.o,
                       .n_heads = attend.n_heads,
                       .width = attend.kv.dv,
                       .n_rows = attend.n_rows};
}

}  // namespace omnikv
