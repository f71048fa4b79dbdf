// The products of queries with K that attention is made of: some query heads of one KV head with a
// tile of tokens. Two ways to make them, by the number of registers, and a plain one for targets
// without vectors (docs/kernels.md, "A CPU's scores"). Included once for each Highway target.
#if defined(OMNIKV_BACKEND_CPU_ATTEND_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OMNIKV_BACKEND_CPU_ATTEND_SCORES_INL_H_
#undef OMNIKV_BACKEND_CPU_ATTEND_SCORES_INL_H_
#else
#define OMNIKV_BACKEND_CPU_ATTEND_SCORES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/attend_kernels.h"
#include "backend/cpu/simd-inl.h"
#include "backend/kv_format.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

constexpr int kMaxHeads = 4;  // query heads of a KV head taken together
constexpr int kChunk = 128;   // tokens scored before their values are summed, at most

// Prefetches the next chunk while this one is worked on, line by line at an even pace: its rows in
// their order, which is that of memory where they are neighbours. Bursts would stall on the misses
// a core can have in flight, pauses would leave memory idle, and a head's part of each row in turn
// would keep the prefetchers from seeing a stream.
class Ahead {
 public:
  // Where the bytes of a row lie: `units` times `bytes`, `stride` apart, each of them in the row
  // that is `apart` pointers behind the one before.
  struct Rows {
    int64_t offset = 0;  // of the first unit
    int64_t stride = 0;
    ptrdiff_t apart = 0;
    int64_t bytes = 0;
    int32_t units = 1;
    bool second_level = false;  // PrefetchesToSecondLevel()
  };

  // Rows [row, end), spread over as many tokens: the scores of one and its values are two of
  // `works` parts of the work on it.
  Ahead(const Rows& rows, const std::byte* const* row, const std::byte* const* end, int32_t works)
      : token_(static_cast<int32_t>((rows.bytes * rows.units + 63) * (kLine / 64) / works)),
        second_level_(rows.second_level) {
    int n = 0;
    while (row != end) {
      const std::byte* const* first = row;
      while (++row != end && row[0] - row[-1] == rows.bytes) {
      }
      for (int32_t unit = 0; unit < rows.units && n < kMostRuns; ++unit) {
        const std::byte* from = first[unit * rows.apart] + rows.offset + unit * rows.stride;
        const std::byte* begin = from - reinterpret_cast<uintptr_t>(from) % 64;
        runs_[n++] = {begin, (from + (row - first) * rows.bytes - begin + 63) / 64};
      }
    }
    runs_[n] = {nullptr, 0};
    at_ = runs_[0].at;
    left_ = runs_[0].lines;
  }

  // What the work on `part` of the `whole` values of K or V of `tokens` tokens is worth.
  int32_t Share(size_t tokens, size_t part, size_t whole) const {
    return static_cast<int32_t>(static_cast<size_t>(token_) * tokens * part / whole);
  }
  HWY_INLINE void Advance(int32_t share) {
    given_ += static_cast<uint32_t>(share);
    while (given_ >= kLine && left_ > 0) {
      const int64_t n = std::min<int64_t>(given_ / kLine, left_);
      for (int64_t i = 0; i < n; ++i) PrefetchRow(at_ + i * 64, second_level_);
      given_ -= static_cast<uint32_t>(n) * kLine;
      at_ += n * 64;
      left_ -= n;
      if (left_ > 0) return;
      ++run_;
      at_ = runs_[run_].at;
      left_ = runs_[run_].lines;
    }
  }

 private:
  static constexpr uint32_t kLine = 1 << 10;    // what a line is worth
  static constexpr int kMostRuns = 2 * kChunk;  // further ones are left to the processor

  struct Run {
    const std::byte* at;
    int64_t lines;
  };

  int32_t token_;
  bool second_level_;
  uint32_t given_ = 0;
  int run_ = 0;
  Run runs_[kMostRuns + 1];
  const std::byte* at_;  // the next line, of `left_` in runs_[run_]
  int64_t left_;
};

// What a pass over a chunk needs for some query heads of one KV head.
struct HeadPass {
  const AttendJob* job;
  const std::byte* const* k;  // [n] of the chunk
  const std::byte* const* v;
  int n;
  Ahead* ahead;
  int64_t k_offset;  // of the head
  int64_t v_offset;
  int64_t k_scales;  // of the head's scales, where it has any
  int64_t v_scales;
  const float* q;  // of its heads, as PackQuery leaves them
  float* state;    // [G, state_stride]
};

#if HWY_TARGET != HWY_SCALAR
// Transposes four vectors block by block: lane i of block b of v[j] becomes lane 4 b + j of v[i].
HWY_INLINE void Transpose4(VF (&v)[4]) {
  const DF d;
  const hn::RepartitionToWide<DU> dw;
  const auto low01 = hn::BitCast(dw, hn::InterleaveLower(d, v[0], v[1]));
  const auto high01 = hn::BitCast(dw, hn::InterleaveUpper(d, v[0], v[1]));
  const auto low23 = hn::BitCast(dw, hn::InterleaveLower(d, v[2], v[3]));
  const auto high23 = hn::BitCast(dw, hn::InterleaveUpper(d, v[2], v[3]));
  v[0] = hn::BitCast(d, hn::InterleaveLower(dw, low01, low23));
  v[1] = hn::BitCast(d, hn::InterleaveUpper(dw, low01, low23));
  v[2] = hn::BitCast(d, hn::InterleaveLower(dw, high01, high23));
  v[3] = hn::BitCast(d, hn::InterleaveUpper(dw, high01, high23));
}
#endif

#if OKV_MANY_REGISTERS
// A vector of a K row as it is transposed: a lane is a pair of 16-bit values, one f32, four int8 or
// a pair of nibbles.
template <DType kType>
struct Keys {
  static constexpr bool kQ8 = kType == DType::kQ8_0;
  static constexpr bool kQ4 = kType == DType::kQ4_0;
  static constexpr size_t kParts = kType == DType::kF32 ? 1 : kQ8 ? 4 : 2;  // values of a lane
  static constexpr size_t kValues = kParts * kLanes;
  static constexpr size_t kBytes = kQ4 ? kLanes : kLanes * sizeof(float);
  // Values whose products are summed before a scale is applied, if there are any, and how many
  // scales these have.
  static constexpr size_t kRun = std::max(kValues, InBlocks(kType) ? kBlockValues : 0);
  static constexpr size_t kScales = kRun / kBlockValues;
  // Part() of an f16 gives 2^-112 of it, exactly: its exponent where that of an f32 is. PackQuery
  // makes up for 2^96 of that (so that no query overflows), the scale of the logits for the rest.
  // An f16 NaN comes out finite; who stored it has a NaN in its own row's output.
  // That of an int8 gives 2^24 of it: the highest byte of a lane.
  static constexpr bool kShifted = kType == DType::kF16;
  static constexpr float kQueryScale = kShifted ? 0x1p96f : 1.0f;
  static constexpr float kLogitScale = kShifted ? 0x1p16f : kQ8 ? 0x1p-24f : 1.0f;

  static HWY_INLINE VF Load(const std::byte* p) {
    if constexpr (kQ4) {
      return hn::BitCast(DF(), Elements<kType>::LoadPairs(p));
    } else {
      return hn::LoadU(DF(), reinterpret_cast<const float*>(p));
    }
  }
  // The last `n` values of a head, zeros after them.
  static HWY_INLINE VF LoadTail(const std::byte* p, size_t n) {
    if constexpr (kQ4) {
      return Load(p);  // blocks are whole vectors: there is no tail
    } else {
      if (n % kParts == 0) return LoadFloats(reinterpret_cast<const float*>(p), n / kParts);
      alignas(64) std::byte buffer[kBytes] = {};
      std::memcpy(buffer, p, n * kBytes / kValues);
      return Load(buffer);
    }
  }
  // Value `part` of every lane.
  static HWY_INLINE VF Part(VF v, size_t part) {
    const DF d;
    const DI di;
    if constexpr (kParts == 1) {
      return v;
    } else if constexpr (kQ8) {
      auto high = hn::BitCast(di, v);
      if (part == 0) high = hn::ShiftLeft<24>(high);
      if (part == 1) high = hn::ShiftLeft<16>(high);
      if (part == 2) high = hn::ShiftLeft<8>(high);
      if (part != 0) high = hn::And(high, hn::Set(di, static_cast<int32_t>(0xff000000u)));
      return hn::ConvertTo(d, high);
    } else if constexpr (kQ4) {
      return Elements<kType>::Value(hn::BitCast(di, v), part == 1);
    } else if constexpr (kType == DType::kBF16) {
      VF even;
      VF odd;
      Elements<kType>::Split(hn::BitCast(DU(), v), even, odd);
      return part == 0 ? even : odd;
    } else {
      auto high = hn::BitCast(di, v);  // the f16 in the upper half of each lane
      if (part == 0) high = hn::ShiftLeft<16>(high);
      const auto mask = hn::Set(di, static_cast<int32_t>(0x8fffe000u));
      return hn::BitCast(d, hn::And(hn::ShiftRight<3>(high), mask));
    }
  }
};

template <DType kType>
inline constexpr size_t kTileValues = Keys<kType>::kValues;
template <DType kType>
inline constexpr float kLogitScale = Keys<kType>::kLogitScale;

constexpr size_t kQuads = kLanes / 4;  // 128-bit blocks of a vector

// One of `heads` queries, as ScoreTile reads them: value 4 b + j of a vector of K stands four
// times, in block b of vector j, since there it meets four tokens. `out` is that of the first head,
// whose vectors and those of the others alternate.
template <DType kType>
void PackQuery(const float* q, size_t dk, size_t head, size_t heads, float* out) {
  using K = Keys<kType>;
  const DF d;
  for (size_t at = 0; at < dk; at += K::kValues) {
    alignas(64) float values[K::kValues] = {};
    std::memcpy(values, q + at, std::min(dk - at, K::kValues) * sizeof(float));
    VF part[K::kParts];
    if constexpr (K::kQ4) {
      constexpr size_t kHalf = kBlockValues / 2;
      const size_t first = at / kBlockValues * kBlockValues + at % kBlockValues / 2;
      for (size_t i = 0; i < 2; ++i) {
        part[i] = hn::LoadU(d, q + first + i * kHalf);
      }
    } else if constexpr (K::kQ8) {
      hn::LoadInterleaved4(d, values, part[0], part[1], part[2], part[3]);
    } else if constexpr (K::kParts == 2) {
      hn::LoadInterleaved2(d, values, part[0], part[1]);
      if (K::kShifted) {
        for (VF& v : part) v = hn::Mul(v, hn::Set(d, K::kQueryScale));
      }
    } else {
      part[0] = hn::Load(d, values);
    }
    const auto store = [&](size_t j, size_t i, VF v) HWY_ATTR {
      hn::StoreU(v, d, out + ((j * K::kParts + i) * heads + head) * kLanes);
    };
    for (size_t i = 0; i < K::kParts; ++i) {
      store(0, i, hn::Broadcast<0>(part[i]));
      store(1, i, hn::Broadcast<1>(part[i]));
      store(2, i, hn::Broadcast<2>(part[i]));
      store(3, i, hn::Broadcast<3>(part[i]));
    }
    out += 4 * K::kValues * heads;
  }
}

constexpr size_t kTogether = kQuads < 2 ? 1 : 2;  // quads that share the loads of q

// The scales of block `block` of four rows, a lane each in every four lanes.
HWY_INLINE VF LoadScales(const HeadPass& pass, const std::byte* const* row, size_t block) {
  uint64_t bits = 0;
  for (int t = 0; t < 4; ++t) {
    F16 scale;
    std::memcpy(&scale, row[t] + pass.k_scales + block * sizeof(scale), sizeof(scale));
    bits |= uint64_t{scale} << 16 * t;
  }
  const hn::FixedTag<float, 4> d4;
  const hn::Rebind<hwy::float16_t, decltype(d4)> d16;
  alignas(16) float scales[4];
  hn::Store(hn::PromoteTo(d4, hn::BitCast(d16, hn::Set(hn::FixedTag<uint64_t, 1>(), bits))), d4,
            scales);
  return hn::LoadDup128(DF(), scales);
}

// Those of the sums of values [at, at + kRun) of four tokens, as transposed.
template <DType kType>
HWY_INLINE VF ScalesOfRun(const HeadPass& pass, const std::byte* const* row, size_t at) {
  const size_t block = at / kBlockValues;
#if OKV_AVX512
  if constexpr (Keys<kType>::kScales == 2) {
    if (at + kBlockValues < static_cast<size_t>(pass.job->args->kv.dk)) {
      uint64_t pairs[4];  // the scales of a token's two blocks
      for (int t = 0; t < 4; ++t) {
        uint32_t pair;
        std::memcpy(&pair, row[t] + pass.k_scales + block * sizeof(F16), sizeof(pair));
        pairs[t] = pair;
      }
      const __m128i all = _mm_set_epi64x(static_cast<int64_t>(pairs[2] | pairs[3] << 32),
                                         static_cast<int64_t>(pairs[0] | pairs[1] << 32));
      // Those of the first block in the lower half, of the second in the upper one.
      const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
      return VF{_mm512_permutexvar_ps(places, _mm512_castps256_ps512(_mm256_cvtph_ps(all)))};
    }
  }
#endif
  return LoadScales(pass, row, block);
}

// sum[g] += q[g] · values [at, at + kValues) of kTogether quads of tokens whose rows are `row`.
template <DType kType, int G, bool kTail>
HWY_INLINE void AddProducts(const HeadPass& pass, const std::byte* const* row, size_t at,
                            VF (&sum)[G][kTogether], int32_t share) {
  using K = Keys<kType>;
  const DF d;
  const auto dk = static_cast<size_t>(pass.job->args->kv.dk);
  const float* q = pass.q + at * 4 * G;
  const int64_t offset = pass.k_offset + static_cast<int64_t>(at / K::kValues * K::kBytes);
  VF v[kTogether][4];
  for (size_t u = 0; u < kTogether; ++u) {
    for (size_t t = 0; t < 4; ++t) {
      const std::byte* k = row[4 * u + t] + offset;
      v[u][t] = kTail && at + K::kValues > dk ? K::LoadTail(k, dk - at) : K::Load(k);
    }
    Transpose4(v[u]);
  }
  for (size_t j = 0; j < 4; ++j) {
    pass.ahead->Advance(share);
    for (size_t part = 0; part < K::kParts; ++part) {
      VF k[kTogether];
      for (size_t u = 0; u < kTogether; ++u) k[u] = K::Part(v[u][j], part);
      for (int g = 0; g < G; ++g) {
        const VF qv = hn::LoadU(d, q + ((j * K::kParts + part) * G + g) * kLanes);
        for (size_t u = 0; u < kTogether; ++u) sum[g][u] = hn::MulAdd(k[u], qv, sum[g][u]);
      }
    }
  }
}

// half[g]: q[g] · k of kTogether quads of tokens whose rows are `row`. Sums lie in the blocks of
// one quad each, two blocks a quad where a vector has four.
template <DType kType, int G, bool kTail>
HWY_INLINE void ScoreQuads(const HeadPass& pass, const std::byte* const* row, VF (&half)[G]) {
  using K = Keys<kType>;
  const DF d;
  VF sum[G][kTogether];
  for (auto& of : sum) std::fill_n(of, kTogether, hn::Zero(d));
  const auto dk = static_cast<size_t>(pass.job->args->kv.dk);
  const int32_t share = pass.ahead->Share(kTogether, K::kValues, dk);  // of a quarter of a vector
  size_t at = 0;
  do {
    // The rows again from memory: kept for all turns they would take more registers than there are.
    asm("" : "+r"(row));
    if constexpr (InBlocks(kType)) {
      VF run[G][kTogether];
      for (auto& of : run) std::fill_n(of, kTogether, hn::Zero(d));
      for (size_t i = 0; i < K::kRun; i += K::kValues) {
        AddProducts<kType, G, kTail>(pass, row, at + i, run, share);
      }
      for (size_t u = 0; u < kTogether; ++u) {
        const VF scale = ScalesOfRun<kType>(pass, row + 4 * u, at);
        for (int g = 0; g < G; ++g) sum[g][u] = hn::MulAdd(run[g][u], scale, sum[g][u]);
      }
    } else {
      AddProducts<kType, G, kTail>(pass, row, at, sum, share);
    }
    at += K::kRun;
  } while (at < dk);
  for (int g = 0; g < G; ++g) {
#if HWY_CAP_GE256
    half[g] = hn::Add(hn::ConcatLowerLower(d, sum[g][1], sum[g][0]),
                      hn::ConcatUpperUpper(d, sum[g][1], sum[g][0]));
#else
    half[g] = sum[g][0];
#endif
  }
}

// dot[g] = q[g] · k of tokens i .. i + kLanes, one a lane. K is transposed in blocks of four
// tokens, so that tokens lie side by side and no product needs its lanes added one by one.
template <DType kType, int G, bool kTail>
HWY_INLINE void ScoreTile(const HeadPass& pass, int i, VF (&dot)[G]) {
  ScoreQuads<kType, G, kTail>(pass, pass.k + i, dot);
#if HWY_CAP_GE512
  VF second[G];
  ScoreQuads<kType, G, kTail>(pass, pass.k + i + 8, second);
  for (int g = 0; g < G; ++g) {
    dot[g] = hn::Add(VF{_mm512_shuffle_f32x4(dot[g].raw, second[g].raw, 0x88)},
                     VF{_mm512_shuffle_f32x4(dot[g].raw, second[g].raw, 0xdd)});
  }
#endif
}

#elif HWY_TARGET != HWY_SCALAR  // few registers

// Values that a head's row is a multiple of, unless it has a tail; the factor of its products.
template <DType kType>
inline constexpr size_t kTileValues = kStep;
template <DType kType>
inline constexpr float kLogitScale = 1.0f;

// One of `heads` queries, as ScoreTile reads them: in packed order, the steps of the heads
// alternating. `out` is that of the first head.
template <DType kType>
void PackQuery(const float* q, size_t dk, size_t head, size_t heads, float* out) {
  for (size_t at = 0; at < dk; at += kStep) {
    Pack<kType>(q + at, dk - at, kStep, out + at * heads + head * kStep);
  }
}

// sum[t][g] = q[g] · k of token t, in parts: one for each lane.
template <DType kType, int G, int T>
HWY_INLINE void ScoreTokens(const HeadPass& pass, const std::byte* const* row, VF (&sum)[T][4]) {
  const DF d;
  for (auto& of : sum) std::fill_n(of, 4, hn::Zero(d));
  const auto dk = static_cast<size_t>(pass.job->args->kv.dk);
  const float* q = pass.q;
  constexpr size_t kWhole = InBlocks(kType) ? kBlockValues : kStep;  // values that share a scale
  for (size_t whole = 0; whole < dk; whole += kWhole) {
    VF scale[T];
    if constexpr (InBlocks(kType)) {
      for (int t = 0; t < T; ++t) {
        scale[t] = LoadScale(row[t] + pass.k_scales + whole / kBlockValues * 2);
      }
    }
    for (size_t at = whole; at < whole + kWhole; at += kStep) {
      const auto load = [&](int t, VF& a, VF& b) HWY_ATTR {
        LoadHeadValues<kType>(row[t] + pass.k_offset, at, dk, a, b);
        if constexpr (InBlocks(kType)) {
          a = hn::Mul(a, scale[t]);
          b = hn::Mul(b, scale[t]);
        }
      };
      // What there is less of stays in registers while the other is loaded.
      if constexpr (T > G) {
        VF q0[G];
        VF q1[G];
        for (int g = 0; g < G; ++g) {
          q0[g] = hn::LoadU(d, q + g * kStep);
          q1[g] = hn::LoadU(d, q + g * kStep + kLanes);
        }
        for (int t = 0; t < T; ++t) {
          VF a;
          VF b;
          load(t, a, b);
          for (int g = 0; g < G; ++g) {
            sum[t][g] = hn::MulAdd(b, q1[g], hn::MulAdd(a, q0[g], sum[t][g]));
          }
        }
      } else {
        VF a[T];
        VF b[T];
        for (int t = 0; t < T; ++t) load(t, a[t], b[t]);
        for (int g = 0; g < G; ++g) {
          VF q0 = hn::LoadU(d, q + g * kStep);
          VF q1 = hn::LoadU(d, q + g * kStep + kLanes);
          KeepInRegister(q0);  // loads are scarcer than registers here
          KeepInRegister(q1);
          for (int t = 0; t < T; ++t) {
            sum[t][g] = hn::MulAdd(b[t], q1, hn::MulAdd(a[t], q0, sum[t][g]));
          }
        }
      }
      q += G * kStep;
    }
  }
}

// The four floats at `low` in the first four lanes, those at `high` in the next ones, if there are
// any. Each four were stored together: a load of eight would wait until the stores are through.
HWY_INLINE VF LoadFours(const float* low, const float* high) {
  const DF d;
  const hn::FixedTag<float, 4> d4;
#if HWY_CAP_GE256
  return hn::Combine(d, hn::Load(d4, high), hn::Load(d4, low));
#else
  (void)high;
  return hn::Load(d4, low);
#endif
}

// dot[g] = q[g] · k of tokens i .. i + kLanes, one a lane. As many tokens are taken together as
// their sums leave room for in 16 registers.
template <DType kType, int G, bool kTail>
HWY_INLINE void ScoreTile(const HeadPass& pass, int i, VF (&dot)[G]) {
  constexpr int kTokens = static_cast<int>(kLanes);
  constexpr int T = G == 1 ? kTokens : G == 2 ? 4 : 2;
  alignas(64) float total[kTokens][4];  // of one head: [t / 4][t % 4]; of more: [t][g]
  const int32_t share = pass.ahead->Share(T, 1, 1);
  for (int first = 0; first < kTokens; first += T) {
    pass.ahead->Advance(share);
    VF sum[T][4];
    ScoreTokens<kType, G>(pass, pass.k + i + first, sum);
    if constexpr (G == 1) {
      for (int t = 0; t < T; t += 4) {
        Sum4(sum[t][0], sum[t + 1][0], sum[t + 2][0], sum[t + 3][0], total[t / 4]);
      }
    } else {
      for (int t = 0; t < T; ++t) {
        Sum4(sum[t][0], sum[t][1], sum[t][2], sum[t][3], total[first + t]);
      }
    }
  }
  if constexpr (G == 1) {
    dot[0] = LoadFours(total[0], total[1]);
  } else {
    VF v[4];
    for (int t = 0; t < 4; ++t) v[t] = LoadFours(total[t], total[t + kTokens - 4]);
    Transpose4(v);
    std::copy_n(v, G, dot);
  }
}

#else  // HWY_SCALAR: one lane, one token, queries as they are

template <DType kType>
inline constexpr size_t kTileValues = 1;
template <DType kType>
inline constexpr float kLogitScale = 1.0f;

template <DType kType>
void PackQuery(const float* q, size_t dk, size_t head, size_t heads, float* out) {
  for (size_t at = 0; at < dk; ++at) out[at * heads + head] = q[at];
}

template <DType kType, int G, bool kTail>
HWY_INLINE void ScoreTile(const HeadPass& pass, int i, VF (&dot)[G]) {
  const KvView& kv = pass.job->args->kv;
  const auto place = static_cast<int32_t>(pass.k_offset / kv.k.head_bytes);
  pass.ahead->Advance(pass.ahead->Share(1, 1, 1));
  for (int g = 0; g < G; ++g) {
    float sum = 0;
    for (int32_t at = 0; at < kv.dk; ++at) {
      sum += pass.q[at * G + g] *
             LoadKvValue(kv.k, place, pass.k[i] + pass.k_offset, static_cast<size_t>(at));
    }
    dot[g] = hn::Set(DF(), sum);
  }
}
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#endif  // OMNIKV_BACKEND_CPU_ATTEND_SCORES_INL_H_
