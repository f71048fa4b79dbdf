#include "bank/away_attention.h"

#include <algorithm>

#include "base/check.h"

namespace omnikv {
namespace {

bool IsAway(const BankConfig& bank, const AwayConfig& config, size_t layer) {
  const LayerSpec& spec = bank.layers[layer];
  return spec.OneStream() && spec.OnHost() && config.reads.selection_of[layer] >= 0;
}

// The last tokens may begin anywhere in a block, and steps that ran ahead and are forgotten may
// have begun one more.
int64_t BlocksKept(const BankConfig& bank, const AwayConfig& config) {
  return bank.BlocksFor(config.reads.max_recent) + 2;
}

}  // namespace

bool AwayAttention::Any(const BankConfig& bank, const AwayConfig& config) {
  if (config.n_heads == 0 || config.reads.max_recent == 0) return false;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (IsAway(bank, config, layer)) return true;
  }
  return false;
}

int64_t AwayAttention::KeptTokens(const BankConfig& bank, const AwayConfig& config) {
  return Any(bank, config) ? BlocksKept(bank, config) * bank.block_tokens : 0;
}

size_t AwayAttention::Bytes(const BankConfig& bank, const AwayConfig& config) {
  if (!Any(bank, config)) return 0;
  size_t row_bytes = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (IsAway(bank, config, layer)) row_bytes += bank.RowBytes(layer);
  }
  const auto rows = static_cast<size_t>(KeptTokens(bank, config) * bank.max_seqs);
  return rows * row_bytes + static_cast<size_t>(bank.Rows().table_entries) * sizeof(int32_t) +
         static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.n_heads) * sizeof(float);
}

Result<std::unique_ptr<AwayAttention>> AwayAttention::Create(Backend& backend, Bank& bank,
                                                             const AwayConfig& config) {
  std::unique_ptr<AwayAttention> away(
      new AwayAttention(backend, bank, BlocksKept(bank.config(), config)));
  OKV_RETURN_IF_ERROR(away->Allocate(config));
  return away;
}

Status AwayAttention::Allocate(const AwayConfig& config) {
  const BankConfig& bank = bank_.config();
  const RowLayout layout = bank.Rows();
  std::vector<int32_t> entries(static_cast<size_t>(layout.table_entries));
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto seq_blocks = static_cast<size_t>(layout.seq_blocks);
    const auto kept = static_cast<size_t>(blocks_);
    entries[i] = static_cast<int32_t>(i / seq_blocks * kept + i % seq_blocks % kept);
  }
  OKV_ASSIGN_OR_RETURN(entries_, backend_.Allocate(entries.size() * sizeof(int32_t), "last rows"));
  backend_.Upload(entries_.as(), entries.data(), entries_.size());
  rows_.resize(bank.layers.size());
  const auto rows = static_cast<size_t>(KeptTokens(bank, config) * bank.max_seqs);
  int32_t dv = 0;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (!IsAway(bank, config, layer)) continue;
    OKV_ASSIGN_OR_RETURN(rows_[layer], backend_.Allocate(rows * bank.RowBytes(layer), "last rows"));
    dv = std::max(dv, bank.layers[layer].dv);
  }
  const size_t heads = static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.n_heads);
  OKV_ASSIGN_OR_RETURN(lse_, backend_.Allocate(heads * sizeof(float), "last rows"));
  OKV_ASSIGN_OR_RETURN(away_lse_,
                       backend_.AllocateShared(heads * sizeof(float), "attention on the host"));
  OKV_ASSIGN_OR_RETURN(away_o_,
                       backend_.AllocateShared(heads * static_cast<size_t>(dv) * sizeof(float),
                                               "attention on the host"));
  return {};
}

KvView AwayAttention::View(int32_t layer) const {
  KvView view = bank_.View(layer).MovedTo(rows_[static_cast<size_t>(layer)].as<std::byte>());
  view.block_table = entries_.as<int32_t>();
  return view;
}

void AwayAttention::Fill(int32_t seq) {
  const int64_t bt = bank_.config().block_tokens;
  const int64_t length = bank_.Length(seq);
  const int64_t first = std::max<int64_t>(0, (length + bt - 1) / bt - blocks_);
  const int64_t before = bank_.TableOffset(seq) / bank_.config().Rows().seq_blocks * blocks_;
  backend_.Join(Lane::kIn, Lane::kMain);
  backend_.Join(Lane::kIn, Lane::kOut);
  for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
    if (!Has(layer)) continue;
    const auto row_bytes =
        static_cast<int64_t>(bank_.config().RowBytes(static_cast<size_t>(layer)));
    auto* const rows = rows_[static_cast<size_t>(layer)].as<std::byte>();
    for (int64_t t = first * bt; t < length; t += bt) {
      bank_.CopyFromHome(layer, seq, t, std::min(t + bt, length),
                         rows + (before + t / bt % blocks_) * bt * row_bytes);
    }
  }
  backend_.Join(Lane::kMain, Lane::kIn);
}

void AwayAttention::StoreHome(int32_t layer, const RowMeta* rows, const SeqMeta* seqs,
                              int32_t n_rows) {
  backend_.Enqueue(StoreRowsArgs{.from = View(layer),
                                 .kv = bank_.View(layer),
                                 .rows = rows,
                                 .seqs = seqs,
                                 .n_rows = n_rows,
                                 .by_table = true});
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
