// Scores of tokens by the many query rows of a prompt's chunk, on Hopper cards: Score where queries
// may be rounded to the type of K, as AttendHopper rounds them.
//
// A CTA takes 256 tokens for one list and passes all rows that see them, in tiles of 128. Two warp
// groups multiply 128 tokens each by one head's queries after the other, while a warp brings K and
// queries by bulk tensor copies. What heads give a token and a row is reduced in the registers of
// the products, then over rows. Of the greatest weight over heads only the exponent is kept until
// the last head.
#include "backend/cuda/kernels/hopper.cuh"
#include "backend/cuda/kernels/score.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kRows = 128;    // query rows of a tile
constexpr int kGroups = 2;    // warp groups that multiply
constexpr int kHalves = 2;    // of a group's tokens
constexpr int kProduct = 64;  // tokens of a product
constexpr int kTokens = kGroups * kHalves * kProduct;
constexpr int kMultipliers = 128 * kGroups;   // threads
constexpr int kThreads = kMultipliers + 128;  // a group of which one warp brings
constexpr int kMultiplierRegisters = 232;
constexpr int kOtherRegisters = 40;
constexpr int kRowBytes = 128;        // of a run of kBoxValues values
constexpr int kBoxTokens = kProduct;  // of K: boxes lie in one block of the bank
constexpr int kQuerySlots = 3;
constexpr int kKeySlots = 2;
constexpr int kLeastRows = 128;
constexpr int kSums = kRows / 2;  // of a thread, per product

// kRuns: of kBoxValues values of a head.
template <int kRuns>
struct Shared {
  std::byte keys[kKeySlots][kRuns][kTokens][kRowBytes];
  std::byte queries[kQuerySlots][kRuns][kRows][kRowBytes];
  float lse[kQuerySlots][kRows];  // to base 2
  float scores[kTokens];
  uint64_t keys_full[kKeySlots], keys_empty[kKeySlots];
  uint64_t queries_full[kQuerySlots], queries_empty[kQuerySlots];
};

struct Maps {
  CUtensorMap keys, queries;
};

// What a CTA works at.
struct Work {
  SeqMeta seq;
  int32_t n_rows;      // that score, the sequence's last ones
  int32_t first_pos;   // of the first of them
  int32_t first;       // token
  int32_t first_tile;  // of rows: earlier ones see no token
  int32_t n_tiles;
  int32_t first_head, n_heads;  // of the list
  int32_t group;                // heads of a KV head
  int32_t kv_heads;             // of the list

  __device__ int32_t FirstRow() const { return seq.q_begin + seq.q_len - n_rows; }
};

// A place in a ring of slots, and the parity of how often it was run through.
template <int kSlots>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// --- The warp that brings.

template <int kRuns>
__device__ __forceinline__ void Bring(const ScoreArgs& a, const Maps& maps, const Work& w,
                                      Shared<kRuns>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Cursor<kKeySlots> keys{.parity = 1};  // a slot that was never filled counts as empty
  Cursor<kQuerySlots> queries{.parity = 1};
  const int last_block = (w.seq.kv_len - 1) / a.kv.block_tokens;
  for (int tile = w.first_tile; tile < w.n_tiles; ++tile) {
    for (int i = 0; i < w.n_heads; ++i) {
      const int head = w.first_head + i;
      // The K of a list of one KV head stays.
      if (i % w.group == 0 && (w.kv_heads > 1 || tile == w.first_tile)) {
        Wait(&shared.keys_empty[keys.slot], keys.parity);
        if (lane == 0) {
          ArriveExpect(&shared.keys_full[keys.slot], kRuns * kTokens * kRowBytes);
        }
        __syncwarp();
        for (int box = lane; box < kTokens / kBoxTokens * kRuns; box += 32) {
          const int run = box % kRuns;
          const int t = box / kRuns * kBoxTokens;
          const int block = min((w.first + t) / a.kv.block_tokens, last_block);
          const int row = a.kv.block_table[w.seq.table_off + block] * a.kv.BlockRows() +
                          (w.first + t) % a.kv.block_tokens;
          CopyBox(shared.keys[keys.slot][run][t], &maps.keys, &shared.keys_full[keys.slot],
                  run * kBoxValues, row, head / w.group);
        }
        keys.Next();
      }
      float lse[kRows / 32];
#pragma unroll
      for (int k = 0; k < kRows / 32; ++k) {
        const int row = min(tile * kRows + 32 * k + lane, w.n_rows - 1);
        lse[k] = kLog2E * a.lse[int64_t{w.FirstRow() + row} * a.n_heads + head];
      }
      Wait(&shared.queries_empty[queries.slot], queries.parity);
#pragma unroll
      for (int k = 0; k < kRows / 32; ++k) shared.lse[queries.slot][32 * k + lane] = lse[k];
      if (lane == 0) {
        ArriveExpect(&shared.queries_full[queries.slot], kRuns * kRows * kRowBytes);
        for (int run = 0; run < kRuns; ++run) {
          CopyBox(shared.queries[queries.slot][run], &maps.queries,
                  &shared.queries_full[queries.slot], run * kBoxValues, w.FirstRow() + tile * kRows,
                  head);
        }
      } else {
        Arrive(&shared.queries_full[queries.slot]);
      }
      queries.Next();
    }
  }
}

// --- The warp groups that multiply.

// held: a thread's part of what the list's heads so far give the tokens of a product by the rows of
// a tile.
template <bool kMax>
__device__ __forceinline__ void TakeHead(const float (&d)[kSums], float scale, const float* lse,
                                         float (&held)[kSums]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const float2 of_row = *reinterpret_cast<const float2*>(lse + 8 * j + 2 * t);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float v = fmaf(d[4 * j + e], scale, e % 2 == 0 ? -of_row.x : -of_row.y);
      float& to = held[4 * j + e];
      to = kMax ? fmaxf(to, v) : to + Exp2(v);
    }
  }
}

// Adds to f what the tile's rows give a thread's tokens g and g + 8: those rows that see them.
// `token`: g. `row`: of the tile's first.
template <bool kMax>
__device__ __forceinline__ void TakeRows(const Work& w, int token, int row,
                                         const float (&held)[kSums], float (&f)[2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = row + 8 * j + 2 * t + e % 2;
      const bool sees = r < w.n_rows && token + e / 2 * 8 <= w.first_pos + r;
      if (sees) f[e / 2] += kMax ? Exp2(held[4 * j + e]) : held[4 * j + e];
    }
  }
}

template <bool kF16, int kRuns, bool kMax>
__device__ __forceinline__ void MultiplyAll(const ScoreArgs& a, const Work& w,
                                            Shared<kRuns>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const float scale = a.scale * kLog2E;
  // Of a lane within a product.
  const int token = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  Cursor<kKeySlots> keys;
  Cursor<kQuerySlots> queries;
  float f[kHalves][2] = {};
  float held[kHalves][kSums];
  for (int tile = w.first_tile; tile < w.n_tiles; ++tile) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) held[half][i] = kMax ? -INFINITY : 0.0f;
    }
#pragma unroll 1
    for (int i = 0; i < w.n_heads; ++i) {
      if (i % w.group == 0) Wait(&shared.keys_full[keys.slot], keys.parity);
      Wait(&shared.queries_full[queries.slot], queries.parity);
      const uint64_t q = Descriptor(shared.queries[queries.slot], 8 * kRowBytes);
      const uint64_t k =
          Descriptor(shared.keys[keys.slot][0][group * kHalves * kProduct], 8 * kRowBytes);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float d[kSums];
        ProductsFence();
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            Products<kRows, kF16>(
                d, Advance(k, (run * kTokens + half * kProduct) * kRowBytes + part * 32),
                Advance(q, run * kRows * kRowBytes + part * 32), run + part > 0);
          }
        }
        ProductsCommit();
        ProductsWait(d);
        TakeHead<kMax>(d, scale, shared.lse[queries.slot], held[half]);
      }
      // Each thread for itself: what one arrives for others is a race to tools that look for races.
      Arrive(&shared.queries_empty[queries.slot]);
      queries.Next();
      if (w.kv_heads > 1 && i % w.group == w.group - 1) {
        __syncwarp();
        if (lane == 0) Arrive(&shared.keys_empty[keys.slot]);
        keys.Next();
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      TakeRows<kMax>(w, w.first + (group * kHalves + half) * kProduct + token, tile * kRows,
                     held[half], f[half]);
    }
  }

  const float mean = a.heads == HeadReduce::kMean ? 1.0f / static_cast<float>(w.n_heads) : 1.0f;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float v = f[half][e];
      v += __shfl_xor_sync(kAllLanes, v, 1);
      v += __shfl_xor_sync(kAllLanes, v, 2);
      if (lane % 4 == 0) {
        shared.scores[(group * kHalves + half) * kProduct + token + 8 * e] = v * mean;
      }
    }
  }
}

// Grid: blocks of kTokens tokens, lists, sequences.
template <bool kF16, int kRuns, bool kMax>
__global__ void __launch_bounds__(kThreads, 1)
    ScoreHopperKernel(const __grid_constant__ ScoreArgs a, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kRuns>*>(memory);
  GridTrigger();
  GridWait();
  const auto s = static_cast<int32_t>(blockIdx.z);
  const auto list = static_cast<int32_t>(blockIdx.y);
  Work w{.seq = a.seqs[s], .first = static_cast<int32_t>(blockIdx.x) * kTokens};
  if (w.seq.q_len == 0 || w.first >= w.seq.kv_len) return;
  w.n_rows = ScoringRows(a, w.seq.q_len);
  w.first_pos = w.seq.kv_len - w.n_rows;
  w.first_tile = max(0, w.first - w.first_pos) / kRows;
  w.n_tiles = static_cast<int32_t>(CeilDiv(w.n_rows, kRows));
  w.group = a.n_heads / a.kv.n_kv_heads;
  w.n_heads = a.n_heads / a.lists;
  w.first_head = list * w.n_heads;
  w.kv_heads = w.n_heads / w.group;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKeySlots; ++i) {
      InitBarrier(&shared.keys_full[i], 1);
      InitBarrier(&shared.keys_empty[i], kMultipliers / 32);
    }
    for (int i = 0; i < kQuerySlots; ++i) {
      InitBarrier(&shared.queries_full[i], 32);
      InitBarrier(&shared.queries_empty[i], kMultipliers);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x >= kMultipliers) {
    LeaveRegisters<kOtherRegisters>();
    if (threadIdx.x < kMultipliers + 32) Bring<kRuns>(a, maps, w, shared);
    return;
  }
  TakeRegisters<kMultiplierRegisters>();
  MultiplyAll<kF16, kRuns, kMax>(a, w, shared);
  Sync<kMultipliers>();
  const int32_t n_tokens = min(kTokens, w.seq.kv_len - w.first);
  StoreUnits(a, s, {w.first, n_tokens}, {list, 1}, shared.scores, 0, kMultipliers);
}

template <bool kF16, int kRuns, bool kMax>
void LaunchHopper(const ScoreArgs& a, const Maps& maps, const Launch& launch) {
  const auto kernel = ScoreHopperKernel<kF16, kRuns, kMax>;
  constexpr size_t kShared = sizeof(Shared<kRuns>);
  AllowShared(kernel, kShared);
  const dim3 grid(static_cast<unsigned>(CeilDiv(a.stride * a.unit, kTokens)),
                  static_cast<unsigned>(a.lists), static_cast<unsigned>(a.n_seqs));
  LaunchKernel(kernel, launch, grid, kThreads, kShared, a, maps);
}

}  // namespace

bool CanScoreHopper(const ScoreArgs& a, const Device& device) {
  const KvView& kv = a.kv;
  return RunsHopperCode(device) && BlocksOf(kv) > 0 && (kv.dk == 64 || kv.dk == 128) &&
         kv.block_tokens % kBoxTokens == 0 && kTokens % a.unit == 0 && a.lse != nullptr &&
         a.softcap == 0 && a.scale > 0 && a.queries == QueryReduce::kSum &&
         ScoringRows(a, a.n_rows) >= kLeastRows;
}

size_t ScoreHopperScratch(const ScoreArgs& a) {
  return static_cast<size_t>(a.n_rows) * static_cast<size_t>(a.n_heads) *
         static_cast<size_t>(a.kv.dk) * 2;
}

void ScoreHopper(const ScoreArgs& a, const Launch& launch) {
  if (a.n_seqs == 0 || a.n_rows == 0 || a.stride == 0) return;
  const KvView& kv = a.kv;
  ConvertRows(a.q, int64_t{a.n_rows} * a.n_heads * kv.dk, kv.k.dtype, launch.scratch, launch);
  const bool f16 = kv.k.dtype == DType::kF16;
  const auto type = f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t head_bytes = int64_t{2} * kv.dk;
  Maps maps;
  CheckLaunch(EncodeTensorMap(&maps.keys, type, kv.k.base,
                              {.sizes = {kv.dk, MostBankRows(kv.k.row_bytes), kv.n_kv_heads},
                               .strides = {kv.k.row_bytes, kv.k.head_bytes},
                               .box = {kBoxTokens, 1}}),
              "the map of K");
  CheckLaunch(EncodeTensorMap(&maps.queries, type, launch.scratch,
                              {.sizes = {kv.dk, a.n_rows, a.n_heads},
                               .strides = {a.n_heads * head_bytes, head_bytes},
                               .box = {kRows, 1}}),
              "the map of queries");
  const auto with_runs = [&](auto is_f16, auto runs) {
    if (a.heads == HeadReduce::kMax) return LaunchHopper<is_f16(), runs(), true>(a, maps, launch);
    LaunchHopper<is_f16(), runs(), false>(a, maps, launch);
  };
  const auto with_type = [&](auto is_f16) {
    if (kv.dk == 64) return with_runs(is_f16, std::integral_constant<int, 1>{});
    with_runs(is_f16, std::integral_constant<int, 2>{});
  };
  f16 ? with_type(std::true_type{}) : with_type(std::false_type{});
}

}  // namespace omnikv::cuda
