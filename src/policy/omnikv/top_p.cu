#include "backend/cuda/kernels/cluster.cuh"
#include "policy/omnikv/top_p.h"

namespace omnikv {
namespace {

using cuda::InBlock;
using cuda::WarpPrefix;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;
constexpr int kMaxBlocks = 8;               // of a cluster, which adds up the scores of a list
constexpr int64_t kOneBlockTokens = 16384;  // room for at most so many: a cluster of one block

struct Shared {
  unsigned long long bins[kBins];
  unsigned long long warp_sums[kWarps];
  unsigned long long of_blocks[kMaxBlocks];  // of block 0: the sums of all
  unsigned long long found_before;
  int found_bin;
  int counts[2][kWarps];
};

__device__ __forceinline__ uint32_t Order(float score) {
  return OrderOf(__float_as_uint(score));
}

// The sum over the block, for its first thread.
__device__ unsigned long long BlockSum(unsigned long long v, Shared& s) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(cuda::kAllLanes, v, lane);
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  for (int w = 1; w < kWarps; ++w) v += s.warp_sums[w];
  return v;
}

// Grid: x the blocks of a cluster, y lists, z sequences. The cluster adds up, its first block cuts.
__global__ void __launch_bounds__(kThreads) TopPKernel(const TopPArgs a) {
  __shared__ Shared s;
  cuda::GridTrigger();
  cuda::GridWait();
#if __CUDA_ARCH__ >= 900
  const int n_blocks = static_cast<int>(gridDim.x);
#else
  const int n_blocks = 1;
  if (blockIdx.x != 0) return;
#endif
  const int block = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t list = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  const int n_candidates = a.n_candidates[blockIdx.z];
  unsigned long long sum = 0;
  for (int t = block * kThreads + tid; t < n_candidates; t += n_blocks * kThreads) {
    sum += MassOf(CombinedScore(a, list, t));
  }
  sum = BlockSum(sum, s);
  cuda::ClusterSync();  // every block runs
  if (tid == 0) *InBlock(&s.of_blocks[block], 0) = sum;
  cuda::ClusterSync();  // the last use of another block's memory lies before
  if (block != 0) return;
  unsigned long long total = 0;
  for (int b = 0; b < n_blocks; ++b) total += s.of_blocks[b];
  const uint64_t wanted = MassWanted(__longlong_as_double(static_cast<long long>(a.share)), total);

  int32_t* const index = a.index + list * a.capacity;
  const int n = a.count[list];
  uint32_t found = wanted == 0 ? Order(kChosenFirst) - 1 : 0;
  unsigned long long before = 0;  // of all that are above it
  for (int shift = 24; wanted > 0 && shift >= 0; shift -= 8) {
    if (tid < kBins) s.bins[tid] = 0;
    if (tid == 0) s.found_bin = -1;
    __syncthreads();
    for (int i = tid; i < n; i += kThreads) {
      const float score = CombinedScore(a, list, index[i]);
      const uint32_t key = Order(score);
      const uint64_t mass = MassOf(score);
      if (mass > 0 && (shift == 24 || (key ^ found) >> (shift + 8) == 0)) {
        atomicAdd(&s.bins[(key >> shift) % kBins], static_cast<unsigned long long>(mass));
      }
    }
    __syncthreads();
    // Bins descend with threads.
    unsigned long long here = 0;
    unsigned long long end = 0;
    if (tid < kBins) {
      here = s.bins[kBins - 1 - tid];
      end = WarpPrefix(here);
      if (tid % 32 == 31) s.warp_sums[tid / 32] = end;
    }
    __syncthreads();
    if (tid < kBins) {
      end += before;
      for (int w = 0; w < tid / 32; ++w) end += s.warp_sums[w];
      if (end - here < wanted && wanted <= end) {
        s.found_bin = kBins - 1 - tid;
        s.found_before = end - here;
      }
    }
    __syncthreads();
    const int bin = s.found_bin;
    if (bin < 0) return;  // all of them together do not reach it
    found |= static_cast<uint32_t>(bin) << shift;
    before = s.found_before;
    __syncthreads();
  }
  // Of those that are equal to it, which weigh the same, so many stay.
  const uint64_t each = MassOf(__uint_as_float(found ^ 0x80000000u));
  const uint64_t ties = wanted == 0 ? 0 : (wanted - before + each - 1) / each;
  const int lane = tid % 32;
  const int warp = tid / 32;
  int stay = 0;
  int equal = 0;  // before this tile
  for (int tile = 0; tile < n; tile += kThreads) {
    const int i = tile + tid;
    const int32_t t = i < n ? index[i] : 0;
    const uint32_t key = i < n ? Order(CombinedScore(a, list, t)) : 0;
    const bool tied = i < n && key == found;
    const uint32_t tied_lanes = __ballot_sync(cuda::kAllLanes, tied);
    if (lane == 0) s.counts[0][warp] = __popc(tied_lanes);
    __syncthreads();
    int ties_before = equal + __popc(tied_lanes & ((1u << lane) - 1));
    int ties_here = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) ties_before += s.counts[0][w];
      ties_here += s.counts[0][w];
    }
    const bool stays =
        i < n && (key > found || (tied && static_cast<uint64_t>(ties_before) < ties));
    const uint32_t stay_lanes = __ballot_sync(cuda::kAllLanes, stays);
    if (lane == 0) s.counts[1][warp] = __popc(stay_lanes);
    __syncthreads();
    int to = stay + __popc(stay_lanes & ((1u << lane) - 1));
    int stay_here = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) to += s.counts[1][w];
      stay_here += s.counts[1][w];
    }
    if (stays) index[to] = t;  // at or before where it was, so before the next tile
    stay += stay_here;
    equal += ties_here;
    __syncthreads();
  }
  if (tid == 0) a.count[list] = stay;
}

}  // namespace

void TopPCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const TopPArgs*>(args);
  if (a.n_seqs == 0) return;
  const bool cluster = launch.device->arch >= 90 && a.stride > kOneBlockTokens;
  const int blocks = cluster ? kMaxBlocks : 1;
  const dim3 grid(static_cast<uint32_t>(blocks), static_cast<uint32_t>(a.lists),
                  static_cast<uint32_t>(a.n_seqs));
  cuda::KernelLaunch(launch, grid, kThreads, 0, blocks).Run(TopPKernel, a);
}

}  // namespace omnikv
