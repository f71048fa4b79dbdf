// Attention of few rows over any K/V: f32, head sizes of any kind, rows that are not aligned. A
// warp takes a query head; a lane a token for q·k, then values of v for the weighted sum.
#include <cstdint>

#include "backend/cuda/kernels/attend_plan.cuh"
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int32_t kCtasAnSm = 4;

template <typename T>
__global__ void __launch_bounds__(32 * kWarps, kInBlocks<T> ? 3 : kCtasAnSm)
    GenericKernel(const __grid_constant__ AttendArgs args,
                  const __grid_constant__ Division division,
                  const __grid_constant__ Partials partials) {
  extern __shared__ float shared[];  // [warps, dk + dv]
  GridWait();
  GridTrigger();  // after the wait: MergeKernel reads metadata before its own
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const int32_t unit = division.Unit(cta, warp);
  const int32_t strand = division.Strand(cta, warp);
  if (strand >= division.strands) return;
  const int32_t head = args.Head(unit);
  const KvView& kv = args.kv;
  const int32_t kv_head = head / (args.n_heads / kv.n_kv_heads);
  const int32_t place = kv.Place(kv_head);
  const std::byte* k_base = kv.k.Head(0, place);
  const std::byte* v_base = kv.v.Head(0, place);
  const int64_t to_k_scales = kv.k.ToScales(place);
  const int64_t to_v_scales = kv.v.ToScales(place);
  float* q = shared + warp * (kv.dk + kv.dv);
  float* o = q + kv.dk;

  const RowTiles rows(args, RowFacts::Load(args, kv_head), kv_head);
  const Strands strands(rows.total, division.strands);
  ForEachRowPart(args, rows, strands, strand, [&](const RowPart& part) {
    const int64_t row_head = int64_t{part.row} * args.n_heads + head;
    float top = -kInf;
    float sum = 0;  // of this lane's tokens
    for (int32_t d = lane; d < kv.dv; d += 32) o[d] = 0;
    ForEachSegment(
        args, rows.facts, part, kv_head,
        [&](const PlanSegment& segment, const SegmentTokens& tokens, int32_t from, int32_t to) {
          const float* query = (segment.q != nullptr ? segment.q : args.q) + row_head * kv.dk;
          __syncwarp();
          for (int32_t d = lane; d < kv.dk; d += 32) q[d] = query[d];
          __syncwarp();
          Walk walk(kv, tokens, part.table_off, part.meta.pos, from * kTileTokens);
          for (int32_t tile = from; tile < to; tile += 2) {
            walk.Advance();
            const bool mine = tile + lane / kTileTokens < to && walk.row() >= 0;
            const int32_t row = walk.row();
            float logit = -kInf;
            if (mine) {
              const std::byte* k = k_base + row * kv.k.row_bytes;
              float dot = 0;
              for (int32_t d = 0; d < kv.dk; ++d) dot += q[d] * HeadValue<T>(k, to_k_scales, d);
              logit = Softcap(dot * args.scale, args.softcap);
              if (args.score == ScoreKind::kLogits) {
                args.scores[row_head * args.score_stride + walk.token()] = logit;
              } else if (args.score == ScoreKind::kHeadMax) {
                AtomicMax(args.scores + part.row * args.score_stride + walk.token(), logit);
              }
            }
            logit *= kLog2E;
            const float before = top;
            top = fmaxf(top, WarpMax(logit));
            const float base = top == -kInf ? 0.0f : top;
            const float fade = exp2f(before - base);
            const float p = exp2f(logit - base);
            sum = sum * fade + p;
            if (args.o == nullptr) continue;
            const uint32_t valid = __ballot_sync(kAllLanes, mine);
            for (int32_t first = 0; first < kv.dv; first += 32) {
              const int32_t d = first + lane;
              float total = 0;
              for (uint32_t left = valid; left != 0; left &= left - 1) {
                const int token = __ffs(static_cast<int>(left)) - 1;
                const float weight = __shfl_sync(kAllLanes, p, token);
                const std::byte* v = v_base + __shfl_sync(kAllLanes, row, token) * kv.v.row_bytes;
                if (d < kv.dv) total += weight * HeadValue<T>(v, to_v_scales, d);
              }
              if (d < kv.dv) o[d] = o[d] * fade + total;
            }
          }
        });
    sum = WarpSum(sum);
    const bool whole = part.slot < 0;
    const int64_t out = whole ? row_head : partials.At(part.slot, unit);
    if (lane == 0) {
      if (!whole) {
        partials.sums[out] = {top, sum};
      } else if (args.lse != nullptr) {
        args.lse[out] = LogSum(top, sum);
      }
    }
    if (args.o == nullptr) return;
    const float factor = whole ? OutputFactor(args, row_head, top, sum) : 1.0f;
    for (int32_t d = lane; d < kv.dv; d += 32) {
      (whole ? args.o : partials.o)[out * kv.dv + d] = o[d] * factor;
    }
  });
}

template <typename T>
void LaunchGeneric(const AttendArgs& args, const Division& d, const Partials& partials,
                   const Launch& launch) {
  const size_t shared =
      sizeof(float) * static_cast<size_t>(d.warps) * static_cast<size_t>(args.kv.dk + args.kv.dv);
  AllowShared(GenericKernel<T>, shared);
  LaunchKernel(GenericKernel<T>, launch, dim3(static_cast<unsigned>(d.ctas)),
               dim3(static_cast<unsigned>(32 * d.warps)), shared, args, d, partials);
}

}  // namespace

Division DivideGeneric(const AttendArgs& args, const Device& device) {
  return Divide(args, 1, kWarps, kCtasAnSm * device.sm_count);
}

void AttendGeneric(const AttendArgs& args, const Division& division, const Partials& partials,
                   const Launch& launch) {
  WithKvType(args.kv.k.dtype,
             [&](auto zero) { LaunchGeneric<decltype(zero)>(args, division, partials, launch); });
}

}  // namespace omnikv::cuda
