// What stands around the product of the logits of many rows, whose activations are the sum of two
// bf16 numbers: 16 bits of each, where the products of a prompt have 8.
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOutputs = 4;  // of a thread

// One block a row.
__global__ void __launch_bounds__(kThreads)
    SplitKernel(NormLogitsArgs a, int32_t first, int32_t n_rows, __nv_bfloat16* halves) {
  __shared__ float sums[32];
  GridTrigger();
  GridWait();
  const auto r = static_cast<int32_t>(blockIdx.x);
  const int d = a.in.d;
  const int64_t row = a.out_rows != nullptr ? a.out_rows[first + r] : first + r;
  const float* x = a.in.x + row * d;
  float inverse = 1;
  if (a.in.norm != nullptr) {
    float sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) sum += x[i] * x[i];
    inverse = 1.0f / sqrtf(BlockSum(sum, sums) / static_cast<float>(d) + a.in.eps);
  }
  __nv_bfloat16* const high = halves + int64_t{r} * d;
  __nv_bfloat16* const low = high + int64_t{n_rows} * d;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
    const float h = a.in.norm != nullptr ? x[i] * (inverse * a.in.norm[i]) : x[i];
    high[i] = __float2bfloat16_rn(h);
    low[i] = __float2bfloat16_rn(h - __bfloat162float(high[i]));
  }
}

// Grid: x outputs, y rows.
__global__ void __launch_bounds__(kThreads)
    FinishKernel(NormLogitsArgs a, LogitsBand band, const float* products) {
  GridTrigger();
  GridWait();
  const auto r = static_cast<int32_t>(blockIdx.y);
  const float* high = products + int64_t{r} * band.n_out;
  const float* low = high + int64_t{band.n_rows} * band.n_out;
  float* logits = a.logits + int64_t{band.first_row + r} * a.head.n_out + band.first_out;
  const int64_t first = int64_t{blockIdx.x} * kOutputs * kThreads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int64_t o = first + i * kThreads;
    if (o >= band.n_out) break;
    float v = high[o] + low[o];
    if (a.bias != nullptr) v += a.bias[band.first_out + o];
    logits[o] = Softcap(a.scale * v, a.softcap);
  }
}

}  // namespace

void SplitNormed(const NormLogitsArgs& args, int32_t first, int32_t n_rows, void* halves,
                 const Launch& launch) {
  LaunchKernel(SplitKernel, launch, dim3(static_cast<unsigned>(n_rows)), dim3(kThreads), 0, args,
               first, n_rows, static_cast<__nv_bfloat16*>(halves));
}

void FinishLogits(const NormLogitsArgs& args, const LogitsBand& band, const float* products,
                  const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(band.n_out, kOutputs * kThreads)),
                  static_cast<unsigned>(band.n_rows));
  LaunchKernel(FinishKernel, launch, grid, dim3(kThreads), 0, args, band, products);
}

}  // namespace omnikv::cuda
