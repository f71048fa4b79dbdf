// The row layout of K and V: the only place that knows it.
// A token's row is [K: n_kv_heads × dk | V: n_kv_heads × dv], so that a reader of chosen tokens
// touches one piece of memory a token, large enough for PCIe and for the prefetchers.
#pragma once

#include "backend/attn_plan.h"

namespace omnikv {

inline constexpr float kMaxF16 = 65504.0f;

// Stores value `i` of a row: to nearest even, and what f16 cannot hold as its largest value, so
// that one outlier does not become an infinity that spoils a whole attention. NaN stays NaN.
inline void StoreKvValue(DType dtype, void* row, size_t i, float v) {
  if (dtype == DType::kF16) v = v > kMaxF16 ? kMaxF16 : v < -kMaxF16 ? -kMaxF16 : v;
  StoreFromF32(dtype, row, i, v);
}

// Bytes of one token's K and V in one layer.
inline int64_t KvRowBytes(DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  return static_cast<int64_t>(
      DTypeBytes(dtype, static_cast<size_t>(n_kv_heads) * static_cast<size_t>(dk + dv)));
}

// A view of rows that start at `base`, with the layout above.
inline KvView MakeKvView(std::byte* base, const int32_t* block_table, int32_t block_tokens,
                         DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  const auto bytes = [&](int32_t n) {
    return static_cast<int64_t>(DTypeBytes(dtype, static_cast<size_t>(n)));
  };
  return KvView{.base = base,
                .block_table = block_table,
                .block_tokens = block_tokens,
                .dtype = dtype,
                .n_kv_heads = n_kv_heads,
                .dk = dk,
                .dv = dv,
                .row_bytes = KvRowBytes(dtype, n_kv_heads, dk, dv),
                .k_offset = 0,
                .v_offset = bytes(n_kv_heads * dk),
                .k_head_bytes = bytes(dk),
                .v_head_bytes = bytes(dv)};
}

}  // namespace omnikv
