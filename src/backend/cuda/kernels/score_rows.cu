// Scores of tokens by the rows of a decode step: Score.
//
// A CTA takes a tile of 16 tokens, and each of its warps a KV head. What a warp reads lies in its
// registers, queries too: so little stands between the wait and the first product, which is most of
// the time where contexts are short. Four query heads fill the eight columns of a product, each as
// the sum of two 16-bit numbers, so that results are near those of f32.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/score.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kMostWarps = 8;
constexpr int kHeads = 4;      // query heads of a product
constexpr int kMostTiles = 8;  // per SM: with more, score.cu is faster, whose CTAs load ahead

// A lane's column of a product: the higher or the lower half of a query, values 32 i + 8 t .. + 7.
template <typename T, int kBlocks>
struct Column {
  uint32_t v[kBlocks][4];
  float back;  // brings products back
};

// Lanes 0 to 15 have the higher halves of four queries, one for each four lanes, 16 to 31 the lower
// ones. `q`: the lane's query.
template <typename T, int kBlocks>
__device__ __forceinline__ Column<T, kBlocks> LoadColumn(const float* q, int dk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Pack<float, 8> values[kBlocks];
  float top = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int from = 32 * i + lane % 4 * 8;
    values[i] = from < dk ? LoadPack<8>(q + from) : Pack<float, 8>{};
  }
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (const float v : values[i].v) top = fmaxf(top, fabsf(v));
  }
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
  const Scaling scaling = ScalingOf(top);
  Column<T, kBlocks> column;
  column.back = scaling.back;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scaled = values[i].v[2 * j + e] * scaling.factor;
        const T high = FromF32<T>(scaled);
        const T low = FromF32<T>(scaled - ToF32(high));
        word |= Bits(lane < 16 ? high : low) << 16 * e;
      }
      column.v[i][j] = word;
    }
  }
  return column;
}

// What the query heads of a KV head give the lane's tokens, g and g + 8, by a row whose queries of
// these heads begin at `q`, and their sums at `lse`. In all lanes of a token.
template <typename T, int kBlocks>
__device__ __forceinline__ float2 ScoreTokens(const ScoreArgs& a, const Keys<kBlocks>& keys,
                                              const float* q, const float* lse) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const float none = NoHead(a.heads);
  float2 score = {none, none};
  for (int first = 0; first < group; first += kHeads) {
    const int of_column = min(first + lane / 4 % kHeads, group - 1);
    const auto column = LoadColumn<T, kBlocks>(q + of_column * a.kv.dk, a.kv.dk);
    float c[2][4] = {};  // of every other product, so that they do not wait for each other
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint4 x = keys.v[0][i];
      const uint4 y = keys.v[1][i];
      MultiplyAdd<T>(c[0], {x.x, y.x, x.y, y.y}, {column.v[i][0], column.v[i][1]});
      MultiplyAdd<T>(c[1], {x.z, y.z, x.w, y.w}, {column.v[i][2], column.v[i][3]});
    }
    const int result = lane % 2 * 2;  // lanes 0 and 1 of a token have two heads each, so 2 and 3
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = first + result + e;
      const float scale = a.scale * __shfl_sync(kAllLanes, column.back, 4 * (result + e));
      const auto weighed = [&](int at) {
        const float half = c[0][at] + c[1][at];
        const float v = Softcap((half + __shfl_xor_sync(kAllLanes, half, 2)) * scale, a.softcap);
        if (head >= group) return none;
        return a.lse != nullptr ? expf(v - lse[head]) : v;
      };
      score.x = ReduceHeads(a.heads, score.x, weighed(e));
      score.y = ReduceHeads(a.heads, score.y, weighed(2 + e));
    }
  }
  return {ReduceHeads(a.heads, score.x, __shfl_xor_sync(kAllLanes, score.x, 1)),
          ReduceHeads(a.heads, score.y, __shfl_xor_sync(kAllLanes, score.y, 1))};
}

// A row's scores of a token into those of the rows before it.
struct Rows {
  bool first;    // none were before
  bool max;      // over rows, else the sum
  float weight;  // of the row
  int32_t end;   // of the tokens that it sees

  __device__ void Take(float v, int32_t token, float* f) const {
    const float before = !first ? *f : max ? -INFINITY : 0.0f;
    *f = token >= end ? before : max ? fmaxf(before, v * weight) : before + v * weight;
  }
};

// Grid: tiles of a sequence, sequences. Shared memory: f32 [warps + lists, kTile].
template <typename T, int kBlocks>
__global__ void __launch_bounds__(32 * kMostWarps)
    ScoreRowsKernel(const __grid_constant__ ScoreArgs a) {
  extern __shared__ float memory[];
  const int s = static_cast<int>(blockIdx.y);
  GridTrigger();
  PrefetchL2(a.seqs + s);
  GridWait();
  const SeqMeta seq = a.seqs[s];
  const int first = static_cast<int>(blockIdx.x) * kTile;
  const int n_tokens = min(kTile, seq.kv_len - first);
  if (seq.q_len == 0 || n_tokens <= 0) return;

  const int n_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = lane / 4;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const float mean = a.heads == HeadReduce::kMean
                         ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                         : 1.0f;
  float* part = memory;                 // [n_warps, kTile]: of a row, where there is one list
  float* f = memory + n_warps * kTile;  // [lists, kTile]: of all rows
  const int n_rows = ScoringRows(a, seq.q_len);
  Keys<kBlocks> keys;
  for (int row = 0; row < n_rows; ++row) {
    const int age = n_rows - 1 - row;
    const int64_t r = int64_t{seq.q_begin} + seq.q_len - 1 - age;
    const Rows rows{.first = row == 0,
                    .max = a.queries == QueryReduce::kMax,
                    .weight = a.queries == QueryReduce::kDecay
                                  ? mean * powf(a.decay, static_cast<float>(age))
                                  : mean,
                    .end = seq.kv_len - age};
    float2 all = {NoHead(a.heads), NoHead(a.heads)};
    for (int head = warp; head < a.kv.n_kv_heads; head += n_warps) {
      if (row == 0 || n_warps < a.kv.n_kv_heads) {
        keys = LoadTile<kBlocks>(a.kv, seq.table_off, head, first, first + n_tokens - 1);
      }
      const int64_t at = r * a.n_heads + head * group;
      const float2 v = ScoreTokens<T>(a, keys, a.q + at * a.kv.dk, a.lse + at);
      if (a.lists == 1) {
        all = {ReduceHeads(a.heads, all.x, v.x), ReduceHeads(a.heads, all.y, v.y)};
      } else if (lane % 4 == 0) {
        rows.Take(v.x, first + token, f + head * kTile + token);
        rows.Take(v.y, first + token + 8, f + head * kTile + token + 8);
      }
    }
    if (a.lists > 1) continue;
    if (lane % 4 == 0) {
      part[warp * kTile + token] = all.x;
      part[warp * kTile + token + 8] = all.y;
    }
    __syncthreads();
    if (const int t = static_cast<int>(threadIdx.x); t < kTile) {
      float v = part[t];
      for (int i = 1; i < n_warps; ++i) v = ReduceHeads(a.heads, v, part[i * kTile + t]);
      rows.Take(v, first + t, f + t);
    }
    __syncthreads();
  }
  __syncthreads();
  StoreUnits(a, s, {first, n_tokens}, {0, a.lists}, f, kTile, static_cast<int>(blockDim.x));
}

template <typename T, int kBlocks>
void LaunchRows(const ScoreArgs& args, const Launch& launch) {
  const int32_t warps = std::min(kMostWarps, args.kv.n_kv_heads);
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.stride * args.unit, kTile)),
                  static_cast<unsigned>(args.n_seqs));
  LaunchKernel(ScoreRowsKernel<T, kBlocks>, launch, grid, 32 * static_cast<unsigned>(warps),
               sizeof(float) * kTile * static_cast<size_t>(warps + args.lists), args);
}

}  // namespace

bool CanScoreRows(const ScoreArgs& args, const Device& device) {
  return BlocksOf(args.kv) > 0 && args.n_rows <= args.n_seqs && kTile % args.unit == 0 &&
         args.n_seqs * CeilDiv(args.stride * args.unit, kTile) <= kMostTiles * device.sm_count &&
         AreMultiples(16, args.q);
}

void ScoreRows(const ScoreArgs& args, const Launch& launch) {
  WithBlocks(args.kv, [&](auto t, auto blocks) {
    LaunchRows<decltype(t), decltype(blocks)::value>(args, launch);
  });
}

}  // namespace omnikv::cuda
