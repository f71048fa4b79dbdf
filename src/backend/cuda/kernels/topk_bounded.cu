// TopK of few tokens of each of many lists, by a cluster of blocks a list, three of which fit a
// multiprocessor. A pass over all scores keeps the highest key of each four of a thread. The lowest
// of the highest keys of as many groups of threads as are chosen, or more, is a bound that enough
// keys reach. Where a four reaches it, its keys are read once more, and those that reach it are
// listed in the first block, which finds the key of rank k among them. A chosen token's place is
// how many of the others are before it; where too many keys are equal, a map of a bit for each
// token gives the order.
#include <algorithm>

#include "backend/cuda/kernels/topk.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kRound = 4 * kThreads;  // tokens of which each thread takes a four
constexpr int kMostPicks = 128;       // some k ln k keys reach the bound
constexpr int kListed = 2048;
constexpr int kAtOnce = 4;      // fours that a thread asks for together
constexpr int kMostFours = 16;  // of a thread
constexpr int kMostBlocks = 8;  // of a cluster

struct Listed {
  uint32_t n;  // keys that reach the bound, more than there is room for where that is too many
  uint32_t key[kListed];
  int token[kListed];
};

struct Shared {
  FewDigits digits;
  uint32_t highest[kMostPicks];  // of a group of threads
  uint32_t low[kWarps], high[kWarps], above[kWarps], equal[kWarps];
  uint32_t base;    // where this block's keys begin in the first block
  uint32_t n_best;  // keys that are not below that of rank k
  Listed own, all;  // those of all blocks: in the first one
};

// Words of shared memory behind Shared: the highest key of each four, then two maps of a bit for
// each token of the list.
__host__ __device__ __forceinline__ int WordsOf(int fours, int n_blocks) {
  const int tokens = fours * kRound * n_blocks;
  const int of_fours = fours * kThreads;
  return of_fours > tokens / 16 ? of_fours : tokens / 16;
}

__device__ __forceinline__ uint32_t KeyAt(const float* from, int t, float weight) {
  return KeyOf(__fmul_rn(weight, __ldcg(from + t)));
}

// The keys of four scores, of which n_left are of tokens.
struct Four {
  uint32_t key[4];
};
__device__ __forceinline__ Four KeysOf(uint4 raw, float weight, int n_left) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  Four four;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t key = KeyOf(__fmul_rn(weight, __uint_as_float(words[j])));
    four.key[j] = j < n_left ? key : kNoKey;
  }
  return four;
}

__device__ __forceinline__ uint4 LoadFour(const float* from) {
  return __ldcg(reinterpret_cast<const uint4*>(from));
}

__device__ __forceinline__ void ListKey(Listed& list, uint32_t key, int token) {
  const uint32_t at = atomicAdd(&list.n, 1u);
  if (at >= kListed) return;
  list.key[at] = key;
  list.token[at] = token;
}

// The lowest and the highest of the groups' highest keys, over the blocks of the cluster.
__device__ __forceinline__ Span BoundOf(int n_groups, int n_blocks, Shared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  uint32_t of_group = kNoKey;
  if (tid < n_groups) {
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) {  // all loads are under way together
      if (b < n_blocks) of_group = max(of_group, *InBlock(&s.highest[tid], b));
    }
  }
  const uint32_t low = __reduce_min_sync(kAllLanes, tid < n_groups ? of_group : ~kNoKey);
  const uint32_t high = __reduce_max_sync(kAllLanes, of_group);
  if (lane == 0) s.low[tid / 32] = low, s.high[tid / 32] = high;
  __syncthreads();
  return {__reduce_min_sync(kAllLanes, lane < kWarps ? s.low[lane] : ~kNoKey),
          __reduce_max_sync(kAllLanes, lane < kWarps ? s.high[lane] : kNoKey)};
}

// What stands for a token whose key is above that of rank k, or equal to it. Codes are in the order
// of tokens.
__device__ __forceinline__ uint32_t CodeOf(int token, bool is_equal) {
  return 2 * static_cast<uint32_t>(token) + (is_equal ? 1 : 0);
}

// Writes the tokens of n codes, at most one a thread, those of equal keys up to `ties`, in order.
__device__ __forceinline__ void WriteCodes(const TopKArgs& a, int64_t list, const uint32_t* codes,
                                           int n, uint32_t ties) {
  const auto tid = static_cast<int>(threadIdx.x);
  if (tid >= n) return;
  const uint32_t own = codes[tid];
  uint32_t before = 0;  // above (low half) and equal
#pragma unroll 8
  for (int i = 0; i < n; ++i) {
    const uint32_t other = codes[i];
    if (other < own) before += (other & 1) != 0 ? 0x10000u : 1u;
  }
  const uint32_t n_equal = before >> 16;
  if ((own & 1) != 0 && n_equal >= ties) return;
  a.Put(list, static_cast<int>((before & 0xffff) + min(n_equal, ties)), static_cast<int>(own / 2));
}

// Writes the tokens whose bits are set, those of `equal` up to `ties`, in order.
__device__ __forceinline__ void WriteMap(const TopKArgs& a, int64_t list, const uint32_t* above,
                                         const uint32_t* equal, int n_words, uint32_t ties,
                                         Shared& s) {
  const int per = (n_words + kThreads - 1) / kThreads;
  const int begin = min(n_words, per * static_cast<int>(threadIdx.x));
  const int end = min(n_words, begin + per);
  uint32_t n_above = 0;
  uint32_t n_equal = 0;
#pragma unroll 1
  for (int w = begin; w < end; ++w) n_above += __popc(above[w]), n_equal += __popc(equal[w]);
  n_above = SumInBlock<kWarps>(n_above, s.above).before;
  n_equal = SumInBlock<kWarps>(n_equal, s.equal).before;
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
    const uint32_t of_above = above[w];
    for (uint32_t left = of_above | equal[w]; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      if ((of_above >> bit & 1) != 0) {
        a.Put(list, static_cast<int>(n_above++ + min(n_equal, ties)), 32 * w + bit);
      } else {
        if (n_equal < ties) a.Put(list, static_cast<int>(n_above + n_equal), 32 * w + bit);
        ++n_equal;
      }
    }
  }
}

// Grid: x the blocks of a cluster, y lists, z sequences. A thread has `fours` fours. Shared memory:
// Shared, then WordsOf.
__global__ void __launch_bounds__(kThreads, 3) BoundedKernel(const TopKArgs a, int fours) {
  extern __shared__ uint4 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  auto* const highest_of_four = reinterpret_cast<uint32_t*>(&s + 1);
  const auto n_blocks = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  GridTrigger();
  const int64_t seq = blockIdx.z;
  PrefetchSelection(a, seq);
  if (tid == 0) PrefetchL2(a.seqs + seq);
#pragma unroll 1
  for (int i = tid; i < 4 * kFewBins; i += kThreads) (&s.digits.bins[0][0])[i] = 0;
  if (tid < kMostPicks) s.highest[tid] = kNoKey;
  if (tid == 0) s.own.n = s.all.n = s.n_best = 0;
  __syncthreads();
  ClusterArrive();
  GridWait();
  const int64_t list = seq * gridDim.y + blockIdx.y;
  const float* const from = a.ScoresOf(list);
  const int n = a.CandidatesOf(list);
  const int n_pick = a.n_pick[seq];
  const float weight = a.weights[0];
  const int32_t keep = a.keep != nullptr ? a.keep[seq] : 0;
  const int k = keep != 0 ? 0 : a.Picks(n_pick, n);
  const int first = block * fours * kRound + 4 * tid;  // of this thread's first four
  uint32_t high = kNoKey;
  for (int i = 0; i < fours; i += kAtOnce) {
    if (i > 0 && first + kRound * i >= n) break;  // the first loads do not wait for n
    uint4 raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int t = first + kRound * (i + u);
      if (i + u < fours && t < a.stride) raw[u] = LoadFour(from + t);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int t = first + kRound * (i + u);
      if (i + u >= fours || t >= n) continue;
      const Four four = KeysOf(raw[u], weight, n - t);
      const uint32_t highest = max(max(four.key[0], four.key[1]), max(four.key[2], four.key[3]));
      highest_of_four[(i + u) * kThreads + tid] = highest;
      high = max(high, highest);
    }
  }
  int n_groups = 32;
  while (n_groups < k) n_groups *= 2;
  if (high != kNoKey) atomicMax(&s.highest[tid & (n_groups - 1)], high);
  ClusterWait();  // every block runs
  if (k == 0) {
    if (block == 0 && tid == 0 && keep == 0) a.Finish(list, 0);
    return;
  }
  ClusterSync();
  const Span span = BoundOf(n_groups, n_blocks, s);

  uint32_t reach = 0;  // a bit for each four
  for (int i = 0; i < fours && first + kRound * i < n; ++i) {
    if (highest_of_four[i * kThreads + tid] >= span.low) reach |= 1u << i;
  }
  for (; reach != 0; reach &= reach - 1) {
    const int t = first + kRound * (__ffs(static_cast<int>(reach)) - 1);
    const Four four = KeysOf(LoadFour(from + t), weight, n - t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t key = four.key[j];
      if (key != kNoKey && key >= span.low) ListKey(s.own, key, t + j);
    }
  }
  __syncthreads();
  if (n_blocks > 1) {
    if (tid == 0) s.base = atomicAdd(InBlock(&s.all.n, 0), s.own.n);
    __syncthreads();
    const auto n_own = static_cast<int>(min(s.own.n, kListed - min(s.base, uint32_t{kListed})));
#pragma unroll 1
    for (int i = tid; i < n_own; i += kThreads) {
      *InBlock(&s.all.key[s.base + i], 0) = s.own.key[i];
      *InBlock(&s.all.token[s.base + i], 0) = s.own.token[i];
    }
    ClusterSync();
    if (block > 0) return;
  }
  const Listed& listed = n_blocks > 1 ? s.all : s.own;
  if (tid == 0) a.Finish(list, k);
  // This thread's keys, of those that are listed or, if there is no room for them, of all.
  const bool has_room = listed.n <= kListed;
  const int n_keys = has_room ? static_cast<int>(listed.n) : n;
  const int n_mine = max(0, (n_keys - tid + kThreads - 1) / kThreads);
  const auto mine = [&](int i) {
    const int at = tid + kThreads * i;
    return has_room ? listed.key[at] : KeyAt(from, at, weight);
  };
  const Threshold least = FindThreshold(n_mine, mine, span, k, s.digits);
  // Calls visit(token, is_equal) for those that are not below it.
  const auto visit_best = [&](const auto& visit) {
#pragma unroll 1
    for (int i = 0; i < n_mine; ++i) {
      const uint32_t key = mine(i);
      const int at = tid + kThreads * i;
      if (key >= least.key) visit(has_room ? listed.token[at] : at, key == least.key);
    }
  };
  if (has_room) {
    uint32_t* const codes = highest_of_four;
    visit_best([&](int token, bool is_equal) {
      const uint32_t at = atomicAdd(&s.n_best, 1u);
      if (at < kThreads) codes[at] = CodeOf(token, is_equal);
    });
    __syncthreads();
    if (s.n_best <= kThreads) {
      return WriteCodes(a, list, codes, static_cast<int>(s.n_best), least.n_equal);
    }
  }
  const int n_words = (n + 31) / 32;
  uint32_t* const above = highest_of_four;
  uint32_t* const equal = above + n_words;
#pragma unroll 1
  for (int w = tid; w < 2 * n_words; w += kThreads) above[w] = 0;
  __syncthreads();
  visit_best([&](int token, bool is_equal) {
    atomicOr((is_equal ? equal : above) + token / 32, 1u << token % 32);
  });
  __syncthreads();
  WriteMap(a, list, above, equal, n_words, least.n_equal, s);
}

// Blocks of a cluster, and fours of a thread.
struct Shape {
  int blocks, fours;
};

Shape ShapeOf(const TopKArgs& args, const Device& device) {
  const auto rounds = static_cast<int>(CeilDiv(args.room(), kRound));
  if (device.arch < 90) return {1, rounds};
  const int64_t lists = int64_t{args.n_seqs} * args.lists;
  // As many as fit the card together, two blocks a multiprocessor, of two rounds at least.
  const auto wanted = static_cast<int>(std::min<int64_t>(2 * device.sm_count / lists, rounds / 2));
  const int blocks =
      std::clamp(std::max(wanted, static_cast<int>(CeilDiv(rounds, 8))), 1, kMostBlocks);
  return {blocks, static_cast<int>(CeilDiv(rounds, blocks))};
}

}  // namespace

bool IsBounded(const TopKArgs& args, const Device& device) {
  // Fewer lists fill the card as well by larger clusters, which read each score once.
  const bool many = int64_t{args.n_seqs} * args.lists > device.sm_count / kMostBlocks;
  return many && args.window == 1 && args.unit == 1 && args.among.index == nullptr &&
         args.room() > kListedTokens && args.capacity <= kMostPicks && args.stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(args.scores) % sizeof(uint4) == 0 &&
         ShapeOf(args, device).fours <= kMostFours;
}

void SelectBounded(const TopKArgs& args, const Launch& launch) {
  const Shape shape = ShapeOf(args, *launch.device);
  const size_t bytes =
      sizeof(Shared) + sizeof(uint32_t) * static_cast<size_t>(WordsOf(shape.fours, shape.blocks));
  AllowShared(BoundedKernel, bytes);
  KernelLaunch(launch, GridOf(args, shape.blocks), kThreads, bytes, shape.blocks)
      .Run(BoundedKernel, args, shape.fours);
}

}  // namespace omnikv::cuda
