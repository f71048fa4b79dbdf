// Scores of tokens by the many query rows of a prompt's chunk: Score.
//
// A CTA takes a block of tokens for one list and passes all rows that see them, in tiles of 32. A
// warp's tokens of K stay in registers while one KV head is at work. Queries come through shared
// memory, a tile of one head at a time, each split into two 16-bit numbers: the next one is on its
// way while one is multiplied. What heads give a token and a row is reduced in the registers that
// products leave it in, and then over rows.
#include "backend/cuda/kernels/score.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 32;  // query rows of a tile
constexpr int kOctets = kRows / 8;
constexpr int kWarpRows = kRows / kWarps;  // that a warp brings
constexpr int kLeastRows = 128;            // fewer are faster in score.cu

// Tiles of tokens of a warp, and the most tokens of a block.
template <int kBlocks>
constexpr int kTiles = kBlocks <= 4 ? 2 : 1;
template <int kBlocks>
constexpr int kMostTokens = kWarps* kTiles<kBlocks>* kTile;

// Queries of one head, in shared memory; twice.
template <int kBlocks>
struct Queries {
  std::byte high[kRows][kQueryPitch<kBlocks>];
  std::byte low[kRows][kQueryPitch<kBlocks>];
  float scale[kRows];  // of products
  float lse[kRows];
};

// A warp's part of a tile of queries, on its way.
template <int kBlocks>
struct Coming {
  Query<kBlocks> query[kWarpRows];
};

// What a CTA works at: the last `n_rows` rows of `seq` score.
struct Work {
  SeqMeta seq;
  int32_t n_rows;     // that score
  int32_t first_pos;  // of the first of them
  int32_t first;      // token
  int32_t n_tokens;
};

__device__ __forceinline__ int64_t RowOf(const Work& w, int row) {
  return int64_t{w.seq.q_begin} + w.seq.q_len - w.n_rows + min(row, w.n_rows - 1);
}

template <int kBlocks>
__device__ __forceinline__ Coming<kBlocks> Bring(const ScoreArgs& a, const Work& w, int row,
                                                 int head) {
  const int first = row + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  Coming<kBlocks> coming;
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const float* q = a.q + (RowOf(w, first + i) * a.n_heads + head) * a.kv.dk;
    coming.query[i] = LoadQuery<kBlocks>(q, a.kv.dk);
  }
  return coming;
}

// `log2`: scale and lse are those of powers of two.
template <typename T, int kBlocks>
__device__ __forceinline__ void Put(const ScoreArgs& a, const Work& w, int row, int head, bool log2,
                                    const Coming<kBlocks>& coming, Queries<kBlocks>& to) {
  const int first = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const float unit = log2 ? kLog2E : 1.0f;
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const int r = first + i;
    const float back = SplitQuery<T, kBlocks>(coming.query[i], to.high[r], to.low[r]);
    if (threadIdx.x % 32 != 0) continue;
    to.scale[r] = a.scale * back * unit;
    if (a.lse != nullptr) to.lse[r] = a.lse[RowOf(w, row + r) * a.n_heads + head] * unit;
  }
}

// Of a lane: what the heads so far give its tokens (two of each tile) by its rows of each octet.
template <int kBlocks>
struct Reduced {
  float v[kOctets][kTiles<kBlocks>][4];
};

template <typename T, int kBlocks>
__device__ __forceinline__ void TakeHead(const ScoreArgs& a, bool log2, bool first_head,
                                         const Queries<kBlocks>& queries,
                                         const Keys<kBlocks> (&keys)[kTiles<kBlocks>],
                                         Reduced<kBlocks>& reduced) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kOctets; ++n) {
    float c[kTiles<kBlocks>][4] = {};
    const int column = 8 * n + lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles<kBlocks>; ++tile) {
      Multiply<T, kBlocks>(c[tile], keys[tile], queries.high[column], queries.low[column]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles<kBlocks>; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * n + lane % 4 * 2 + e % 2;
        float v = c[tile][e] * queries.scale[row];
        if (log2) {
          v = exp2f(v - queries.lse[row]);
        } else {
          v = Softcap(v, a.softcap);
          if (a.lse != nullptr) v = expf(v - queries.lse[row]);
        }
        float& to = reduced.v[n][tile][e];
        to = first_head ? v : ReduceHeads(a.heads, to, v);
      }
    }
  }
}

// Into f, what the rows from `row` on give a lane's tokens: those rows that see them.
template <int kBlocks>
__device__ __forceinline__ void TakeRows(const ScoreArgs& a, const Work& w, int row,
                                         const Reduced<kBlocks>& reduced,
                                         float (&f)[kTiles<kBlocks>][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = w.first + static_cast<int>(threadIdx.x) / 32 * kTiles<kBlocks> * kTile;
#pragma unroll
  for (int n = 0; n < kOctets; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = row + 8 * n + lane % 4 * 2 + e % 2;
      if (r >= w.n_rows) continue;
      const float weight = a.queries == QueryReduce::kDecay
                               ? powf(a.decay, static_cast<float>(w.n_rows - 1 - r))
                               : 1.0f;
#pragma unroll
      for (int tile = 0; tile < kTiles<kBlocks>; ++tile) {
        if (first + tile * kTile + lane / 4 + e / 2 * 8 > w.first_pos + r) continue;
        const float v = reduced.v[n][tile][e] * weight;
        float& to = f[tile][e / 2];
        to = a.queries == QueryReduce::kMax ? fmaxf(to, v) : to + v;
      }
    }
  }
}

// Grid: blocks of `tokens` tokens, lists, sequences.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads, 1)
    ScoreTilesKernel(const __grid_constant__ ScoreArgs a, int32_t tokens) {
  extern __shared__ uint4 memory[];
  __shared__ float scores[kMostTokens<kBlocks>];
  auto* const queries = reinterpret_cast<Queries<kBlocks>*>(memory);
  GridTrigger();
  GridWait();
  const auto s = static_cast<int32_t>(blockIdx.z);
  const auto list = static_cast<int32_t>(blockIdx.y);
  Work w{.seq = a.seqs[s], .first = static_cast<int32_t>(blockIdx.x) * tokens};
  if (w.seq.q_len == 0 || w.first >= w.seq.kv_len) return;
  w.n_tokens = min(tokens, w.seq.kv_len - w.first);
  w.n_rows = ScoringRows(a, w.seq.q_len);
  w.first_pos = w.seq.kv_len - w.n_rows;
  const int first_row = max(0, w.first - w.first_pos) / kRows * kRows;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int list_heads = a.n_heads / a.lists;
  const int steps = static_cast<int>(CeilDiv(w.n_rows - first_row, kRows)) * list_heads;
  const bool log2 = a.lse != nullptr && a.softcap == 0;
  const int warp_first = w.first + static_cast<int>(threadIdx.x) / 32 * kTiles<kBlocks> * kTile;
  const auto row_of = [&](int step) { return first_row + step / list_heads * kRows; };
  const auto head_of = [&](int step) { return list * list_heads + step % list_heads; };

  float f[kTiles<kBlocks>][2];
  for (auto& tile : f) {
    tile[0] = tile[1] = a.queries == QueryReduce::kMax ? -INFINITY : 0.0f;
  }
  Keys<kBlocks> keys[kTiles<kBlocks>];
  Reduced<kBlocks> reduced;
  int kv_head = -1;  // of `keys`
  const auto put = [&](int step, const Coming<kBlocks>& coming) {
    Put<T, kBlocks>(a, w, row_of(step), head_of(step), log2, coming, queries[step % 2]);
  };
  put(0, Bring<kBlocks>(a, w, row_of(0), head_of(0)));
  __syncthreads();
  for (int step = 0; step < steps; ++step) {
    const int next = min(step + 1, steps - 1);
    const Coming<kBlocks> coming = Bring<kBlocks>(a, w, row_of(next), head_of(next));
    if (const int wanted = head_of(step) / group; wanted != kv_head) {
      kv_head = wanted;
#pragma unroll
      for (int tile = 0; tile < kTiles<kBlocks>; ++tile) {
        keys[tile] = LoadTile<kBlocks>(a.kv, w.seq.table_off, kv_head, warp_first + tile * kTile,
                                       w.first + w.n_tokens - 1);
      }
    }
    TakeHead<T, kBlocks>(a, log2, step % list_heads == 0, queries[step % 2], keys, reduced);
    if ((step + 1) % list_heads == 0) TakeRows<kBlocks>(a, w, row_of(step), reduced, f);
    if (next > step) put(next, coming);
    __syncthreads();
  }

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float mean = a.heads == HeadReduce::kMean ? 1.0f / static_cast<float>(list_heads) : 1.0f;
#pragma unroll
  for (int tile = 0; tile < kTiles<kBlocks>; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v = f[tile][half];
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {
        const float its = __shfl_xor_sync(kAllLanes, v, other);
        v = a.queries == QueryReduce::kMax ? fmaxf(v, its) : v + its;
      }
      if (lane % 4 == 0) {
        scores[static_cast<int>(threadIdx.x) / 32 * kTiles<kBlocks> * kTile + tile * kTile +
               half * 8 + lane / 4] = v * mean;
      }
    }
  }
  __syncthreads();
  StoreUnits(a, s, {w.first, w.n_tokens}, {list, 1}, scores, 0, kThreads);
}

int MostTokens(int blocks) {
  return blocks <= 4 ? kMostTokens<4> : kMostTokens<8>;
}

template <typename T, int kBlocks>
void LaunchTiles(const ScoreArgs& args, const Launch& launch) {
  const auto kernel = ScoreTilesKernel<T, kBlocks>;
  const size_t shared = 2 * sizeof(Queries<kBlocks>);
  AllowShared(kernel, shared);
  const int32_t tokens = kMostTokens<kBlocks> / args.unit * args.unit;
  const dim3 grid(static_cast<unsigned>(CeilDiv(args.stride * args.unit, tokens)),
                  static_cast<unsigned>(args.lists), static_cast<unsigned>(args.n_seqs));
  LaunchKernel(kernel, launch, grid, kThreads, shared, args, tokens);
}

}  // namespace

bool CanScoreTiles(const ScoreArgs& args) {
  const int blocks = BlocksOf(args.kv);
  return blocks > 0 && ScoringRows(args, args.n_rows) >= kLeastRows &&
         args.unit <= MostTokens(blocks);
}

void ScoreTiles(const ScoreArgs& args, const Launch& launch) {
  WithBlocks(args.kv, [&](auto t, auto blocks) {
    LaunchTiles<decltype(t), decltype(blocks)::value>(args, launch);
  });
}

}  // namespace omnikv::cuda
