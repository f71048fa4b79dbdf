#include "backend/cuda/kernels/cluster.cuh"
#include "policy/kcache/union.h"

namespace omnikv {
namespace {

constexpr int kThreads = 512;
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

// A token belongs to the first list that has it. `upto` says how many places of the lists, one
// after the other, hold tokens that belong there, up to each place. A token's place in the union is
// the sum, over all lists, of the tokens below it that belong there.
// Grid: x KV heads, y sequences. kShared: tokens and `upto` lie in shared memory; else in `index`
// and `work`.
template <bool kShared>
__global__ void __launch_bounds__(kThreads) UnionKernel(const __grid_constant__ UnionArgs a) {
  // Tokens of each list [group]; then, with kShared, tokens [group, capacity] and `upto` likewise.
  extern __shared__ int32_t shared[];
  __shared__ int sums[2][kWarps];  // of a tile, and of the one before, which a warp may still read
  cuda::GridTrigger();
  cuda::GridWait();
  const int64_t to = int64_t{blockIdx.y} * a.n_kv_heads + blockIdx.x;
  const int tid = static_cast<int>(threadIdx.x);
  const int room = a.group * a.capacity;
  const int q_len = a.seqs[blockIdx.y].q_len;
  int32_t* const count = shared;
  const int32_t* tokens = a.index + to * room;
  int32_t* upto = a.work + to * room;
  for (int g = tid; g < a.group; g += kThreads) count[g] = a.count[to * a.group + g];
  if constexpr (kShared) {
    int32_t* const copy = shared + a.group;
    for (int i = tid; i < room; i += kThreads) copy[i] = tokens[i];
    tokens = copy;
    upto = copy + room;
  }
  if (q_len == 0) return;
  __syncthreads();
  const auto below = [&](int list, int32_t t) {
    return Below(tokens + list * a.capacity, count[list], t);
  };
  // Whether the place holds a token that belongs there.
  const auto belongs = [&](int place) {
    const int g = place / a.capacity;
    if (place % a.capacity >= count[g]) return false;
    const int32_t t = tokens[place];
    for (int before = 0; before < g; ++before) {
      const int at = below(before, t);
      if (at < count[before] && tokens[before * a.capacity + at] == t) return false;
    }
    return true;
  };
  int total = 0;  // up to this tile
  int side = 0;
  for (int tile = 0; tile < room; tile += kThreads, side ^= 1) {
    const int place = tile + tid;
    const int own = place < room && belongs(place) ? 1 : 0;
    const auto sum = cuda::SumInBlock<kWarps>(own, sums[side]);
    if (place < room) upto[place] = total + sum.before + own;
    total += sum.total;
  }
  __syncthreads();
  const auto before = [&](int place) { return place == 0 ? 0 : upto[place - 1]; };
  for (int place = tid; place < room; place += kThreads) {
    if (upto[place] == before(place)) continue;
    const int32_t t = tokens[place];
    int rank = 0;
    for (int list = 0; list < a.group; ++list) {
      const int first = list * a.capacity;
      rank += before(first + below(list, t)) - before(first);
    }
    a.to_index[to * a.to_capacity + rank] = t;
  }
  if (tid == 0) a.to_count[to] = total;
}

}  // namespace

void UnionCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const UnionArgs*>(args);
  if (a.n_seqs == 0) return;
  const dim3 grid(static_cast<uint32_t>(a.n_kv_heads), static_cast<uint32_t>(a.n_seqs));
  const auto group = static_cast<size_t>(a.group);
  const size_t counts = group * sizeof(int32_t);
  const size_t lists = 2 * group * static_cast<size_t>(a.capacity) * sizeof(int32_t);
  if (counts + lists + cuda::kBesideDynamic <= launch.device->shared_per_block) {
    cuda::AllowShared(UnionKernel<true>, counts + lists);
    cuda::LaunchKernel(UnionKernel<true>, launch, grid, kThreads, counts + lists, a);
  } else {
    cuda::LaunchKernel(UnionKernel<false>, launch, grid, kThreads, counts, a);
  }
}

}  // namespace omnikv
