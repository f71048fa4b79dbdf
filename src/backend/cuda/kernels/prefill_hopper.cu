// Attention of many rows by FlashInfer's Hopper kernel: which steps it takes, and what stands
// before it. The kernel itself is in prefill_hopper.cuh.
#include "backend/cuda/kernels/prefill_hopper.h"

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;

size_t QueryBytes(const AttendArgs& a) {
  return static_cast<size_t>(a.n_rows) * static_cast<size_t>(a.n_heads) *
         static_cast<size_t>(a.kv.dk) * 2;
}

// Bytes of a token's K and V, dense.
int64_t TokenBytes(const KvView& kv) {
  return int64_t{2} * kv.n_kv_heads * (kv.dk + kv.dv);
}

// Whether tiles of queries are about full: our own kernel, at half the speed, fills its tiles with
// all heads that share a KV head.
bool FillsTiles(const AttendArgs& a) {
  return int64_t{2} * a.n_rows >= int64_t{a.BusySeqs()} * HopperRows(a.kv.dk);
}

// Parts that the tokens of a tile are dealt to: one where there is a tile for about every block
// that the card holds.
int Parts(const AttendArgs& a, const Device& device) {
  const int64_t blocks = CeilDiv(a.n_rows, HopperRows(a.kv.dk)) * a.Heads();
  const bool fills = 2 * blocks > CeilDiv(blocks, device.sm_count) * device.sm_count;
  return fills ? 1 : PartsFor(blocks, device.sm_count);
}

size_t TailBytes(const AttendArgs& a) {
  return static_cast<size_t>(int64_t{a.n_seqs} * HopperTokens(a.kv.dk) * TokenBytes(a.kv));
}

// Copies the tokens of a sequence that fill no tile of the kernel's, and zeros to fill it. Grid:
// (rows of a tile / kWarps, sequences), a warp a row.
__global__ void __launch_bounds__(32 * kWarps)
    CopyTails(const __grid_constant__ AttendArgs a, uint4* tails) {
  GridTrigger();
  GridWait();
  const KvView& kv = a.kv;
  const int seq = static_cast<int>(blockIdx.y);
  const SeqMeta meta = a.seqs[seq];
  if (meta.q_len == 0) return;
  const int kv_len = a.rows[meta.q_begin].pos + meta.q_len;
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int n_tokens = HopperTokens(kv.dk);
  const int token = kv_len / n_tokens * n_tokens + row;
  const bool valid = token < kv_len;
  const int64_t from = valid ? kv.RowIndex(meta.table_off, token) : 0;
  const int head_words = kv.dk / 8;  // of 16 bytes; dk == dv
  const int half_words = kv.n_kv_heads * head_words;
  const int words = a.KvHeads() * head_words;  // of the heads that take part
  uint4* to = tails + (int64_t{seq} * n_tokens + row) * 2 * half_words;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < 2 * words; i += 32) {
    const bool is_v = i >= words;
    const int of_half = is_v ? i - words : i;
    const int place = kv.Place(a.KvHead(of_half / head_words));
    const int word = of_half % head_words;
    const std::byte* head = (is_v ? kv.v : kv.k).Head(from, place);
    to[(is_v ? half_words : 0) + place * head_words + word] =
        valid ? reinterpret_cast<const uint4*>(head)[word] : uint4{};
  }
}

// Merges the parts of the sequences that have several, by their logarithms of sums: a warp each row
// and head, lane p the weight of part p. Every part has read some token.
__global__ void __launch_bounds__(32 * kWarps)
    MergeParts(const __grid_constant__ AttendArgs a, const HopperInputs in) {
  GridTrigger();
  GridWait();
  const int64_t n = int64_t{a.n_rows} * a.Heads();
  const int64_t part_at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (part_at >= n) return;
  const int64_t row = part_at / a.Heads();
  const int64_t at = row * a.n_heads + a.Head(static_cast<int32_t>(part_at % a.Heads()));
  const SeqMeta meta = a.seqs[a.rows[row].seq];
  const int parts = HopperPartsOf(a.rows[meta.q_begin].pos, in.parts);
  if (parts == 1) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float lse = lane < parts ? in.part_lse[lane * n + part_at] : -__builtin_huge_valf();
  const float top = WarpMax(lse);
  const float weight = lane < parts ? expf(lse - top) : 0.0f;
  const float sum = WarpSum(weight);
  constexpr int kRuns = 2;  // of 128 values: heads have at most 256
  float total[kRuns][4] = {};
#pragma unroll 4
  for (int p = 0; p < parts; ++p) {
    const float w = __shfl_sync(kAllLanes, weight, p);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int d = 128 * r + 4 * lane;
      if (d >= a.kv.dv) continue;
      const float4 o =
          *reinterpret_cast<const float4*>(in.part_o + (p * n + part_at) * a.kv.dv + d);
      total[r][0] += w * o.x;
      total[r][1] += w * o.y;
      total[r][2] += w * o.z;
      total[r][3] += w * o.w;
    }
  }
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int d = 128 * r + 4 * lane;
    if (d >= a.kv.dv) continue;
    Pack<float, 4> o;
#pragma unroll
    for (int i = 0; i < 4; ++i) o.v[i] = total[r][i] / sum;
    if (in.o_bf16 != nullptr) {
      StorePack(static_cast<__nv_bfloat16*>(in.o_bf16) + at * a.kv.dv + d, o);
    } else {
      StorePack(a.o + at * a.kv.dv + d, o);
    }
  }
  if (a.lse != nullptr && lane == 0) a.lse[at] = top + logf(sum);
}

// The queries of a plan of every token up to the row's own, null for other plans.
const float* DenseQueries(const AttendArgs& a) {
  const PlanSegment& s = a.plan.segments[0];
  const bool dense = a.plan.n_segments == 1 && s.kind == SegmentKind::kRange && s.window == 0 &&
                     s.begin <= 0 && s.end == kToEnd && s.bounds == nullptr;
  return !dense ? nullptr : s.q != nullptr ? s.q : a.q;
}

HopperKernel* KernelFor([[maybe_unused]] const KvView& kv) {
#ifdef OMNIKV_HAVE_FLASHINFER
  if (kv.dk != kv.dv || kv.k.dtype != kv.v.dtype) return nullptr;
  if (kv.k.dtype == DType::kBF16) return HopperKernelBf16(kv.dk);
  if (kv.k.dtype == DType::kF16) return HopperKernelF16(kv.dk);
#endif
  return nullptr;
}

}  // namespace

bool CanAttendHopper(const AttendArgs& a, const Device& device) {
  const KvView& kv = a.kv;
  if (device.arch != 90 || KernelFor(kv) == nullptr || DenseQueries(a) == nullptr) return false;
  if (a.o == nullptr || a.score != ScoreKind::kNone || a.softcap != 0 || a.scale <= 0) return false;
  if (a.lse_in != nullptr) return false;
  if (kv.block_tokens < kLeastHopperBlock || (kv.block_tokens & (kv.block_tokens - 1)) != 0) {
    return false;
  }
  return FillsTiles(a) && AreMultiples(16, kv.k.base, kv.v.base, kv.k.row_bytes, kv.v.row_bytes,
                                       kv.k.head_bytes, kv.v.head_bytes, a.o);
}

size_t AttendHopperScratch(const AttendArgs& a, const Device& device) {
  const int parts = Parts(a, device);
  const int64_t values = int64_t{a.n_rows} * a.Heads() * (a.kv.dv + 1);
  return QueryBytes(a) + TailBytes(a) +
         (parts > 1 ? sizeof(float) * static_cast<size_t>(parts * values) : 0);
}

void AttendHopper(const AttendArgs& a, void* o_bf16, const Launch& launch) {
  if (a.n_rows == 0) return;
  std::byte* const q = launch.scratch;
  std::byte* const tails = q + QueryBytes(a);
  ConvertRows(DenseQueries(a), int64_t{a.n_rows} * a.n_heads * a.kv.dk, a.kv.k.dtype, q, launch);
  const auto copies = static_cast<unsigned>(HopperTokens(a.kv.dk) / kWarps);
  LaunchKernel(CopyTails, launch, dim3(copies, static_cast<unsigned>(a.n_seqs)), 32 * kWarps, 0, a,
               reinterpret_cast<uint4*>(tails));
  HopperInputs inputs{.q = q, .tails = tails, .o_bf16 = o_bf16, .parts = Parts(a, *launch.device)};
  const int64_t row_heads = int64_t{a.n_rows} * a.Heads();
  if (inputs.parts > 1) {
    inputs.part_o = reinterpret_cast<float*>(tails + TailBytes(a));
    inputs.part_lse = inputs.part_o + inputs.parts * row_heads * a.kv.dv;
  }
  CheckLaunch(KernelFor(a.kv)(a, inputs, launch.stream), "FlashInfer's attention");
  if (inputs.parts == 1) return;
  LaunchKernel(MergeParts, launch, static_cast<unsigned>(CeilDiv(row_heads, kWarps)), 32 * kWarps,
               0, a, inputs);
}

}  // namespace omnikv::cuda
