#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

__global__ void Probe() {}

}  // namespace

bool HasCodeFor(const Device&) {
  cudaFuncAttributes attributes{};
  const bool has = cudaFuncGetAttributes(&attributes, Probe) == cudaSuccess;
  if (!has) static_cast<void>(cudaGetLastError());
  return has;
}

}  // namespace omnikv::cuda
