#include "policy/blocks/block_ops.cuh"

namespace omnikv {
namespace {

// --- TokenWeights: what compat=kt takes once after a prompt. First the norms, a CTA a row and
// head; then the weights, a warp a token and head.
template <typename T>
__device__ float LogitOf(const TokenWeightsArgs& a, const SeqMeta& seq, int row, int head, int t,
                         int lane) {
  const int kv_head = head / (a.n_heads / a.n_kv_heads);
  const std::byte* values = a.k.Head(a.k.Row(seq.table_off, t), kv_head);
  const int64_t to_scales = a.k.ToScales(kv_head);
  const float* q = a.q + (int64_t{row} * a.n_heads + head) * a.dk;
  float dot = 0;
  for (int i = lane; i < a.dk; i += 32) dot += q[i] * cuda::HeadValue<T>(values, to_scales, i);
  const float value = cuda::WarpSum(dot) * __uint_as_float(a.scale_bits);
  const float softcap = __uint_as_float(a.softcap_bits);
  return softcap > 0 ? softcap * tanhf(value / softcap) : value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) NormsKernel(const TokenWeightsArgs a) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float tops[kWarps];
  __shared__ float sums[kWarps];
  cuda::GridTrigger();
  cuda::GridWait();
  const SeqMeta seq = a.seqs[0];
  const int window = min(a.window, seq.q_len);
  const int r = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  if (r >= window) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = seq.q_begin + seq.q_len - window + r;
  float top = -INFINITY;
  float sum = 0;
  for (int t = warp; t < seq.kv_len; t += kWarps) {
    const float value = LogitOf<T>(a, seq, row, head, t, lane);
    if (value > top) {
      sum *= expf(top - value);
      top = value;
    }
    sum += expf(value - top);
  }
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w]);
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += tops[w] == -INFINITY ? 0 : sums[w] * expf(tops[w] - top);
  float* const norm = a.norms + (int64_t{r} * a.n_heads + head) * 2;
  norm[0] = top;
  norm[1] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) TokenWeightsKernel(const TokenWeightsArgs a) {
  constexpr int kWarps = kThreads / 32;
  cuda::GridTrigger();
  cuda::GridWait();
  const SeqMeta seq = a.seqs[0];
  const int window = min(a.window, seq.q_len);
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
       t < seq.kv_len; t += static_cast<int>(gridDim.x) * kWarps) {
    float weight = 0;
    for (int r = 0; r < window; ++r) {
      const float* const norm = a.norms + (int64_t{r} * a.n_heads + head) * 2;
      const int row = seq.q_begin + seq.q_len - window + r;
      weight += expf(LogitOf<T>(a, seq, row, head, t, lane) - norm[0]) / norm[1];
    }
    if (lane == 0) a.out[int64_t{head} * a.stride + t] = weight;
  }
}

}  // namespace

void TokenWeightsCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const TokenWeightsArgs*>(args);
  const auto heads = static_cast<uint32_t>(a.n_heads);
  ByType(a.k.dtype, [&](auto type) {
    using T = decltype(type);
    cuda::LaunchKernel(NormsKernel<T>, launch, dim3(static_cast<uint32_t>(a.max_rows), heads),
                       kThreads, 0, a);
    cuda::LaunchKernel(TokenWeightsKernel<T>, launch, dim3(256, heads), kThreads, 0, a);
  });
}

}  // namespace omnikv
