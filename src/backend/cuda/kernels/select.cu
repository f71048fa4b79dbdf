// What lies between scores and a choice by them: ScoreReduce, Pool, AgedScores and PlanRange.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

// --- ScoreReduce: bound by memory, n_heads floats in and one out a token. A block takes a tile of
// tokens, and its warps share the heads, so that all loads of a tile are under way at once. Lists
// of few heads leave warps over, which take tiles beside it.

constexpr int kReduceWarps = 8;
constexpr int kReduceWide = 4;    // tokens a lane reduces at once, where alignment allows
constexpr int kReduceBlocks = 5;  // per multiprocessor: as many as registers allow, in one wave

// Warps that share a tile: a power of two.
__host__ __device__ inline int WarpsOfTile(const ScoreReduceArgs& a) {
  int warps = 1;
  while (2 * warps <= kReduceWarps && 2 * warps <= a.n_heads / a.lists) warps *= 2;
  return warps;
}

template <int N, bool kSum>
__device__ __forceinline__ void TakeHead(Pack<float, N>& score, const Pack<float, N>& v) {
#pragma unroll
  for (int j = 0; j < N; ++j) score.v[j] = kSum ? score.v[j] + v.v[j] : fmaxf(score.v[j], v.v[j]);
}

template <int N>
__device__ __forceinline__ void Exponentiate(Pack<float, N>& v) {
#pragma unroll
  for (int j = 0; j < N; ++j) v.v[j] = expf(v.v[j]);
}

// Grid: x walks tiles, y rows, z lists. With kSome, tokens are those of a.only, one (N = 1) a lane.
template <int N, bool kSum, bool kSome>
__global__ void __launch_bounds__(32 * kReduceWarps, kReduceBlocks)
    ScoreReduceKernel(const __grid_constant__ ScoreReduceArgs a) {
  // Of a tile, and of the one before, which the first warp may still read.
  __shared__ Pack<float, N> parts[2][kReduceWarps][32];
  GridTrigger();
  const int row = static_cast<int>(blockIdx.y);
  if (threadIdx.x == 0) PrefetchL2(a.rows + row);
  GridWait();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const RowMeta meta = a.Row(row);
  const int slot = meta.pos % a.ring;
  // Of the rows that share a slot, the last one to cover a token gives its score.
  int first = 0;
#pragma unroll 1
  for (int later = row + 1; !kSome && later < a.n_rows; ++later) {
    const RowMeta other = a.Row(later);
    if (other.seq == meta.seq && other.pos % a.ring == slot) first = max(first, other.pos + 1);
  }
  const float* logits = a.logits + int64_t{row} * a.n_heads * a.stride;
  const float* lse = a.lse != nullptr ? a.lse + int64_t{row} * a.n_heads : nullptr;
  const int list_heads = a.n_heads / a.lists;
  const int list = static_cast<int>(blockIdx.z);
  float* out = a.out + ((int64_t{meta.seq} * a.lists + list) * a.ring + slot) * a.stride;
  const SomeTokens::Of tokens(a.only, meta, a.lists, list);
  const int n = tokens.size();
  const int together = WarpsOfTile(a);
  const int tiles = kReduceWarps / together;  // of a block at a time
  const int member = warp % together;
  int side = 0;
  for (int64_t tile = int64_t{first} / (32 * N) + int64_t{blockIdx.x} * tiles; tile * 32 * N < n;
       tile += int64_t{gridDim.x} * tiles, side ^= 1) {
    const int64_t item = ((tile + warp / together) * 32 + lane) * N;
    const int64_t t = kSome && item < n ? tokens.At(static_cast<int32_t>(item)) : item;
    Pack<float, N> score;
#pragma unroll
    for (int j = 0; j < N; ++j) score.v[j] = kSum ? 0.0f : -INFINITY;
    if (item < n) {
#pragma unroll 4
      for (int h = list * list_heads + member; h < (list + 1) * list_heads; h += together) {
        if (!a.Takes(h)) continue;
        Pack<float, N> v = LoadPack<N>(logits + h * a.stride + t);
        const float base = lse != nullptr ? lse[h] : 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) v.v[j] -= base;
        if (kSum && lse != nullptr) Exponentiate(v);
        TakeHead<N, kSum>(score, v);
      }
    }
    parts[side][warp][lane] = score;
    __syncthreads();
    if (member == 0 && item < n) {
      for (int w = 1; w < together; ++w) TakeHead<N, kSum>(score, parts[side][warp + w][lane]);
      // The exponential is monotone: one of the maximum is the maximum of them.
      if (!kSum && lse != nullptr) Exponentiate(score);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (t + j < a.sinks) score.v[j] = kChosenFirst;
      }
      if (kSome || (t >= first && t + N <= n)) {
        StorePack(out + a.ScoreAt(item, t), score);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (t + j >= first && t + j < n) out[t + j] = score.v[j];
        }
      }
    }
  }
}

// --- ScoreReduce by token: a thread takes a listed token, whose logits lie side by side. Grid: x
// walks tokens, y rows, z lists.

constexpr int kTokenThreads = 256;
constexpr int kTogether = 8;  // loads of a thread that are under way

template <int N, bool kSum>
__global__ void __launch_bounds__(kTokenThreads)
    ScoreReduceByToken(const __grid_constant__ ScoreReduceArgs a) {
  GridTrigger();
  GridWait();
  const auto row = static_cast<int>(blockIdx.y);
  const auto list = static_cast<int>(blockIdx.z);
  const RowMeta meta = a.Row(row);
  const float* lse = a.lse != nullptr ? a.lse + int64_t{row} * a.n_heads : nullptr;
  const int heads = a.n_heads / a.lists;
  float* const out =
      a.out + ((int64_t{meta.seq} * a.lists + list) * a.ring + meta.pos % a.ring) * a.stride;
  const SomeTokens::Of tokens(a.only, meta, a.lists, list);
  for (int i = static_cast<int>(blockIdx.x) * kTokenThreads + static_cast<int>(threadIdx.x);
       i < tokens.size(); i += static_cast<int>(gridDim.x) * kTokenThreads) {
    const int t = tokens.At(i);
    const float* const logits = a.logits + LogitAt(a, row, 0, t);
    float score = kSum ? 0.0f : -INFINITY;
    const int end = (list + 1) * heads;
    for (int first = list * heads; first < end; first += kTogether * N) {
      Pack<float, N> of_heads[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i * N < end) of_heads[i] = LoadPack<N>(logits + first + i * N);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int h = first + i * N;
        if (h >= end) break;
        Pack<float, N> v = of_heads[i];
        if (lse != nullptr) {
          const auto base = LoadPack<N>(lse + h);
#pragma unroll
          for (int j = 0; j < N; ++j) v.v[j] = kSum ? expf(v.v[j] - base.v[j]) : v.v[j] - base.v[j];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (a.Takes(h + j)) score = kSum ? score + v.v[j] : fmaxf(score, v.v[j]);
        }
      }
    }
    // The exponential is monotone: one of the maximum is the maximum of them.
    if (!kSum && lse != nullptr) score = expf(score);
    out[a.ScoreAt(i, t)] = t < a.sinks ? kChosenFirst : score;
  }
}

// --- Pool: a thread a score; neighbours come from the first-level cache.

constexpr int kPoolThreads = 256;

// Grid: x walks scores, y lists, z sequences.
__global__ void __launch_bounds__(kPoolThreads) PoolKernel(const PoolArgs a) {
  GridTrigger();
  GridWait();
  const int n = a.n[blockIdx.z];
  const int half = a.kernel / 2;
  const bool max_of = a.kind == PoolKind::kMax;
  const int64_t list = (int64_t{blockIdx.z} * a.lists + blockIdx.y) * a.stride;
  const float* in = a.in + list;
  const int step = static_cast<int>(gridDim.x) * kPoolThreads;
  for (int i = static_cast<int>(blockIdx.x * kPoolThreads + threadIdx.x); i < n; i += step) {
    const int first = max(0, i - half);
    const int last = min(n - 1, i + half);
    float v = in[first];
#pragma unroll 4
    for (int j = first + 1; j <= last; ++j) v = max_of ? fmaxf(v, in[j]) : v + in[j];
    a.out[list + i] = max_of ? v : v / static_cast<float>(a.kernel);
  }
}

// --- AgedScores: a thread a score. Grid: as PoolKernel.

__global__ void __launch_bounds__(kPoolThreads)
    AgedScoresKernel(const __grid_constant__ AgedScoresArgs a) {
  GridTrigger();
  GridWait();
  const auto s = static_cast<int32_t>(blockIdx.z);
  const auto l = static_cast<int32_t>(blockIdx.y);
  if (a.seqs[s].q_len == 0) return;
  float* const out = a.out + (int64_t{s} * a.lists + l) * a.stride;
  const int step = static_cast<int>(gridDim.x) * kPoolThreads;
  for (int i = static_cast<int>(blockIdx.x * kPoolThreads + threadIdx.x); i < a.seqs[s].kv_len;
       i += step) {
    out[i] = AgedScore(a, s, l, i);
  }
}

// --- PlanRange: a thread a sequence.

__global__ void PlanRangeKernel(const PlanRangeArgs a) {
  GridTrigger();
  GridWait();
  const int s = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s < a.n_seqs) WriteRange(a, s);
}

void ReduceByToken(const ScoreReduceArgs& args, const Launch& launch) {
  const int64_t most = kReduceBlocks * int64_t{launch.device->sm_count};
  const dim3 grid(static_cast<uint32_t>(
                      std::clamp<int64_t>(CeilDiv(args.only.capacity, kTokenThreads), 1, most)),
                  static_cast<uint32_t>(args.n_rows), static_cast<uint32_t>(args.lists));
  const bool fours = args.n_heads / args.lists % 4 == 0 &&
                     AreMultiples(16, args.logits, args.lse, int64_t{4} * args.n_heads);
  const bool sum = args.heads == HeadReduce::kSum;
  const auto kernel = sum ? (fours ? ScoreReduceByToken<4, true> : ScoreReduceByToken<1, true>)
                          : (fours ? ScoreReduceByToken<4, false> : ScoreReduceByToken<1, false>);
  LaunchKernel(kernel, launch, grid, kTokenThreads, 0, args);
}

}  // namespace

void ScoreReduce(const ScoreReduceArgs& args, const Launch& launch) {
  if (args.n_rows == 0) return;
  const bool some = args.only.index != nullptr;
  if (args.by_token) return ReduceByToken(args, launch);
  const bool wide = !some && args.stride % kReduceWide == 0 &&
                    AreMultiples(kReduceWide * sizeof(float), args.logits, args.out);
  const int64_t tiles = 32 * (wide ? kReduceWide : 1) * (kReduceWarps / WarpsOfTile(args));
  const int64_t walkers =
      std::max<int64_t>(1, std::min(CeilDiv(some ? args.only.capacity : args.stride, tiles),
                                    kReduceBlocks * int64_t{launch.device->sm_count}));
  const dim3 grid(static_cast<uint32_t>(walkers), static_cast<uint32_t>(args.n_rows),
                  static_cast<uint32_t>(args.lists));
  const auto launch_of = [&](auto kernel) {
    LaunchKernel(kernel, launch, grid, 32 * kReduceWarps, 0, args);
  };
  const auto with_heads = [&](auto sum) {
    constexpr bool kSum = decltype(sum)::value;
    launch_of(some   ? ScoreReduceKernel<1, kSum, true>
              : wide ? ScoreReduceKernel<kReduceWide, kSum, false>
                     : ScoreReduceKernel<1, kSum, false>);
  };
  if (args.heads == HeadReduce::kSum) return with_heads(std::true_type{});
  with_heads(std::false_type{});
}

void Pool(const PoolArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.stride == 0) return;
  const auto walkers = static_cast<uint32_t>(
      std::min(CeilDiv(args.stride, kPoolThreads), 8 * int64_t{launch.device->sm_count}));
  const dim3 grid(walkers, static_cast<uint32_t>(args.lists), static_cast<uint32_t>(args.n_seqs));
  LaunchKernel(PoolKernel, launch, grid, kPoolThreads, 0, args);
}

void AgedScores(const AgedScoresArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.stride == 0) return;
  const auto walkers = static_cast<uint32_t>(
      std::min(CeilDiv(args.stride, kPoolThreads), 8 * int64_t{launch.device->sm_count}));
  const dim3 grid(walkers, static_cast<uint32_t>(args.lists), static_cast<uint32_t>(args.n_seqs));
  LaunchKernel(AgedScoresKernel, launch, grid, kPoolThreads, 0, args);
}

void PlanRange(const PlanRangeArgs& args, const Launch& launch) {
  if (args.n_seqs == 0) return;
  LaunchKernel(PlanRangeKernel, launch, static_cast<uint32_t>(CeilDiv(args.n_seqs, 32)), 32, 0,
               args);
}

}  // namespace omnikv::cuda
