#include "bank/fetched_values.h"

#include <algorithm>

#include "backend/kv_format.h"

namespace omnikv {

bool FetchedValues::Has(const BankConfig& bank, const DeclaredReads& reads, size_t layer) {
  return layer < reads.few_values.size() && reads.few_values[layer] && bank.layers[layer].OnHost();
}

bool FetchedValues::Any(const BankConfig& bank, const DeclaredReads& reads) {
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (Has(bank, reads, layer)) return true;
  }
  return false;
}

int64_t FetchedValues::Lists(const BankConfig& bank, const DeclaredReads& reads) {
  int64_t lists = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (Has(bank, reads, layer)) lists = std::max<int64_t>(lists, bank.layers[layer].n_kv_heads);
  }
  return lists * reads.value_lists;
}

size_t FetchedValues::RowsBytes(const BankConfig& bank, const DeclaredReads& reads,
                                int32_t n_seqs) {
  size_t row_bytes = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (Has(bank, reads, layer)) row_bytes = std::max(row_bytes, bank.RowBytes(layer));
  }
  const int64_t rows = n_seqs * Blocks(bank, reads) * bank.block_tokens * reads.value_lists;
  return static_cast<size_t>(rows) * row_bytes;
}

size_t FetchedValues::Bytes(const BankConfig& bank, const DeclaredReads& reads, int32_t n_seqs) {
  if (!Any(bank, reads)) return 0;
  return RowsBytes(bank, reads, n_seqs) +
         (Entries(bank) + Indices(bank, reads, n_seqs)) * sizeof(int32_t);
}

Result<std::unique_ptr<FetchedValues>> FetchedValues::Create(Backend& backend, Bank& bank,
                                                             const DeclaredReads& reads,
                                                             int32_t n_seqs) {
  std::unique_ptr<FetchedValues> values(new FetchedValues(backend, bank, reads));
  OKV_RETURN_IF_ERROR(values->Allocate(n_seqs));
  return values;
}

Status FetchedValues::Allocate(int32_t n_seqs) {
  const BankConfig& bank = bank_.config();
  std::vector<int32_t> index(Indices(bank, reads_, n_seqs));
  for (size_t i = 0; i < index.size(); ++i) {
    index[i] = static_cast<int32_t>(i % static_cast<size_t>(reads_.max_tokens));
  }
  const std::vector<int32_t> entries(Entries(bank));
  const auto take = [&](Buffer& buffer, size_t bytes) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, backend_.Allocate(bytes, "chosen values"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(rows_, RowsBytes(bank, reads_, n_seqs)));
  OKV_RETURN_IF_ERROR(take(entries_, entries.size() * sizeof(int32_t)));
  OKV_RETURN_IF_ERROR(take(index_, index.size() * sizeof(int32_t)));
  backend_.Upload(entries_.as(), entries.data(), entries_.size());
  backend_.Upload(index_.as(), index.data(), index_.size());
  return {};
}

void FetchedValues::Begin(int32_t q, int32_t seq) {
  std::vector<int32_t> entries(static_cast<size_t>(Blocks(bank_.config(), reads_)));
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i] = q * static_cast<int32_t>(entries.size()) + static_cast<int32_t>(i);
  }
  backend_.Upload(entries_.as<int32_t>() + bank_.TableOffset(seq), entries.data(),
                  entries.size() * sizeof(int32_t));
}

bool FetchedValues::Takes(const BankConfig& bank, const DeclaredReads& reads, int32_t layer,
                          const AttendArgs& attend) {
  const PlanSegment& list = attend.plan.segments[0];
  return Has(bank, reads, static_cast<size_t>(layer)) && attend.plan.n_segments == 1 &&
         list.kind == SegmentKind::kList && list.unit == 1 && list.lists == attend.kv.n_kv_heads &&
         attend.kv.HeadRepeats() <= reads.value_lists && list.capacity <= reads.max_tokens;
}

void FetchedValues::Fetch(int32_t layer, AttendArgs& attend) const {
  if (!Takes(bank_.config(), reads_, layer, attend)) return;
  PlanSegment& list = attend.plan.segments[0];
  const KvView& home = attend.kv;
  const KvView here =
      MakeKvView(rows_.as<std::byte>(), entries_.as<int32_t>(), bank_.config().block_tokens,
                 home.k.dtype, home.n_kv_heads, home.dk, home.dv);
  backend_.Enqueue(CompactArgs{.kv = here,
                               .from = home,
                               .seqs = attend.seqs,
                               .index = list.index,
                               .count = list.count,
                               .capacity = list.capacity,
                               .lists = list.lists,
                               .n_seqs = attend.n_seqs});
  attend.kv = here;
  list.index = index_.as<int32_t>();
  list.capacity = static_cast<int32_t>(reads_.max_tokens);
}

}  // namespace omnikv
