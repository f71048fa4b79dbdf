// Attention of few rows, at the speed of memory: tensor cores over f16 or bf16 K/V, with queries
// and weights split into two numbers of that type, so that results are near those of f32.
//
// A warp takes one KV head of the tokens of its strand (attend_plan.cuh), and those beside it the
// others: rows of K/V are read whole, and a warp waits for no other. Its own ring of stages in
// shared memory, each K or V of its head for one tile, is filled by asynchronous copies. For 16
// tokens and 8 queries:
//   S [16 tokens, 8 queries] = K [16, dk] Q^T [dk, 8]      A: K as it lies,      B: kept
//   O^T [dv, 8 queries]     += V^T [dv, 16] P^T [16, 8]    A: V read transposed, B: made of S
// K/V in q8_0 and q4_0 become bf16 on their way from shared memory to a product, exactly; scales of
// K meet sums over 32 values, scales of V the weights, so that these too are near those of f32.
// Accumulators of both have queries in columns 2 * (lane % 4) and the next, so that a lane keeps
// the running maximum and sum of its two queries of an octet throughout.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/kernels/attend_early.cuh"
#include "backend/cuda/kernels/attend_merge.cuh"
#include "backend/cuda/kernels/attend_plan.cuh"
#include "backend/cuda/kernels/fragments.cuh"
#include "backend/cuda/kernels/mma.cuh"

namespace omnikv::cuda {
namespace {

// One CTA an SM, with all the registers that it asks for: the next kernel has room beside it to
// start and to load its weights.
constexpr int32_t kCtasAnSm = 1;
// With so few tiles left a warp lets the next kernel in. Its blocks wait for room, and as long as
// they do, nothing that another stream asks for starts: a fetch would wait all through a long row.
constexpr int32_t kLateTiles = 4;

// What a warp holds for heads of kDim values, of 16 bits or, in blocks, of 8 or 4.
template <int kDim, int kBits>
struct Shape {
  static constexpr bool kInBlocks = kBits < 16;
  static constexpr int kWarps = kDim <= 128 ? 8 : 4;
  static constexpr int kSteps = kDim / 16;            // of a product's 16
  static constexpr int kChunks = kDim * kBits / 128;  // of 16 bytes, in a head's row
  static constexpr int kBlocks = kDim / 32;           // that have a scale of their own
  // In a row of a stage. Where heads begin in the middle of a line of memory, their rows do so in a
  // stage, too: a line that straddles two lines of shared memory is asked for twice (common.cuh).
  static constexpr bool kShifted = !kInBlocks && kChunks % 8 != 0;
  static constexpr int kPitch = kInBlocks ? 8 : kShifted ? 16 : kChunks;
  static constexpr int kValueBytes = kTileTokens * kPitch * 16;
  // Behind the values scales, [tokens, kBlocks].
  static constexpr int kStageBytes = kValueBytes + (kInBlocks ? 128 : 0);
  static_assert(!kInBlocks || kTileTokens * kBlocks * 2 <= 128);
  // Of a CTA. Its four warps of 256 values hold 32 KB while they multiply: the others are what is
  // on its way.
  static constexpr int kRingBytes = (kDim <= 128 ? 96 : 160) * 1024;
  static constexpr int kStages = kRingBytes / kWarps / kStageBytes;
  static_assert(kDim % 16 == 0 && kStages >= 3);
  static constexpr int kQueryPitch = kDim + 8;  // floats, against bank conflicts
  // Of a warp: its ring and the queries of its unit. A multiple of 128, for the next warp's ring.
  __host__ __device__ static int SharedBytes(int32_t unit_heads) {
    return kStages * kStageBytes + (unit_heads * kQueryPitch * 4 + 127) / 128 * 128;
  }

  // Chunk c of a stage's row lies at chunk c ^ Swizzle(row): then the same chunk of eight rows, as
  // ldmatrix reads them, lies in different banks. In blocks four rows are read at once, two chunks
  // of each in q8_0: rows 0-3, 4-7, and the even and odd ones of eight.
  static_assert(kPitch % 8 == 0);
  __device__ static uint32_t Swizzle(uint32_t row) {
    if constexpr (kInBlocks) return (row & 2) * 2 + ((row ^ row >> 2) & 1) * 2;
    return row & 7;
  }

  // What a lane brings with copy i of a stage's kPitch / 2: a row and a chunk of it, and where in
  // the stage that goes.
  __device__ static uint32_t Token(uint32_t i, uint32_t lane) { return (32 * i + lane) / kPitch; }
  __device__ static uint32_t Chunk(uint32_t i, uint32_t lane) { return (32 * i + lane) % kPitch; }
  __device__ static uint32_t Place(uint32_t i, uint32_t lane) {
    if constexpr (kInBlocks) {
      const uint32_t row = Token(i, lane);
      return row * kPitch * 16 + (Chunk(i, lane) ^ Swizzle(row)) * 16;
    }
    static_assert(32 % kPitch == 0);  // so that all but the lane is known
    constexpr uint32_t kRows = 32 / kPitch;
    const uint32_t own = lane / kPitch;
    const uint32_t place = (own * kPitch + (lane % kPitch ^ own)) * 16;
    return (place ^ i * kRows % 8 * 16) + i * kRows * kPitch * 16;
  }
};

// --- One warp: one unit of query heads over one strand.

// kOctets: eights of query heads that a unit has.
template <typename T, int kDim, int kOctets, int kBits>
class HeadWarp {
  using S = Shape<kDim, kBits>;
  // f16 ends at 65504 and is coarse below 2^-14, so weights are at most 2^kLift instead of 1.
  static constexpr float kLift = std::is_same_v<T, __half> ? 14 : 0;

 public:
  // K/V are head `place` of the planes.
  __device__ HeadWarp(const AttendArgs& args, int32_t place, int32_t head, int32_t n_heads,
                      std::byte* ring, float* queries, uint32_t* valid, SegmentTokens* tokens)
      : args_(args),
        head_(head),
        n_heads_(n_heads),
        lane_(threadIdx.x % 32),
        k_(args.kv.k.Head(0, place)),
        v_(args.kv.v.Head(0, place)),
        to_k_scales_(args.kv.k.ToScales(place)),
        to_v_scales_(args.kv.v.ToScales(place)),
        k_shift_(S::kShifted ? ShiftOf(k_) : 0),
        v_shift_(S::kShifted ? ShiftOf(v_) : 0),
        ring_(ring),
        queries_(queries),
        valid_(valid),
        tokens_(tokens) {}

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        top_[n][j] = -kInf;
        sum_[n][j] = 0;
      }
#pragma unroll
      for (int m = 0; m < S::kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[n][m][i] = 0;
      }
    }
  }

  // Tiles [from, to) of a segment of the part's row.
  __device__ __forceinline__ void Read(const RowPart& part, const PlanSegment& segment,
                                       const SegmentTokens& tokens, int32_t from, int32_t to) {
    // In shared memory, since registers are few and this is looked at once in 32 tokens.
    if (lane_ == 0) *tokens_ = tokens;
    __syncwarp();
    Walk walk(args_.kv, *tokens_, part.table_off, part.meta.pos, from * kTileTokens);
    CopyQueries((segment.q != nullptr ? segment.q : args_.q) +
                (int64_t{part.row} * args_.n_heads + head_) * kDim);
    walk.Advance();
    const bool with_v = args_.o != nullptr;
    // Stages are K and V of a tile in turn, or K where V are not read. Each is a group of copies,
    // be it an empty one, so that the oldest stage is always kStages groups back.
    const auto issue = [&](int slot, int32_t tile, bool is_v) {
      if (tile < to) {
        const int first = (tile - from) % 2 * kTileTokens;  // of this tile in the walk's batch
        if (!is_v) {
          if (first == 0 && tile > from) walk.Advance();
          const uint32_t valid = __ballot_sync(kAllLanes, walk.row() >= 0);
          if (lane_ == 0) valid_[slot] = valid >> first;
        }
        std::byte* const stage = ring_ + slot * S::kStageBytes;
        Copy(stage, is_v ? v_ : k_, is_v ? v_shift_ : k_shift_, walk.row(), first);
        if constexpr (S::kInBlocks) {
          CopyScales(stage, is_v ? v_ + to_v_scales_ : k_ + to_k_scales_, walk.row(), first);
        }
      }
      CopyAsyncCommit();
    };
    // Stage i from K of `tile` on.
    const auto issue_stage = [&](int slot, int32_t tile, int i) {
      issue(slot, tile + (with_v ? i / 2 : i), with_v && i % 2 != 0);
    };
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) issue_stage(i, from, i);
    CopyAsyncWait<S::kStages>();
    __syncwarp();
    LoadQueries();

    int slot = 0;
    const auto wait = [&] {
      CopyAsyncWait<S::kStages - 1>();
      __syncwarp();
    };
    const auto next = [&](int32_t tile, int ahead) {  // the slot is that of the stage so far ahead
      __syncwarp();                                   // all lanes have read it
      issue_stage(slot, tile, ahead);
      slot = slot + 1 == S::kStages ? 0 : slot + 1;
    };
    const int32_t late = part.last ? max(from, to - kLateTiles) : to;
    for (int32_t tile = from; tile < to; ++tile) {
      wait();
      // Not before a tile is there: what the next kernels then ask of memory would go ahead of it.
      // (After the wait in any case: MergeKernel reads metadata before its own.)
      if (tile == late) GridTrigger();
      const uint32_t valid = valid_[slot];
      float logits[kOctets][4];
      if constexpr (S::kInBlocks) {
        MultiplyBlocksK(ring_ + slot * S::kStageBytes, logits);
      } else {
        MultiplyK(ring_ + slot * S::kStageBytes, logits);
      }
      next(tile, S::kStages);
      ScaleLogits(logits);
      if (args_.score != ScoreKind::kNone) {
        WriteScores(logits, valid, part.row, tokens_->begin + tile * kTileTokens);
      }
      Weigh(logits, valid);
      if (!with_v) continue;
      if constexpr (S::kInBlocks) {
        wait();
        MultiplyBlocksV(ring_ + slot * S::kStageBytes, logits);
      } else {
        uint32_t p_high[kOctets][2], p_low[kOctets][2];
        SplitWeights(logits, 1.0f, 1.0f, p_high, p_low);
        wait();
        MultiplyV(ring_ + slot * S::kStageBytes, p_high, p_low);
      }
      next(tile, S::kStages + 1);
    }
  }

  // `partial`: where those of the unit begin.
  __device__ __forceinline__ void Write(const RowPart& part, const Partials& partials,
                                        int64_t partial) {
    const int g = static_cast<int>(lane_ / 4), t = static_cast<int>(lane_ % 4);
    const bool whole = part.slot < 0;
    const int64_t first = whole ? int64_t{part.row} * args_.n_heads + head_ : partial;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum_[n][j] += __shfl_xor_sync(kAllLanes, sum_[n][j], step);
        }
      }
      // A lane looks at one of its two queries, for less code.
      const int own = 8 * n + 2 * t + g % 2;
      const float top = g % 2 == 0 ? top_[n][0] : top_[n][1];
      const float sum = g % 2 == 0 ? sum_[n][0] : sum_[n][1];
      float factor = 1;
      if (own < n_heads_) {
        if (whole) factor = OutputFactor(args_, first + own, top, sum);
        if (g < 2 && !whole) partials.sums[first + own] = {top, sum};
        if (g < 2 && whole && args_.lse != nullptr) args_.lse[first + own] = LogSum(top, sum);
      }
      const float of_other = __shfl_xor_sync(kAllLanes, factor, 4);
      if (args_.o == nullptr) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = 8 * n + 2 * t + j;
        if (head >= n_heads_) continue;
        const float scale = g % 2 == j ? factor : of_other;
        float* o =
            (whole ? args_.o : partials.o) + (first + head) * kDim + (S::kInBlocks ? 4 * g : g);
#pragma unroll
        for (int m = 0; m < S::kSteps; ++m) {
          // Rows g and g + 8 of the product (MultiplyBlocksV).
          const int low = S::kInBlocks ? m / 2 * 32 + m % 2 * 2 : 16 * m;
          o[low] = o_[n][m][j] * scale;
          o[low + (S::kInBlocks ? 1 : 8)] = o_[n][m][2 + j] * scale;
        }
      }
    }
  }

 private:
  // Where in a stage's rows those of a head begin: as many chunks into a line of shared memory as
  // into one of memory, if there is room, and by an even number, as pairs of chunks are read.
  static __device__ __forceinline__ uint32_t ShiftOf(const std::byte* head) {
    const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(head) / 16 % 8);
    return shift % 2 == 0 && S::kChunks + shift <= S::kPitch ? shift : 0;
  }

  // This head's K or V of a tile, `shift` chunks into the stage's rows; `rows`: a token a lane, the
  // tile's from lane `first` on.
  __device__ __forceinline__ void Copy(std::byte* stage, const std::byte* head, uint32_t shift,
                                       int32_t rows, int first) {
    const uint32_t lane = Fresh(lane_) % 32;
    constexpr int kCopies = S::kPitch / 2, kTogether = 4;
#pragma unroll
    for (int i = 0; i < kCopies; i += kTogether) {
      int32_t row[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether && i + j < kCopies; ++j) {
        row[j] = __shfl_sync(kAllLanes, rows, first + S::Token(i + j, lane));
      }
#pragma unroll
      for (int j = 0; j < kTogether && i + j < kCopies; ++j) {
        const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(max(row[j], 0))) *
                                static_cast<uint32_t>(args_.kv.k.row_bytes);  // and of V
        const uint32_t chunk = S::Chunk(i + j, lane) - shift;
        if ((S::kShifted || S::kInBlocks) && chunk >= S::kChunks) continue;
        CopyAsync16(stage + S::Place(i + j, lane), head + offset + chunk * 16, row[j] >= 0);
      }
    }
  }

  // The scales of a tile, behind its values; zeros of tokens that are not read.
  __device__ __forceinline__ void CopyScales(std::byte* stage, const std::byte* scales,
                                             int32_t rows, int first) {
    constexpr int kWords = S::kBlocks / 2;  // of a token
    const int token = static_cast<int>(lane_) / kWords;
    const int word = static_cast<int>(lane_) % kWords;
    const int32_t row = __shfl_sync(kAllLanes, rows, (first + token) % 32);
    if (token >= kTileTokens) return;
    CopyAsync4(stage + S::kValueBytes + (token * kWords + word) * 4,
               scales + max(row, 0) * args_.kv.k.row_bytes + word * 4, row >= 0);
  }

  // The unit's queries, into shared memory, as a group of copies of its own.
  __device__ __forceinline__ void CopyQueries(const float* q) {
    constexpr int kRow = kDim / 4;  // copies
    __syncwarp();                   // all lanes have read what was there
    for (int i = static_cast<int>(lane_); i < n_heads_ * kRow; i += 32) {
      CopyAsync16(queries_ + i / kRow * S::kQueryPitch + i % kRow * 4, q + i * 4);
    }
    CopyAsyncCommit();
  }

  // Queries as B: column g (a query), rows 2t, 2t + 1, 2t + 8, 2t + 9 of each 16 values. (In
  // blocks rows stand for values as they do in MultiplyBlocksK.) Each is scaled by a power of two
  // that brings its largest value to 2^14, for f16's sake.
  __device__ __forceinline__ void LoadQueries() {
    const int g = static_cast<int>(lane_ / 4), t = static_cast<int>(lane_ % 4);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      // Where there is none, another one: nobody looks at its products.
      const int row = min(8 * n + g, n_heads_ - 1);
      const float* query = queries_ + row * S::kQueryPitch + (S::kInBlocks ? 8 : 2) * t;
      const auto load = [&](int step, int half) {
        const int i = S::kInBlocks ? step / 2 * 32 + step % 2 * 4 + 2 * half : 16 * step + 8 * half;
        return *reinterpret_cast<const float2*>(query + i);
      };
      float top = 0;
#pragma unroll
      for (int i = 0; i < 2 * S::kSteps; ++i) {
        const float2 v = load(i / 2, i % 2);
        top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const int up = 14 - max((__float_as_int(top) >> 23) - 127, -100);
      const float factor = __int_as_float((127 + up) << 23);
      asm volatile("" ::: "memory");  // loads them again: all of them would need registers
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 v = load(step, i);
          SplitPair<T>(v.x * factor, v.y * factor, q_high_[n][step][i], q_low_[n][step][i]);
        }
      }
      const float back = args_.scale * __int_as_float((127 - up) << 23);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scale_[n][j] = __shfl_sync(kAllLanes, back, 4 * (2 * t + j));
      }
    }
  }

  __device__ __forceinline__ void MultiplyK(const std::byte* stage, float (&logits)[kOctets][4]) {
    // Matrices: tokens 0-7 and 8-15 of values 0-7, then of values 8-15.
    const uint32_t token = lane_ % 16;
    const uint32_t row = SharedAddress(stage) + token * S::kPitch * 16;
    const uint32_t chunk = Fresh(lane_ / 16 ^ S::Swizzle(token));
    float low[kOctets][4];
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][i] = low[n][i] = 0;
    }
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[4];
      LoadMatrices(a, row + ((2 * step + k_shift_) ^ chunk) * 16);
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        MultiplyAdd<T>(logits[n], a, q_high_[n][step]);
        MultiplyAdd<T>(low[n], a, q_low_[n][step]);
      }
    }
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][i] += low[n][i];
    }
  }

  // The same in blocks. A lane takes eight neighbours of each 32 values of tokens g and g + 8: its
  // columns 2t, 2t + 1, 2t + 8, 2t + 9 of two products.
  __device__ __forceinline__ void MultiplyBlocksK(const std::byte* stage,
                                                  float (&logits)[kOctets][4]) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const auto* scales = reinterpret_cast<const __half*>(stage + S::kValueBytes);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][i] = 0;
    }
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t a[2][4];
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = g + 8 * half;
        const uint32_t chunk = (kBits == 8 ? 2 * b + t / 2 : b) ^ S::Swizzle(row);
        uint2 v =
            *reinterpret_cast<const uint2*>(stage + row * S::kPitch * 16 + chunk * 16 + t % 2 * 8);
        if constexpr (kBits == 4) v = {Q4Bytes(v.x >> t / 2 * 4), Q4Bytes(v.y >> t / 2 * 4)};
        a[0][half] = WidenPair<0, 1>(v.x, v.x);
        a[0][2 + half] = WidenPair<2, 3>(v.x, v.x);
        a[1][half] = WidenPair<0, 1>(v.y, v.y);
        a[1][2 + half] = WidenPair<2, 3>(v.y, v.y);
        scale[half] = __half2float(scales[row * S::kBlocks + b]);
      }
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        float high[4] = {}, low[4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          MultiplyAdd<T>(high, a[step], q_high_[n][2 * b + step]);
          MultiplyAdd<T>(low, a[step], q_low_[n][2 * b + step]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[n][i] += (high[i] + low[i]) * scale[i / 2];
      }
    }
  }

  // logits[n][i]: token g + i / 2 * 8, query 8n + 2t + i % 2.
  __device__ __forceinline__ void ScaleLogits(float (&logits)[kOctets][4]) const {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][i] *= scale_[n][i % 2];
    }
    if (args_.softcap <= 0) return;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][i] = Softcap(logits[n][i], args_.softcap);
    }
  }

  // Of the tile whose first token stands at `pos`.
  __device__ __forceinline__ void WriteScores(const float (&logits)[kOctets][4], uint32_t valid,
                                              int32_t row, int32_t pos) const {
    const int g = static_cast<int>(lane_ / 4), t = static_cast<int>(lane_ % 4);
    if (args_.score == ScoreKind::kLogits) {
      float* out = args_.scores + (int64_t{row} * args_.n_heads + head_) * args_.score_stride + pos;
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int head = 8 * n + 2 * t + i % 2, token = g + i / 2 * 8;
          if (head < n_heads_ && (valid >> token & 1) != 0) {
            out[head * args_.score_stride + token] = logits[n][i];
          }
        }
      }
      return;
    }
    float top[2] = {-kInf, -kInf};
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (8 * n + 2 * t + i % 2 < n_heads_) top[i / 2] = fmaxf(top[i / 2], logits[n][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2));
    }
    const int token = g + t * 8;
    if (t < 2 && (valid >> token & 1) != 0) {
      AtomicMax(args_.scores + row * args_.score_stride + pos + token, t == 0 ? top[0] : top[1]);
    }
  }

  // From logits to weights 2^(logit - top): the running maximum and sum of each query go on, and
  // what O holds is scaled to the new maximum.
  __device__ __forceinline__ void Weigh(float (&logits)[kOctets][4], uint32_t valid) {
    const int g = static_cast<int>(lane_ / 4);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      float(&p)[4] = logits[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = (valid >> (g + i / 2 * 8) & 1) != 0 ? p[i] * kLog2E : -kInf;
      }
      float fade[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = fmaxf(p[j], p[2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        }
        top = fmaxf(top_[n][j], top - kLift);
        const float from = top == -kInf ? 0.0f : top;  // no token yet: all weights are 0
        fade[j] = exp2f(top_[n][j] - from);
        top_[n][j] = top;
        p[j] = exp2f(p[j] - from);
        p[2 + j] = exp2f(p[2 + j] - from);
        sum_[n][j] = sum_[n][j] * fade[j] + (p[j] + p[2 + j]);
      }
#pragma unroll
      for (int m = 0; m < S::kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[n][m][i] *= fade[i % 2];
      }
    }
  }

  // Weights as B of the product with V, those of token g times `first`, those of g + 8 `second`.
  __device__ __forceinline__ void SplitWeights(const float (&p)[kOctets][4], float first,
                                               float second, uint32_t (&p_high)[kOctets][2],
                                               uint32_t (&p_low)[kOctets][2]) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // tokens g, then g + 8
        const float scale = i == 0 ? first : second;
        uint32_t high, low;
        SplitPair<T>(p[n][2 * i] * scale, p[n][2 * i + 1] * scale, high, low);
        p_high[n][i] = Transpose(high);
        p_low[n][i] = Transpose(low);
      }
    }
  }

  __device__ __forceinline__ void MultiplyV(const std::byte* stage,
                                            const uint32_t (&p_high)[kOctets][2],
                                            const uint32_t (&p_low)[kOctets][2]) {
    // Matrices: values 0-7 and 8-15 of tokens 0-7, then of tokens 8-15.
    const uint32_t token = lane_ % 8 + lane_ / 16 * 8;
    const uint32_t row = SharedAddress(stage) + token * S::kPitch * 16;
    const uint32_t chunk = Fresh(lane_ / 8 % 2 ^ S::Swizzle(token));
#pragma unroll
    for (int m = 0; m < S::kSteps; ++m) {
      uint32_t a[4];
      LoadTransposed(a, row + ((2 * m + v_shift_) ^ chunk) * 16);
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        MultiplyAdd<T>(o_[n][m], a, p_high[n]);
        MultiplyAdd<T>(o_[n][m], a, p_low[n]);
      }
    }
  }

  // The same in blocks. A lane takes four neighbours of each 32 values of tokens 2t, 2t + 1, 2t + 8
  // and 2t + 9: rows g and g + 8 of two products.
  __device__ __forceinline__ void MultiplyBlocksV(const std::byte* stage,
                                                  const float (&p)[kOctets][4]) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const auto* scales = reinterpret_cast<const __half*>(stage + S::kValueBytes);
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t p_high[kOctets][2], p_low[kOctets][2];
      SplitWeights(p, __half2float(scales[g * S::kBlocks + b]),
                   __half2float(scales[(g + 8) * S::kBlocks + b]), p_high, p_low);
      uint32_t v[4];  // of each token
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t row = 2 * t + i % 2 + i / 2 * 8;
        const uint32_t chunk = (kBits == 8 ? 2 * b + g / 4 : b) ^ S::Swizzle(row);
        v[i] = *reinterpret_cast<const uint32_t*>(stage + row * S::kPitch * 16 + chunk * 16 +
                                                  g % 4 * 4);
        if constexpr (kBits == 4) v[i] = Q4Bytes(v[i] >> g / 4 * 4);
      }
      const uint32_t a[2][4] = {{WidenPair<0, 0>(v[0], v[1]), WidenPair<1, 1>(v[0], v[1]),
                                 WidenPair<0, 0>(v[2], v[3]), WidenPair<1, 1>(v[2], v[3])},
                                {WidenPair<2, 2>(v[0], v[1]), WidenPair<3, 3>(v[0], v[1]),
                                 WidenPair<2, 2>(v[2], v[3]), WidenPair<3, 3>(v[2], v[3])}};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kOctets; ++n) {
          MultiplyAdd<T>(o_[n][2 * b + half], a[half], p_high[n]);
          MultiplyAdd<T>(o_[n][2 * b + half], a[half], p_low[n]);
        }
      }
    }
  }

  const AttendArgs& args_;
  int32_t head_, n_heads_;  // the unit's query heads
  uint32_t lane_;
  const std::byte *k_, *v_;            // of this head, in row 0 of the bank
  int64_t to_k_scales_, to_v_scales_;  // in blocks
  uint32_t k_shift_, v_shift_;
  std::byte* ring_;
  float* queries_;   // [n_heads_, kQueryPitch]
  uint32_t* valid_;  // [kStages]: bit i: token i of the tile is read; of stages with K
  SegmentTokens* tokens_;
  uint32_t q_high_[kOctets][S::kSteps][2], q_low_[kOctets][S::kSteps][2];
  float scale_[kOctets][2];  // from products to logits
  float top_[kOctets][2];    // 2^top is weight 1: the maximum so far, less kLift
  float sum_[kOctets][2];    // of the weights of this lane's tokens
  float o_[kOctets][S::kSteps][4];
};

template <typename T, int kDim, int kOctets, int kBits>
__global__ void __launch_bounds__(32 * Shape<kDim, kBits>::kWarps, 1)
    AttendKernel(const __grid_constant__ AttendArgs args, const __grid_constant__ Division division,
                 const __grid_constant__ Partials partials) {
  using S = Shape<kDim, kBits>;
  extern __shared__ __align__(1024) std::byte rings[];
  __shared__ uint32_t valid[S::kWarps][S::kStages];
  __shared__ SegmentTokens segments[S::kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto unit_of = [&](uint32_t thread) {
    return division.Unit(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(thread) / 32);
  };
  const int32_t unit = unit_of(threadIdx.x);
  int32_t strand = division.Strand(static_cast<int32_t>(blockIdx.x), warp);
  int32_t kv_head = args.KvHead(unit / division.parts);
  int32_t place = args.kv.Place(kv_head);
  int32_t group = args.Group();
  int32_t head = unit % division.parts * division.unit_heads;  // of the group
  // Divisions, which the first loads would wait for.
  asm volatile("" : "+r"(strand), "+r"(kv_head), "+r"(place), "+r"(group), "+r"(head));
  RowTiles rows;
  Strands strands;
  FindEarly(args, kv_head, division.strands, rows, strands);
  if (strand >= division.strands) return;
  // The unit's first head, of those that take part.
  const auto part_head = [&] {
    const int32_t of = unit_of(Fresh(threadIdx.x));
    return of / division.parts * args.Group() + of % division.parts * division.unit_heads;
  };
  std::byte* ring = rings + warp * S::SharedBytes(division.unit_heads);
  HeadWarp<T, kDim, kOctets, kBits> state(
      args, place, kv_head * group + head, min(division.unit_heads, group - head), ring,
      reinterpret_cast<float*>(ring + S::kStages * S::kStageBytes), valid[warp], &segments[warp]);
  ForEachRowPart(args, rows, strands, strand, [&](const RowPart& part) {
    state.Clear();
    ForEachSegment(args, rows.facts, part, kv_head,
                   [&](const PlanSegment& segment, const SegmentTokens& tokens, int32_t from,
                       int32_t to) { state.Read(part, segment, tokens, from, to); });
    state.Write(part, partials, partials.At(part.slot, part_head()));
  });
}

// --- Launches.

// Whether AttendKernel takes these K/V and queries.
bool IsFast(const AttendArgs& args) {
  const KvView& kv = args.kv;
  const auto bits = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  uintptr_t queries = bits(args.q);
  for (int i = 0; i < args.plan.n_segments; ++i) {
    queries |= bits(args.plan.segments[static_cast<size_t>(i)].q);
  }
  const int64_t distances = kv.k.row_bytes | kv.k.head_bytes | kv.v.head_bytes;
  const DType dtype = kv.k.dtype;
  const int64_t scales = kv.k.row_bytes | kv.k.scale_head_bytes | kv.v.scale_head_bytes;
  if (InBlocks(dtype) &&
      ((kv.dk != 64 && kv.dk != 128) ||
       (bits(kv.k.scales) | bits(kv.v.scales) | static_cast<uintptr_t>(scales)) % 4 != 0)) {
    return false;
  }
  return dtype != DType::kF32 && kv.v.dtype == dtype && kv.dk == kv.dv &&
         kv.k.row_bytes == kv.v.row_bytes &&
         (kv.dk == 64 || kv.dk == 80 || kv.dk == 96 || kv.dk == 128 || kv.dk == 256) &&
         (bits(kv.k.base) | bits(kv.v.base) | static_cast<uintptr_t>(distances)) % 16 == 0 &&
         queries % 16 == 0;
}

// Eights of query heads that a warp takes: two where most models with large groups have their dk.
int Octets(const AttendArgs& args) {
  const bool large = args.n_heads / args.kv.n_kv_heads > 8;
  return large && (args.kv.dk == 64 || args.kv.dk == 128) ? 2 : 1;
}

Division DivideFast(const AttendArgs& args, const Device& device) {
  return Divide(args, 8 * Octets(args), args.kv.dk <= 128 ? 8 : 4, kCtasAnSm * device.sm_count);
}

template <typename T, int kDim, int kOctets, int kBits = 16>
void AttendFast(const AttendArgs& args, const Division& d, const Partials& partials,
                const Launch& launch) {
  using S = Shape<kDim, kBits>;
  const auto kernel = AttendKernel<T, kDim, kOctets, kBits>;
  const size_t shared = static_cast<size_t>(d.warps * S::SharedBytes(d.unit_heads));
  AllowShared(kernel, shared);
  LaunchKernel(kernel, launch, dim3(static_cast<unsigned>(d.ctas)),
               dim3(static_cast<unsigned>(32 * d.warps)), shared, args, d, partials);
}

template <typename T>
void AttendFast(const AttendArgs& args, const Division& d, const Partials& partials,
                const Launch& launch) {
  const bool two = Octets(args) == 2;
  switch (args.kv.dk) {
    case 64:
      return two ? AttendFast<T, 64, 2>(args, d, partials, launch)
                 : AttendFast<T, 64, 1>(args, d, partials, launch);
    case 80:
      return AttendFast<T, 80, 1>(args, d, partials, launch);
    case 96:
      return AttendFast<T, 96, 1>(args, d, partials, launch);
    case 128:
      return two ? AttendFast<T, 128, 2>(args, d, partials, launch)
                 : AttendFast<T, 128, 1>(args, d, partials, launch);
    default:
      return AttendFast<T, 256, 1>(args, d, partials, launch);
  }
}

template <int kBits>
void AttendFastBlocks(const AttendArgs& args, const Division& d, const Partials& partials,
                      const Launch& launch) {
  using T = __nv_bfloat16;
  const bool two = Octets(args) == 2;
  if (args.kv.dk == 64) {
    return two ? AttendFast<T, 64, 2, kBits>(args, d, partials, launch)
               : AttendFast<T, 64, 1, kBits>(args, d, partials, launch);
  }
  return two ? AttendFast<T, 128, 2, kBits>(args, d, partials, launch)
             : AttendFast<T, 128, 1, kBits>(args, d, partials, launch);
}

// At most kRowsALaunch rows.
void AttendRows(const AttendArgs& args, const Launch& launch) {
  const auto n_rows = static_cast<unsigned>(args.n_rows);
  if (args.score == ScoreKind::kHeadMax) {
    const int64_t ctas = std::min<int64_t>(CeilDiv(args.score_stride, 1024), 256);
    LaunchKernel(ClearScoresKernel, launch, dim3(static_cast<unsigned>(ctas), n_rows), dim3(256), 0,
                 args.rows, args.scores, args.score_stride);
  }
  const bool fast = IsFast(args);
  const Division d = fast ? DivideFast(args, *launch.device) : DivideGeneric(args, *launch.device);
  const Partials partials = PartialsAt(launch.scratch, args, d);
  if (!fast) {
    AttendGeneric(args, d, partials, launch);
  } else if (args.kv.k.dtype == DType::kQ8_0) {
    AttendFastBlocks<8>(args, d, partials, launch);
  } else if (args.kv.k.dtype == DType::kQ4_0) {
    AttendFastBlocks<4>(args, d, partials, launch);
  } else if (args.kv.k.dtype == DType::kF16) {
    AttendFast<__half>(args, d, partials, launch);
  } else {
    AttendFast<__nv_bfloat16>(args, d, partials, launch);
  }
  const int64_t columns = args.o == nullptr ? 1 : CeilDiv(args.kv.dv, kMergeColumns);
  // Of 16 partials at once, 9 loads are those of a multiprocessor's strand each, 17 of two.
  const bool many = d.strands > 9 * 4 * kMergeWarps;
  const auto merge = args.kv.dv % 4 != 0 ? MergeKernel<1, 9>
                     : many              ? MergeKernel<4, 17>
                                         : MergeKernel<4, 9>;
  size_t shared = kMaxStrands * sizeof(float);
  if (columns * partials.n_heads * args.n_rows <= launch.device->sm_count) {
    // Where its blocks find a multiprocessor each, one takes the place of two blocks of the product
    // behind it; the other two load weights meanwhile. What a smaller one leaves fits none of them
    // where a block of a fetch stands as well, all through that product (measured).
    shared = std::max(shared, 2 * QuarterShared(*launch.device) + kBesideDynamic);
  }
  AllowShared(merge, shared);
  LaunchKernel(
      merge, launch,
      dim3(static_cast<unsigned>(partials.n_heads), n_rows, static_cast<unsigned>(columns)),
      dim3(32 * kMergeWarps), shared, args, d, partials);
}

}  // namespace

size_t AttendScratch(const AttendArgs& args, const Device& device) {
  return std::max(PartialBytes(args, DivideFast(args, device)),
                  PartialBytes(args, DivideGeneric(args, device)));
}

void Attend(const AttendArgs& args, const Launch& launch) {
  for (int32_t row = 0; row < args.n_rows; row += kRowsALaunch) {
    AttendArgs part = args;
    const int64_t heads = int64_t{row} * args.n_heads;
    part.n_rows = std::min(args.n_rows - row, kRowsALaunch);
    part.rows += row;
    part.q += heads * args.kv.dk;
    for (int i = 0; i < args.plan.n_segments; ++i) {
      const float*& q = part.plan.segments[static_cast<size_t>(i)].q;
      if (q != nullptr) q += heads * args.kv.dk;
    }
    if (args.o != nullptr) part.o += heads * args.kv.dv;
    if (args.lse != nullptr) part.lse += heads;
    if (args.lse_in != nullptr) part.lse_in += heads;
    if (args.scores != nullptr) {
      part.scores += (args.score == ScoreKind::kLogits ? heads : row) * args.score_stride;
    }
    AttendRows(part, launch);
  }
}

}  // namespace omnikv::cuda
