// The row layout of K and V: the only place that knows it.
// A token's row is [K: n_kv_heads × dk | V: n_kv_heads × dv], so that a reader of chosen tokens
// touches one piece of memory a token, large enough for PCIe and for the prefetchers. In formats of
// blocks the values lie so without their scales, and behind them
// [scales of K: n_kv_heads × dk / 32 | scales of V], and room up to a multiple of 16 bytes. Values
// of kQ8_0 are int8. 32 of kQ4_0 are 16 bytes as in GGUF: byte j has value j in its low nibble and
// value j + 16 in its high one, each with 8 added.
// K and V may also lie apart, each in rows of its own (MakeKvPlanes), or each KV head in rows of
// its own (MakeKvViewByHead).
#pragma once

#include <algorithm>
#include <cmath>

#include "backend/attn_plan.h"

namespace omnikv {

inline constexpr float kMaxF16 = 65504.0f;

// Whether heads of so many values can have the format: blocks are whole.
inline bool KvFits(DType dtype, int32_t head_dim) {
  return !InBlocks(dtype) || head_dim % static_cast<int32_t>(kBlockValues) == 0;
}

// Bytes of the scales of a head's d values, and of the values.
constexpr int64_t KvScaleBytes(DType dtype, int32_t d) {
  return InBlocks(dtype) ? d / static_cast<int64_t>(kBlockValues) * 2 : 0;
}
constexpr int64_t KvHeadBytes(DType dtype, int32_t d) {
  return static_cast<int64_t>(DTypeBytes(dtype, static_cast<size_t>(d))) - KvScaleBytes(dtype, d);
}

// Bytes of one token's K and V in one layer.
inline int64_t KvRowBytes(DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  const int64_t bytes = n_kv_heads * (KvHeadBytes(dtype, dk) + KvHeadBytes(dtype, dv) +
                                      KvScaleBytes(dtype, dk) + KvScaleBytes(dtype, dv));
  return InBlocks(dtype) ? (bytes + 15) / 16 * 16 : bytes;
}

// Heads of `d` values side by side from `base` on, and their scales from `scales` on, in rows
// `row_bytes` apart.
inline KvPlane MakeKvPlane(std::byte* base, std::byte* scales, int64_t row_bytes, DType dtype,
                           int32_t d) {
  return {.base = base,
          .row_bytes = row_bytes,
          .head_bytes = KvHeadBytes(dtype, d),
          .dtype = dtype,
          .scales = InBlocks(dtype) ? scales : nullptr,
          .scale_head_bytes = KvScaleBytes(dtype, d)};
}

// A view of rows that start at `base`, with the layout above.
inline KvView MakeKvView(std::byte* base, const int32_t* block_table, int32_t block_tokens,
                         DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  const int64_t row_bytes = KvRowBytes(dtype, n_kv_heads, dk, dv);
  std::byte* const v = base + n_kv_heads * KvHeadBytes(dtype, dk);
  std::byte* const scales = v + n_kv_heads * KvHeadBytes(dtype, dv);
  return {.k = MakeKvPlane(base, scales, row_bytes, dtype, dk),
          .v = MakeKvPlane(v, scales + n_kv_heads * KvScaleBytes(dtype, dk), row_bytes, dtype, dv),
          .block_table = block_table,
          .block_tokens = block_tokens,
          .n_kv_heads = n_kv_heads,
          .dk = dk,
          .dv = dv};
}

// A view of rows of other memory that all heads of `kv` have side by side. REQUIRES kv.Together().
inline KvView MakeKvViewOf(const KvView& kv, std::byte* base, const int32_t* block_table) {
  return MakeKvView(base, block_table, kv.block_tokens, kv.k.dtype, kv.n_kv_heads, kv.dk, kv.dv);
}

// Whether rows of single heads take the room that rows of all heads take, and begin at multiples of
// 16 bytes where these do.
inline bool KvFitsByHead(DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  const int64_t row_bytes = KvRowBytes(dtype, 1, dk, dv);
  return row_bytes % 16 == 0 && n_kv_heads * row_bytes == KvRowBytes(dtype, n_kv_heads, dk, dv);
}

// A view of blocks in which the rows of a head follow one another, then those of the next head: a
// reader of many tokens of one head touches one piece of memory a block. A row is that of a view of
// one head. REQUIRES KvFitsByHead.
inline KvView MakeKvViewByHead(std::byte* base, const int32_t* block_table, int32_t block_tokens,
                               DType dtype, int32_t n_kv_heads, int32_t dk, int32_t dv) {
  KvView view = MakeKvView(base, block_table, block_tokens, dtype, 1, dk, dv);
  for (KvPlane* plane : {&view.k, &view.v}) {
    plane->head_bytes = block_tokens * plane->row_bytes;
    if (InBlocks(dtype)) plane->scale_head_bytes = plane->head_bytes;
  }
  view.token_rows = n_kv_heads;
  view.n_kv_heads = n_kv_heads;
  return view;
}

// A view of K and V apart: rows [n_kv_heads × dk] from `k` on, rows [n_kv_heads × dv] from `v` on.
inline KvView MakeKvPlanes(std::byte* k, std::byte* v, const int32_t* block_table,
                           int32_t block_tokens, DType dtype, int32_t n_kv_heads, int32_t dk,
                           int32_t dv) {
  return {.k = MakeKvPlane(k, k + n_kv_heads * KvHeadBytes(dtype, dk),
                           KvRowBytes(dtype, n_kv_heads, dk, 0), dtype, dk),
          .v = MakeKvPlane(v, v + n_kv_heads * KvHeadBytes(dtype, dv),
                           KvRowBytes(dtype, n_kv_heads, 0, dv), dtype, dv),
          .block_table = block_table,
          .block_tokens = block_tokens,
          .n_kv_heads = n_kv_heads,
          .dk = dk,
          .dv = dv};
}

// Value i of a head of kQ4_0, before its scale.
inline int Q4Value(const std::byte* values, size_t i) {
  constexpr size_t kHalf = kBlockValues / 2;
  const auto pair = std::to_integer<int>(values[i / kBlockValues * kHalf + i % kHalf]);
  return (i % kBlockValues < kHalf ? pair & 15 : pair >> 4) - 8;
}

// Value i of the head whose values begin at `values` (for references and tests, not for kernels).
inline float LoadKvValue(const KvPlane& plane, int32_t head, const std::byte* values, size_t i) {
  if (!InBlocks(plane.dtype)) return LoadAsF32(plane.dtype, values, i);
  F16 scale;
  std::memcpy(&scale, values + plane.ToScales(head) + i / kBlockValues * 2, sizeof(scale));
  const int v = plane.dtype == DType::kQ8_0 ? static_cast<int8_t>(values[i]) : Q4Value(values, i);
  return F32FromF16(scale) * static_cast<float>(v);
}

// Stores value `i` of a row: to nearest even, and what f16 cannot hold as its largest value, so
// that one outlier does not become an infinity that spoils a whole attention. NaN stays NaN.
// REQUIRES !InBlocks(dtype).
inline void StoreKvValue(DType dtype, void* row, size_t i, float v) {
  if (dtype == DType::kF16) v = v > kMaxF16 ? kMaxF16 : v < -kMaxF16 ? -kMaxF16 : v;
  StoreFromF32(dtype, row, i, v);
}

// The scale of a block of kQ8_0 whose largest magnitude is `top`, NaN if it holds one.
inline F16 Q8Scale(float top) {
  return F16FromF32(top > 127 * kMaxF16 ? kMaxF16 : top / 127);
}

// Stores kQ8Block values as int8 and their f16 scale: to nearest even; NaN spoils all of them.
inline void StoreQ8Block(const float* from, std::byte* values, std::byte* scale_to) {
  float top = 0;
  for (size_t i = 0; i < kQ8Block; ++i) {
    const float v = std::fabs(from[i]);
    top = v > top || std::isnan(v) ? v : top;
    if (std::isnan(top)) break;
  }
  const F16 stored = Q8Scale(top);
  const float scale = F32FromF16(stored);
  std::memcpy(scale_to, &stored, sizeof(stored));
  for (size_t i = 0; i < kQ8Block; ++i) {
    const float q = scale > 0 ? std::nearbyint(from[i] / scale) : 0.0f;
    values[i] = static_cast<std::byte>(static_cast<int8_t>(std::clamp(q, -127.0f, 127.0f)));
  }
}

// By what a block of kQ4_0 is stored.
struct Q4Scale {
  F16 stored;
  float inverse;  // values times this are -8 to 8; 0: all are 0
};

// `top`: the value of the largest magnitude, the first of several, or NaN. It becomes -8, by the
// rule of quantize_row_q4_0_ref in ggml (ggml-quants.c), which this and Q4Code are.
inline Q4Scale MakeQ4Scale(float top) {
  // Adding 0 makes one zero of both.
  const float scale = std::clamp(top + 0.0f, -8 * kMaxF16, 8 * kMaxF16) / -8;
  const F16 stored = F16FromF32(scale);
  return {stored, F32FromF16(stored) != 0 ? 1 / scale : 0};
}

// The nibble of v: the nearest, and of two the higher one.
inline int Q4Code(float v, float inverse) {
  const float code = v * inverse + 8.5f;
  return code > 0 ? static_cast<int>(std::min(code, 15.0f)) : 0;  // 0 of NaN
}

// Stores kBlockValues values as nibbles and their f16 scale; NaN spoils all of them.
inline void StoreQ4Block(const float* from, std::byte* values, std::byte* scale_to) {
  constexpr size_t kHalf = kBlockValues / 2;
  float top = 0;
  for (size_t i = 0; i < kBlockValues && !std::isnan(top); ++i) {
    if (std::isnan(from[i]) || std::fabs(from[i]) > std::fabs(top)) top = from[i];
  }
  const Q4Scale scale = MakeQ4Scale(top);
  std::memcpy(scale_to, &scale.stored, sizeof(scale.stored));
  for (size_t i = 0; i < kHalf; ++i) {
    values[i] = static_cast<std::byte>(Q4Code(from[i], scale.inverse) |
                                       Q4Code(from[kHalf + i], scale.inverse) << 4);
  }
}

// Stores the d values of one head of K or V, in the row whose head 0 begins at `row`.
inline void StoreKvHead(const KvPlane& plane, int32_t head, int32_t d, const float* from,
                        std::byte* row) {
  std::byte* const values = row + head * plane.head_bytes;
  const auto n = static_cast<size_t>(d);
  if (!InBlocks(plane.dtype)) {
    for (size_t i = 0; i < n; ++i) StoreKvValue(plane.dtype, values, i, from[i]);
    return;
  }
  std::byte* const scales = values + plane.ToScales(head);
  for (size_t i = 0; i < n; i += kBlockValues) {
    std::byte* const scale = scales + i / kBlockValues * 2;
    if (plane.dtype == DType::kQ8_0) {
      StoreQ8Block(from + i, values + i, scale);
    } else {
      StoreQ4Block(from + i, values + i / 2, scale);
    }
  }
}

}  // namespace omnikv
