// PickLogits, and SumValues for who runs it on the card after all: it is an op of the host.
#include "backend/cuda/kernels/attend_plan.cuh"
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Grid: x listed tokens, y query heads of all rows.
__global__ void __launch_bounds__(kThreads)
    PickLogitsKernel(const __grid_constant__ PickLogitsArgs a) {
  GridTrigger();
  GridWait();
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  for (int64_t row_head = blockIdx.y; row_head < int64_t{a.n_rows} * a.n_heads;
       row_head += gridDim.y) {
    const auto r = static_cast<int32_t>(row_head / a.n_heads);
    const auto h = static_cast<int32_t>(row_head % a.n_heads);
    const int64_t list = a.ListOf(a.rows[r].seq, h);
    if (i >= a.count[list]) continue;
    const int32_t token = a.index[list * a.capacity + i];
    a.out[row_head * a.capacity + i] = a.logits[row_head * a.stride + token];
  }
}

// A warp takes a row and query head; a lane a token for its weight, then values for the sum.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumValuesKernel(const __grid_constant__ SumValuesArgs a) {
  GridTrigger();
  GridWait();
  const int64_t row_head = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row_head >= int64_t{a.n_rows} * a.n_heads) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const RowMeta row = a.rows[row_head / a.n_heads];
  const auto kv_head = static_cast<int32_t>(row_head % a.n_heads / a.Group());
  const int64_t list = a.ListOf(row.seq, kv_head);
  const int32_t n = a.count[list];
  const float* const logits = a.logits + row_head * a.capacity;
  const int32_t* const index = a.index + list * a.capacity;
  const int32_t table_off = a.seqs[row.seq].table_off;
  const int32_t place = a.kv.Place(kv_head);
  const int64_t to_scales = a.kv.v.ToScales(place);
  float top = -kInf;
  for (int32_t i = lane; i < n; i += 32) top = fmaxf(top, logits[i]);
  top = WarpMax(top);
  float sum = 0;
  for (int32_t i = lane; i < n; i += 32) sum += expf(logits[i] - top);
  sum = WarpSum(sum);
  if (a.lse != nullptr && lane == 0) a.lse[row_head] = sum > 0 ? top + logf(sum) : -kInf;
  const float norm = a.lse_in != nullptr ? a.lse_in[row_head] : top + logf(sum);
  for (int32_t first = 0; first < a.kv.dv; first += 32) {
    const int32_t d = first + lane;
    float o = 0;
    for (int32_t begin = 0; begin < n; begin += 32) {
      const int32_t mine = begin + lane;
      const float weight = mine < n ? expf(logits[mine] - norm) : 0.0f;
      const int64_t at = mine < n ? a.kv.RowIndex(table_off, index[mine]) : 0;
      for (int32_t i = 0; i < min(32, n - begin); ++i) {
        const float w = __shfl_sync(kAllLanes, weight, i);
        const std::byte* const v = a.kv.v.Head(__shfl_sync(kAllLanes, at, i), place);
        if (d < a.kv.dv) o += w * HeadValue<T>(v, to_scales, d);
      }
    }
    if (d < a.kv.dv) a.o[row_head * a.kv.dv + d] = o;
  }
}

}  // namespace

void PickLogits(const PickLogitsArgs& args, const Launch& launch) {
  const int64_t row_heads = int64_t{args.n_rows} * args.n_heads;
  if (row_heads == 0 || args.capacity == 0) return;
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.capacity, kThreads)),
                  static_cast<unsigned>(row_heads < 4096 ? row_heads : 4096));
  LaunchKernel(PickLogitsKernel, launch, grid, dim3(kThreads), 0, args);
}

void SumValues(const SumValuesArgs& args, const Launch& launch) {
  const int64_t row_heads = int64_t{args.n_rows} * args.n_heads;
  if (row_heads == 0) return;
  WithKvType(args.kv.v.dtype, [&](auto zero) {
    LaunchKernel(SumValuesKernel<decltype(zero)>, launch,
                 dim3(static_cast<unsigned>(CeilDiv(row_heads, kWarps))), dim3(kThreads), 0, args);
  });
}

}  // namespace omnikv::cuda
