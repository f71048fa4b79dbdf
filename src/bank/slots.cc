#include "bank/slots.h"

#include <utility>

#include "base/check.h"

namespace omnikv {
namespace {

// Kinds of counters.
constexpr size_t kSteps = 0;
constexpr size_t kPrompts = 1;

}  // namespace

size_t Slots::Bytes(const SlotsConfig& config) {
  const size_t words = static_cast<size_t>(config.max_tokens) +
                       2 * static_cast<size_t>(config.n_slots) +
                       3 * static_cast<size_t>(config.capacity) + 64;
  return static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.groups) * words * 4;
}

Status Slots::Allocate(const SlotsConfig& config) {
  OKV_CHECK(config.n_slots >= config.capacity, "{} slots", config.n_slots);
  config_ = config;
  const auto slots = static_cast<size_t>(config.n_slots);
  const auto capacity = static_cast<size_t>(config.capacity);
  const auto seqs = static_cast<size_t>(config.n_seqs);
  groups_.resize(static_cast<size_t>(config.groups));
  for (Group& g : groups_) {
    for (const auto& [buffer, words] : std::initializer_list<std::pair<Buffer*, size_t>>{
             {&g.slot_of, static_cast<size_t>(config.max_tokens)},
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
      OKV_ASSIGN_OR_RETURN(*buffer, backend_.Allocate(4 * words * seqs, "working sets"));
    }
  }
  for (int32_t seq = 0; seq < config.n_seqs; ++seq) Reset(seq);
  return {};
}

void Slots::Reset(int32_t seq) {
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

void Slots::Update(size_t group, WorkingSetArgs selection, bool primes) {
  const Group& g = groups_[group];
  const size_t kind = primes ? kPrompts : kSteps;
  selection.capacity = config_.capacity;
  selection.n_slots = config_.n_slots;
  selection.max_tokens = config_.max_tokens;
  selection.n_seqs = config_.n_seqs;
  selection.slot_of = g.slot_of.as<int32_t>();
  selection.owner = g.owner.as<int32_t>();
  selection.used = g.used.as<uint32_t>();
  selection.clock = g.clock.as<uint32_t>();
  selection.slots = g.slots.as<int32_t>();
  selection.miss_row = g.miss_row.as<int32_t>();
  selection.miss_slot = g.miss_slot.as<int32_t>();
  selection.n_miss = g.n_miss.as<int32_t>();
  selection.own = g.own.as<int32_t>();
  selection.own_row = g.own_row.as<int32_t>();
  selection.n_own = g.n_own.as<int32_t>();
  selection.span = g.span.as<int32_t>();
  selection.slot_seqs = g.slot_seqs.as<SeqMeta>();
  selection.counters = g.counters.as<uint64_t>() + 2 * kind * static_cast<size_t>(config_.n_seqs);
  backend_.Enqueue(selection);
}

void Slots::Fetch(size_t group, const std::byte* from, std::byte* to, int64_t bytes,
                  Lane lane) const {
  const Group& g = groups_[group];
  backend_.Enqueue(FetchRowsArgs{.from = from,
                                 .to = to,
                                 .row_bytes = bytes,
                                 .from_row = g.miss_row.as<int32_t>(),
                                 .to_row = g.miss_slot.as<int32_t>(),
                                 .n = g.n_miss.as<int32_t>(),
                                 .capacity = config_.capacity,
                                 .lists = config_.n_seqs},
                   lane);
}

std::vector<SlotCounters> Slots::Count() const {
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  std::vector<SlotCounters> by_group(groups_.size());
  for (size_t group = 0; group < groups_.size(); ++group) {
    std::vector<uint64_t> counted(4 * seqs);
    backend_.Download(counted.data(), groups_[group].counters.as(), counted.size() * 8);
    for (size_t q = 0; q < seqs; ++q) {
      by_group[group].selected += counted[2 * (kSteps * seqs + q)];
      by_group[group].missed += counted[2 * (kSteps * seqs + q) + 1];
      by_group[group].primed += counted[2 * (kPrompts * seqs + q) + 1];
    }
  }
  return by_group;
}

}  // namespace omnikv
