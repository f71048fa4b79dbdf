// Moments of the queries of a prompt (QueryMoments), and scores of tokens by them (ExpectedScore):
// products in f32, a few per cent of what the prompt's own products take.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;         // rows and columns of a block's part of a product
constexpr int kSlab = 16;         // of its inner dimension, in shared memory at a time
constexpr int kEach = 4;          // rows and columns that a thread has of it
constexpr int kMeanParts = 32;    // of the queries, that are added up apart
constexpr int kProductParts = 4;  // the same of their products
constexpr int kSumParts = 64;     // of the tokens, whose weights are added up apart
static_assert(kTile / kEach * (kTile / kEach) == kThreads && kTile * kSlab == 4 * kThreads);

// The rows of the step that count: `n` from row `first` on, which is at position `pos`.
struct Counted {
  int first, n, pos;
  __device__ explicit Counted(const QueryMomentsArgs& a) {
    const SeqMeta step = *a.steps;
    const int first_pos = step.kv_len - step.q_len;
    const int skipped = min(max(a.skip - first_pos, 0), step.q_len);
    first = step.q_begin + skipped;
    n = step.q_len - skipped;
    pos = first_pos + skipped;
  }
};

// What lies between the kernels of one op.
struct MomentsScratch {
  float2* turns;    // [n_rows, n_freq]: cosines, sines
  float* parts;     // [kMeanParts, n_heads, dk]: sums of queries
  float* mean;      // [n_heads, dk]: of the step's queries
  float* products;  // [kProductParts, n_heads, dk, dk]: of tiles on the diagonal or right of it
};

// Value i of the turned query at `q`.
__device__ __forceinline__ float TurnedBack(const QueryMomentsArgs& a, const float* q,
                                            const float2* turns, int i) {
  const float v = q[i];
  if (i >= 2 * a.n_freq) return v;
  const bool low = i < a.n_freq;
  const float2 turn = turns[low ? i : i - a.n_freq];
  const float partner = q[low ? i + a.n_freq : i - a.n_freq];
  return v * turn.x + (low ? partner : -partner) * turn.y;
}

__global__ void __launch_bounds__(kThreads)
    TurnsKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  GridTrigger();
  GridWait();
  const Counted rows(a);
  const int at = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (at >= rows.n * a.n_freq) return;
  const float pos = static_cast<float>(rows.pos + at / a.n_freq);
  // The angle as RopeTable makes it: a product in f32.
  double sine;
  double cosine;
  sincos(static_cast<double>(__fmul_rn(pos, a.inv_freq[at % a.n_freq])), &sine, &cosine);
  s.turns[at] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

// Grid: x parts, y heads.
__global__ void __launch_bounds__(kThreads)
    QuerySumsKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  GridTrigger();
  GridWait();
  const Counted rows(a);
  const auto head = static_cast<int>(blockIdx.y);
  const int each = (rows.n + kMeanParts - 1) / kMeanParts;
  const int begin = min(static_cast<int>(blockIdx.x) * each, rows.n);
  const int end = min(begin + each, rows.n);
  float* const out = s.parts + (int64_t{blockIdx.x} * a.n_heads + head) * a.dk;
  for (int i = static_cast<int>(threadIdx.x); i < a.dk; i += kThreads) {
    float sum = 0;
    for (int r = begin; r < end; ++r) {
      const float* q = a.q + (int64_t{rows.first + r} * a.n_heads + head) * a.dk;
      sum += TurnedBack(a, q, s.turns + int64_t{r} * a.n_freq, i);
    }
    out[i] = sum;
  }
}

// Grid: x heads.
__global__ void __launch_bounds__(kThreads)
    QueryMeanKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  GridTrigger();
  GridWait();
  const Counted rows(a);
  const int64_t head = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < a.dk; i += kThreads) {
    float sum = 0;
#pragma unroll 8
    for (int p = 0; p < kMeanParts; ++p) sum += s.parts[(p * a.n_heads + head) * a.dk + i];
    s.mean[head * a.dk + i] = rows.n > 0 ? sum / static_cast<float>(rows.n) : 0.0f;
  }
}

// acc += rows [kSlab, kTile]' * columns [kSlab, kTile], for a thread's kEach of both.
__device__ __forceinline__ void AddProducts(const float (&rows)[kSlab][kTile],
                                            const float (&columns)[kSlab][kTile], int row,
                                            int column, float (&acc)[kEach][kEach]) {
#pragma unroll
  for (int k = 0; k < kSlab; ++k) {
    const float4 x = *reinterpret_cast<const float4*>(&rows[k][row]);
    const float4 y = *reinterpret_cast<const float4*>(&columns[k][column]);
    const float xs[kEach] = {x.x, x.y, x.z, x.w};
    const float ys[kEach] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) acc[i][j] += xs[i] * ys[j];
    }
  }
}

// Grid: x tiles, of which those left of the diagonal have nothing to do; y parts; z heads.
__global__ void __launch_bounds__(kThreads)
    QueryProductsKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  __shared__ alignas(16) float left[kSlab][kTile];
  __shared__ alignas(16) float right[kSlab][kTile];
  GridTrigger();
  GridWait();
  const int tiles = (a.dk + kTile - 1) / kTile;
  const int first_i = static_cast<int>(blockIdx.x) / tiles * kTile;
  const int first_j = static_cast<int>(blockIdx.x) % tiles * kTile;
  if (first_i > first_j) return;
  const Counted rows(a);
  const auto head = static_cast<int>(blockIdx.z);
  const int each = (rows.n + kProductParts - 1) / kProductParts;
  const int begin = min(static_cast<int>(blockIdx.y) * each, rows.n);
  const int end = min(begin + each, rows.n);
  const float* const mean = s.mean + int64_t{head} * a.dk;
  const auto tid = static_cast<int>(threadIdx.x);
  const int row = tid / (kTile / kEach) * kEach;
  const int column = tid % (kTile / kEach) * kEach;
  float acc[kEach][kEach] = {};
  const auto load = [&](float(&to)[kSlab][kTile], int first, int slab) {
    for (int at = tid; at < kSlab * kTile; at += kThreads) {
      const int r = slab + at / kTile;
      const int i = first + at % kTile;
      float v = 0;
      if (r < end && i < a.dk) {
        const float* q = a.q + (int64_t{rows.first + r} * a.n_heads + head) * a.dk;
        v = TurnedBack(a, q, s.turns + int64_t{r} * a.n_freq, i) - mean[i];
      }
      to[at / kTile][at % kTile] = v;
    }
  };
  for (int slab = begin; slab < end; slab += kSlab) {
    load(left, first_i, slab);
    load(right, first_j, slab);
    __syncthreads();
    AddProducts(left, right, row, column, acc);
    __syncthreads();
  }
  float* const out = s.products + (int64_t{blockIdx.y} * a.n_heads + head) * a.dk * a.dk;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int x = first_i + row + i;
      const int y = first_j + column + j;
      if (x < a.dk && y < a.dk) out[int64_t{x} * a.dk + y] = acc[i][j];
    }
  }
}

// The covariance of the step's queries joins what is held. Grid: x values, y heads.
__global__ void __launch_bounds__(kThreads)
    JoinCovariancesKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  GridTrigger();
  GridWait();
  if (a.steps->q_len == 0) return;
  const int at = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (at >= a.dk * a.dk) return;
  const int64_t head = blockIdx.y;
  const auto n = static_cast<float>(Counted(a).n);
  const float held = a.accumulate ? static_cast<float>(*a.out.count) : 0.0f;
  const float all = held + n;
  const int x = at / a.dk;
  const int y = at % a.dk;
  // Of two values that are each other's mirror images, one was computed.
  const bool mirrored = x / kTile > y / kTile;
  const int64_t from = mirrored ? int64_t{y} * a.dk + x : at;
  float sum = 0;
  for (int p = 0; p < kProductParts; ++p) {
    sum += s.products[(p * a.n_heads + head) * a.dk * a.dk + from];
  }
  float* const out = a.out.covariance + head * a.dk * a.dk + at;
  float v = all > 0 ? sum / all : 0.0f;
  if (held > 0) {
    const float share = n / all;
    const float* mean = s.mean + head * a.dk;
    const float* before = a.out.mean + head * a.dk;
    v += (1 - share) * (*out + share * (mean[x] - before[x]) * (mean[y] - before[y]));
  }
  *out = v;
}

// The means join, and the count. One block.
__global__ void __launch_bounds__(1024)
    JoinMeansKernel(const __grid_constant__ QueryMomentsArgs a, MomentsScratch s) {
  GridTrigger();
  GridWait();
  if (a.steps->q_len == 0) return;
  const int n = Counted(a).n;
  const int held = a.accumulate ? *a.out.count : 0;
  __syncthreads();  // all have read the count
  const float share = n > 0 ? static_cast<float>(n) / static_cast<float>(held + n) : 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < a.n_heads * a.dk; i += 1024) {
    const float before = held > 0 ? a.out.mean[i] : 0.0f;
    a.out.mean[i] = before + (s.mean[i] - before) * share;
  }
  if (threadIdx.x == 0) *a.out.count = held + n;
}

// Parts of a kernel's scratch, each at a multiple of 256 bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t n) {
    std::byte* const at = base_ + used_;
    used_ += (static_cast<size_t>(n) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

MomentsScratch Carve(const QueryMomentsArgs& a, Carver& carver) {
  const int64_t values = int64_t{a.n_heads} * a.dk;
  MomentsScratch s{};
  s.turns = carver.Take<float2>(int64_t{a.n_rows} * a.n_freq);
  s.parts = carver.Take<float>(kMeanParts * values);
  s.mean = carver.Take<float>(values);
  s.products = carver.Take<float>(a.out.covariance != nullptr ? kProductParts * values * a.dk : 0);
  return s;
}

// What lies between the kernels of ExpectedScore.
struct ScoreScratch {
  double2* turns;     // [n_freq]: means of cosines and sines
  float* mean;        // [n_heads, dk]: turned and scaled
  float* covariance;  // [n_heads, dk, dk]: the same
  float2* parts;      // [kSumParts, n_heads]: the highest logit, the sum of exp(logit - that)
  float* lse;         // [n_heads]
};

// Grid: x frequencies.
__global__ void __launch_bounds__(kThreads)
    MeanTurnsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  __shared__ double2 sums[kThreads];
  GridTrigger();
  GridWait();
  const int from = a.steps->kv_len;
  double2 sum = make_double2(0, 0);
  for (int p = static_cast<int>(threadIdx.x); p < a.future; p += kThreads) {
    double sine;
    double cosine;
    const float angle = __fmul_rn(static_cast<float>(from + p), a.inv_freq[blockIdx.x]);
    sincos(static_cast<double>(angle), &sine, &cosine);
    sum.x += cosine;
    sum.y += sine;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= half) continue;
    sums[threadIdx.x].x += sums[threadIdx.x + half].x;
    sums[threadIdx.x].y += sums[threadIdx.x + half].y;
  }
  if (threadIdx.x > 0) return;
  s.turns[blockIdx.x] = make_double2(sums[0].x / a.future, sums[0].y / a.future);
}

// How value i of a vector is turned: own * v[i] + other * v[partner].
struct TurnOf {
  int partner;
  double own, other;
  __device__ TurnOf(const double2* turns, int n_freq, int i) : partner(i), own(1), other(0) {
    if (i >= 2 * n_freq) return;
    const bool low = i < n_freq;
    const double2 turn = turns[low ? i : i - n_freq];
    partner = low ? i + n_freq : i - n_freq;
    own = turn.x;
    other = low ? -turn.y : turn.y;
  }
};

// Grid: x values of a covariance, or of a mean where there is none; y heads.
__global__ void __launch_bounds__(kThreads)
    TurnMomentsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  GridTrigger();
  GridWait();
  const int at = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int64_t head = blockIdx.y;
  const int dk = a.kv.dk;
  const double scale = a.scale;
  if (at < dk) {
    const TurnOf turn(s.turns, a.n_freq, at);
    const float* mean = a.queries.mean + head * dk;
    s.mean[head * dk + at] =
        static_cast<float>(scale * (turn.own * mean[at] + turn.other * mean[turn.partner]));
  }
  if (a.queries.covariance == nullptr || at >= dk * dk) return;
  const TurnOf x(s.turns, a.n_freq, at / dk);
  const TurnOf y(s.turns, a.n_freq, at % dk);
  const float* const c = a.queries.covariance + head * dk * dk;
  const float* const row = c + at / dk * dk;
  const float* const other = c + x.partner * dk;
  const double v = x.own * (y.own * row[at % dk] + y.other * row[y.partner]) +
                   x.other * (y.own * other[at % dk] + y.other * other[y.partner]);
  s.covariance[head * dk * dk + at] = static_cast<float>(scale * scale / 2 * v);
}

// Grid: x walks tiles of tokens, y query heads.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    ExpectedLogitsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  __shared__ alignas(16) float keys[kSlab][kTile];
  __shared__ alignas(16) float covariances[kSlab][kTile];
  __shared__ const std::byte* key_of[kTile];
  GridTrigger();
  GridWait();
  const SeqMeta seq = *a.seqs;
  if (seq.q_len == 0) return;
  const auto head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (a.n_heads / a.kv.n_kv_heads);
  const int64_t to_scales = a.kv.k.ToScales(kv_head);
  const int dk = a.kv.dk;
  const float* const mean = s.mean + int64_t{head} * dk;
  const float* const covariance = s.covariance + int64_t{head} * dk * dk;
  const int order = a.queries.covariance != nullptr ? dk : 0;
  const auto tid = static_cast<int>(threadIdx.x);
  const int row = tid / (kTile / kEach) * kEach;
  const int column = tid % (kTile / kEach) * kEach;
  for (int64_t begin = a.sinks + int64_t{blockIdx.x} * kTile; begin < seq.kv_len;
       begin += int64_t{gridDim.x} * kTile) {
    if (tid < kTile) {
      const int t = static_cast<int>(min(begin + tid, int64_t{seq.kv_len} - 1));
      key_of[tid] = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
    }
    __syncthreads();
    float logit[kEach] = {};
    for (int first = 0; first < dk; first += kTile) {
      float acc[kEach][kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int at = first + column + j;
        const float m = at < dk ? mean[at] : 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) acc[i][j] = m;
      }
      for (int slab = 0; slab < order; slab += kSlab) {
        for (int at = tid; at < kSlab * kTile; at += kThreads) {
          const int k = slab + at % kSlab;  // neighbours of a key
          keys[at % kSlab][at / kSlab] =
              k < dk ? HeadValue<T>(key_of[at / kSlab], to_scales, k) : 0.0f;
          const int i = slab + at / kTile;
          const int j = first + at % kTile;
          covariances[at / kTile][at % kTile] =
              i < dk && j < dk ? covariance[int64_t{i} * dk + j] : 0.0f;
        }
        __syncthreads();
        AddProducts(keys, covariances, row, column, acc);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int at = first + column + j;
          if (at < dk) logit[i] += acc[i][j] * HeadValue<T>(key_of[row + i], to_scales, at);
        }
      }
    }
    // The threads of a row are neighbours.
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int lane = kTile / kEach / 2; lane > 0; lane /= 2) {
        logit[i] += __shfl_xor_sync(kAllLanes, logit[i], lane);
      }
      if (column == 0 && begin + row + i < seq.kv_len) {
        a.logits[head * a.stride + begin + row + i] = logit[i];
      }
    }
    __syncthreads();  // the next tile's keys
  }
}

// Joins two sums of exponentials with their highest numbers; (-inf, 0) is none.
__device__ __forceinline__ float2 Join(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  if (top == -INFINITY) return {top, 0};
  return {top, a.y * expf(a.x - top) + b.y * expf(b.x - top)};
}

// That of all lanes.
__device__ __forceinline__ float2 WarpJoin(float2 v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    const float2 other = {__shfl_xor_sync(kAllLanes, v.x, lane),
                          __shfl_xor_sync(kAllLanes, v.y, lane)};
    v = Join(v, other);
  }
  return v;
}

// Grid: x parts, y query heads.
__global__ void __launch_bounds__(kThreads)
    WeightSumsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  __shared__ float2 of_warps[kThreads / 32];
  GridTrigger();
  GridWait();
  const SeqMeta seq = *a.seqs;
  if (seq.q_len == 0) return;
  const int n = max(seq.kv_len - a.sinks, 0);
  const int each = (n + kSumParts - 1) / kSumParts;
  const int begin = min(static_cast<int>(blockIdx.x) * each, n);
  const int end = min(begin + each, n);
  const float* const logits = a.logits + blockIdx.y * a.stride + a.sinks;
  float top = -INFINITY;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    top = fmaxf(top, logits[i]);
  }
  float sum = 0;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    sum += expf(logits[i] - top);
  }
  const float2 of_warp = WarpJoin({top, sum});
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const float2 all =
      WarpJoin(threadIdx.x < kThreads / 32 ? of_warps[threadIdx.x] : float2{-INFINITY, 0});
  if (threadIdx.x == 0) s.parts[blockIdx.x * gridDim.y + blockIdx.y] = all;
}

// Grid: x query heads; one warp.
__global__ void __launch_bounds__(32)
    LogSumsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  GridTrigger();
  GridWait();
  if (a.seqs->q_len == 0) return;
  float2 sum = {-INFINITY, 0};
  for (int p = static_cast<int>(threadIdx.x); p < kSumParts; p += 32) {
    sum = Join(sum, s.parts[p * gridDim.x + blockIdx.x]);
  }
  sum = WarpJoin(sum);
  if (threadIdx.x == 0) s.lse[blockIdx.x] = sum.x + logf(sum.y);
}

// A warp has a token at a time. Grid: x walks tokens, y KV heads.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    ExpectedWeightsKernel(const __grid_constant__ ExpectedScoreArgs a, ScoreScratch s) {
  GridTrigger();
  GridWait();
  const SeqMeta seq = *a.seqs;
  if (seq.q_len == 0) return;
  const auto kv_head = static_cast<int>(blockIdx.y);
  const int group = a.n_heads / a.kv.n_kv_heads;
  const int64_t to_scales = a.kv.v.ToScales(kv_head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  float* const out = a.out + kv_head * a.stride;
  for (int t = static_cast<int>(blockIdx.x * (kThreads / 32) + threadIdx.x / 32); t < seq.kv_len;
       t += warps) {
    if (t < a.sinks) {
      if (lane == 0) out[t] = kChosenFirst;
      continue;
    }
    float weight = 0;
    for (int h = kv_head * group + lane; h < (kv_head + 1) * group; h += 32) {
      weight += expf(a.logits[h * a.stride + t] - s.lse[h]);
    }
    weight = WarpSum(weight) / static_cast<float>(group);
    if (a.values) {
      const std::byte* value = a.kv.v.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
      float square = 0;
      for (int i = lane; i < a.kv.dv; i += 32) {
        const float v = HeadValue<T>(value, to_scales, i);
        square += v * v;
      }
      weight = (weight + a.epsilon) * sqrtf(WarpSum(square));
    }
    if (lane == 0) out[t] = weight;
  }
}

ScoreScratch Carve(const ExpectedScoreArgs& a, Carver& carver) {
  const int64_t values = int64_t{a.n_heads} * a.kv.dk;
  ScoreScratch s{};
  s.turns = carver.Take<double2>(a.n_freq);
  s.mean = carver.Take<float>(values);
  s.covariance = carver.Take<float>(a.queries.covariance != nullptr ? values * a.kv.dk : 0);
  s.parts = carver.Take<float2>(int64_t{kSumParts} * a.n_heads);
  s.lse = carver.Take<float>(a.n_heads);
  return s;
}

uint32_t Blocks(int64_t values) {
  return static_cast<uint32_t>(CeilDiv(values, kThreads));
}

}  // namespace

size_t QueryMomentsScratch(const QueryMomentsArgs& args) {
  Carver carver(nullptr);
  Carve(args, carver);
  return carver.used();
}

void QueryMomentsOf(const QueryMomentsArgs& args, const Launch& launch) {
  QueryMomentsArgs a = args;
  if (a.inv_freq == nullptr) a.n_freq = 0;
  Carver carver(launch.scratch);
  const MomentsScratch s = Carve(a, carver);
  const auto heads = static_cast<uint32_t>(a.n_heads);
  if (a.n_rows == 0) return;
  if (a.n_freq > 0) {
    LaunchKernel(TurnsKernel, launch, dim3(Blocks(int64_t{a.n_rows} * a.n_freq)), kThreads, 0, a,
                 s);
  }
  LaunchKernel(QuerySumsKernel, launch, dim3(kMeanParts, heads), kThreads, 0, a, s);
  LaunchKernel(QueryMeanKernel, launch, dim3(heads), kThreads, 0, a, s);
  if (a.out.covariance != nullptr) {
    const auto tiles = static_cast<uint32_t>(CeilDiv(a.dk, kTile));
    LaunchKernel(QueryProductsKernel, launch, dim3(tiles * tiles, kProductParts, heads), kThreads,
                 0, a, s);
    LaunchKernel(JoinCovariancesKernel, launch, dim3(Blocks(int64_t{a.dk} * a.dk), heads), kThreads,
                 0, a, s);
  }
  LaunchKernel(JoinMeansKernel, launch, dim3(1), 1024, 0, a, s);
}

size_t ExpectedScoreScratch(const ExpectedScoreArgs& args) {
  Carver carver(nullptr);
  Carve(args, carver);
  return carver.used();
}

void ExpectedScore(const ExpectedScoreArgs& args, const Launch& launch) {
  ExpectedScoreArgs a = args;
  if (a.inv_freq == nullptr) a.n_freq = 0;
  if (a.stride == 0) return;
  Carver carver(launch.scratch);
  const ScoreScratch s = Carve(a, carver);
  const auto heads = static_cast<uint32_t>(a.n_heads);
  const auto kv_heads = static_cast<uint32_t>(a.kv.n_kv_heads);
  if (a.n_freq > 0) {
    LaunchKernel(MeanTurnsKernel, launch, dim3(static_cast<uint32_t>(a.n_freq)), kThreads, 0, a, s);
  }
  const int64_t values = a.queries.covariance != nullptr ? int64_t{a.kv.dk} * a.kv.dk : a.kv.dk;
  LaunchKernel(TurnMomentsKernel, launch, dim3(Blocks(values), heads), kThreads, 0, a, s);
  const int64_t tiles = CeilDiv(a.stride, kTile);
  const int64_t walkers = std::max<int64_t>(1, 8 * launch.device->sm_count / heads);
  WithKvType(a.kv.k.dtype, [&](auto t) {
    LaunchKernel(ExpectedLogitsKernel<decltype(t)>, launch,
                 dim3(static_cast<uint32_t>(std::min(tiles, walkers)), heads), kThreads, 0, a, s);
  });
  LaunchKernel(WeightSumsKernel, launch, dim3(kSumParts, heads), kThreads, 0, a, s);
  LaunchKernel(LogSumsKernel, launch, dim3(heads), 32, 0, a, s);
  const int64_t blocks = CeilDiv(a.stride, kThreads / 32);
  const int64_t most = std::max<int64_t>(1, 16 * launch.device->sm_count / kv_heads);
  WithKvType(a.kv.v.dtype, [&](auto t) {
    LaunchKernel(ExpectedWeightsKernel<decltype(t)>, launch,
                 dim3(static_cast<uint32_t>(std::min(blocks, most)), kv_heads), kThreads, 0, a, s);
  });
}

}  // namespace omnikv::cuda
