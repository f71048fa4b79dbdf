#include <cstring>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/check.h"

namespace omnikv {

namespace {

void UpdateSequence(const WorkingSetArgs& a, int32_t first_slot) {
  *a.own = -1;
  *a.n_own = 0;
  *a.n_miss = 0;
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
  for (int32_t i = 0; i < n; ++i) {
    a.slots[i] = a.simulated_hits < 0 ? a.slot_of[token(i)] : i;
    if (a.slots[i] >= 0) a.used[a.slots[i]] = step;
  }
  int32_t cursor = *a.cursor;
  int32_t misses = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t t = token(i);
    bool missed = a.simulated_hits >= 0 && !IsSimulatedHit(a.simulated_hits, step, i);
    if (a.slots[i] < 0) {
      while (a.used[cursor] == step) cursor = (cursor + 1) % a.n_slots;
      if (a.owner[cursor] >= 0) a.slot_of[a.owner[cursor]] = -1;
      a.owner[cursor] = t;
      a.slot_of[t] = cursor;
      a.used[cursor] = step;
      a.slots[i] = cursor;
      cursor = (cursor + 1) % a.n_slots;
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
  if (int32_t& slot = a.slot_of[own_token]; *a.own < 0 && slot >= 0) {
    a.owner[slot] = -1;
    slot = -1;
  }
  *a.cursor = cursor;
  *a.n_miss = misses;
  a.span[1] = n;
  *a.slot_seqs = {.q_begin = a.seqs->q_begin,
                  .q_len = 1,
                  .kv_len = n,
                  .table_off = first_slot / a.n_slots * a.capacity,
                  .prompt_len = n};
  a.counters[0] += static_cast<uint64_t>(n - *a.n_own);
  a.counters[1] += static_cast<uint64_t>(misses);
}

}  // namespace

void RefWorkingSet(const WorkingSetArgs& a) {
  for (int32_t q = 0; q < a.n_seqs; ++q) UpdateSequence(a.Of(q), q * a.n_slots);
}

void RefFetchRows(const FetchRowsArgs& a) {
  for (int32_t l = 0; l < a.lists; ++l) {
    const int32_t* from = a.from_row + int64_t{l} * a.capacity;
    const int32_t* to = a.to_row + int64_t{l} * a.capacity;
    for (int32_t i = 0; i < a.n[l]; ++i) {
      std::memcpy(a.to + to[i] * a.row_bytes, a.from + from[i] * a.row_bytes,
                  static_cast<size_t>(a.row_bytes));
    }
  }
}

namespace {

void CompactPlane(const CompactArgs& a, const KvPlane& plane) {
  const auto bytes = static_cast<size_t>(plane.row_bytes);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int32_t* index = a.index + int64_t{s} * a.capacity;
    const auto row = [&](int64_t t) {
      return plane.Head(a.kv.RowIndex(a.seqs[s].table_off, t), 0);
    };
    const auto n = static_cast<size_t>(a.count[s]);
    std::vector<std::byte> rows(n * bytes);
    for (size_t i = 0; i < n; ++i) std::memcpy(&rows[i * bytes], row(index[i]), bytes);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(row(static_cast<int64_t>(i)), &rows[i * bytes], bytes);
    }
  }
}

}  // namespace

void RefCompact(const CompactArgs& a) {
  CompactPlane(a, a.kv.k);
  if (!a.kv.Interleaved()) CompactPlane(a, a.kv.v);
  for (int32_t s = 0; s < a.n_seqs && a.pos != nullptr; ++s) {
    // Ascending, so that none is overwritten before it is read.
    int32_t* pos = a.pos + s * a.pos_stride;
    for (int32_t i = 0; i < a.count[s]; ++i) pos[i] = pos[a.index[int64_t{s} * a.capacity + i]];
  }
}

}  // namespace omnikv
