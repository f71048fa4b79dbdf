// The parts of a token's row that go together where each KV head has a list of rows of its own.
#pragma once

#include <cstring>

#include "backend/kv_format.h"
#include "backend/ops.h"
#include "base/host_device.h"

namespace omnikv {

// Bytes of a head in slice i.
OMNIKV_HOST_DEVICE constexpr int64_t HeadBytesOfSlice(const KvView& kv, int32_t i) {
  const DType dtype = i % 2 == 0 ? kv.k.dtype : kv.v.dtype;
  const int32_t d = i % 2 == 0 ? kv.dk : kv.dv;
  return i < 2 ? KvHeadBytes(dtype, d) : KvScaleBytes(dtype, d);
}

// Bytes of all slices of a row.
OMNIKV_HOST_DEVICE constexpr int64_t PackedRowBytes(const KvView& kv) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < 4; ++i) bytes += HeadBytesOfSlice(kv, i);
  return kv.n_kv_heads * bytes;
}

// The same bytes of every row.
struct RowSlice {
  std::byte* base;    // of row 0
  int64_t bytes;      // of a row
  int64_t stride;     // bytes from one row to the next
  int64_t packed_at;  // where these bytes begin in a row that has all slices one after the other

  OMNIKV_HOST_DEVICE std::byte* Of(int64_t row) const { return base + row * stride; }
};

inline constexpr int32_t kRowSlices = 4;  // K, V and the scales of both, if they have any

// Slice i < kRowSlices of the heads of list l: all KV heads (lists = 1), or KV head l. REQUIRES
// heads side by side, or lists.
OMNIKV_HOST_DEVICE inline RowSlice SliceOf(const KvView& kv, int32_t lists, int32_t l, int32_t i) {
  const KvPlane& plane = i % 2 == 0 ? kv.k : kv.v;
  const bool scales = i >= 2;
  const int64_t head_bytes = HeadBytesOfSlice(kv, i);
  const int64_t heads = kv.n_kv_heads / lists;
  const int64_t first = l * heads;
  const int64_t place = kv.Place(static_cast<int32_t>(first));
  int64_t before = 0;
  for (int32_t j = 0; j < i; ++j) before += HeadBytesOfSlice(kv, j);
  return {.base = scales ? plane.scales + place * plane.scale_head_bytes
                         : plane.base + place * plane.head_bytes,
          .bytes = heads * head_bytes,
          .stride = plane.row_bytes,
          .packed_at = kv.n_kv_heads * before + first * head_bytes};
}

// Slice i of list l as CompactArgs moves it: of each head that moves alone, `n` slices.
OMNIKV_HOST_DEVICE inline RowSlice SliceOf(const CompactArgs& a, const KvView& kv, int32_t l,
                                           int32_t i, int32_t n) {
  return SliceOf(kv, a.lists * a.Split(), l * a.Split() + i / n, i % n);
}

// Calls visit(slice, bytes) for each slice of list l that has any: rows without scales have two.
template <typename Visit>
void ForSlices(const KvView& kv, int32_t lists, int32_t l, const Visit& visit) {
  for (int32_t i = 0; i < kRowSlices; ++i) {
    const RowSlice slice = SliceOf(kv, lists, l, i);
    if (slice.bytes > 0) visit(slice, static_cast<size_t>(slice.bytes));
  }
}

// Where head `head` of slice i lies, in a row whose K and V of head 0 begin at `row`.
OMNIKV_HOST_DEVICE inline std::byte* HeadOfSlice(const KvView& kv, const KvTarget& row, int32_t i,
                                                 int32_t head) {
  const KvPlane& plane = i % 2 == 0 ? kv.k : kv.v;
  std::byte* const values = (i % 2 == 0 ? row.k : row.v) + head * plane.head_bytes;
  return i < 2 ? values : values + plane.ToScales(head);
}

// Copies a head, K and V, to another place. REQUIRES views of one format.
inline void CopyHead(const KvView& from, const KvTarget& row, int32_t head, const KvView& to,
                     const KvTarget& to_row, int32_t to_head) {
  for (int32_t i = 0; i < kRowSlices; ++i) {
    const auto bytes = static_cast<size_t>(HeadBytesOfSlice(from, i));
    if (bytes == 0) continue;  // of no scales
    std::memcpy(HeadOfSlice(to, to_row, i, to_head), HeadOfSlice(from, row, i, head), bytes);
  }
}

}  // namespace omnikv
