// What stands around the kernels of attention over few rows: maxima of scores are cleared before,
// partial results merged after.
#pragma once

#include "backend/cuda/kernels/attend_plan.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kMergeWarps = 4;
constexpr int kMergeColumns = 32;  // of a head's dv, that a CTA merges

// The partials of the rows that no strand took whole; and rows that read no token. Grid: (query
// heads that take part, rows, columns). A lane takes kWidth columns, so that a warp takes kWidth
// partials at once, and asks for kEarly of them before it waits for anything.
template <int kWidth, int kEarly>
__global__ void __launch_bounds__(32 * kMergeWarps, kEarly > 9 ? 4 : 6)
    MergeKernel(const __grid_constant__ AttendArgs args, const __grid_constant__ Division division,
                const __grid_constant__ Partials partials) {
  struct alignas(4 * kWidth) Values {
    float v[kWidth];
  };
  __shared__ float sums[kMergeWarps][kMergeColumns];
  extern __shared__ __align__(1024) float weights[];  // [kMaxStrands]; see kBesideDynamic
  __shared__ float totals[2][kMergeWarps];
  GridTrigger();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto head = [&] { return args.Head(static_cast<int32_t>(Fresh(blockIdx.x))); };
  const auto row = static_cast<int32_t>(blockIdx.y);
  const int32_t dv = args.kv.dv;
  // AttendKernel has seen all earlier kernels end before this one starts, and writes no metadata.
  const int32_t kv_head = args.KvHead(static_cast<int32_t>(blockIdx.x) / args.Group());
  const RowTiles rows(args, RowFacts::Load<true>(args, kv_head), kv_head);
  const int32_t start = __shfl_sync(kAllLanes, rows.start, row);
  const int32_t tiles = __shfl_sync(kAllLanes, rows.tiles, row);
  const Strands strands(rows.total, division.strands);
  int32_t first = 0, n = 0, first_slot = 0;
  if (tiles > 0) {
    first = strands.Of(start);
    n = strands.Of(start + tiles - 1) - first + 1;
    first_slot = 2 * first + (start > strands.Begin(first) ? 1 : 0);
  }
  GridWait();
  if (n == 1) return;

  const auto partial = [&](int32_t i) {
    return int64_t{i == 0 ? first_slot : 2 * (first + i)} * partials.n_heads + blockIdx.x;
  };
  constexpr int kLanes = kMergeColumns / kWidth;  // that share a partial
  constexpr int kStep = kMergeWarps * kWidth;     // partials at once
  const int column = static_cast<int>(blockIdx.z) * kMergeColumns + lane % kLanes * kWidth;
  const bool loads = args.o != nullptr && column < dv;
  const int32_t mine = warp * kWidth + lane / kLanes;
  const auto load = [&](int32_t i) {
    return loads && i < n ? *reinterpret_cast<const Values*>(partials.o + partial(i) * dv + column)
                          : Values{};
  };
  Values early[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) early[i] = load(mine + i * kStep);

  // What each partial weighs, and all of them together.
  constexpr int kThreads = 32 * kMergeWarps;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  float2 own = thread < n ? partials.sums[partial(thread)] : float2{-kInf, 0};
  float top = own.x;
#pragma unroll 1
  for (int32_t i = thread + kThreads; i < n; i += kThreads) {
    top = fmaxf(top, partials.sums[partial(i)].x);
  }
  top = WarpMax(top);
  if (lane == 0) totals[0][warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) top = fmaxf(top, totals[0][w]);
  const float from = top == -kInf ? 0.0f : top;
  float sum = 0;
#pragma unroll 1
  for (int32_t i = thread; i < n; i += kThreads) {
    if (i != thread) own = partials.sums[partial(i)];
    weights[i] = exp2f(own.x - from);
    sum += own.y * weights[i];
  }
  sum = WarpSum(sum);
  if (lane == 0) totals[1][warp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum += totals[1][w];
  if (threadIdx.x == 0 && blockIdx.z == 0 && args.lse != nullptr) {
    args.lse[int64_t{row} * args.n_heads + head()] = LogSum(top, sum);
  }
  if (args.o == nullptr) return;

  Values total{};
  const auto add = [&](int32_t i, const Values& o) {
    const float w = i < n ? weights[i] : 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total.v[j] += w * o.v[j];
  };
#pragma unroll
  for (int i = 0; i < kEarly; ++i) add(mine + i * kStep, early[i]);
#pragma unroll 1
  for (int32_t i = mine + kEarly * kStep; i < n; i += kStep) add(i, load(i));
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      total.v[j] += __shfl_xor_sync(kAllLanes, total.v[j], step);
    }
    if (lane < kLanes) sums[warp][lane * kWidth + j] = total.v[j];
  }
  __syncthreads();
  const int out = static_cast<int>(blockIdx.z) * kMergeColumns + lane;
  if (warp != 0 || out >= dv) return;
  float o = 0;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) o += sums[w][lane];
  const int64_t row_head = int64_t{row} * args.n_heads + head();
  if (args.lse_in != nullptr) {
    o *= OutputFactor(args, row_head, top, sum);
  } else {
    o = sum > 0 ? o / sum : 0.0f;
  }
  args.o[row_head * dv + out] = o;
}

// scores[row][0 .. pos] = -inf: where maxima start.
__global__ void __launch_bounds__(256)
    ClearScoresKernel(const RowMeta* rows, float* scores, int64_t stride) {
  GridTrigger();
  GridWait();
  const int64_t n = int64_t{rows[blockIdx.y].pos} + 1;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < n; t += step) {
    scores[blockIdx.y * stride + t] = -kInf;
  }
}

}  // namespace
}  // namespace omnikv::cuda
