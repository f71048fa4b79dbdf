#include "backend/cuda/kernels/prefill_hopper.cuh"

namespace omnikv::cuda {

cudaError_t AttendHopperBf16x96(const AttendArgs& args, const HopperInputs& inputs,
                                cudaStream_t stream) {
  return hopper::Attend<cutlass::bfloat16_t, 96>(args, inputs, stream);
}

}  // namespace omnikv::cuda
