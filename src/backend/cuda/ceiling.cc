#include "backend/cuda/ceiling.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/pinned_memory.h"
#include "base/check.h"

namespace omnikv {
namespace {

using cuda::CheckLaunch;

constexpr int kPasses = 5;
constexpr int64_t kRowBytes = 4096;

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    CheckLaunch(cudaEventCreate(&start_), "timer");
    CheckLaunch(cudaEventCreate(&end_), "timer");
  }
  ~Timer() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
  }
  // The best of some passes.
  double Seconds(const std::function<void()>& pass) const {
    float best = 1e30f;
    for (int i = 0; i <= kPasses; ++i) {
      CheckLaunch(cudaEventRecord(start_, stream_), "timer");
      pass();
      CheckLaunch(cudaEventRecord(end_, stream_), "timer");
      CheckLaunch(cudaEventSynchronize(end_), "device");
      float ms = 0;
      CheckLaunch(cudaEventElapsedTime(&ms, start_, end_), "timer");
      if (i > 0) best = std::min(best, ms);
    }
    return best / 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

double MeasureGemm(cuda::CublasLt& library, DType type, std::byte* memory, const Timer& timer,
                   cudaStream_t stream) {
  const int64_t n = type == DType::kF32 ? 4096 : 8192;
  const auto matrix = static_cast<int64_t>(DTypeBytes(type, static_cast<size_t>(n * n)));
  const cuda::Gemm gemm{.in = type,
                        .out = DType::kF32,
                        .x = memory,
                        .w = memory + matrix,
                        .y = memory + 2 * matrix,
                        .n_rows = n,
                        .n_out = n,
                        .n_in = n,
                        .x_pitch = n,
                        .w_pitch = n,
                        .y_pitch = n};
  if (!library.Prepare(gemm).ok()) return 0;
  const auto flops = 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
  return flops / timer.Seconds([&] { library.Multiply(gemm, stream); });
}

}  // namespace

Result<CudaCeiling> MeasureCudaCeiling(int device, size_t cap) {
  if (cudaSetDevice(device) != cudaSuccess) {
    return Unsupported(fmt::format("no CUDA device to measure: {}", cuda::LastError()));
  }
  const auto named = cuda::ReadDevice(device);
  OKV_CHECK(named.has_value(), "device {}", device);
  const cuda::Device& card = named->device;
  cuda::DeviceMemory memory(cap);
  const size_t bytes = std::min(size_t{4} << 30, memory.Available() / 2) / kRowBytes * kRowBytes;
  const size_t host_bytes = std::min(size_t{1} << 30, bytes);
  OKV_ASSIGN_OR_RETURN(const Buffer data, memory.Allocate(bytes, "a measurement"));
  OKV_ASSIGN_OR_RETURN(const Buffer workspace,
                       memory.Allocate(cuda::kGemmWorkspaceBytes, "cuBLASLt"));
  OKV_ASSIGN_OR_RETURN(const Buffer host,
                       cuda::PinnedMemory(device).Allocate(host_bytes, "a measurement"));
  cudaStream_t stream = nullptr;
  CheckLaunch(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const Timer timer(stream);
  const cuda::Launch launch{.device = &card, .stream = stream};
  const auto rate = [](size_t n, double seconds) { return static_cast<double>(n) / seconds / 1e9; };
  auto* const at = data.as<std::byte>();

  CudaCeiling c;
  // Not zeros: products of zeros heat less, and so run faster.
  cuda::FillNoise(reinterpret_cast<uint16_t*>(at), static_cast<int64_t>(bytes / 2), launch);
  for (const bool together : {false, true}) {
    const double read = rate(bytes, timer.Seconds([&] {
      cuda::ReadAll(at, static_cast<int64_t>(bytes), together, workspace.as<uint32_t>(), launch);
    }));
    c.read_gb_s = std::max(c.read_gb_s, read);
  }
  c.copy_gb_s = rate(bytes, timer.Seconds([&] {
    CheckLaunch(cudaMemcpyAsync(at, at + bytes / 2, bytes / 2, cudaMemcpyDeviceToDevice, stream),
                "copy");
  }));
  const auto copy = [&](void* to, const void* from) {
    return rate(host_bytes, timer.Seconds([&] {
      CheckLaunch(cudaMemcpyAsync(to, from, host_bytes, cudaMemcpyDefault, stream), "copy");
    }));
  };
  c.h2d_gb_s = copy(at, host.as());
  c.d2h_gb_s = copy(host.as(), at);

  // Rows in an order that is far from sorted, to rows in order.
  const auto n_rows = static_cast<int32_t>(std::min<size_t>(host_bytes / kRowBytes, 32768));
  std::vector<int32_t> rows(static_cast<size_t>(2 * n_rows + 1));
  for (int32_t i = 0; i < n_rows; ++i) {
    rows[static_cast<size_t>(i)] = static_cast<int32_t>(int64_t{i} * 9973 % n_rows);
    rows[static_cast<size_t>(n_rows + i)] = i;
  }
  rows.back() = n_rows;
  auto* const lists = reinterpret_cast<int32_t*>(at + host_bytes - rows.size() * 8);
  CheckLaunch(cudaMemcpyAsync(lists, rows.data(), rows.size() * 4, cudaMemcpyDefault, stream),
              "copy");
  CheckLaunch(cudaStreamSynchronize(stream), "device");
  const FetchRowsArgs fetch{.from = host.as<std::byte>(),
                            .to = at + host_bytes,
                            .row_bytes = kRowBytes,
                            .from_row = lists,
                            .to_row = lists + n_rows,
                            .n = lists + 2 * n_rows,
                            .capacity = n_rows};
  if (2 * host_bytes <= bytes) {
    c.gather_gb_s = rate(static_cast<size_t>(n_rows) * kRowBytes,
                         timer.Seconds([&] { cuda::FetchRows(fetch, launch); }));
  }

  cuda::FillNoise(reinterpret_cast<uint16_t*>(at), static_cast<int64_t>(bytes / 2), launch);
  auto library = cuda::CublasLt::Open(workspace.as(), cuda::kGemmWorkspaceBytes);
  if (library.ok() && bytes >= size_t{512} << 20) {
    c.gemm_bf16 = MeasureGemm(**library, DType::kBF16, at, timer, stream);
    c.gemm_f32 = MeasureGemm(**library, DType::kF32, at, timer, stream);
  }
  CheckLaunch(cudaStreamSynchronize(stream), "device");
  cudaStreamDestroy(stream);
  return c;
}

}  // namespace omnikv
