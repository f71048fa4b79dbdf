#include "backend/cuda/kernels/prefill_hopper.cuh"

namespace omnikv::cuda {

HopperKernel* HopperKernelF16(int32_t head_dim) {
  return hopper::KernelFor<cutlass::half_t>(head_dim);
}

}  // namespace omnikv::cuda
