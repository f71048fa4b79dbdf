#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/kv_slices.h"
#include "backend/ref/ref_backend.h"

namespace omnikv {
namespace {

// The bytes of list l in a row, as a row that has all slices one after the other has them.
void Pack(const KvView& kv, int32_t lists, int32_t l, int64_t row, std::byte* packed) {
  ForSlices(kv, lists, l, [&](const RowSlice& slice, size_t bytes) {
    std::memcpy(packed + slice.packed_at, slice.Of(row), bytes);
  });
}

void Unpack(const KvView& kv, int32_t lists, int32_t l, const std::byte* packed, int64_t row) {
  ForSlices(kv, lists, l, [&](const RowSlice& slice, size_t bytes) {
    std::memcpy(slice.Of(row), packed + slice.packed_at, bytes);
  });
}

void StoreIn(const KvView& kv, const KvSlot& slot, const StoreRowsArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const KvTarget from = a.Source(r);
    for (int32_t h = 0; h < a.from.n_kv_heads; ++h) {
      const int32_t to_head = a.To(kv, h);
      if (to_head < 0) continue;
      const KvTarget to = TargetIn(kv, slot, a.seqs, a.RowOf(r, h));
      CopyHead(a.from, from, h, kv, to, to_head);
    }
  }
}

}  // namespace

void RefStoreRows(const StoreRowsArgs& a) {
  StoreIn(a.kv, a.slot, a);
  if (a.HasRest()) StoreIn(a.rest, {}, a);
}

void RefCompact(const CompactArgs& a) {
  const auto packed = static_cast<size_t>(PackedRowBytes(a.kv));
  const int32_t split = a.Split();
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    const SeqMeta seq = a.seqs[list / a.lists];
    if (seq.q_len == 0) continue;
    const int32_t l = list % a.lists;
    const int32_t* index = a.index + int64_t{list} * a.capacity;
    std::vector<int32_t> from(index, index + a.count[list]);
    if (a.bounds != nullptr) {
      const int32_t* bounds = a.bounds + 2 * (list / a.lists);
      for (int32_t t = bounds[0]; t < bounds[1]; ++t) from.push_back(t);
    }
    std::vector<std::byte> rows(from.size() * packed);
    std::vector<int32_t> pos(from.size());
    std::vector<float> scores;
    for (size_t i = 0; a.scores.scores != nullptr && i < from.size(); ++i) {
      scores.push_back(
          a.scores.At(list / a.lists, l, a.lists, a.steps[list / a.lists].kv_len)[from[i]]);
    }
    for (size_t i = 0; i < from.size(); ++i) {
      const int64_t row = a.Source().RowIndex(seq.table_off, from[i]);
      for (int32_t h = 0; h < split; ++h) {
        Pack(a.Source(), a.lists * split, l * split + h, row, &rows[i * packed]);
      }
      if (a.pos != nullptr) pos[i] = a.InPlace() ? a.pos[row * a.lists + l] : from[i];
    }
    for (size_t i = 0; i < from.size(); ++i) {
      const int64_t row = a.kv.RowIndex(seq.table_off, static_cast<int64_t>(i));
      for (int32_t h = 0; h < split; ++h) {
        Unpack(a.kv, a.lists * split, l * split + h, &rows[i * packed], row);
      }
      if (a.pos != nullptr) a.pos[row * a.lists + l] = pos[i];
    }
    if (scores.empty()) continue;
    std::copy(scores.begin(), scores.end(),
              a.to_scores.At(list / a.lists, l, a.lists, a.steps[list / a.lists].kv_len));
  }
}

void RefEvict(const EvictArgs& a) {
  const int64_t packed = PackedRowBytes(a.kv);
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    const int32_t s = list / a.lists;
    const int32_t l = list % a.lists;
    const SeqMeta seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    const int64_t entry = int64_t{s} * kEvictionLog + a.steps[s].kv_len % kEvictionLog;
    int32_t& victim = a.log.victim[entry * a.lists + l];
    a.log.length[entry * a.lists + l] = a.steps[s].kv_len;
    victim = -1;
    if (seq.kv_len <= a.most) continue;
    float* scores = a.scores.At(s, l, a.lists, a.steps[s].kv_len);
    int32_t lowest = -1;
    for (int32_t i = 0; i < seq.kv_len; ++i) {
      if (IsRecent(a, s, l, i)) continue;
      if (lowest < 0 || scores[i] <= scores[lowest]) lowest = i;
    }
    const int64_t to = a.kv.RowIndex(seq.table_off, lowest);
    const int64_t from = a.kv.RowIndex(seq.table_off, seq.kv_len - 1);
    victim = lowest;
    Pack(a.kv, a.lists, l, to, a.log.rows + entry * packed);
    std::vector<std::byte> row(static_cast<size_t>(packed));
    Pack(a.kv, a.lists, l, from, row.data());
    Unpack(a.kv, a.lists, l, row.data(), to);
    scores[lowest] = scores[seq.kv_len - 1];
    if (a.pos == nullptr) continue;
    a.log.pos[entry * a.lists + l] = a.pos[to * a.lists + l];
    a.pos[to * a.lists + l] = a.pos[from * a.lists + l];
  }
}

void RefUndoEvict(const UndoEvictArgs& a) {
  for (int64_t n = a.to; n > a.from; --n) {
    const int64_t entry = int64_t{a.seq} * kEvictionLog + n % kEvictionLog;
    for (int32_t l = 0; l < a.lists; ++l) {
      const int32_t victim = a.log.victim[entry * a.lists + l];
      if (victim < 0 || a.log.length[entry * a.lists + l] != n) continue;
      const int64_t row = a.kv.RowIndex(a.table_off, victim);
      Unpack(a.kv, a.lists, l, a.log.rows + entry * PackedRowBytes(a.kv), row);
      if (a.pos != nullptr) a.pos[row * a.lists + l] = a.log.pos[entry * a.lists + l];
    }
  }
}

}  // namespace omnikv
