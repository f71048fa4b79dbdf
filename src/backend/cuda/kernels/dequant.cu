// Weights of any format as dense rows of one that a matrix library takes. Bound by memory: the
// stored rows are read once, the dense ones written once.
#include <algorithm>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 8;  // values a thread moves at once

// Values i..i+7 of a row; i is a multiple of 8.
template <DType kIn>
__device__ __forceinline__ Pack<float, kWide> LoadWide(const std::byte* row, int64_t i) {
  Pack<float, kWide> out;
  if constexpr (kIn == DType::kQ8_0) {
    // Blocks are 34 bytes: nothing wider than two bytes is aligned.
    const std::byte* block = row + i / int64_t{kQ8Block} * int64_t{kQ8BlockBytes};
    const float scale = ToF32(__ldg(reinterpret_cast<const __half*>(block)));
    const auto* pairs =
        reinterpret_cast<const uint16_t*>(block + sizeof(__half) + i % int64_t{kQ8Block});
#pragma unroll
    for (int j = 0; j < kWide / 2; ++j) {
      const uint16_t pair = __ldg(pairs + j);
      out.v[2 * j] = scale * static_cast<float>(static_cast<int8_t>(pair & 0xff));
      out.v[2 * j + 1] = scale * static_cast<float>(static_cast<int8_t>(pair >> 8));
    }
  } else {
    using In = std::conditional_t<kIn == DType::kF32, float,
                                  std::conditional_t<kIn == DType::kF16, __half, __nv_bfloat16>>;
    const Pack<In, kWide> in = LoadPack<kWide>(reinterpret_cast<const In*>(row) + i);
#pragma unroll
    for (int j = 0; j < kWide; ++j) out.v[j] = ToF32(in.v[j]);
  }
  return out;
}

// Grid: x walks rows, y covers a row.
template <DType kIn, typename Out>
__global__ void __launch_bounds__(kThreads)
    WideKernel(const std::byte* __restrict__ data, int64_t row_bytes, int64_t n_rows, int64_t n_in,
               Out* __restrict__ out) {
  GridTrigger();
  GridWait();
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWide;
  if (i >= n_in) return;
  for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
    StorePack(out + row * n_in + i, LoadWide<kIn>(data + row * row_bytes, i));
  }
}

// Any width, pitch and alignment.
__global__ void __launch_bounds__(kThreads)
    AnyKernel(DType in, DType format, const std::byte* data, int64_t row_bytes, int64_t n_rows,
              int64_t n_in, std::byte* out) {
  GridTrigger();
  GridWait();
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i >= n_in) return;
  for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
    StoreValue(format, out, row * n_in + i, LoadValue(in, data + row * row_bytes, i));
  }
}

}  // namespace

void DequantiseRows(const WeightRef& w, int64_t first, int64_t n_rows, DType format, void* out,
                    const Launch& launch) {
  if (n_rows == 0 || w.n_in == 0) return;
  const std::byte* data = w.Row(first);
  const bool q8 = w.format == DType::kQ8_0;
  const size_t in_align = q8 ? sizeof(__half) : size_t{16};
  const bool wide =
      w.n_in % kWide == 0 && AreMultiples(in_align, data, w.row_bytes) && AreMultiples(16, out);
  const int64_t columns = CeilDiv(w.n_in, wide ? kThreads * kWide : kThreads);
  const int64_t walkers = std::max<int64_t>(1, 16 * launch.device->sm_count / columns);
  const dim3 grid(static_cast<uint32_t>(std::min(n_rows, walkers)), static_cast<uint32_t>(columns));
  if (!wide) {
    LaunchKernel(AnyKernel, launch, grid, kThreads, 0, w.format, format, data, w.row_bytes, n_rows,
                 w.n_in, static_cast<std::byte*>(out));
    return;
  }
  WithType(format, [&](auto zero) {
    using Out = decltype(zero);
    const auto kernel = q8                         ? WideKernel<DType::kQ8_0, Out>
                        : w.format == DType::kBF16 ? WideKernel<DType::kBF16, Out>
                        : w.format == DType::kF16  ? WideKernel<DType::kF16, Out>
                                                   : WideKernel<DType::kF32, Out>;
    LaunchKernel(kernel, launch, grid, kThreads, 0, data, w.row_bytes, n_rows, w.n_in,
                 static_cast<Out*>(out));
  });
}

}  // namespace omnikv::cuda
