#include <cuda_runtime.h>

#include "backend/cuda/kernels/common.cuh"
#include "policy/kcache/union.h"

namespace omnikv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// How many of the first n tokens of a list are below t.
__device__ __forceinline__ int Below(const int32_t* list, int n, int32_t t) {
  int from = 0;
  while (from < n) {
    const int middle = (from + n) / 2;
    if (list[middle] < t) {
      from = middle + 1;
    } else {
      n = middle;
    }
  }
  return from;
}

// A list of the group after the other: what none before it has is its own, and `work` says how many
// are its own up to each place. A token's place is the sum, over all lists, of their own below it.
// Grid: x KV heads, y sequences.
__global__ void __launch_bounds__(kThreads) UnionKernel(const UnionArgs a) {
  __shared__ int sums[kWarps];
  if (a.seqs[blockIdx.y].q_len == 0) return;
  const int64_t to = int64_t{blockIdx.y} * a.n_kv_heads + blockIdx.x;
  const int32_t* const count = a.count + to * a.group;
  const auto list_of = [&](int g) { return a.index + (to * a.group + g) * a.capacity; };
  const auto own_of = [&](int g) { return a.work + (to * a.group + g) * a.capacity; };
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const auto owns = [&](int g, int32_t t) {
    for (int other = 0; other < g; ++other) {
      const int at = Below(list_of(other), count[other], t);
      if (at < count[other] && list_of(other)[at] == t) return false;
    }
    return true;
  };
  int total = 0;
  for (int g = 0; g < a.group; ++g) {
    int own = 0;  // up to this tile
    for (int tile = 0; tile < count[g]; tile += kThreads) {
      const int i = tile + tid;
      const bool is_own = i < count[g] && owns(g, list_of(g)[i]);
      const uint32_t lanes = __ballot_sync(cuda::kAllLanes, is_own);
      if (lane == 0) sums[warp] = __popc(lanes);
      __syncthreads();
      int upto = own + __popc(lanes & (0xffffffffu >> (31 - lane)));
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) upto += sums[w];
        own += sums[w];
      }
      if (i < count[g]) own_of(g)[i] = upto;
      __syncthreads();
    }
    total += own;
  }
  __syncthreads();
  for (int g = 0; g < a.group; ++g) {
    for (int i = tid; i < count[g]; i += kThreads) {
      const int32_t t = list_of(g)[i];
      if (!owns(g, t)) continue;
      int place = 0;
      for (int other = 0; other < a.group; ++other) {
        const int below = Below(list_of(other), count[other], t);
        if (below > 0) place += own_of(other)[below - 1];
      }
      a.to_index[to * a.to_capacity + place] = t;
    }
  }
  if (tid == 0) a.to_count[to] = total;
}

}  // namespace

void UnionCuda(const void* args, void* stream) {
  const auto& a = *static_cast<const UnionArgs*>(args);
  if (a.n_seqs == 0) return;
  const dim3 grid(static_cast<unsigned>(a.n_kv_heads), static_cast<unsigned>(a.n_seqs));
  UnionKernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
}

}  // namespace omnikv
