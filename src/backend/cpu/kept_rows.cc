#include "backend/cpu/kept_rows.h"

#include <algorithm>
#include <cstring>

#include "backend/kv_slices.h"

namespace omnikv {
namespace {

constexpr int64_t kPart = 512;  // bytes of every row that a thread moves
constexpr int64_t kRows = 16;   // that a thread stores at a time

// Row i of what a sequence keeps for a list.
struct Kept {
  Kept(const CompactArgs& a, int32_t list)
      : index(a.index + int64_t{list} * a.capacity), listed(a.count[list]), n(listed) {
    if (a.bounds == nullptr) return;
    const int32_t* bounds = a.bounds + 2 * (list / a.lists);
    begin = bounds[0];
    n += bounds[1] - bounds[0];
  }
  int32_t operator()(int32_t i) const { return i < listed ? index[i] : begin + i - listed; }

  const int32_t* index;
  int32_t listed;
  int32_t n;
  int32_t begin = 0;
};

// Row `row` of the step.
void StoreIn(const KvView& kv, const KvSlot& slot, const StoreRowsArgs& a, int32_t row) {
  const KvTarget from = a.Source(row);
  const bool apart = kv.ByHead() || a.from.ByHead();
  if (kv.heads.All() && a.head_step == 0 && !apart) {  // heads lie side by side
    const KvTarget to = TargetIn(kv, slot, a.seqs, a.rows[row]);
    for (int32_t i = 0; i < kRowSlices; ++i) {
      const int64_t bytes = HeadBytesOfSlice(kv, i) * kv.n_kv_heads;
      if (bytes == 0) continue;
      std::memcpy(HeadOfSlice(kv, to, i, 0), HeadOfSlice(a.from, from, i, 0),
                  static_cast<size_t>(bytes));
    }
    return;
  }
  for (int32_t h = 0; h < a.from.n_kv_heads; ++h) {
    const int32_t to_head = a.To(kv, h);
    if (to_head < 0) continue;
    CopyHead(a.from, from, h, kv, TargetIn(kv, slot, a.seqs, a.RowOf(row, h)), to_head);
  }
}

}  // namespace

void CpuStoreRows(const StoreRowsArgs& a, ThreadPool& pool) {
  pool.ParallelFor(a.n_rows, kRows, [&](int64_t first, int64_t last, int) {
    for (int64_t r = first; r < last; ++r) {
      StoreIn(a.kv, a.slot, a, static_cast<int32_t>(r));
      if (a.HasRest()) StoreIn(a.rest, {}, a, static_cast<int32_t>(r));
    }
  });
}

// A thread moves its part of the rows of a list, front to back: no other thread touches it, and row
// i is written once the row that it gets, at or behind it, has been read.
void CpuCompact(const CompactArgs& a, ThreadPool& pool) {
  const int64_t heads = a.kv.n_kv_heads / (a.lists * a.Split());
  const int64_t head_bytes = std::max(HeadBytesOfSlice(a.kv, 0), HeadBytesOfSlice(a.kv, 1));
  const int64_t parts = (heads * head_bytes + kPart - 1) / kPart;
  const int64_t slices = int64_t{kRowSlices} * a.Split();
  const int64_t items = int64_t{a.n_seqs} * a.lists * slices * parts;
  pool.ParallelFor(items, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t item = first; item < last; ++item) {
      const auto list = static_cast<int32_t>(item / (slices * parts));
      const SeqMeta& seq = a.seqs[list / a.lists];
      if (seq.q_len == 0) continue;
      const int32_t l = list % a.lists;
      const auto part = static_cast<int32_t>(item / parts % slices);
      const RowSlice slice = SliceOf(a, a.kv, l, part, kRowSlices);
      const RowSlice source = SliceOf(a, a.Source(), l, part, kRowSlices);
      const int64_t at = item % parts * kPart;
      if (at >= slice.bytes) continue;
      const auto bytes = static_cast<size_t>(std::min(kPart, slice.bytes - at));
      const bool first_part = item % (slices * parts) == 0;  // moves what else moves
      const bool moves_pos = a.pos != nullptr && first_part;
      const Kept kept(a, list);
      if (a.scores.scores != nullptr && first_part) {
        const int32_t s = list / a.lists;
        const float* scores = a.scores.At(s, l, a.lists, a.steps[s].kv_len);
        float* to = a.to_scores.At(s, l, a.lists, a.steps[s].kv_len);
        for (int32_t i = 0; i < kept.n; ++i) to[i] = scores[kept(i)];
      }
      for (int32_t i = 0; i < kept.n; ++i) {
        if (a.InPlace() && kept(i) == i) continue;
        const int64_t from = a.Source().RowIndex(seq.table_off, kept(i));
        const int64_t to = a.kv.RowIndex(seq.table_off, i);
        std::memcpy(slice.Of(to) + at, source.Of(from) + at, bytes);
        if (!moves_pos) continue;
        a.pos[to * a.lists + l] = a.InPlace() ? a.pos[from * a.lists + l] : kept(i);
      }
    }
  });
}

void CpuEvict(const EvictArgs& a, ThreadPool& pool) {
  pool.ParallelFor(int64_t{a.n_seqs} * a.lists, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t list = first; list < last; ++list) {
      const auto s = static_cast<int32_t>(list / a.lists);
      const auto l = static_cast<int32_t>(list % a.lists);
      const SeqMeta& seq = a.seqs[s];
      if (seq.q_len == 0) continue;
      const int64_t entry = int64_t{s} * kEvictionLog + a.steps[s].kv_len % kEvictionLog;
      int32_t& victim = a.log.victim[entry * a.lists + l];
      a.log.length[entry * a.lists + l] = a.steps[s].kv_len;
      victim = -1;
      if (seq.kv_len <= a.most) continue;
      float* scores = a.scores.At(s, l, a.lists, a.steps[s].kv_len);
      const int32_t newest = seq.kv_len - 1;
      for (int32_t i = 0; i <= newest; ++i) {
        if (IsRecent(a, s, l, i)) continue;
        if (victim < 0 || scores[i] <= scores[victim]) victim = i;
      }
      scores[victim] = scores[newest];
      const int64_t to = a.kv.RowIndex(seq.table_off, victim);
      const int64_t from = a.kv.RowIndex(seq.table_off, newest);
      ForSlices(a.kv, a.lists, l, [&](const RowSlice& slice, size_t bytes) {
        std::byte* saved = a.log.rows + entry * PackedRowBytes(a.kv) + slice.packed_at;
        std::memcpy(saved, slice.Of(to), bytes);
        if (from != to) std::memcpy(slice.Of(to), slice.Of(from), bytes);
      });
      if (a.pos == nullptr) continue;
      a.log.pos[entry * a.lists + l] = a.pos[to * a.lists + l];
      a.pos[to * a.lists + l] = a.pos[from * a.lists + l];
    }
  });
}

void CpuUndoEvict(const UndoEvictArgs& a) {
  for (int64_t n = a.to; n > a.from; --n) {
    const int64_t entry = int64_t{a.seq} * kEvictionLog + n % kEvictionLog;
    for (int32_t l = 0; l < a.lists; ++l) {
      const int32_t victim = a.log.victim[entry * a.lists + l];
      if (victim < 0 || a.log.length[entry * a.lists + l] != n) continue;
      const int64_t row = a.kv.RowIndex(a.table_off, victim);
      ForSlices(a.kv, a.lists, l, [&](const RowSlice& slice, size_t bytes) {
        std::memcpy(slice.Of(row), a.log.rows + entry * PackedRowBytes(a.kv) + slice.packed_at,
                    bytes);
      });
      if (a.pos != nullptr) a.pos[row * a.lists + l] = a.log.pos[entry * a.lists + l];
    }
  }
}

}  // namespace omnikv
