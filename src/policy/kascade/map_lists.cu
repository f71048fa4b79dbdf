#include "backend/cuda/kernels/common.cuh"
#include "policy/kascade/map_lists.h"

namespace omnikv {
namespace {

constexpr int kThreads = 256;

// Grid: x lists of all sequences; y shares the tokens of a list.
__global__ void __launch_bounds__(kThreads) MapListsKernel(const MapListsArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int64_t list = blockIdx.x;
  const int64_t from = list / a.lists * a.lists + a.list_of[list % a.lists];
  const int32_t* __restrict__ index = a.index + from * a.capacity;
  int32_t* __restrict__ out = a.out + list * a.capacity;
  const int count = a.count[list];
  const int stride = static_cast<int>(gridDim.y) * kThreads;
  for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < count;
       i += stride) {
    out[i] = index[i];
  }
}

}  // namespace

void MapListsCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const MapListsArgs*>(args);
  if (a.n_seqs == 0) return;
  constexpr int kShares = 8;
  const dim3 grid(static_cast<uint32_t>(a.n_seqs) * static_cast<uint32_t>(a.lists), kShares);
  cuda::LaunchKernel(MapListsKernel, launch, grid, kThreads, 0, a);
}

}  // namespace omnikv
