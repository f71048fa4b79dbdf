#include "backend/cuda/kernels/prefill_hopper.cuh"

namespace omnikv::cuda {

cudaError_t AttendHopperF16x256(const AttendArgs& args, const HopperInputs& inputs,
                               cudaStream_t stream) {
  return hopper::Attend<cutlass::half_t, 256>(args, inputs, stream);
}

}  // namespace omnikv::cuda
