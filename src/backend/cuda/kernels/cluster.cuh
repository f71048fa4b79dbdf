// Clusters of blocks, which lie along x. Before sm_90 there are none: a block is its own cluster.
#pragma once

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

// The two halves of a barrier of the whole cluster: what its blocks wrote to shared memory before
// they arrived can be read after the wait.
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Arrives without a word on what this block wrote.
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}

// Where block `block` of the cluster has what lies at `shared` here.
template <typename T>
__device__ __forceinline__ T* InBlock(T* shared, int block) {
#if __CUDA_ARCH__ >= 900
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(block));
  return there;
#else
  return shared;
#endif
}

// The sum of v over this lane and the lower ones.
template <typename T>
__device__ __forceinline__ T WarpPrefix(T v) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(kAllLanes, v, distance);
    if (lane >= distance) v += below;
  }
  return v;
}

// Over the threads of a block: the sum of the threads before this one, and of all.
template <typename T>
struct BlockSums {
  T before, total;
};

// `of_warps` [kWarps], in shared memory, which all threads have read for the last time. All threads
// of kWarps warps take part.
template <int kWarps, typename T>
__device__ __forceinline__ BlockSums<T> SumInBlock(T v, T* of_warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T end = WarpPrefix(v);
  if (lane == 31) of_warps[warp] = end;
  __syncthreads();
  const T of_lane = lane < kWarps ? of_warps[lane % kWarps] : T{};
  const T before = __reduce_add_sync(kAllLanes, lane < warp ? of_lane : T{});
  return {before + end - v, __reduce_add_sync(kAllLanes, of_lane)};
}

}  // namespace omnikv::cuda
