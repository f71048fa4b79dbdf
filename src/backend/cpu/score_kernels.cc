#include "backend/cpu/score_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/score_kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "backend/cpu/simd-inl.h"
#include "backend/kv_format.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int kTogether = 2;  // tokens that share the loads of q
constexpr int kAhead = 16;    // tokens between the one that is fetched and those at work

// Calls run(format) with a constant of the format of K: format() is a DType.
template <typename Run>
void WithFormat(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kF32:
      return run(std::integral_constant<DType, DType::kF32>());
    case DType::kF16:
      return run(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16:
      return run(std::integral_constant<DType, DType::kBF16>());
    case DType::kQ8_0:
      return run(std::integral_constant<DType, DType::kQ8_0>());
    case DType::kQ4_0:
      return run(std::integral_constant<DType, DType::kQ4_0>());
  }
}

// A block's tokens: where their rows begin.
struct Rows {
  const std::byte* at[kScoreBlock];
};

// w[g][t] = q[g]·k of tokens [0, n), for G heads. The next head's K of a token is a few hundred
// bytes on, which the prefetchers of the CPU do not follow over n rows: it is fetched by hand.
template <DType kType, int G>
HWY_NOINLINE void Dots(const Rows& rows, int n, const KvView& kv, int32_t kv_head, const float* q,
                       int64_t q_stride, float (*w)[kScoreBlock]) {
  const DF d;
  const auto values = static_cast<size_t>(kv.dk);
  const int64_t bytes = KvHeadBytes(kType, kv.dk);
  const int64_t offset = kv_head * kv.k.head_bytes;
  const int64_t to_scales = kv.k.ToScales(kv_head);
  const bool second_level = PrefetchesToSecondLevel();
  for (int t = 0; t < n; t += kTogether) {
    const std::byte* k[kTogether];
    for (int i = 0; i < kTogether; ++i) k[i] = rows.at[std::min(t + i, n - 1)] + offset;
    for (int i = 0; i < kTogether; ++i) {
      const std::byte* next = rows.at[std::min(t + i + kAhead, n - 1)] + offset;
      for (int64_t b = 0; b < bytes; b += 64) PrefetchRow(next + b, second_level);
    }
    VF sum[kTogether][kScoreHeads];
    for (auto& of : sum) std::fill_n(of, kScoreHeads, hn::Zero(d));
    for (size_t at = 0; at < values; at += kStep) {
      VF a[kTogether];
      VF b[kTogether];
      for (int i = 0; i < kTogether; ++i) {
        LoadHeadStep<kType>(k[i], to_scales, at, values, a[i], b[i]);
      }
      for (int g = 0; g < G; ++g) {
        const VF q0 = hn::LoadU(d, q + g * q_stride + at);
        const VF q1 = hn::LoadU(d, q + g * q_stride + at + kLanes);
        for (int i = 0; i < kTogether; ++i) {
          sum[i][g] = hn::MulAdd(b[i], q1, hn::MulAdd(a[i], q0, sum[i][g]));
        }
      }
    }
    for (int i = 0; i < kTogether && t + i < n; ++i) {
      float total[kScoreHeads];
      Sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3], total);
      for (int g = 0; g < G; ++g) w[g][t + i] = total[g];
    }
  }
}

template <DType kType>
void DotsOf(int g, const Rows& rows, int n, const KvView& kv, int32_t kv_head, const float* q,
            int64_t q_stride, float (*w)[kScoreBlock]) {
  if (g == 1) return Dots<kType, 1>(rows, n, kv, kv_head, q, q_stride, w);
  if (g == 2) return Dots<kType, 2>(rows, n, kv, kv_head, q, q_stride, w);
  if (g == 3) return Dots<kType, 3>(rows, n, kv, kv_head, q, q_stride, w);
  return Dots<kType, 4>(rows, n, kv, kv_head, q, q_stride, w);
}

// into[t] takes in the score of one head, whose products with K are dots[t].
void TakeHead(const ScoreArgs& a, const float* dots, int n, const float* lse, float* into) {
  const DF d;
  const VF scale = hn::Set(d, a.scale);
  for (int t = 0; t < n; t += static_cast<int>(kLanes)) {  // rows of a block are whole vectors
    VF v = hn::Mul(hn::LoadU(d, dots + t), scale);
    if (a.softcap > 0) v = Softcap(v, hn::Set(d, a.softcap), hn::Set(d, 1.0f / a.softcap));
    if (lse != nullptr) v = Exp(hn::Sub(v, hn::Set(d, *lse)));
    const VF held = hn::LoadU(d, into + t);
    hn::StoreU(a.heads == HeadReduce::kMax ? hn::Max(held, v) : hn::Add(held, v), d, into + t);
  }
}

// f[t] takes in g[t] of one row.
void TakeRow(const ScoreArgs& a, const float* g, int n, float weight, float* f) {
  const DF d;
  const VF w = hn::Set(d, weight);
  for (int t = 0; t < n; t += static_cast<int>(kLanes)) {
    const auto left = static_cast<size_t>(n - t);
    const VF v = hn::Mul(hn::LoadU(d, g + t), w);
    const VF held = hn::LoadU(d, f + t);
    StoreFloats(a.queries == QueryReduce::kMax ? hn::Max(held, v) : hn::Add(held, v), f + t, left);
  }
}

template <DType kType>
void BlockOf(const ScoreJob& job, int64_t begin, int64_t end, float* scratch) {
  const ScoreArgs& a = *job.args;
  const SeqMeta seq = a.seqs[job.seq];
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const auto n = static_cast<int>(end - begin);
  float* f = scratch;                    // [lists, kScoreBlock]
  float* g = f + a.lists * kScoreBlock;  // [lists, kScoreBlock]
  auto* w = reinterpret_cast<float(*)[kScoreBlock]>(g + a.lists * kScoreBlock);
  Rows rows;
  for (int t = 0; t < n; ++t) {
    rows.at[t] = a.kv.k.Head(a.kv.RowIndex(seq.table_off, begin + t), 0);
  }
  const auto clear = [&](float* scores, bool max) {
    std::fill_n(scores, a.lists * kScoreBlock, max ? kNegInf : 0.0f);
  };
  clear(f, a.queries == QueryReduce::kMax);
  for (int32_t r = 0; r < job.n_rows; ++r) {
    const int32_t age = job.n_rows - 1 - r;
    const auto seen = static_cast<int>(std::min<int64_t>(n, seq.kv_len - age - begin));
    if (seen <= 0) continue;
    clear(g, a.heads == HeadReduce::kMax);
    for (int32_t h = 0; h < a.n_heads;) {
      const int32_t kv_head = h / group;
      const int32_t together = std::min(kScoreHeads, (kv_head + 1) * group - h);
      DotsOf<kType>(together, rows, seen, a.kv, kv_head,
                    job.q + (int64_t{r} * a.n_heads + h) * job.q_stride, job.q_stride, w);
      float* into = g + (a.lists == 1 ? 0 : kv_head) * kScoreBlock;
      const int64_t row = int64_t{seq.q_begin} + seq.q_len - 1 - age;
      for (int32_t i = 0; i < together; ++i, ++h) {
        TakeHead(a, w[i], seen, a.lse != nullptr ? a.lse + row * a.n_heads + h : nullptr, into);
      }
    }
    float weight = a.heads == HeadReduce::kMean
                       ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                       : 1.0f;
    if (a.queries == QueryReduce::kDecay) {
      weight *= static_cast<float>(std::pow(double{a.decay}, age));
    }
    for (int32_t l = 0; l < a.lists; ++l) {
      TakeRow(a, g + l * kScoreBlock, seen, weight, f + l * kScoreBlock);
    }
  }
  const auto faded = a.queries == QueryReduce::kDecay
                         ? static_cast<float>(std::pow(double{a.decay}, seq.q_len))
                         : 1.0f;
  for (int32_t l = 0; l < a.lists; ++l) {
    float* out = ScoresOf(a, job.seq, l, /*held=*/false);
    const float* held = ScoresOf(a, job.seq, l, /*held=*/true);
    for (int64_t t = begin; t < end; t += a.unit) {
      const float* of = f + l * kScoreBlock + (t - begin);
      float best = *std::max_element(of, of + std::min<int64_t>(a.unit, end - t));
      if (a.accumulate && t < seq.kv_len - seq.q_len) {
        const float before = held[t / a.unit];
        best = a.queries == QueryReduce::kMax ? std::max(best, before) : best + faded * before;
      }
      out[t / a.unit] = best;
    }
  }
}

void Block(const ScoreJob& job, int64_t begin, int64_t end, float* scratch) {
  WithFormat(job.args->kv.k.dtype,
             [&](auto format) { BlockOf<format()>(job, begin, end, scratch); });
}

void PackQuery(DType dtype, const float* q, int64_t dk, int64_t padded, float* out) {
  const auto n = static_cast<size_t>(dk);
  const auto to = static_cast<size_t>(padded);
  // The types that are not bf16 have one order.
  if (dtype == DType::kBF16) return Pack<DType::kBF16>(q, n, to, out);
  return Pack<DType::kF32>(q, n, to, out);
}

template <DType kType>
void SummaryOf(const BlockSummaryArgs& a, int32_t seq, int64_t unit) {
  const DF d;
  const SeqMeta meta = a.seqs[seq];
  const auto dk = static_cast<size_t>(a.kv.dk);
  const int64_t width = int64_t{a.kv.n_kv_heads} * a.kv.dk;
  const int64_t first = unit * a.unit;
  const int32_t n = UnitsOf(a.unit, a.every);  // tokens that count
  auto* out = a.out.Row<std::byte>(meta.table_off, static_cast<int32_t>(unit));
  const VF share = hn::Set(d, 1.0f / static_cast<float>(n));
  for (int32_t kv_head = 0; kv_head < a.kv.n_kv_heads; ++kv_head) {
    for (size_t at = 0; at < dk; at += kStep) {
      VF sum[2] = {hn::Zero(d), hn::Zero(d)};
      VF low[2] = {hn::Set(d, -kNegInf), hn::Set(d, -kNegInf)};
      VF high[2] = {hn::Set(d, kNegInf), hn::Set(d, kNegInf)};
      const auto load = [&](int64_t t, VF(&v)[2]) {
        const std::byte* k =
            a.kv.k.Head(a.kv.RowIndex(meta.table_off, first + t * a.every), kv_head);
        LoadHeadStep<kType>(k, a.kv.k.ToScales(kv_head), at, dk, v[0], v[1]);
      };
      for (int64_t t = 0; t < n; ++t) {
        VF v[2];
        load(t, v);
        for (int i = 0; i < 2; ++i) {
          sum[i] = hn::Add(sum[i], v[i]);
          low[i] = hn::Min(low[i], v[i]);
          high[i] = hn::Max(high[i], v[i]);
        }
      }
      if (a.kind == SummaryKind::kMeanStd) {
        // By distances from the mean: beside a large mean, squares of values say nothing of them.
        VF squares[2] = {hn::Zero(d), hn::Zero(d)};
        for (VF& v : sum) v = hn::Mul(v, share);
        for (int64_t t = 0; t < n; ++t) {
          VF v[2];
          load(t, v);
          for (int i = 0; i < 2; ++i) {
            const VF away = hn::Sub(v[i], sum[i]);
            squares[i] = hn::MulAdd(away, away, squares[i]);
          }
        }
        for (int i = 0; i < 2; ++i) {
          const VF deviation = hn::Sqrt(hn::Mul(squares[i], share));
          low[i] = hn::Sub(sum[i], deviation);
          high[i] = hn::Add(sum[i], deviation);
        }
      }
      const auto store = [&](VF lower, VF upper, int64_t to) {
        const size_t bytes = DTypeBytes(a.format, static_cast<size_t>(to) + at);
        if (a.format == DType::kF32) {
          StoreStep<kType>(lower, upper, reinterpret_cast<float*>(out + bytes), dk - at);
          return;
        }
        HWY_ALIGN float values[kStep];
        StoreStep<kType>(lower, upper, values, kStep);
        for (size_t i = 0; i < std::min(kStep, dk - at); ++i) {
          StoreFromF32(a.format, out + bytes, i, values[i]);
        }
      };
      const int64_t to = int64_t{kv_head} * a.kv.dk;
      if (a.kind == SummaryKind::kMean) {
        store(hn::Mul(sum[0], share), hn::Mul(sum[1], share), to);
      } else if (a.kind == SummaryKind::kMax) {
        store(high[0], high[1], to);
      } else {
        store(low[0], low[1], to);
        store(high[0], high[1], width + to);
      }
    }
  }
}

void Summary(const BlockSummaryArgs& a, int32_t seq, int64_t unit) {
  WithFormat(a.kv.k.dtype, [&](auto format) { SummaryOf<format()>(a, seq, unit); });
}

// Values of a summary from `at` on.
template <DType kFormat>
HWY_INLINE VF LoadSummary(const std::byte* values, size_t at, size_t n) {
  const DF d;
  if constexpr (kFormat == DType::kF32) {
    return LoadFloats(reinterpret_cast<const float*>(values) + at, n);
  } else {
    using T = std::conditional_t<kFormat == DType::kF16, hwy::float16_t, hwy::bfloat16_t>;
    const hn::Rebind<T, DF> half;
    const T* from = reinterpret_cast<const T*>(values) + at;
    if (n >= kLanes) return hn::PromoteTo(d, hn::LoadU(half, from));
    alignas(64) T buffer[kLanes] = {};
    std::memcpy(buffer, from, n * sizeof(T));
    return hn::PromoteTo(d, hn::Load(half, buffer));
  }
}

// w[g] = q[g]·s, or the highest of any key between the bounds s and `high`, of n query heads.
template <DType kFormat>
HWY_INLINE void SummaryDots(const std::byte* s, const std::byte* high, size_t dk, const float* q,
                            int n, float (&w)[kScoreHeads]) {
  const DF d;
  VF sum[kScoreHeads];
  std::fill_n(sum, kScoreHeads, hn::Zero(d));
  for (size_t at = 0; at < dk; at += kLanes) {
    const VF low_v = LoadSummary<kFormat>(s, at, dk - at);
    const VF high_v = high != nullptr ? LoadSummary<kFormat>(high, at, dk - at) : low_v;
    for (int g = 0; g < n; ++g) {
      const VF v = LoadFloats(q + static_cast<size_t>(g) * dk + at, dk - at);
      sum[g] = high != nullptr ? hn::Add(sum[g], hn::Max(hn::Mul(v, low_v), hn::Mul(v, high_v)))
                               : hn::MulAdd(v, low_v, sum[g]);
    }
  }
  Sum4(sum[0], sum[1], sum[2], sum[3], w);
}

template <DType kFormat>
void BlockScoreOf(const BlockScoreArgs& a, int32_t seq, int64_t begin, int64_t end) {
  const SeqMeta meta = a.seqs[seq];
  const int32_t group = a.n_heads / a.n_kv_heads;
  const auto width = static_cast<size_t>(a.n_kv_heads) * static_cast<size_t>(a.dk);
  const int32_t arrays = SummaryArrays(a.kind);
  const float* q = a.q + (int64_t{meta.q_begin} + meta.q_len - 1) * a.n_heads * a.dk;
  const bool max = a.heads == HeadReduce::kMax;
  const float mean = a.heads == HeadReduce::kMean
                         ? static_cast<float>(a.lists) / static_cast<float>(a.n_heads)
                         : 1.0f;
  const auto take = [&](float* out, int64_t u, float score) {
    *out = u < a.sinks ? kChosenFirst : score * mean;
  };
  for (int64_t u = begin; u < end; ++u) {
    const auto* s = a.summaries.Row<const std::byte>(meta.table_off, static_cast<int32_t>(u));
    float* out = a.out + int64_t{seq} * a.lists * a.stride + u;
    float score = 0;
    for (int32_t h = 0; h < a.n_heads;) {
      const int32_t kv_head = h / group;
      if (h == (a.lists == 1 ? 0 : kv_head * group)) score = max ? kNegInf : 0.0f;
      const int32_t together = std::min(kScoreHeads, (kv_head + 1) * group - h);
      const auto dk = static_cast<size_t>(a.dk);
      const std::byte* of = s + DTypeBytes(kFormat, static_cast<size_t>(kv_head) * dk);
      const std::byte* high = arrays == 2 ? of + DTypeBytes(kFormat, width) : nullptr;
      float w[kScoreHeads];
      SummaryDots<kFormat>(of, high, dk, q + int64_t{h} * a.dk, together, w);
      for (int32_t i = 0; i < together; ++i) {
        score = max ? std::max(score, w[i] * a.scale) : score + w[i] * a.scale;
      }
      h += together;
      if (a.lists == 1) {
        if (h == a.n_heads) take(out, u, score);
      } else if (h % group == 0) {
        take(out + kv_head * a.stride, u, score);
      }
    }
  }
}

void BlockScore(const BlockScoreArgs& a, int32_t seq, int64_t begin, int64_t end) {
  switch (a.format) {
    case DType::kF16:
      return BlockScoreOf<DType::kF16>(a, seq, begin, end);
    case DType::kBF16:
      return BlockScoreOf<DType::kBF16>(a, seq, begin, end);
    default:
      return BlockScoreOf<DType::kF32>(a, seq, begin, end);
  }
}

// For each KV head of token t: takes(head, its key, |key|²).
template <DType kType, typename Take>
HWY_INLINE void ForKeys(const KeyScoreArgs& a, const SeqMeta& seq, int64_t t, const Take& take) {
  const auto dk = static_cast<size_t>(a.kv.dk);
  const int64_t row = a.kv.RowIndex(seq.table_off, t);
  for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
    const std::byte* key = a.kv.k.Head(row, g);
    VF sum[2] = {hn::Zero(DF()), hn::Zero(DF())};
    for (size_t at = 0; at < dk; at += kStep) {
      VF v[2];
      LoadHeadStep<kType>(key, a.kv.k.ToScales(g), at, dk, v[0], v[1]);
      for (int i = 0; i < 2; ++i) sum[i] = hn::MulAdd(v[i], v[i], sum[i]);
    }
    take(g, key, Sum(hn::Add(sum[0], sum[1])));
  }
}

template <DType kType>
void KeyDirectionsOf(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end, float* sums) {
  const DF d;
  const auto dk = static_cast<size_t>(a.kv.dk);
  const int64_t floats = KeyFloats(a.kv.dk);
  std::fill_n(sums, a.kv.n_kv_heads * floats, 0.0f);
  for (int64_t t = begin; t < end; ++t) {
    ForKeys<kType>(a, a.seqs[seq], t, [&](int32_t g, const std::byte* key, float square) {
      if (square == 0) return;
      const VF inverse = hn::Set(d, 1.0f / std::sqrt(square));
      for (size_t at = 0; at < dk; at += kStep) {
        VF v[2];
        LoadHeadStep<kType>(key, a.kv.k.ToScales(g), at, dk, v[0], v[1]);
        float* to = sums + g * floats + at;
        for (size_t i = 0; i < 2; ++i) {
          hn::StoreU(hn::MulAdd(v[i], inverse, hn::LoadU(d, to + i * kLanes)), d, to + i * kLanes);
        }
      }
    });
  }
}

void KeyDirections(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end, float* sums) {
  WithFormat(a.kv.k.dtype,
             [&](auto format) { KeyDirectionsOf<format()>(a, seq, begin, end, sums); });
}

template <DType kType>
void KeyScoreOf(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end,
                const float* means) {
  const DF d;
  const auto dk = static_cast<size_t>(a.kv.dk);
  const int64_t floats = KeyFloats(a.kv.dk);
  for (int64_t t = begin; t < end; ++t) {
    ForKeys<kType>(a, a.seqs[seq], t, [&](int32_t g, const std::byte* key, float square) {
      float score = std::sqrt(square);
      if (a.kind == KeyScoreKind::kUnlike) {
        VF dot[2] = {hn::Zero(d), hn::Zero(d)};
        for (size_t at = 0; at < dk; at += kStep) {
          VF v[2];
          LoadHeadStep<kType>(key, a.kv.k.ToScales(g), at, dk, v[0], v[1]);
          for (size_t i = 0; i < 2; ++i) {
            const VF mean = hn::LoadU(d, means + g * floats + at + i * kLanes);
            dot[i] = hn::MulAdd(v[i], mean, dot[i]);
          }
        }
        score = score > 0 ? Sum(hn::Add(dot[0], dot[1])) / score : 0.0f;
      }
      a.out[(int64_t{seq} * a.kv.n_kv_heads + g) * a.stride + t] = -score;
    });
  }
}

void KeyScore(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end, const float* means) {
  WithFormat(a.kv.k.dtype, [&](auto format) { KeyScoreOf<format()>(a, seq, begin, end, means); });
}

template <DType kType>
void IndexKeysOf(const IndexKeysArgs& a, int32_t seq, int64_t begin, int64_t end) {
  const DF d;
  const hn::Rebind<uint8_t, DF> d8;
  const SeqMeta meta = a.seqs[seq];
  const auto dk = static_cast<size_t>(a.kv.dk);
  const size_t half = dk / 2;
  float k[kIndexDim];
  for (int64_t t = begin; t < end; ++t) {
    auto* row = a.out.Row<uint8_t>(meta.table_off, static_cast<int32_t>(t));
    for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
      const std::byte* head = a.kv.k.Head(a.kv.RowIndex(meta.table_off, t), g);
      for (size_t at = 0; at < dk; at += kStep) {
        VF v[2];
        LoadHeadStep<kType>(head, a.kv.k.ToScales(g), at, dk, v[0], v[1]);
        StoreStep<kType>(v[0], v[1], k + at, dk - at);
      }
      const auto [low, high] = std::minmax_element(k, k + dk);
      const IndexRange range = RangeOf(*low, *high);
      const VF zero = hn::Set(d, range.zero());
      const VF codes = hn::Set(d, range.CodesAUnit());
      const VF top = hn::Set(d, static_cast<float>(kIndexTop));
      const auto code = [&](const float* from, size_t n) {
        const VF c = hn::Round(hn::Mul(hn::Sub(LoadFloats(from, n), zero), codes));
        return hn::ConvertTo(DI(), hn::Min(hn::Max(c, hn::Zero(d)), top));
      };
      for (size_t at = 0; at < half; at += kLanes) {
        const size_t n = std::min(kLanes, half - at);
        const auto both = hn::Or(code(k + at, n), hn::ShiftLeft<4>(code(k + half + at, n)));
        uint8_t bytes[kLanes];
        hn::StoreU(hn::DemoteTo(d8, both), d8, bytes);
        std::memcpy(row + static_cast<size_t>(g) * half + at, bytes, n);
      }
      std::memcpy(
          row + IndexRangesAt(a.kv.n_kv_heads, a.kv.dk) + static_cast<size_t>(g) * sizeof(range),
          &range, sizeof(range));
    }
  }
}

void IndexKeys(const IndexKeysArgs& a, int32_t seq, int64_t begin, int64_t end) {
  WithFormat(a.kv.k.dtype, [&](auto format) { IndexKeysOf<format()>(a, seq, begin, end); });
}

constexpr int kIndexTogether = 4;  // tokens that share the loads of q

// w[g][t] = q[g]·codes of tokens [0, n), for G heads of a KV head, whose codes begin at
// rows.at[t] + offset. The rows are those of an index.
template <int G>
HWY_NOINLINE void CodeDots(const Rows& rows, int n, int64_t offset, size_t half, const float* q,
                           float (*w)[kScoreBlock]) {
  const DF d;
  const DI di;
  const hn::Rebind<uint8_t, DF> d8;
  const auto padded = static_cast<size_t>(HalfFloats(static_cast<int32_t>(2 * half)));
  const auto low_bits = hn::Set(di, 15);
  for (int t = 0; t < n; t += kIndexTogether) {
    const uint8_t* from[kIndexTogether];
    for (int i = 0; i < kIndexTogether; ++i) {
      from[i] = reinterpret_cast<const uint8_t*>(rows.at[std::min(t + i, n - 1)] + offset);
    }
    VF sum[G][kIndexTogether];
    for (auto& of : sum) std::fill_n(of, kIndexTogether, hn::Zero(d));
    for (size_t at = 0; at < half; at += kLanes) {
      VF low[kIndexTogether];
      VF high[kIndexTogether];
      for (int i = 0; i < kIndexTogether; ++i) {
        hn::Vec<decltype(d8)> bytes;
        if (at + kLanes <= half) {
          bytes = hn::LoadU(d8, from[i] + at);
        } else {
          uint8_t buffer[kLanes] = {};
          std::memcpy(buffer, from[i] + at, half - at);
          bytes = hn::LoadU(d8, buffer);
        }
        const auto both = hn::PromoteTo(di, bytes);
        low[i] = hn::ConvertTo(d, hn::And(both, low_bits));
        high[i] = hn::ConvertTo(d, hn::ShiftRight<4>(both));
      }
      for (int g = 0; g < G; ++g) {
        const VF q0 = hn::LoadU(d, q + static_cast<size_t>(g) * 2 * padded + at);
        const VF q1 = hn::LoadU(d, q + (static_cast<size_t>(g) * 2 + 1) * padded + at);
        for (int i = 0; i < kIndexTogether; ++i) {
          sum[g][i] = hn::MulAdd(high[i], q1, hn::MulAdd(low[i], q0, sum[g][i]));
        }
      }
    }
    for (int g = 0; g < G; ++g) {  // rows of a block have room for whole turns
      Sum4(sum[g][0], sum[g][1], sum[g][2], sum[g][3], w[g] + t);
    }
  }
}

void CodeDotsOf(int g, const Rows& rows, int n, int64_t offset, size_t half, const float* q,
                float (*w)[kScoreBlock]) {
  if (g == 1) return CodeDots<1>(rows, n, offset, half, q, w);
  if (g == 2) return CodeDots<2>(rows, n, offset, half, q, w);
  if (g == 3) return CodeDots<3>(rows, n, offset, half, q, w);
  return CodeDots<4>(rows, n, offset, half, q, w);
}

// Of a unit's logits, of which `left` are there.
HWY_INLINE float HighestOfUnit(const float* w, int left) {
  if (left < kIndexUnit) return *std::max_element(w, w + left);
  const hn::CappedTag<float, kIndexUnit> d;
  auto top = hn::LoadU(d, w);
  for (size_t i = hn::Lanes(d); i < size_t{kIndexUnit}; i += hn::Lanes(d)) {
    top = hn::Max(top, hn::LoadU(d, w + i));
  }
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

void IndexScore(const IndexScoreArgs& a, int32_t row, int64_t begin, int64_t end, const float* q,
                ExpSum* sums) {
  const DF d;
  const int32_t group = a.n_heads / a.n_kv_heads;
  const int32_t table_off = a.seqs[a.rows[row].seq].table_off;
  const int64_t padded = HalfFloats(a.dk);
  const int64_t ranges_at = IndexRangesAt(a.n_kv_heads, a.dk);
  const auto n = static_cast<int>(end - begin);
  const bool listed = a.only.index != nullptr;
  const SomeTokens::Of tokens(a.only, a.rows[row], 1, 0);
  int32_t token[kScoreBlock];
  Rows rows;
  for (int t = 0; t < n; ++t) {
    token[t] = tokens.At(static_cast<int32_t>(begin) + t);
    rows.at[t] = a.index.Row<const std::byte>(table_off, token[t]);
  }
  alignas(64) float scales[kScoreBlock];
  alignas(64) float zeros[kScoreBlock];
  alignas(64) float w[kScoreHeads][kScoreBlock];
  for (int32_t h = 0; h < a.n_heads;) {
    const int32_t kv_head = h / group;
    if (h % group == 0) {
      for (int t = 0; t < n; ++t) {
        IndexRange range;
        std::memcpy(&range, rows.at[t] + ranges_at + kv_head * static_cast<int64_t>(sizeof(range)),
                    sizeof(range));
        scales[t] = range.scale() * a.scale;
        zeros[t] = range.zero() * a.scale;
      }
    }
    const int32_t together = std::min(kScoreHeads, (kv_head + 1) * group - h);
    const float* of = q + int64_t{h} * 2 * padded;
    CodeDotsOf(together, rows, n, kv_head * IndexCodeBytes(a.dk), static_cast<size_t>(a.dk / 2), of,
               w);
    for (int32_t i = 0; i < together; ++i, ++h) {
      VF total = hn::Zero(d);
      for (int64_t at = 0; at < 2 * padded; at += static_cast<int64_t>(kLanes)) {
        total = hn::Add(total, hn::LoadU(d, of + i * 2 * padded + at));
      }
      const VF q_sum = hn::Set(d, Sum(total));
      float* const out = a.logits + LogitAt(a, row, h, 0);  // of tokens that are not listed
      VF top = hn::Set(d, kNegInf);
      for (int t = 0; t < n; t += static_cast<int>(kLanes)) {
        const auto left = static_cast<size_t>(n - t);
        VF v = hn::MulAdd(hn::Load(d, w[i] + t), hn::Load(d, scales + t),
                          hn::Mul(q_sum, hn::Load(d, zeros + t)));
        if (a.softcap > 0) v = Softcap(v, hn::Set(d, a.softcap), hn::Set(d, 1.0f / a.softcap));
        if (left < kLanes) v = hn::IfThenElse(hn::FirstN(d, left), v, hn::Set(d, kNegInf));
        hn::Store(v, d, w[i] + t);
        if (!listed && a.unit == 1) StoreFloats(v, out + begin + t, left);
        top = hn::Max(top, v);
      }
      for (int t = 0; listed && t < n; ++t) {
        a.logits[LogitAt(a, row, h, token[t])] = w[i][t];
      }
      for (int t = 0; a.unit > 1 && t < n; t += kIndexUnit) {  // blocks begin with a unit
        out[(begin + t) / kIndexUnit] = HighestOfUnit(w[i] + t, n - t);
      }
      if (listed) continue;
      const float highest = Max(top);
      VF sum = hn::Zero(d);
      for (int t = 0; t < n; t += static_cast<int>(kLanes)) {
        sum = hn::Add(sum, Exp(hn::Sub(hn::Load(d, w[i] + t), hn::Set(d, highest))));
      }
      sums[h] = {highest, Sum(sum)};
    }
  }
}

template <DType kType>
void RescoreOf(const RescoreArgs& a, int32_t row, int32_t list, int32_t begin, int32_t end,
               const float* q, ExpChange* sums) {
  const DF d;
  const RowMeta meta = a.rows[row];
  const SomeTokens::Of tokens(a.tokens, meta, a.lists, list);
  const int32_t table_off = a.seqs[meta.seq].table_off;
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const int32_t list_heads = a.n_heads / a.lists;
  const int64_t q_stride = KeyFloats(a.kv.dk);
  const int n = end - begin;
  int32_t token[kScoreBlock];
  Rows rows;
  for (int i = 0; i < n; ++i) {
    token[i] = tokens.At(begin + i);
    rows.at[i] = a.kv.k.Head(a.kv.RowIndex(table_off, token[i]), 0);
  }
  alignas(64) float w[kScoreHeads][kScoreBlock];
  alignas(64) float held[kScoreBlock];
  for (int32_t h = list * list_heads; h < (list + 1) * list_heads;) {
    const int32_t kv_head = h / group;
    const int32_t together = std::min(kScoreHeads, (kv_head + 1) * group - h);
    DotsOf<kType>(together, rows, n, a.kv, kv_head, q + h * q_stride, q_stride, w);
    for (int32_t i = 0; i < together; ++i, ++h) {
      const int64_t row_head = int64_t{row} * a.n_heads + h;
      const auto logit = [&](int t) -> float& { return a.logits[LogitAt(a, row, h, token[t])]; };
      const VF lse = hn::Set(d, a.lse[row_head]);
      for (int t = 0; t < n; ++t) held[t] = logit(t);
      VF before = hn::Zero(d);
      VF after = hn::Zero(d);
      for (int t = 0; t < n; t += static_cast<int>(kLanes)) {
        const auto in = hn::FirstN(d, static_cast<size_t>(n - t));
        VF v = hn::Mul(hn::Load(d, w[i] + t), hn::Set(d, a.scale));
        if (a.softcap > 0) v = Softcap(v, hn::Set(d, a.softcap), hn::Set(d, 1.0f / a.softcap));
        hn::Store(v, d, w[i] + t);
        after = hn::Add(after, hn::IfThenElseZero(in, Exp(hn::Sub(v, lse))));
        before = hn::Add(before, hn::IfThenElseZero(in, Exp(hn::Sub(hn::Load(d, held + t), lse))));
      }
      sums[h] = {Sum(before), Sum(after)};
      for (int t = 0; t < n; ++t) logit(t) = w[i][t];
    }
  }
}

void Rescore(const RescoreArgs& a, int32_t row, int32_t list, int32_t begin, int32_t end,
             const float* q, ExpChange* sums) {
  WithFormat(a.kv.k.dtype,
             [&](auto format) { RescoreOf<format()>(a, row, list, begin, end, q, sums); });
}

void Pool(const PoolArgs& a, int32_t seq, int32_t list, int64_t begin, int64_t end) {
  const DF d;
  const int64_t n = a.n[seq];
  const int64_t half = a.kernel / 2;
  const bool max = a.kind == PoolKind::kMax;
  const float* in = a.in + (int64_t{seq} * a.lists + list) * a.stride;
  float* out = a.out + (int64_t{seq} * a.lists + list) * a.stride;
  const float weight = max ? 1.0f : 1.0f / static_cast<float>(a.kernel);
  for (int64_t i = begin; i < end;) {
    if (i >= half && i + half + static_cast<int64_t>(kLanes) <= n &&
        i + static_cast<int64_t>(kLanes) <= end) {
      VF v = hn::LoadU(d, in + i - half);
      for (int64_t j = i - half + 1; j <= i + half; ++j) {
        const VF next = hn::LoadU(d, in + j);
        v = max ? hn::Max(v, next) : hn::Add(v, next);
      }
      hn::StoreU(hn::Mul(v, hn::Set(d, weight)), d, out + i);
      i += static_cast<int64_t>(kLanes);
    } else {
      const int64_t first = std::max<int64_t>(0, i - half);
      float v = in[first];
      for (int64_t j = first + 1; j <= std::min(n - 1, i + half); ++j) {
        v = max ? std::max(v, in[j]) : v + in[j];
      }
      out[i++] = v * weight;
    }
  }
}

const ScoreKernels* ScoreTable() {
  static constexpr ScoreKernels kTable = {PackQuery,     Block,    Summary,   BlockScore,
                                          KeyDirections, KeyScore, IndexKeys, IndexScore,
                                          Rescore,       Pool};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(ScoreTable);
const ScoreKernels& GetScoreKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(ScoreTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
