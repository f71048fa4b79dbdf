// Partial results of attentions become one, by the logarithms of their sums. Heads that are
// attended to together come together.
#include <type_traits>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr float kInf = __builtin_huge_valf();

// A warp takes a row and query head, a lane N values at a time of all parts. Parts may lie in the
// host's memory: each value is asked for once, past the caches, which may hold what the host has
// since changed, and all parts' before any is waited for. A block asks for its sums together: the
// bus takes 0.1 us per request, whatever its size.
template <int N>
__global__ void __launch_bounds__(32 * kWarps)
    MergeStatesKernel(const __grid_constant__ MergeStatesArgs a) {
  using Word = std::conditional_t<N == 4, float4, float>;
  __shared__ float sums[kMaxStates][kWarps];
  GridTrigger();
  GridWait();
  const int64_t row_heads = int64_t{a.n_rows} * a.n_heads;
  const int64_t first = int64_t{blockIdx.x} * kWarps;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x < kMaxStates * kWarps) {
    const int part = static_cast<int>(threadIdx.x) / kWarps;
    const int i = static_cast<int>(threadIdx.x) % kWarps;
    const bool there = part < a.n_parts && first + i < row_heads;
    sums[part][i] = there ? __ldcv(a.parts[part].lse + first + i) : -kInf;
  }
  __syncthreads();
  const int64_t at = first + warp;
  if (at >= row_heads) return;
  // Lane i has the weight of part i.
  const float lse = lane < kMaxStates ? sums[lane][warp] : -kInf;
  const uint32_t read = __ballot_sync(kAllLanes, lse != -kInf);  // parts that read a token
  const float top = WarpMax(lse);
  const float weight = lse == -kInf ? 0.0f : expf(lse - top);
  float weights[kMaxStates];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxStates; ++i) {
    weights[i] = __shfl_sync(kAllLanes, weight, i);
    sum += weights[i];
  }
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  for (int d = lane * N; d < a.dv; d += 32 * N) {
    Word words[kMaxStates];
#pragma unroll
    for (int i = 0; i < kMaxStates; ++i) {
      words[i] = Word{};
      if ((read >> i & 1) != 0) {
        words[i] = __ldcv(reinterpret_cast<const Word*>(a.parts[i].o + at * a.dv + d));
      }
    }
    Pack<float, N> total{};
#pragma unroll
    for (int i = 0; i < kMaxStates; ++i) {
      const float* values = reinterpret_cast<const float*>(&words[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) total.v[j] += weights[i] * values[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total.v[j] *= inverse;
    StorePack(a.o + at * a.dv + d, total);
  }
  // The block has read the parts' lse, which this may overwrite.
  if (a.lse != nullptr && lane == 0) a.lse[at] = sum > 0 ? top + logf(sum) : -kInf;
}

// Grid: (rows, heads named). Reads past the caches, as MergeStates.
template <typename Word>
__global__ void __launch_bounds__(32 * kWarps)
    PickHeadsKernel(const __grid_constant__ PickHeadsArgs a, int32_t named) {
  GridTrigger();
  GridWait();
  const auto r = static_cast<int32_t>(blockIdx.x);
  const auto n = static_cast<int32_t>(blockIdx.y);
  const auto* const from = reinterpret_cast<const Word*>(a.from + a.From(r, n, named));
  auto* const to = reinterpret_cast<Word*>(a.to + a.To(r, n, named));
  const auto words = static_cast<int32_t>(a.width * sizeof(float) / sizeof(Word));
  for (auto i = static_cast<int32_t>(threadIdx.x); i < words; i += 32 * kWarps) {
    to[i] = __ldcv(from + i);
  }
}

}  // namespace

void MergeStates(const MergeStatesArgs& args, const Launch& launch) {
  const int64_t row_heads = int64_t{args.n_rows} * args.n_heads;
  if (row_heads == 0) return;
  uintptr_t addresses = AddressBits(args.o);
  for (const AttendState& part : args.parts) addresses |= AddressBits(part.o);
  const bool wide = args.dv % 4 == 0 && addresses % 16 == 0;
  LaunchKernel(wide ? MergeStatesKernel<4> : MergeStatesKernel<1>, launch,
               dim3(static_cast<unsigned>(CeilDiv(row_heads, kWarps))), dim3(32 * kWarps), 0, args);
}

void PickHeads(const PickHeadsArgs& args, const Launch& launch) {
  const int32_t named = args.Named();
  if (args.n_rows == 0 || named == 0) return;
  const bool wide =
      args.width % 4 == 0 && (AddressBits(args.from) | AddressBits(args.to)) % 16 == 0;
  LaunchKernel(wide ? PickHeadsKernel<float4> : PickHeadsKernel<float>, launch,
               dim3(static_cast<unsigned>(args.n_rows), static_cast<unsigned>(named)),
               dim3(32 * kWarps), 0, args, named);
}

}  // namespace omnikv::cuda
