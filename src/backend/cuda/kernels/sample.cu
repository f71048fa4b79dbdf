// From logits to the next step's token, so that steps follow one another without the host.
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 32;  // of a row, weighed side by side; a warp compares their results

struct Best {
  float value;
  int32_t token;
};

// The higher value, of equals the lower token. NaN never wins.
__device__ __forceinline__ Best Better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.token < a.token);
  return second ? b : a;
}

__device__ __forceinline__ Best WarpBest(Best best) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    best = Better(best, {__shfl_xor_sync(kAllLanes, best.value, lane),
                         __shfl_xor_sync(kAllLanes, best.token, lane)});
  }
  return best;
}

// The best of each part: parts [n_rows, kParts]. Grid (kParts, n_rows).
__global__ void __launch_bounds__(kThreads)
    BestOfParts(const float* logits, int64_t vocab, Best* parts) {
  GridTrigger();
  GridWait();
  const int64_t share = CeilDiv(vocab, kParts);
  const int64_t begin = blockIdx.x * share;
  const int64_t end = min(begin + share, vocab);
  const float* row = logits + blockIdx.y * vocab;
  Best best{-INFINITY, INT32_MAX};
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    best = Better(best, {row[t], static_cast<int32_t>(t)});
  }
  best = WarpBest(best);
  __shared__ Best warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) best = Better(best, warps[w]);
  parts[blockIdx.y * kParts + blockIdx.x] = best;
}

// One warp a row, then the step is counted.
__global__ void __launch_bounds__(32 * kMaxDecodeRows) Choose(NextTokenArgs a, const Best* parts) {
  GridTrigger();
  GridWait();
  const int row = static_cast<int>(threadIdx.x) / 32;
  const Best best = WarpBest(parts[threadIdx.x]);
  const uint32_t step = *a.step;
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  // A row without any number keeps its first token rather than one that does not exist.
  const int32_t token = best.token == INT32_MAX ? 0 : best.token;
  a.out[static_cast<int32_t>(step % static_cast<uint32_t>(a.ring)) * a.n_rows + row] = token;
  a.tokens[row] = token;
  const RowMeta meta = a.rows[row];
  a.rows[row].pos = meta.pos + 1;
  a.seqs[meta.seq].kv_len += 1;
  if (row == 0) *a.step = step + 1;
}

}  // namespace

size_t NextTokenScratch(const NextTokenArgs& args) {
  return static_cast<size_t>(args.n_rows) * kParts * sizeof(Best);
}

void NextToken(const NextTokenArgs& args, const Launch& launch) {
  static_assert(kParts == 32, "a warp compares the parts of a row");
  auto* parts = reinterpret_cast<Best*>(launch.scratch);
  const auto rows = static_cast<unsigned>(args.n_rows);
  LaunchKernel(BestOfParts, launch, dim3(kParts, rows), dim3(kThreads), 0, args.logits, args.vocab,
               parts);
  LaunchKernel(Choose, launch, dim3(1), dim3(32 * rows), 0, args, static_cast<const Best*>(parts));
}

}  // namespace omnikv::cuda
