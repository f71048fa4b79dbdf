// The ops of an index of K: a copy of a layer's keys in 4 bits, in a state stream with a row per
// token, by which the tokens are found that a step reads. ops.h says what all ops have in common.
//
// The row of a token is [codes: n_kv_heads × dk / 2 bytes | n_kv_heads × IndexRange], and room up
// to a multiple of 16 bytes. Byte i of a head's codes has the code of value i in its lower half,
// and that of value i + dk / 2 in its upper half. Code c stands for zero + scale * c.
#pragma once

#include <cstdint>

#include "backend/attn_plan.h"
#include "backend/score_ops.h"
#include "base/dtype.h"

namespace omnikv {

// The highest code.
inline constexpr int32_t kIndexTop = 15;

// What the codes of a key stand for, in bf16.
struct alignas(4) IndexRange {
  Bf16 scale_bits, zero_bits;

  constexpr float scale() const { return F32FromBf16(scale_bits); }
  constexpr float zero() const { return F32FromBf16(zero_bits); }
  // What a value's distance from zero() is multiplied by, to become a code once it is rounded to
  // the nearest whole number (of equals the even one). 0 where all values are zero().
  constexpr float CodesAUnit() const { return scale() > 0 ? 1 / scale() : 0; }
};

// Of values from `low` to `high`. Zero is not above the lowest one, and the top code not below the
// highest one, so that no value is further from its code than half of the scale.
constexpr IndexRange RangeOf(float low, float high) {
  const Bf16 zero = Bf16NotAbove(low);
  return {Bf16NotBelow((high - F32FromBf16(zero)) / static_cast<float>(kIndexTop)), zero};
}

OMNIKV_HOST_DEVICE inline int64_t IndexCodeBytes(int32_t dk) {
  return dk / 2;
}
OMNIKV_HOST_DEVICE inline int64_t IndexRowBytes(int32_t n_kv_heads, int32_t dk) {
  const int64_t codes = (n_kv_heads * IndexCodeBytes(dk) + 3) / 4 * 4;
  return (codes + n_kv_heads * int64_t{sizeof(IndexRange)} + 15) / 16 * 16;
}
// Where the ranges of a row begin.
OMNIKV_HOST_DEVICE inline int64_t IndexRangesAt(int32_t n_kv_heads, int32_t dk) {
  return (n_kv_heads * IndexCodeBytes(dk) + 3) / 4 * 4;
}

// The rows of the step's tokens, from their K as the bank has it. REQUIRES an even dk.
struct IndexKeysArgs {
  KvView kv;
  const SeqMeta* seqs = nullptr;
  StateView out;  // unit 1, rows of IndexRowBytes
  int32_t n_rows = 0;
  int32_t n_seqs = 0;

  bool operator==(const IndexKeysArgs&) const = default;
};

// Tokens of a unit that IndexScoreArgs::unit may name.
inline constexpr int32_t kIndexUnit = 8;

// What the index says of the logits of each row, at position p, with tokens t <= p:
//   logits[r][h][t] = softcap(scale * q[r][h]·k[t]), k what the codes stand for
//   lse[r][h]       = log of the sum of their exponentials
// With units of several tokens, logits[r][h][u] is the highest of the tokens of unit u <= p / unit.
// With `only` (one list for all heads, and one row per sequence) these tokens alone get logits, and
// lse is not written. REQUIRES an even dk, and a unit of 1 or, without `only`, kIndexUnit.
struct IndexScoreArgs {
  const float* q = nullptr;  // [n_rows, n_heads, dk]
  StateView index;           // as IndexKeysArgs::out
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  float* logits = nullptr;  // [n_rows, n_heads, stride]; by_token: [n_rows, stride, n_heads]
  float* lse = nullptr;     // [n_rows, n_heads]
  int64_t stride = 0;       // units
  int32_t n_rows = 0;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t dk = 0;
  int32_t unit = 1;  // tokens
  float scale = 1;
  float softcap = 0;  // c > 0: c * tanh(logit / c)
  SomeTokens only = {};
  bool by_token = false;  // REQUIRES `only`

  bool operator==(const IndexScoreArgs&) const = default;
};

// Exact logits take the place of approximate ones, and the logarithms of the sums follow. Of row r
// of sequence s, query head h and the tokens t <= p of `tokens`:
//   w               = softcap(scale * q[r][h]·k[t]), by K in the bank
//   lse[r][h]       = log(max(0, exp(lse) - sum of exp(logits)) + sum of exp(w))
//   logits[r][h][t] = w
// So where these are all tokens, both are what attention to all of them gives. Lists are those of
// all heads (lists = 1), or of KV head l. REQUIRES lists that end before the range, one row per
// sequence, and `lse` of `logits`.
struct RescoreArgs {
  const float* q = nullptr;  // [n_rows, n_heads, dk]
  KvView kv;
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  SomeTokens tokens;
  float* logits = nullptr;  // [n_rows, n_heads, stride]; by_token: [n_rows, stride, n_heads]
  float* lse = nullptr;     // [n_rows, n_heads]
  int64_t stride = 0;       // tokens
  int32_t lists = 1;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  float scale = 1;
  float softcap = 0;
  bool by_token = false;

  bool operator==(const RescoreArgs&) const = default;
};

}  // namespace omnikv
