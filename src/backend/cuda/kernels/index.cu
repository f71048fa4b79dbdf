// An index of K in 4 bits: IndexKeys, IndexScore and Rescore.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/kernels/pack.cuh"

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
    const float codes = CodesAUnit(low, high);
    const auto code = [&](int i) {
      const float c = rintf((HeadValue<T>(k, to_scales, i) - low) * codes);
      return static_cast<uint32_t>(fminf(fmaxf(c, 0.0f), static_cast<float>(kIndexTop)));
    };
    auto* row = a.out.Row<uint8_t>(seq.table_off, t);
    for (int i = Lane(); i < half; i += 32) {
      row[g * half + i] = static_cast<uint8_t>(code(i) | code(i + half) << 4);
    }
    if (Lane() == 0) {
      auto* ranges = reinterpret_cast<IndexRange*>(row + IndexRangesAt(a.kv.n_kv_heads, a.kv.dk));
      ranges[g] = RangeOf(low, high);
    }
  }
}

// --- Sums of exponentials, of which several blocks make a part each.

// sum of exp(v - top).
struct Part {
  float top, sum;
};

__device__ __forceinline__ Part Join(Part a, Part b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, 0};
  return {top, a.sum * Exp2((a.top - top) * kLog2E) + b.sum * Exp2((b.top - top) * kLog2E)};
}

__device__ __forceinline__ Part JoinLanes(Part part, int from, int below) {
  for (int step = from; step < below; step *= 2) {
    part = Join(part, {__shfl_xor_sync(kAllLanes, part.top, step),
                       __shfl_xor_sync(kAllLanes, part.sum, step)});
  }
  return part;
}

// lse [rows, heads] of parts [rows, n_parts, heads]. Grid: x heads, y rows; a warp each.
__global__ void LseKernel(const Part* parts, int n_parts, float* lse) {
  GridTrigger();
  GridWait();
  const auto heads = static_cast<int>(gridDim.x);
  const Part* own = parts + int64_t{blockIdx.y} * n_parts * heads + blockIdx.x;
  Part all = {-INFINITY, 0};
  for (int p = Lane(); p < n_parts; p += 32) all = Join(all, own[int64_t{p} * heads]);
  all = JoinLanes(all, 1, 32);
  if (Lane() == 0) lse[blockIdx.y * heads + blockIdx.x] = all.top + logf(all.sum);
}

// --- IndexScore: bound by memory. A warp takes a KV head of 16 tokens at a time, with up to eight
// of its queries: S [16 tokens, 8 queries] = codes [16, dk] Q^T [dk, 8] on tensor cores, in whole
// numbers, without an error. Queries are whole numbers of 23 bits, in three parts of 8 bits. A lane
// reads as many neighbouring bytes of a token's codes as three others, in an order of values that
// makes them operands as they lie. The warps of a block share the KV heads of the tokens among
// them, so rows are read whole.

constexpr int kTile = 16;    // tokens
constexpr int kColumns = 8;  // queries
constexpr int kDigits = 3;   // of a value of a query, in base 256: from -128 to 127

// Bytes of a query's digits in shared memory: columns lie in different banks.
template <int kWords>
inline constexpr int kPitch = 32 * kWords + (kWords == 4   ? 64
                                             : kWords == 2 ? 32
                                                           : 16);

// How the warps of a block divide what is to be done for a tile.
struct Tiling {
  int octets;  // of a KV head's queries
  int items;   // octets of all KV heads
  int per;     // items of a block
  int sides;   // warps with the same item: each has tiles of its own
};
__host__ __device__ inline Tiling TilingOf(const IndexScoreArgs& a) {
  const int octets = (a.n_heads / a.n_kv_heads + kColumns - 1) / kColumns;
  const int items = a.n_kv_heads * octets;
  const int per = items < kWarps ? items : kWarps;
  return {octets, items, per, kWarps / per};
}

// A lane's codes of two tokens, eight in a word.
template <int kWords>
struct Codes {
  uint32_t v[2][kWords];
};

template <int kWords>
__device__ __forceinline__ void LoadWords(const uint8_t* from, uint32_t (&to)[kWords]) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(words + i));
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(words + i));
      to[i] = v.x, to[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = __ldcs(words + i);
  }
}

// The same from shared memory.
template <int kWords>
__device__ __forceinline__ void LoadDigits(const std::byte* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from + 4 * i);
      to[i] = v.x, to[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = *reinterpret_cast<const uint32_t*>(from + 4 * i);
  }
}

// c [16, 8] += a [16, 32] b [32, 8], codes times digits. Lanes hold c, and as many bytes of a and b
// as of 16 bits, as in MultiplyAdd.
__device__ __forceinline__ void MultiplyAddCodes(int32_t (&c)[4], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's query of dk = 32 kWords values as whole numbers, digit by digit in rows `pitch` apart,
// the highest first. Returns what takes products back; `sum` is that of its values.
template <int kWords>
__device__ __forceinline__ float SplitQuery(const float* q, std::byte* digits, int pitch,
                                            float& sum) {
  float v[kWords];
  float top = 0;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    v[i] = q != nullptr ? __ldg(q + 32 * i + Lane()) : 0.0f;
    top = fmaxf(top, fabsf(v[i]));
    sum += v[i];
  }
  top = WarpMax(top);
  sum = WarpSum(sum);
  const int up = 21 - max((__float_as_int(top) >> 23) - 127, -100);  // below 2^22
  const float factor = __int_as_float((127 + up) << 23);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    int left = __float2int_rn(v[i] * factor);
#pragma unroll
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      const auto low = static_cast<int8_t>(left);
      digits[digit * pitch + 32 * i + Lane()] = static_cast<std::byte>(low);
      left = (left - low) >> 8;
    }
  }
  return __int_as_float((127 - up) << 23);
}

// The sum with two more values, of which the second may be -infinity.
__device__ __forceinline__ Part Add(Part part, float v, float w) {
  const float top = fmaxf(part.top, fmaxf(v, w));
  return {top, part.sum * Exp2((part.top - top) * kLog2E) + Exp2((v - top) * kLog2E) +
                   Exp2((w - top) * kLog2E)};
}

// Grid: x walks tiles, y groups of `per` items, z rows. parts [rows, gridDim.x * sides, heads].
template <int kWords>
__global__ void __launch_bounds__(kThreads, 3)
    IndexScoreKernel(const __grid_constant__ IndexScoreArgs a, Part* parts) {
  constexpr int kDim = 32 * kWords;
  // [items of a block, digits, columns, pitch]
  extern __shared__ __align__(16) std::byte queries[];
  __shared__ float backs[kWarps][kColumns], sums[kWarps][kColumns];
  GridTrigger();
  GridWait();
  const Tiling tiling = TilingOf(a);
  const int group = a.n_heads / a.n_kv_heads;
  const auto r = static_cast<int>(blockIdx.z);
  const RowMeta row = a.rows[r];
  const int32_t table_off = a.seqs[row.seq].table_off;
  const auto query = [&](int slot, int digit, int column) {
    return queries + ((slot * kDigits + digit) * kColumns + column) * kPitch<kWords>;
  };
  for (int i = Warp(); i < tiling.per * kColumns; i += kWarps) {
    const int slot = i / kColumns;
    const int column = i % kColumns;
    const int item = static_cast<int>(blockIdx.y) * tiling.per + slot;
    const int of_group = item % tiling.octets * kColumns + column;
    const bool is_head = item < tiling.items && of_group < group;
    const int head = item / tiling.octets * group + of_group;
    float sum = 0;
    const float back =
        SplitQuery<kWords>(is_head ? a.q + (int64_t{r} * a.n_heads + head) * kDim : nullptr,
                           query(slot, 0, column), kColumns * kPitch<kWords>, sum);
    if (Lane() == 0) backs[slot][column] = back, sums[slot][column] = sum;
  }
  __syncthreads();
  const int slot = Warp() % tiling.per;
  const int side = Warp() / tiling.per;
  const int item = static_cast<int>(blockIdx.y) * tiling.per + slot;
  if (side >= tiling.sides || item >= tiling.items) return;
  const int kv_head = item / tiling.octets;
  const int g = Lane() / 4;
  const int t = Lane() % 4;
  const int n = row.pos + 1;
  const int n_tiles = (n + kTile - 1) / kTile;
  const int walkers = static_cast<int>(gridDim.x) * tiling.sides;
  const int64_t codes_at = kv_head * IndexCodeBytes(kDim) + t * 4 * kWords;
  const int64_t range_at =
      IndexRangesAt(a.n_kv_heads, kDim) + kv_head * int64_t{sizeof(IndexRange)};

  // Of the lane's two queries.
  float factor[2], q_sum[2];
  float* out[2];
  Part part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_group = item % tiling.octets * kColumns + 2 * t + i;
    factor[i] = a.scale * backs[slot][2 * t + i];
    q_sum[i] = a.scale * sums[slot][2 * t + i];
    const int head = kv_head * group + of_group;
    out[i] = of_group < group ? a.logits + (int64_t{r} * a.n_heads + head) * a.stride : nullptr;
    part[i] = {-INFINITY, 0};
  }
  // Where a block of the table has whole tiles, which may end past the last token, its number comes
  // two tiles ahead of their rows' turn.
  const int per = a.index.block_units;
  const bool whole = per % kTile == 0 && (per & (per - 1)) == 0 && a.index.unit_blocks == 1;
  const int shift = __ffs(per) - 1;
  const auto block_of = [&](int tile) {
    return whole && tile < n_tiles
               ? __ldg(a.index.block_table + table_off + (tile * kTile >> shift))
               : 0;
  };
  Codes<kWords> next;
  IndexRange next_ranges[2];
  const auto load = [&](int tile, int block) {
    const int64_t first = (int64_t{block} << shift) + (tile * kTile & (per - 1));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_tile = 8 * i + g;
      const uint8_t* from =
          whole ? reinterpret_cast<const uint8_t*>(a.index.base) +
                      (first + of_tile) * a.index.row_bytes
                : a.index.Row<const uint8_t>(table_off, min(tile * kTile + of_tile, n - 1));
      LoadWords<kWords>(from + codes_at, next.v[i]);
      const float2 range = __ldcs(reinterpret_cast<const float2*>(from + range_at));
      next_ranges[i] = {range.x, range.y};
    }
  };
  int tile = static_cast<int>(blockIdx.x) * tiling.sides + side;
  if (tile < n_tiles) load(tile, block_of(tile));
  int block = block_of(tile + walkers);
  for (; tile < n_tiles; tile += walkers) {
    const Codes<kWords> codes = next;
    const IndexRange ranges[2] = {next_ranges[0], next_ranges[1]};
    if (tile + walkers < n_tiles) load(tile + walkers, block);
    block = block_of(tile + 2 * walkers);
    int32_t c[kDigits][4] = {};
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const std::byte* const own = query(slot, digit, g) + 4 * kWords * t;
      uint32_t lower[kWords], upper[kWords];  // as the halves of the codes' bytes
      LoadDigits<kWords>(own, lower);
      LoadDigits<kWords>(own + kDim / 2, upper);
#pragma unroll
      for (int e = 0; e < kWords; ++e) {
        constexpr uint32_t kLower = 0x0f0f0f0f;
        const uint32_t k[4] = {codes.v[0][e] & kLower, codes.v[1][e] & kLower,
                               codes.v[0][e] >> 4 & kLower, codes.v[1][e] >> 4 & kLower};
        MultiplyAddCodes(c[digit], k, lower[e], upper[e]);
      }
    }
    const int token = tile * kTile + g;
    if (token >= n) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (out[i] == nullptr) continue;
      float v[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float dot = 0;
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) {
          dot = dot * 256 + static_cast<float>(c[digit][2 * half + i]);
        }
        v[half] = Softcap(ranges[half].scale * (factor[i] * dot) + ranges[half].zero * q_sum[i],
                          a.softcap);
      }
      out[i][token] = v[0];
      const bool both = token + 8 < n;
      if (both) out[i][token + 8] = v[1];
      part[i] = Add(part[i], v[0], both ? v[1] : -INFINITY);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Part all = JoinLanes(part[i], 4, 32);
    if (g != 0 || out[i] == nullptr) continue;
    const int64_t head = (out[i] - a.logits) / a.stride;  // of all rows
    const int64_t walker = int64_t{blockIdx.x} * tiling.sides + side;
    parts[(int64_t{r} * walkers + walker) * a.n_heads + (head - int64_t{r} * a.n_heads)] = all;
  }
}

// Heads of any size: a warp takes a token of a query head, value after value. Grid: x walks tokens,
// y heads, z rows. parts [rows, gridDim.x, heads].
__global__ void __launch_bounds__(kThreads)
    IndexScoreAny(const __grid_constant__ IndexScoreArgs a, Part* parts) {
  __shared__ Part of_warps[kWarps];
  GridTrigger();
  GridWait();
  const auto head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (a.n_heads / a.n_kv_heads);
  const RowMeta row = a.rows[blockIdx.z];
  const int32_t table_off = a.seqs[row.seq].table_off;
  const int half = a.dk / 2;
  const int64_t row_head = int64_t{blockIdx.z} * a.n_heads + head;
  const float* q = a.q + row_head * a.dk;
  float q_sum = 0;
  for (int i = Lane(); i < a.dk; i += 32) q_sum += q[i];
  q_sum = WarpSum(q_sum);
  Part part = {-INFINITY, 0};
  for (int t = static_cast<int>(blockIdx.x) * kWarps + Warp(); t <= row.pos;
       t += static_cast<int>(gridDim.x) * kWarps) {
    const auto* from = a.index.Row<const uint8_t>(table_off, t);
    const IndexRange range =
        reinterpret_cast<const IndexRange*>(from + IndexRangesAt(a.n_kv_heads, a.dk))[kv_head];
    float dot = 0;
    for (int i = Lane(); i < half; i += 32) {
      const uint8_t both = from[kv_head * half + i];
      dot += q[i] * static_cast<float>(both & 15) + q[half + i] * static_cast<float>(both >> 4);
    }
    dot = WarpSum(dot);
    const float v = Softcap(a.scale * (range.scale * dot + range.zero * q_sum), a.softcap);
    if (Lane() == 0) a.logits[row_head * a.stride + t] = v;
    part = Join(part, {v, 1});
  }
  if (Lane() == 0) of_warps[Warp()] = part;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) part = Join(part, of_warps[w]);
  parts[(int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * a.n_heads + head] = part;
}

bool IsWide(const IndexScoreArgs& a) {
  const bool words = a.dk == 32 || a.dk == 64 || a.dk == 96 || a.dk == 128 || a.dk == 256;
  return words && AreMultiples(16, a.index.base, a.index.row_bytes);
}

// Blocks of a row side by side, and what each of them makes of a head.
int64_t WalkersOf(const IndexScoreArgs& a, const Device& device) {
  if (!IsWide(a)) return std::min<int64_t>(CeilDiv(a.stride, kWarps), 2 * device.sm_count);
  return std::min(CeilDiv(a.stride, int64_t{kTile} * TilingOf(a).sides),
                  3 * int64_t{device.sm_count});
}
int64_t PartsOf(const IndexScoreArgs& a, const Device& device) {
  return WalkersOf(a, device) * (IsWide(a) ? TilingOf(a).sides : 1);
}

template <int kWords>
void LaunchIndexScore(const IndexScoreArgs& args, Part* parts, const Launch& launch) {
  const Tiling tiling = TilingOf(args);
  const auto shared = static_cast<size_t>(tiling.per * kDigits * kColumns * kPitch<kWords>);
  const dim3 grid(static_cast<uint32_t>(WalkersOf(args, *launch.device)),
                  static_cast<uint32_t>(CeilDiv(tiling.items, tiling.per)),
                  static_cast<uint32_t>(args.n_rows));
  AllowShared(IndexScoreKernel<kWords>, shared);
  LaunchKernel(IndexScoreKernel<kWords>, launch, grid, kThreads, shared, args, parts);
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
  const int64_t most = std::min(kMostKeyBytes / k.head_bytes, kMostQueryBytes / query_bytes);
  const int64_t heads = a.lists > 1 ? 1 : std::clamp<int64_t>(most, 1, a.kv.n_kv_heads);
  const int64_t scale_bytes = k.scales == nullptr ? 0 : k.scale_head_bytes;
  const auto piece = [&](const std::byte* base, int64_t head_bytes) {
    return PieceOf(AddressBits(base) | AddressBits(k.row_bytes) | AddressBits(heads * head_bytes));
  };
  return {static_cast<int>(heads), static_cast<int>(heads * k.head_bytes),
          static_cast<int>(heads * scale_bytes), piece(k.base, k.head_bytes),
          // They lie behind the values in shared memory.
          std::min(piece(k.scales, scale_bytes), PieceOf(AddressBits(heads * k.head_bytes)))};
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

// Grid: x walks tokens, y groups of piece.heads KV heads, z rows. changes [rows, gridDim.x, heads].
// Shared memory: the queries of the KV heads, f32 [heads, dk]; Change [warps, heads]; two pieces
// for each warp.
template <typename T>
__global__ void __launch_bounds__(kThreads)
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
  for (int at = static_cast<int>(threadIdx.x); at < heads * dk; at += kThreads) {
    q[at] = a.q[first_head * dk + at];
  }
  for (int h = Lane(); h < heads; h += 32) found[h] = {0, 0};
  __syncthreads();
  for (int side = 0; i < tokens.size(); i += step, side ^= 1) {
    copy(i + step, side ^ 1);
    CopyAsyncWait<1>();
    __syncwarp();
    const std::byte* const own_keys = pieces + side * pitch;
    // A lane has a head of those from `begin` on. What stood in its place comes while the dots are
    // made, for all of them at once.
    float* const logits = a.logits + first_head * a.stride + tokens.At(i);
    int begin = 0;
    float own = 0;
    const auto own_logit = [&] { return logits + int64_t{begin + Lane()} * a.stride; };
    const auto old_logit = [&] { return begin + Lane() < heads ? *own_logit() : 0; };
    float old = old_logit();
    for (int g = 0; g < kv_heads; ++g) {
      const int first = g * group;
      const std::byte* const k = own_keys + g * head_bytes;
      const int64_t to_scales = piece.values + g * (scale_bytes - head_bytes);
      for (int four = first; four < first + group; four += 4) {
        const int end = min(four + 4, first + group);
        float dots[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (int d = Lane(); d < dk; d += 32) {
          const float v = HeadValue<T>(k, to_scales, d);
#pragma unroll
          for (int h = 0; h < 4; ++h) dots[h] += v * q[min(four + h, heads - 1) * dk + d];
        }
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float dot = WarpSum(dots[h]);
          if (begin + Lane() == four + h && four + h < end) own = dot;
        }
        if (end < heads && end + 4 <= begin + 32) continue;
        const int h = begin + Lane();
        if (h < end) {
          const float w = Softcap(a.scale * own, a.softcap);
          const float lse = a.lse[first_head + h];
          found[h].before += Exp2((old - lse) * kLog2E);
          found[h].after += Exp2((w - lse) * kLog2E);
          *own_logit() = w;
        }
        begin = end;
        old = old_logit();
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

// lse [rows, heads], by changes [rows, n_parts, heads]. Grid: x heads, y rows; a warp each.
__global__ void ChangeKernel(const Change* changes, int n_parts, float* lse) {
  GridTrigger();
  GridWait();
  const auto heads = static_cast<int>(gridDim.x);
  const Change* own = changes + int64_t{blockIdx.y} * n_parts * heads + blockIdx.x;
  float before = 0;
  float after = 0;
  for (int p = Lane(); p < n_parts; p += 32) {
    before += own[int64_t{p} * heads].before;
    after += own[int64_t{p} * heads].after;
  }
  before = WarpSum(before);
  after = WarpSum(after);
  if (Lane() == 0) {
    lse[blockIdx.y * heads + blockIdx.x] += logf(fmaxf(0.0f, 1 - before) + after);
  }
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

size_t IndexScoreScratch(const IndexScoreArgs& args, const Device& device) {
  return sizeof(Part) * static_cast<size_t>(args.n_rows * PartsOf(args, device) * args.n_heads);
}

void IndexScore(const IndexScoreArgs& args, const Launch& launch) {
  if (args.n_rows == 0 || args.stride == 0) return;
  auto* parts = reinterpret_cast<Part*>(launch.scratch);
  if (!IsWide(args)) {
    const dim3 grid(static_cast<uint32_t>(WalkersOf(args, *launch.device)),
                    static_cast<uint32_t>(args.n_heads), static_cast<uint32_t>(args.n_rows));
    LaunchKernel(IndexScoreAny, launch, grid, kThreads, 0, args, parts);
  } else if (args.dk == 32) {
    LaunchIndexScore<1>(args, parts, launch);
  } else if (args.dk == 64) {
    LaunchIndexScore<2>(args, parts, launch);
  } else if (args.dk == 96) {
    LaunchIndexScore<3>(args, parts, launch);
  } else if (args.dk == 128) {
    LaunchIndexScore<4>(args, parts, launch);
  } else {
    LaunchIndexScore<8>(args, parts, launch);
  }
  LaunchKernel(LseKernel, launch, HeadsOfRows(args.n_heads, args.n_rows), 32, 0, parts,
               static_cast<int>(PartsOf(args, *launch.device)), args.lse);
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
  WithKvType(args.kv.k.dtype, [&](auto t) {
    AllowShared(RescoreKernel<decltype(t)>, shared);
    LaunchKernel(RescoreKernel<decltype(t)>, launch, grid, kThreads, shared, args, piece, changes);
  });
  LaunchKernel(ChangeKernel, launch, HeadsOfRows(args.n_heads, args.n_rows), 32, 0, changes,
               static_cast<int>(n_parts), args.lse);
}

}  // namespace omnikv::cuda
