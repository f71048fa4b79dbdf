// Kernels that only show what memory can do.
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // of a thread, under way at once

// Reads every byte once; writes a word that depends on all of them. A block's loads of one turn lie
// together, in one stretch of memory, or with those of the other blocks, in kLoads stretches.
template <bool kTogether>
__global__ void __launch_bounds__(kThreads) Read(const uint4* data, int64_t n, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t turn = int64_t{kLoads} * kThreads * gridDim.x;
  const int64_t step = kTogether ? int64_t{kThreads} : int64_t{kThreads} * gridDim.x;
  const int64_t first = int64_t{blockIdx.x} * kThreads * (kTogether ? kLoads : 1);
  for (int64_t i = first + threadIdx.x; i < n; i += turn) {
    uint4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      v[u] = i + u * step < n ? __ldcs(data + i + u * step) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x5eed1234u) *sink = sum;
}

// bf16 values in [-1, 1).
__global__ void __launch_bounds__(kThreads) Noise(uint16_t* data, int64_t n) {
  const int64_t stride = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    const float value = static_cast<float>(static_cast<int32_t>(h) >> 8) * 0x1p-23f;
    data[i] = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
}

}  // namespace

void ReadAll(const std::byte* data, int64_t bytes, bool together, uint32_t* sink,
             const Launch& launch) {
  const auto blocks = static_cast<unsigned>(launch.device->sm_count * 4);
  LaunchKernel(together ? Read<true> : Read<false>, launch, dim3(blocks), dim3(kThreads), 0,
               reinterpret_cast<const uint4*>(data), bytes / 16, sink);
}

void FillNoise(uint16_t* data, int64_t n, const Launch& launch) {
  const auto blocks = static_cast<unsigned>(launch.device->sm_count * 4);
  LaunchKernel(Noise, launch, dim3(blocks), dim3(kThreads), 0, data, n);
}

}  // namespace omnikv::cuda
