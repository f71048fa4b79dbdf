// Summaries of units of tokens, and scores of units by them: BlockSummary and BlockScore.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

// --- BlockSummary: a CTA takes a KV head of a unit. A thread reads N neighbouring values of every
// so-many-th token; what the threads found is put together in shared memory, in order.

constexpr int kThreads = 256;

// Grid: x walks KV heads of units, y sequences.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SummaryKernel(const __grid_constant__ BlockSummaryArgs a) {
  constexpr bool kQ8 = std::is_same_v<T, int8_t>;
  __shared__ float found[2][kThreads * N];  // by [token's turn, value]: sums or minima, and maxima
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.y];
  const UnitRange units = TouchedUnits(seq, a.unit);
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
    const int n = min(a.unit, seq.kv_len - first);
    const std::byte* base = a.kv.k.Head(0, kv_head);
    float* out = a.out.Row<float>(seq.table_off, unit) + int64_t{kv_head} * dk;
    for (int from = 0; from < dk; from += lanes * N) {  // once, but for heads of many values
      const int value = from + lane * N;
      float low[N], high[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        low[j] = mean ? 0.0f : INFINITY;
        high[j] = -INFINITY;
      }
      if (turn < turns && value < dk) {
#pragma unroll 4
        for (int t = first + turn; t < first + n; t += turns) {
          const int64_t block = a.kv.block_table[seq.table_off + t / a.kv.block_tokens];
          const int64_t row = block * a.kv.block_tokens + t % a.kv.block_tokens;
          const std::byte* head = base + row * a.kv.k.row_bytes;
          Pack<T, N> k{};
          if constexpr (!kQ8) k = LoadPack<N>(reinterpret_cast<const T*>(head) + value);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            float v = ToF32(k.v[j]);
            if constexpr (kQ8) v = HeadValue<T>(head, a.kv.k.ToScales(kv_head), value + j);
            low[j] = mean ? low[j] + v : fminf(low[j], v);
            high[j] = fmaxf(high[j], v);
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
        for (int other = 1; other < turns; ++other) {
          const float v = found[0][other * lanes * N + i];
          l = mean ? l + v : fminf(l, v);
          h = fmaxf(h, found[1][other * lanes * N + i]);
        }
        out[from + i] = mean ? l / static_cast<float>(n) : a.kind == SummaryKind::kMax ? h : l;
        if (a.kind == SummaryKind::kMinMax) out[width + from + i] = h;
      }
      __syncthreads();
    }
  }
}

template <typename T, int N>
void LaunchSummary(const BlockSummaryArgs& args, const Launch& launch) {
  // Rows of a sequence are in at most so many units.
  const int64_t items = (CeilDiv(args.n_rows, args.unit) + 1) * args.kv.n_kv_heads;
  const dim3 grid(static_cast<uint32_t>(std::min(items, 8 * int64_t{launch.device->sm_count})),
                  static_cast<uint32_t>(args.n_seqs));
  LaunchKernel(SummaryKernel<T, N>, launch, grid, kThreads, 0, args);
}

// --- BlockScore: bound by memory. A warp takes a unit, KV head after KV head; a lane takes runs of
// four neighbouring values, and the queries come from shared memory.

constexpr int kScoreWarps = 8;
constexpr int kScoreCtasAnSm = 4;

__device__ __forceinline__ float Product(bool bound, float q, float low, float high) {
  return bound ? fmaxf(q * low, q * high) : q * low;
}

// What a lane has of the summary of a KV head: runs 128 i + 4 lane of its arrays.
template <int kRuns>
struct Summary {
  float4 low[kRuns], high[kRuns];
};

template <int kRuns>
__device__ __forceinline__ Summary<kRuns> LoadSummary(const float* from, int dk, int64_t to_high) {
  Summary<kRuns> s;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int value = 128 * i + static_cast<int>(threadIdx.x) % 32 * 4;
    s.low[i] = s.high[i] = make_float4(0, 0, 0, 0);
    if (value >= dk) continue;
    s.low[i] = __ldcs(reinterpret_cast<const float4*>(from + value));
    if (to_high != 0) s.high[i] = __ldcs(reinterpret_cast<const float4*>(from + to_high + value));
  }
  return s;
}

// WarpSum of four numbers at once, by as many steps as two of them would take: lanes 8 i to 8 i + 7
// get that of v[i].
__device__ __forceinline__ float WarpSums(const float (&v)[4]) {
  const bool upper = (threadIdx.x & 16) != 0;
  const bool odd = (threadIdx.x & 8) != 0;
  const float even_sum =
      (upper ? v[2] : v[0]) + __shfl_xor_sync(kAllLanes, upper ? v[0] : v[2], 16);
  const float odd_sum = (upper ? v[3] : v[1]) + __shfl_xor_sync(kAllLanes, upper ? v[1] : v[3], 16);
  float sum = (odd ? odd_sum : even_sum) + __shfl_xor_sync(kAllLanes, odd ? even_sum : odd_sum, 8);
#pragma unroll
  for (int lane = 4; lane > 0; lane /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lane);
  return sum;
}

// kRuns: runs of a lane; 0: heads of any size, one value after another. Grid: x walks units, y
// sequences.
template <int kRuns>
__global__ void __launch_bounds__(32 * kScoreWarps, kScoreCtasAnSm)
    BlockScoreKernel(const __grid_constant__ BlockScoreArgs a) {
  extern __shared__ float4 memory[];
  float* const queries = reinterpret_cast<float*>(memory);  // [n_heads, dk]
  GridTrigger();
  GridWait();
  const SeqMeta seq = a.seqs[blockIdx.y];
  const int n_units = static_cast<int>(CeilDiv(seq.kv_len, a.unit));
  const int warps = static_cast<int>(gridDim.x) * kScoreWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int unit = static_cast<int>(blockIdx.x * kScoreWarps + threadIdx.x / 32);
  if (seq.q_len == 0 || static_cast<int>(blockIdx.x) * kScoreWarps >= n_units) return;

  const float* q = a.q + (int64_t{seq.q_begin} + seq.q_len - 1) * a.n_heads * a.dk;
  for (int i = static_cast<int>(threadIdx.x); i < a.n_heads * a.dk; i += 32 * kScoreWarps) {
    queries[i] = q[i];
  }
  __syncthreads();
  if (unit >= n_units) return;

  const int group = a.n_heads / a.n_kv_heads;
  const bool bound = a.kind == SummaryKind::kMinMax;
  const bool max_heads = a.heads == HeadReduce::kMax;
  const float mean = a.heads == HeadReduce::kMean
                         ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                         : 1.0f;
  const int64_t width = int64_t{a.n_kv_heads} * a.dk;
  const int64_t to_high = bound ? width : 0;
  const auto summary = [&](int u) { return a.summaries.Row<const float>(seq.table_off, u); };
  // The summaries of the next KV heads, and of the next unit's: as many as registers allow, since a
  // load takes far longer than the products of one.
  constexpr int kAhead = kRuns == 1 ? 3 : 1;
  [[maybe_unused]] Summary<kRuns == 0 ? 1 : kRuns> ahead[kAhead] = {};
  [[maybe_unused]] int next_unit = unit;
  [[maybe_unused]] int next_head = 0;
  [[maybe_unused]] const float* next_row = summary(unit);
  [[maybe_unused]] const auto load_next = [&] {
    Summary<kRuns == 0 ? 1 : kRuns> s{};
    if constexpr (kRuns > 0) {
      if (next_unit < n_units) s = LoadSummary<kRuns>(next_row + next_head * a.dk, a.dk, to_high);
    }
    if (++next_head == a.n_kv_heads) {
      next_head = 0;
      next_unit += warps;
      if (next_unit < n_units) next_row = summary(next_unit);
    }
    return s;
  };
  if constexpr (kRuns > 0) {
#pragma unroll
    for (auto& s : ahead) s = load_next();
  }
  for (; unit < n_units; unit += warps) {
    float* out = a.out + int64_t{blockIdx.y} * a.lists * a.stride + unit;
    float score = max_heads ? -INFINITY : 0.0f;
    for (int kv_head = 0; kv_head < a.n_kv_heads; ++kv_head) {
      const auto s = ahead[0];
      if constexpr (kRuns > 0) {
#pragma unroll
        for (int i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
        ahead[kAhead - 1] = load_next();
      }
      const auto product = [&](int h) {  // this lane's part
        const float* query = queries + (kv_head * group + h) * a.dk;
        float sum = 0;
        if constexpr (kRuns > 0) {
#pragma unroll
          for (int i = 0; i < kRuns; ++i) {
            const int value = 128 * i + 4 * lane;
            if (value >= a.dk) continue;
            const float4 v = *reinterpret_cast<const float4*>(query + value);
            sum += Product(bound, v.x, s.low[i].x, s.high[i].x);
            sum += Product(bound, v.y, s.low[i].y, s.high[i].y);
            sum += Product(bound, v.z, s.low[i].z, s.high[i].z);
            sum += Product(bound, v.w, s.low[i].w, s.high[i].w);
          }
        } else {
          const float* from = summary(unit) + kv_head * a.dk;
          for (int i = lane; i < a.dk; i += 32) {
            sum += Product(bound, query[i], from[i], from[to_high + i]);
          }
        }
        return sum;
      };
      const auto take = [&](float sum) {
        sum *= a.scale;
        score = max_heads ? fmaxf(score, sum) : score + sum;
      };
      int h = 0;
      for (; h + 4 <= group; h += 4) {
        const float parts[4] = {product(h), product(h + 1), product(h + 2), product(h + 3)};
        const float sums = WarpSums(parts);
#pragma unroll
        for (int i = 0; i < 4; ++i) take(__shfl_sync(kAllLanes, sums, 8 * i));
      }
      for (; h < group; ++h) take(WarpSum(product(h)));
      if (a.lists > 1 || kv_head + 1 == a.n_kv_heads) {
        if (lane == 0) out[a.lists > 1 ? kv_head * a.stride : 0] = score * mean;
        score = max_heads ? -INFINITY : 0.0f;
      }
    }
  }
}

size_t BlockScoreShared(const BlockScoreArgs& args) {
  return sizeof(float) * static_cast<size_t>(args.n_heads) * static_cast<size_t>(args.dk);
}

template <int kRuns>
void LaunchBlockScore(const BlockScoreArgs& args, const Launch& launch) {
  const int64_t walkers = std::min(CeilDiv(args.stride, kScoreWarps),
                                   int64_t{kScoreCtasAnSm} * launch.device->sm_count);
  const dim3 grid(static_cast<uint32_t>(walkers), static_cast<uint32_t>(args.n_seqs));
  AllowShared(BlockScoreKernel<kRuns>, BlockScoreShared(args));
  LaunchKernel(BlockScoreKernel<kRuns>, launch, grid, 32 * kScoreWarps, BlockScoreShared(args),
               args);
}

}  // namespace

void BlockSummary(const BlockSummaryArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.n_rows == 0) return;
  const KvView& kv = args.kv;
  WithKvType(kv.k.dtype, [&](auto t) {
    using T = decltype(t);
    // int8 with scales: a run of neighbours that the compiler joins.
    constexpr int kWide = sizeof(T) == 1 ? 4 : 16 / sizeof(T);
    const bool wide =
        kv.dk % kWide == 0 && AreMultiples(16, kv.k.base, kv.k.row_bytes, kv.k.head_bytes);
    if (wide) return LaunchSummary<T, kWide>(args, launch);
    LaunchSummary<T, 1>(args, launch);
  });
}

bool CanBlockScore(const BlockScoreArgs& args, const Device& device) {
  return BlockScoreShared(args) + kBesideDynamic <= device.shared_per_block;
}

void BlockScore(const BlockScoreArgs& args, const Launch& launch) {
  if (args.n_seqs == 0 || args.stride == 0) return;
  const bool wide =
      args.dk % 4 == 0 && AreMultiples(16, args.summaries.base, args.summaries.row_bytes);
  if (wide && args.dk <= 128) return LaunchBlockScore<1>(args, launch);
  if (wide && args.dk <= 256) return LaunchBlockScore<2>(args, launch);
  LaunchBlockScore<0>(args, launch);
}

}  // namespace omnikv::cuda
