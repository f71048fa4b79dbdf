#include "bank/working_sets.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv {
namespace {

bool Held(const BankConfig& bank, const WorkingSetConfig& config, size_t layer) {
  return bank.layers[layer].tier == TierKind::kHost && config.reads.selection_of[layer] >= 0;
}

// Physical rows of a bank.
size_t PhysicalRows(const BankConfig& bank) {
  return static_cast<size_t>(bank.PoolTokens() + bank.block_tokens);
}

}  // namespace

size_t WorkingSets::Bytes(const BankConfig& bank, const WorkingSetConfig& config) {
  size_t bytes = 0;
  for (size_t layer = 0; layer < bank.layers.size(); ++layer) {
    if (Held(bank, config, layer)) {
      bytes += static_cast<size_t>(config.n_slots) * bank.RowBytes(layer);
    }
  }
  const size_t words = PhysicalRows(bank) + 2 * static_cast<size_t>(config.n_slots) +
                       3 * static_cast<size_t>(config.reads.max_tokens) + 64;
  return bytes + static_cast<size_t>(config.reads.n_selections) * words * 4;
}

Result<std::unique_ptr<WorkingSets>> WorkingSets::Create(Backend& backend, const Bank& bank,
                                                         WorkingSetConfig config) {
  OKV_CHECK(config.n_slots >= config.reads.max_tokens, "{} slots", config.n_slots);
  std::unique_ptr<WorkingSets> sets(new WorkingSets(backend, bank, std::move(config)));
  OKV_RETURN_IF_ERROR(sets->Allocate());
  sets->Reset();
  return sets;
}

Status WorkingSets::Allocate() {
  const auto take = [&](Buffer& buffer, size_t bytes) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, backend_.Allocate(bytes, "working sets"));
    return {};
  };
  const auto slots = static_cast<size_t>(config_.n_slots);
  const auto capacity = static_cast<size_t>(config_.reads.max_tokens);
  groups_.resize(static_cast<size_t>(config_.reads.n_selections));
  for (Group& g : groups_) {
    for (const auto& [buffer, words] : std::initializer_list<std::pair<Buffer*, size_t>>{
             {&g.slot_of, PhysicalRows(bank_.config())},
             {&g.owner, slots},
             {&g.used, slots},
             {&g.clock, 1},
             {&g.cursor, 1},
             {&g.slots, capacity},
             {&g.miss_row, capacity},
             {&g.miss_slot, capacity},
             {&g.n_miss, 1},
             {&g.own, 1},
             {&g.own_row, 1},
             {&g.n_own, 1},
             {&g.span, 2},
             {&g.slot_seq, sizeof(SeqMeta) / 4}}) {
      OKV_RETURN_IF_ERROR(take(*buffer, 4 * words));
    }
  }
  OKV_RETURN_IF_ERROR(take(counters_, groups_.size() * sizeof(Counted)));
  OKV_RETURN_IF_ERROR(take(nothing_, 2 * sizeof(int32_t)));
  rows_.resize(bank_.config().layers.size());
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (!Held(bank_.config(), config_, layer)) continue;
    OKV_RETURN_IF_ERROR(take(rows_[layer], slots * bank_.config().RowBytes(layer)));
  }
  return {};
}

void WorkingSets::Reset() {
  const auto clear = [&](const Buffer& buffer) {
    const std::vector<std::byte> zeros(buffer.size());
    backend_.Upload(buffer.as(), zeros.data(), zeros.size());
  };
  clear(counters_);
  for (const Group& g : groups_) {
    for (const Buffer* map : {&g.slot_of, &g.owner}) {
      const std::vector<int32_t> none(map->size() / 4, -1);
      backend_.Upload(map->as(), none.data(), map->size());
    }
    for (const Buffer* zero : {&g.used, &g.clock, &g.cursor}) clear(*zero);
  }
}

void WorkingSets::Select(const Selection& selection, const SeqMeta* seq, bool primes) {
  const AttnPlan& plan = selection.plan;
  OKV_CHECK(plan.n_segments == 2 && plan.segments[0].kind == SegmentKind::kList &&
            plan.segments[0].unit == 1 && plan.segments[0].lists == 1 &&
            plan.segments[1].bounds != nullptr);
  auto& counted = counters_.as<Counted>()[selection.number];
  Update(selection.number, plan.segments[0].index, plan.segments[0].count, plan.segments[1].bounds,
         seq, primes ? &counted.primed_selected : &counted.selected);
  if (!primes) backend_.Join(Lane::kIn, Lane::kMain);
  selected_[static_cast<size_t>(selection.number)] = true;
}

void WorkingSets::Update(int32_t group, const int32_t* index, const int32_t* count,
                         const int32_t* bounds, const SeqMeta* seq, uint64_t* counters) {
  const Group& g = groups_[static_cast<size_t>(group)];
  backend_.Enqueue(WorkingSetArgs{.seq = seq,
                                  .index = index,
                                  .count = count,
                                  .bounds = bounds,
                                  .block_table = bank_.View(0).block_table,
                                  .block_tokens = bank_.config().block_tokens,
                                  .capacity = static_cast<int32_t>(config_.reads.max_tokens),
                                  .n_slots = config_.n_slots,
                                  .simulated_hits = config_.simulated_hits,
                                  .slot_of = g.slot_of.as<int32_t>(),
                                  .owner = g.owner.as<int32_t>(),
                                  .used = g.used.as<uint32_t>(),
                                  .clock = g.clock.as<uint32_t>(),
                                  .cursor = g.cursor.as<int32_t>(),
                                  .slots = g.slots.as<int32_t>(),
                                  .miss_row = g.miss_row.as<int32_t>(),
                                  .miss_slot = g.miss_slot.as<int32_t>(),
                                  .n_miss = g.n_miss.as<int32_t>(),
                                  .own = g.own.as<int32_t>(),
                                  .own_row = g.own_row.as<int32_t>(),
                                  .n_own = g.n_own.as<int32_t>(),
                                  .span = g.span.as<int32_t>(),
                                  .slot_seq = g.slot_seq.as<SeqMeta>(),
                                  .counters = counters});
}

void WorkingSets::Fetch(int32_t layer, const std::byte* from, Lane lane) {
  const Group& g = GroupOf(layer);
  backend_.Enqueue(FetchRowsArgs{.from = from,
                                 .to = rows_[static_cast<size_t>(layer)].as<std::byte>(),
                                 .row_bytes = static_cast<int64_t>(
                                     bank_.config().RowBytes(static_cast<size_t>(layer))),
                                 .from_row = g.miss_row.as<int32_t>(),
                                 .to_row = g.miss_slot.as<int32_t>(),
                                 .n = g.n_miss.as<int32_t>(),
                                 .capacity = static_cast<int32_t>(config_.reads.max_tokens)},
                   lane);
}

void WorkingSets::Prime(int32_t layer, const KvView& kv) {
  const Group& g = GroupOf(layer);
  Fetch(layer, kv.base, Lane::kMain);
  // The prompt's last row: no miss, as the own row of a step is none, but no step will make it.
  backend_.Enqueue(FetchRowsArgs{.from = kv.base,
                                 .to = rows_[static_cast<size_t>(layer)].as<std::byte>(),
                                 .row_bytes = kv.row_bytes,
                                 .from_row = g.own_row.as<int32_t>(),
                                 .to_row = g.own.as<int32_t>(),
                                 .n = g.n_own.as<int32_t>(),
                                 .capacity = 1});
}

KvSlot WorkingSets::OwnRow(int32_t layer) const {
  return {.base = rows_[static_cast<size_t>(layer)].as<std::byte>(),
          .row = GroupOf(layer).own.as<int32_t>()};
}

void WorkingSets::WriteBack(const SeqMeta* seq) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (selected_[group]) continue;
    const auto* zeros = nothing_.as<int32_t>();
    Update(static_cast<int32_t>(group), zeros, zeros, zeros, seq,
           &counters_.as<Counted>()[group].selected);
  }
  backend_.Join(Lane::kOut, Lane::kMain);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto layer = static_cast<int32_t>(i);
    if (!HasSelection(layer)) continue;
    const Group& g = GroupOf(layer);
    const KvView home = bank_.View(layer);
    backend_.Enqueue(FetchRowsArgs{.from = rows_[i].as<std::byte>(),
                                   .to = home.base,
                                   .row_bytes = home.row_bytes,
                                   .from_row = g.own.as<int32_t>(),
                                   .to_row = g.own_row.as<int32_t>(),
                                   .n = g.n_own.as<int32_t>(),
                                   .capacity = 1},
                     Lane::kOut);
  }
}

void WorkingSets::Resolve(int32_t layer, AttendArgs& attend) {
  const Group& g = GroupOf(layer);
  Fetch(layer, attend.kv.base, Lane::kIn);
  backend_.Join(Lane::kMain, Lane::kIn);
  attend.kv.base = rows_[static_cast<size_t>(layer)].as<std::byte>();
  attend.kv.block_table = g.slots.as<int32_t>();
  attend.kv.block_tokens = 1;
  attend.seqs = g.slot_seq.as<SeqMeta>();
  PlanSegment slots;
  slots.bounds = g.span.as<int32_t>();
  attend.plan = AttnPlan{};
  attend.plan.Add(slots);
}

WorkingSets::Counters WorkingSets::Count() const {
  std::vector<Counted> counted(groups_.size());
  backend_.Download(counted.data(), counters_.as(), counters_.size());
  Counters sum;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (rows_[layer].size() == 0) continue;
    const Counted& c = counted[static_cast<size_t>(config_.reads.selection_of[layer])];
    sum.selected += c.selected;
    sum.missed += c.missed;
    sum.missed_bytes += c.missed * bank_.config().RowBytes(layer);
    sum.primed += c.primed;
  }
  return sum;
}

}  // namespace omnikv
