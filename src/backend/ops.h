// The operations of a step: plain arguments, fused for decode, the same for every backend. Pointers
// are to the backend's memory. Activations are f32; arrays are dense and row-major. Shapes stand in
// the comments: n_rows tokens of n_seqs sequences, d = d_model.
//
// The residual belongs to the reader: a projection returns a raw y, and the op that reads the
// residual next adds it (Residual, below). Each pending y is added exactly once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <variant>

#include "backend/attn_plan.h"
#include "base/dtype.h"

namespace omnikv {

class ThreadPool;

// A weight matrix [n_out, n_in], row-major, as it is stored: y = W x. Rows lie row_bytes apart.
struct WeightRef {
  DType format = DType::kF32;
  const void* data = nullptr;  // null: absent
  int64_t n_out = 0;
  int64_t n_in = 0;
  int64_t row_bytes = 0;

  bool operator==(const WeightRef&) const = default;
  const std::byte* Row(int64_t i) const {
    return static_cast<const std::byte*>(data) + i * row_bytes;
  }
};

// The prologue of an op that reads the residual stream:
//   x += scale * post_norm(y)   (skipped when y is null; post_norm null: y itself)
//   h  = norm(x)                (norm null: x itself)
// with RMS norms, w * v / sqrt(mean(v²) + eps). x is updated in place.
struct Residual {
  float* x = nullptr;                // [n_rows, d]
  const float* y = nullptr;          // [n_rows, d]
  const float* post_norm = nullptr;  // [d]
  const float* norm = nullptr;       // [d]
  float scale = 1;
  float eps = 0;
  int32_t d = 0;

  bool operator==(const Residual&) const = default;
};

// x[r] = scale * table[tokens[r]].
struct EmbedArgs {
  const int32_t* tokens = nullptr;  // [n_rows]
  WeightRef table;                  // [vocab, d]
  float scale = 1;
  float* x = nullptr;  // [n_rows, d]
  int32_t n_rows = 0;

  bool operator==(const EmbedArgs&) const = default;
};

// cos_sin[r][i] = (cos, sin)(pos[r] * inv_freq[i]) * magnitude, the product in f32 as published
// implementations compute it. Once a step for each set of frequencies.
struct RopeTableArgs {
  const RowMeta* rows = nullptr;    // [n_rows]
  const float* inv_freq = nullptr;  // [n_freq]
  float magnitude = 1;              // yarn's and longrope's attention factor
  float* cos_sin = nullptr;         // [n_rows, n_freq, 2]
  int32_t n_freq = 0;
  int32_t n_rows = 0;

  bool operator==(const RopeTableArgs&) const = default;
};

enum class QkNorm : int32_t {
  kNone,
  kPerHead,  // over each head's dk values, one weight [dk] for all heads (Qwen3, Gemma 3)
  kFull,     // over all heads together, weight [n_heads * dk] (OLMo 2)
};

// h = prologue; q, k, v = W h + b; q and k normed, then rotated (value i with value i + n_freq, the
// "half" pairing; values past 2 * n_freq pass); k and v appended to the bank, rounded to its dtype.
struct NormQkvRopeAppendArgs {
  Residual in;
  WeightRef wq, wk, wv;  // [n_heads * dk | n_kv_heads * dk | * dv, d]
  const float *bq = nullptr, *bk = nullptr, *bv = nullptr;  // null: none
  QkNorm qk_norm = QkNorm::kNone;
  const float *q_norm = nullptr, *k_norm = nullptr;
  float qk_norm_eps = 0;
  const float* cos_sin = nullptr;  // [n_rows, n_freq, 2]; null: no rotation (NoPE layers)
  int32_t n_freq = 0;
  float* q = nullptr;  // [n_rows, n_heads, dk]
  int32_t n_heads = 0;
  KvView kv;
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  int32_t n_rows = 0;

  bool operator==(const NormQkvRopeAppendArgs&) const = default;
};

enum class ScoreKind : int32_t {
  kNone,
  kLogits,   // scores [n_rows, n_heads, score_stride]: scaled (and capped) logits, per head
  kHeadMax,  // scores [n_rows, score_stride]: their maximum over heads
};

// Grouped-query attention of each row over its plan, one softmax over all segments:
//   logit = softcap(scale * q·k),  o = sum softmax(logit) v,  lse = log sum exp(logit).
// Scores are written at index = token position, and need a plan of one dense range without window.
// A row that reads no token gives o = 0 and lse = -inf.
struct AttendArgs {
  const float* q = nullptr;  // [n_rows, n_heads, dk]
  float* o = nullptr;        // [n_rows, n_heads, dv]; null: scores only
  float* lse = nullptr;      // [n_rows, n_heads]; null: not wanted
  KvView kv;
  AttnPlan plan;
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  float scale = 1;
  float softcap = 0;  // c > 0: c * tanh(logit / c)
  ScoreKind score = ScoreKind::kNone;
  float* scores = nullptr;
  int64_t score_stride = 0;  // tokens of room in a row of scores

  bool operator==(const AttendArgs&) const = default;
};

// y = W x + b.
struct LinearArgs {
  const float* x = nullptr;  // [n_rows, n_in]
  WeightRef w;               // [n_out, n_in]
  const float* bias = nullptr;
  float* y = nullptr;  // [n_rows, n_out]
  int32_t n_rows = 0;

  bool operator==(const LinearArgs&) const = default;
};

enum class Activation : int32_t { kSilu, kGeluTanh };

// h = prologue; out = act(gate h + b) * (up h + b).
struct NormGatedFfnArgs {
  Residual in;
  WeightRef gate, up;  // [ffn, d]
  const float *gate_bias = nullptr, *up_bias = nullptr;
  Activation act = Activation::kSilu;
  float* out = nullptr;  // [n_rows, ffn]
  int32_t n_rows = 0;

  bool operator==(const NormGatedFfnArgs&) const = default;
};

// h = prologue; logits of chosen rows = softcap(scale * (head h + b)).
struct NormLogitsArgs {
  Residual in;
  WeightRef head;  // [vocab, d]
  const float* bias = nullptr;
  float scale = 1;
  float softcap = 0;
  const int32_t* out_rows = nullptr;  // [n_out]: rows that need logits; null: all
  float* logits = nullptr;            // [n_out, vocab]
  int32_t n_rows = 0;
  int32_t n_out = 0;

  bool operator==(const NormLogitsArgs&) const = default;
};

// Per-token scores from per-head logits, for a row at position p, tokens 0..p:
//   out[slot][t] = max over heads of exp(logit - lse)          (from kLogits; OmniKV eq. 3-4)
//   out[slot][t] = logits[t]                                   (lse null, one head: kHeadMax)
// slot = p % ring: a window of past queries keeps its last `ring` rows of reduced scores.
struct ScoreReduceArgs {
  const float* logits = nullptr;  // [n_rows, n_heads, stride]
  const float* lse = nullptr;     // [n_rows, n_heads]
  float* out = nullptr;           // [n_seqs, ring, stride]
  const RowMeta* rows = nullptr;
  int64_t stride = 0;  // tokens
  int32_t ring = 1;
  int32_t n_heads = 0;
  int32_t n_rows = 0;

  bool operator==(const ScoreReduceArgs&) const = default;
};

// Tokens that a budget allows at `n` tokens of context: `budget` of them or, where `share` is not
// 0, that share of the context, rounded up, from 1 to `budget`.
inline int32_t BudgetAt(int32_t budget, double share, int64_t n) {
  if (share == 0) return budget;
  return static_cast<int32_t>(
      std::clamp(std::ceil(share * static_cast<double>(n)), 1.0, static_cast<double>(budget)));
}

// The split of a sparse layer's budget, from the sequence's length n and generated tokens n_gen
// (below 0 where a prompt was cancelled; min_recent is 0 or more):
//   b = BudgetAt(budget, share, n);  recent = min(max(min(tail, n_gen), min_recent), b, n)
//   bounds = [n - recent, n): always read;  n_candidates = n - recent;  n_pick = b - recent.
struct PlanRangeArgs {
  const SeqMeta* seqs = nullptr;
  int32_t n_seqs = 0;
  int32_t budget = 0;
  double share = 0;  // of the context, 0 to 1
  int32_t tail = 0;
  int32_t min_recent = 0;
  int32_t* bounds = nullptr;        // [n_seqs, 2]
  int32_t* n_candidates = nullptr;  // [n_seqs]
  int32_t* n_pick = nullptr;        // [n_seqs]

  bool operator==(const PlanRangeArgs&) const = default;
};

// The n_pick highest of S[t], t < n_candidates, ascending; equal scores: the lower t first.
//   S[t] = sum over age a < window of weights[a] * scores[(p - a) % window][t], t <= p - a
// where p = kv_len - 1, and queries before position 0 do not exist.
struct TopKArgs {
  const float* scores = nullptr;   // [n_seqs, window, stride]
  const float* weights = nullptr;  // [window], newest first
  const SeqMeta* seqs = nullptr;
  const int32_t* n_candidates = nullptr;  // [n_seqs]
  const int32_t* n_pick = nullptr;        // [n_seqs]
  int32_t* index = nullptr;               // [n_seqs, capacity]
  int32_t* count = nullptr;               // [n_seqs]
  int64_t stride = 0;                     // tokens
  int32_t window = 1;
  int32_t capacity = 0;
  int32_t n_seqs = 0;

  bool operator==(const TopKArgs&) const = default;
};

// Bytes through memory and floating-point operations (a multiply-add is two), the least that an op
// can do: each input read once, each output written once.
struct Cost {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t flops = 0;

  Cost& operator+=(const Cost& o) {
    bytes_read += o.bytes_read;
    bytes_written += o.bytes_written;
    flops += o.flops;
    return *this;
  }
};

// A policy's own op: a table of implementations with static storage, and its argument struct (plain
// data, at most kCustomBytes) by value.
struct CustomKernels {
  const char* name;
  void (*ref)(const void* args);
  void (*cpu)(const void* args, ThreadPool& pool);
  Cost (*cost)(const void* args);
};

inline constexpr size_t kCustomBytes = 128;

struct CustomArgs {
  const CustomKernels* kernels = nullptr;
  alignas(8) std::array<std::byte, kCustomBytes> args{};

  bool operator==(const CustomArgs&) const = default;
};

using Op = std::variant<EmbedArgs, RopeTableArgs, NormQkvRopeAppendArgs, AttendArgs, LinearArgs,
                        NormGatedFfnArgs, NormLogitsArgs, ScoreReduceArgs, PlanRangeArgs, TopKArgs,
                        CustomArgs>;

std::string_view OpName(const Op& op);

// The cost of running `op` now. Attention and selection depend on lengths and counts that lie in
// the backend's memory: REQUIRES it to be host-readable.
Cost CostOf(const Op& op);

}  // namespace omnikv
