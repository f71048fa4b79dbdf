// The parts of a token's row that go together where each KV head has a list of rows of its own.
#pragma once

#include "backend/attn_plan.h"
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

inline constexpr int32_t kRowSlices = 2;  // K and V

// Slice i < kRowSlices of the heads of list l: all KV heads (lists = 1), or KV head l.
OMNIKV_HOST_DEVICE inline RowSlice SliceOf(const KvView& kv, int32_t lists, int32_t l, int32_t i) {
  const int64_t heads = kv.n_kv_heads / lists;
  const int64_t head_bytes = i == 0 ? kv.k_head_bytes : kv.v_head_bytes;
  const int64_t first = l * heads * head_bytes;
  return {.base = kv.base + (i == 0 ? kv.k_offset : kv.v_offset) + first,
          .bytes = heads * head_bytes,
          .stride = kv.row_bytes,
          .packed_at = (i == 0 ? 0 : kv.n_kv_heads * kv.k_head_bytes) + first};
}

// Bytes of all slices of a row.
OMNIKV_HOST_DEVICE inline int64_t PackedRowBytes(const KvView& kv) {
  return kv.n_kv_heads * (kv.k_head_bytes + kv.v_head_bytes);
}

// Row t of the sequence whose table starts at table_off, in the numbering of all rows of `kv`.
OMNIKV_HOST_DEVICE inline int64_t RowIndex(const KvView& kv, int32_t table_off, int64_t t) {
  const int64_t block = kv.block_table[table_off + t / kv.block_tokens];
  return block * kv.block_tokens + t % kv.block_tokens;
}

}  // namespace omnikv
