// Prefill attention against loops in double: plans, head geometries, K/V formats, instruction sets.
#include "backend/cpu/prefill/attend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "backend/cpu/prefill/amx_attend.h"
#include "backend/cpu/prefill/amx_kernels.h"
#include "backend/kv_format.h"
#include "prefill_test_util.h"

namespace omnikv::attend_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  DType dtype = DType::kF32;
  int32_t n_heads = 4;
  int32_t n_kv_heads = 2;
  int32_t dk = 64;
  int32_t dv = 64;
  int32_t start = 0;  // position of the first row
  int32_t rows = 50;
  int32_t block_tokens = 16;
  float softcap = 0;
};

// A sequence with its K/V in shuffled blocks, after rows of another sequence.
struct Case {
  Case(const Shape& s, Random& random) : shape(s) {
    const int32_t kv_len = s.start + s.rows;
    const int32_t blocks = (kv_len + s.block_tokens - 1) / s.block_tokens;
    const int32_t skipped = 3;  // table entries and rows of sequence 0
    table.resize(static_cast<size_t>(skipped + blocks));
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = table.size() - 1; i > 0; --i) {
      std::swap(table[i], table[static_cast<size_t>(random.Below(static_cast<int64_t>(i) + 1))]);
    }
    const int64_t row_bytes = KvRowBytes(s.dtype, s.n_kv_heads, s.dk, s.dv);
    kv.resize(table.size() * static_cast<size_t>(s.block_tokens * row_bytes));
    args.kv =
        MakeKvView(kv.data(), table.data(), s.block_tokens, s.dtype, s.n_kv_heads, s.dk, s.dv);
    for (size_t row = 0; row < table.size() * static_cast<size_t>(s.block_tokens); ++row) {
      for (const auto& [plane, d] : {std::pair{args.kv.k, s.dk}, {args.kv.v, s.dv}}) {
        for (int32_t head = 0; head < s.n_kv_heads; ++head) {
          StoreKvHead(plane, head, d, random.Normals(d).data(),
                      plane.Head(static_cast<int64_t>(row), 0));
        }
      }
    }
    for (int32_t r = 0; r < skipped; ++r) rows.push_back({0, r});
    for (int32_t r = 0; r < s.rows; ++r) rows.push_back({1, s.start + r});
    seqs = {{0, skipped, skipped, 0, skipped}, {skipped, s.rows, kv_len, skipped, kv_len}};
    const auto n = static_cast<int64_t>(rows.size()) * s.n_heads;
    q = random.Normals(n * s.dk);
    args.q = q.data();
    args.plan = AttnPlan::Dense();
    args.rows = rows.data();
    args.seqs = seqs.data();
    args.n_rows = static_cast<int32_t>(rows.size());
    args.n_seqs = 2;
    args.n_heads = s.n_heads;
    args.scale = 1.7f / std::sqrt(static_cast<float>(s.dk));
    args.softcap = s.softcap;
    Clear();
  }

  void Clear() {
    const auto n = static_cast<size_t>(args.n_rows * args.n_heads);
    o.assign(n * static_cast<size_t>(shape.dv), kNan);
    lse.assign(n, kNan);
    args.o = o.data();
    args.lse = lse.data();
  }

  Shape shape;
  std::vector<int32_t> table;
  std::vector<std::byte> kv;
  std::vector<RowMeta> rows;
  std::vector<SeqMeta> seqs;
  std::vector<float> q, o, lse;
  AttendArgs args;
};

// The worst |o - reference| over rows of sequence 1, where |v| is about 1; and of lse.
struct Errors {
  double o = 0;
  double lse = 0;
};

// `rounded`: with queries and K/V rounded as the bf16 kernels round them.
Errors Compare(const Case& c, bool rounded = false) {
  const AttendArgs& a = c.args;
  const KvView& kv = a.kv;
  const int32_t group = a.n_heads / kv.n_kv_heads;
  const auto load = [&](const KvPlane& plane, int32_t head, const std::byte* values, size_t i) {
    const float value = LoadKvValue(plane, head, values, i);
    return rounded ? F32FromBf16(Bf16FromF32(value)) : value;
  };
  Errors errors;
  for (int32_t r = a.seqs[1].q_begin; r < a.n_rows; ++r) {
    const int32_t pos = a.rows[r].pos;
    for (int32_t h = 0; h < a.n_heads; ++h) {
      const int64_t out = int64_t{r} * a.n_heads + h;
      std::vector<double> sum(static_cast<size_t>(kv.dv), 0.0);
      double weight = 0;
      for (int32_t s = 0; s < a.plan.n_segments; ++s) {
        const PlanSegment& segment = a.plan.segments[static_cast<size_t>(s)];
        const int32_t begin = segment.bounds != nullptr ? segment.bounds[2] : segment.begin;
        const int32_t end = segment.bounds != nullptr ? segment.bounds[3] : segment.end;
        const float* q = (segment.q != nullptr ? segment.q : a.q) + out * kv.dk;
        for (int32_t t = std::max(0, begin); t <= pos && t < end; ++t) {
          if (segment.window > 0 && t <= pos - segment.window) continue;
          const int64_t row = kv.RowIndex(a.seqs[1].table_off, t);
          const std::byte* k = kv.k.Head(row, h / group);
          const std::byte* v = kv.v.Head(row, h / group);
          const double scale = a.softcap > 0 ? a.scale : a.scale * 1.44269504f;
          double dot = 0;
          for (size_t i = 0; i < static_cast<size_t>(kv.dk); ++i) {
            double value = q[i] * scale;
            if (rounded) value = F32FromBf16(Bf16FromF32(static_cast<float>(value)));
            dot += value * load(kv.k, h / group, k, i);
          }
          double logit = a.softcap > 0 ? dot : dot * M_LN2;
          if (a.softcap > 0) logit = a.softcap * std::tanh(logit / a.softcap);
          const double p = std::exp(logit);
          weight += p;
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += p * load(kv.v, h / group, v, i);
        }
      }
      const double worst = std::numeric_limits<double>::infinity();
      for (size_t i = 0; i < sum.size(); ++i) {
        const double want = weight > 0 ? sum[i] / weight : 0;
        const double delta = std::abs(a.o[out * kv.dv + static_cast<int64_t>(i)] - want);
        errors.o = std::isnan(delta) ? worst : std::max(errors.o, delta);
      }
      if (a.lse == nullptr) continue;
      if (weight == 0) {
        if (a.lse[out] != -std::numeric_limits<float>::infinity()) errors.lse = worst;
      } else {
        const double delta = std::abs(a.lse[out] - std::log(weight));
        errors.lse = std::isnan(delta) ? worst : std::max(errors.lse, delta);
      }
    }
  }
  return errors;
}

void RunCase(ThreadPool& pool, GemmPrecision precision, Case& c) {
  ASSERT_TRUE(PrefillAttendSupports(c.args));
  PrefillAttention attention(pool, precision);
  ASSERT_TRUE(attention.Reserve(c.args).ok());
  c.Clear();
  attention.Run(c.args, 1);
  for (int64_t i = 0; i < int64_t{c.args.seqs[1].q_begin} * c.args.n_heads; ++i) {
    ASSERT_TRUE(std::isnan(c.lse[static_cast<size_t>(i)])) << "wrote a row of another sequence";
  }
}

// What the default precision gives on this CPU. In bf16 the weights of V have 8 bits.
void CheckFast(ThreadPool& pool, Case& c) {
  RunCase(pool, GemmPrecision::kFast, c);
  const bool rounded = PrefillAttention(pool).Describe(c.args.kv).ends_with("bf16");
  const Errors errors = Compare(c, rounded);
  EXPECT_LT(errors.o, rounded ? 8e-3 : 5e-6);
  EXPECT_LT(errors.lse, rounded ? 5e-5 : 5e-6);
}

void Check(ThreadPool& pool, Case& c) {
  const Shape& s = c.shape;
  SCOPED_TRACE(testing::Message() << DTypeName(s.dtype) << " heads " << s.n_heads << "/"
                                  << s.n_kv_heads << " dk " << s.dk << " dv " << s.dv << " start "
                                  << s.start << " rows " << s.rows);
  RunCase(pool, GemmPrecision::kFull, c);
  const Errors errors = Compare(c);
  EXPECT_LT(errors.o, 5e-6);
  EXPECT_LT(errors.lse, 5e-6);
  CheckFast(pool, c);
}

PlanSegment Range(int32_t begin, int32_t end, int32_t window = 0) {
  PlanSegment s;
  s.begin = begin;
  s.end = end;
  s.window = window;
  return s;
}

TEST(PrefillAttention, DenseOnEveryTarget) {
  ThreadPool pool(2, false);
  ForEachTarget([&] {
    SCOPED_TRACE(prefill::BestVectorKernels().name);
    Random random(1);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0, DType::kQ4_0}) {
      Case c({.dtype = dtype, .start = 70, .rows = 151}, random);
      Check(pool, c);
    }
  });
}

TEST(PrefillAttention, HeadGeometries) {
  ThreadPool pool(3, false);
  Random random(2);
  for (const int32_t group : {1, 3, 4, 8}) {
    for (const int32_t dk : {8, 64, 80, 96, 128, 256}) {
      Case c({.dtype = group % 2 == 0 ? DType::kBF16 : DType::kF16,
              .n_heads = 2 * group,
              .dk = dk,
              .dv = dk == 96 ? 64 : dk,
              .start = 5,
              .rows = 41},
             random);
      Check(pool, c);
      if (!KvFits(DType::kQ8_0, dk)) continue;
      for (const DType dtype : {DType::kQ8_0, DType::kQ4_0}) {
        Case blocks({.dtype = dtype,
                     .n_heads = 2 * group,
                     .dk = dk,
                     .dv = dk == 96 ? 64 : dk,
                     .start = 5,
                     .rows = 61},
                    random);
        Check(pool, blocks);
      }
    }
  }
}

TEST(PrefillAttention, RowsStartsAndBlocks) {
  ThreadPool pool(2, false);
  Random random(3);
  for (const int32_t rows : {1, 2, 16, 31, 33, 96, 200}) {
    for (const int32_t start : {0, 1, 95, 300}) {
      Case c({.dtype = start % 2 == 0 ? DType::kBF16 : DType::kF32,
              .start = start,
              .rows = rows,
              .block_tokens = rows % 2 == 0 ? 7 : 64},
             random);
      Check(pool, c);
    }
  }
}

TEST(PrefillAttention, Windows) {
  ThreadPool pool(2, false);
  Random random(4);
  for (const int32_t window : {1, 2, 17, 96, 100, 1000}) {
    Case c({.dtype = DType::kBF16, .start = 200, .rows = 130}, random);
    c.args.plan = AttnPlan::Dense(window);
    Check(pool, c);
  }
}

TEST(PrefillAttention, SinksAndWindow) {
  ThreadPool pool(2, false);
  Random random(5);
  for (const int32_t start : {0, 3, 150}) {
    for (const int32_t window : {1, 40, 128}) {
      Case c({.dtype = DType::kBF16, .n_heads = 8, .start = start, .rows = 140}, random);
      c.args.plan = {};
      c.args.plan.Add(Range(0, 4));
      c.args.plan.Add(Range(4, kToEnd, window));
      Check(pool, c);
    }
  }
}

TEST(PrefillAttention, BoundsInMemoryAndQueriesOfASegment) {
  ThreadPool pool(1, false);
  Random random(6);
  Case c({.start = 100, .rows = 60}, random);
  const std::vector<int32_t> bounds = {0, 0, 37, 120};
  const std::vector<float> other = random.Normals(static_cast<int64_t>(c.q.size()));
  PlanSegment first = Range(0, 37);
  first.q = other.data();
  PlanSegment second;
  second.bounds = bounds.data();
  c.args.plan = {};
  c.args.plan.Add(first);
  c.args.plan.Add(second);
  Check(pool, c);
}

TEST(PrefillAttention, RowsThatReadNothing) {
  ThreadPool pool(1, false);
  Random random(7);
  Case c({.start = 0, .rows = 60}, random);
  c.args.plan = {};
  c.args.plan.Add(Range(20, 40, 8));
  Check(pool, c);
  EXPECT_EQ(c.o[static_cast<size_t>(3 * c.args.n_heads * 64)], 0.0f);
}

TEST(PrefillAttention, Softcap) {
  ThreadPool pool(2, false);
  ForEachTarget([&] {
    Random random(8);
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      Case c({.dtype = dtype, .start = 40, .rows = 80, .softcap = 3}, random);
      Check(pool, c);
    }
  });
}

TEST(PrefillAttention, LargeLogits) {
  ThreadPool pool(1, false);
  Random random(9);
  Case c({.start = 10, .rows = 130}, random);
  c.args.scale = 30;  // one token takes all; exp without the maximum taken off would overflow
  RunCase(pool, GemmPrecision::kFull, c);
  const auto first = static_cast<size_t>(c.args.seqs[1].q_begin * c.args.n_heads * c.shape.dv);
  for (size_t i = first; i < c.o.size(); ++i) ASSERT_TRUE(std::isfinite(c.o[i])) << i;
}

TEST(PrefillAttention, WithoutLse) {
  ThreadPool pool(1, false);
  Random random(10);
  Case c({}, random);
  PrefillAttention attention(pool);
  ASSERT_TRUE(attention.Reserve(c.args).ok());
  c.args.lse = nullptr;
  attention.Run(c.args, 1);
  EXPECT_LT(Compare(c).o, 5e-6);
}

TEST(PrefillAttention, ThreadsAndChunksDoNotChangeBits) {
  Random random(11);
  for (const GemmPrecision precision : {GemmPrecision::kFast, GemmPrecision::kFull}) {
    Case c({.dtype = DType::kBF16, .n_heads = 6, .start = 0, .rows = 300}, random);
    c.args.plan = {};
    c.args.plan.Add(Range(0, 4));
    c.args.plan.Add(Range(4, kToEnd, 150));
    std::vector<float> first;
    for (const int threads : {1, 2, 3}) {
      ThreadPool pool(threads, false);
      RunCase(pool, precision, c);
      if (first.empty()) first = c.o;
      EXPECT_EQ(std::memcmp(c.o.data(), first.data(), first.size() * sizeof(float)), 0) << threads;
    }
    // The last 37 rows by themselves.
    ThreadPool pool(2, false);
    const SeqMeta whole = c.seqs[1];
    c.seqs[1].q_begin += whole.q_len - 37;
    c.seqs[1].q_len = 37;
    RunCase(pool, precision, c);
    const size_t values = 37 * 6 * 64;
    EXPECT_TRUE(std::equal(c.o.end() - values, c.o.end(), first.end() - values));
  }
}

// The tiles of AMX as the manual describes them: 16 rows of 64 bytes.
class EmulatedTiles {
 public:
  template <int T>
  void Load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) {
      std::memcpy(words_[T][r], static_cast<const std::byte*>(from) + r * stride, 64);
    }
  }
  template <int T>
  void Store(void* to, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride, words_[T][r], 64);
    }
  }
  template <int T>
  void Zero() {
    std::memset(words_[T], 0, sizeof(words_[T]));
  }
  template <int C, int A, int B>
  void Dot() {
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 16; ++n) {
          const uint32_t a = words_[A][m][k];
          const uint32_t b = words_[B][k][n];
          float c = std::bit_cast<float>(words_[C][m][n]);
          c += F32FromBf16(static_cast<Bf16>(a)) * F32FromBf16(static_cast<Bf16>(b));
          c += F32FromBf16(static_cast<Bf16>(a >> 16)) * F32FromBf16(static_cast<Bf16>(b >> 16));
          words_[C][m][n] = std::bit_cast<uint32_t>(c);
        }
      }
    }
  }

 private:
  uint32_t words_[8][16][16] = {};
};

void AttendEmulated(const prefill::AttendTile* panels, int64_t n,
                    FunctionRef<void(int64_t)> before) {
  EmulatedTiles tiles;
  prefill::AmxAttention<EmulatedTiles>::Run(tiles, panels, n, before);
}

constexpr prefill::AttendKernels kEmulated = {.name = "emulated AMX bf16",
                                              .lanes = prefill::kAmxLanes,
                                              .pack = 2,
                                              .tile_tokens = prefill::kAmxTokens,
                                              .unit = prefill::kAmxSide,
                                              .norm = true,
                                              .scratch = prefill::kAmxScratch,
                                              .pack_rows = prefill::AmxPack,
                                              .attend = AttendEmulated};

void CheckTiles(const prefill::AttendKernels& kernels) {
  ThreadPool pool(2, false);
  Random random(13);
  const Shape shapes[] = {
      {.start = 70, .rows = 151},
      {.n_heads = 3, .n_kv_heads = 1, .dk = 80, .dv = 80, .start = 3, .rows = 40},
      {.n_heads = 8, .n_kv_heads = 1, .dk = 128, .dv = 128, .start = 95, .rows = 9},
      {.n_heads = 2, .dk = 8, .dv = 16, .start = 0, .rows = 97, .softcap = 4},
      {.n_heads = 2, .dk = 256, .dv = 96, .start = 1, .rows = 34},
      {.n_heads = 6, .dk = 72, .dv = 48, .start = 9, .rows = 60},
  };
  for (Shape s : shapes) {
    for (const int32_t window : {0, 33}) {
      s.dtype = window == 0 ? DType::kBF16 : DType::kF16;
      if (window == 33 && KvFits(DType::kQ8_0, s.dk) && KvFits(DType::kQ8_0, s.dv)) {
        s.dtype = s.dk == 128 ? DType::kQ4_0 : DType::kQ8_0;
      }
      SCOPED_TRACE(testing::Message() << kernels.name << " dk " << s.dk << " window " << window);
      Case c(s, random);
      // Wide logits: maxima move in the middle of a tile, by more than any slack.
      if (s.dk == 128) c.args.scale *= 8;
      c.args.plan = {};
      c.args.plan.Add(Range(0, 4));
      c.args.plan.Add(Range(4, kToEnd, window));
      PrefillAttention attention(pool, GemmPrecision::kFast, &kernels);
      ASSERT_EQ(attention.Describe(c.args.kv), kernels.name);
      ASSERT_TRUE(attention.Reserve(c.args).ok());
      attention.Run(c.args, 1);
      const Errors errors = Compare(c, true);
      EXPECT_LT(errors.o, 6e-3);
      EXPECT_LT(errors.lse, 5e-5);
    }
  }
}

TEST(PrefillAttention, EmulatedTiles) {
  if (prefill::Bf16AttendKernels() == nullptr) GTEST_SKIP() << "this CPU has no AVX512-BF16";
  CheckTiles(kEmulated);
}

// A query's bits depend on its own logits alone: not on the other queries of its panel, whose
// maxima move at other tokens, and not on whether lse is wanted.
TEST(PrefillAttention, EmulatedTilesKeepBits) {
  if (prefill::Bf16AttendKernels() == nullptr) GTEST_SKIP() << "this CPU has no AVX512-BF16";
  ThreadPool pool(2, false);
  Random random(14);
  for (const float wider : {1.0f, 8.0f}) {
    Case c({.dtype = DType::kF16, .n_heads = 6, .start = 0, .rows = 300}, random);
    c.args.scale *= wider;
    c.args.plan = {};
    c.args.plan.Add(Range(0, 4));
    c.args.plan.Add(Range(4, kToEnd, 170));
    PrefillAttention attention(pool, GemmPrecision::kFast, &kEmulated);
    ASSERT_TRUE(attention.Reserve(c.args).ok());
    attention.Run(c.args, 1);
    const std::vector<float> whole = c.o;
    c.Clear();
    c.args.lse = nullptr;
    const SeqMeta all = c.seqs[1];
    c.seqs[1].q_begin += all.q_len - 37;  // the last 37 rows by themselves
    c.seqs[1].q_len = 37;
    attention.Run(c.args, 1);
    const size_t values = 37 * 6 * 64;
    EXPECT_TRUE(std::equal(c.o.end() - values, c.o.end(), whole.end() - values)) << wider;
  }
}

TEST(PrefillAttention, TilesOfThisMachine) {
  if (prefill::AmxAttendKernels() == nullptr) GTEST_SKIP() << "this CPU has no AMX";
  CheckTiles(*prefill::AmxAttendKernels());
}

TEST(PrefillAttention, SaysWhatItDoesNotRun) {
  Random random(12);
  Case c({}, random);
  EXPECT_TRUE(PrefillAttendSupports(c.args));
  AttendArgs list = c.args;
  list.plan.segments[0].kind = SegmentKind::kList;
  EXPECT_FALSE(PrefillAttendSupports(list));
  AttendArgs scores = c.args;
  scores.score = ScoreKind::kHeadMax;
  EXPECT_FALSE(PrefillAttendSupports(scores));
  AttendArgs odd = c.args;
  odd.kv.dk = 60;
  EXPECT_FALSE(PrefillAttendSupports(odd));
}

}  // namespace
}  // namespace omnikv::attend_test
