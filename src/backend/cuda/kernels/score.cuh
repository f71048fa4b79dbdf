// What the kernels of Score share: keys and queries as operands of tensor cores, the scores of
// units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/kernels/mma.cuh"
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {

inline constexpr int kTile = 16;  // tokens of a product

// Of a query's high or low halves in shared memory, in bytes, for heads of up to kBlocks runs of 32
// values: neighbouring queries lie in different banks.
template <int kBlocks>
inline constexpr int kQueryPitch = kBlocks * 64 + 64;

// 2, 4 or 8 runs of 32 values where tensor cores take the K of `kv`, else 0.
inline int BlocksOf(const KvView& kv) {
  const bool fast = (kv.k.dtype == DType::kF16 || kv.k.dtype == DType::kBF16) && kv.dk % 8 == 0 &&
                    kv.dk <= 256 && AreMultiples(16, kv.k.base, kv.k.row_bytes, kv.k.head_bytes);
  return !fast ? 0 : kv.dk <= 64 ? 2 : kv.dk <= 128 ? 4 : 8;
}

// Calls body(T{}, B{}) with the type of K and the constant BlocksOf(kv). REQUIRES BlocksOf(kv) > 0.
template <typename Body>
void WithBlocks(const KvView& kv, const Body& body) {
  const auto with_type = [&](auto t) {
    switch (BlocksOf(kv)) {
      case 2:
        return body(t, std::integral_constant<int, 2>{});
      case 4:
        return body(t, std::integral_constant<int, 4>{});
      default:
        return body(t, std::integral_constant<int, 8>{});
    }
  };
  return kv.k.dtype == DType::kF16 ? with_type(__half{}) : with_type(__nv_bfloat16{});
}

__device__ __forceinline__ float ReduceHeads(HeadReduce how, float a, float b) {
  return how == HeadReduce::kMax ? fmaxf(a, b) : a + b;
}
// What ReduceHeads of it and another gives back the other.
__device__ __forceinline__ float NoHead(HeadReduce how) {
  return how == HeadReduce::kMax ? -INFINITY : 0.0f;
}

// --- Keys.

__device__ __forceinline__ const std::byte* KeyRow(const KvView& kv, int32_t table_off, int t) {
  return kv.k.Head(kv.RowIndex(table_off, t), 0);
}

// A lane's part of a tile of K: values 32 i + 8 t .. + 7 of tokens g and g + 8, g = lane / 4,
// t = lane % 4.
template <int kBlocks>
struct Keys {
  uint4 v[2][kBlocks];
};

// Tokens from `first` on; those past `last` are it once more.
template <int kBlocks>
__device__ __forceinline__ Keys<kBlocks> LoadTile(const KvView& kv, int32_t table_off, int kv_head,
                                                  int first, int last) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Keys<kBlocks> keys;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = min(first + half * 8 + lane / 4, last);
    const std::byte* row = KeyRow(kv, table_off, t) + kv_head * kv.k.head_bytes + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      keys.v[half][i] = 32 * i + lane % 4 * 8 < kv.dk
                            ? __ldcg(reinterpret_cast<const uint4*>(row + 64 * i))
                            : make_uint4(0, 0, 0, 0);
    }
  }
  return keys;
}

// --- Queries.

// A lane's part of a query: values 32 i + lane.
template <int kBlocks>
struct Query {
  float v[kBlocks];
};

template <int kBlocks>
__device__ __forceinline__ Query<kBlocks> LoadQuery(const float* q, int dk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Query<kBlocks> query;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    query.v[i] = 32 * i + lane < dk ? __ldg(q + 32 * i + lane) : 0.0f;
  }
  return query;
}

// The power of two that brings a query's largest value, `top`, to 2^14, for f16's sake, and what
// takes products back.
struct Scaling {
  float factor, back;
};
__device__ __forceinline__ Scaling ScalingOf(float top) {
  const int up = 14 - max((__float_as_int(top) >> 23) - 127, -100);
  return {__int_as_float((127 + up) << 23), __int_as_float((127 - up) << 23)};
}

// A warp's query as the sum of two T, scaled. Returns what takes products back.
template <typename T, int kBlocks>
__device__ __forceinline__ float SplitQuery(const Query<kBlocks>& query, std::byte* to_high,
                                            std::byte* to_low) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) top = fmaxf(top, fabsf(query.v[i]));
  top = WarpMax(top);
  const Scaling scaling = ScalingOf(top);
  T* high = reinterpret_cast<T*>(to_high);
  T* low = reinterpret_cast<T*>(to_low);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const float scaled = query.v[i] * scaling.factor;
    const T rounded = FromF32<T>(scaled);
    high[32 * i + lane] = rounded;
    low[32 * i + lane] = FromF32<T>(scaled - ToF32(rounded));
  }
  return scaling.back;
}

// c [16 tokens, 8 queries] of MultiplyAdd = keys times the query of column lane / 4, whose halves
// begin at `high` and `low`.
template <typename T, int kBlocks>
__device__ __forceinline__ void Multiply(float (&c)[4], const Keys<kBlocks>& keys,
                                         const std::byte* high, const std::byte* low) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  float c_low[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint4 x = keys.v[0][i];
    const uint4 y = keys.v[1][i];
    const uint32_t k0[4] = {x.x, y.x, x.y, y.y};
    const uint32_t k1[4] = {x.z, y.z, x.w, y.w};
    const uint4 q = *reinterpret_cast<const uint4*>(high + t * 16 + 64 * i);
    const uint4 r = *reinterpret_cast<const uint4*>(low + t * 16 + 64 * i);
    const uint32_t q0[2] = {q.x, q.y}, q1[2] = {q.z, q.w};
    const uint32_t r0[2] = {r.x, r.y}, r1[2] = {r.z, r.w};
    MultiplyAdd<T>(c, k0, q0);
    MultiplyAdd<T>(c_low, k0, r0);
    MultiplyAdd<T>(c, k1, q1);
    MultiplyAdd<T>(c_low, k1, r1);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] += c_low[e];
}

// --- Units.

__device__ __forceinline__ void StoreScore(const ScoreArgs& a, int seq, int list, int unit,
                                           float v) {
  const SeqMeta& meta = a.seqs[seq];
  if (a.accumulate && int64_t{unit} * a.unit < meta.kv_len - meta.q_len) {
    const float held = ScoresOf(a, seq, list, /*held=*/true)[unit];
    if (a.queries == QueryReduce::kMax) {
      v = fmaxf(v, held);
    } else {
      const float faded =
          a.queries == QueryReduce::kDecay ? powf(a.decay, static_cast<float>(meta.q_len)) : 1.0f;
      v += faded * held;
    }
  }
  ScoresOf(a, seq, list, /*held=*/false)[unit] = v;
}

struct TokenSpan {
  int32_t first, n_tokens;
};
struct ListSpan {
  int32_t first, n_lists;
};

// The scores of a block's units, whole ones but for the sequence's last, from f [lists, pitch]:
// small ones by a thread each, others by a warp. By the first `n_threads` of the CTA.
__device__ __forceinline__ void StoreUnits(const ScoreArgs& a, int seq, TokenSpan tokens,
                                           ListSpan lists, const float* f, int pitch,
                                           int n_threads) {
  const int n_units = static_cast<int>(CeilDiv(tokens.n_tokens, a.unit));
  const int lanes = a.unit < 32 ? 1 : 32;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int i = static_cast<int>(threadIdx.x) / lanes; i < lists.n_lists * n_units;
       i += n_threads / lanes) {
    const int list = i / n_units;
    const int unit = i % n_units;
    const int end = min((unit + 1) * a.unit, tokens.n_tokens);
    float best = -INFINITY;
    for (int t = unit * a.unit + lane; t < end; t += lanes) {
      best = fmaxf(best, f[list * pitch + t]);
    }
    if (lanes > 1) best = WarpMax(best);
    if (lane == 0) StoreScore(a, seq, lists.first + list, tokens.first / a.unit + unit, best);
  }
}

// --- The rows of a decode step, in score_rows.cu.

bool CanScoreRows(const ScoreArgs& args, const Device& device);
// REQUIRES CanScoreRows.
void ScoreRows(const ScoreArgs& args, const Launch& launch);

// --- Many rows, in score_tiles.cu.

bool CanScoreTiles(const ScoreArgs& args);
// REQUIRES CanScoreTiles.
void ScoreTiles(const ScoreArgs& args, const Launch& launch);

}  // namespace omnikv::cuda
