#include <algorithm>

#include "policy/blocks/block_ops.cuh"

namespace omnikv {
namespace {

// --- HoldChoice: a CTA a sequence.
__global__ void __launch_bounds__(kThreads) HoldKernel(const HoldChoiceArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.x);
  const SeqMeta seq = a.seqs[s];
  const bool first_thread = threadIdx.x == 0;
  if (first_thread && a.own_seqs != nullptr) {
    SeqMeta own = seq;
    own.table_off = s * a.own_stride;
    a.own_seqs[s] = own;
  }
  if (seq.q_len == 0) {
    if (first_thread) a.keep[s] = 1;
    return;
  }
  HoldStep step{0, HoldMove::kNothing, 0, 0};
  if (a.made != nullptr) step = HoldStepOf(a.rule, seq, a.made[s], a.made[a.n_seqs + s]);
  __syncthreads();  // all have read what the first thread overwrites
  if (first_thread) {
    const int last = UnitsOf(seq.kv_len, a.rule.block) - a.n_candidates[s];
    a.n_pick[s] = a.rule.BlocksRead(seq.kv_len, seq.prompt_len) - last;
    a.keep[s] = step.keep;
    if (a.made != nullptr) {
      a.made[s] = step.first;
      a.made[a.n_seqs + s] = step.second;
    }
  }
  if (step.move == HoldMove::kNothing) return;
  const bool back = step.move == HoldMove::kToFirst;
  for (int64_t c = 0; c < a.choices; ++c) {
    const auto copy = [&](int32_t* of, int64_t words) {
      int32_t* const one = of + (c * a.n_seqs + s) * words;
      int32_t* const two = one + int64_t{a.choices} * a.n_seqs * words;
      const int32_t* const from = back ? two : one;
      int32_t* const to = back ? one : two;
      for (int64_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
    };
    copy(a.index, a.list_words);
    copy(a.count, a.lists);
  }
}

// --- BlockKeys: a CTA a head of a unit. The rows that count are listed in shared memory. A thread
// takes a value of every so-many-th of them; what the threads found is put together in order.
constexpr int kKeyThreads = 512;

template <typename T>
__global__ void __launch_bounds__(kKeyThreads) KeysKernel(const BlockKeysArgs a) {
  __shared__ float scores[kMaxScoreUnit];
  __shared__ int64_t rows[kMaxScoreUnit];
  __shared__ float found[3][kKeyThreads];  // by [turn, value]: sums, minima, maxima
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const SeqMeta seq = a.seqs[s];
  const UnitRange units = UnitsMade(a, seq);
  const bool by_score = a.keys == BlockKeys::kBest || a.keys == BlockKeys::kBoundsBest;
  const int64_t width = int64_t{a.heads} * a.dk;
  const int lanes = min(a.dk, kKeyThreads);
  const int turns = kKeyThreads / lanes;
  const int turn = thread / lanes;
  for (int64_t item = blockIdx.x; item < int64_t{units.end - units.begin} * a.heads;
       item += gridDim.x) {
    const int u = units.begin + static_cast<int>(item / a.heads);
    const int head = static_cast<int>(item % a.heads);
    const int kv_head = a.keys == BlockKeys::kBoundsQuest ? head : head / (a.heads / a.n_kv_heads);
    const int first = u * a.unit;
    const int n = min(a.unit, seq.kv_len - first);
    const bool chosen = by_score && n == a.unit;
    const int counted = kv_head >= a.n_kv_heads ? 0 : chosen ? min(a.best, n) : UnitsOf(n, a.every);
    __syncthreads();
    for (int t = thread; chosen && t < n; t += kKeyThreads) {
      scores[t] = a.scores[int64_t{head} * a.stride + first + t];
    }
    __syncthreads();
    for (int t = thread; t < n; t += kKeyThreads) {
      int place = chosen ? 0 : t % a.every == 0 ? t / a.every : n;
      for (int o = 0; chosen && o < n; ++o) {
        place += scores[o] > scores[t] || (scores[o] == scores[t] && o < t) ? 1 : 0;
      }
      if (place < counted) rows[place] = a.k.Row(seq.table_off, first + t);
    }
    __syncthreads();
    float* const out = a.out + (int64_t{s} * a.units + u) * (HasBounds(a.keys) ? 2 : 1) * width +
                       int64_t{head} * a.dk;
    for (int from = 0; from < a.dk; from += lanes) {  // once, but for heads of many values
      const int i = from + thread % lanes;
      float sum = 0;
      float least = INFINITY;
      float most = -INFINITY;
      if (turn < turns && i < a.dk) {
#pragma unroll 4
        for (int j = turn; j < counted; j += turns) {
          const float v = cuda::HeadValue<T>(a.k.Head(rows[j], kv_head), a.k.ToScales(kv_head), i);
          sum += v;
          least = fminf(least, v);
          most = fmaxf(most, v);
        }
      }
      found[0][thread] = sum;
      found[1][thread] = least;
      found[2][thread] = most;
      __syncthreads();
      if (turn == 0 && i < a.dk) {
        for (int other = 1; other < turns; ++other) {
          sum += found[0][other * lanes + thread];
          least = fminf(least, found[1][other * lanes + thread]);
          most = fmaxf(most, found[2][other * lanes + thread]);
        }
        const float mean = sum / static_cast<float>(counted);
        float low = mean;
        float high = mean;
        if (a.keys == BlockKeys::kBoundsMax) low = high = fmaxf(most, 0.0f);
        if (a.keys == BlockKeys::kBoundsOf) low = least, high = most;
        if (a.keys == BlockKeys::kBoundsQuest) {
          low = counted == 0 ? 0.0f : least;
          high = fmaxf(most, 0.0f);
        }
        if (a.keys == BlockKeys::kBoundsBest) {
          low = a.best == 1 ? sum : fminf(sum, 0.0f);
          high = a.best == 1 ? sum : fmaxf(sum, 0.0f);
        }
        out[i] = low;
        if (HasBounds(a.keys)) out[width + i] = high;
      }
      __syncthreads();
    }
  }
}

// --- ListScores: x walks blocks, y lists, z sequences.
__global__ void __launch_bounds__(kThreads) ListScoresKernel(const ListScoresArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.z);
  const int l = static_cast<int>(blockIdx.y);
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int rows = a.n_in / a.lists;
  const int64_t at = (int64_t{s} * a.lists + l) * a.stride;
  const int n = UnitsOf(seq.kv_len, a.block);
  for (int u = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); u < n;
       u += static_cast<int>(gridDim.x) * kThreads) {
    float score = 0;
    if (u < a.sinks) {
      score = kChosenFirst;
    } else if (a.bias != nullptr && a.bias[at + u] < 0) {
      score = -INFINITY;
    } else if (a.prompt_alone != 0 && u >= seq.prompt_len / a.block) {
      score = -kChosenFirst;
    } else {
      for (int h = l * rows; h < (l + 1) * rows; ++h) {
        score += a.in[(int64_t{s} * a.n_in + h) * a.stride + u];
      }
    }
    a.out[at + u] = score;
  }
}

// --- BlockWeights: a warp a block and list.
__global__ void __launch_bounds__(kThreads) BlockWeightsKernel(const BlockWeightsArgs a) {
  constexpr int kWarps = kThreads / 32;
  cuda::GridTrigger();
  cuda::GridWait();
  const int n = max(0, UnitsOf(a.seqs[0].kv_len, a.rule.block) - a.rule.recent);
  const int l = static_cast<int>(blockIdx.y);
  const int rows = a.n_in / a.lists;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (blockIdx.x == 0 && l == 0 && threadIdx.x == 0) {
    a.n_candidates[0] = n;
    a.n_pick[0] = min(n, a.rule.sinks + a.rule.preselect);
  }
  for (int u = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; u < n;
       u += static_cast<int>(gridDim.x) * kWarps) {
    const int begin = max(0, u * a.rule.block - a.widen);
    const int end = min(n * a.rule.block, (u + 1) * a.rule.block + a.widen);
    float sum = 0;
    for (int h = l * rows; h < (l + 1) * rows; ++h) {
      for (int t = begin + lane; t < end; t += 32) sum += a.in[int64_t{h} * a.in_stride + t];
    }
    sum = cuda::WarpSum(sum);
    if (lane == 0) a.out[int64_t{l} * a.stride + u] = u < a.rule.sinks ? kChosenFirst : sum;
  }
}

// --- Exclude: a CTA a list.
__global__ void __launch_bounds__(kThreads) ExcludeKernel(const ExcludeArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int l = static_cast<int>(blockIdx.x);
  const int c = a.chosen == 1 ? 0 : l;
  float* const bias = a.bias + int64_t{l} * a.stride;
  const int n = a.n_candidates[0];
  for (int u = static_cast<int>(threadIdx.x); u < a.stride; u += kThreads) {
    bias[u] = u < n ? -INFINITY : 0.0f;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < a.count[c]; i += kThreads) {
    bias[a.index[int64_t{c} * a.capacity + i]] = 0;
  }
}

}  // namespace

void HoldChoiceCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const HoldChoiceArgs*>(args);
  cuda::LaunchKernel(HoldKernel, launch, static_cast<uint32_t>(a.n_seqs), kThreads, 0, a);
}

void BlockKeysCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const BlockKeysArgs*>(args);
  const int64_t most = a.keys == BlockKeys::kMean ? 1 : a.units;
  const dim3 grid(static_cast<uint32_t>(std::min<int64_t>(most * a.heads, 2048)),
                  static_cast<uint32_t>(a.n_seqs));
  ByType(a.k.dtype, [&](auto type) {
    cuda::LaunchKernel(KeysKernel<decltype(type)>, launch, grid, kKeyThreads, 0, a);
  });
}

void ListScoresCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const ListScoresArgs*>(args);
  const dim3 grid(static_cast<uint32_t>(std::min((a.stride + kThreads - 1) / kThreads, 64)),
                  static_cast<uint32_t>(a.lists), static_cast<uint32_t>(a.n_seqs));
  cuda::LaunchKernel(ListScoresKernel, launch, grid, kThreads, 0, a);
}

void BlockWeightsCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const BlockWeightsArgs*>(args);
  cuda::LaunchKernel(BlockWeightsKernel, launch, dim3(256, static_cast<uint32_t>(a.lists)),
                     kThreads, 0, a);
}

void ExcludeCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const ExcludeArgs*>(args);
  cuda::LaunchKernel(ExcludeKernel, launch, static_cast<uint32_t>(a.lists), kThreads, 0, a);
}

}  // namespace omnikv
