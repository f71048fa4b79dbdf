#include "backend/cpu/compact.h"

#include <algorithm>
#include <cstring>

namespace omnikv {
namespace {

constexpr int64_t kSlice = 512;  // bytes of every row that a thread moves

}  // namespace

// A thread moves its slice of the rows of a sequence, front to back: no other thread touches it,
// and row i is written once row index[i], at or behind it, has been read.
void CpuCompact(const CompactArgs& a, ThreadPool& pool) {
  const int64_t slices = (a.kv.row_bytes + kSlice - 1) / kSlice;
  pool.ParallelFor(a.n_seqs * slices, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / slices;
      const int64_t at = item % slices * kSlice;
      const auto bytes = static_cast<size_t>(std::min(kSlice, a.kv.row_bytes - at));
      const int32_t* index = a.index + s * a.capacity;
      const int32_t table_off = a.seqs[s].table_off;
      int32_t* pos = a.pos != nullptr && at == 0 ? a.pos + s * a.pos_stride : nullptr;
      for (int32_t i = 0; i < a.count[s]; ++i) {
        if (index[i] == i) continue;
        std::memcpy(a.kv.Row(table_off, i) + at, a.kv.Row(table_off, index[i]) + at, bytes);
        if (pos != nullptr) pos[i] = pos[index[i]];
      }
    }
  });
}

}  // namespace omnikv
