// Clusters of blocks, which lie along x. Before sm_90 there are none: a block is its own cluster.
#pragma once

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

// A launch of clusters of blocks, as early as LaunchKernel's. Before sm_90 a cluster is one block.
class ClusterLaunch {
 public:
  ClusterLaunch(const Launch& launch, int n_blocks, dim3 grid, dim3 block, size_t shared_bytes) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = launch.stream;
    config_.attrs = attributes_;
    if (launch.device->arch < 90) return;
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[0].val.clusterDim = {static_cast<uint32_t>(n_blocks), 1, 1};
    attributes_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[1].val.programmaticStreamSerializationAllowed = 1;
    config_.numAttrs = 2;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;

  // How many clusters the card can run at a time; 0 where it cannot run one.
  template <typename Kernel>
  int MaxClusters(Kernel* kernel) const {
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config_) == cudaSuccess) return clusters;
    cudaGetLastError();  // an answer, not a failure
    return 0;
  }

  template <typename... Params, typename... Args>
  void Run(void (*kernel)(Params...), Args&&... args) const {
    CheckLaunch(cudaLaunchKernelEx(&config_, kernel, std::forward<Args>(args)...), "launch");
  }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

// The two halves of a barrier of the whole cluster: what its blocks wrote to shared memory before
// they arrived can be read after the wait.
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

}  // namespace omnikv::cuda
