// Sums of local weights, and keys of blocks, on a card.
#include <algorithm>
#include <cfloat>

#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"
#include "policy/infllm/far_ops.h"
#include "policy/infllm/turned_keys.cuh"

namespace omnikv {
namespace {

using cuda::kAllLanes;

constexpr int kTile = 32;  // tokens, one a lane
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 4;  // queries of a warp at a time: each reads K of the tile once

// Grid: x shares the tiles, y KV heads, z sequences. A warp takes a query head, or some of its
// rows.
__global__ void __launch_bounds__(kThreads) WeighKernel(const __grid_constant__ WeighLocalArgs a) {
  extern __shared__ float k[];  // [kTile, dk + 1]: no two lanes in a bank
  __shared__ float found[kWarps][kTile];
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.z);
  const int g = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int p0 = seq.kv_len - seq.q_len;
  const int dk = a.kv.dk;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int parts = max(1, kWarps / group);
  const int heads = kWarps / parts;  // at a time
  const int first = FirstWritten(a.shape, p0);
  const int tiles = (seq.kv_len - first + kTile - 1) / kTile;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    const int begin = first + tile * kTile;
    const int end = min(begin + kTile, seq.kv_len);
    const int t = begin + lane;
    const int p_begin = max(p0, begin);
    const int p_end = min(seq.kv_len, end - 1 + a.shape.recent);
    if (p_begin < p_end) {
      for (int j = warp; j < kTile; j += kWarps) {
        const bool in = begin + j < end;
        const std::byte* values =
            in ? a.kv.k.Head(a.kv.RowIndex(seq.table_off, begin + j), g) : nullptr;
        for (int i = lane; i < dk; i += 32) {
          k[j * (dk + 1) + i] = in ? cuda::KvValue(a.kv.k, values, g, i) : 0.0f;
        }
      }
    }
    __syncthreads();
    for (int of_group = 0; of_group < group; of_group += heads) {
      const int j = of_group + warp / parts;
      const int h = g * group + j;
      float sum = 0;
      if (j < group) {
        for (int p = p_begin + kRows * (warp % parts); p < p_end; p += kRows * parts) {
          const int64_t row = seq.q_begin + p - p0;
          const float* q[kRows];
          float logits[kRows] = {};
          for (int r = 0; r < kRows; ++r) {
            q[r] = a.q + ((row + min(r, p_end - 1 - p)) * a.n_heads + h) * dk;
          }
          for (int i = 0; i < dk; ++i) {
            const float key = k[lane * (dk + 1) + i];
#pragma unroll
            for (int r = 0; r < kRows; ++r) logits[r] += q[r][i] * key;
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int at = p + r;
            if (at >= p_end || t >= end || t > at || t <= at - a.shape.recent) continue;
            const float logit = cuda::Softcap(logits[r] * a.scale, a.softcap);
            sum += expf(logit - a.lse[(row + r) * a.n_heads + h]);
          }
        }
      }
      found[warp][lane] = sum;
      __syncthreads();
      if (j < group && warp % parts == 0 && t < end) {
        float total =
            t < p0 ? LocalSums(a.sums, s, p0, h, a.n_heads, a.stride)[t % a.stride] : 0.0f;
        for (int part = 0; part < parts; ++part) total += found[warp + part][lane];
        LocalSums(a.sums, s, seq.kv_len, h, a.n_heads, a.stride)[t % a.stride] = total;
      }
      __syncthreads();
    }
  }
}

constexpr int kAddThreads = 256;

// Grid: x tokens, y query heads, z sequences.
__global__ void __launch_bounds__(kAddThreads)
    AddWeightsKernel(const __grid_constant__ AddWeightsArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.z);
  const int h = static_cast<int>(blockIdx.y);
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int n = seq.kv_len;
  const int first = FirstWritten(a.shape, n - 1);
  const int t = first + static_cast<int>(blockIdx.x * kAddThreads + threadIdx.x);
  if (t >= n) return;
  const int64_t row_head = int64_t{seq.q_begin} * a.n_heads + h;
  const int at = t % a.stride;
  float sum = t < n - 1 ? LocalSums(a.sums, s, n - 1, h, a.n_heads, a.stride)[at] : 0.0f;
  if (t >= n - a.shape.recent) {
    sum += expf(a.logits[row_head * a.logit_stride + t] - a.lse[row_head]);
  }
  LocalSums(a.sums, s, n, h, a.n_heads, a.stride)[at] = sum;
}

constexpr int kKeyThreads = 128;

// The token of the higher sum, of equals the lower; kept in `best` and `at`.
__device__ __forceinline__ void Better(float sum, int token, float& best, int& at) {
  if (sum > best || (sum == best && token < at)) {
    best = sum;
    at = token;
  }
}

// Grid: x query heads, y sequences.
__global__ void __launch_bounds__(kKeyThreads)
    RepresentKernel(const __grid_constant__ RepresentArgs a) {
  extern __shared__ unsigned char taken[];  // [block]
  __shared__ float best_of[kKeyThreads / 32];
  __shared__ int at_of[kKeyThreads / 32];
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.y);
  const int h = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int kv_head = h / (a.n_heads / a.kv.n_kv_heads);
  const float* const sums = LocalSums(a.sums, s, seq.kv_len, h, a.n_heads, a.stride);
  const int end = a.shape.Blocks(seq.kv_len);
  for (int b = a.shape.Blocks(seq.kv_len - seq.q_len); b < end; ++b) {
    const int first = a.shape.sinks + b * a.shape.block;
    float* const out = a.keys + ((int64_t{s} * a.max_blocks + b) * a.n_heads + h) * a.kv.dk;
    for (int j = thread; j < a.shape.block; j += kKeyThreads) taken[j] = 0;
    for (int i = thread; i < a.kv.dk; i += kKeyThreads) out[i] = 0;
    __syncthreads();
    for (int n = 0; n < a.representatives; ++n) {
      float best = -FLT_MAX;
      int at = a.shape.block;
      for (int j = thread; j < a.shape.block; j += kKeyThreads) {
        if (taken[j] == 0) Better(sums[(first + j) % a.stride], j, best, at);
      }
      for (int other = 16; other > 0; other /= 2) {
        const float sum = __shfl_xor_sync(kAllLanes, best, other);
        const int token = __shfl_xor_sync(kAllLanes, at, other);
        Better(sum, token, best, at);
      }
      if (thread % 32 == 0) {
        best_of[thread / 32] = best;
        at_of[thread / 32] = at;
      }
      __syncthreads();
      for (int w = 0; w < kKeyThreads / 32; ++w) Better(best_of[w], at_of[w], best, at);
      at = min(at, a.shape.block - 1);  // where all that is left is NaN
      if (thread == 0) taken[at] = 1;
      const int t = first + at;
      const std::byte* const values = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
      for (int i = thread; i < a.kv.dk; i += kKeyThreads) {
        out[i] += TurnedKey(a.kv, values, kv_head, i, t, a.inv_freq, a.n_freq);
      }
      __syncthreads();
    }
    for (int i = thread; i < a.kv.dk; i += kKeyThreads) {
      out[i] /= static_cast<float>(a.representatives);
    }
    __syncthreads();
  }
}

}  // namespace

void WeighLocalCuda(const void* args, const cuda::Launch& launch) {
  const WeighLocalArgs& a = **static_cast<const WeighLocalArgs* const*>(args);
  const int tiles = (a.stride + kTile - 1) / kTile;
  const dim3 grid(static_cast<uint32_t>(std::min(tiles, 1024)),
                  static_cast<uint32_t>(a.kv.n_kv_heads), static_cast<uint32_t>(a.n_seqs));
  const size_t shared = sizeof(float) * kTile * static_cast<size_t>(a.kv.dk + 1);
  cuda::AllowShared(WeighKernel, shared);
  cuda::LaunchKernel(WeighKernel, launch, grid, kThreads, shared, a);
}

void AddWeightsCuda(const void* args, const cuda::Launch& launch) {
  const AddWeightsArgs& a = *static_cast<const AddWeightsArgs*>(args);
  const dim3 grid(static_cast<uint32_t>((a.stride + kAddThreads - 1) / kAddThreads),
                  static_cast<uint32_t>(a.n_heads), static_cast<uint32_t>(a.n_seqs));
  cuda::LaunchKernel(AddWeightsKernel, launch, grid, kAddThreads, 0, a);
}

void RepresentCuda(const void* args, const cuda::Launch& launch) {
  const RepresentArgs& a = **static_cast<const RepresentArgs* const*>(args);
  const dim3 grid(static_cast<uint32_t>(a.n_heads), static_cast<uint32_t>(a.n_seqs));
  cuda::LaunchKernel(RepresentKernel, launch, grid, kKeyThreads, static_cast<size_t>(a.shape.block),
                     a);
}

}  // namespace omnikv
