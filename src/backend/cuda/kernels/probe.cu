#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

__global__ void Probe() {}

}  // namespace

std::optional<NamedDevice> ReadDevice(int ordinal) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) return std::nullopt;
  int clock_khz = 0;
  int bus_bits = 0;
  if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, ordinal) != cudaSuccess ||
      cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, ordinal) != cudaSuccess) {
    return std::nullopt;
  }
  return NamedDevice{{.ordinal = ordinal,
                      .sm_count = properties.multiProcessorCount,
                      .arch = 10 * properties.major + properties.minor,
                      .shared_per_block = properties.sharedMemPerBlockOptin,
                      // Two transfers a clock.
                      .memory_bytes_per_second = 2e3 * clock_khz * bus_bits / 8},
                     properties.name};
}

bool HasCodeFor(const Device&) {
  cudaFuncAttributes attributes{};
  const bool has = cudaFuncGetAttributes(&attributes, Probe) == cudaSuccess;
  if (!has) static_cast<void>(cudaGetLastError());
  return has;
}

}  // namespace omnikv::cuda
