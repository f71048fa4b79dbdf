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
constexpr int kBlockBits = 4;               // of the number of a block
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
  uint32_t own[kOwnKeys + 128];     // listed keys; of whole chunks
  int own_at[kOwnKeys];             // where in this block they are
  uint32_t range[kRangeKeys];       // all blocks' keys of the range, less its beginning, and
                                    // their block
  uint32_t n_range;
  uint32_t warp_sums[2][kWarps];
  FewFound found;
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
};

template <int kQuads>
__device__ __forceinline__ Chunk<kQuads> LoadChunk(const Keys& in, int at) {
  Chunk<kQuads> c;
  const int mine = at + static_cast<int>(threadIdx.x) % 32 * 4;
  const auto to_keys = [&](int i, uint4 raw) {
    c.key[i][0] = ToKey(in, raw.x);
    c.key[i][1] = ToKey(in, raw.y);
    c.key[i][2] = ToKey(in, raw.z);
    c.key[i][3] = ToKey(in, raw.w);
  };
  const auto load = [&](int i) {
    return __ldcg(reinterpret_cast<const uint4*>(in.from + mine + 128 * i));
  };
  uint4 raw[kQuads];  // all loads are under way together
  if (in.aligned && at + kChunk<kQuads> <= in.n) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) raw[i] = load(i);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) to_keys(i, raw[i]);
    return c;
  }
  // The same at the end of the keys, where a lane has fewer fours, or not all of one.
  const auto whole = [&](int i) { return in.aligned && mine + 128 * i + 4 <= in.n; };
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (whole(i)) raw[i] = load(i);
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (whole(i)) {
      to_keys(i, raw[i]);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int t = mine + 128 * i + j;
      c.key[i][j] = t < in.n ? ToKey(in, __ldcg(in.from + t)) : kNoKey;
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
  if (at >= in.n_kept) return LoadChunk<kQuads>(in, at);
  Chunk<kQuads> c;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const uint4 four = *KeptAt(in, at, i);
    c.key[i][0] = four.x;
    c.key[i][1] = four.y;
    c.key[i][2] = four.z;
    c.key[i][3] = four.w;
  }
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
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t prefix = WarpPrefix(high + low);
  if (lane == 31) s.warp_sums[0][warp] = prefix;
  __syncthreads();
  const uint32_t sum = s.warp_sums[0][lane];
  const uint32_t warps_before = __shfl_sync(kAllLanes, WarpPrefix(sum) - sum, warp);
  const uint32_t end = warps_before + prefix;
  const uint32_t begin = end - high - low;
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

// Calls put(n, i, key) for the keys above `threshold` and the first `ties` of those equal to it, of
// which `above` and `equal` lie before this block: i is the key's place in the block, n how many
// such keys lie before it. Returns `above`, and those of the block.
template <int kQuads, typename Put>
__device__ __forceinline__ uint32_t Collect(const Keys& in, uint32_t threshold, uint32_t ties,
                                            uint32_t above, uint32_t equal, Shared& s,
                                            const Put& put) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
        const uint32_t key = c.key[i][j];
        here[i] += key > threshold ? 1u : key == threshold ? 0x10000u : 0u;
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
            put(static_cast<int>(n_above + min(n_equal, ties)), at + 128 * i + 4 * lane + j, key);
          }
          at_key += key > threshold ? 1u : 0x10000u;
        }
      }
    }
    const uint32_t total = __shfl_sync(kAllLanes, prefix, 31);
    above += total & 0xffff;
    equal += total >> 16;
  }
  return above;
}

// The end of a selection whose key of rank k is number `rank` of a range of few keys.
template <int kQuads>
__device__ __forceinline__ void CollectListed(const TopKArgs& a, int64_t list, const Keys& in,
                                              int n_blocks, const Range& range, uint32_t rank,
                                              Shared& s) {
  const int block = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const auto n_own = static_cast<int>(
      Collect<kQuads>(in, range.low - 1, 0, 0, 0, s, [&s](int n, int i, uint32_t key) {
        s.own[n] = key;
        s.own_at[n] = i;
      }));
  if (tid < 128) s.own[n_own + tid] = kNoKey;
  __syncthreads();
  for (int i = tid; i - lane < n_own; i += kThreads) {
    const uint32_t above = i < n_own ? s.own[i] - range.low : 0;
    const bool in_range = i < n_own && above >> range.shift == 0;
    const uint32_t of_range = __ballot_sync(kAllLanes, in_range);
    const int n_above = min(n_own - (i - lane), 32) - __popc(of_range);
    uint32_t first = 0;
    if (lane < n_blocks) {
      if (of_range != 0) first = atomicAdd(InBlock(&s.n_range, lane), __popc(of_range));
      if (lane > block && n_above > 0) atomicAdd(InBlock(&s.above_before, lane), n_above);
    }
    for (int to = 0; to < n_blocks && of_range != 0; ++to) {
      const uint32_t at = __shfl_sync(kAllLanes, first, to) + __popc(of_range & ((1u << lane) - 1));
      if (in_range) *InBlock(&s.range[at], to) = above << kBlockBits | static_cast<uint32_t>(block);
    }
  }
  ClusterSync();  // the last use of another block's memory lies before

  const auto n_range = static_cast<int>(s.n_range);
  uint32_t threshold = 0;  // above the beginning of the range: the digits found
  int shift = range.shift;
#pragma unroll 1
  for (int digit = 0; shift > 0; ++digit) {
    const int n_bits = min(shift, 8);
    shift -= n_bits;
    for (int i = tid; i < n_range; i += kThreads) {
      const uint32_t bin = (s.range[i] >> kBlockBits ^ threshold) >> shift;
      if (bin >> n_bits == 0) atomicAdd(&s.few_bins[digit][bin], 1u);
    }
    __syncthreads();
    if (tid < 32) {  // other warps that look for the same would be in the way
      const FewFound found = FindFew(s.few_bins[digit], rank);
      if (tid == 0) s.found = found;
    }
    __syncthreads();
    threshold |= s.found.bin << shift;
    rank = s.found.rank;
    if (rank == s.found.n) break;  // all of them are chosen
  }
  uint32_t before = 0;  // in earlier blocks: keys above (low half) and equal (high half)
  for (int i = tid; i < n_range; i += kThreads) {
    const uint32_t key = s.range[i] >> kBlockBits;
    if (static_cast<int>(s.range[i] & ((1u << kBlockBits) - 1)) >= block) continue;
    before += key > threshold ? 1u : key == threshold ? 0x10000u : 0u;
  }
  before = __reduce_add_sync(kAllLanes, before);
  if (lane == 0 && before != 0) {
    atomicAdd(&s.above_before, before & 0xffff);
    atomicAdd(&s.equal_before, before >> 16);
  }
  __syncthreads();
  Keys own = in;
  own.n = n_own;
  own.kept = s.own;
  own.n_kept = kOwnKeys;
  Collect<1>(own, range.low | threshold, rank, s.above_before, s.equal_before, s,
             [&](int n, int i, uint32_t) { a.Put(list, n, in.first + s.own_at[i]); });
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
  GridTrigger();
  PrefetchSelection(a, blockIdx.z);
  for (int i = tid; i < kBins; i += kThreads) s.bins[i] = 0;
  for (int i = tid; i < kDigits * kBins; i += kThreads) (&s.totals[0][0])[i] = 0;
  for (int i = tid; i < 3 * kFewBins; i += kThreads) (&s.few_bins[0][0])[i] = 0;
  if (tid == 0) s.n_range = s.above = s.equal = s.above_before = s.equal_before = 0;
  __syncthreads();
  ClusterArrive();
  GridWait();

  const int64_t seq = blockIdx.z;
  const int64_t list = seq * gridDim.y + blockIdx.y;
  if (a.keep != nullptr && a.keep[seq] != 0) return ClusterWait();
  const int n = a.CandidatesOf(list);
  const int k = a.Picks(a.n_pick[seq], n);
  if (block == 0 && tid == 0) a.Finish(list, k);
  if (k == n) {
    for (int i = block * kThreads + tid; i < n; i += n_blocks * kThreads) a.Put(list, i, i);
  }
  if (k == 0 || k == n) return ClusterWait();

  const int width = static_cast<int>(CeilDiv(n, 4 * n_blocks)) * 4;
  const int first = min(n, block * width);
  Keys in;
  in.scores = window_keys == nullptr;
  in.from = (in.scores ? reinterpret_cast<const uint32_t*>(a.ScoresOf(list))
                       : window_keys + list * key_stride) +
            first;
  in.n = min(width, n - first);
  in.weight = in.scores ? a.weights[0] : 1.0f;
  in.aligned = reinterpret_cast<uintptr_t>(in.from) % sizeof(uint4) == 0;
  in.kept = reinterpret_cast<uint32_t*>(&s + 1);
  in.n_kept = n_kept;
  in.first = first;

  FewFound found{.rank = static_cast<uint32_t>(k)};
  Range range{0, 32};
  uint32_t above = 0;
  bool few = false;
  for (int digit = 0; range.shift > 0 && !few; ++digit) {
    const int shift = max(range.shift - kDigitBits, 0);
    if (digit == 0) {
      CountFirst<kQuads>(in, static_cast<uint32_t>(k), s);
      ClusterWait();  // every block runs and has zeroed what others add to
    } else {
      CountNext<kQuads>(in, range, shift, s);
    }
    __syncthreads();
    // The blocks add up their bins, each block a share of them.
    const int high_bin = HighBin();
    const int low_bin = high_bin - 1;
    const uint32_t high = s.bins[high_bin];
    const uint32_t low = s.bins[low_bin];
    s.bins[high_bin] = 0;
    s.bins[low_bin] = 0;
    uint32_t* total = InBlock(&s.totals[digit][low_bin], low_bin / (kBins / n_blocks));
    if (low != 0) atomicAdd(total, low);
    if (high != 0) atomicAdd(total + 1, high);
    ClusterSync();
    found = FindBin(s, total[1], total[0], found.rank);
    range = digit == 0 ? OfFirstBin(found.bin) : Range{range.low | found.bin << shift, shift};
    if (range.shift == 32) {
      found.rank = static_cast<uint32_t>(k);
      continue;
    }
    few = found.n <= kRangeKeys && static_cast<uint32_t>(k) - found.rank + found.n <= kOwnKeys;
    const auto bin = static_cast<int>(found.bin);
    above += (high_bin > bin ? high : 0) + (low_bin > bin ? low : 0);
    if (low_bin == bin) s.equal = low;
    if (high_bin == bin) s.equal = high;
  }
  if (few) return CollectListed<kQuads>(a, list, in, n_blocks, range, found.rank, s);
  above = __reduce_add_sync(kAllLanes, above);
  if (tid % 32 == 0 && above != 0) atomicAdd(&s.above, above);
  __syncthreads();
  if (tid > block && tid < n_blocks) {
    atomicAdd(InBlock(&s.above_before, tid), s.above);
    atomicAdd(InBlock(&s.equal_before, tid), s.equal);
  }
  ClusterSync();  // the last use of another block's memory lies before
  Collect<kQuads>(in, range.low, found.rank, s.above_before, s.equal_before, s,
                  [&](int n_before, int i, uint32_t) { a.Put(list, n_before, in.first + i); });
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
    here += key[i] > threshold ? 1u : key[i] == threshold ? 0x10000u : 0u;
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
