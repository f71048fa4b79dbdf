#include "bank/fetched_units.h"

#include <utility>
#include <vector>

#include "base/check.h"

namespace omnikv {
namespace {

// Slots for each candidate of a step: steps of a text list much the same tokens.
constexpr int64_t kSlotsACandidate = 2;

}  // namespace

WorkingSetConfig FetchedUnits::OfCandidates(const BankConfig& bank, const DeclaredReads& reads,
                                            int32_t n_seqs) {
  const int64_t most = reads.max_candidates;
  DeclaredReads own{.selection_of = std::vector<int32_t>(bank.layers.size(), -1),
                    .max_tokens = most + reads.max_recent,
                    .by_token = false,
                    .unit = 1,
                    .max_recent = reads.max_recent};
  for (size_t layer = 0; most > 0 && layer < bank.layers.size(); ++layer) {
    if (reads.selection_of[layer] != kFewRows || !LastRows::CanKeep(bank.layers[layer])) continue;
    own.selection_of[layer] = own.n_selections++;
  }
  const int64_t slots = std::max(most, std::min(kSlotsACandidate * most, bank.max_tokens));
  return {.reads = std::move(own),
          .n_slots = static_cast<int32_t>(slots + reads.max_recent),
          .n_seqs = n_seqs};
}

SlotsConfig FetchedUnits::SlotsOf(const BankConfig& bank, const WorkingSetConfig& config) {
  const int32_t piece = PieceOf(bank, config.reads);
  return {
      .groups = config.reads.n_selections,
      .n_slots = static_cast<int32_t>((config.n_slots - config.reads.max_recent) / piece),
      .capacity = static_cast<int32_t>((config.reads.max_tokens - config.reads.max_recent) / piece),
      .max_tokens = bank.Rows().seq_blocks * (bank.block_tokens / piece),
      .n_seqs = config.n_seqs};
}

LastRowsConfig FetchedUnits::LastRowsOf(const BankConfig& bank, const WorkingSetConfig& config) {
  if (!config.reads.HeldByUnit()) return {.layers = std::vector<bool>(bank.layers.size())};
  LastRowsConfig last = LastRows::OfSelections(bank, config.reads, config.n_seqs);
  const int64_t slots = int64_t{config.n_seqs} * SlotsOf(bank, config).n_slots;
  last.rows_before = slots * PieceOf(bank, config.reads);
  last.of_steps = true;
  return last;
}

size_t FetchedUnits::Bytes(const BankConfig& bank, const WorkingSetConfig& config) {
  if (!AnyHeld(bank, config)) return 0;
  const SlotsConfig slots = SlotsOf(bank, config);
  const auto words = static_cast<size_t>(slots.capacity + 1 + slots.max_tokens);
  return LastRows::Bytes(bank, LastRowsOf(bank, config)) + Slots::Bytes(slots) +
         static_cast<size_t>(slots.n_seqs) * (4 * (words + 2) + 2 * sizeof(SeqMeta));
}

Result<std::unique_ptr<FetchedUnits>> FetchedUnits::Create(Backend& backend, Bank& bank,
                                                           const WorkingSetConfig& config) {
  std::unique_ptr<FetchedUnits> units(new FetchedUnits(backend, bank, config));
  OKV_RETURN_IF_ERROR(units->Allocate());
  return units;
}

Status FetchedUnits::Allocate() {
  OKV_RETURN_IF_ERROR(slots_.Allocate(slots_of_));
  OKV_ASSIGN_OR_RETURN(last_,
                       LastRows::Create(backend_, bank_, LastRowsOf(bank_.config(), config_)));
  const auto take = [&](Buffer& buffer, int32_t words) -> Status {
    const size_t bytes = static_cast<size_t>(slots_of_.n_seqs) * static_cast<size_t>(words) * 4;
    OKV_ASSIGN_OR_RETURN(buffer, backend_.Allocate(bytes, "working sets"));
    return {};
  };
  OKV_RETURN_IF_ERROR(take(index_, slots_of_.capacity));
  OKV_RETURN_IF_ERROR(take(count_, 1));
  OKV_RETURN_IF_ERROR(take(by_piece_, sizeof(SeqMeta) / 4));
  OKV_RETURN_IF_ERROR(take(by_table_, sizeof(SeqMeta) / 4));
  OKV_RETURN_IF_ERROR(take(table_, slots_of_.max_tokens));
  OKV_RETURN_IF_ERROR(take(nothing_, 2));
  const std::vector<int32_t> zeros(table_.size() / 4 + nothing_.size() / 4);
  backend_.Upload(table_.as(), zeros.data(), table_.size());
  backend_.Upload(nothing_.as(), zeros.data(), nothing_.size());
  return {};
}

void FetchedUnits::Reset(int32_t seq) {
  slots_.Reset(seq);
}

void FetchedUnits::Select(int32_t layer, const AttnPlan& plan, const SeqMeta* seqs) {
  const PlanSegment& list = plan.segments[0];
  OKV_CHECK(plan.n_segments == 2 && list.kind == SegmentKind::kList && list.lists == 1 &&
            list.unit == config_.reads.unit && plan.segments[1].bounds != nullptr);
  const auto group = static_cast<size_t>(SelectionOf(layer));
  const int32_t per_block = bank_.config().block_tokens / piece_;
  auto* const index = index_.as<int32_t>();
  auto* const count = count_.as<int32_t>();
  backend_.Enqueue(ListPiecesArgs{.seqs = seqs,
                                  .index = list.index,
                                  .count = list.count,
                                  .to_index = index,
                                  .to_count = count,
                                  .by_piece = by_piece_.as<SeqMeta>(),
                                  .by_table = by_table_.as<SeqMeta>(),
                                  .capacity = list.capacity,
                                  .to_capacity = slots_of_.capacity,
                                  .per_unit = list.unit / piece_,
                                  .piece_tokens = piece_,
                                  .table_stride = slots_of_.max_tokens,
                                  .n_seqs = slots_of_.n_seqs});
  // A piece of the step's own token is never listed, and has no slot after this.
  slots_.Update(group,
                {.seqs = by_piece_.as<SeqMeta>(),
                 .index = index,
                 .count = count,
                 .bounds = nothing_.as<int32_t>(),
                 .block_table = bank_.View(layer).block_table,
                 .block_tokens = per_block,
                 .index_stride = slots_of_.capacity},
                Slots::Use::kStep);
  backend_.Enqueue(PieceTableArgs{.seqs = seqs,
                                  .index = index,
                                  .count = count,
                                  .slots = slots_.group(group).slots.as<int32_t>(),
                                  .bounds = plan.segments[1].bounds,
                                  .last = last_->table(),
                                  .table = table_.as<int32_t>(),
                                  .capacity = slots_of_.capacity,
                                  .table_stride = slots_of_.max_tokens,
                                  .first_last = slots_of_.n_seqs * slots_of_.n_slots,
                                  .piece_tokens = piece_,
                                  .per_block = per_block,
                                  .n_seqs = slots_of_.n_seqs});
  backend_.Join(Lane::kIn, Lane::kMain);
}

void FetchedUnits::Resolve(int32_t layer, AttendArgs& attend) {
  const KvView home = bank_.View(layer);
  OKV_CHECK(home.Interleaved());
  slots_.Fetch(
      static_cast<size_t>(SelectionOf(layer)),
      {.from = home.k.base, .to = last_->Memory(layer), .row_bytes = piece_ * home.k.row_bytes},
      Lane::kIn);
  backend_.Join(Lane::kMain, Lane::kIn);
  Redirect(layer, attend);
}

void FetchedUnits::ResolveKeys(int32_t layer, AttendArgs& attend) {
  const KvView home = bank_.View(layer);
  OKV_CHECK(home.Interleaved() && piece_ == 1);
  const auto group = static_cast<size_t>(SelectionOf(layer));
  const int64_t to_values = home.v.base - home.k.base;
  const int64_t values = home.n_kv_heads * home.v.head_bytes;
  FetchRowsArgs copy{.from = home.k.base,
                     .to = last_->Memory(layer),
                     .row_bytes = home.k.row_bytes,
                     .gap = to_values,
                     .gap_bytes = values};
  slots_.Fetch(group, copy, Lane::kIn);
  backend_.Join(Lane::kMain, Lane::kIn);
  copy.from += to_values;
  copy.to += to_values;
  copy.gap = values;
  copy.gap_bytes = copy.row_bytes - values;
  slots_.Fetch(group, copy, Lane::kIn);
  Redirect(layer, attend);
}

void FetchedUnits::Redirect(int32_t layer, AttendArgs& attend) const {
  attend.kv = bank_.View(layer).MovedTo(last_->Memory(layer));
  attend.kv.block_table = table_.as<int32_t>();
  attend.kv.block_tokens = piece_;
  attend.seqs = by_table_.as<SeqMeta>();
}

SlotCounters FetchedUnits::Count(int32_t seq) const {
  const std::vector<SlotCounters> by_group = slots_.Count(seq);
  SlotCounters sum;
  for (int32_t layer = 0; layer < bank_.n_layers(); ++layer) {
    const int32_t selection = SelectionOf(layer);
    if (selection < 0) continue;
    sum.Add(by_group[static_cast<size_t>(selection)], static_cast<uint64_t>(piece_),
            bank_.config().RowBytes(static_cast<size_t>(layer)));
  }
  return sum;
}

}  // namespace omnikv
