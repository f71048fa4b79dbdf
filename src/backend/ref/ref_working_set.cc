#include <cstring>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/check.h"

namespace omnikv {

void RefWorkingSet(const WorkingSetArgs& a) {
  const uint32_t step = ++*a.clock;
  const int32_t listed = *a.count;
  const int32_t n = listed + a.bounds[1] - a.bounds[0];
  OKV_CHECK(n <= a.capacity, "{} tokens of a choice, expected at most {}", n, a.capacity);
  const auto token = [&](int32_t i) { return i < listed ? a.index[i] : a.bounds[0] + i - listed; };
  const auto row_of = [&](int32_t t) {
    const int32_t block = a.block_table[a.seq->table_off + t / a.block_tokens];
    return block * a.block_tokens + t % a.block_tokens;
  };
  const auto physical = [&](int32_t i) { return row_of(token(i)); };
  const int32_t own_token = a.seq->kv_len - 1;
  for (int32_t i = 0; i < n; ++i) {
    a.slots[i] = a.simulated_hits < 0 ? a.slot_of[physical(i)] : i;
    if (a.slots[i] >= 0) a.used[a.slots[i]] = step;
  }
  int32_t cursor = *a.cursor;
  int32_t misses = 0;
  *a.own = -1;
  for (int32_t i = 0; i < n; ++i) {
    if (a.slots[i] < 0) {
      while (a.used[cursor] == step) cursor = (cursor + 1) % a.n_slots;
      const int32_t row = physical(i);
      if (a.owner[cursor] >= 0) a.slot_of[a.owner[cursor]] = -1;
      a.owner[cursor] = row;
      a.slot_of[row] = cursor;
      a.used[cursor] = step;
      a.slots[i] = cursor;
      if (token(i) != own_token) {
        a.miss_row[misses] = row;
        a.miss_slot[misses++] = cursor;
      }
      cursor = (cursor + 1) % a.n_slots;
    }
    if (token(i) == own_token) {
      *a.own = a.slots[i];
      *a.own_row = physical(i);
    } else if (a.simulated_hits >= 0 && !IsSimulatedHit(a.simulated_hits, step, i)) {
      a.miss_row[misses] = physical(i);
      a.miss_slot[misses++] = i;
    }
  }
  if (int32_t& slot = a.slot_of[row_of(own_token)]; *a.own < 0 && slot >= 0) {
    a.owner[slot] = -1;
    slot = -1;
  }
  *a.cursor = cursor;
  *a.n_miss = misses;
  *a.n_own = *a.own >= 0 ? 1 : 0;
  a.span[0] = 0;
  a.span[1] = n;
  *a.slot_seq = {.q_begin = 0, .q_len = 1, .kv_len = n, .table_off = 0, .prompt_len = n};
  a.counters[0] += static_cast<uint64_t>(n - (*a.own >= 0 ? 1 : 0));
  a.counters[1] += static_cast<uint64_t>(misses);
}

void RefFetchRows(const FetchRowsArgs& a) {
  for (int32_t i = 0; i < *a.n; ++i) {
    std::memcpy(a.to + a.to_row[i] * a.row_bytes, a.from + a.from_row[i] * a.row_bytes,
                static_cast<size_t>(a.row_bytes));
  }
}

void RefCompact(const CompactArgs& a) {
  const auto bytes = static_cast<size_t>(a.kv.row_bytes);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int32_t* index = a.index + int64_t{s} * a.capacity;
    const auto n = static_cast<size_t>(a.count[s]);
    std::vector<std::byte> rows(n * bytes);
    std::vector<int32_t> pos(n);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(&rows[i * bytes], a.kv.Row(a.seqs[s].table_off, index[i]), bytes);
      if (a.pos != nullptr) pos[i] = a.pos[s * a.pos_stride + index[i]];
    }
    for (size_t i = 0; i < n; ++i) {
      const auto token = static_cast<int64_t>(i);
      std::memcpy(a.kv.Row(a.seqs[s].table_off, token), &rows[i * bytes], bytes);
      if (a.pos != nullptr) a.pos[s * a.pos_stride + token] = pos[i];
    }
  }
}

}  // namespace omnikv
