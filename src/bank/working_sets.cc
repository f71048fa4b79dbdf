#include "bank/working_sets.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv {
namespace {

// A layer of several streams has none: its rows have no one place that they could come to.
bool Held(const BankConfig& bank, const WorkingSetConfig& config, size_t layer) {
  const LayerSpec& spec = bank.layers[layer];
  return spec.OneStream() && spec.OnHost() && config.reads.selection_of[layer] >= 0;
}

}  // namespace

bool WorkingSets::AnyHeld(const BankConfig& bank, const WorkingSetConfig& config) {
  for (size_t layer = 0; config.reads.n_selections > 0 && layer < bank.layers.size(); ++layer) {
    if (Held(bank, config, layer)) return true;
  }
  return false;
}

size_t WorkingSets::Bytes(const BankConfig& bank, const WorkingSetConfig& config) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (Held(bank, config, layer)) {
      bytes += static_cast<size_t>(config.n_slots) * bank.RowBytes(layer);
    }
  }
  return static_cast<size_t>(config.n_seqs) * bytes + Slots::Bytes(SlotsOf(bank, config));
}

SlotsConfig WorkingSets::SlotsOf(const BankConfig& bank, const WorkingSetConfig& config) {
  return {.groups = config.reads.n_selections,
          .n_slots = config.n_slots,
          .capacity = static_cast<int32_t>(config.reads.max_tokens),
          .ahead = static_cast<int32_t>(config.reads.max_ahead),
          .max_tokens = static_cast<int32_t>(bank.max_tokens),
          .n_seqs = config.n_seqs};
}

Result<std::unique_ptr<WorkingSets>> WorkingSets::Create(Backend& backend, const Bank& bank,
                                                         WorkingSetConfig config) {
  std::unique_ptr<WorkingSets> sets(new WorkingSets(backend, bank, std::move(config)));
  OKV_RETURN_IF_ERROR(sets->Allocate());
  return sets;
}

Status WorkingSets::Allocate() {
  OKV_RETURN_IF_ERROR(slots_.Allocate(SlotsOf(bank_.config(), config_)));
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  OKV_ASSIGN_OR_RETURN(nothing_, backend_.Allocate(2 * sizeof(int32_t) * seqs, "working sets"));
  const std::vector<int32_t> zeros(2 * seqs);
  backend_.Upload(nothing_.as(), zeros.data(), nothing_.size());
  rows_.resize(bank_.config().layers.size());
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (!Held(bank_.config(), config_, layer)) continue;
    if (first_layer_ < 0) first_layer_ = static_cast<int32_t>(layer);
    const size_t rows = seqs * static_cast<size_t>(config_.n_slots);
    OKV_ASSIGN_OR_RETURN(rows_[layer],
                         backend_.Allocate(rows * bank_.config().RowBytes(layer), "working sets"));
  }
  return {};
}

void WorkingSets::Reset(int32_t seq) {
  slots_.Reset(seq);
}

void WorkingSets::Select(const Selection& selection, const SeqMeta* seqs, bool primes) {
  FetchAhead();
  const AttnPlan& plan = selection.plan;
  OKV_CHECK(plan.n_segments == 2 && plan.segments[0].kind == SegmentKind::kList &&
            plan.segments[0].unit == 1 && plan.segments[0].lists == 1 &&
            plan.segments[1].bounds != nullptr);
  WorkingSetArgs args = Of(seqs, primes);
  args.index = plan.segments[0].index;
  args.count = plan.segments[0].count;
  args.index_stride = plan.segments[0].capacity;
  args.bounds = plan.segments[1].bounds;
  slots_.Update(static_cast<size_t>(selection.number), args,
                primes ? Slots::Use::kPrompt : Slots::Use::kStep,
                FetchesAhead() ? selection.scores : StepScores{});
  if (primes) return;
  backend_.Join(Lane::kIn, Lane::kMain);
  if (FetchesAhead() && selection.scores.scores != nullptr) ahead_ = selection.number;
}

void WorkingSets::FetchAhead() {
  if (!ahead_) return;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto layer = static_cast<int32_t>(i);
    if (SelectionOf(layer) != *ahead_) continue;
    Fetch(layer, bank_.View(layer), Lane::kIn, /*ahead=*/true);
  }
  ahead_.reset();
}

WorkingSetArgs WorkingSets::Of(const SeqMeta* seqs, bool primes) const {
  const KvView kv = primes ? bank_.StageView(first_layer_) : bank_.View(first_layer_);
  return {.seqs = seqs, .block_table = kv.block_table, .block_tokens = bank_.config().block_tokens};
}

void WorkingSets::Fetch(int32_t layer, const KvView& from, Lane lane, bool ahead) {
  OKV_CHECK(from.Interleaved());
  slots_.Fetch(GroupOf(layer),
               {.from = from.k.base,
                .to = rows_[static_cast<size_t>(layer)].as<std::byte>(),
                .row_bytes = from.k.row_bytes},
               lane, ahead);
}

void WorkingSets::Prime(int32_t layer, const KvView& kv) {
  const Slots::Group& g = slots_.group(GroupOf(layer));
  Fetch(layer, kv, Lane::kMain);
  if (FetchesAhead()) Fetch(layer, kv, Lane::kMain, /*ahead=*/true);
  // The prompt's last row: no miss, as the own row of a step is none, but no step will make it.
  backend_.Enqueue(FetchRowsArgs{.from = kv.k.base,
                                 .to = rows_[static_cast<size_t>(layer)].as<std::byte>(),
                                 .row_bytes = kv.k.row_bytes,
                                 .from_row = g.own_row.as<int32_t>(),
                                 .to_row = g.own.as<int32_t>(),
                                 .n = g.n_own.as<int32_t>(),
                                 .capacity = 1,
                                 .lists = config_.n_seqs});
}

KvSlot WorkingSets::OwnRows(int32_t layer) const {
  const KvView slots = SlotView(layer);
  return {
      .k = slots.k.base, .v = slots.v.base, .row = slots_.group(GroupOf(layer)).own.as<int32_t>()};
}

void WorkingSets::WriteBack(const SeqMeta* seqs, const std::vector<bool>& selected) {
  FetchAhead();
  const auto* zeros = nothing_.as<int32_t>();
  for (size_t group = 0; group < slots_.n_groups(); ++group) {
    if (selected[group]) continue;
    WorkingSetArgs nothing = Of(seqs, /*primes=*/false);
    nothing.index = nothing.count = nothing.bounds = zeros;
    slots_.Update(group, nothing, Slots::Use::kStep);
  }
  backend_.Join(Lane::kOut, Lane::kMain);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto layer = static_cast<int32_t>(i);
    const int32_t selection = SelectionOf(layer);
    if (selection < 0 || !selected[static_cast<size_t>(selection)]) continue;
    slots_.SendHome(GroupOf(layer), rows_[i].as<std::byte>(), bank_.View(layer));
  }
}

void WorkingSets::Resolve(int32_t layer, AttendArgs& attend) {
  const Slots::Group& g = slots_.group(GroupOf(layer));
  Fetch(layer, attend.kv, Lane::kIn);
  backend_.Join(Lane::kMain, Lane::kIn);
  attend.kv = attend.kv.MovedTo(rows_[static_cast<size_t>(layer)].as<std::byte>());
  attend.kv.block_table = g.slots.as<int32_t>();
  attend.kv.block_tokens = 1;
  attend.seqs = g.slot_seqs.as<SeqMeta>();
  PlanSegment slots;
  slots.bounds = g.span.as<int32_t>();
  attend.plan = AttnPlan{};
  attend.plan.Add(slots);
}

SlotCounters WorkingSets::Count(int32_t seq) const {
  const std::vector<SlotCounters> by_group = slots_.Count(seq);
  SlotCounters sum;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    const int32_t selection = SelectionOf(static_cast<int32_t>(layer));
    if (selection < 0) continue;
    sum.Add(by_group[static_cast<size_t>(selection)], 1, bank_.config().RowBytes(layer));
  }
  return sum;
}

}  // namespace omnikv
