// From logits to the next step's token, so that steps follow one another without the host.
#include <algorithm>
#include "backend/cuda/kernels/cluster.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 32;  // of a row, weighed side by side; a warp compares their results

struct Best {
  float value;
  int32_t token;
};

// A logit as a candidate. One that is not a finite number wins against all that are: its value
// tells.
__device__ __forceinline__ Best Candidate(float logit, int64_t token) {
  return {isfinite(logit) ? logit : INFINITY, static_cast<int32_t>(token)};
}

// The higher value, of equals the lower token. Values are no NaN.
__device__ __forceinline__ Best Better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.token < a.token);
  return second ? b : a;
}

__device__ __forceinline__ Best WarpBest(Best best) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    best = Better(best, {__shfl_xor_sync(kAllLanes, best.value, lane),
                         __shfl_xor_sync(kAllLanes, best.token, lane)});
  }
  return best;
}

// The best of each part: parts [n_rows, kParts]. Grid (kParts, n_rows).
__global__ void __launch_bounds__(kThreads)
    BestOfParts(const float* logits, int64_t vocab, Best* parts) {
  GridTrigger();
  GridWait();
  const int64_t share = CeilDiv(vocab, kParts);
  const int64_t begin = blockIdx.x * share;
  const int64_t end = min(begin + share, vocab);
  const float* row = logits + blockIdx.y * vocab;
  Best best{-INFINITY, INT32_MAX};
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    best = Better(best, Candidate(row[t], t));
  }
  best = WarpBest(best);
  __shared__ Best warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) best = Better(best, warps[w]);
  parts[blockIdx.y * kParts + blockIdx.x] = best;
}

// --- Sampling, by one cluster of blocks a row: the words of sampling.h. Logits become keys,
// unsigned numbers of the same order, kept in shared memory. A place in the order of all tokens is
// found by its digits, of which four passes over the keys add up the weights: that puts nothing in
// order, and takes the same time for any text.

constexpr int kDrawThreads = 1024;
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kBins = 256;  // of a digit of 8 bits
constexpr int kCopies = 8;  // of each bin, so that the lanes of a warp seldom add to the same
constexpr int kPieces = 3;  // of a sum in a bin: kPieceBits of every addend go to each
constexpr int kPieceBits = 14;
constexpr int kPieceStride = kBins * kCopies;
static_assert(kWeightOne < uint64_t{1} << (kPieces * kPieceBits));
static_assert(kMaxSampleVocab <= int64_t{kCopies} << (32 - kPieceBits), "a piece has 32 bits");
constexpr int64_t kOneBlockVocab = 16384;  // more takes a cluster of kDrawBlocks
constexpr int kDrawBlocks = 8;
constexpr int kFours = 4;       // fours of logits that a thread loads at once
constexpr uint32_t kNoKey = 0;  // of NaN and of no token: lower than any logit's

// Both zeros have the same key.
__device__ __forceinline__ uint32_t KeyOf(float logit) {
  if (isnan(logit)) return kNoKey;
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float LogitOf(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key);
}

struct Two {
  uint64_t a, b;
};

// Shared memory of a block; its keys may follow.
struct alignas(16) DrawShared {
  uint32_t bins[kPieces * kPieceStride];  // [piece][bin][copy]; 0 between passes
  uint64_t sums[2][kBins];                // this block's, for the others; in turn
  Two warp_twos[kDrawWarps];
  uint64_t warp_sums[kDrawWarps];
  uint64_t found_before, found_at;
  uint32_t found_bin;
};

// A block's part of a row.
struct Part {
  DrawShared& s;
  uint32_t* keys;  // [width], kNoKey past the end of the row
  int width;       // of fours
  int n_blocks;    // of the cluster
  int turn;        // of s.sums
};

// The keys of this thread's warp: [begin, end), of fours.
struct Share {
  int begin, end;
};

__device__ __forceinline__ Share WarpShare(const Part& part) {
  const int size = static_cast<int>(CeilDiv(part.width, 4 * kDrawWarps)) * 4;
  const int begin = static_cast<int>(threadIdx.x) / 32 * size;
  return {begin, min(begin + size, part.width)};
}

// Calls body(key) for each key of this thread.
template <typename Body>
__device__ __forceinline__ void ForKeys(const Part& part, const Body& body) {
  const Share share = WarpShare(part);
#pragma unroll 1  // little code: a pass runs it once
  for (int at = share.begin + static_cast<int>(threadIdx.x) % 32 * 4; at < share.end; at += 128) {
    const uint4 four = *reinterpret_cast<const uint4*>(part.keys + at);
    body(four.x);
    body(four.y);
    body(four.z);
    body(four.w);
  }
}

// value(block) of all blocks of the cluster, asked for at once.
template <typename T, typename Value>
__device__ __forceinline__ void OfBlocks(const Part& part, T (&of)[kDrawBlocks],
                                         const Value& value) {
#pragma unroll
  for (int block = 0; block < kDrawBlocks; ++block) {
    of[block] = value(min(block, part.n_blocks - 1));
  }
}

template <typename Combine>
__device__ __forceinline__ Two WarpTwos(Two v, const Combine& combine) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    v = combine(v,
                Two{__shfl_xor_sync(kAllLanes, v.a, lane), __shfl_xor_sync(kAllLanes, v.b, lane)});
  }
  return v;
}

// All of the cluster's `v` combined, for all of its threads.
template <typename Combine>
__device__ __forceinline__ Two ClusterTwos(Part& part, Two v, const Combine& combine) {
  DrawShared& s = part.s;
  v = WarpTwos(v, combine);
  if (threadIdx.x % 32 == 0) s.warp_twos[threadIdx.x / 32] = v;
  __syncthreads();
  uint64_t* mine = s.sums[part.turn];
  if (threadIdx.x < 32) {
    v = WarpTwos(s.warp_twos[threadIdx.x], combine);
    if (threadIdx.x == 0) mine[0] = v.a;
    if (threadIdx.x == 0) mine[1] = v.b;
  }
  ClusterSync();
  Two of[kDrawBlocks];
  OfBlocks(part, of, [&](int block) {
    const uint64_t* there = InBlock(mine, block);
    return Two{there[0], there[1]};
  });
  v = of[0];
#pragma unroll
  for (int block = 1; block < kDrawBlocks; ++block) {
    if (block < part.n_blocks) v = combine(v, of[block]);
  }
  part.turn ^= 1;
  return v;
}

struct Found {
  uint32_t key;
  uint64_t before;  // the value of all keys above it
  uint64_t at;      // of those equal to it
};

// The first key in order up to which the keys' values sum to `target` or more, of which no key but
// kNoKey need have any. REQUIRES 0 < target <= the sum of all, and value(kNoKey) = 0.
template <typename Value>
__device__ __forceinline__ Found Find(Part& part, uint64_t target, const Value& value) {
  DrawShared& s = part.s;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int bin = kBins - 1 - tid;  // of the first kBins threads: the highest bin first
  Found found{0, 0, 0};
  for (int shift = 24; shift >= 0; shift -= 8) {
    ForKeys(part, [&](uint32_t key) {
      if (shift < 24 && (key ^ found.key) >> (shift + 8) != 0) return;
      const uint64_t v = value(key);
      uint32_t* to = s.bins + ((key >> shift) % kBins) * kCopies + lane % kCopies;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t bits = static_cast<uint32_t>(v >> (piece * kPieceBits)) % (1u << kPieceBits);
        if (bits != 0) atomicAdd(to + piece * kPieceStride, bits);
      }
    });
    __syncthreads();
    if (tid < kBins) {
      uint64_t sum = 0;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
        for (int i = 0; i < kCopies; i += 4) {
          auto* four = reinterpret_cast<uint4*>(s.bins + piece * kPieceStride + bin * kCopies + i);
          const uint4 v = *four;
          *four = make_uint4(0, 0, 0, 0);
          sum += (uint64_t{v.x} + v.y + v.z + v.w) << (piece * kPieceBits);
        }
      }
      s.sums[part.turn][tid] = sum;
    }
    ClusterSync();
    uint64_t here = 0;
    uint64_t end = 0;
    if (tid < kBins) {
      uint64_t of[kDrawBlocks];
      OfBlocks(part, of, [&](int block) { return InBlock(s.sums[part.turn], block)[tid]; });
#pragma unroll
      for (int block = 0; block < kDrawBlocks; ++block) {
        here += block < part.n_blocks ? of[block] : 0;
      }
      end = WarpPrefix(here);
      if (lane == 31) s.warp_sums[warp] = end;
    }
    __syncthreads();
    if (tid < kBins) {
      end += found.before;
      for (int w = 0; w < warp; ++w) end += s.warp_sums[w];
      if (end - here < target && target <= end) {
        s.found_bin = static_cast<uint32_t>(bin);
        s.found_before = end - here;
        s.found_at = here;
      }
    }
    __syncthreads();
    found = {found.key | s.found_bin << shift, s.found_before, s.found_at};
    part.turn ^= 1;
  }
  return found;
}

// What LoadKeys counts: numbers in the low half, logits that are not finite in the high one.
constexpr uint64_t kOneNotFinite = uint64_t{1} << 32;

// The keys of the row's tokens first .. first + n - 1, penalised: the best of them, and the counts.
__device__ __forceinline__ Two LoadKeys(const NextTokenArgs& a, const Part& part, int64_t row,
                                        int64_t first, int n) {
  const float* logits = a.logits + row * a.vocab + first;
  const uint32_t* seen = a.seen + row * SeenWords(a.vocab);
  const float penalty = a.sample[row].repeat_penalty;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0;
  uint32_t best = kNoKey;
  uint64_t count = 0;
  const Share share = WarpShare(part);
  for (int from = share.begin + static_cast<int>(threadIdx.x) % 32 * 4; from < share.end;
       from += 128 * kFours) {
    float v[kFours][4];
    if (aligned && from + 128 * (kFours - 1) + 4 <= n) {
      float4 fours[kFours];
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        fours[i] = __ldcg(reinterpret_cast<const float4*>(logits + from + 128 * i));
      }
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        v[i][0] = fours[i].x;
        v[i][1] = fours[i].y;
        v[i][2] = fours[i].z;
        v[i][3] = fours[i].w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kFours * 4; ++i) {
        const int at = from + 128 * (i / 4) + i % 4;
        v[i / 4][i % 4] = at < n ? __ldcg(logits + at) : NAN;
      }
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int at = from + 128 * i;
      if (at >= share.end) break;
      uint32_t bits = 0;
      if (penalty != 1 && at < n) bits = seen[(first + at) / 32] >> ((first + at) % 32);
      uint32_t keys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        keys[j] = KeyOf((bits >> j & 1) != 0 ? Penalised(v[i][j], penalty) : v[i][j]);
        best = max(best, keys[j]);
        count += keys[j] != kNoKey ? 1 : 0;
        if (at + j < n && !isfinite(v[i][j])) count += kOneNotFinite;
      }
      *reinterpret_cast<uint4*>(part.keys + at) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
    }
  }
  return {best, count};
}

// Where a token stands: of those with the key, in order, number `nth`, from 0.
struct Place {
  uint32_t key;
  uint64_t nth;
};

__device__ __forceinline__ Place Draw(Part& part, const SampleMeta& meta, uint32_t best_key,
                                      uint64_t n_numbers) {
  if (best_key == kNoKey || meta.temperature == 0) return {best_key, 0};
  uint32_t floor = kNoKey + 1;  // lower keys are out
  uint64_t beyond = 0;          // so many of `floor` are, too
  if (meta.top_k > 0 && static_cast<uint64_t>(meta.top_k) < n_numbers) {
    const auto k = static_cast<uint64_t>(meta.top_k);
    const Found last =
        Find(part, k, [](uint32_t key) { return uint64_t{key != kNoKey ? 1u : 0u}; });
    floor = last.key;
    beyond = last.before + last.at - k;
  }
  const float best = LogitOf(best_key);
  const double scale = SampleScale(meta.temperature);
  const uint64_t least = SampleMinWeight(meta.min_p);
  const auto weight = [&](uint32_t key) {
    return key >= floor ? SampleWeight(LogitOf(key), best, scale) : 0;
  };
  const auto weight_left = [&](uint32_t key) {
    const uint64_t w = weight(key);
    return w >= least ? w : 0;
  };
  Two sums{0, 0};
  ForKeys(part, [&](uint32_t key) {
    const uint64_t w = weight(key);
    sums.a += w;
    sums.b += w >= least ? w : 0;
  });
  sums = ClusterTwos(part, sums, [](Two x, Two y) { return Two{x.a + y.a, x.b + y.b}; });
  // Tokens beyond the last are the last in order: no place that is looked for below falls on them.
  const uint64_t total = sums.a - beyond * weight(floor);
  uint64_t kept = sums.b - beyond * weight_left(floor);
  if (meta.top_p < 1) {
    const uint64_t wanted = min(SampleTopWeight(meta.top_p, total), kept);
    const Found last = Find(part, wanted, weight_left);
    const uint64_t w = weight(last.key);
    kept = last.before + (wanted - last.before + w - 1) / w * w;
  }
  const uint64_t place = SampleRandom(meta.random, kept);
  const Found drawn = Find(part, place + 1, weight_left);
  return {drawn.key, (place - drawn.before) / weight(drawn.key)};
}

// The token at `place` with `value`, as all of the row's parts: REQUIRES one. `first` is the
// block's first token.
__device__ __forceinline__ void WriteToken(Part& part, const Place& place, float value,
                                           int64_t first, Best* parts) {
  DrawShared& s = part.s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t mine = 0;
  ForKeys(part, [&](uint32_t key) { mine += key == place.key ? 1 : 0; });
  mine = __reduce_add_sync(kAllLanes, mine);
  if (lane == 0) s.warp_sums[warp] = mine;
  __syncthreads();
  uint64_t before = 0;  // in the block
  uint64_t in_block = 0;
  for (int w = 0; w < kDrawWarps; ++w) {
    if (w == warp) before = in_block;
    in_block += s.warp_sums[w];
  }
  if (threadIdx.x == 0) s.sums[part.turn][0] = in_block;
  ClusterSync();
  uint64_t of[kDrawBlocks];
  OfBlocks(part, of, [&](int block) { return *InBlock(s.sums[part.turn], block); });
#pragma unroll
  for (int block = 0; block < kDrawBlocks; ++block) {
    before += block < static_cast<int>(blockIdx.x) ? of[block] : 0;
  }
  ClusterSync();  // the last use of another block's memory lies before
  if (place.nth < before || place.nth >= before + mine) return;
  auto left = static_cast<uint32_t>(place.nth - before);
  const Share share = WarpShare(part);
  for (int at = share.begin; at < share.end; at += 32) {
    const bool equal = at + lane < share.end && part.keys[at + lane] == place.key;
    uint32_t mask = __ballot_sync(kAllLanes, equal);
    const auto n = static_cast<uint32_t>(__popc(mask));
    if (left >= n) {
      left -= n;
      continue;
    }
    for (; left > 0; --left) mask &= mask - 1;
    parts[lane] = {value, static_cast<int32_t>(first) + at + __ffs(static_cast<int>(mask)) - 1};
    return;
  }
}

// Grid: x the blocks of a cluster, y rows. Shared memory: DrawShared, then room for `width` keys
// unless `far_keys` [n_rows, gridDim.x, width] has them.
__global__ void __launch_bounds__(kDrawThreads, 1)
    DrawKernel(const NextTokenArgs a, int width, uint32_t* far_keys, Best* parts) {
  extern __shared__ uint4 memory[];
  DrawShared& s = *reinterpret_cast<DrawShared*>(memory);
  GridTrigger();
  for (int i = static_cast<int>(threadIdx.x); i < kPieces * kPieceStride; i += kDrawThreads) {
    s.bins[i] = 0;
  }
  const int64_t row = blockIdx.y;
  Part part{.s = s,
            .keys = far_keys != nullptr ? far_keys + (row * gridDim.x + blockIdx.x) * width
                                        : reinterpret_cast<uint32_t*>(&s + 1),
            .width = width,
            .n_blocks = static_cast<int>(gridDim.x),
            .turn = 0};
  const int64_t first = int64_t{blockIdx.x} * width;
  const auto n = static_cast<int>(max(int64_t{0}, min(a.vocab - first, int64_t{width})));
  GridWait();
  const SampleMeta meta = a.sample[row];
  const Two logits = ClusterTwos(part, LoadKeys(a, part, row, first, n), [](Two x, Two y) {
    return Two{max(x.a, y.a), x.b + y.b};
  });
  const bool finite = logits.b < kOneNotFinite;
  const Place place = Draw(part, meta, static_cast<uint32_t>(logits.a), logits.b % kOneNotFinite);
  WriteToken(part, place, finite ? 0 : INFINITY, first, parts + row * kParts);
}

// A block of up to this many warps, each of which takes every so many rows; then the step is
// counted.
constexpr int32_t kChooseWarps = 32;
__global__ void __launch_bounds__(32 * kChooseWarps) Choose(NextTokenArgs a, const Best* parts) {
  GridTrigger();
  GridWait();
  const uint32_t step = *a.step;
  __syncthreads();
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto n_warps = static_cast<int32_t>(blockDim.x) / 32;
  for (int32_t row = static_cast<int32_t>(threadIdx.x) / 32; row < a.n_rows; row += n_warps) {
    const Best best = WarpBest(parts[32 * row + lane]);
    if (lane != 0) continue;
    const bool finite = best.value < INFINITY;
    const int32_t token = finite ? best.token : 0;
    a.out[static_cast<int32_t>(step % static_cast<uint32_t>(a.ring)) * a.n_rows + row] =
        finite ? token : -1;
    a.tokens[row] = token;
    if (a.sample != nullptr) TakeSample(token, a.sample[row], a.seen + row * SeenWords(a.vocab));
    const RowMeta meta = a.rows[row];
    a.rows[row].pos = meta.pos + 1;
    if (a.group_rows != nullptr) a.group_rows[row].pos = meta.pos + 1;
    a.seqs[meta.seq].kv_len += 1;
    if (row == 0) *a.step = step + 1;
  }
}

// How DrawKernel is launched.
struct DrawPlan {
  DrawPlan(const NextTokenArgs& args, const Device& device)
      : n_blocks(device.arch >= 90 && args.vocab > kOneBlockVocab ? kDrawBlocks : 1),
        width(CeilDiv(args.vocab, 4 * n_blocks) * 4),
        near(sizeof(DrawShared) + sizeof(uint32_t) * static_cast<size_t>(width) <=
             device.shared_per_block) {}

  int n_blocks;
  int64_t width;  // keys of a block
  bool near;      // they fit into its shared memory
};

size_t PartsBytes(const NextTokenArgs& args) {
  return static_cast<size_t>(args.n_rows) * kParts * sizeof(Best);
}

void LaunchDraw(const NextTokenArgs& args, const Launch& launch, Best* parts) {
  const DrawPlan plan(args, *launch.device);
  auto* far_keys = reinterpret_cast<uint32_t*>(launch.scratch + PartsBytes(args));
  const size_t shared =
      sizeof(DrawShared) + (plan.near ? sizeof(uint32_t) * static_cast<size_t>(plan.width) : 0);
  AllowShared(DrawKernel, launch.device->shared_per_block);
  const dim3 grid(static_cast<uint32_t>(plan.n_blocks), static_cast<uint32_t>(args.n_rows));
  KernelLaunch(launch, grid, kDrawThreads, shared, static_cast<int>(plan.n_blocks))
      .Run(DrawKernel, args, static_cast<int>(plan.width), plan.near ? nullptr : far_keys, parts);
}

}  // namespace

size_t NextTokenScratch(const NextTokenArgs& args, const Device& device) {
  const DrawPlan plan(args, device);
  if (args.sample == nullptr || plan.near) return PartsBytes(args);
  return PartsBytes(args) + sizeof(uint32_t) * static_cast<size_t>(args.n_rows * plan.n_blocks) *
                                static_cast<size_t>(plan.width);
}

void NextToken(const NextTokenArgs& args, const Launch& launch) {
  static_assert(kParts == 32, "a warp compares the parts of a row");
  auto* parts = reinterpret_cast<Best*>(launch.scratch);
  const auto rows = static_cast<unsigned>(args.n_rows);
  if (args.sample != nullptr) {
    LaunchDraw(args, launch, parts);
  } else {
    LaunchKernel(BestOfParts, launch, dim3(kParts, rows), dim3(kThreads), 0, args.logits,
                 args.vocab, parts);
  }
  LaunchKernel(Choose, launch, dim3(1), dim3(32 * std::min<unsigned>(rows, kChooseWarps)), 0, args,
               static_cast<const Best*>(parts));
}

}  // namespace omnikv::cuda
