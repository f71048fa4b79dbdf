// Attention of many rows on tensor cores (mma m16n8k16), in the manner of FlashAttention-2. Queries
// and softmax weights are rounded to the type of K/V (f16 of blocks); logits and sums are f32.
//
// A block takes a tile of queries of one KV head and walks the tokens that they read, kTokens at a
// time, the next K/V on their way while these are multiplied. Where there are fewer tiles than the
// card holds blocks (a short prompt after a long context), the tokens of a tile are dealt to
// several blocks, and a second kernel merges their parts.
#include <type_traits>

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;  // so that one block's softmax overlaps another's products
constexpr float kInf = __builtin_huge_valf();
constexpr float kLn2 = 0.693147181f;

// What a block holds, for heads of kD values. A warp's fragments of K and V serve all of its kM row
// tiles: with two, shared memory is read at about half of its speed.
template <int kD>
struct Shape {
  static constexpr int kM = kD <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kM;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kTokens = kD <= 128 ? 64 : 32;
  static constexpr int kChunks = kD / 8;  // of 16 bytes, in a row
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // chunks swizzled
  static constexpr int kRowBytes = 2 * kD;
  static constexpr int kTileBytes = kTokens * kRowBytes;  // of K or of V
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kSharedBytes = kQueryBytes + 4 * kTileBytes;
  static_assert(kChunks % kGroup == 0 && kTokens * kGroup % kThreads == 0);
};

// Chunk c of a row in shared memory lies at chunk c ^ Swizzle(row) of it: the same chunk of eight
// consecutive rows, which ldmatrix reads at once, then lies in different banks. It is less than
// kGroup and depends on row % 8 alone.
template <int kD>
__device__ __forceinline__ int Swizzle(int row) {
  constexpr int kGroup = Shape<kD>::kGroup;
  return row % 8 / (8 / kGroup);
}

// The same value, but not one that the compiler knows not to change: what follows from it is then
// computed where it is used, where it would otherwise be kept in registers all through a loop.
__device__ __forceinline__ int Fresh(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// The queries that a block takes. Query i of a sequence is head i % group of its row i / group, so
// that a block's queries share their K/V and cover few positions.
struct Queries {
  int first;  // of this block
  int n;      // of the sequence
  int group;  // heads that share a KV head
  int pos;    // position of the sequence's first row
  int n_heads;
  int64_t start;  // where query 0 stands in [n_rows, n_heads]

  __device__ int Pos(int i) const {
    return pos + static_cast<int>(static_cast<unsigned>(i) / static_cast<unsigned>(group));
  }
  __device__ int64_t RowHead(int i) const {
    const int row = Pos(i) - pos;
    return start + int64_t{row} * n_heads + (i - row * group);
  }
};

// Tokens of a segment: a row at position p reads [Low(p), High(p)).
struct TokenBounds {
  int begin, end, window;

  __device__ int Low(int p) const { return max(begin, p + 1 - window); }
  __device__ int High(int p) const { return min(end, p + 1); }
};

// Where blocks that share a tile of queries leave their parts.
struct Parts {
  int n;            // at most, for each tile; 1: none, outputs are written at once
  float* o;         // [n, n_rows * n_heads, kD], not divided by the sum
  float2* sums;     // [n, n_rows * n_heads]: (largest logit, sum of 2^(logit - largest)), base 2
  int32_t n_heads;  // query heads that take part
};

// Parts that the tokens of a sequence are dealt to.
__device__ __forceinline__ int PartsOf(int kv_len, int at_most) {
  constexpr int kLeastTokens = 1024;
  return max(1, min(kv_len / kLeastTokens, at_most));
}

template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = __floats2half2_rn(low, high);
  } else {
    pair = __floats2bfloat162_rn(low, high);
  }
  return *reinterpret_cast<uint32_t*>(&pair);
}

// Four 8 x 8 matrices; lanes 8i to 8i + 7 name the rows of matrix i. Lane l gets values 2 * (l % 4)
// and the next of row l / 4 of each or, transposed, rows 2 * (l % 4) and the next of column l / 4.
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c[16, 8] += a[16, 16] b[16, 8]. Lane l holds of c rows l / 4 (c[0], c[1]) and l / 4 + 8 (c[2],
// c[3]), columns 2 * (l % 4) and the next.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Stores the block's queries, rounded; past the sequence's last, zeros.
template <typename T, int kD>
__device__ __forceinline__ void StoreQueries(const float* q, const Queries& queries,
                                             std::byte* shared) {
  using S = Shape<kD>;
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x); at < S::kRows * S::kChunks; at += kThreads) {
    const int row = at / S::kChunks;
    const int chunk = at % S::kChunks;
    const int i = queries.first + row;
    float4 v[2] = {};
    if (i < queries.n) {
      const float* from = q + queries.RowHead(i) * kD + chunk * 8;
      v[0] = reinterpret_cast<const float4*>(from)[0];
      v[1] = reinterpret_cast<const float4*>(from)[1];
    }
    alignas(16) const T rounded[8] = {FromF32<T>(v[0].x), FromF32<T>(v[0].y), FromF32<T>(v[0].z),
                                      FromF32<T>(v[0].w), FromF32<T>(v[1].x), FromF32<T>(v[1].y),
                                      FromF32<T>(v[1].z), FromF32<T>(v[1].w)};
    *reinterpret_cast<uint4*>(shared + (row * S::kChunks + (chunk ^ Swizzle<kD>(row))) * 16) =
        *reinterpret_cast<const uint4*>(rounded);
  }
}

// Starts to copy K and V of tokens [first, first + kTokens) to `tile` (K, then V); zeros for tokens
// outside [low, high), which may lie nowhere. `k` and `v` are the head's of row 0.
template <int kD>
__device__ __forceinline__ void FetchTile(const KvView& kv, int32_t table_off, const std::byte* k,
                                          const std::byte* v, int first, int low, int high,
                                          std::byte* tile) {
  using S = Shape<kD>;
  constexpr int kRowsAtOnce = kThreads / S::kGroup;  // a multiple of 8
  const int row = static_cast<int>(threadIdx.x) / S::kGroup;
  const int chunk = static_cast<int>(threadIdx.x) % S::kGroup;
  std::byte* const to = tile + row * S::kRowBytes + (chunk ^ Swizzle<kD>(row)) * 16;
  const auto row_of = [&](int t) {
    const auto block_tokens = static_cast<unsigned>(kv.block_tokens);
    const unsigned entry = static_cast<unsigned>(t) / block_tokens;
    const int64_t block = kv.block_table[int64_t{table_off} + entry];
    return (block * kv.BlockRows() + static_cast<unsigned>(t) % block_tokens) * kv.k.row_bytes;
  };
  if (kv.block_tokens % S::kTokens == 0 && first >= low && first + S::kTokens <= high) {
    const int64_t from = row_of(first) + row * kv.k.row_bytes + chunk * 16;
#pragma unroll
    for (int r = 0; r < S::kTokens; r += kRowsAtOnce) {
      const int64_t from_row = from + r * kv.k.row_bytes;
#pragma unroll
      for (int c = 0; c < S::kChunks; c += S::kGroup) {
        std::byte* const at = to + r * S::kRowBytes + c * 16;
        CopyAsync16(at, k + from_row + c * 16);
        CopyAsync16(at + S::kTileBytes, v + from_row + c * 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < S::kTokens; r += kRowsAtOnce) {
    const int t = first + row + r;
    const bool valid = t >= low && t < high;
    const int64_t from_row = (valid ? row_of(t) : 0) + chunk * 16;
#pragma unroll 1
    for (int c = 0; c < S::kChunks; c += S::kGroup) {
      std::byte* const at = to + r * S::kRowBytes + c * 16;
      CopyAsync16(at, k + from_row + c * 16, valid);
      CopyAsync16(at + S::kTileBytes, v + from_row + c * 16, valid);
    }
  }
}

// Eight values of a head in blocks, from value i on, a multiple of 8.
__device__ __forceinline__ void LoadEight(const KvPlane& plane, const std::byte* head, int place,
                                          int i, __half (&values)[8]) {
  uint2 bytes;  // int8
  if (plane.dtype == DType::kQ8_0) {
    bytes = *reinterpret_cast<const uint2*>(head + i);
  } else {
    const uint2 pairs = *reinterpret_cast<const uint2*>(head + i / 32 * 16 + i % 16);
    const int shift = i % 32 / 16 * 4;
    bytes = {Q4Bytes(pairs.x >> shift), Q4Bytes(pairs.y >> shift)};
  }
  const auto* const q = reinterpret_cast<const int8_t*>(&bytes);
  const float scale =
      ToF32(*reinterpret_cast<const __half*>(head + plane.ToScales(place) + i / 32 * 2));
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = FromF32<__half>(ToF32(q[j]) * scale);
}

// FetchTile of values in blocks, rounded to f16: there after the next barrier.
template <int kD>
__device__ __forceinline__ void FetchBlocks(const KvView& kv, int place, int32_t table_off,
                                            int first, int low, int high, std::byte* tile) {
  using S = Shape<kD>;
  constexpr int kRowsAtOnce = kThreads / S::kGroup;  // a multiple of 8
  const int row = static_cast<int>(threadIdx.x) / S::kGroup;
  const int chunk = static_cast<int>(threadIdx.x) % S::kGroup;
  std::byte* const to = tile + row * S::kRowBytes + (chunk ^ Swizzle<kD>(row)) * 16;
#pragma unroll 1
  for (int r = 0; r < S::kTokens; r += kRowsAtOnce) {
    const int t = first + row + r;
    const bool valid = t >= low && t < high;
    const int64_t at = valid ? kv.RowIndex(table_off, t) : 0;
#pragma unroll
    for (int c = 0; c < S::kChunks; c += S::kGroup) {
      const int i = (chunk + c) * 8;  // the chunk's first value
#pragma unroll
      for (int is_v = 0; is_v < 2; ++is_v) {
        const KvPlane& plane = is_v != 0 ? kv.v : kv.k;
        const std::byte* const head = plane.Head(at, place);
        __half values[8] = {};
        if (valid) LoadEight(plane, head, place, i, values);
        uint4 packed;
        memcpy(&packed, values, sizeof(packed));
        *reinterpret_cast<uint4*>(to + r * S::kRowBytes + c * 16 + is_v * S::kTileBytes) = packed;
      }
    }
  }
}

// A warp's queries: kM tiles of 16, of which a lane holds rows lane / 4 and lane / 4 + 8.
template <typename T, int kD>
struct WarpRows {
  using S = Shape<kD>;

  float o[S::kM][kD / 8][4] = {};
  float top[S::kM][2];       // largest logit so far, before `factor`
  float sum[S::kM][2] = {};  // of this lane's columns only

  __device__ WarpRows() {
#pragma unroll
    for (int m = 0; m < S::kM; ++m) top[m][0] = top[m][1] = -kInf;
  }

  // s = q k for the tokens of a tile. `q`, `k`: the warp's queries and the tile in shared memory.
  __device__ __forceinline__ void Logits(uint32_t q, uint32_t k, int lane,
                                         float (&s)[S::kM][S::kTokens / 8][4]) const {
    // a: rows 0-7, 8-15 of values 0-7, then of values 8-15. b: values 0-7, 8-15 of tokens 0-7, then
    // of tokens 8-15. Rows named by a lane are lane % 8 and multiples of 8 more.
    const int swizzle = Fresh(Swizzle<kD>(lane));
    const uint32_t q_lane = q + static_cast<uint32_t>(lane % 16 * S::kRowBytes);
    const uint32_t k_lane = k + static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * S::kRowBytes);
    const int q_chunk = (lane / 16) ^ swizzle;
    const int k_chunk = (lane / 8 % 2) ^ swizzle;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < S::kTokens / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
      }
    }
#pragma unroll
    for (int d = 0; d < kD / 16; ++d) {
      const uint32_t q_at = q_lane + static_cast<uint32_t>((q_chunk ^ (2 * d)) * 16);
      const uint32_t k_at = k_lane + static_cast<uint32_t>((k_chunk ^ (2 * d)) * 16);
      uint32_t a[S::kM][4];
#pragma unroll
      for (int m = 0; m < S::kM; ++m) LoadMatrices(a[m], q_at + m * 16 * S::kRowBytes);
#pragma unroll
      for (int n = 0; n < S::kTokens / 16; ++n) {
        uint32_t b[4];
        LoadMatrices(b, k_at + n * 16 * S::kRowBytes);
#pragma unroll
        for (int m = 0; m < S::kM; ++m) {
          MultiplyAdd<T>(s[m][2 * n], a[m], b[0], b[1]);
          MultiplyAdd<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Turns logits into weights 2^(factor * (s - top)), with new tops; rescales o and sum to them.
  __device__ __forceinline__ void Softmax(float factor, float (&s)[S::kM][S::kTokens / 8][4]) {
    float rescale[S::kM][2];
    bool changed = false;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = top[m][half];
#pragma unroll
        for (int n = 0; n < S::kTokens / 8; ++n) {
          best = fmaxf(best, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
        // Where nothing was read yet, any finite number: all weights are 0. Products rounded by
        // themselves, so that a top that stays rescales by exactly 1.
        const float offset = best == -kInf ? 0.0f : __fmul_rn(best, factor);
        rescale[m][half] = Exp2(__fmul_rn(top[m][half], factor) - offset);
        changed |= best != top[m][half];
        top[m][half] = best;
        float weights = 0;
#pragma unroll
        for (int n = 0; n < S::kTokens / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[m][n][e] = Exp2(fmaf(s[m][n][e], factor, -offset));
            weights += s[m][n][e];
          }
        }
        sum[m][half] = sum[m][half] * rescale[m][half] + weights;
      }
    }
    if (!__any_sync(kAllLanes, changed)) return;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][n][e] *= rescale[m][e / 2];
      }
    }
  }

  // o += p v for the tokens of a tile: two adjacent fragments of weights are one of 16 tokens.
  __device__ __forceinline__ void AddValues(const float (&p)[S::kM][S::kTokens / 8][4], uint32_t v,
                                            int lane) {
    // Transposed: tokens 0-7, 8-15 of values 0-7, then of values 8-15.
    const uint32_t v_lane = v + static_cast<uint32_t>(lane % 16 * S::kRowBytes);
    const int v_chunk = (lane / 16) ^ Fresh(Swizzle<kD>(lane));
#pragma unroll
    for (int t = 0; t < S::kTokens / 16; ++t) {
      uint32_t a[S::kM][4];
#pragma unroll
      for (int m = 0; m < S::kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = p[m][2 * t + i / 2];
          a[m][i] = Pack<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kD / 16; ++d) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, v_lane + static_cast<uint32_t>((v_chunk ^ (2 * d)) * 16 + t * 16 * S::kRowBytes));
#pragma unroll
        for (int m = 0; m < S::kM; ++m) {
          MultiplyAdd<T>(o[m][2 * d], a[m], b[0], b[1]);
          MultiplyAdd<T>(o[m][2 * d + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

// -inf for the tokens (from `first` on) that a query (from `query` on) does not read.
template <int kM, int kN>
__device__ __forceinline__ void Mask(const TokenBounds& bounds, const Queries& queries, int query,
                                     int first, int lane, float (&s)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = queries.Pos(query + m * 16 + half * 8 + lane / 4);
      const int low = bounds.Low(p) - first - lane % 4 * 2;
      const int high = bounds.High(p) - first - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < low || n * 8 + e >= high) s[m][n][2 * half + e] = -kInf;
        }
      }
    }
  }
}

// s = tanh(v) where e^(2v) = 2^(factor * s), to about 1e-7.
template <int kM, int kN>
__device__ __forceinline__ void Cap(float factor, float (&s)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = 1.0f - __fdividef(2.0f, 1.0f + Exp2(factor * s[m][n][e]));
      }
    }
  }
}

// Grid: (KV heads that take part, fastest, x tiles of queries; parts). The last tiles of a
// sequence, which read most, come first. T: what is multiplied; kBlocks: K/V are in blocks.
template <typename T, int kD, bool kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    AttendTile(const __grid_constant__ AttendArgs a, int n_tiles, const Parts parts) {
  using S = Shape<kD>;
  extern __shared__ __align__(1024) std::byte shared[];
  GridTrigger();
  GridWait();
  const int n_kv_heads = a.KvHeads();
  const int kv_head = a.KvHead(static_cast<int>(blockIdx.x) % n_kv_heads);
  const int place = a.kv.Place(kv_head);
  const int group = a.n_heads / a.kv.n_kv_heads;
  int tile = n_tiles - 1 - static_cast<int>(blockIdx.x) / n_kv_heads;
  int seq = 0;
  for (;; ++seq) {
    if (seq == a.n_seqs) return;
    const int tiles = (a.seqs[seq].q_len * group + S::kRows - 1) / S::kRows;
    if (tile < tiles) break;
    tile -= tiles;
  }
  const SeqMeta meta = a.seqs[seq];
  const int n_parts = PartsOf(meta.kv_len, parts.n);
  const int part = static_cast<int>(blockIdx.y);
  if (part >= n_parts) return;

  const Queries queries{.first = tile * S::kRows,
                        .n = meta.q_len * group,
                        .group = group,
                        .pos = a.rows[meta.q_begin].pos,
                        .n_heads = a.n_heads,
                        .start = int64_t{meta.q_begin} * a.n_heads + kv_head * group};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int query = queries.first + warp * S::kWarpRows;  // the warp's first
  const int first_pos = queries.Pos(queries.first);
  const int last_pos = queries.Pos(min(queries.first + S::kRows, queries.n) - 1);
  const int warp_first_pos = queries.Pos(query);
  const int warp_last_pos = queries.Pos(min(query + S::kWarpRows, queries.n) - 1);
  const std::byte* const k = a.kv.k.Head(0, place);
  const std::byte* const v = a.kv.v.Head(0, place);
  const uint32_t warp_queries = SharedAddress(shared) + warp * S::kWarpRows * S::kRowBytes;
  std::byte* const stages = shared + S::kQueryBytes;  // two, of K and V each

  // Logits are kept in units of `factor` to the base 2; capped ones as their tanh.
  const bool capped = a.softcap > 0;
  const float factor = (capped ? a.softcap : a.scale) * kLog2E;
  const float cap_factor = capped ? 2 * kLog2E * a.scale / a.softcap : 0;

  WarpRows<T, kD> rows;
  const float* stored = nullptr;
  for (int i = 0; i < a.plan.n_segments; ++i) {
    const PlanSegment& segment = a.plan.segments[i];
    const bool in_memory = segment.bounds != nullptr;
    const TokenBounds bounds{max(0, in_memory ? segment.bounds[2 * seq] : segment.begin),
                             in_memory ? segment.bounds[2 * seq + 1] : segment.end,
                             segment.window > 0 ? segment.window : kToEnd};
    const int low = bounds.Low(first_pos);
    const int high = bounds.High(last_pos);
    if (low >= high) continue;
    const int first_tile = low / S::kTokens;
    const int n = (high - 1) / S::kTokens + 1 - first_tile;
    const int begin = first_tile + n * part / n_parts;
    const int end = first_tile + n * (part + 1) / n_parts;
    if (begin == end) continue;
    // Tiles of tokens that some of the warp's queries read, and those that all of them read whole.
    const int some_begin = bounds.Low(warp_first_pos) / S::kTokens;
    const int some_end =
        query < queries.n ? (bounds.High(warp_last_pos) - 1) / S::kTokens + 1 : some_begin;
    const int whole_begin = (bounds.Low(warp_last_pos) + S::kTokens - 1) / S::kTokens;
    const int whole_end = bounds.High(warp_first_pos) / S::kTokens;

    __syncthreads();  // the segment before is done with shared memory
    const auto fetch = [&](int tile, std::byte* to) {
      if constexpr (kBlocks) {
        FetchBlocks<kD>(a.kv, place, meta.table_off, tile * S::kTokens, low, high, to);
      } else {
        FetchTile<kD>(a.kv, meta.table_off, k, v, tile * S::kTokens, low, high, to);
      }
    };
    fetch(begin, stages);
    CopyAsyncCommit();
    const float* q = segment.q != nullptr ? segment.q : a.q;
    if (q != stored) StoreQueries<T, kD>(q, queries, shared);
    stored = q;
    for (int t = begin; t < end; ++t) {
      CopyAsyncWait<0>();
      __syncthreads();  // tile t is there, and the one before it is no longer read
      const int stage = (t - begin) % 2;
      if (t + 1 < end) {
        fetch(t + 1, stages + (stage ^ 1) * 2 * S::kTileBytes);
      }
      CopyAsyncCommit();
      if (t < some_begin || t >= some_end) continue;
      const uint32_t k_tile = SharedAddress(stages) + stage * 2 * S::kTileBytes;
      float s[S::kM][S::kTokens / 8][4];
      rows.Logits(warp_queries, k_tile, lane, s);
      if (capped) Cap(cap_factor, s);
      if (t < whole_begin || t >= whole_end) {
        Mask(bounds, queries, Fresh(query), t * S::kTokens, lane, s);
      }
      rows.Softmax(factor, s);
      rows.AddValues(s, k_tile + S::kTileBytes, lane);
    }
  }

#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[m][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float top = rows.top[m][half] * factor;
      const int i = query + m * 16 + half * 8 + lane / 4;
      if (i >= queries.n) continue;
      const int64_t at = queries.RowHead(i);
      float* o = a.o + at * kD;
      float share = sum > 0 ? 1 / sum : 0;
      if (n_parts > 1) {
        const int64_t part_at = (int64_t{part} * a.n_rows + at / a.n_heads) * parts.n_heads +
                                a.Number(static_cast<int32_t>(at % a.n_heads));
        o = parts.o + part_at * kD;
        share = 1;
        if (lane % 4 == 0) parts.sums[part_at] = {top, sum};
      } else if (a.lse != nullptr && lane % 4 == 0) {
        a.lse[at] = sum > 0 ? (top + log2f(sum)) * kLn2 : -kInf;
      }
#pragma unroll
      for (int d = 0; d < kD / 8; ++d) {
        *reinterpret_cast<float2*>(o + d * 8 + lane % 4 * 2) = {rows.o[m][d][2 * half] * share,
                                                                rows.o[m][d][2 * half + 1] * share};
      }
    }
  }
}

// Merges the parts of each (row, head): a warp each.
__global__ void __launch_bounds__(kThreads)
    MergeParts(const __grid_constant__ AttendArgs a, const Parts parts) {
  GridTrigger();
  GridWait();
  const int64_t n = int64_t{a.n_rows} * parts.n_heads;
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (at >= n) return;
  const int64_t row = at / parts.n_heads;
  const int64_t row_head = row * a.n_heads + a.Head(static_cast<int32_t>(at % parts.n_heads));
  const int n_parts = PartsOf(a.seqs[a.rows[row].seq].kv_len, parts.n);
  if (n_parts == 1) return;
  float top = -kInf;
  for (int p = 0; p < n_parts; ++p) top = fmaxf(top, parts.sums[p * n + at].x);
  float sum = 0;
  for (int p = 0; p < n_parts && top > -kInf; ++p) {
    sum += Exp2(parts.sums[p * n + at].x - top) * parts.sums[p * n + at].y;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int d = lane; d < a.kv.dv; d += 32) {
    float o = 0;
    for (int p = 0; p < n_parts && sum > 0; ++p) {
      o += Exp2(parts.sums[p * n + at].x - top) * parts.o[(p * n + at) * a.kv.dv + d];
    }
    a.o[row_head * a.kv.dv + d] = sum > 0 ? o / sum : 0;
  }
  if (a.lse != nullptr && lane == 0) a.lse[row_head] = sum > 0 ? (top + log2f(sum)) * kLn2 : -kInf;
}

// Calls fn(std::integral_constant<int, kD>) for the heads of `kv`; false where none is compiled.
template <typename Fn>
bool WithHeadDim(const KvView& kv, Fn fn) {
  if (kv.dk != kv.dv) return false;
  switch (kv.dk) {
    case 64:
      fn(std::integral_constant<int, 64>{});
      return true;
    case 80:
      fn(std::integral_constant<int, 80>{});
      return true;
    case 96:
      fn(std::integral_constant<int, 96>{});
      return true;
    case 128:
      fn(std::integral_constant<int, 128>{});
      return true;
    case 256:
      fn(std::integral_constant<int, 256>{});
      return true;
    default:
      return false;
  }
}

// Tiles of queries of one KV head, at most: sequences end anywhere in their last tile.
int64_t TilesOf(const AttendArgs& a, int rows) {
  const int64_t queries = int64_t{a.n_rows} * (a.n_heads / a.kv.n_kv_heads);
  return (queries + int64_t{a.BusySeqs()} * (rows - 1)) / rows;
}

int PartsOnCard(int64_t blocks, const Device& device) {
  return PartsFor(blocks, int64_t{kBlocksPerSm} * device.sm_count);
}

bool Aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

int PartsFor(int64_t blocks, int64_t slots) {
  const auto time = [&](int parts) {
    return static_cast<double>(CeilDiv(blocks * parts, slots)) / parts;
  };
  int best = 1;
  for (int parts = 2; parts <= kMaxPromptParts && blocks * parts <= 3 * slots; ++parts) {
    if (time(parts) < 0.95 * time(best)) best = parts;
  }
  return best;
}

bool CanAttendPrefill(const AttendArgs& args, const Device& device) {
  const KvView& kv = args.kv;
  size_t shared = 0;
  const bool compiled =
      WithHeadDim(kv, [&](auto d) { shared = Shape<decltype(d)::value>::kSharedBytes; });
  if (!compiled || shared > device.shared_per_block || device.arch < 80) return false;
  if (kv.k.dtype == DType::kF32) return false;
  if (kv.v.dtype != kv.k.dtype || kv.v.row_bytes != kv.k.row_bytes) return false;
  if (args.o == nullptr || args.score != ScoreKind::kNone || args.scale <= 0) return false;
  if (args.lse_in != nullptr) return false;
  for (int32_t i = 0; i < args.plan.n_segments; ++i) {
    const PlanSegment& segment = args.plan.segments[static_cast<size_t>(i)];
    if (segment.kind != SegmentKind::kRange || !Aligned(segment.q)) return false;
  }
  // Everything is read 16 bytes at a time.
  for (int64_t bytes : {kv.k.row_bytes, kv.k.head_bytes, kv.v.head_bytes}) {
    if (bytes % 16 != 0) return false;
  }
  return Aligned(kv.k.base) && Aligned(kv.v.base) && Aligned(args.q) && Aligned(args.o);
}

size_t AttendPrefillScratch(const AttendArgs& args, const Device& device) {
  size_t bytes = 0;
  WithHeadDim(args.kv, [&](auto d) {
    const int64_t blocks = TilesOf(args, Shape<decltype(d)::value>::kRows) * args.KvHeads();
    const int parts = PartsOnCard(blocks, device);
    const auto values = static_cast<size_t>(args.n_rows) * static_cast<size_t>(args.Heads()) *
                        static_cast<size_t>(args.kv.dv + 2);
    if (parts > 1) bytes = static_cast<size_t>(parts) * values * sizeof(float);
  });
  return bytes;
}

void AttendPrefill(const AttendArgs& args, const Launch& launch) {
  const int32_t n_heads = args.Heads();
  const int64_t row_heads = int64_t{args.n_rows} * n_heads;
  if (row_heads == 0) return;
  WithHeadDim(args.kv, [&](auto d) {
    constexpr int kD = decltype(d)::value;
    using S = Shape<kD>;
    const int64_t tiles = TilesOf(args, S::kRows);
    const int64_t blocks = tiles * args.KvHeads();
    const int n_parts = PartsOnCard(blocks, *launch.device);
    auto* o = reinterpret_cast<float*>(launch.scratch);
    const Parts parts{n_parts, o, reinterpret_cast<float2*>(o + n_parts * row_heads * kD), n_heads};
    const auto run = [&](auto* kernel) {
      AllowShared(kernel, S::kSharedBytes);
      CheckLaunch(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared),
                  "shared memory");
      LaunchKernel(kernel, launch,
                   dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(n_parts)), kThreads,
                   S::kSharedBytes, args, static_cast<int>(tiles), parts);
    };
    if (InBlocks(args.kv.k.dtype)) {
      if constexpr (kD % int{kBlockValues} == 0) run(AttendTile<__half, kD, true>);
    } else {
      args.kv.k.dtype == DType::kF16 ? run(AttendTile<__half, kD, false>)
                                     : run(AttendTile<__nv_bfloat16, kD, false>);
    }
    if (n_parts == 1) return;
    LaunchKernel(MergeParts, launch, static_cast<unsigned>(CeilDiv(row_heads, kWarps)), kThreads, 0,
                 args, parts);
  });
}

}  // namespace omnikv::cuda
