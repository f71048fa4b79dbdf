// Logits by an index of K in 4 bits, of all tokens, of units of them or of listed ones: IndexScore.
// It is bound by memory.
//
// A warp takes a KV head of 16 tokens at a time, with up to eight of its queries: S [16 tokens, 8
// queries] = codes [16, dk] Q^T [dk, 8] on tensor cores, in whole numbers, without an error.
// Queries are whole numbers of 23 bits, in three parts of 8 bits, which a lane holds in registers.
// In a ring with up to four queries per KV head columns 4 to 7 have other digits, and a warp takes
// twice as many tokens at a time. A lane has as many neighbouring bytes of a token's codes as three
// others, in an order of values that makes them operands as they lie. The warps of a block share
// the KV heads of the tokens among them, so rows are read whole.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/kernels/hopper.cuh"
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

// The sum with two more values, of which the second may be -infinity. The top seldom rises.
__device__ __forceinline__ void Add(Part& part, float v, float w) {
  const float most = fmaxf(v, w);
  if (most > part.top) {
    part.sum *= Exp2((part.top - most) * kLog2E);
    part.top = most;
  }
  const float top = part.top * kLog2E;
  part.sum += Exp2(fmaf(v, kLog2E, -top)) + Exp2(fmaf(w, kLog2E, -top));
}

// lse [rows, heads] of parts [rows, n_parts, heads]. Grid: x heads, y rows.
__global__ void __launch_bounds__(kThreads) LseKernel(const Part* parts, int n_parts, float* lse) {
  __shared__ Part of_warps[kWarps];
  GridTrigger();
  GridWait();
  const auto heads = static_cast<int>(gridDim.x);
  const Part* own = parts + int64_t{blockIdx.y} * n_parts * heads + blockIdx.x;
  Part all = {-INFINITY, 0};
  for (int p = static_cast<int>(threadIdx.x); p < n_parts; p += kThreads) {
    all = Join(all, own[int64_t{p} * heads]);
  }
  all = JoinLanes(all, 1, 32);
  if (Lane() == 0) of_warps[Warp()] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) all = Join(all, of_warps[w]);
  lse[blockIdx.y * heads + blockIdx.x] = all.top + logf(all.sum);
}

// --- Tiles.

constexpr int kTile = 16;    // tokens
constexpr int kColumns = 8;  // queries
constexpr int kDigits = 3;   // of a value of a query, in base 256: from -128 to 127

// What gets a logit.
enum class Scored { kTokens, kUnits, kListed };

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

// What a lane has of a tile: its codes of tokens g and g + 8, eight in a word.
template <int kWords>
struct TileCodes {
  uint32_t v[2][kWords];
};

// c [16, 8] += a [16, 32] b [32, 8], codes times digits. Lanes hold c, and as many bytes of a and b
// as of 16 bits, as in MultiplyAdd.
__device__ __forceinline__ void MultiplyAddCodes(int32_t (&c)[4], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's queries: an octet of a KV head's, `item` of the row. Lane 4 g + t multiplies by query g,
// and gets the logits of queries 2 t and 2 t + 1. Paired, an octet has four queries: columns g and
// g + 4 are digits of the same one, and of two tiles, a lane gets the logits of tile t / 2.
template <int kWords, bool kPaired>
class Queries {
  static constexpr int kOwn = kPaired ? 4 : kColumns;  // queries
  static constexpr int kSums = kPaired ? 2 : kDigits;  // of products with a tile

 public:
  static constexpr int kTiles = kPaired ? 2 : 1;  // at a time

  __device__ __forceinline__ Queries(const IndexScoreArgs& a, const Tiling& tiling, int r, int item)
      : token_stride_(a.by_token ? a.n_heads : 1), softcap_(a.softcap) {
    constexpr int kDim = 32 * kWords;
    const int group = a.n_heads / a.n_kv_heads;
    const int first = item % tiling.octets * kColumns;  // of the group
    const int head = item / tiling.octets * group + first;
    const int g = Lane() / 4;
    const int t = Lane() % 4;
    // As the halves of the codes' bytes.
    const float* q = a.q + (int64_t{r} * a.n_heads + head + g % kOwn) * kDim + t * 4 * kWords;
    float v[2][4 * kWords];
    float top = 0;
    float sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4 * kWords; i += 4) {
        Pack<float, 4> four{};
        if (first + g % kOwn < group) four = LoadPack<4>(q + half * (kDim / 2) + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[half][i + j] = four.v[j];
          top = fmaxf(top, fabsf(four.v[j]));
          sum += four.v[j];
        }
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    const int up = 21 - max((__float_as_int(top) >> 23) - 127, -100);  // below 2^22
    const float factor = __int_as_float((127 + up) << 23);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        int left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = __float2int_rn(v[half][4 * word + i] * factor);
#pragma unroll
        for (int digit = kDigits - 1; digit >= 0; --digit) {
          uint32_t bytes = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const auto low = static_cast<int8_t>(left[i]);
            bytes |= static_cast<uint32_t>(static_cast<uint8_t>(low)) << 8 * i;
            left[i] = (left[i] - low) >> 8;
          }
          digits_[digit][half][word] = bytes;
        }
        if (kPaired && g >= kOwn) {
          const uint32_t highest = digits_[0][half][word];
          digits_[0][half][word] = digits_[1][half][word];
          digits_[1][half][word] = highest;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = (2 * t + i) % kOwn;
      factor_[i] = a.scale * __int_as_float((127 - __shfl_sync(kAllLanes, up, 4 * own)) << 23);
      sum_[i] = a.scale * __shfl_sync(kAllLanes, sum, 4 * own);
      out_[i] = first + own < group ? a.logits + LogitAt(a, r, head + own, 0) : nullptr;
      part_[i] = {-INFINITY, 0};
    }
  }

  // Which of its tiles a lane gets logits of.
  __device__ __forceinline__ static int OwnTile() {
    return kPaired ? Lane() / 2 % 2 : 0;
  }

  // The logits of tiles. A lane has the ranges of its two tokens of its own tile, and these; -1:
  // none. `first` is the first unit of that tile, of n, and `back` says when units are stored: now,
  // or < 0: with those of the next tiles, or > 0: with those of the last tiles, so far before.
  template <Scored kScored>
  __device__ __forceinline__ void Take(const TileCodes<kWords> (&codes)[kTiles],
                                       const IndexRange (&ranges)[2], const int (&token)[2],
                                       int first, int n, int back) {
    int32_t sums[kTiles][kSums][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < kWords; ++e) {
        constexpr uint32_t kLower = 0x0f0f0f0f;
        const auto& v = codes[tile].v;
        const uint32_t k[4] = {v[0][e] & kLower, v[1][e] & kLower, v[0][e] >> 4 & kLower,
                               v[1][e] >> 4 & kLower};
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const auto& digits = digits_[kPaired ? (i == 0 ? tile : 2) : i];
          MultiplyAddCodes(sums[tile][i], k, digits[0][e], digits[1][e]);
        }
      }
    }
    int32_t c[kDigits][4];
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      if constexpr (kPaired) {
        // The first sums have the highest digit in the lanes of their own tile, and the next one in
        // the others.
        const bool own = OwnTile() != 0;
        c[0][at] = own ? sums[1][0][at] : sums[0][0][at];
        c[1][at] = __shfl_xor_sync(kAllLanes, own ? sums[0][0][at] : sums[1][0][at], 2);
        c[2][at] = own ? sums[1][1][at] : sums[0][1][at];
      } else {
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) c[digit][at] = sums[0][digit][at];
      }
    }
    float v[2][2];  // by query
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 2 * half + i;
        const int32_t high = c[0][at] * 256 + c[1][at];  // below 2^31: codes have 4 bits
        const float dot = static_cast<float>(high) * 256 + static_cast<float>(c[2][at]);
        v[i][half] = ranges[half].scale() * (factor_[i] * dot) + ranges[half].zero() * sum_[i];
      }
    }
    if (softcap_ > 0) {
#pragma unroll
      for (int at = 0; at < 4; ++at) v[at / 2][at % 2] = Softcap(v[at / 2][at % 2], softcap_);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (token[half] < 0) {
          v[i][half] = -INFINITY;
        } else if (kScored != Scored::kUnits && out_[i] != nullptr) {
          out_[i][kScored == Scored::kListed ? token[half] * token_stride_ : token[half]] =
              v[i][half];
        }
      }
      if (kScored != Scored::kListed && token[0] >= 0) Add(part_[i], v[i][0], v[i][1]);
    }
    if (kScored == Scored::kUnits) StoreUnits(v, first, n, back);
  }

  // The sums of the warp: to[0], to[1] and so on, of its queries.
  __device__ __forceinline__ void StoreParts(Part* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Part all = JoinLanes(part_[i], kOwn / 2, 32);
      if (Lane() < kOwn / 2 && out_[i] != nullptr) to[2 * Lane() + i] = all;
    }
  }

 private:
  // The highest v of each query and half of the lanes' tokens, which are a unit: lanes swap halves,
  // then queries, and so have one of these four each, as has the lane of the next token. The two
  // store units of two times, which fill a sector of memory.
  __device__ __forceinline__ void StoreUnits(const float (&v)[2][2], int first, int n, int back) {
    static_assert(kIndexUnit == 8, "lanes have the tokens of a unit");
    const int half = Lane() / 16;
    const int i = Lane() / 8 % 2;
    const bool next_token = Lane() / 4 % 2 != 0;
    float of_half[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, half == 0 ? v[j][1] : v[j][0], 16);
      of_half[j] = fmaxf(half == 0 ? v[j][0] : v[j][1], other);
    }
    const float other = __shfl_xor_sync(kAllLanes, i == 0 ? of_half[1] : of_half[0], 8);
    float highest = fmaxf(i == 0 ? of_half[0] : of_half[1], other);
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 4));
    if (back < 0) {
      held_ = highest;
      return;
    }
    float* const out = i == 0 ? out_[0] : out_[1];
    const bool before = back > 0 && !next_token;
    const int unit = first + half - (before ? back : 0);
    if (out == nullptr || unit >= n || (back == 0 && next_token)) return;
    out[unit] = before ? held_ : highest;
  }

  // The highest first; paired, columns 4 to 7 have the first two the other way round.
  uint32_t digits_[kDigits][2][kWords];
  float factor_[2], sum_[2];
  float* out_[2];
  int64_t token_stride_;  // of listed tokens' logits
  float held_ = 0;        // of the lane's unit of the last tiles
  Part part_[2];
  float softcap_;
};

// Codes of a lane's token i, from where its row has those of the KV head.
template <int kWords>
__device__ __forceinline__ void LoadCodes(const std::byte* codes, int i, TileCodes<kWords>& to) {
  constexpr int kWide = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int word = 0; word < kWords; word += kWide) {
    const auto v = LoadPack<kWide>(reinterpret_cast<const uint32_t*>(codes) + word);
#pragma unroll
    for (int j = 0; j < kWide; ++j) to.v[i][word + j] = v.v[j];
  }
}

__device__ __forceinline__ IndexRange LoadRange(const std::byte* range) {
  return *reinterpret_cast<const IndexRange*>(range);
}

// Where a warp's parts go: those of its octet, of part `walker` of the row.
__device__ __forceinline__ Part* PartsOfItem(Part* parts, const IndexScoreArgs& a,
                                             const Tiling& tiling, int r, int item,
                                             int64_t n_walkers, int64_t walker) {
  const int group = a.n_heads / a.n_kv_heads;
  return parts + (int64_t{r} * n_walkers + walker) * a.n_heads + item / tiling.octets * group +
         item % tiling.octets * kColumns;
}

// Blocks per multiprocessor, as the registers for a lane's queries allow.
__host__ __device__ constexpr int BlocksPerSm(int words) {
  return words > 4 ? 1 : 2;
}

// Grid: x walks tiles, y groups of `per` items, z rows. parts [rows, gridDim.x * sides, heads], but
// for listed tokens.
template <int kWords, Scored kScored>
__global__ void __launch_bounds__(kThreads, BlocksPerSm(kWords))
    IndexScoreKernel(const __grid_constant__ IndexScoreArgs a, Part* parts) {
  constexpr int kDim = 32 * kWords;
  GridTrigger();
  GridWait();
  const Tiling tiling = TilingOf(a);
  const auto r = static_cast<int>(blockIdx.z);
  const RowMeta row = a.rows[r];
  const int32_t table_off = a.seqs[row.seq].table_off;
  const int side = Warp() / tiling.per;
  const int item = static_cast<int>(blockIdx.y) * tiling.per + Warp() % tiling.per;
  if (side >= tiling.sides || item >= tiling.items) return;
  const int kv_head = item / tiling.octets;
  const int g = Lane() / 4;
  const SomeTokens::Of tokens(a.only, row, 1, 0);
  const int n = tokens.size();
  const int n_tiles = (n + kTile - 1) / kTile;
  const int walkers = static_cast<int>(gridDim.x) * tiling.sides;
  const int64_t codes_at = kv_head * IndexCodeBytes(kDim) + Lane() % 4 * 4 * kWords;
  const int64_t range_at =
      IndexRangesAt(a.n_kv_heads, kDim) + kv_head * int64_t{sizeof(IndexRange)};
  Queries<kWords, false> queries(a, tiling, r, item);
  TileCodes<kWords> next[1];  // of the tile that comes next, as are ranges and tokens of the lane
  IndexRange next_ranges[2];
  int listed[2];
  const auto find = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = tile * kTile + 8 * i + g;
      listed[i] = at >= n ? -1 : kScored == Scored::kListed ? tokens.At(at) : at;
    }
  };
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* of_token = a.index.Row<const std::byte>(table_off, max(listed[i], 0));
      LoadCodes(of_token + codes_at, i, next[0]);
      next_ranges[i] = LoadRange(of_token + range_at);
    }
  };
  const int first = static_cast<int>(blockIdx.x) * tiling.sides + side;
  if (first < n_tiles) find(first), load();
  for (int tile = first; tile < n_tiles; tile += walkers) {
    const TileCodes<kWords> codes[1] = {next[0]};
    const IndexRange ranges[2] = {next_ranges[0], next_ranges[1]};
    const int token[2] = {listed[0], listed[1]};
    if (tile + walkers < n_tiles) find(tile + walkers), load();
    queries.template Take<kScored>(codes, ranges, token, tile * (kTile / kIndexUnit),
                                   UnitsOf(n, kIndexUnit), /*back=*/0);
  }
  if (kScored == Scored::kListed) return;
  queries.StoreParts(PartsOfItem(parts, a, tiling, r, item, walkers, first));
}

// --- The same on Hopper cards, where blocks of the table have whole tiles, or tokens are listed: a
// warp more copies rows by the bulk engine to a ring of stages, so that far more is under way than
// registers hold.

constexpr int kRingThreads = kThreads + 32;
constexpr int kMostStages = 8;

// Which of eight rows of a stage the four lanes of number g read. Lanes 8 i to 8 i + 7 read 128
// bytes of dk = 128 together, 64 of two rows: from different banks, where the size of a row allows.
__device__ __forceinline__ int RowOfLanes(int g, int row_bytes) {
  const int apart = min(4, 64 / (row_bytes & -row_bytes));
  return apart <= 1 ? g : (g & ~(1 | apart)) | (g & 1) * apart | (g / apart & 1);
}

// How the tokens of a row are divided into stages, and a stage into copies.
struct Stages {
  int tokens;  // of a stage
  int copy;    // tokens of a copy: whole tiles of one block of the table, or a listed one
  int shift;   // a block of the table has 1 << shift tokens
  int n;       // in the ring
};

// Grid: as IndexScoreKernel's, x walks stages. Shared memory: the ring.
template <int kWords, Scored kScored, bool kPaired>
__global__ void __launch_bounds__(kRingThreads, BlocksPerSm(kWords))
    IndexRingKernel(const __grid_constant__ IndexScoreArgs a, const Stages stages, Part* parts) {
  constexpr int kDim = 32 * kWords;
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  __shared__ int listed_tokens[kMostStages][32];
  GridTrigger();
  const Tiling tiling = TilingOf(a);
  const int first_item = static_cast<int>(blockIdx.y) * tiling.per;
  if (threadIdx.x == 0) {
    const int consumers = min(tiling.per, tiling.items - first_item) * tiling.sides;
    for (int i = 0; i < stages.n; ++i) InitBarrier(full + i, 1), InitBarrier(empty + i, consumers);
    FenceBarrierInit();
  }
  __syncthreads();
  GridWait();
  const auto r = static_cast<int>(blockIdx.z);
  const RowMeta row = a.rows[r];
  const int32_t table_off = a.seqs[row.seq].table_off;
  const SomeTokens::Of tokens(a.only, row, 1, 0);
  const int n = tokens.size();
  const int n_stages = (n + stages.tokens - 1) / stages.tokens;
  const auto row_bytes = static_cast<int>(a.index.row_bytes);
  const int stage_bytes = stages.tokens * row_bytes;
  const auto walkers = static_cast<int>(gridDim.x);
  auto stage = static_cast<int>(blockIdx.x);
  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    stage += walkers;
    if (++slot == stages.n) slot = 0, parity ^= 1;
  };
  if (Warp() == kWarps) {
    // A lane has a copy of each stage. Rows past the last token, to the end of its tile, are there.
    const int of_stage = Lane() * stages.copy;
    const bool listed = kScored == Scored::kListed;
    const int end = listed ? n : (n + kTile - 1) / kTile * kTile;
    const auto tokens_of = [&](int of) {
      return of_stage >= stages.tokens
                 ? 0
                 : max(0, min(stages.copy, end - of * stages.tokens - of_stage));
    };
    // The lane's first token of a stage, and its block of the table.
    const auto token_of = [&](int of) {
      const int at = of * stages.tokens + of_stage;
      return listed && tokens_of(of) > 0 ? tokens.At(at) : at;
    };
    const auto block_of = [&](int of, int token) {
      if (tokens_of(of) == 0) return 0;
      return __ldg(a.index.block_table + table_off + (token >> stages.shift));
    };
    int token = token_of(stage);
    int block = block_of(stage, token);
    int next = token_of(stage + walkers);
    for (int turn = 0; stage < n_stages; advance(), ++turn) {
      const int next_block = block_of(stage + walkers, next);
      const int after = token_of(stage + 2 * walkers);
      const int bytes = tokens_of(stage) * row_bytes;
      if (turn >= stages.n) Wait(empty + slot, parity ^ 1);
      const int all = min(stages.tokens, end - stage * stages.tokens) * row_bytes;
      if (listed) listed_tokens[slot][Lane()] = token;
      __syncwarp();
      if (Lane() == 0) ArriveExpect(full + slot, all);
      __syncwarp();
      const int64_t first = (int64_t{block} << stages.shift) + (token & ((1 << stages.shift) - 1));
      if (bytes > 0) {
        // What is written stays in the cache, but where that is too much for it.
        constexpr auto kCopy = kScored == Scored::kTokens ? CopyBulk : CopyBulkOnce;
        kCopy(ring + slot * stage_bytes + of_stage * row_bytes, a.index.base + first * row_bytes,
              full + slot, bytes);
      }
      token = next, next = after, block = next_block;
    }
    return;
  }
  const int side = Warp() / tiling.per;
  const int item = first_item + Warp() % tiling.per;
  if (side >= tiling.sides || item >= tiling.items) return;
  const int kv_head = item / tiling.octets;
  const int g = RowOfLanes(Lane() / 4, row_bytes);
  const auto codes_at = static_cast<int>(kv_head * IndexCodeBytes(kDim)) + Lane() % 4 * 4 * kWords;
  const auto range_at =
      static_cast<int>(IndexRangesAt(a.n_kv_heads, kDim) + kv_head * int64_t{sizeof(IndexRange)});
  using Own = Queries<kWords, kPaired>;
  constexpr int kSpan = Own::kTiles * kTile;  // tokens that a warp takes at a time
  Own queries(a, tiling, r, item);
  for (; stage < n_stages; advance()) {
    Wait(full + slot, parity);
    const int step = tiling.sides * kSpan;
    for (int span = side * kSpan, turn = 0; span < stages.tokens; span += step, ++turn) {
      const std::byte* const rows = ring + slot * stage_bytes + (span + g) * row_bytes;
      TileCodes<kWords> codes[Own::kTiles];
      IndexRange ranges[2];
      int token[2];
      const int own = span + Own::OwnTile() * kTile;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < Own::kTiles; ++tile) {
          LoadCodes(rows + (tile * kTile + 8 * i) * row_bytes + codes_at, i, codes[tile]);
        }
        ranges[i] = LoadRange(rows + (own - span + 8 * i) * row_bytes + range_at);
        const int at = stage * stages.tokens + own + 8 * i + g;
        token[i] = at >= n                      ? -1
                   : kScored == Scored::kListed ? listed_tokens[slot][own + 8 * i + g]
                                                : at;
      }
      const bool last = span + step >= stages.tokens;
      if (last) {
        __syncwarp();
        if (Lane() == 0) Arrive(empty + slot);
      }
      const int back = turn % 2 != 0 ? step / kIndexUnit : last ? 0 : -1;
      queries.template Take<kScored>(codes, ranges, token,
                                     (stage * stages.tokens + own) / kIndexUnit,
                                     UnitsOf(n, kIndexUnit), back);
    }
  }
  if (kScored == Scored::kListed) return;
  queries.StoreParts(PartsOfItem(parts, a, tiling, r, item, int64_t{walkers} * tiling.sides,
                                 int64_t{blockIdx.x} * tiling.sides + side));
}

// Heads of any size: a warp takes a unit of a query head, value after value. Grid: x walks units, y
// heads, z rows. parts [rows, gridDim.x, heads], but for listed tokens.
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
  const SomeTokens::Of tokens(a.only, row, 1, 0);
  const int n = tokens.size();
  const int n_units = UnitsOf(n, a.unit);
  for (int unit = static_cast<int>(blockIdx.x) * kWarps + Warp(); unit < n_units;
       unit += static_cast<int>(gridDim.x) * kWarps) {
    float highest = -INFINITY;
    for (int at = unit * a.unit; at < min((unit + 1) * a.unit, n); ++at) {
      const auto* from = a.index.Row<const uint8_t>(table_off, tokens.At(at));
      const IndexRange range =
          reinterpret_cast<const IndexRange*>(from + IndexRangesAt(a.n_kv_heads, a.dk))[kv_head];
      float dot = 0;
      for (int i = Lane(); i < half; i += 32) {
        const uint8_t both = from[kv_head * half + i];
        dot += q[i] * static_cast<float>(both & 15) + q[half + i] * static_cast<float>(both >> 4);
      }
      dot = WarpSum(dot);
      const float v = Softcap(a.scale * (range.scale() * dot + range.zero() * q_sum), a.softcap);
      highest = fmaxf(highest, v);
      part = Join(part, {v, 1});
    }
    const int out = a.only.index != nullptr ? tokens.At(unit) : unit;
    if (Lane() == 0) a.logits[LogitAt(a, blockIdx.z, head, out)] = highest;
  }
  if (a.only.index != nullptr) return;
  if (Lane() == 0) of_warps[Warp()] = part;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) part = Join(part, of_warps[w]);
  parts[(int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * a.n_heads + head] = part;
}

bool IsWide(const IndexScoreArgs& a) {
  const bool words = a.dk == 32 || a.dk == 64 || a.dk == 96 || a.dk == 128 || a.dk == 256;
  return words && AreMultiples(16, a.index.base, a.index.row_bytes, a.q);
}

bool IsPaired(const IndexScoreArgs& a) {
  return a.n_heads / a.n_kv_heads <= kColumns / 2;
}

// The stages of IndexRingKernel; none where it does not run.
Stages StagesOf(const IndexScoreArgs& a, const Device& device) {
  const int per = a.index.block_units;
  const bool listed = a.only.index != nullptr;
  const bool whole = (listed || per % kTile == 0) && (per & (per - 1)) == 0;
  if (!whole || a.index.unit_blocks != 1 || !IsWide(a) || !RunsHopperCode(device)) return {};
  const int64_t room =
      static_cast<int64_t>(device.shared_per_block / BlocksPerSm(a.dk / 32) - kBesideDynamic);
  // As many tokens as leave three stages. A lane copies one listed token of a stage.
  const int least = kTile * (IsPaired(a) ? 2 : 1) * TilingOf(a).sides;
  int tokens = std::max(least, 2 * kTile);
  while (!listed && tokens < 4 * kTile && 3 * 2 * tokens * a.index.row_bytes <= room) tokens *= 2;
  if (listed && tokens > 32) return {};
  const auto n =
      static_cast<int>(std::min<int64_t>(room / (tokens * a.index.row_bytes), kMostStages));
  if (n < 2) return {};
  return {tokens, listed ? 1 : std::min(tokens, per), std::countr_zero(static_cast<uint32_t>(per)),
          n};
}

// Tokens of a row at most.
int64_t RoomOf(const IndexScoreArgs& a) {
  return a.stride * a.unit;
}

// Blocks of a row side by side, and what each of them makes of a head.
int64_t WalkersOf(const IndexScoreArgs& a, const Device& device) {
  if (!IsWide(a)) return std::min<int64_t>(CeilDiv(a.stride, kWarps), 2 * device.sm_count);
  const int64_t most = int64_t{BlocksPerSm(a.dk / 32)} * device.sm_count;
  const Stages stages = StagesOf(a, device);
  if (stages.n > 0) return std::min(CeilDiv(RoomOf(a), stages.tokens), most);
  return std::min(CeilDiv(RoomOf(a), int64_t{kTile} * TilingOf(a).sides), most);
}
int64_t PartsOf(const IndexScoreArgs& a, const Device& device) {
  return WalkersOf(a, device) * (IsWide(a) ? TilingOf(a).sides : 1);
}

template <int kWords, Scored kScored>
void LaunchScored(const IndexScoreArgs& args, Part* parts, const Launch& launch) {
  const Tiling tiling = TilingOf(args);
  const dim3 grid(static_cast<uint32_t>(WalkersOf(args, *launch.device)),
                  static_cast<uint32_t>(CeilDiv(tiling.items, tiling.per)),
                  static_cast<uint32_t>(args.n_rows));
  const Stages stages = StagesOf(args, *launch.device);
  if (stages.n == 0) {
    return LaunchKernel(IndexScoreKernel<kWords, kScored>, launch, grid, kThreads, 0, args, parts);
  }
  const auto shared = static_cast<size_t>(stages.n * stages.tokens * args.index.row_bytes);
  const auto kernel = IsPaired(args) ? IndexRingKernel<kWords, kScored, true>
                                     : IndexRingKernel<kWords, kScored, false>;
  AllowShared(kernel, shared);
  LaunchKernel(kernel, launch, grid, kRingThreads, shared, args, stages, parts);
}

template <int kWords>
void LaunchIndexScore(const IndexScoreArgs& args, Part* parts, const Launch& launch) {
  if (args.only.index != nullptr) {
    return LaunchScored<kWords, Scored::kListed>(args, parts, launch);
  }
  if (args.unit > 1) return LaunchScored<kWords, Scored::kUnits>(args, parts, launch);
  LaunchScored<kWords, Scored::kTokens>(args, parts, launch);
}

}  // namespace

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
  if (args.only.index != nullptr) return;
  const dim3 heads_of_rows(static_cast<uint32_t>(args.n_heads), static_cast<uint32_t>(args.n_rows));
  LaunchKernel(LseKernel, launch, heads_of_rows, kThreads, 0, parts,
               static_cast<int>(PartsOf(args, *launch.device)), args.lse);
}

}  // namespace omnikv::cuda
