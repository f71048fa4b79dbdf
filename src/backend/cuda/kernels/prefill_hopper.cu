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

// Whether tiles of queries are about full, and the card as busy as it takes to gain: a block takes
// a tile and all of its tokens, while our own kernel, at half the speed, deals tokens to several.
bool FillsCard(const AttendArgs& a, const Device& device) {
  const int rows = HopperRows(a.kv.dk);
  const int64_t blocks = CeilDiv(a.n_rows, rows) * a.n_heads;
  return int64_t{2} * a.n_rows >= int64_t{a.n_seqs} * rows &&
         2 * blocks > CeilDiv(blocks, device.sm_count) * device.sm_count;
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
  uint4* to = tails + (int64_t{seq} * n_tokens + row) * 2 * half_words;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < 2 * half_words; i += 32) {
    const bool is_v = i >= half_words;
    const int word = is_v ? i - half_words : i;
    const std::byte* head = (is_v ? kv.v : kv.k).Head(from, word / head_words);
    to[i] = valid ? reinterpret_cast<const uint4*>(head)[word % head_words] : uint4{};
  }
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
  const bool bf16 = kv.k.dtype == DType::kBF16;
  if (!bf16 && kv.k.dtype != DType::kF16) return nullptr;
  switch (kv.dk) {
    case 64:
      return bf16 ? AttendHopperBf16x64 : AttendHopperF16x64;
    case 96:
      return bf16 ? AttendHopperBf16x96 : AttendHopperF16x96;
    case 128:
      return bf16 ? AttendHopperBf16x128 : AttendHopperF16x128;
    case 256:
      return bf16 ? AttendHopperBf16x256 : AttendHopperF16x256;
    default:
      break;
  }
#endif
  return nullptr;
}

}  // namespace

bool CanAttendHopper(const AttendArgs& a, const Device& device) {
  const KvView& kv = a.kv;
  if (device.arch != 90 || KernelFor(kv) == nullptr || DenseQueries(a) == nullptr) return false;
  if (a.o == nullptr || a.score != ScoreKind::kNone || a.softcap != 0 || a.scale <= 0) return false;
  if (a.KvHeads() != kv.n_kv_heads || a.lse_in != nullptr) return false;
  if (kv.block_tokens < kLeastHopperBlock || (kv.block_tokens & (kv.block_tokens - 1)) != 0) {
    return false;
  }
  return FillsCard(a, device) &&
         AreMultiples(16, kv.k.base, kv.v.base, kv.k.row_bytes, kv.v.row_bytes, kv.k.head_bytes,
                      kv.v.head_bytes, a.o);
}

size_t AttendHopperScratch(const AttendArgs& a) {
  return QueryBytes(a) +
         static_cast<size_t>(int64_t{a.n_seqs} * HopperTokens(a.kv.dk) * TokenBytes(a.kv));
}

void AttendHopper(const AttendArgs& a, void* o_bf16, const Launch& launch) {
  if (a.n_rows == 0) return;
  std::byte* const q = launch.scratch;
  std::byte* const tails = q + QueryBytes(a);
  ConvertRows(DenseQueries(a), int64_t{a.n_rows} * a.n_heads * a.kv.dk, a.kv.k.dtype, q, launch);
  const auto copies = static_cast<unsigned>(HopperTokens(a.kv.dk) / kWarps);
  LaunchKernel(CopyTails, launch, dim3(copies, static_cast<unsigned>(a.n_seqs)), 32 * kWarps, 0, a,
               reinterpret_cast<uint4*>(tails));
  const HopperInputs inputs{.q = q, .tails = tails, .o_bf16 = o_bf16};
  CheckLaunch(KernelFor(a.kv)(a, inputs, launch.stream), "FlashInfer's attention");
}

}  // namespace omnikv::cuda
