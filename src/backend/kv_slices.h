// The parts of a token's row that go together where each KV head has a list of rows of its own.
#pragma once

#include "backend/ops.h"
#include "base/host_device.h"

namespace omnikv {

// The same bytes of every row.
struct RowSlice {
  std::byte* base;    // of row 0
  int64_t bytes;      // of a row
  int64_t stride;     // bytes from one row to the next
  int64_t packed_at;  // where these bytes begin in a row that has all slices one after the other

  OMNIKV_HOST_DEVICE std::byte* Of(int64_t row) const { return base + row * stride; }
};

inline constexpr int32_t kRowSlices = 4;  // K, V and the scales of both, if they have any

// Slice i < kRowSlices of the heads of list l: all KV heads (lists = 1), or KV head l.
OMNIKV_HOST_DEVICE inline RowSlice SliceOf(const KvView& kv, int32_t lists, int32_t l, int32_t i) {
  const KvPlane& plane = i % 2 == 0 ? kv.k : kv.v;
  const bool scales = i >= 2;
  const int64_t head_bytes = scales ? plane.scale_head_bytes : plane.head_bytes;
  const int64_t heads = kv.n_kv_heads / lists;
  const int64_t first = l * heads * head_bytes;
  const int64_t before = (i > 0 ? kv.k.head_bytes : 0) + (i > 1 ? kv.v.head_bytes : 0) +
                         (i > 2 ? kv.k.scale_head_bytes : 0);
  return {.base = (scales ? plane.scales : plane.base) + first,
          .bytes = heads * head_bytes,
          .stride = plane.row_bytes,
          .packed_at = kv.n_kv_heads * before + first};
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
OMNIKV_HOST_DEVICE inline int64_t HeadBytesOfSlice(const KvView& kv, int32_t i) {
  const KvPlane& plane = i % 2 == 0 ? kv.k : kv.v;
  return i < 2 ? plane.head_bytes : plane.scale_head_bytes;
}

// Bytes of all slices of a row.
OMNIKV_HOST_DEVICE inline int64_t PackedRowBytes(const KvView& kv) {
  return kv.n_kv_heads *
         (kv.k.head_bytes + kv.v.head_bytes + kv.k.scale_head_bytes + kv.v.scale_head_bytes);
}

}  // namespace omnikv
