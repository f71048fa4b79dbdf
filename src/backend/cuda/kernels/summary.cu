// Summaries of units of tokens, and scores of units by them: BlockSummary and BlockScore.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

// --- BlockSummary: a CTA takes a KV head of a unit. A thread reads N neighbouring values of every
// so-many-th token; what the threads found is put together in shared memory, in order.

constexpr int kThreads = 256;

// low, high = the mean less and plus the standard deviation of n tokens that went around by
// `turns`, from each turn's mean and its sum of squared distances from that, `stride` numbers
// apart. The unit's sum is that of the turns, and for each token the square of its turn's distance
// from the unit's mean.
__device__ __forceinline__ void MeanStdBounds(const float* means, const float* squares, int stride,
                                              int turns, int n, float& low, float& high) {
  const auto tokens_of = [whole = n / turns, more = n % turns](int turn) {
    return static_cast<float>(whole + (turn < more ? 1 : 0));
  };
  float sum = 0;
  for (int turn = 0; turn < turns; ++turn) sum += tokens_of(turn) * means[turn * stride];
  const float mean = sum / static_cast<float>(n);
  sum = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const float away = means[turn * stride] - mean;
    sum += squares[turn * stride] + tokens_of(turn) * away * away;
  }
  const float deviation = sqrtf(sum / static_cast<float>(n));
  low = mean - deviation;
  high = mean + deviation;
}

// kSpread: of kMeanStd. Grid: x walks KV heads of units, y sequences.
template <typename T, int N, bool kSpread>
__global__ void __launch_bounds__(kThreads)
    SummaryKernel(const __grid_constant__ BlockSummaryArgs a) {
  // By [token's turn, value]: sums or minima, and maxima; of kMeanStd means, and sums of squared
  // distances from them.
  __shared__ float found[2][kThreads * N];
  GridTrigger();
  if (threadIdx.x == 0) PrefetchL2(a.seqs + blockIdx.y);
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.y];
  const UnitRange units = CompletedUnits(seq, a.unit);
  const int items = (units.end - units.begin) * a.kv.n_kv_heads;
  const int dk = a.kv.dk;
  const int lanes = min(dk / N, kThreads);  // threads side by side on a token
  const int turns = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int turn = static_cast<int>(threadIdx.x) / lanes;
  const int64_t width = int64_t{a.kv.n_kv_heads} * dk;
  const bool mean = a.kind == SummaryKind::kMean;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const int unit = units.begin + item / a.kv.n_kv_heads;
    const int kv_head = item % a.kv.n_kv_heads;
    const int first = unit * a.unit;
    const int counted = UnitsOf(a.unit, a.every);  // tokens
    const std::byte* base = a.kv.k.Head(0, kv_head);
    auto* const out = a.out.Row<std::byte>(seq.table_off, unit);
    const int64_t first_value = int64_t{kv_head} * dk;
    for (int from = 0; from < dk; from += lanes * N) {  // once, but for heads of many values
      const int value = from + lane * N;
      float low[N], high[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        low[j] = kSpread || mean ? 0.0f : INFINITY;
        high[j] = kSpread ? 0.0f : -INFINITY;
      }
      [[maybe_unused]] float seen = 0;  // tokens
      if (turn < turns && value < dk) {
#pragma unroll 4
        for (int t = first + turn * a.every; t < first + a.unit; t += turns * a.every) {
          const std::byte* head = base + a.kv.RowIndex(seq.table_off, t) * a.kv.k.row_bytes;
          [[maybe_unused]] Pack<T, N> k{};
          if constexpr (!kInBlocks<T>) k = LoadPack<N>(reinterpret_cast<const T*>(head) + value);
          const float share = kSpread ? 1.0f / (seen += 1) : 0.0f;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            float v;
            if constexpr (kInBlocks<T>) {
              v = HeadValue<T>(head, a.kv.k.ToScales(kv_head), value + j);
            } else {
              v = ToF32(k.v[j]);
            }
            if constexpr (kSpread) {  // Welford: a large mean does not swallow small deviations
              const float away = v - low[j];
              low[j] += away * share;
              high[j] += away * (v - low[j]);
            } else {
              low[j] = mean ? low[j] + v : fminf(low[j], v);
              high[j] = fmaxf(high[j], v);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
          found[0][(turn * lanes + lane) * N + j] = low[j];
          found[1][(turn * lanes + lane) * N + j] = high[j];
        }
      }
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < min(lanes * N, dk - from); i += kThreads) {
        float l = found[0][i];
        float h = found[1][i];
        if constexpr (kSpread)
          MeanStdBounds(found[0] + i, found[1] + i, lanes * N, turns, counted, l, h);
        for (int other = 1; !kSpread && other < turns; ++other) {
          const float v = found[0][other * lanes * N + i];
          l = mean ? l + v : fminf(l, v);
          h = fmaxf(h, found[1][other * lanes * N + i]);
        }
        const float v = mean                          ? l / static_cast<float>(counted)
                        : a.kind == SummaryKind::kMax ? h
                                                      : l;
        StoreValue(a.format, out, first_value + from + i, v);
        if (kSpread || a.kind == SummaryKind::kMinMax) {
          StoreValue(a.format, out, width + first_value + from + i, h);
        }
      }
      __syncthreads();
    }
  }
}

template <typename T, int N, bool kSpread>
void LaunchSummary(const BlockSummaryArgs& args, const Launch& launch) {
  // Rows of a sequence complete at most so many units.
  const int64_t items = CeilDiv(args.n_rows, args.unit) * args.kv.n_kv_heads;
  const dim3 grid(static_cast<uint32_t>(std::min(items, 8 * int64_t{launch.device->sm_count})),
                  static_cast<uint32_t>(args.n_seqs));
  LaunchKernel(SummaryKernel<T, N, kSpread>, launch, grid, kThreads, 0, args);
}

// --- BlockScore: bound by memory. A warp takes a KV head of several units at a time, with the KV
// head's queries in registers: a lane has a run of four of its values (of large heads two). The
// sums of all units and query heads are then added up over the lanes together.

constexpr int kScoreWarps = 8;

// Four neighbouring values of a summary, as they lie in memory.
template <typename T>
struct Four {
  uint2 v;

  static __device__ Four Load(const T* at) { return {__ldcs(reinterpret_cast<const uint2*>(at))}; }
  __device__ float4 Floats() const {
    Pack<T, 4> four;
    memcpy(&four, &v, sizeof(v));
    return {ToF32(four.v[0]), ToF32(four.v[1]), ToF32(four.v[2]), ToF32(four.v[3])};
  }
};
template <>
struct Four<float> {
  float4 v;

  static __device__ Four Load(const float* at) {
    return {__ldcs(reinterpret_cast<const float4*>(at))};
  }
  __device__ float4 Floats() const { return v; }
};

template <bool kBound>
__device__ __forceinline__ float Product(float q, float low, float high) {
  return kBound ? fmaxf(q * low, q * high) : q * low;
}

// T: of summaries, of which a lane has four neighbours at a time. kRuns: of 128 values that a head
// has. kHeads: query heads that a warp takes at a time.
template <typename T, int kRuns, int kHeadsAtATime, bool kBound>
struct ScoreShape {
  static constexpr int kHeads = kHeadsAtATime;
  static constexpr int kRows = kRuns * (kBound ? 2 : 1);                // loads of a unit
  static constexpr int kLoads = sizeof(T) == 4 ? 8 : 16;                // that a lane has under way
  static constexpr int kUnits = std::min(kLoads / kRows, 32 / kHeads);  // of a warp at a time
  static constexpr int kSums = kUnits * kHeads;
  static constexpr int kBlocksAnSm =  // as registers allow
      sizeof(T) == 4 && kBound && kRuns * kHeads <= 4 ? 3 : 2;
};

// How the warps of a block divide the KV heads of a tile of units among them.
struct Tiling {
  Divisor parts;  // of a KV head's query heads
  int items;      // parts of all KV heads
  int sides;      // warps with the same item: each has units of its own
  Divisor units;  // of a tile
};
template <typename Shape>
Tiling TilingOf(const BlockScoreArgs& a) {
  const int parts = (a.n_heads / a.n_kv_heads + Shape::kHeads - 1) / Shape::kHeads;
  const int items = a.n_kv_heads * parts;
  const int sides = items < kScoreWarps ? kScoreWarps / items : 1;
  return {parts, items, sides, sides * Shape::kUnits};
}

// The sums of v[i] over all lanes: lane j gets that of i = j / (32 / N). Steps first halve the
// numbers of a lane and then add up lanes: far fewer than a sum of each takes.
template <int N, int kStep = 16>
__device__ __forceinline__ float SumsOfLanes(const float (&v)[N]) {
  if constexpr (N == 1) {
    float sum = v[0];
#pragma unroll
    for (int step = kStep; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
  } else {
    const bool upper = (threadIdx.x & kStep) != 0;
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float given = upper ? v[i] : v[i + N / 2];
      half[i] = (upper ? v[i + N / 2] : v[i]) + __shfl_xor_sync(kAllLanes, given, kStep);
    }
    return SumsOfLanes<N / 2, kStep / 2>(half);
  }
}

__device__ __forceinline__ float Combine(bool max_heads, float a, float b) {
  return max_heads ? fmaxf(a, b) : a + b;
}

__device__ __forceinline__ float ShareOfHead(const BlockScoreArgs& a) {
  return a.heads == HeadReduce::kMean ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                                      : 1.0f;
}

// Before GridWait, those of the first tile that a block takes: they are there since earlier steps.
__device__ __forceinline__ void PrefetchSummaries(const BlockScoreArgs& a, const SeqMeta& seq,
                                                  int tile_units) {
  const StateView& s = a.summaries;
  const int first = static_cast<int>(blockIdx.x) * tile_units;
  const int n = min(tile_units, seq.kv_len / a.unit - first);
  const auto lines = static_cast<int>(CeilDiv(s.row_bytes, 128));
#pragma unroll 1
  for (auto i = static_cast<int>(threadIdx.x); i < n * lines; i += 32 * kScoreWarps) {
    const int unit = first + i / lines;
    const int32_t* entry = s.block_table + seq.table_off + unit / s.block_units * s.unit_blocks;
    const int64_t row = int64_t{__ldcg(entry)} * s.block_units + unit % s.block_units;
    PrefetchL2(s.base + row * s.row_bytes + i % lines * 128);
  }
}

// Grid: x walks tiles of units, y sequences.
template <typename T, int kRuns, int kHeads, bool kBound>
__global__ void __launch_bounds__(32 * kScoreWarps,
                                  ScoreShape<T, kRuns, kHeads, kBound>::kBlocksAnSm)
    BlockScoreKernel(const __grid_constant__ BlockScoreArgs a,
                     const __grid_constant__ Tiling tiling) {
  using S = ScoreShape<T, kRuns, kHeads, kBound>;
  constexpr int kSpread = 32 / S::kSums;  // lanes with the same sum
  extern __shared__ float shared[];       // of two tiles, in turn: [items, units of a tile]
  GridTrigger();
  const int tile_units = tiling.units;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int side = tiling.items < kScoreWarps ? warp / tiling.items : 0;
  const int own_item = tiling.items < kScoreWarps ? warp % tiling.items : warp;
  const int group = a.n_heads / a.n_kv_heads;
  const bool max_heads = a.heads == HeadReduce::kMax;
  const float none = max_heads ? -INFINITY : 0.0f;
  const float share = ShareOfHead(a);
  int list_items = tiling.items / a.lists;
  const int64_t to_high = int64_t{a.n_kv_heads} * a.dk;
  // The summary of lane i's unit of the warp, of those that a tile has.
  const auto locate = [&](const SeqMeta& of, int tile) {
    const int unit = tile * tile_units + side * S::kUnits + min(lane, S::kUnits - 1);
    const int last = max(0, UnitsOf(of.kv_len, a.unit) - 1);
    return a.summaries.Row<const T>(of.table_off, min(unit, last));
  };
  auto tile = static_cast<int>(blockIdx.x);
  const SeqMeta early = LoadEarly(a.seqs + blockIdx.y);
  PrefetchSummaries(a, early, tile_units);
  asm volatile("" : "+r"(list_items));  // a division, before the wait
  GridWait();
  const T* row = locate(early, tile);  // on its way together with what confirms it
  const SeqMeta seq = a.seqs[blockIdx.y];
  if (seq.q_len == 0) return;
  if (seq.table_off != early.table_off || seq.kv_len != early.kv_len) row = locate(seq, tile);
  const int n_units = UnitsOf(seq.kv_len, a.unit);
  const int n_tiles = UnitsOf(n_units, tiling.units);
  const float* const q = a.q + (int64_t{seq.q_begin} + seq.q_len - 1) * a.n_heads * a.dk;

  float4 query[kHeads][kRuns];
  const auto load_query = [&](int item) {
    const int first = item % tiling.parts * kHeads;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = item / tiling.parts * group + first + h;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int value = 128 * r + 4 * lane;
        query[h][r] = make_float4(0, 0, 0, 0);
        if (first + h >= group || value >= a.dk) continue;
        query[h][r] = __ldg(reinterpret_cast<const float4*>(q + head * a.dk + value));
      }
    }
  };
  if (side < tiling.sides && own_item < tiling.items) load_query(own_item);
  int turn = 0;
  for (; tile < n_tiles; tile += static_cast<int>(gridDim.x)) {
    float* const found = shared + turn * tiling.items * tile_units;
    turn = 1 - turn;
    const T* const rows = row;
    for (int item = own_item; item < tiling.items && side < tiling.sides; item += kScoreWarps) {
      if (tiling.items > kScoreWarps) load_query(item);
      Four<T> low[S::kUnits][kRuns];
      Four<T> high[kBound ? S::kUnits : 1][kRuns];
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) {
        const auto address = reinterpret_cast<uintptr_t>(rows);
        const T* from = reinterpret_cast<const T*>(__shfl_sync(kAllLanes, address, u)) +
                        item / tiling.parts * a.dk + 4 * lane;
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          const bool valid = 128 * r + 4 * lane < a.dk;
          const auto load = [&](const T* at) { return valid ? Four<T>::Load(at) : Four<T>{}; };
          low[u][r] = load(from + 128 * r);
          if constexpr (kBound) high[u][r] = load(from + to_high + 128 * r);
        }
      }
      const int next = tile + static_cast<int>(gridDim.x);
      if (item == own_item && next < n_tiles) row = locate(seq, next);
      float sums[S::kSums] = {};
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) {
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          const float4 l = low[u][r].Floats();
          const float4 h = kBound ? high[u][r].Floats() : l;
#pragma unroll
          for (int head = 0; head < kHeads; ++head) {
            float& sum = sums[u * kHeads + head];
            const float4 v = query[head][r];
            sum += Product<kBound>(v.x, l.x, h.x);
            sum += Product<kBound>(v.y, l.y, h.y);
            sum += Product<kBound>(v.z, l.z, h.z);
            sum += Product<kBound>(v.w, l.w, h.w);
          }
        }
      }
      const int head = lane / kSpread % kHeads;
      const bool is_head = item % tiling.parts * kHeads + head < group;
      float score = SumsOfLanes(sums);
      score = is_head ? score * a.scale : none;
#pragma unroll
      for (int step = kSpread; step < kSpread * kHeads; step *= 2) {
        score = Combine(max_heads, score, __shfl_xor_sync(kAllLanes, score, step));
      }
      if (lane % (kSpread * kHeads) == 0) {
        found[item * tile_units + side * S::kUnits + lane / (kSpread * kHeads)] = score;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < a.lists * tile_units; i += 32 * kScoreWarps) {
      const int list = i / tiling.units;
      const int in_tile = i % tiling.units;
      const int unit = tile * tile_units + in_tile;
      float score = none;
#pragma unroll 1
      for (int item = list * list_items; item < (list + 1) * list_items; ++item) {
        score = Combine(max_heads, score, found[item * tile_units + in_tile]);
      }
      if (unit < n_units) {
        a.out[(int64_t{blockIdx.y} * a.lists + list) * a.stride + unit] =
            unit < a.sinks ? kChosenFirst : score * share;
      }
    }
  }
}

// Heads of any size: one value after another, from memory. Grid: x walks units, y sequences.
__global__ void __launch_bounds__(32 * kScoreWarps, 4)
    BlockScoreAny(const __grid_constant__ BlockScoreArgs a) {
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.y];
  if (seq.q_len == 0) return;
  const int n_units = static_cast<int>(CeilDiv(seq.kv_len, a.unit));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = a.n_heads / a.n_kv_heads;
  const bool bound = SummaryArrays(a.kind) == 2;
  const float share = ShareOfHead(a);
  const bool max_heads = a.heads == HeadReduce::kMax;
  const float none = max_heads ? -INFINITY : 0.0f;
  const int64_t to_high = bound ? int64_t{a.n_kv_heads} * a.dk : 0;
  const float* q = a.q + (int64_t{seq.q_begin} + seq.q_len - 1) * a.n_heads * a.dk;
  for (int unit = static_cast<int>(blockIdx.x * kScoreWarps + threadIdx.x / 32); unit < n_units;
       unit += static_cast<int>(gridDim.x) * kScoreWarps) {
    float score = none;
    for (int h = 0; h < a.n_heads; ++h) {
      const int kv_head = h / group;
      const auto* row = a.summaries.Row<const std::byte>(seq.table_off, unit);
      const auto at = [&](int64_t i) { return LoadValue(a.format, row, kv_head * a.dk + i); };
      float sum = 0;
      for (int i = lane; i < a.dk; i += 32) {
        const float v = q[int64_t{h} * a.dk + i];
        sum += bound ? Product<true>(v, at(i), at(to_high + i)) : v * at(i);
      }
      sum = WarpSum(sum) * a.scale;
      score = Combine(max_heads, score, sum);
      const bool ends = a.lists > 1 ? (h + 1) % group == 0 : h + 1 == a.n_heads;
      if (!ends) continue;
      if (lane == 0) {
        const int list = a.lists > 1 ? kv_head : 0;
        a.out[(int64_t{blockIdx.y} * a.lists + list) * a.stride + unit] =
            unit < a.sinks ? kChosenFirst : score * share;
      }
      score = none;
    }
  }
}

// Blocks that take `units` at a time.
dim3 BlockScoreGrid(const BlockScoreArgs& args, int64_t units, int blocks_an_sm,
                    const Device& device) {
  const int64_t walkers =
      std::min(CeilDiv(args.stride, units), int64_t{blocks_an_sm} * device.sm_count);
  return {static_cast<uint32_t>(walkers), static_cast<uint32_t>(args.n_seqs)};
}

template <typename T, int kRuns, int kHeads, bool kBound>
void LaunchBlockScore(const BlockScoreArgs& args, const Launch& launch) {
  using S = ScoreShape<T, kRuns, kHeads, kBound>;
  constexpr auto kKernel = BlockScoreKernel<T, kRuns, kHeads, kBound>;
  const Tiling tiling = TilingOf<S>(args);
  const auto shared = sizeof(float) * static_cast<size_t>(2 * tiling.items * tiling.units);
  AllowShared(kKernel, shared);
  LaunchKernel(kKernel, launch, BlockScoreGrid(args, tiling.units, S::kBlocksAnSm, *launch.device),
               32 * kScoreWarps, shared, args, tiling);
}

template <typename T, int kRuns, bool kBound>
void LaunchBlockScore(const BlockScoreArgs& args, const Launch& launch) {
  const int group = args.n_heads / args.n_kv_heads;
  if (group == 1) return LaunchBlockScore<T, kRuns, 1, kBound>(args, launch);
  if (group == 2) return LaunchBlockScore<T, kRuns, 2, kBound>(args, launch);
  if (group <= 4 || kRuns > 1) return LaunchBlockScore<T, kRuns, 4, kBound>(args, launch);
  if constexpr (kRuns == 1) LaunchBlockScore<T, 1, 8, kBound>(args, launch);
}

template <typename T, bool kBound>
void LaunchBlockScore(const BlockScoreArgs& args, const Launch& launch) {
  return args.dk <= 128 ? LaunchBlockScore<T, 1, kBound>(args, launch)
                        : LaunchBlockScore<T, 2, kBound>(args, launch);
}

}  // namespace

void BlockSummary(const BlockSummaryArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.n_rows == 0) return;
  const KvView& kv = args.kv;
  WithKvType(kv.k.dtype, [&](auto t) {
    using T = decltype(t);
    // In blocks: a run of neighbours that the compiler joins.
    constexpr int kWide = kInBlocks<T> ? 4 : 16 / sizeof(T);
    const bool wide =
        kv.dk % kWide == 0 && AreMultiples(16, kv.k.base, kv.k.row_bytes, kv.k.head_bytes);
    if (args.kind == SummaryKind::kMeanStd) {
      return wide ? LaunchSummary<T, kWide, true>(args, launch)
                  : LaunchSummary<T, 1, true>(args, launch);
    }
    if (wide) return LaunchSummary<T, kWide, false>(args, launch);
    LaunchSummary<T, 1, false>(args, launch);
  });
}

void BlockScore(const BlockScoreArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.stride == 0) return;
  const bool wide = args.dk % 4 == 0 && args.dk <= 256 &&
                    AreMultiples(16, args.q, args.summaries.base, args.summaries.row_bytes);
  if (!wide) {
    LaunchKernel(BlockScoreAny, launch, BlockScoreGrid(args, kScoreWarps, 4, *launch.device),
                 32 * kScoreWarps, 0, args);
  } else if (SummaryArrays(args.kind) == 2) {
    WithType(args.format, [&](auto t) { LaunchBlockScore<decltype(t), true>(args, launch); });
  } else {
    LaunchBlockScore<float, false>(args, launch);
  }
}

}  // namespace omnikv::cuda
