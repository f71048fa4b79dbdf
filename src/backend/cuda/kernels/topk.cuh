// What the kernels of TopK share. Scores become keys, unsigned numbers of the same order.
#pragma once

#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

// x the blocks of a list, y lists, z sequences.
inline dim3 GridOf(const TopKArgs& args, int64_t blocks) {
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(args.lists),
          static_cast<uint32_t>(args.n_seqs)};
}

inline constexpr uint32_t kNoKey = 0;  // of no token: lower than any score's

// What a choice reads beside scores, before GridWait.
__device__ __forceinline__ void PrefetchSelection(const TopKArgs& a, int64_t seq) {
  if (threadIdx.x != 0) return;
  PrefetchL2(a.n_candidates + seq);
  PrefetchL2(a.n_pick + seq);
  PrefetchL2(a.weights);
  if (a.keep != nullptr) PrefetchL2(a.keep + seq);
}

// Bigger scores give bigger keys; both zeros the same, NaN that of -inf. Never kNoKey.
__device__ __forceinline__ uint32_t KeyOf(float v) {
  const uint32_t bits = __float_as_uint(__fadd_rn(fmaxf(v, -INFINITY), 0.0f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// One for a key above `than`, 1 << 16 for one equal to it: two counts in one word.
__device__ __forceinline__ uint32_t AboveAndEqual(uint32_t key, uint32_t than) {
  return key > than ? 1u : key == than ? 0x10000u : 0u;
}

// --- Digits of eight bits of a key, which bins of shared memory count.

inline constexpr int kFewBins = 256;
inline constexpr int kLaneBins = kFewBins / 32;

// A digit of the key of rank `rank`: its bin, how many keys that has, and the key's rank in there.
struct FewFound {
  uint32_t bin, n, rank;
};

// REQUIRES at least `rank` keys in the bins.
__device__ __forceinline__ FewFound FindFew(const uint32_t* bins, uint32_t rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* mine = reinterpret_cast<const uint4*>(bins + kLaneBins * (31 - lane));
  const uint4 low = mine[0];
  const uint4 high = mine[1];
  const uint32_t n[kLaneBins] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneBins; ++i) sum += n[i];
  const uint32_t end = WarpPrefix(sum);
  const uint32_t left = rank - (end - sum);  // of this lane's keys
  uint32_t at = 0, n_at = n[0], before = 0, upto = 0;
#pragma unroll
  for (int i = 0; i + 1 < kLaneBins; ++i) {
    upto += n[i];
    if (upto < left) at = i + 1, n_at = n[i + 1], before = upto;
  }
  const int found = __ffs(static_cast<int>(__ballot_sync(kAllLanes, end >= rank))) - 1;
  const uint32_t both = __shfl_sync(kAllLanes, at | n_at << 4, found);
  return {static_cast<uint32_t>(kFewBins - 1 - kLaneBins * found) - (both & 15), both >> 4,
          __shfl_sync(kAllLanes, left - before, found)};
}

struct FewDigits {
  alignas(16) uint32_t bins[4][kFewBins];  // by digit; zeros to begin with
  FewFound found;
};

// Keys between which that of rank k lies.
struct Span {
  uint32_t low, high;
};

// The key of rank k, or a lower bound of the keys that are chosen; and how many of those equal to
// it are.
struct Threshold {
  uint32_t key, n_equal;
};

// Of the keys of a block that are not below the span, at least k. A thread has n_own, key(0) and so
// on. All threads take part.
template <typename KeyAt>
__device__ __forceinline__ Threshold FindThreshold(int n_own, const KeyAt& key, Span span, int k,
                                                   FewDigits& digits) {
  // The bits in which keys of the span differ.
  int shift = 32 - __clz(static_cast<int>(span.low ^ span.high));
  uint32_t threshold = shift < 32 ? span.low >> shift << shift : 0;  // the digits found
  auto rank = static_cast<uint32_t>(k);                              // among keys that share them
#pragma unroll 1
  for (int digit = 0; shift > 0; ++digit) {
    const int n_bits = min(shift, 8);
    shift -= n_bits;
#pragma unroll 1
    for (int i = 0; i < n_own; ++i) {
      const uint32_t v = key(i);
      const uint32_t bin = (v ^ threshold) >> shift;
      if (v >= span.low && bin >> n_bits == 0) atomicAdd(&digits.bins[digit][bin], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // other warps that look for the same would be in the way
      const FewFound found = FindFew(digits.bins[digit], rank);
      if (threadIdx.x == 0) digits.found = found;
    }
    __syncthreads();
    threshold |= digits.found.bin << shift;
    rank = digits.found.rank;
    if (rank == digits.found.n) break;  // all of them are chosen
  }
  // A digit that is chosen whole has keys below the span too.
  return {max(threshold, span.low), rank};
}

// --- topk_listed.cu: TopK of a block a list, which lists the few keys that can be among the best.

// The most tokens of a list that it takes.
inline constexpr int64_t kListedTokens = 16384;

// `keys` [n_seqs, lists, key_stride], null where keys are those of scores as they are. REQUIRES
// room for at most kListedTokens.
void SelectListed(const TopKArgs& args, const uint32_t* keys, int64_t key_stride,
                  const Launch& launch);

// --- topk_bounded.cu: TopK of few tokens of each of many lists.

// Whether it takes them: many tokens of each list, of which few are chosen.
bool IsBounded(const TopKArgs& args, const Device& device);
// REQUIRES IsBounded.
void SelectBounded(const TopKArgs& args, const Launch& launch);

}  // namespace omnikv::cuda
