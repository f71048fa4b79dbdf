#include "backend/cpu/compact.h"

#include <algorithm>
#include <cstring>

namespace omnikv {
namespace {

constexpr int64_t kSlice = 512;  // bytes of every row that a thread moves

// A thread moves its slice of the rows of a sequence, front to back: no other thread touches it,
// and row i is written once row index[i], at or behind it, has been read.
void CompactPlane(const CompactArgs& a, const KvPlane& plane, int32_t* positions,
                  ThreadPool& pool) {
  const int64_t slices = (plane.row_bytes + kSlice - 1) / kSlice;
  pool.ParallelFor(a.n_seqs * slices, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / slices;
      const int64_t at = item % slices * kSlice;
      const auto bytes = static_cast<size_t>(std::min(kSlice, plane.row_bytes - at));
      const int32_t* index = a.index + s * a.capacity;
      const auto row = [&](int32_t t) {
        return plane.Head(a.kv.RowIndex(a.seqs[s].table_off, t), 0) + at;
      };
      int32_t* pos = positions != nullptr && at == 0 ? positions + s * a.pos_stride : nullptr;
      for (int32_t i = 0; i < a.count[s]; ++i) {
        if (index[i] == i) continue;
        std::memcpy(row(i), row(index[i]), bytes);
        if (pos != nullptr) pos[i] = pos[index[i]];
      }
    }
  });
}

}  // namespace

void CpuCompact(const CompactArgs& a, ThreadPool& pool) {
  CompactPlane(a, a.kv.k, a.pos, pool);
  if (!a.kv.Interleaved()) CompactPlane(a, a.kv.v, nullptr, pool);
}

}  // namespace omnikv
