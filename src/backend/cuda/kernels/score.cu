// Scores of tokens by query rows: Score.
//
// A CTA takes blocks of tokens, whole units, one after another. Its warps share the block's tiles
// of 16 tokens by KV heads: S [16 tokens, 8 queries] = K [16, dk] Q^T [dk, 8] on tensor cores, with
// queries split into two 16-bit numbers so that results are near those of f32. A lane loads 16
// bytes of K at a time, straight into registers: an order of the values of a head of our own choice
// makes them operands as they lie. What is left of a tile is one score a token, row and KV head,
// which the CTA reduces over KV heads, rows and units in shared memory.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/score.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kCtasAnSm = 2;
constexpr int kColumns = 16;     // queries that a warp multiplies at once, two octets
constexpr int kStagePitch = 20;  // of a query's scores of a tile, in floats: against bank conflicts
constexpr int kBlockTokens = 256;  // at most, where units are smaller
constexpr int kStepTokens = 64;    // blocks differ by at most so many
// Where several query rows score: queries of a KV head that a pass takes, for which K is read once,
// and tokens of a block.
constexpr int kWindowColumns = 64;
constexpr int kWindowTokens = 512;

// How a launch divides its work.
struct Shape {
  int32_t least_tokens;  // of a block
  int32_t most_tokens;   // whole units
  int32_t step_tokens;   // with which all warps have as much to do
  int32_t pitch;         // most_tokens in whole tiles
  int32_t pass_rows;     // query rows that are taken through a block together
  int32_t pass_heads;    // and KV heads: all, or one after the other
};

// Shared memory of a CTA. kBlocks: runs of 32 values that a head has at most; 0: of any size, one
// value after another.
template <int kBlocks>
struct Shared {
  __host__ __device__ Shared(const ScoreArgs& a, const Shape& shape, std::byte* memory)
      : columns(shape.pass_rows * shape.pass_heads * (a.n_heads / a.kv.n_kv_heads)) {
    std::byte* const first = memory;
    const auto take = [&memory](int64_t bytes) {
      std::byte* p = memory;
      memory += (bytes + 15) / 16 * 16;
      return p;
    };
    const auto floats = [&take](int64_t n) { return reinterpret_cast<float*>(take(4 * n)); };
    queries = take(kBlocks == 0 ? 0 : int64_t{2} * columns * kQueryPitch<kBlocks>);
    scale = floats(columns);
    lse = floats(columns);
    weight = floats(shape.pass_rows);
    part = floats(int64_t{shape.pass_heads} * shape.pass_rows * shape.pitch);
    f = floats(int64_t{a.lists} * shape.pitch);
    stage = floats(kBlocks == 0 ? 0 : kWarps * kColumns * kStagePitch);
    counts = reinterpret_cast<int32_t*>(take(4 * int64_t{a.n_seqs}));
    bytes = memory - first;
  }

  int32_t columns;     // a KV head's follow one another: its rows, their heads
  std::byte* queries;  // [2, columns, kQueryPitch]: high halves, low ones
  float* scale;        // [columns]: of products
  float* lse;          // [columns]
  float* weight;       // [pass_rows]: of a row's scores among those of all rows
  float* part;      // [pass_heads, pass_rows, pitch]: one score for the heads of a KV head; where
                    // a pass takes one, and there is one list, for those of all so far
  float* f;         // [lists, pitch]: one score for all rows
  float* stage;     // [kWarps, kColumns, kStagePitch]
  int32_t* counts;  // [n_seqs]: of tokens, then of blocks
  int64_t bytes;
};

// What a CTA works at.
struct Block {
  SeqMeta seq;
  int32_t s;          // the sequence
  int32_t most;       // tokens of a block of this launch; its last one of a sequence may have fewer
  int32_t first;      // token
  int32_t n_tokens;   // of the block
  int32_t n_rows;     // of the sequence that score
  int32_t first_row;  // of this pass, among those
  int32_t pass_rows;  // of this pass
  int32_t first_head;  // KV head of this pass
};

__device__ __forceinline__ const float* QueryOf(const ScoreArgs& a, const Block& b, int row,
                                                int head) {
  const int64_t r = int64_t{b.seq.q_begin} + b.seq.q_len - b.n_rows + b.first_row + row;
  return a.q + (r * a.n_heads + head) * a.kv.dk;
}

// A pass's queries into shared memory, a warp a query.
template <typename T, int kBlocks>
__device__ __forceinline__ void LoadQueries(const ScoreArgs& a, const Shape& shape, const Block& b,
                                            const Shared<kBlocks>& s) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int heads = shape.pass_heads * group;
  // All that a warp has of a batch is under way together.
  constexpr int kTogether = 4;
  const int all = b.pass_rows * heads;
  for (int from = warp; from < all; from += kTogether * kWarps) {
    [[maybe_unused]] Query<std::max(kBlocks, 1)> query[kTogether];
    const float* at[kTogether];
    float lse[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = min(from + j * kWarps, all - 1);
      at[j] = QueryOf(a, b, i / heads, b.first_head * group + i % heads);
      if constexpr (kBlocks > 0) query[j] = LoadQuery<kBlocks>(at[j], a.kv.dk);
      if (a.lse != nullptr) lse[j] = a.lse[(at[j] - a.q) / a.kv.dk];
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = from + j * kWarps;
      if (i >= all) break;
      const int column = (i % heads / group * shape.pass_rows + i / heads) * group + i % group;
      float back = 1;
      if constexpr (kBlocks > 0) {
        back = SplitQuery<T, kBlocks>(query[j], s.queries + column * kQueryPitch<kBlocks>,
                                      s.queries + (s.columns + column) * kQueryPitch<kBlocks>);
      }
      if (lane == 0) {
        s.scale[column] = a.scale * back;
        if (a.lse != nullptr) s.lse[column] = lse[j];
      }
    }
  }
  for (int row = static_cast<int>(threadIdx.x); row < b.pass_rows; row += kThreads) {
    const int age = b.n_rows - 1 - b.first_row - row;
    s.weight[row] =
        a.queries == QueryReduce::kDecay ? powf(a.decay, static_cast<float>(age)) : 1.0f;
  }
}

// Where a tile of K lies: in the block of `n_tokens` tokens from `first` on, task `task` of the
// pass from KV head `first_head` on.
struct TileAt {
  int32_t first, n_tokens, first_head, task;
};

template <int kBlocks>
__device__ __forceinline__ Keys<kBlocks> LoadKeys(const ScoreArgs& a, const Shape& shape,
                                                  int32_t table_off, const TileAt& at) {
  const int kv_head = at.first_head + at.task % shape.pass_heads;
  const int tile = at.task / shape.pass_heads;
  return LoadTile<kBlocks>(a.kv, table_off, kv_head, at.first + tile * kTile,
                           at.first + at.n_tokens - 1);
}

// part of one tile and KV head, by tensor cores.
template <typename T, int kBlocks>
__device__ __forceinline__ void ScoreTile(const ScoreArgs& a, const Shape& shape, const Block& b,
                                          const Shared<kBlocks>& s, int task,
                                          const Keys<kBlocks>& keys) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int head = task % shape.pass_heads;  // of the pass
  const bool goes_on = shape.pass_heads == 1 && a.lists == 1 && b.first_head > 0;
  const int first_column = head * shape.pass_rows * group;
  const int n_columns = b.pass_rows * group;
  float* stage = s.stage + threadIdx.x / 32 * (kColumns * kStagePitch);
  float* part = s.part + int64_t{head} * shape.pass_rows * shape.pitch +
                task / shape.pass_heads * kTile + lane % kTile;
  for (int from = 0; from < n_columns; from += kColumns) {
#pragma unroll
    for (int octet = 0; octet < kColumns / 8; ++octet) {
      const int first = from + 8 * octet;
      if (first >= n_columns) break;
      const int mine = first_column + min(first + g, n_columns - 1);
      const std::byte* high = s.queries + mine * kQueryPitch<kBlocks>;
      float c[4] = {0, 0, 0, 0};
      Multiply<T, kBlocks>(c, keys, high, high + s.columns * kQueryPitch<kBlocks>);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = first_column + min(first + 2 * t + e % 2, n_columns - 1);
        float v = Softcap(c[e] * s.scale[column], a.softcap);
        if (a.lse != nullptr) v = expf(v - s.lse[column]);
        stage[(8 * octet + 2 * t + e % 2) * kStagePitch + g + e / 2 * 8] = v;
      }
    }
    __syncwarp();
    // A half warp takes every other row, a lane a token.
    for (int row = lane / kTile; row < b.pass_rows; row += 2) {
      const int begin = max(from, row * group);
      const int end = min(from + kColumns, (row + 1) * group);
      if (begin >= end) continue;
      float* to = part + row * shape.pitch;
      float v = stage[(begin - from) * kStagePitch + lane % kTile];
      for (int i = begin + 1; i < end; ++i) {
        v = ReduceHeads(a.heads, v, stage[(i - from) * kStagePitch + lane % kTile]);
      }
      *to = goes_on || begin > row * group ? ReduceHeads(a.heads, *to, v) : v;
    }
    __syncwarp();
  }
}

// The same of any K: a lane a token, half a warp every other row. REQUIRES passes of all KV heads.
template <typename T>
__device__ __forceinline__ void ScoreTileOfAny(const ScoreArgs& a, const Shape& shape,
                                               const Block& b, const Shared<0>& s, int task) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int kv_head = task % a.kv.n_kv_heads;
  const int at = task / a.kv.n_kv_heads * kTile + lane % kTile;
  const std::byte* k = KeyRow(a.kv, b.seq.table_off, b.first + min(at, b.n_tokens - 1)) +
                       kv_head * a.kv.k.head_bytes;
  const int64_t to_scales = a.kv.k.ToScales(kv_head);
  for (int row = lane / kTile; row < b.pass_rows; row += 2) {
    float best = 0;
    for (int h = 0; h < group; ++h) {
      const float* q = QueryOf(a, b, row, kv_head * group + h);
      const int column = (kv_head * shape.pass_rows + row) * group + h;
      float dot = 0;
      for (int i = 0; i < a.kv.dk; ++i) dot += q[i] * HeadValue<T>(k, to_scales, i);
      float v = Softcap(dot * s.scale[column], a.softcap);
      if (a.lse != nullptr) v = expf(v - s.lse[column]);
      best = h == 0 ? v : ReduceHeads(a.heads, best, v);
    }
    s.part[(int64_t{kv_head} * shape.pass_rows + row) * shape.pitch + at] = best;
  }
}

// The pass's rows into f, in their order: where a pass takes one KV head, into that of its list.
template <int kBlocks>
__device__ __forceinline__ void TakeRows(const ScoreArgs& a, const Shape& shape, const Block& b,
                                         const Shared<kBlocks>& s) {
  const bool max_rows = a.queries == QueryReduce::kMax;
  const float mean = a.heads == HeadReduce::kMean
                         ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                         : 1.0f;
  const bool all_heads = shape.pass_heads == a.kv.n_kv_heads;
  const int first_list = all_heads || a.lists == 1 ? 0 : b.first_head;
  const int n_lists = all_heads ? a.lists : 1;
  const int planes = a.lists == 1 ? shape.pass_heads : 1;
  for (int i = static_cast<int>(threadIdx.x); i < n_lists * b.n_tokens; i += kThreads) {
    const int list = i / b.n_tokens;
    const int t = i % b.n_tokens;
    float& f = s.f[(first_list + list) * shape.pitch + t];
    float sum = b.first_row > 0 ? f : max_rows ? -INFINITY : 0.0f;
    for (int row = 0; row < b.pass_rows; ++row) {
      const int age = b.n_rows - 1 - b.first_row - row;
      if (b.first + t >= b.seq.kv_len - age) continue;
      const float* part = s.part + row * shape.pitch + t;
      const int heads = shape.pass_rows * shape.pitch;  // from one KV head to the next
      float v = part[a.lists == 1 ? 0 : list * heads];
      for (int plane = 1; plane < planes; ++plane) {
        v = ReduceHeads(a.heads, v, part[plane * heads]);
      }
      v *= mean * s.weight[row];
      sum = max_rows ? fmaxf(sum, v) : sum + v;
    }
    f = sum;
  }
}

// Whether the keys of a warp's next tile come while it works at one: where registers allow.
template <int kBlocks>
constexpr bool kAhead = kBlocks > 0 && kBlocks <= 4;

// One block of tokens; `fresh`: of another sequence than the CTA's last one. `following`: the first
// token of the CTA's next block of the sequence; negative: none. `next`: keys of the warp's first
// task, if not fresh; left with those of the following block.
template <typename T, int kBlocks>
__device__ __forceinline__ void ScoreBlock(const ScoreArgs& a, const Shape& shape, Block& b,
                                           const Shared<kBlocks>& s, bool fresh, int32_t following,
                                           Keys<std::max(kBlocks, 1)>& next) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int tasks = static_cast<int>(CeilDiv(b.n_tokens, kTile)) * shape.pass_heads;
  const bool several = b.n_rows > shape.pass_rows || shape.pass_heads < a.kv.n_kv_heads;
  // What the warp takes after `task`: of this pass, the next one, or the next block.
  [[maybe_unused]] const auto after = [&](int task) {
    TileAt at{b.first, b.n_tokens, b.first_head, task + kWarps};
    if (at.task < tasks) return at;
    at.task = warp;
    at.first_head += shape.pass_heads;
    if (at.first_head < a.kv.n_kv_heads) return at;
    at.first_head = 0;
    if (b.first_row + shape.pass_rows >= b.n_rows && following >= 0) {
      at.first = following;
      at.n_tokens = min(b.most, b.seq.kv_len - following);
    }
    return at;
  };
  if constexpr (kAhead<kBlocks>) {
    if (fresh) next = LoadKeys<kBlocks>(a, shape, b.seq.table_off, {b.first, b.n_tokens, 0, warp});
  }
  for (b.first_row = 0; b.first_row < b.n_rows; b.first_row += shape.pass_rows) {
    b.pass_rows = min(shape.pass_rows, b.n_rows - b.first_row);
    for (b.first_head = 0; b.first_head < a.kv.n_kv_heads; b.first_head += shape.pass_heads) {
      if (fresh || several) {
        LoadQueries<T>(a, shape, b, s);
        __syncthreads();
      }
      if constexpr (kBlocks == 0) {
        for (int task = warp; task < tasks; task += kWarps) ScoreTileOfAny<T>(a, shape, b, s, task);
      } else if constexpr (kAhead<kBlocks>) {
        int task = warp;
        do {  // a warp without a task asks for keys all the same
          const Keys<kBlocks> keys = next;
          next = LoadKeys<kBlocks>(a, shape, b.seq.table_off, after(task));
          if (task < tasks) ScoreTile<T>(a, shape, b, s, task, keys);
          task += kWarps;
        } while (task < tasks);
      } else {
        for (int task = warp; task < tasks; task += kWarps) {
          const TileAt at{b.first, b.n_tokens, b.first_head, task};
          ScoreTile<T>(a, shape, b, s, task, LoadKeys<kBlocks>(a, shape, b.seq.table_off, at));
        }
      }
      __syncthreads();
      if (a.lists == 1 && b.first_head + shape.pass_heads < a.kv.n_kv_heads) continue;
      TakeRows(a, shape, b, s);
      __syncthreads();
    }
  }
  StoreUnits(a, b.s, {b.first, b.n_tokens}, {0, a.lists}, s.f, shape.pitch, kThreads);
}

// Tokens of a block where all sequences have `all`, in whole units: few enough that every CTA gets
// a block, as many as fit where CTAs get several, and the same number of blocks for each.
__device__ __forceinline__ int BlockTokens(const Shape& shape, int unit, int64_t all) {
  const int64_t share = max(int64_t{1}, CeilDiv(all, gridDim.x));
  const int64_t tokens = CeilDiv(share, CeilDiv(share, shape.most_tokens));
  const auto even = static_cast<int>(CeilDiv(tokens, shape.step_tokens)) * shape.step_tokens;
  const auto units = static_cast<int>(CeilDiv(max(even, shape.least_tokens), unit));
  return min(units * unit, shape.most_tokens);
}

__device__ __forceinline__ int64_t Sum(const int32_t* v, int n) {
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += v[i];
  return sum;
}

// Grid: CTAs that share the blocks of all sequences, consecutive ones each.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads, kCtasAnSm)
    ScoreKernel(const __grid_constant__ ScoreArgs a, const __grid_constant__ Shape shape) {
  extern __shared__ uint4 memory[];
  const Shared<kBlocks> s(a, shape, reinterpret_cast<std::byte*>(memory));
  GridTrigger();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < a.n_seqs) PrefetchL2(a.seqs + thread);
  GridWait();
  for (int i = thread; i < a.n_seqs; i += kThreads) {
    s.counts[i] = a.seqs[i].q_len > 0 ? a.seqs[i].kv_len : 0;
  }
  __syncthreads();
  const int most = BlockTokens(shape, a.unit, Sum(s.counts, a.n_seqs));
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < a.n_seqs; i += kThreads) {
    s.counts[i] = static_cast<int32_t>(CeilDiv(s.counts[i], most));
  }
  __syncthreads();
  const int64_t total = Sum(s.counts, a.n_seqs);
  const auto begin = static_cast<int>(total * blockIdx.x / gridDim.x);
  const auto end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  int before = 0;  // blocks of earlier sequences
  for (int i = 0; i < a.n_seqs; before += s.counts[i], ++i) {
    const int first = max(begin - before, 0);
    const int last = min(end - before, s.counts[i]);
    if (first >= last) continue;
    Block b{.seq = a.seqs[i], .s = i, .most = most};
    b.n_rows = ScoringRows(a, b.seq.q_len);
    Keys<std::max(kBlocks, 1)> next;
    for (int block = first; block < last; ++block) {
      b.first = block * most;
      b.n_tokens = min(most, b.seq.kv_len - b.first);
      const int32_t following = block + 1 < last ? b.first + most : -1;
      ScoreBlock<T>(a, shape, b, s, block == first, following, next);
    }
  }
}

size_t SharedBytes(const ScoreArgs& a, const Shape& shape) {
  const auto bytes = [&] {
    switch (BlocksOf(a.kv)) {
      case 2:
        return Shared<2>(a, shape, nullptr).bytes;
      case 4:
        return Shared<4>(a, shape, nullptr).bytes;
      case 8:
        return Shared<8>(a, shape, nullptr).bytes;
      default:
        return Shared<0>(a, shape, nullptr).bytes;
    }
  };
  return static_cast<size_t>(bytes());
}

// Queries of a pass fill the two octets of a warp's product. A block is as small as its warps have
// work, for short contexts; with several passes as large as possible, since each pass loads its
// queries anew. Where rows fill more than that, a pass takes one KV head, so that K is read once
// for more rows.
Shape ShapeOf(const ScoreArgs& a, const Device& device) {
  const int32_t rows = std::max(1, ScoringRows(a, a.n_rows));
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  Shape shape{};
  shape.pass_rows = std::min(rows, std::max(1, kColumns / group));
  shape.pass_heads = a.kv.n_kv_heads;
  const bool by_head = rows > shape.pass_rows && kColumns % group == 0 && BlocksOf(a.kv) > 0;
  if (by_head) {
    shape.pass_rows = std::min(rows, kWindowColumns / group);
    shape.pass_heads = 1;
  }
  const bool several = !by_head && rows > shape.pass_rows;
  shape.step_tokens = std::min(kStepTokens, kTile * std::max(1, kWarps / shape.pass_heads));
  shape.least_tokens = by_head ? kStepTokens
                       : several
                           ? kBlockTokens
                           : std::clamp(kTile * kWarps / a.kv.n_kv_heads, kTile, kBlockTokens);
  const auto set_most = [&](int32_t tokens) {
    shape.most_tokens = std::max(1, tokens / a.unit) * a.unit;
    shape.pitch = static_cast<int32_t>(CeilDiv(shape.most_tokens, kTile)) * kTile;
  };
  int32_t tokens = by_head ? kWindowTokens : kBlockTokens;
  set_most(tokens);
  const size_t room = device.shared_per_block / kCtasAnSm - kBesideDynamic;
  for (; SharedBytes(a, shape) > room && tokens > kTile; tokens /= 2) set_most(tokens / 2);
  while (SharedBytes(a, shape) > room && shape.pass_rows > 1) shape.pass_rows /= 2;
  return shape;
}

template <typename T, int kBlocks>
void LaunchScore(const ScoreArgs& args, const Shape& shape, const Launch& launch) {
  const size_t shared = SharedBytes(args, shape);
  AllowShared(ScoreKernel<T, kBlocks>, shared);
  const int64_t blocks = args.n_seqs * CeilDiv(args.stride * args.unit,
                                               std::min(shape.least_tokens, shape.most_tokens));
  const auto grid = std::min<int64_t>(blocks, int64_t{kCtasAnSm} * launch.device->sm_count);
  LaunchKernel(ScoreKernel<T, kBlocks>, launch, static_cast<uint32_t>(grid), kThreads, shared, args,
               shape);
}

}  // namespace

bool CanScore(const ScoreArgs& args, const Device& device) {
  return SharedBytes(args, ShapeOf(args, device)) + kBesideDynamic <= device.shared_per_block;
}

void Score(const ScoreArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.n_rows == 0 || args.stride == 0) return;
  if (CanScoreTiles(args)) return ScoreTiles(args, launch);
  if (CanScoreRows(args, *launch.device)) return ScoreRows(args, launch);
  const Shape shape = ShapeOf(args, *launch.device);
  if (BlocksOf(args.kv) > 0) {
    return WithBlocks(args.kv, [&](auto t, auto blocks) {
      LaunchScore<decltype(t), decltype(blocks)::value>(args, shape, launch);
    });
  }
  WithKvType(args.kv.k.dtype, [&](auto t) { LaunchScore<decltype(t), 0>(args, shape, launch); });
}

}  // namespace omnikv::cuda
