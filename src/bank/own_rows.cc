#include "bank/own_rows.h"

#include <algorithm>

namespace omnikv {
namespace {

SlotsConfig SlotsOf(const BankConfig& bank, int32_t n_seqs) {
  return {.groups = 1,
          .n_slots = 1,
          .capacity = 1,
          .max_tokens = static_cast<int32_t>(bank.max_tokens),
          .n_seqs = n_seqs};
}

}  // namespace

size_t OwnRows::Bytes(const BankConfig& bank, const std::vector<bool>& layers, int32_t n_seqs) {
  if (std::count(layers.begin(), layers.end(), true) == 0) return 0;
  size_t row_bytes = 3 * sizeof(int32_t);
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    if (layers[layer]) row_bytes += bank.RowBytes(layer);
  }
  return static_cast<size_t>(n_seqs) * row_bytes + Slots::Bytes(SlotsOf(bank, n_seqs));
}

Result<std::unique_ptr<OwnRows>> OwnRows::Create(Backend& backend, const Bank& bank,
                                                 std::vector<bool> layers, int32_t n_seqs) {
  std::unique_ptr<OwnRows> own(new OwnRows(backend, bank, n_seqs));
  OKV_RETURN_IF_ERROR(own->Allocate(layers));
  return own;
}

Status OwnRows::Allocate(const std::vector<bool>& layers) {
  const auto seqs = static_cast<size_t>(n_seqs_);
  OKV_RETURN_IF_ERROR(slots_.Allocate(SlotsOf(bank_.config(), n_seqs_)));
  OKV_ASSIGN_OR_RETURN(nothing_, backend_.Allocate(seqs * sizeof(int32_t), "rows of a step"));
  OKV_ASSIGN_OR_RETURN(bounds_, backend_.Allocate(2 * seqs * sizeof(int32_t), "rows of a step"));
  const std::vector<int32_t> zeros(seqs);
  backend_.Upload(nothing_.as(), zeros.data(), nothing_.size());
  rows_.resize(layers.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    if (!layers[layer]) continue;
    OKV_ASSIGN_OR_RETURN(
        rows_[layer], backend_.Allocate(seqs * bank_.config().RowBytes(layer), "rows of a step"));
  }
  return {};
}

void OwnRows::Begin(const SeqMeta* seqs) {
  backend_.Enqueue(PlanRangeArgs{.seqs = seqs,
                                 .n_seqs = n_seqs_,
                                 .rule = {.budget = 1, .min_recent = 1},
                                 .bounds = bounds_.as<int32_t>()});
  const auto* const zeros = nothing_.as<int32_t>();
  const auto any = std::ranges::find_if(rows_, [](const Buffer& rows) { return rows.size() != 0; });
  const KvView home = bank_.View(static_cast<int32_t>(any - rows_.begin()));
  slots_.Update(0,
                {.seqs = seqs,
                 .index = zeros,
                 .count = zeros,
                 .bounds = bounds_.as<int32_t>(),
                 .block_table = home.block_table,
                 .block_tokens = bank_.config().block_tokens},
                Slots::Use::kStep);
}

KvSlot OwnRows::Slot(int32_t layer) const {
  const KvView rows = bank_.View(layer).MovedTo(rows_[static_cast<size_t>(layer)].as<std::byte>());
  return {.k = rows.k.base, .v = rows.v.base, .row = slots_.group(0).own.as<int32_t>()};
}

void OwnRows::SendHome() {
  backend_.Join(Lane::kOut, Lane::kMain);
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (rows_[layer].size() == 0) continue;
    slots_.SendHome(0, rows_[layer].as<std::byte>(), bank_.View(static_cast<int32_t>(layer)));
  }
}

}  // namespace omnikv
