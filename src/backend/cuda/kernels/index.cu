// An index of K in 4 bits: IndexKeys and Rescore. index_score.cu has IndexScore.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/kernels/pack.cuh"
#include "backend/kv_format.h"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

__device__ __forceinline__ int Warp() {
  return static_cast<int>(threadIdx.x) / 32;
}
__device__ __forceinline__ int Lane() {
  return static_cast<int>(threadIdx.x) % 32;
}

// --- IndexKeys: a warp takes a KV head of a token, and reads it twice.

// Grid: x walks KV heads of tokens, y sequences.
template <typename T>
__global__ void __launch_bounds__(kThreads) KeysKernel(const __grid_constant__ IndexKeysArgs a) {
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.y];
  const int half = a.kv.dk / 2;
  const int64_t items = int64_t{seq.q_len} * a.kv.n_kv_heads;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + Warp(); item < items;
       item += int64_t{gridDim.x} * kWarps) {
    const int t = seq.kv_len - seq.q_len + static_cast<int>(item / a.kv.n_kv_heads);
    const int g = static_cast<int>(item % a.kv.n_kv_heads);
    const std::byte* k = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), g);
    const int64_t to_scales = a.kv.k.ToScales(g);
    float low = INFINITY;
    float high = -INFINITY;
    for (int i = Lane(); i < a.kv.dk; i += 32) {
      const float v = HeadValue<T>(k, to_scales, i);
      low = fminf(low, v);
      high = fmaxf(high, v);
    }
    low = -WarpMax(-low);
    high = WarpMax(high);
    const IndexRange range = RangeOf(low, high);
    const float zero = range.zero();
    const float codes = range.CodesAUnit();
    const auto code = [&](int i) {
      const float c = rintf((HeadValue<T>(k, to_scales, i) - zero) * codes);
      return static_cast<uint32_t>(fminf(fmaxf(c, 0.0f), static_cast<float>(kIndexTop)));
    };
    auto* row = a.out.Row<uint8_t>(seq.table_off, t);
    for (int i = Lane(); i < half; i += 32) {
      row[g * half + i] = static_cast<uint8_t>(code(i) | code(i + half) << 4);
    }
    if (Lane() == 0) {
      auto* ranges = reinterpret_cast<IndexRange*>(row + IndexRangesAt(a.kv.n_kv_heads, a.kv.dk));
      ranges[g] = range;
    }
  }
}

// --- Rescore: a warp takes a listed token, with as many KV heads as fit and with all of their
// queries. Rows may be the host's, which cross the bus at its rate in long pieces alone: so a warp
// copies all that it needs of a row to shared memory, and one token ahead.

// What the sum of a head's exponentials loses and gains, in parts of it.
struct Change {
  float before, after;
};

// What a warp has of K of a row: the values of `heads` KV heads, then their scales. Pieces are as
// long as the addresses allow.
struct KeyPiece {
  int heads;
  int values, scales;              // bytes
  int values_piece, scales_piece;  // bytes: 16, 4 or 2

  __host__ __device__ int bytes() const { return values + scales; }
};

// At most, unless one head has more: bytes of a warp's piece, and of the queries of a block.
constexpr int64_t kMostKeyBytes = 2048;
constexpr int64_t kMostQueryBytes = 65536;

int PieceOf(uintptr_t bits) {
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
}

KeyPiece KeyPieceOf(const RescoreArgs& a) {
  const KvPlane& k = a.kv.k;
  const int64_t query_bytes = int64_t{4} * a.kv.dk * (a.n_heads / a.kv.n_kv_heads);
  const int64_t key_bytes = KvHeadBytes(k.dtype, a.kv.dk);
  const int64_t most = std::min(kMostKeyBytes / key_bytes, kMostQueryBytes / query_bytes);
  const bool apart = a.lists > 1 || a.kv.ByHead();
  const int64_t heads = apart ? 1 : std::clamp<int64_t>(most, 1, a.kv.n_kv_heads);
  const int64_t scale_bytes = KvScaleBytes(k.dtype, a.kv.dk);
  const auto piece = [&](const std::byte* base, int64_t head_bytes) {
    return PieceOf(AddressBits(base) | AddressBits(k.row_bytes) | AddressBits(heads * head_bytes));
  };
  return {static_cast<int>(heads), static_cast<int>(heads * key_bytes),
          static_cast<int>(heads * scale_bytes), piece(k.base, key_bytes),
          // They lie behind the values in shared memory.
          std::min(piece(k.scales, scale_bytes), PieceOf(AddressBits(heads * key_bytes)))};
}

// A warp's part of a row.
__device__ __forceinline__ void CopyPieces(std::byte* to, const std::byte* from, int bytes,
                                           int piece) {
  for (int at = Lane() * piece; at < bytes; at += 32 * piece) {
    if (piece == 16) {
      CopyAsync16(to + at, from + at);
    } else if (piece == 4) {
      CopyAsync4(to + at, from + at, true);
    } else {
      *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
    }
  }
}

// Values i to i + N - 1 of a head, as HeadValue has them. REQUIRES whole fours of N = 4.
template <typename T, int N>
__device__ __forceinline__ Pack<float, N> HeadValues(const std::byte* values, int64_t to_scales,
                                                     int i) {
  Pack<float, N> to;
  if constexpr (N == 1 || std::is_same_v<T, Q4>) {
#pragma unroll
    for (int j = 0; j < N; ++j) to.v[j] = HeadValue<T>(values, to_scales, i + j);
  } else {
    const auto from = LoadPack<N>(reinterpret_cast<const T*>(values) + i);
    float scale = 1;
    if constexpr (kInBlocks<T>) {
      scale = ToF32(reinterpret_cast<const __half*>(values + to_scales)[i / kBlockValues]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      to.v[j] = kInBlocks<T> ? ToF32(from.v[j]) * scale : ToF32(from.v[j]);
    }
  }
  return to;
}

// Of 2 kStep sums of which 2 kStep lanes have parts, each lane gets that of its number.
template <int kStep = 16>
__device__ __forceinline__ float SumOfLane(float (&parts)[32]) {
  const bool upper = (Lane() & kStep) != 0;
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const float own = upper ? parts[i + kStep] : parts[i];
    const float other = upper ? parts[i] : parts[i + kStep];
    parts[i] = own + __shfl_xor_sync(kAllLanes, other, kStep);
  }
  if constexpr (kStep > 1) return SumOfLane<kStep / 2>(parts);
  return parts[0];
}

// Grid: x walks tokens, y groups of piece.heads KV heads, z rows. changes [rows, gridDim.x, heads].
// Shared memory: the queries of the KV heads, f32 [heads, dk]; Change [warps, heads]; two pieces
// for each warp. A lane takes N values of a head at a time.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 4)
    RescoreKernel(const __grid_constant__ RescoreArgs a, const KeyPiece piece, Change* changes) {
  extern __shared__ __align__(16) std::byte shared[];
  GridTrigger();
  GridWait();
  const int dk = a.kv.dk;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) * piece.heads;
  const int kv_heads = min(piece.heads, a.kv.n_kv_heads - kv_head);
  const int heads = group * kv_heads;
  const auto r = static_cast<int>(blockIdx.z);
  const RowMeta row = a.rows[r];
  const int32_t table_off = a.seqs[row.seq].table_off;
  const SomeTokens::Of tokens(a.tokens, row, a.lists, a.lists == 1 ? 0 : kv_head);
  const int64_t first_head = int64_t{r} * a.n_heads + kv_head * group;
  const int all_heads = piece.heads * group;
  const int head_bytes = piece.values / piece.heads;
  const int scale_bytes = piece.scales / piece.heads;
  const int pitch = (piece.bytes() + 15) / 16 * 16;
  std::byte* const pieces = shared + Warp() * 2 * pitch;
  auto* q = reinterpret_cast<float*>(shared + kWarps * 2 * pitch);
  auto* found = reinterpret_cast<Change*>(q + all_heads * dk) + Warp() * all_heads;
  const int step = static_cast<int>(gridDim.x) * kWarps;
  int i = static_cast<int>(blockIdx.x) * kWarps + Warp();
  const auto copy = [&](int item, int side) {
    if (item < tokens.size()) {
      const std::byte* const from = a.kv.k.Head(a.kv.RowIndex(table_off, tokens.At(item)), kv_head);
      std::byte* const to = pieces + side * pitch;
      CopyPieces(to, from, head_bytes * kv_heads, piece.values_piece);
      CopyPieces(to + piece.values, from + a.kv.k.ToScales(kv_head), scale_bytes * kv_heads,
                 piece.scales_piece);
    }
    CopyAsyncCommit();
  };
  copy(i, 0);
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x) * N; at < heads * dk; at += kThreads * N) {
    *reinterpret_cast<Pack<float, N>*>(q + at) = LoadPack<N>(a.q + first_head * dk + at);
  }
  for (int h = Lane(); h < heads; h += 32) found[h] = {0, 0};
  __syncthreads();
  for (int side = 0; i < tokens.size(); i += step, side ^= 1) {
    copy(i + step, side ^ 1);
    CopyAsyncWait<1>();
    __syncwarp();
    const std::byte* const own_keys = pieces + side * pitch;
    const int token = tokens.At(i);
    for (int begin = 0; begin < heads; begin += 32) {  // a lane has head begin + Lane()
      const int h = begin + Lane();
      float* const logit = a.logits + LogitAt(a, r, kv_head * group + h, token);
      // What stood in its place comes while the dots are made.
      const float old = h < heads ? *logit : 0;
      float dots[32] = {};
      for (int d = Lane() * N; d < dk; d += 32 * N) {
        Pack<float, N> k{};
        int g = begin / group;
        int end = begin;  // of the heads that k is for
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          if (begin + j < heads) {
            if (begin + j == end) {
              k = HeadValues<T, N>(own_keys + g * head_bytes,
                                   piece.values + g * (scale_bytes - head_bytes), d);
              end = ++g * group;
            }
            const auto of_head = LoadPack<N>(q + (begin + j) * dk + d);
#pragma unroll
            for (int e = 0; e < N; ++e) dots[j] += k.v[e] * of_head.v[e];
          }
        }
      }
      const float own = SumOfLane(dots);
      if (h < heads) {
        const float w = Softcap(a.scale * own, a.softcap);
        const float lse = a.lse[first_head + h];
        found[h].before += Exp2((old - lse) * kLog2E);
        found[h].after += Exp2((w - lse) * kLog2E);
        *logit = w;
      }
    }
    __syncwarp();
  }
  CopyAsyncWait<0>();
  __syncthreads();
  for (int h = static_cast<int>(threadIdx.x); h < heads; h += kThreads) {
    const Change* of_warps = reinterpret_cast<const Change*>(q + all_heads * dk) + h;
    Change sum = {0, 0};
    for (int w = 0; w < kWarps; ++w) {
      sum.before += of_warps[w * all_heads].before;
      sum.after += of_warps[w * all_heads].after;
    }
    changes[(int64_t{r} * gridDim.x + blockIdx.x) * a.n_heads + kv_head * group + h] = sum;
  }
}

// lse [rows, heads], by changes [rows, n_parts, heads]. Grid: x heads, y rows.
__global__ void __launch_bounds__(kThreads)
    ChangeKernel(const Change* changes, int n_parts, float* lse) {
  __shared__ Change of_warps[kWarps];
  GridTrigger();
  GridWait();
  const auto heads = static_cast<int>(gridDim.x);
  const Change* own = changes + int64_t{blockIdx.y} * n_parts * heads + blockIdx.x;
  Change all = {0, 0};
  for (int p = static_cast<int>(threadIdx.x); p < n_parts; p += kThreads) {
    const Change part = own[int64_t{p} * heads];
    all = {all.before + part.before, all.after + part.after};
  }
  all = {WarpSum(all.before), WarpSum(all.after)};
  if (Lane() == 0) of_warps[Warp()] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    all = {all.before + of_warps[w].before, all.after + of_warps[w].after};
  }
  lse[blockIdx.y * heads + blockIdx.x] += logf(fmaxf(0.0f, 1 - all.before) + all.after);
}

// Blocks of a row's KV heads side by side.
int64_t PartsOf(const RescoreArgs& a, const Device& device) {
  const int64_t all = 4 * int64_t{device.sm_count};
  const int64_t groups = int64_t{a.n_rows} * CeilDiv(a.kv.n_kv_heads, KeyPieceOf(a).heads);
  return std::clamp<int64_t>(CeilDiv(a.tokens.capacity, kWarps), 1,
                             std::max<int64_t>(16, all / groups));
}

dim3 HeadsOfRows(int32_t n_heads, int32_t n_rows) {
  return {static_cast<uint32_t>(n_heads), static_cast<uint32_t>(n_rows)};
}

}  // namespace

void IndexKeys(const IndexKeysArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.n_rows == 0) return;
  const int64_t items = int64_t{args.n_rows} * args.kv.n_kv_heads;
  const dim3 grid(
      static_cast<uint32_t>(std::min(CeilDiv(items, kWarps), 8 * int64_t{launch.device->sm_count})),
      static_cast<uint32_t>(args.n_seqs));
  WithKvType(args.kv.k.dtype, [&](auto t) {
    LaunchKernel(KeysKernel<decltype(t)>, launch, grid, kThreads, 0, args);
  });
}

size_t RescoreScratch(const RescoreArgs& args, const Device& device) {
  return sizeof(Change) * static_cast<size_t>(args.n_rows * PartsOf(args, device) * args.n_heads);
}

void Rescore(const RescoreArgs& args, const Launch& launch) {
  if (args.n_rows == 0) return;
  auto* changes = reinterpret_cast<Change*>(launch.scratch);
  const int64_t n_parts = PartsOf(args, *launch.device);
  const KeyPiece piece = KeyPieceOf(args);
  const auto heads = static_cast<size_t>(piece.heads * (args.n_heads / args.kv.n_kv_heads));
  const size_t shared =
      heads * (sizeof(float) * static_cast<size_t>(args.kv.dk) + kWarps * sizeof(Change)) +
      2 * kWarps * static_cast<size_t>(CeilDiv(piece.bytes(), 16) * 16);
  const dim3 grid(static_cast<uint32_t>(n_parts),
                  static_cast<uint32_t>(CeilDiv(args.kv.n_kv_heads, piece.heads)),
                  static_cast<uint32_t>(args.n_rows));
  const bool fours = args.kv.dk % 4 == 0 && AreMultiples(16, args.q);
  WithKvType(args.kv.k.dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = fours ? RescoreKernel<T, 4> : RescoreKernel<T, 1>;
    AllowShared(kernel, shared);
    LaunchKernel(kernel, launch, grid, kThreads, shared, args, piece, changes);
  });
  LaunchKernel(ChangeKernel, launch, HeadsOfRows(args.n_heads, args.n_rows), kThreads, 0, changes,
               static_cast<int>(n_parts), args.lse);
}

}  // namespace omnikv::cuda
