// The tokens with the highest scores: TopK.
#include <algorithm>
#include <limits>

#include "backend/cuda/kernels/topk.cuh"

namespace omnikv::cuda {
namespace {

// Radix selection by one cluster of blocks a list. Scores become keys, unsigned numbers of the same
// order. Passes over the keys count them by up to 2,048 bins and so narrow the range of the key of
// rank k. Once few keys are in that range, each block lists its own that are not below it, and
// all blocks get the range's keys, among which each finds the key of rank k for itself. Else the
// last pass writes the tokens above that key, and the first few equal to it, in order. The blocks
// of a cluster take consecutive parts of the tokens and keep what keys they can in shared memory.
// Few tokens have a kernel of their own, below, and so have few of many lists (topk_bounded.cu).

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;  // a digit's, two a thread
constexpr int kDigitBits = 11;
constexpr int kDigits = 4;                  // at most: one of fine bins, then all 32 bits
constexpr int kOwnKeys = 4 * kThreads;      // that a block lists, at most
constexpr int kRangeKeys = 2 * kThreads;    // that all blocks get, at most
constexpr int64_t kWideTokens = 64 * 1024;  // room for more: a cluster of 16 where the card can

// Keys that agree with `low` above their last `shift` bits.
struct Range {
  uint32_t low;
  int shift;

  __device__ bool Has(uint32_t key) const { return shift == 32 || (key ^ low) >> shift == 0; }
};

// The bins of the first pass: 32 for each octave from 2^-40 on, where scores are. The first one has
// all lower keys too, but kNoKey, and the last all higher ones. They rise with keys.
constexpr int kFineShift = 18;
constexpr uint32_t kFineLow = (256 + 127 - 40) << (23 - kFineShift);

__device__ __forceinline__ uint32_t FirstBin(uint32_t key) {
  return min(max(key >> kFineShift, kFineLow + 1) - kFineLow, kBins - 1u);
}
// All keys where a bin has no range of its own.
__device__ __forceinline__ Range OfFirstBin(uint32_t bin) {
  if (bin <= 1 || bin == kBins - 1) return {0, 32};
  return {(kFineLow + bin) << kFineShift, kFineShift};
}

// keys[list][i] of candidates that are listed, or whose scores are sums over a window. Grid: x
// walks candidates, y lists, z sequences.
__global__ void __launch_bounds__(256)
    WindowKeysKernel(const TopKArgs a, uint32_t* keys, int64_t key_stride) {
  GridTrigger();
  GridWait();
  const int64_t s = blockIdx.z;
  const int64_t list = s * gridDim.y + blockIdx.y;
  if (a.keep != nullptr && a.keep[s] != 0) return;
  const int n = a.CandidatesOf(list);
  const int p = a.seqs[s].kv_len - 1;
  const float* rows = a.ScoresOf(list);
  const int step = static_cast<int>(gridDim.x) * 256;
  for (int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x); i < n; i += step) {
    const int64_t t = a.Candidate(list, i);
    // The reference's sum: in double, the newest query first.
    const int ages = static_cast<int>(min(int64_t{a.window}, p - t + 1));
    int slot = p % a.window;
    double sum = 0;
#pragma unroll 8
    for (int age = 0; age < ages; ++age) {
      sum += static_cast<double>(a.weights[age]) * static_cast<double>(rows[slot * a.stride + t]);
      slot = slot == 0 ? a.window - 1 : slot - 1;
    }
    keys[list * key_stride + i] = KeyOf(static_cast<float>(sum));
  }
}

// Shared memory of a block; kept keys follow it.
struct alignas(16) Shared {
  uint32_t bins[kBins];             // this block's keys by digit
  uint32_t totals[kDigits][kBins];  // the cluster's: each block adds up its share of the bins
  uint32_t few_bins[3][kFewBins];   // the keys of the range by their next digits
  uint32_t own[kOwnKeys];           // listed keys
  int own_at[kOwnKeys];             // where in this block they are
  uint32_t range[kRangeKeys];       // all blocks' keys of the range, less its beginning, in order
  uint32_t warp_sums[2][kWarps];
  FewFound found;
  uint32_t range_before;                // the range's keys of the blocks before this one
  uint32_t above, equal;                // this block's keys above and equal to the key of rank k
  uint32_t above_before, equal_before;  // those of the blocks before it
};

// The keys of a block.
struct Keys {
  const uint32_t* from;  // scores, or keys
  int n;
  bool scores;  // `from` holds floats: keys are those of weight times them
  float weight;
  bool aligned;    // fours of `from` may be loaded at once
  uint32_t* kept;  // the first n_kept, in shared memory
  int n_kept;      // whole chunks
  int first;       // the candidate that the first one is of
};

__device__ __forceinline__ uint32_t ToKey(const Keys& in, uint32_t raw) {
  return in.scores ? KeyOf(__fmul_rn(in.weight, __uint_as_float(raw))) : raw;
}

// Keys that a warp takes at once, of consecutive tokens, and that a block takes at once (below
// 2^16), where a lane holds kQuads fours.
template <int kQuads>
constexpr int kChunk = 32 * 4 * kQuads;
template <int kQuads>
constexpr int kTile = kWarps* kChunk<kQuads>;

// A warp's chunk: keys at + 128 i + 4 lane .. + 3 of the block, kNoKey past the end.
template <int kQuads>
struct Chunk {
  uint32_t key[kQuads][4];

  __device__ void Set(int i, uint4 four) {
    key[i][0] = four.x;
    key[i][1] = four.y;
    key[i][2] = four.z;
    key[i][3] = four.w;
  }
};

template <int kQuads>
__device__ __forceinline__ Chunk<kQuads> LoadChunk(const Keys& in, int at) {
  Chunk<kQuads> c;
  const int mine = at + static_cast<int>(threadIdx.x) % 32 * 4;
  const auto load = [&](int i) {
    c.Set(i, __ldcg(reinterpret_cast<const uint4*>(in.from + mine + 128 * i)));
  };
  // All loads are under way together. At the end of the keys a lane has fewer fours, or not all of
  // one.
  if (in.aligned && at + kChunk<kQuads> <= in.n) [[likely]] {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) load(i);
  } else {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int left = in.n - mine - 128 * i;
      if (in.aligned && left >= 4) {
        load(i);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) c.key[i][j] = j < left ? __ldcg(in.from + mine + 128 * i + j) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      c.key[i][j] = mine + 128 * i + j < in.n ? ToKey(in, c.key[i][j]) : kNoKey;
    }
  }
  return c;
}

__device__ __forceinline__ uint4* KeptAt(const Keys& in, int at, int i) {
  return reinterpret_cast<uint4*>(in.kept + at + 128 * i) + threadIdx.x % 32;
}

template <int kQuads>
__device__ __forceinline__ void KeepChunk(const Keys& in, int at, const Chunk<kQuads>& c) {
  if (at >= in.n_kept) return;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    *KeptAt(in, at, i) = make_uint4(c.key[i][0], c.key[i][1], c.key[i][2], c.key[i][3]);
  }
}

// As LoadChunk, after KeepChunk has seen every chunk. Each warp reads what it kept itself.
template <int kQuads>
__device__ __forceinline__ Chunk<kQuads> ReadChunk(const Keys& in, int at) {
  if (at >= in.n_kept) [[unlikely]] {
    return LoadChunk<kQuads>(in, at);
  }
  Chunk<kQuads> c;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) c.Set(i, *KeptAt(in, at, i));
  return c;
}

// The highest bin of this thread; the other one is below it. Bins descend with threads.
__device__ __forceinline__ int HighBin() {
  return kBins - 1 - 2 * static_cast<int>(threadIdx.x);
}

// The bin of the element of rank `rank` (1: the highest), how many that has, and its rank in there,
// where the bins of this thread hold `high` and `low` elements. {1, 0, rank} when there are fewer
// elements.
__device__ __forceinline__ FewFound FindBin(Shared& s, uint32_t high, uint32_t low, uint32_t rank) {
  const uint32_t begin = SumInBlock<kWarps>(high + low, s.warp_sums[0]).before;
  const uint32_t end = begin + high + low;
  if (begin < rank && rank <= end) {
    const bool in_high = rank <= begin + high;
    s.found = {static_cast<uint32_t>(HighBin() - (in_high ? 0 : 1)), in_high ? high : low,
               rank - begin - (in_high ? 0 : high)};
  } else if (threadIdx.x == kThreads - 1 && end < rank) {
    s.found = {1, 0, rank};
  }
  __syncthreads();
  return s.found;
}

// Counts the keys by their first digit and keeps what keys it can.
template <int kQuads>
__device__ __forceinline__ void CountFirst(const Keys& in, uint32_t k, Shared& s) {
  // The key of rank k is not below `bound`, so such keys need not be counted. Later bounds come
  // from the tiles counted so far. That leaves few atomics to a long part.
  uint32_t bound = kNoKey + 1;
  int tiles = 0;
  for (int tile = 0; tile < in.n; tile += kTile<kQuads>) {
    const int at = tile + static_cast<int>(threadIdx.x) / 32 * kChunk<kQuads>;
    if (at < in.n) {
      const Chunk<kQuads> c = LoadChunk<kQuads>(in, at);
      KeepChunk(in, at, c);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t key = c.key[i][j];
          if (key >= bound) atomicAdd(&s.bins[FirstBin(key)], 1u);
        }
      }
    }
    ++tiles;
    if ((tiles & (tiles - 1)) == 0 && tile + kTile<kQuads> < in.n) {
      __syncthreads();
      const uint32_t bin = FindBin(s, s.bins[HighBin()], s.bins[HighBin() - 1], k).bin;
      if (bin > 1) bound = (kFineLow + bin) << kFineShift;
    }
  }
}

// Counts the keys of a range, by what they have above their last `shift` bits.
template <int kQuads>
__device__ __forceinline__ void CountNext(const Keys& in, const Range& range, int shift,
                                          Shared& s) {
  for (int at = static_cast<int>(threadIdx.x) / 32 * kChunk<kQuads>; at < in.n;
       at += kTile<kQuads>) {
    const Chunk<kQuads> c = ReadChunk<kQuads>(in, at);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = c.key[i][j];
        if (range.Has(key)) atomicAdd(&s.bins[(key - range.low) >> shift], 1u);
      }
    }
  }
}

// Writes the tokens of the keys above `threshold`, and of the first `ties` of those equal to it, of
// which s.above_before and s.equal_before lie before this block.
template <int kQuads>
__device__ __forceinline__ void Collect(const TopKArgs& a, int64_t list, const Keys& in,
                                        uint32_t threshold, uint32_t ties, Shared& s) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t above = s.above_before;
  uint32_t equal = s.equal_before;
  int turn = 0;
  for (int tile = 0; tile < in.n; tile += kTile<kQuads>, turn ^= 1) {
    const int at = tile + warp * kChunk<kQuads>;
    Chunk<kQuads> c{};
    if (at < in.n) c = ReadChunk<kQuads>(in, at);
    // Counts of keys above (low half) and equal (high half).
    uint32_t here[kQuads];
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      here[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        here[i] += AboveAndEqual(c.key[i][j], threshold);
      }
      mine += here[i];
    }
    const uint32_t warp_sum = __reduce_add_sync(kAllLanes, mine);
    if (lane == 0) s.warp_sums[turn][warp] = warp_sum;
    __syncthreads();
    const uint32_t sum = s.warp_sums[turn][lane];
    const uint32_t prefix = WarpPrefix(sum);
    if (warp_sum != 0) {
      uint32_t before = __shfl_sync(kAllLanes, prefix - sum, warp);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (__all_sync(kAllLanes, here[i] == 0)) continue;
        const uint32_t end = WarpPrefix(here[i]);
        uint32_t at_key = before + end - here[i];
        before += __shfl_sync(kAllLanes, end, 31);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t key = c.key[i][j];
          if (key < threshold) continue;
          const uint32_t n_above = above + (at_key & 0xffff);
          const uint32_t n_equal = equal + (at_key >> 16);
          if (key > threshold || n_equal < ties) {
            a.Put(list, static_cast<int>(n_above + min(n_equal, ties)),
                  in.first + at + 128 * i + 4 * lane + j);
          }
          at_key += key > threshold ? 1u : 0x10000u;
        }
      }
    }
    const uint32_t total = __shfl_sync(kAllLanes, prefix, 31);
    above += total & 0xffff;
    equal += total >> 16;
  }
}

// Lists this block's keys that are not below `low`, few of all, in order; returns how many.
template <int kQuads>
__device__ __forceinline__ int ListKeys(const Keys& in, uint32_t low, Shared& s) {
  static_assert(kQuads <= 4);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto byte = [](uint32_t word, int i) { return static_cast<int>(word >> 8 * i & 0xff); };
  int n = 0;
  int turn = 0;
  for (int tile = 0; tile < in.n; tile += kTile<kQuads>, turn ^= 1) {
    const int first = tile + warp * kChunk<kQuads>;
    Chunk<kQuads> c{};
    if (first < in.n) c = ReadChunk<kQuads>(in, first);
    uint32_t here = 0;  // how many of each four: a byte, since a warp has at most 128
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) here += c.key[i][j] >= low ? 1u << 8 * i : 0;
    }
    const uint32_t upto = WarpPrefix(here);
    const uint32_t of_warp = __shfl_sync(kAllLanes, upto, 31);
    if (lane == 0) s.warp_sums[turn][warp] = __dp4a(of_warp, 0x01010101u, 0u);
    __syncthreads();
    const uint32_t sum = s.warp_sums[turn][lane];
    int before = n + static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? sum : 0));
    n += static_cast<int>(__reduce_add_sync(kAllLanes, sum));
    if (here == 0) continue;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      int at = before + byte(upto - here, i);
      before += byte(of_warp, i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (c.key[i][j] < low) continue;
        s.own[at] = c.key[i][j];
        s.own_at[at] = first + 128 * i + 4 * lane + j;
        ++at;
      }
    }
  }
  return n;
}

// The end of a selection whose key of rank k is number found.rank of a range of found.n keys, few.
template <int kQuads>
__device__ __forceinline__ void CollectListed(const TopKArgs& a, int64_t list, const Keys& in,
                                              int n_blocks, const Range& range, FewFound found,
                                              Shared& s) {
  const int block = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  uint32_t of_block = 0;  // the range's keys of each block before this one
  if (warp == 0 && lane < block) of_block = *InBlock(&s.bins[found.bin], lane);
  const int n_own = ListKeys<kQuads>(in, range.low, s);
  if (warp == 0) {
    of_block = __reduce_add_sync(kAllLanes, of_block);
    if (lane == 0) s.range_before = of_block;
  }
  __syncthreads();
  const auto first = static_cast<int>(s.range_before);
  // A warp a block: sends it this block's keys of the range, and how many are above.
  for (int to = warp; to < n_blocks; to += kWarps) {
    int at = first;
    for (int i = lane; i - lane < n_own; i += 32) {
      const uint32_t above = i < n_own ? s.own[i] - range.low : 0;
      const bool in_range = i < n_own && above >> range.shift == 0;
      const uint32_t lanes = __ballot_sync(kAllLanes, in_range);
      if (in_range) *InBlock(&s.range[at + __popc(lanes & ((1u << lane) - 1))], to) = above;
      at += __popc(lanes);
    }
    const int n_above = n_own - (at - first);
    if (lane == 0 && to > block) {
      atomicAdd(InBlock(&s.above_before, to), static_cast<uint32_t>(n_above));
    }
  }
  ClusterSync();  // the last use of another block's memory lies before

  const auto n_range = static_cast<int>(found.n);
  uint32_t rank = found.rank;
  uint32_t threshold = 0;  // above the beginning of the range: the digits found
  int shift = range.shift;
#pragma unroll 1
  for (int digit = 0; shift > 0; ++digit) {
    const int n_bits = min(shift, 8);
    shift -= n_bits;
#pragma unroll 1
    for (int i = tid; i < n_range; i += kThreads) {
      const uint32_t bin = (s.range[i] ^ threshold) >> shift;
      if (bin >> n_bits == 0) atomicAdd(&s.few_bins[digit][bin], 1u);
    }
    __syncthreads();
    if (tid < 32) {  // other warps that look for the same would be in the way
      const FewFound few = FindFew(s.few_bins[digit], rank);
      if (tid == 0) s.found = few;
    }
    __syncthreads();
    threshold |= s.found.bin << shift;
    rank = s.found.rank;
    if (rank == s.found.n) break;  // all of them are chosen
  }
  // Keys above (low half) and equal: of the range's in earlier blocks, and this thread's.
  uint32_t before = 0;
#pragma unroll 1
  for (int i = tid; i < first; i += kThreads) before += AboveAndEqual(s.range[i], threshold);
  before = __reduce_add_sync(kAllLanes, before);
  if (lane == 0 && before != 0) {
    atomicAdd(&s.above_before, before & 0xffff);
    atomicAdd(&s.equal_before, before >> 16);
  }
  const int each = (n_own + kThreads - 1) / kThreads;
  const int begin = min(n_own, each * tid);
  const int end = min(n_own, begin + each);
  threshold |= range.low;
  uint32_t here = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) here += AboveAndEqual(s.own[i], threshold);
  here = SumInBlock<kWarps>(here, s.warp_sums[0]).before;
  uint32_t n_above = s.above_before + (here & 0xffff);
  uint32_t n_equal = s.equal_before + (here >> 16);
  for (int i = begin; i < end; ++i) {
    const uint32_t key = s.own[i];
    if (key > threshold || (key == threshold && n_equal < rank)) {
      a.Put(list, static_cast<int>(n_above + min(n_equal, rank)), in.first + s.own_at[i]);
    }
    n_above += key > threshold ? 1 : 0;
    n_equal += key == threshold ? 1 : 0;
  }
}

// Grid: x the blocks of a cluster, y lists, z sequences. `window_keys` [n_seqs, lists, key_stride],
// null where keys are those of scores as they are. Shared memory: Shared, then room for n_kept
// keys.
template <int kQuads>
__global__ void __launch_bounds__(kThreads, 1)
    SelectKernel(const TopKArgs a, const uint32_t* window_keys, int64_t key_stride, int n_kept) {
  extern __shared__ uint4 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
#if __CUDA_ARCH__ >= 900
  const int n_blocks = static_cast<int>(gridDim.x);
#else
  const int n_blocks = 1;
  if (blockIdx.x != 0) return;
#endif
  const int block = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t seq = blockIdx.z;
  const int64_t list = seq * gridDim.y + blockIdx.y;
  GridTrigger();
  PrefetchSelection(a, seq);
  for (int i = tid; i < kBins; i += kThreads) s.bins[i] = 0;
  for (int i = tid; i < kDigits * kBins; i += kThreads) (&s.totals[0][0])[i] = 0;
  for (int i = tid; i < 3 * kFewBins; i += kThreads) (&s.few_bins[0][0])[i] = 0;
  if (tid == 0) s.above = s.equal = s.above_before = s.equal_before = 0;
  __syncthreads();
  ClusterArrive();
  GridWait();

  if (a.keep != nullptr && a.keep[seq] != 0) return ClusterWait();
  const int n = a.CandidatesOf(list);
  const int k = a.Picks(a.n_pick[seq], n);
  if (block == 0 && tid == 0) a.Finish(list, k);
  if (k == n) {
    for (int i = block * kThreads + tid; i < n; i += n_blocks * kThreads) a.Put(list, i, i);
  }
  if (k == 0 || k == n) return ClusterWait();

  const uint32_t* const keys = window_keys == nullptr
                                   ? reinterpret_cast<const uint32_t*>(a.ScoresOf(list))
                                   : window_keys + list * key_stride;
  Keys in;
  in.scores = window_keys == nullptr;
  in.weight = in.scores ? a.weights[0] : 1.0f;
  in.kept = reinterpret_cast<uint32_t*>(&s + 1);
  in.n_kept = n_kept;
  const int width = static_cast<int>(CeilDiv(n, 4 * n_blocks)) * 4;
  in.first = min(n, block * width);
  in.from = keys + in.first;
  in.n = min(width, n - in.first);
  in.aligned = reinterpret_cast<uintptr_t>(in.from) % sizeof(uint4) == 0;
  CountFirst<kQuads>(in, static_cast<uint32_t>(k), s);
  ClusterWait();  // every block runs and has zeroed what others add to
  __syncthreads();

  FewFound found{.rank = static_cast<uint32_t>(k)};
  Range range{0, 32};
  uint32_t above = 0;
  const int high_bin = HighBin();
  const int low_bin = high_bin - 1;
  for (int digit = 0, shift = 0;; ++digit) {
    // The blocks add up their bins, each block a share of them.
    const uint32_t high = s.bins[high_bin];
    const uint32_t low = s.bins[low_bin];
    uint32_t* total = InBlock(&s.totals[digit][low_bin], low_bin / (kBins / n_blocks));
    if (low != 0) atomicAdd(total, low);
    if (high != 0) atomicAdd(total + 1, high);
    ClusterSync();
    const uint2 of_bins = *reinterpret_cast<const uint2*>(total);
    found = FindBin(s, of_bins.y, of_bins.x, found.rank);
    range = digit == 0 ? OfFirstBin(found.bin) : Range{range.low | found.bin << shift, shift};
    if (range.shift == 32) {
      found.rank = static_cast<uint32_t>(k);
    } else {
      if (found.n <= kRangeKeys && static_cast<uint32_t>(k) - found.rank + found.n <= kOwnKeys) {
        return CollectListed<kQuads>(a, list, in, n_blocks, range, found, s);
      }
      const auto bin = static_cast<int>(found.bin);
      above += (high_bin > bin ? high : 0) + (low_bin > bin ? low : 0);
      if (low_bin == bin) s.equal = low;
      if (high_bin == bin) s.equal = high;
      if (range.shift == 0) break;
    }
    s.bins[high_bin] = s.bins[low_bin] = 0;
    __syncthreads();
    shift = max(range.shift - kDigitBits, 0);
    CountNext<kQuads>(in, range, shift, s);
    __syncthreads();
  }
  above = __reduce_add_sync(kAllLanes, above);
  if (tid % 32 == 0 && above != 0) atomicAdd(&s.above, above);
  __syncthreads();
  if (tid > block && tid < n_blocks) {
    atomicAdd(InBlock(&s.above_before, tid), s.above);
    atomicAdd(InBlock(&s.equal_before, tid), s.equal);
  }
  ClusterSync();  // the last use of another block's memory lies before
  Collect<kQuads>(a, list, in, range.low, found.rank, s);
}

// --- TopK of few tokens: one block a list, whose threads hold the keys of consecutive tokens. The
// key of rank k is found by up to four digits of eight bits. Each warp finds a digit for itself.

constexpr int kFewWarps = 8;  // or twice as many
constexpr int kFewHeld = 4;   // keys of a thread
constexpr int64_t kFewTokens = 32 * kFewWarps * kFewHeld;
// Grid: y lists, z sequences. `window_keys` as SelectKernel's. REQUIRES at most 32 * kWarpsOfBlock
// * kFewHeld tokens.
template <int kWarpsOfBlock>
__global__ void __launch_bounds__(32 * kWarpsOfBlock)
    SelectFewKernel(const TopKArgs a, const uint32_t* window_keys, int64_t key_stride) {
  __shared__ alignas(16) uint32_t bins[4][kFewBins];  // by digit
  __shared__ uint32_t sums[kWarpsOfBlock];
  GridTrigger();
  const int64_t seq = blockIdx.z;
  PrefetchSelection(a, seq);
  const int tid = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = tid; i < 4 * kFewBins; i += 32 * kWarpsOfBlock) (&bins[0][0])[i] = 0;
  __syncthreads();
  GridWait();
  const int64_t list = seq * gridDim.y + blockIdx.y;
  const auto* from = window_keys != nullptr ? window_keys + list * key_stride
                                            : reinterpret_cast<const uint32_t*>(a.ScoresOf(list));
  const int first = tid * kFewHeld;
  uint32_t key[kFewHeld];  // all loads are under way together
#pragma unroll
  for (int i = 0; i < kFewHeld; ++i) key[i] = first + i < a.room() ? __ldcg(from + first + i) : 0;
  const int32_t keep = a.keep != nullptr ? a.keep[seq] : 0;
  const int n = a.CandidatesOf(list);
  const int n_pick = a.n_pick[seq];
  const float weight = a.weights[0];
  if (keep != 0) return;
  const auto k = static_cast<uint32_t>(a.Picks(n_pick, n));
  if (tid == 0) a.Finish(list, static_cast<int>(k));
  if (k == 0) return;
#pragma unroll
  for (int i = 0; i < kFewHeld; ++i) {
    if (window_keys == nullptr) key[i] = KeyOf(__fmul_rn(weight, __uint_as_float(key[i])));
    if (first + i >= n) key[i] = kNoKey;
  }

  uint32_t threshold = 0;  // the digits found
  uint32_t rank = k;       // among the keys that share them
#pragma unroll 1
  for (int digit = 0; digit < 4; ++digit) {
    const int shift = 24 - 8 * digit;
#pragma unroll
    for (int i = 0; i < kFewHeld; ++i) {
      const uint32_t bin = (key[i] ^ threshold) >> shift;
      if (bin < kFewBins) atomicAdd(&bins[digit][bin], 1u);
    }
    __syncthreads();
    const FewFound found = FindFew(bins[digit], rank);
    threshold |= found.bin << shift;
    rank = found.rank;
    if (rank == found.n) break;  // all of them are chosen
  }
  uint32_t here = 0;  // keys above (low half) and equal (high half)
#pragma unroll
  for (int i = 0; i < kFewHeld; ++i) {
    here += AboveAndEqual(key[i], threshold);
  }
  uint32_t at = SumInBlock<kWarpsOfBlock>(here, sums).before;
#pragma unroll
  for (int i = 0; i < kFewHeld; ++i) {
    if (key[i] < threshold) continue;
    const uint32_t n_equal = at >> 16;
    if (key[i] > threshold || n_equal < rank) {
      a.Put(list, static_cast<int>((at & 0xffff) + min(n_equal, rank)), first + i);
    }
    at += key[i] > threshold ? 1u : 0x10000u;
  }
}

int64_t KeyStride(const TopKArgs& args) {
  return CeilDiv(args.room(), 4) * 4;
}

// Whether keys are made first: else they are those of scores as they are.
bool MakesKeys(const TopKArgs& args) {
  return args.window > 1 ||
         (args.Gathers() && (args.room() <= 2 * kFewTokens || args.room() > kListedTokens));
}

// SelectKernel<quads>.
struct Select {
  decltype(&SelectKernel<2>) kernel = nullptr;
  int quads = 0;

  int64_t chunk() const { return 128 * int64_t{quads}; }
};

// The fastest for a block of so many keys: a tile takes about as long as its quads and two more.
// With five, registers spill.
Select SelectOf(int64_t n_keys) {
  Select best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Select& s :
       {Select{SelectKernel<2>, 2}, Select{SelectKernel<3>, 3}, Select{SelectKernel<4>, 4}}) {
    const int64_t time = CeilDiv(n_keys, kWarps * s.chunk()) * (s.quads + 2);
    if (time < least) best = s, least = time;
  }
  return best;
}

// A launch of SelectKernel in clusters of n_blocks.
class SelectLaunch {
 public:
  SelectLaunch(const TopKArgs& args, int n_blocks, const Launch& launch)
      : n_keys_(CeilDiv(args.room(), 4 * n_blocks) * 4),
        select_(SelectOf(n_keys_)),
        n_kept_(KeptKeys(*launch.device)),
        launch_(launch, GridOf(args, n_blocks), kThreads,
                sizeof(Shared) + sizeof(uint32_t) * static_cast<size_t>(n_kept_), n_blocks) {
    AllowShared(select_.kernel, launch.device->shared_per_block);
  }

  // Whether the card can run such clusters, and as many of them at a time.
  bool CanRun(int64_t clusters) const {
    const bool allowed =
        cudaFuncSetAttribute(select_.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
        cudaSuccess;
    if (!allowed) cudaGetLastError();  // an answer, not a failure
    return allowed && launch_.MaxClusters(select_.kernel) >= clusters;
  }

  void Run(const TopKArgs& args, const uint32_t* keys) const {
    launch_.Run(select_.kernel, args, keys, KeyStride(args), n_kept_);
  }

 private:
  // Keys that a block can keep in shared memory, and has use for, in whole chunks.
  int KeptKeys(const Device& device) const {
    const int64_t chunk = select_.chunk();
    const auto fits =
        static_cast<int64_t>((device.shared_per_block - sizeof(Shared)) / sizeof(uint32_t)) / chunk;
    return static_cast<int>(std::min(CeilDiv(n_keys_, chunk), fits) * chunk);
  }

  int64_t n_keys_;  // of a block, at most
  Select select_;
  int n_kept_;
  KernelLaunch launch_;
};

}  // namespace

size_t TopKScratch(const TopKArgs& args, const Device&) {
  if (!MakesKeys(args)) return 0;
  return sizeof(uint32_t) * static_cast<size_t>(args.n_seqs * args.lists * KeyStride(args));
}

void TopK(const TopKArgs& args, const Launch& launch) {
  if (args.n_seqs == 0) return;
  uint32_t* keys = nullptr;
  if (MakesKeys(args)) {
    keys = reinterpret_cast<uint32_t*>(launch.scratch);
    const dim3 grid =
        GridOf(args, std::min(CeilDiv(args.room(), 256), 8 * int64_t{launch.device->sm_count}));
    LaunchKernel(WindowKeysKernel, launch, grid, 256, 0, args, keys, KeyStride(args));
  }
  const int64_t room = args.room();
  if (room <= 2 * kFewTokens) {
    const bool half = room <= kFewTokens;
    const auto kernel = half ? SelectFewKernel<kFewWarps> : SelectFewKernel<2 * kFewWarps>;
    return LaunchKernel(kernel, launch, GridOf(args, 1), 32 * kFewWarps * (half ? 1 : 2), 0, args,
                        keys, KeyStride(args));
  }
  if (IsBounded(args, *launch.device)) return SelectBounded(args, launch);
  if (room <= kListedTokens) return SelectListed(args, keys, KeyStride(args), launch);
  if (launch.device->arch >= 90 && room > kWideTokens) {
    const SelectLaunch wide(args, 16, launch);
    if (wide.CanRun(int64_t{args.n_seqs} * args.lists)) return wide.Run(args, keys);
  }
  SelectLaunch(args, launch.device->arch < 90 ? 1 : 8, launch).Run(args, keys);
}

}  // namespace omnikv::cuda
