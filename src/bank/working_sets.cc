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

// Kinds of counters.
constexpr size_t kSteps = 0;
constexpr size_t kPrompts = 1;

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
  const size_t words = static_cast<size_t>(bank.max_tokens) +
                       2 * static_cast<size_t>(config.n_slots) +
                       3 * static_cast<size_t>(config.reads.max_tokens) + 64;
  bytes += static_cast<size_t>(config.reads.n_selections) * words * 4;
  return static_cast<size_t>(config.n_seqs) * bytes;
}

Result<std::unique_ptr<WorkingSets>> WorkingSets::Create(Backend& backend, const Bank& bank,
                                                         WorkingSetConfig config) {
  OKV_CHECK(config.n_slots >= config.reads.max_tokens, "{} slots", config.n_slots);
  std::unique_ptr<WorkingSets> sets(new WorkingSets(backend, bank, std::move(config)));
  OKV_RETURN_IF_ERROR(sets->Allocate());
  for (int32_t seq = 0; seq < sets->config_.n_seqs; ++seq) sets->Reset(seq);
  return sets;
}

Status WorkingSets::Allocate() {
  const auto take = [&](Buffer& buffer, size_t bytes) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, backend_.Allocate(bytes, "working sets"));
    return {};
  };
  const auto slots = static_cast<size_t>(config_.n_slots);
  const auto capacity = static_cast<size_t>(config_.reads.max_tokens);
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  groups_.resize(static_cast<size_t>(config_.reads.n_selections));
  for (Group& g : groups_) {
    for (const auto& [buffer, words] : std::initializer_list<std::pair<Buffer*, size_t>>{
             {&g.slot_of, static_cast<size_t>(bank_.config().max_tokens)},
             {&g.owner, slots},
             {&g.used, slots},
             {&g.clock, 1},
             {&g.slots, capacity},
             {&g.miss_row, capacity},
             {&g.miss_slot, capacity},
             {&g.n_miss, 1},
             {&g.own, 1},
             {&g.own_row, 1},
             {&g.n_own, 1},
             {&g.span, 2},
             {&g.slot_seqs, sizeof(SeqMeta) / 4},
             {&g.counters, 8}}) {
      OKV_RETURN_IF_ERROR(take(*buffer, 4 * words * seqs));
    }
  }
  OKV_RETURN_IF_ERROR(take(nothing_, 2 * sizeof(int32_t) * seqs));
  const std::vector<int32_t> zeros(2 * seqs);
  backend_.Upload(nothing_.as(), zeros.data(), nothing_.size());
  rows_.resize(bank_.config().layers.size());
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    if (!Held(bank_.config(), config_, layer)) continue;
    if (first_layer_ < 0) first_layer_ = static_cast<int32_t>(layer);
    OKV_RETURN_IF_ERROR(take(rows_[layer], seqs * slots * bank_.config().RowBytes(layer)));
  }
  return {};
}

void WorkingSets::Reset(int32_t seq) {
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  // The part of the sequence in an array of `arrays` times [n_seqs, ...].
  const auto fill = [&](const Buffer& buffer, int32_t value, size_t arrays = 1) {
    const size_t bytes = buffer.size() / seqs / arrays;
    const std::vector<int32_t> values(bytes / 4, value);
    for (size_t i = 0; i < arrays; ++i) {
      backend_.Upload(buffer.as<std::byte>() + (i * seqs + static_cast<size_t>(seq)) * bytes,
                      values.data(), bytes);
    }
  };
  for (const Group& g : groups_) {
    for (const Buffer* none : {&g.slot_of, &g.owner}) fill(*none, -1);
    for (const Buffer* zero : {&g.used, &g.clock}) fill(*zero, 0);
    fill(g.counters, 0, 2);
  }
}

void WorkingSets::Select(const Selection& selection, const SeqMeta* seqs, bool primes) {
  const AttnPlan& plan = selection.plan;
  OKV_CHECK(plan.n_segments == 2 && plan.segments[0].kind == SegmentKind::kList &&
            plan.segments[0].unit == 1 && plan.segments[0].lists == 1 &&
            plan.segments[1].bounds != nullptr);
  Update(selection.number, plan.segments[0], plan.segments[1].bounds, selection.wider, seqs,
         primes ? kPrompts : kSteps);
  if (!primes) backend_.Join(Lane::kIn, Lane::kMain);
}

void WorkingSets::Update(int32_t group, const PlanSegment& list, const int32_t* bounds,
                         const PlanSegment& wider, const SeqMeta* seqs, size_t kind) {
  const Group& g = groups_[static_cast<size_t>(group)];
  backend_.Enqueue(WorkingSetArgs{
      .seqs = seqs,
      .index = list.index,
      .count = list.count,
      .bounds = bounds,
      .block_table = bank_.View(first_layer_).block_table,
      .block_tokens = bank_.config().block_tokens,
      .index_stride = list.capacity,
      .wider = wider.index,
      .wider_count = wider.count,
      .wider_stride = wider.capacity,
      .capacity = static_cast<int32_t>(config_.reads.max_tokens),
      .n_slots = config_.n_slots,
      .max_tokens = static_cast<int32_t>(bank_.config().max_tokens),
      .n_seqs = config_.n_seqs,
      .slot_of = g.slot_of.as<int32_t>(),
      .owner = g.owner.as<int32_t>(),
      .used = g.used.as<uint32_t>(),
      .clock = g.clock.as<uint32_t>(),
      .slots = g.slots.as<int32_t>(),
      .miss_row = g.miss_row.as<int32_t>(),
      .miss_slot = g.miss_slot.as<int32_t>(),
      .n_miss = g.n_miss.as<int32_t>(),
      .own = g.own.as<int32_t>(),
      .own_row = g.own_row.as<int32_t>(),
      .n_own = g.n_own.as<int32_t>(),
      .span = g.span.as<int32_t>(),
      .slot_seqs = g.slot_seqs.as<SeqMeta>(),
      .counters = g.counters.as<uint64_t>() + 2 * kind * static_cast<size_t>(config_.n_seqs)});
}

void WorkingSets::Fetch(int32_t layer, const KvView& from, Lane lane) {
  OKV_CHECK(from.Interleaved());
  const Group& g = GroupOf(layer);
  backend_.Enqueue(FetchRowsArgs{.from = from.k.base,
                                 .to = rows_[static_cast<size_t>(layer)].as<std::byte>(),
                                 .row_bytes = from.k.row_bytes,
                                 .from_row = g.miss_row.as<int32_t>(),
                                 .to_row = g.miss_slot.as<int32_t>(),
                                 .n = g.n_miss.as<int32_t>(),
                                 .capacity = static_cast<int32_t>(config_.reads.max_tokens),
                                 .lists = config_.n_seqs},
                   lane);
}

void WorkingSets::Prime(int32_t layer, const KvView& kv) {
  const Group& g = GroupOf(layer);
  Fetch(layer, kv, Lane::kMain);
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
  return {.k = slots.k.base, .v = slots.v.base, .row = GroupOf(layer).own.as<int32_t>()};
}

void WorkingSets::WriteBack(const SeqMeta* seqs, const std::vector<bool>& selected) {
  const auto* zeros = nothing_.as<int32_t>();
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (selected[group]) continue;
    Update(static_cast<int32_t>(group), {.index = zeros, .count = zeros}, zeros, /*wider=*/{}, seqs,
           kSteps);
  }
  backend_.Join(Lane::kOut, Lane::kMain);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto layer = static_cast<int32_t>(i);
    const int32_t selection = SelectionOf(layer);
    if (selection < 0 || !selected[static_cast<size_t>(selection)]) continue;
    const Group& g = GroupOf(layer);
    const KvView home = bank_.View(layer);
    backend_.Enqueue(FetchRowsArgs{.from = rows_[i].as<std::byte>(),
                                   .to = home.k.base,
                                   .row_bytes = home.k.row_bytes,
                                   .from_row = g.own.as<int32_t>(),
                                   .to_row = g.own_row.as<int32_t>(),
                                   .n = g.n_own.as<int32_t>(),
                                   .capacity = 1,
                                   .lists = config_.n_seqs},
                     Lane::kOut);
  }
}

void WorkingSets::Resolve(int32_t layer, AttendArgs& attend) {
  const Group& g = GroupOf(layer);
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

WorkingSets::Counters WorkingSets::Count() const {
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  Counters sum;
  std::vector<Counters> by_group(groups_.size());
  for (size_t group = 0; group < groups_.size(); ++group) {
    std::vector<uint64_t> counted(4 * seqs);
    backend_.Download(counted.data(), groups_[group].counters.as(), counted.size() * 8);
    for (size_t q = 0; q < seqs; ++q) {
      by_group[group].selected += counted[2 * (kSteps * seqs + q)];
      by_group[group].missed += counted[2 * (kSteps * seqs + q) + 1];
      by_group[group].primed += counted[2 * (kPrompts * seqs + q) + 1];
    }
  }
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    const int32_t selection = SelectionOf(static_cast<int32_t>(layer));
    if (selection < 0) continue;
    const Counters& c = by_group[static_cast<size_t>(selection)];
    sum.selected += c.selected;
    sum.missed += c.missed;
    sum.missed_bytes += c.missed * bank_.config().RowBytes(layer);
    sum.primed += c.primed;
  }
  return sum;
}

}  // namespace omnikv
