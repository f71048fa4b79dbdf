// TopK of up to 16,384 tokens by one block a list. A bound, which at least k keys reach, leaves few
// keys: these are listed, and the key of rank k is found among them by digits.
#include <algorithm>

#include "backend/cuda/kernels/topk.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kFours = kListedTokens / (4 * kThreads);  // fours of keys of a thread, at most
constexpr int kMostGroups = 512;
constexpr int kListed = 2048;

struct Shared {
  FewDigits digits;
  uint32_t highest[kMostGroups], lowest[32];
  uint32_t sums[kWarps];
  uint16_t listed[kListed];
};

// A word lies behind each 32 keys. So threads side by side reach different banks, whether each
// takes every 512th four of keys, or as many as a power of 2, one behind the other.
__host__ __device__ __forceinline__ int PlaceOf(int token) {
  return token + token / 32;
}

// Each thread's keys belong to one of as many groups as k, or more: at least k keys are not below
// the lowest of the groups' highest ones. Where the threads with keys, the first n_full, are too
// few for that, the lowest key is as good. `low` and `high` are those of the thread.
__device__ __forceinline__ Span SpanOf(uint32_t low, uint32_t high, int n_full, int k, Shared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  int n_groups = 32;
  while (n_groups < k) n_groups *= 2;
  const bool enough = n_groups <= min(n_full, kMostGroups);
  if (!enough) n_groups = 32;
  if (high != kNoKey) atomicMax(&s.highest[tid & (n_groups - 1)], high);
  if (!enough && high != kNoKey) atomicMin(&s.lowest[lane], low);
  __syncthreads();
  low = enough ? ~kNoKey : s.lowest[lane];
  high = kNoKey;
  for (int i = lane; i < n_groups; i += 32) {
    const uint32_t of_group = s.highest[i];
    high = max(high, of_group);
    if (enough) low = min(low, of_group);
  }
  return {__reduce_min_sync(kAllLanes, low), __reduce_max_sync(kAllLanes, high)};
}

// Calls visit(i, key(i), n_above, n_equal) for keys of the block that are not below the threshold:
// n_above before it are above, n_equal equal. A thread's keys, at most 32, stand behind those of
// the threads before it. Returns how many there are.
template <typename KeyAt, typename Visit>
__device__ __forceinline__ int InOrder(int n_own, const KeyAt& key, uint32_t threshold, Shared& s,
                                       const Visit& visit) {
  uint32_t above = 0;  // a bit for each
  uint32_t equal = 0;
  for (int i = 0; i < n_own; ++i) {
    const uint32_t v = key(i);
    above |= (v > threshold ? 1u : 0u) << i;
    equal |= (v == threshold ? 1u : 0u) << i;
  }
  const auto here = static_cast<uint32_t>(__popc(above) | __popc(equal) << 16);
  const BlockSums<uint32_t> sums = SumInBlock<kWarps>(here, s.sums);
  uint32_t at = sums.before;
  for (uint32_t left = above | equal; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    visit(i, key(i), static_cast<int>(at & 0xffff), static_cast<int>(at >> 16));
    at += (above >> i & 1) != 0 ? 1u : 0x10000u;
  }
  return static_cast<int>((sums.total & 0xffff) + (sums.total >> 16));
}

// Grid: y lists, z sequences. Shared memory: Shared, then keys.
__global__ void __launch_bounds__(kThreads, 2)
    ListedKernel(const TopKArgs a, const uint32_t* made, int64_t key_stride) {
  extern __shared__ uint4 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  auto* const keys = reinterpret_cast<uint32_t*>(&s + 1);
  GridTrigger();
  const int64_t seq = blockIdx.z;
  PrefetchSelection(a, seq);
  const int tid = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = tid; i < 4 * kFewBins; i += kThreads) (&s.digits.bins[0][0])[i] = 0;
  for (int i = tid; i < kMostGroups; i += kThreads) s.highest[i] = kNoKey;
  if (tid < 32) s.lowest[tid] = ~kNoKey;
  __syncthreads();
  GridWait();
  const int64_t list = seq * gridDim.y + blockIdx.y;
  const auto* from = made != nullptr ? made + list * key_stride
                                     : reinterpret_cast<const uint32_t*>(a.ScoresOf(list));
  const bool gathers = made == nullptr && a.Gathers();
  const bool in_fours =
      !gathers && a.room() % 4 == 0 && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0;
  const int n_fours = in_fours ? static_cast<int>(a.room() / 4) : 0;
  uint4 fours[kFours];  // all loads are under way together
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int four = tid + kThreads * i;
    if (four < n_fours) fours[i] = __ldcg(reinterpret_cast<const uint4*>(from) + four);
  }
  const int32_t keep = a.keep != nullptr ? a.keep[seq] : 0;
  const int n = a.CandidatesOf(list);
  const int n_pick = a.n_pick[seq];
  const float weight = a.weights[0];
  if (keep != 0) return;
  const int k = a.Picks(n_pick, n);
  if (tid == 0) a.Finish(list, k);
  if (k == 0) return;
  uint32_t low = ~kNoKey;
  uint32_t high = kNoKey;
  const auto put = [&](int t, uint32_t raw) {
    const uint32_t key = made != nullptr ? raw : KeyOf(__fmul_rn(weight, __uint_as_float(raw)));
    if (t < n) low = min(low, key), high = max(high, key);
    keys[PlaceOf(t)] = key;
  };
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int four = tid + kThreads * i;
    if (four >= n_fours || 4 * four >= n) continue;
    put(4 * four, fours[i].x);
    put(4 * four + 1, fours[i].y);
    put(4 * four + 2, fours[i].z);
    put(4 * four + 3, fours[i].w);
  }
  if (!in_fours) {
#pragma unroll 1
    for (int t = tid; t < n; t += kThreads) {
      put(t, __ldcg(from + (gathers ? a.Candidate(list, t) : t)));
    }
  }

  const Span span = SpanOf(low, high, in_fours ? (n + 3) / 4 : n, k, s);
  const auto write = [&](Threshold least, uint32_t v, int n_above, int n_equal, int token) {
    const auto ties = static_cast<int>(least.n_equal);
    if (v == least.key && n_equal >= ties) return;
    a.Put(list, n_above + min(n_equal, ties), token);
  };
  // As many as 4, 8, 16 or 32, so that a thread's lie in one run of 32.
  int width = 4;
  while (width * kThreads < n) width *= 2;
  const int first = width * tid;
  const int n_own = max(0, min(width, n - first));
  const auto own = [&](int i) { return keys[PlaceOf(first) + i]; };
  const int n_listed = InOrder(n_own, own, span.low, s, [&](int i, uint32_t, int above, int equal) {
    if (above + equal < kListed) s.listed[above + equal] = static_cast<uint16_t>(first + i);
  });
  __syncthreads();
  if (n_listed <= kListed) {
    const int width_listed = (n_listed + kThreads - 1) / kThreads;
    const int begin = width_listed * tid;
    const int n_mine = max(0, min(width_listed, n_listed - begin));
    const auto mine = [&](int i) { return keys[PlaceOf(s.listed[begin + i])]; };
    const Threshold least = FindThreshold(n_mine, mine, span, k, s.digits);
    InOrder(n_mine, mine, least.key, s, [&](int i, uint32_t v, int n_above, int n_equal) {
      write(least, v, n_above, n_equal, s.listed[begin + i]);
    });
    return;
  }
  const Threshold least = FindThreshold(n_own, own, span, k, s.digits);
  InOrder(n_own, own, least.key, s, [&](int i, uint32_t v, int n_above, int n_equal) {
    write(least, v, n_above, n_equal, first + i);
  });
}

}  // namespace

void SelectListed(const TopKArgs& args, const uint32_t* keys, int64_t key_stride,
                  const Launch& launch) {
  const int room = PlaceOf(static_cast<int>(CeilDiv(args.room(), 32)) * 32);
  const size_t bytes = sizeof(Shared) + sizeof(uint32_t) * static_cast<size_t>(room);
  AllowShared(ListedKernel, bytes);
  LaunchKernel(ListedKernel, launch, GridOf(args, 1), kThreads, bytes, args, keys, key_stride);
}

}  // namespace omnikv::cuda
