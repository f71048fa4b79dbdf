// The row layout of K and V: the only place that knows it.
// A token's row is [K: n_kv_heads × dk | V: n_kv_heads × dv], so that a reader of chosen tokens
// touches one piece of memory a token, large enough for PCIe and for the prefetchers. K and V may
// also lie apart, each in rows of its own (MakeKvPlanes).
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

// Heads of `d` values side by side, in rows `row_bytes` apart.
inline KvPlane MakeKvPlane(std::byte* base, int64_t row_bytes, DType dtype, int32_t d) {
  return {.base = base,
          .row_bytes = row_bytes,
          .head_bytes = static_cast<int64_t>(DTypeBytes(dtype, static_cast<size_t>(d))),
          .dtype = dtype};
}

// A view of rows that start at `base`, with the layout above.
inline KvView MakeKvView(std::byte* base, const int32_t* block_table, int32_t block_tokens,
                         DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  const int64_t row_bytes = KvRowBytes(dtype, n_kv_heads, dk, dv);
  return {.k = MakeKvPlane(base, row_bytes, dtype, dk),
          .v = MakeKvPlane(base + KvRowBytes(dtype, n_kv_heads, dk, 0), row_bytes, dtype, dv),
          .block_table = block_table,
          .block_tokens = block_tokens,
          .n_kv_heads = n_kv_heads,
          .dk = dk,
          .dv = dv};
}

// A view of K and V apart: rows [n_kv_heads × dk] from `k` on, rows [n_kv_heads × dv] from `v` on.
inline KvView MakeKvPlanes(std::byte* k, std::byte* v, const int32_t* block_table,
                           int32_t block_tokens, DType dtype, int32_t n_kv_heads, int32_t dk,
                           int32_t dv) {
  return {.k = MakeKvPlane(k, KvRowBytes(dtype, n_kv_heads, dk, 0), dtype, dk),
          .v = MakeKvPlane(v, KvRowBytes(dtype, n_kv_heads, 0, dv), dtype, dv),
          .block_table = block_table,
          .block_tokens = block_tokens,
          .n_kv_heads = n_kv_heads,
          .dk = dk,
          .dv = dv};
}

}  // namespace omnikv
