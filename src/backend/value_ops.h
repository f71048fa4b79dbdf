// The ops of layers whose V are summed where they lie, by logits that are known. ops.h says what
// all ops have in common.
#pragma once

#include <cstdint>

#include "backend/attn_plan.h"

namespace omnikv {

// The logits of listed tokens, one behind the other. Of row r of sequence s, with list l that query
// head h reads and i < count[s][l]:
//   out[r][h][i] = logits[r][h][index[s][l][i]]
// What lies behind them in `out` is left as it is. There is one list for all heads (lists = 1), or
// one for each KV head.
struct PickLogitsArgs {
  const float* logits = nullptr;  // [n_rows, n_heads, stride]
  const RowMeta* rows = nullptr;
  const int32_t* index = nullptr;  // [n_seqs, lists, capacity]: tokens
  const int32_t* count = nullptr;  // [n_seqs, lists]
  float* out = nullptr;            // [n_rows, n_heads, capacity]
  int64_t stride = 0;              // tokens
  int32_t capacity = 0;
  int32_t lists = 1;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;

  bool operator==(const PickLogitsArgs&) const = default;
  OMNIKV_HOST_DEVICE int64_t ListOf(int32_t seq, int32_t head) const {
    return int64_t{seq} * lists + int64_t{head} * lists / n_heads;
  }
};

// Attention to listed tokens whose logits are known, which reads no K: Attend with these logits in
// place of products, in their order.
//   lse = log sum exp(logit),  o = sum exp(logit - lse) v;  with lse_in: o = sum exp(logit -
//   lse_in) v
// A row that reads no token gives o = 0 and lse = -inf. REQUIRES tokens up to the row's own.
struct SumValuesArgs {
  // [n_rows, n_heads, capacity], as PickLogits gives them; on Lane::kHost in shared memory, as V
  // are.
  const float* logits = nullptr;
  const float* lse_in = nullptr;   // [n_rows, n_heads]; null: the listed tokens' own
  KvView kv;                       // of which V are read
  const int32_t* index = nullptr;  // [n_seqs, lists, capacity]: tokens
  const int32_t* count = nullptr;  // [n_seqs, lists]
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  float* o = nullptr;    // [n_rows, n_heads, dv]
  float* lse = nullptr;  // [n_rows, n_heads]; null: not wanted
  int32_t capacity = 0;
  int32_t lists = 1;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;

  bool operator==(const SumValuesArgs&) const = default;
  OMNIKV_HOST_DEVICE int32_t Group() const { return n_heads / kv.n_kv_heads; }
  OMNIKV_HOST_DEVICE int64_t ListOf(int32_t seq, int32_t kv_head) const {
    return int64_t{seq} * lists + (lists == 1 ? 0 : kv_head);
  }
};

}  // namespace omnikv
