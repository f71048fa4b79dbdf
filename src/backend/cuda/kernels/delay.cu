#include "backend/cuda/delay.h"

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

__device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void HoldUp(uint64_t* state, uint32_t max_ns) {
  GridWait();
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  const uint64_t end = Nanoseconds() + (*state >> 33) % max_ns;
  while (Nanoseconds() < end) __nanosleep(500);
}

}  // namespace

void Delay(uint64_t* state, uint32_t max_us, const Launch& launch) {
  LaunchKernel(HoldUp, launch, dim3(1), dim3(1), 0, state, 1000 * max_us);
}

}  // namespace omnikv::cuda
