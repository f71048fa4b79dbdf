#include "bank/slots.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace omnikv {

size_t Slots::Bytes(const SlotsConfig& config) {
  const auto tokens = static_cast<size_t>(config.max_tokens);
  const auto ahead = static_cast<size_t>(config.ahead);
  const size_t words = tokens + 2 * static_cast<size_t>(config.n_slots) +
                       3 * static_cast<size_t>(config.capacity) + 64 +
                       (ahead > 0 ? tokens + 3 * ahead : 0);
  return static_cast<size_t>(config.n_seqs) * static_cast<size_t>(config.groups) * words * 4;
}

Status Slots::Allocate(const SlotsConfig& config) {
  OKV_CHECK(config.n_slots >= config.capacity + config.ahead, "{} slots", config.n_slots);
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
  const auto capacity = static_cast<size_t>(config.capacity);
  const auto tokens = static_cast<size_t>(config.max_tokens);
  const auto ahead = static_cast<size_t>(config.ahead);
  groups_.resize(static_cast<size_t>(config.groups));
  for (Group& g : groups_) {
    OKV_RETURN_IF_ERROR(take({{&g.slot_of, tokens},
                              {&g.owner, slots},
                              {&g.used, slots},
                              {&g.clock, 1},
                              {&g.counters, 6 * kUses},
                              {&g.slots, capacity},
                              {&g.miss_row, capacity},
                              {&g.miss_slot, capacity},
                              {&g.n_miss, 1},
                              {&g.own, 1},
                              {&g.own_row, 1},
                              {&g.n_own, 1},
                              {&g.span, 2},
                              {&g.slot_seqs, sizeof(SeqMeta) / 4}}));
    if (ahead == 0) continue;
    OKV_RETURN_IF_ERROR(take({{&g.average, tokens},
                              {&g.ahead, ahead},
                              {&g.ahead_row, ahead},
                              {&g.ahead_slot, ahead},
                              {&g.n_ahead, 1}}));
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
    for (const Buffer* zero : {&g.used, &g.clock, &g.average, &g.n_ahead}) fill(*zero, 0);
    fill(g.counters, 0, kUses);
  }
}

void Slots::Update(size_t group, WorkingSetArgs selection, Use use, const StepScores& scores) {
  const Group& g = groups_[group];
  if (scores.scores != nullptr) {
    backend_.Enqueue(AverageScoresArgs{.seqs = selection.seqs,
                                       .scores = scores.scores,
                                       .n_candidates = scores.n_candidates,
                                       .index = selection.index,
                                       .count = selection.count,
                                       .stride = scores.stride,
                                       .window = scores.window,
                                       .index_stride = selection.index_stride,
                                       .max_ahead = config_.ahead,
                                       .n_slots = config_.n_slots,
                                       .max_tokens = config_.max_tokens,
                                       .n_seqs = config_.n_seqs,
                                       .slot_of = g.slot_of.as<int32_t>(),
                                       .clock = g.clock.as<uint32_t>(),
                                       .average = g.average.as<uint32_t>(),
                                       .used = g.used.as<uint32_t>(),
                                       .ahead = g.ahead.as<int32_t>()});
    selection.ahead = g.ahead.as<int32_t>();
    selection.max_ahead = config_.ahead;
    selection.ahead_row = g.ahead_row.as<int32_t>();
    selection.ahead_slot = g.ahead_slot.as<int32_t>();
    selection.n_ahead = g.n_ahead.as<int32_t>();
  }
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
  selection.counters = g.counters.as<uint64_t>() +
                       3 * static_cast<size_t>(use) * static_cast<size_t>(config_.n_seqs);
  backend_.Enqueue(selection);
}

void Slots::Fetch(size_t group, FetchRowsArgs copy, Lane lane, bool ahead) const {
  const Group& g = groups_[group];
  copy.from_row = (ahead ? g.ahead_row : g.miss_row).as<int32_t>();
  copy.to_row = (ahead ? g.ahead_slot : g.miss_slot).as<int32_t>();
  copy.n = (ahead ? g.n_ahead : g.n_miss).as<int32_t>();
  copy.capacity = ahead ? config_.ahead : config_.capacity;
  copy.lists = config_.n_seqs;
  backend_.Enqueue(copy, lane);
}

void Slots::SendHome(size_t group, const std::byte* from, const KvView& home) const {
  const Group& lists = groups_[group];
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
    std::vector<uint64_t> counted(3 * kUses * seqs);
    backend_.Download(counted.data(), groups_[group].counters.as(), counted.size() * 8);
    const auto sum = [&](Use use, size_t i) {
      const size_t first = static_cast<size_t>(use) * seqs;
      if (seq >= 0) return counted[3 * (first + static_cast<size_t>(seq)) + i];
      uint64_t all = 0;
      for (size_t q = first; q < first + seqs; ++q) all += counted[3 * q + i];
      return all;
    };
    by_group[group] = {.selected = sum(Use::kStep, 0),
                       .missed = sum(Use::kStep, 1),
                       .primed = sum(Use::kPrompt, 1) + sum(Use::kPrompt, 2),
                       .ahead = sum(Use::kStep, 2)};
  }
  return by_group;
}

}  // namespace omnikv
