#include "bank/slots.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv {

size_t Slots::Bytes(const SlotsConfig& config) {
  const size_t words = static_cast<size_t>(config.max_tokens) +
                       2 * static_cast<size_t>(config.n_slots) +
                       3 * static_cast<size_t>(config.capacity + config.ahead) + 64;
  return static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.groups) * words * 4;
}

Status Slots::Allocate(const SlotsConfig& config) {
  OKV_CHECK(config.n_slots >= std::max(config.capacity, config.ahead), "{} slots", config.n_slots);
  config_ = config;
  const auto slots = static_cast<size_t>(config.n_slots);
  using Sizes = std::initializer_list<std::pair<Buffer*, size_t>>;
  const auto take = [&](Sizes sizes) -> Status {  // words of a sequence
    for (const auto& [buffer, words] : sizes) {
      const size_t bytes = 4 * words * static_cast<size_t>(config.n_seqs);
      OKV_ASSIGN_OR_RETURN(*buffer, backend_.Allocate(bytes, "working sets"));
    }
    return {};
  };
  const auto take_lists = [&](Lists& of, size_t capacity) {
    return take({{&of.slots, capacity},
                 {&of.miss_row, capacity},
                 {&of.miss_slot, capacity},
                 {&of.n_miss, 1},
                 {&of.own, 1},
                 {&of.own_row, 1},
                 {&of.n_own, 1},
                 {&of.span, 2},
                 {&of.slot_seqs, sizeof(SeqMeta) / 4}});
  };
  groups_.resize(static_cast<size_t>(config.groups));
  for (Group& g : groups_) {
    OKV_RETURN_IF_ERROR(take({{&g.slot_of, static_cast<size_t>(config.max_tokens)},
                              {&g.owner, slots},
                              {&g.used, slots},
                              {&g.clock, 1},
                              {&g.counters, 4 * kUses}}));
    OKV_RETURN_IF_ERROR(take_lists(g, static_cast<size_t>(config.capacity)));
    if (config.ahead == 0) continue;
    OKV_RETURN_IF_ERROR(take_lists(g.ahead, static_cast<size_t>(config.ahead)));
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
    fill(g.counters, 0, kUses);
  }
}

void Slots::Update(size_t group, WorkingSetArgs selection, Use use) {
  const Group& g = groups_[group];
  const bool ahead = use == Use::kAhead;
  const Lists& to = ahead ? g.ahead : g;
  selection.ahead = ahead;
  selection.capacity = ahead ? config_.ahead : config_.capacity;
  selection.n_slots = config_.n_slots;
  selection.max_tokens = config_.max_tokens;
  selection.n_seqs = config_.n_seqs;
  selection.slot_of = g.slot_of.as<int32_t>();
  selection.owner = g.owner.as<int32_t>();
  selection.used = g.used.as<uint32_t>();
  selection.clock = g.clock.as<uint32_t>();
  selection.slots = to.slots.as<int32_t>();
  selection.miss_row = to.miss_row.as<int32_t>();
  selection.miss_slot = to.miss_slot.as<int32_t>();
  selection.n_miss = to.n_miss.as<int32_t>();
  selection.own = to.own.as<int32_t>();
  selection.own_row = to.own_row.as<int32_t>();
  selection.n_own = to.n_own.as<int32_t>();
  selection.span = to.span.as<int32_t>();
  selection.slot_seqs = to.slot_seqs.as<SeqMeta>();
  selection.counters = g.counters.as<uint64_t>() +
                       2 * static_cast<size_t>(use) * static_cast<size_t>(config_.n_seqs);
  backend_.Enqueue(selection, ahead ? Lane::kIn : Lane::kMain);
}

void Slots::Fetch(size_t group, FetchRowsArgs copy, Lane lane, bool ahead) const {
  const Lists& missing = ahead ? groups_[group].ahead : groups_[group];
  copy.from_row = missing.miss_row.as<int32_t>();
  copy.to_row = missing.miss_slot.as<int32_t>();
  copy.n = missing.n_miss.as<int32_t>();
  copy.capacity = ahead ? config_.ahead : config_.capacity;
  copy.lists = config_.n_seqs;
  backend_.Enqueue(copy, lane);
}

void Slots::SendHome(size_t group, const std::byte* from, const KvView& home) const {
  const Lists& lists = groups_[group];
  backend_.Enqueue(FetchRowsArgs{.from = from,
                                 .to = home.k.base,
                                 .row_bytes = home.k.row_bytes,
                                 .from_row = lists.own.as<int32_t>(),
                                 .to_row = lists.own_row.as<int32_t>(),
                                 .n = lists.n_own.as<int32_t>(),
                                 .capacity = 1,
                                 .lists = config_.n_seqs},
                   Lane::kOut);
}

std::vector<SlotCounters> Slots::Count(int32_t seq) const {
  const auto seqs = static_cast<size_t>(config_.n_seqs);
  std::vector<SlotCounters> by_group(groups_.size());
  for (size_t group = 0; group < groups_.size(); ++group) {
    std::vector<uint64_t> counted(2 * kUses * seqs);
    backend_.Download(counted.data(), groups_[group].counters.as(), counted.size() * 8);
    const auto sum = [&](Use use, size_t i) {
      const size_t first = static_cast<size_t>(use) * seqs;
      if (seq >= 0) return counted[2 * (first + static_cast<size_t>(seq)) + i];
      uint64_t all = 0;
      for (size_t q = first; q < first + seqs; ++q) all += counted[2 * q + i];
      return all;
    };
    by_group[group] = {.selected = sum(Use::kStep, 0),
                       .missed = sum(Use::kStep, 1),
                       .primed = sum(Use::kPrompt, 1),
                       .ahead = sum(Use::kAhead, 1)};
  }
  return by_group;
}

}  // namespace omnikv
