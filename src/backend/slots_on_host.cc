#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "backend/slots_on_host.h"
#include "base/check.h"

namespace omnikv {

namespace {

// The `n` slots to give, ascending: those of the highest age, the first of equals.
std::vector<int32_t> SlotsToGive(const WorkingSetArgs& a, uint32_t step, int64_t n) {
  std::vector<int32_t> slots;
  for (int32_t s = 0; s < a.n_slots; ++s) {
    if (SlotAge(a.used[s], step) > 0) slots.push_back(s);
  }
  OKV_CHECK(n <= static_cast<int64_t>(slots.size()));
  // Most slots stay, so they are not sorted.
  std::nth_element(slots.begin(), slots.begin() + n, slots.end(), [&](int32_t s, int32_t t) {
    if (SlotAge(a.used[s], step) == SlotAge(a.used[t], step)) return s < t;
    return SlotAge(a.used[s], step) > SlotAge(a.used[t], step);
  });
  slots.resize(static_cast<size_t>(n));
  std::sort(slots.begin(), slots.end());
  return slots;
}

void UpdateSequence(const WorkingSetArgs& a, int32_t first_slot) {
  *a.own = -1;
  *a.n_own = 0;
  *a.n_miss = 0;
  if (a.ahead != nullptr) *a.n_ahead = 0;
  a.span[0] = a.span[1] = 0;
  *a.slot_seqs = {};
  if (a.seqs->q_len == 0) return;
  const uint32_t step = ++*a.clock;
  const int32_t listed = *a.count;
  const int32_t n = listed + a.bounds[1] - a.bounds[0];
  OKV_CHECK(n <= a.capacity, "{} tokens of a selection, expected at most {}", n, a.capacity);
  const auto token = [&](int32_t i) { return i < listed ? a.index[i] : a.bounds[0] + i - listed; };
  const auto row_of = [&](int32_t t) {
    const int32_t block = a.block_table[a.seqs->table_off + t / a.block_tokens];
    return block * a.block_tokens + t % a.block_tokens;
  };
  const int32_t own_token = a.seqs->kv_len - 1;
  const bool simulated = a.simulated_hits >= 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t slot = simulated ? i : a.slot_of[token(i)];
    a.slots[i] = slot;
    if (slot >= 0) a.used[slot] = SlotFound(a.used[slot], step);
  }
  const int64_t ahead =
      a.ahead == nullptr ? 0 : a.max_ahead - std::count(a.ahead, a.ahead + a.max_ahead, -1);
  const int64_t absent = std::count(a.slots, a.slots + n, -1);
  const std::vector<int32_t> given = SlotsToGive(a, step, simulated ? 0 : absent + ahead);
  auto next = given.begin();
  const auto give = [&](int32_t t) {
    const int32_t slot = *next++;
    if (a.owner[slot] >= 0) a.slot_of[a.owner[slot]] = -1;
    a.owner[slot] = t;
    a.slot_of[t] = slot;
    a.used[slot] = SlotCame(2 * step);
    return slot;
  };
  int32_t misses = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t t = token(i);
    bool missed = simulated && !IsSimulatedHit(a.simulated_hits, step, i);
    if (a.slots[i] < 0) {
      a.slots[i] = give(t);
      missed = true;
    }
    a.slots[i] += first_slot;
    if (t == own_token) {
      *a.own = a.slots[i];
      *a.own_row = row_of(t);
      *a.n_own = 1;
    } else if (missed) {
      a.miss_row[misses] = row_of(t);
      a.miss_slot[misses++] = a.slots[i];
    }
  }
  for (int32_t j = 0, i = 0; i < ahead; ++j) {
    if (a.ahead[j] < 0) continue;
    a.ahead_row[i] = row_of(a.ahead[j]);
    a.ahead_slot[i] = first_slot + (simulated ? i : give(a.ahead[j]));
    ++i;
  }
  if (int32_t& slot = a.slot_of[own_token]; *a.own < 0 && slot >= 0) {
    a.owner[slot] = -1;
    a.used[slot] = 0;
    slot = -1;
  }
  *a.n_miss = misses;
  if (a.ahead != nullptr) *a.n_ahead = static_cast<int32_t>(ahead);
  a.span[1] = n;
  *a.slot_seqs = {.q_begin = a.seqs->q_begin,
                  .q_len = 1,
                  .kv_len = n,
                  .table_off = first_slot / a.n_slots * a.capacity,
                  .prompt_len = n};
  a.counters[0] += static_cast<uint64_t>(n - *a.n_own);
  a.counters[1] += static_cast<uint64_t>(misses);
  a.counters[2] += static_cast<uint64_t>(ahead);
}

}  // namespace

void WorkingSetOnHost(const WorkingSetArgs& a) {
  for (int32_t q = 0; q < a.n_seqs; ++q) UpdateSequence(a.Of(q), q * a.n_slots);
}

void AverageScoresOnHost(const AverageScoresArgs& all) {
  for (int32_t s = 0; s < all.n_seqs; ++s) {
    const AverageScoresArgs a = all.Of(s);
    std::fill(a.ahead, a.ahead + a.max_ahead, -1);
    if (a.seqs->q_len == 0) continue;
    const int32_t* listed = a.index;
    for (int32_t t = 0; t < a.seqs->kv_len; ++t) {
      const bool scored = t < *a.n_candidates;
      const float x = scored ? a.scores[t] : 1.0f;
      a.average[t] = AverageScore(a.average[t], std::bit_cast<uint32_t>(x));
      const bool selected = listed < a.index + *a.count && *listed == t;
      if (selected) ++listed;
      if (const int32_t slot = a.slot_of[t]; slot >= 0) {
        a.used[slot] = SlotScored(a.average[t], *a.clock + 1);
      } else if (scored && !selected && t < a.seqs->kv_len - 1) {
        int32_t& best = a.ahead[t / kAheadTile % a.max_ahead];
        if (best < 0 || a.average[t] > a.average[best]) best = t;
      }
    }
  }
}

void FetchRowsOnHost(const FetchRowsArgs& a) {
  for (int32_t l = 0; l < a.lists; ++l) {
    const int32_t* from = a.from_row + int64_t{l} * a.capacity;
    const int32_t* to = a.to_row + int64_t{l} * a.capacity;
    for (int32_t i = 0; i < a.n[l]; ++i) {
      const auto copy = [&](int64_t begin, int64_t end) {
        std::memcpy(a.to + to[i] * a.row_bytes + begin, a.from + from[i] * a.row_bytes + begin,
                    static_cast<size_t>(end - begin));
      };
      copy(0, a.gap);
      copy(a.gap + a.gap_bytes, a.row_bytes);
    }
  }
}

void ListPiecesOnHost(const ListPiecesArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    const int32_t n = seq.q_len == 0 ? 0 : a.count[s];
    OKV_CHECK(n * a.per_unit <= a.to_capacity, "{} units of {} pieces, expected at most {}", n,
              a.per_unit, a.to_capacity);
    int32_t* to = a.to_index + int64_t{s} * a.to_capacity;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t unit = a.index[int64_t{s} * a.capacity + i];
      for (int32_t j = 0; j < a.per_unit; ++j) *to++ = unit * a.per_unit + j;
    }
    a.to_count[s] = n * a.per_unit;
    a.by_piece[s] = seq;
    a.by_piece[s].kv_len = UnitsOf(seq.kv_len, a.piece_tokens);
    a.by_table[s] = seq;
    a.by_table[s].table_off = s * a.table_stride;
  }
}

void PieceTableOnHost(const PieceTableArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    if (a.seqs[s].q_len == 0) continue;
    const int64_t first = int64_t{s} * a.capacity;
    int32_t* table = a.table + int64_t{s} * a.table_stride;
    for (int32_t i = 0; i < a.count[s]; ++i) table[a.index[first + i]] = a.slots[first + i];
    const int32_t begin = a.bounds[2 * s];
    const int32_t end = a.bounds[2 * s + 1];
    OKV_CHECK(begin % a.piece_tokens == 0, "a range from {} on", begin);
    for (int32_t p = begin / a.piece_tokens; p * a.piece_tokens < end; ++p) {
      table[p] = a.OfLast(s, p);
    }
  }
}

}  // namespace omnikv
