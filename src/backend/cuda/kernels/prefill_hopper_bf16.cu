#include "backend/cuda/kernels/prefill_hopper.cuh"

namespace omnikv::cuda {

HopperKernel* HopperKernelBf16(int32_t head_dim) {
  return hopper::KernelFor<cutlass::bfloat16_t>(head_dim);
}

}  // namespace omnikv::cuda
