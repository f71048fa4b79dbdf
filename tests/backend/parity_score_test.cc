// Parity of the ops that score tokens and units of tokens.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "parity_data.h"

namespace omnikv::parity::parity_score_test {
namespace {

constexpr HeadReduce kHeadReduces[] = {HeadReduce::kMax, HeadReduce::kMean, HeadReduce::kSum};
constexpr QueryReduce kQueryReduces[] = {QueryReduce::kLast, QueryReduce::kSum, QueryReduce::kMax,
                                         QueryReduce::kDecay};

// What a case of Score asks for.
struct Scoring {
  HeadReduce heads = HeadReduce::kMax;
  QueryReduce queries = QueryReduce::kLast;
  bool per_head = false, softmax = false, accumulate = false;
  int32_t unit = 1, window = 0;
  float softcap = 0;
  int32_t ring = 1;
};

// Scores of a step's sequences; what no unit's score is keeps its poison.
void CheckScore(const Attention& data, const Scoring& how, Random& random,
                int64_t turn = kAllCandidates) {
  const auto n_seqs = static_cast<size_t>(data.step.n_seqs());
  const int32_t lists = how.per_head ? data.shape.n_kv_heads : 1;
  const int64_t stride = *std::max_element(data.kv_len.begin(), data.kv_len.end()) / how.unit + 3;
  std::vector<float> lse =
      random.Floats(static_cast<size_t>(data.step.n_rows() * data.shape.n_heads), 0.3f);
  for (float& v : lse) v += 4;
  std::vector<float> held(n_seqs * static_cast<size_t>(how.ring * lists * stride), kPoison);
  std::vector<SeqMeta> steps = data.step.seqs;  // of contexts that lost rows
  for (size_t s = 0; s < n_seqs; ++s) steps[s].kv_len += how.ring > 1 ? static_cast<int>(s) : 0;
  for (size_t s = 0; s < n_seqs && how.accumulate; ++s) {
    const SeqMeta& seq = data.step.seqs[s];
    for (int32_t l = 0; l < lists; ++l) {
      float* out = ScoreRing{held.data(), stride, how.ring}.At(static_cast<int32_t>(s), l, lists,
                                                               steps[s].kv_len - seq.q_len);
      const int64_t old = (int64_t{seq.kv_len} - seq.q_len + how.unit - 1) / how.unit;
      const std::vector<float> values = random.Floats(static_cast<size_t>(old));
      std::copy(values.begin(), values.end(), out);
    }
  }
  const Shape& shape = data.shape;
  Check(
      fmt::format("Score {}/{} heads of {} {} rows {} by {} {}{}{}{} unit {} window {} cap {}",
                  shape.n_heads, shape.n_kv_heads, shape.dk, DTypeName(shape.dtype),
                  data.step.n_rows(), static_cast<int>(how.heads), static_cast<int>(how.queries),
                  how.per_head ? " per head" : "", how.softmax ? " softmax" : "",
                  how.accumulate ? how.ring > 1 ? " in a ring" : " accumulated" : "", how.unit,
                  how.window, how.softcap),
      [&](const Execute& run) {
        std::vector<float> out = held;
        run(ScoreArgs{.q = data.q.data(),
                      .lse = how.softmax ? lse.data() : nullptr,
                      .kv = data.bank.View(),
                      .seqs = data.step.seqs.data(),
                      .steps = how.ring > 1 ? steps.data() : nullptr,
                      .out = out.data(),
                      .stride = stride,
                      .ring = how.ring,
                      .n_rows = data.step.n_rows(),
                      .n_seqs = data.step.n_seqs(),
                      .n_heads = shape.n_heads,
                      .lists = lists,
                      .unit = how.unit,
                      .window = how.window,
                      .heads = how.heads,
                      .queries = how.queries,
                      .scale = 0.125f,
                      .softcap = how.softcap,
                      .decay = 0.9f,
                      .accumulate = how.accumulate});
        return Outputs{{"out", out}};
      },
      turn);
}

// Every way to reduce, with and without a window, over sequences of many lengths, one without rows.
TEST_F(ParityTest, ScoreReductions) {
  Random random(31);
  for (const DType dtype : kKvFormats) {
    const Attention data({8, 2, 64, 64, dtype}, {1, 0, 9, 5}, {130, 40, 77, 5}, random);
    for (const HeadReduce heads : kHeadReduces) {
      for (const QueryReduce queries : kQueryReduces) {
        for (const bool per_head : {false, true}) {
          for (const bool softmax : {false, true}) {
            for (const bool accumulate : {false, true}) {
              CheckScore(data, {heads, queries, per_head, softmax, accumulate}, random);
              CheckScore(data, {heads, queries, per_head, softmax, accumulate, 16, 4}, random);
            }
          }
        }
      }
    }
  }
}

// Sums of which the last steps are kept: of a decode step and of chunks, some of whose lengths are
// multiples of the ring.
TEST_F(ParityTest, ScoreRings) {
  Random random(39);
  for (const DType dtype : kKvFormats) {
    const Attention data({8, 2, 64, 64, dtype}, {1, 0, 10, 7}, {130, 40, 77, 7}, random);
    for (const int32_t ring : {3, 5}) {
      for (const bool per_head : {false, true}) {
        for (const QueryReduce queries : kQueryReduces) {
          Scoring how{.queries = queries, .per_head = per_head, .softmax = true};
          how.accumulate = true;
          how.ring = ring;
          CheckScore(data, how, random);
        }
      }
    }
  }
}

// Heads of all shapes: groups that fill no octet, sizes that are no multiple of a vector.
TEST_F(ParityTest, ScoreShapes) {
  Random random(32);
  for (const Shape& shape : std::vector<Shape>{{1, 1, 8, 8, DType::kF16},
                                               {4, 4, 40, 24, DType::kBF16},
                                               {6, 2, 80, 80, DType::kBF16},
                                               {14, 2, 64, 64, DType::kF16},
                                               {15, 3, 96, 64, DType::kF16},
                                               {16, 1, 128, 128, DType::kBF16},
                                               {20, 1, 32, 32, DType::kBF16},
                                               {32, 8, 128, 128, DType::kF16},
                                               {40, 2, 128, 128, DType::kBF16},
                                               {8, 4, 256, 256, DType::kF16},
                                               {4, 2, 320, 64, DType::kBF16},
                                               {5, 5, 37, 11, DType::kF32},
                                               {6, 3, 96, 32, DType::kQ8_0},
                                               {6, 3, 96, 32, DType::kQ4_0},
                                               {8, 2, 128, 128, DType::kQ8_0},
                                               {6, 3, 51, 17, DType::kF16}}) {
    const Attention data(shape, {1, 1, 6}, {300, 64, 97}, random);
    for (const HeadReduce heads : kHeadReduces) {
      for (const bool per_head : {false, true}) {
        CheckScore(data, {heads, QueryReduce::kLast, per_head, true}, random);
        CheckScore(data, {heads, QueryReduce::kSum, per_head, false, true, 8, 3}, random);
      }
    }
  }
}

// As few rows as sequences, as in a decode step, of which one has several and two have none.
TEST_F(ParityTest, ScoreOfFewRows) {
  Random random(35);
  for (const Shape& shape : std::vector<Shape>{{1, 1, 8, 8, DType::kF16},
                                               {6, 2, 80, 80, DType::kBF16},
                                               {15, 3, 96, 64, DType::kF16},
                                               {16, 1, 128, 128, DType::kBF16},
                                               {32, 8, 128, 128, DType::kF16},
                                               {20, 10, 64, 64, DType::kBF16},
                                               {8, 4, 256, 256, DType::kF16}}) {
    for (const Planes planes : {Planes::kTogether, Planes::kByHead}) {
      const Attention data(shape, {1, 0, 3, 1, 0}, {300, 40, 97, 64, 9}, random, 16, planes);
      for (const HeadReduce heads : kHeadReduces) {
        for (const QueryReduce queries : kQueryReduces) {
          for (const bool per_head : {false, true}) {
            CheckScore(data, {heads, queries, per_head, true, true, 1, 0, 0, 3}, random);
            CheckScore(data, {heads, queries, per_head, false, true, 8, 2, 1.5f}, random);
          }
        }
      }
    }
  }
}

// Units of all sizes, long sequences, the windows of a prompt.
TEST_F(ParityTest, ScoreUnitsAndWindows) {
  Random random(33);
  const Attention long_one({8, 2, 64, 64, DType::kBF16}, {1, 1}, {5000, 1021}, random, 64);
  const Attention prompt({8, 2, 64, 64, DType::kF16}, {70}, {613}, random, 64);
  for (const int32_t unit : {1, 7, 16, 48, 128, 500, kMaxScoreUnit}) {
    for (const bool per_head : {false, true}) {
      Scoring how{.per_head = per_head, .softmax = true, .unit = unit};
      CheckScore(long_one, how, random);
      how.heads = HeadReduce::kMean;
      for (const QueryReduce queries : {QueryReduce::kSum, QueryReduce::kMax}) {
        how.queries = queries;
        how.window = 64;
        CheckScore(prompt, how, random);
        how.window = 0;
        how.accumulate = true;
        CheckScore(prompt, how, random);
        how.accumulate = false;
      }
    }
  }
  // So many tokens that blocks are larger than the least, and several for each CTA.
  const Attention many({8, 8, 8, 8, DType::kF16}, {1, 1}, {150001, 40000}, random, 64);
  for (const int32_t unit : {1, 48}) CheckScore(many, {.softmax = true, .unit = unit}, random);
  for (const bool softmax : {false, true}) {
    CheckScore(prompt, {.softmax = softmax, .softcap = 1.5f}, random);
    CheckScore(long_one, {.softmax = softmax, .unit = 16, .softcap = 1.5f}, random);
  }
}

TEST_F(ParityTest, ScoreOtherPlanes) {
  Random random(37);
  for (const Shape& shape : std::vector<Shape>{{8, 2, 64, 64, DType::kF16},
                                               {6, 2, 128, 80, DType::kBF16},
                                               {4, 2, 48, 16, DType::kF32},
                                               {6, 2, 32, 64, DType::kQ8_0},
                                               {6, 2, 32, 64, DType::kQ4_0},
                                               {6, 3, 51, 17, DType::kF16}}) {
    for (const Planes planes : kOtherPlanes) {
      const Attention data(shape, {1, 9}, {300, 97}, random, 16, planes);
      CheckScore(data, {.per_head = true, .softmax = true, .unit = 8}, random);
      CheckScore(data, {HeadReduce::kMean, QueryReduce::kSum}, random);
    }
  }
}

// Windows of as many rows as a pass takes and more, one KV head after the other; blocks of all
// sizes.
TEST_F(ParityTest, ScoreWindows) {
  Random random(37);
  const Attention some({32, 8, 128, 128, DType::kBF16}, {16, 1, 0, 33}, {700, 321, 9, 33}, random,
                       64);
  // Many tokens make blocks large.
  const Attention large({4, 2, 8, 8, DType::kF16}, {33, 0, 0, 0, 0, 0, 0, 0},
                        {45000, 0, 0, 0, 0, 0, 0, 0}, random, 64);
  for (const HeadReduce heads : kHeadReduces) {
    for (const bool per_head : {false, true}) {
      Scoring how{.heads = heads, .queries = QueryReduce::kSum, .per_head = per_head};
      CheckScore(large, how, random);
      how.softmax = true;
      CheckScore(some, how, random);
      how.accumulate = true;
      how.window = 17;
      how.unit = 16;
      CheckScore(some, how, random);
    }
  }
}

// Chunks of prompts: so many rows that they pass in tiles, the first of them in the middle of a
// block of tokens; one chunk is the whole sequence, one a single row.
TEST_F(ParityTest, ScoreOfManyRows) {
  Random random(42);
  constexpr QueryReduce kReduces[] = {QueryReduce::kSum, QueryReduce::kMax, QueryReduce::kDecay};
  const Attention some({8, 2, 64, 64, DType::kBF16}, {129, 0, 1, 75}, {700, 40, 300, 75}, random);
  for (const HeadReduce heads : kHeadReduces) {
    for (const QueryReduce queries : kReduces) {
      for (const bool per_head : {false, true}) {
        for (const bool softmax : {false, true}) {
          CheckScore(some, {heads, queries, per_head, softmax, /*accumulate=*/softmax}, random);
        }
      }
    }
  }
  for (const Shape& shape : std::vector<Shape>{{3, 1, 40, 24, DType::kF16},
                                               {6, 2, 80, 80, DType::kBF16},
                                               {2, 2, 96, 64, DType::kF16},
                                               {14, 2, 128, 128, DType::kBF16},
                                               {4, 2, 256, 256, DType::kF16},
                                               {4, 4, 32, 32, DType::kQ8_0},
                                               {4, 2, 64, 32, DType::kQ4_0},
                                               {4, 2, 48, 16, DType::kF32}}) {
    const Attention chunk(shape, {1, 140}, {300, 333}, random, 16, Planes::kApart);
    for (const bool per_head : {false, true}) {
      CheckScore(chunk, {HeadReduce::kMax, QueryReduce::kSum, per_head, true}, random);
      CheckScore(chunk, {HeadReduce::kMean, QueryReduce::kSum, per_head, true, true}, random);
    }
  }
  for (const int32_t unit : {7, 16, 48, 256, kMaxScoreUnit}) {
    for (const bool per_head : {false, true}) {
      Scoring how{HeadReduce::kMax, QueryReduce::kSum, per_head, true, true, unit};
      how.window = unit == 7 ? 128 : 0;
      how.ring = unit == 48 ? 5 : 1;
      how.softcap = unit == 256 ? 1.5f : 0;
      CheckScore(some, how, random);
    }
  }
}

// Chunks of prompts with queries that K's type holds: where a device rounds queries to it, nothing
// is lost. Sequences end in the middle of tiles of rows and of tokens; one has fewer rows than a
// tile.
void CheckRoundedQueries(const Shape& shape, Planes planes, std::span<const HeadReduce> reduces,
                         Random& random) {
  int64_t turn = 0;
  Attention chunk(shape, {300, 0, 75}, {300, 40, 1111}, random, 64, planes);
  for (float& v : chunk.q) {
    v = shape.dtype == DType::kF16 ? F32FromF16(F16FromF32(v)) : F32FromBf16(Bf16FromF32(v));
  }
  for (const HeadReduce heads : reduces) {
    for (const bool per_head : {false, true}) {
      Scoring how{heads, QueryReduce::kSum, per_head, /*softmax=*/true};
      CheckScore(chunk, how, random, turn++);
      how.accumulate = true;
      how.unit = 16;
      how.window = 130;
      CheckScore(chunk, how, random, turn++);
    }
    ++turn;  // so that each candidate has all of these
  }
}

TEST_F(ParityTest, ScoreOfRoundedQueries) {
  Random random(43);
  for (const Shape& shape : std::vector<Shape>{{8, 2, 128, 128, DType::kBF16},
                                               {8, 2, 64, 64, DType::kF16},
                                               {6, 6, 64, 32, DType::kBF16},
                                               {14, 2, 128, 64, DType::kF16}}) {
    CheckRoundedQueries(shape, Planes::kTogether, kHeadReduces, random);
    // A CPU rounds no queries, and where rows lie is one thing and what is summed another.
    const std::span<const HeadReduce> all = kHeadReduces;
    CheckRoundedQueries(shape, Planes::kApart, CandidateStride() > 1 ? all.first(1) : all, random);
  }
}

TEST_F(ParityTest, ScoreOfRoundedQueriesByHead) {
  Random random(44);
  const std::span<const HeadReduce> all = kHeadReduces;
  for (const Shape& shape :
       std::vector<Shape>{{8, 2, 128, 128, DType::kBF16}, {8, 2, 64, 64, DType::kF16}}) {
    CheckRoundedQueries(shape, Planes::kByHead, all.first(1), random);
  }
}

// A unit is summed once, when its last token comes.
TEST(CompletedUnits, HaveTheirLastTokenInTheStep) {
  const auto units = [](int32_t q_len, int32_t kv_len) {
    const auto [begin, end] =
        CompletedUnits({.q_begin = 0, .q_len = q_len, .kv_len = kv_len, .table_off = 0}, 16);
    return std::pair(begin, end - begin);
  };
  EXPECT_EQ(units(1, 15).second, 0);
  EXPECT_EQ(units(1, 16), std::pair(0, 1));
  EXPECT_EQ(units(1, 17).second, 0);
  EXPECT_EQ(units(0, 16).second, 0);
  EXPECT_EQ(units(40, 177), std::pair(8, 3));  // rows 137 to 176; the unit from 176 on is not whole
  EXPECT_EQ(units(16, 32), std::pair(1, 1));
}

constexpr SummaryKind kSummaryKinds[] = {SummaryKind::kMean, SummaryKind::kMax,
                                         SummaryKind::kMinMax, SummaryKind::kMeanStd};

// Rows of summaries of a format, of an even number of values, in `memory`.
StateView SummariesOf(const Bank& bank, int32_t unit, int64_t values, DType format,
                      std::vector<float>& memory) {
  if (format == DType::kF32) return bank.States(unit, values, memory);
  return bank.States(unit, values / 2, memory, std::bit_cast<float>(0x42424242));  // two numbers
}

std::vector<float> ValuesOf(const std::vector<float>& memory, DType format) {
  std::vector<float> values(4 * memory.size() / DTypeBytes(format, 1));
  for (size_t i = 0; i < values.size(); ++i) values[i] = LoadAsF32(format, memory.data(), i);
  return values;
}

// Summaries of a step's units, where those of other units are poison that must stay. Bounds of
// 16-bit numbers are in that format what they are in f32.
std::vector<float> CheckSummary(const Attention& data, SummaryKind kind, int32_t unit,
                                int32_t every = 1) {
  const Shape& shape = data.shape;
  const int64_t values = int64_t{SummaryArrays(kind)} * shape.n_kv_heads * shape.dk;
  const bool exact = kind == SummaryKind::kMax || kind == SummaryKind::kMinMax;
  const auto summaries = [&](DType format) {
    const Outputs want =
        Check(fmt::format("BlockSummary {} heads of {} {} rows {} unit {} of {} kind {} in {}",
                          shape.n_kv_heads, shape.dk, DTypeName(shape.dtype), data.step.n_rows(),
                          unit, every, static_cast<int>(kind), DTypeName(format)),
              [&](const Execute& run) {
                std::vector<float> out;
                run(BlockSummaryArgs{.kv = data.bank.View(),
                                     .seqs = data.step.seqs.data(),
                                     .out = SummariesOf(data.bank, unit, values, format, out),
                                     .n_rows = data.step.n_rows(),
                                     .n_seqs = data.step.n_seqs(),
                                     .unit = unit,
                                     .every = every,
                                     .kind = kind,
                                     .format = format});
                return Outputs{{"out", ValuesOf(out, format), exact ? 0 : 1e-5}};
              });
    return want[0].values;
  };
  std::vector<float> wide = summaries(DType::kF32);
  if (const DType format = SummaryFormat(kind, shape.dtype); format != DType::kF32) {
    const std::vector<float> narrow = summaries(format);
    EXPECT_EQ(narrow.size(), wide.size());
    for (size_t i = 0; i < wide.size(); ++i) {
      if (std::isnan(wide[i])) continue;  // poison
      EXPECT_EQ(narrow[i], wide[i]) << i;
    }
  }
  return wide;
}

TEST_F(ParityTest, BlockSummary) {
  Random random(35);
  for (const Shape& shape : std::vector<Shape>{{4, 2, 64, 64, DType::kBF16},
                                               {4, 2, 64, 64, DType::kF16},
                                               {4, 2, 64, 64, DType::kF32},
                                               {8, 8, 128, 128, DType::kF16},
                                               {6, 3, 96, 64, DType::kQ8_0},
                                               {6, 3, 96, 64, DType::kQ4_0},
                                               {2, 1, 256, 256, DType::kBF16},
                                               {3, 3, 37, 11, DType::kBF16},
                                               {2, 2, 300, 20, DType::kF16}}) {
    const Attention decode(shape, {1, 1, 0, 1, 1, 1}, {128, 64, 16, 1, 65, 96}, random);
    const Attention prompt(shape, {40, 150}, {177, 150}, random);
    const Attention apart(shape, {40, 1}, {177, 144}, random, 16, Planes::kApart);
    const Attention by_head(shape, {40, 1}, {177, 144}, random, 16, Planes::kByHead);
    for (const SummaryKind kind : kSummaryKinds) {
      for (const int32_t unit : {1, 4, 16, 48, 128}) {  // in blocks of 16 tokens
        CheckSummary(decode, kind, unit);
        CheckSummary(prompt, kind, unit);
        CheckSummary(apart, kind, unit);
        CheckSummary(by_head, kind, unit);
      }
      for (const int32_t every : {3, 16, 128}) CheckSummary(prompt, kind, 128, every);
    }
  }
}

// Units of so many tokens that a thread of a card takes several.
TEST_F(ParityTest, BlockSummaryOfLargeUnits) {
  Random random(40);
  for (const Shape& shape : std::vector<Shape>{{2, 2, 128, 16, DType::kF16},
                                               {2, 1, 300, 20, DType::kBF16},
                                               {4, 2, 64, 64, DType::kQ8_0},
                                               {4, 2, 64, 64, DType::kQ4_0}}) {
    const Attention data(shape, {1, 600, 1}, {1300, 1100, 512}, random);
    for (const SummaryKind kind : kSummaryKinds) CheckSummary(data, kind, kMaxScoreUnit);
  }
}

// Deviations of a ten-thousandth of the mean: sums of squared values in f32 would lose them.
TEST_F(ParityTest, DeviationsBesideALargeMean) {
  Random random(41);
  const Shape shape{2, 1, 64, 64, DType::kF32};
  Attention data(shape, {130}, {130}, random);
  const KvView kv = data.bank.View();
  for (int64_t t = 0; t < 130; ++t) {
    std::vector<float> k = random.Floats(64, 0.01f);
    for (float& v : k) v += 100;
    StoreKvHead(kv.k, 0, kv.dk, k.data(),
                kv.k.base + kv.RowIndex(data.bank.TableOff(0), t) * kv.k.row_bytes);
  }
  for (const int32_t unit : {16, 128}) {
    Check(fmt::format("BlockSummary of large means, unit {}", unit), [&](const Execute& run) {
      std::vector<float> out;
      run(BlockSummaryArgs{.kv = kv,
                           .seqs = data.step.seqs.data(),
                           .out = data.bank.States(unit, 2 * 64, out),
                           .n_rows = 130,
                           .n_seqs = 1,
                           .unit = unit,
                           .kind = SummaryKind::kMeanStd});
      std::vector<float> twice;  // the deviation
      for (size_t row = 0; row < out.size(); row += 128) {
        for (size_t i = row; i < row + 64; ++i) twice.push_back(out[i + 64] - out[i]);
      }
      return Outputs{{"out", out}, {"twice", twice, 2e-3}};  // 100 has steps of 8e-6
    });
  }
}

// One token is its own mean, without a deviation, so that its score is its highest logit. Of two
// the mean lies in the middle and the deviation is half of their distance, which is Quest's bound.
TEST_F(ParityTest, MeanAndDeviationOfFewTokensAreTheirBounds) {
  Random random(42);
  constexpr int32_t kTokens = 130;
  for (const DType dtype : kKvFormats) {
    const Attention data({8, 2, 64, 64, dtype}, {kTokens, 8}, {kTokens, 8}, random);
    // Of the first sequence, by its last row.
    const auto scores = [&](auto args) {
      const Outputs want = Check("scores of few tokens", [&](const Execute& run) {
        std::vector<float> out(2 * kTokens, kPoison);
        args.q = data.q.data();
        args.seqs = data.step.seqs.data();
        args.out = out.data();
        args.stride = kTokens;
        args.n_seqs = 2;
        args.n_heads = 8;
        run(args);
        return Outputs{{"out", out}};
      });
      const std::vector<float>& all = want[0].values;
      return std::vector<float>(all.begin(), all.begin() + kTokens / args.unit);
    };
    const auto scores_of = [&](const std::vector<float>& summaries, SummaryKind kind,
                               int32_t unit) {
      std::vector<float> memory;
      const StateView view = data.bank.States(unit, 2 * 2 * 64, memory);
      std::copy(summaries.begin(), summaries.end(), memory.begin());
      return scores(
          BlockScoreArgs{.summaries = view, .n_kv_heads = 2, .dk = 64, .unit = unit, .kind = kind});
    };
    for (const int32_t unit : {1, 2}) {
      const std::vector<float> means = CheckSummary(data, SummaryKind::kMeanStd, unit);
      const std::vector<float> bounds = CheckSummary(data, SummaryKind::kMinMax, unit);
      ASSERT_EQ(means.size(), bounds.size());
      size_t same = 0;  // poison, of no token, is not
      for (size_t i = 0; i < means.size(); ++i) {
        same += std::fabs(means[i] - bounds[i]) <= (unit == 1 ? 0 : 1e-6f) ? 1 : 0;
      }
      const int32_t units = (kTokens + 8) / unit;
      EXPECT_EQ(same, static_cast<size_t>(units) * 2 * 2 * 64);
      const auto by_means = scores_of(means, SummaryKind::kMeanStd, unit);
      const auto by_bounds = scores_of(bounds, SummaryKind::kMinMax, unit);
      for (size_t u = 0; u < by_means.size(); ++u) {
        EXPECT_NEAR(by_means[u], by_bounds[u], unit == 1 ? 0 : 1e-5) << u;
      }
      if (unit > 1) continue;
      EXPECT_EQ(by_means, scores(ScoreArgs{.kv = data.bank.View(), .n_rows = data.step.n_rows()}));
    }
  }
}

StateView MadeUpSummaries(const Bank& bank, int32_t unit, int64_t values, DType format,
                          Random& random, std::vector<float>& memory) {
  const StateView view = SummariesOf(bank, unit, values, format, memory);
  const std::vector<float> all = random.Floats(4 * memory.size() / DTypeBytes(format, 1));
  for (size_t i = 0; i < all.size(); ++i) StoreFromF32(format, memory.data(), i, all[i]);
  return view;
}

TEST_F(ParityTest, BlockScore) {
  Random random(36);
  struct Heads {
    int32_t n_heads, n_kv_heads, dk;
  };
  const std::vector<int32_t> kv_len = {1700, 0, 1, 320};
  const Bank bank(DType::kF32, 1, 1, 1, 64, kv_len, 1700, random);  // for its blocks
  const Step step({1, 0, 1, 3}, kv_len, [&](int32_t s) { return bank.TableOff(s); });
  const std::vector<SeqMeta>& seqs = step.seqs;
  for (const Heads& heads : std::vector<Heads>{{1, 1, 4},
                                               {32, 8, 128},
                                               {6, 6, 80},
                                               {12, 2, 256},
                                               {10, 5, 64},
                                               {14, 2, 64},
                                               {16, 1, 128},
                                               {20, 1, 32},
                                               {40, 1, 64},
                                               {5, 1, 37},
                                               {4, 2, 320}}) {
    const auto q = random.Floats(static_cast<size_t>(5 * heads.n_heads * heads.dk));
    for (const SummaryKind kind : kSummaryKinds) {
      for (const int32_t unit : {16, 64, 128}) {
        const int64_t stride = 1700 / unit + 5;
        const size_t units = seqs.size() * static_cast<size_t>(stride);
        const DType format = kind != SummaryKind::kMinMax || unit == 64 ? DType::kF32
                             : unit == 16                               ? DType::kBF16
                                                                        : DType::kF16;
        std::vector<float> memory;
        const StateView summaries =
            MadeUpSummaries(bank, unit, int64_t{SummaryArrays(kind)} * heads.n_kv_heads * heads.dk,
                            format, random, memory);
        for (const HeadReduce reduce : kHeadReduces) {
          for (const int32_t lists : {1, heads.n_kv_heads}) {
            Check(fmt::format("BlockScore {}/{} heads of {} kind {} in {} unit {} by {} lists {}",
                              heads.n_heads, heads.n_kv_heads, heads.dk, static_cast<int>(kind),
                              DTypeName(format), unit, static_cast<int>(reduce), lists),
                  [&](const Execute& run) {
                    std::vector<float> out(units * static_cast<size_t>(lists), kPoison);
                    // None, one, and more than some sequences have units.
                    const int32_t sinks = unit == 16 ? 0 : unit == 64 ? 1 : 5;
                    run(BlockScoreArgs{.q = q.data(),
                                       .summaries = summaries,
                                       .seqs = seqs.data(),
                                       .out = out.data(),
                                       .stride = stride,
                                       .n_seqs = static_cast<int32_t>(seqs.size()),
                                       .n_heads = heads.n_heads,
                                       .n_kv_heads = heads.n_kv_heads,
                                       .dk = heads.dk,
                                       .lists = lists,
                                       .unit = unit,
                                       .sinks = sinks,
                                       .kind = kind,
                                       .format = format,
                                       .heads = reduce,
                                       .scale = 0.125f});
                    return Outputs{{"out", out}};
                  });
          }
        }
      }
    }
  }
}

// More units than a card has warps at a time: each takes several, and asks for their summaries
// ahead.
TEST_F(ParityTest, BlockScoreOfManyUnits) {
  Random random(38);
  constexpr int32_t kUnits = 9000;
  const std::vector<int32_t> kv_len = {16 * kUnits - 3};
  const Bank bank(DType::kF32, 1, 1, 1, 64, kv_len, kv_len[0], random);  // for its blocks
  const Step step({1}, kv_len, [&](int32_t s) { return bank.TableOff(s); });
  for (const int32_t n_kv_heads : {1, 2, 5}) {
    const int32_t dk = n_kv_heads == 2 ? 128 : 48;
    const int32_t n_heads = 8 * n_kv_heads;
    const auto q = random.Floats(static_cast<size_t>(n_heads * dk));
    for (const auto& [kind, format] : {std::pair{SummaryKind::kMean, DType::kF32},
                                       {SummaryKind::kMinMax, DType::kF32},
                                       {SummaryKind::kMinMax, DType::kBF16}}) {
      std::vector<float> memory;
      const StateView summaries = MadeUpSummaries(
          bank, 16, int64_t{SummaryArrays(kind)} * n_kv_heads * dk, format, random, memory);
      Check(fmt::format("BlockScore {} KV heads of {} units kind {} in {}", n_kv_heads, kUnits,
                        static_cast<int>(kind), DTypeName(format)),
            [&](const Execute& run) {
              std::vector<float> out(static_cast<size_t>(kUnits * n_kv_heads), kPoison);
              run(BlockScoreArgs{.q = q.data(),
                                 .summaries = summaries,
                                 .seqs = step.seqs.data(),
                                 .out = out.data(),
                                 .stride = kUnits,
                                 .n_seqs = 1,
                                 .n_heads = n_heads,
                                 .n_kv_heads = n_kv_heads,
                                 .dk = dk,
                                 .lists = n_kv_heads,
                                 .unit = 16,
                                 .kind = kind,
                                 .format = format,
                                 .heads = HeadReduce::kSum,
                                 .scale = 0.125f});
              return Outputs{{"out", out}};
            });
    }
  }
}

// Lengths beside the edges of the parts whose directions are added up, keys of zeros among them.
TEST_F(ParityTest, KeyScore) {
  Random random(39);
  struct Case {
    Shape shape;
    std::vector<int32_t> q_len, kv_len;
    Planes planes = Planes::kTogether;
  };
  for (const Case& c :
       std::vector<Case>{{{8, 2, 64, 64, DType::kF16}, {1, 0, 9, 1}, {700, 40, 9, 1}},
                         {{4, 2, 128, 128, DType::kBF16}, {1, 1, 1}, {1025, 1024, 513}},
                         {{4, 4, 32, 32, DType::kF32}, {17}, {300}},
                         {{6, 3, 96, 64, DType::kQ8_0}, {1, 40}, {130, 177}},
                         {{6, 3, 96, 64, DType::kQ4_0}, {1, 40}, {130, 177}},
                         {{2, 1, 256, 256, DType::kF16}, {1, 1}, {511, 65}},
                         {{3, 3, 37, 11, DType::kBF16}, {1, 1}, {512, 65}, Planes::kApart},
                         {{8, 2, 64, 64, DType::kF16}, {1, 1}, {300, 65}, Planes::kByHead},
                         {{2, 2, 300, 20, DType::kF16}, {1}, {90}},
                         {{2, 1, 16, 16, DType::kF16}, {1}, {70001}}}) {
    Attention data(c.shape, c.q_len, c.kv_len, random, 16, c.planes);
    const KvView kv = data.bank.View();
    const std::vector<float> zeros(static_cast<size_t>(kv.dk));
    StoreKvHead(kv.k, 0, kv.dk, zeros.data(),
                kv.k.base + kv.RowIndex(data.bank.TableOff(0), 5) * kv.k.row_bytes);
    const int64_t stride = *std::max_element(c.kv_len.begin(), c.kv_len.end()) + 7;
    for (const KeyScoreKind kind : {KeyScoreKind::kNorm, KeyScoreKind::kUnlike}) {
      Check(fmt::format("KeyScore {} heads of {} {} kind {} of {} tokens", c.shape.n_kv_heads,
                        c.shape.dk, DTypeName(c.shape.dtype), static_cast<int>(kind),
                        fmt::join(c.kv_len, "+")),
            [&](const Execute& run) {
              std::vector<float> out(c.kv_len.size() * static_cast<size_t>(c.shape.n_kv_heads) *
                                         static_cast<size_t>(stride),
                                     kPoison);
              run(KeyScoreArgs{.kv = kv,
                               .seqs = data.step.seqs.data(),
                               .out = out.data(),
                               .stride = stride,
                               .n_seqs = data.step.n_seqs(),
                               .kind = kind});
              return Outputs{{"out", out, 1e-5}};
            });
    }
  }
}

TEST_F(ParityTest, AgedScores) {
  Random random(40);
  const std::vector<int32_t> lens = {600, 40, 0, 257};
  const Bank bank(DType::kF16, 2, 8, 8, 16, lens, 600, random);
  const Step table({1, 9, 0, 30}, lens, [&](int32_t s) { return bank.TableOff(s); });
  std::vector<SeqMeta> steps = table.seqs;
  for (SeqMeta& step : steps) step.kv_len += 300;
  constexpr int64_t kStride = 610;
  for (const int32_t lists : {1, 2}) {
    const auto n_lists = lens.size() * static_cast<size_t>(lists);
    std::vector<int32_t> pos(bank.n_rows() * static_cast<size_t>(lists));
    for (size_t i = 0; i < pos.size(); ++i) pos[i] = static_cast<int32_t>(i * 37 % 340);
    for (const int32_t ring : {1, 5}) {
      std::vector<float> in = random.Floats(n_lists * static_cast<size_t>(ring) * kStride);
      for (const auto& [rule, recent, sinks] :
           {std::tuple{ring > 1 ? AgeRule::kPerQuery : AgeRule::kNothing, 0, 0},
            std::tuple{ring > 1 ? AgeRule::kPerQuery : AgeRule::kNothing, 50, 0},
            std::tuple{AgeRule::kStrided, 0, 0}, std::tuple{AgeRule::kStrided, 9, 7}}) {
        for (const bool with_pos : {false, true}) {
          Check(fmt::format("AgedScores rule {} {} lists ring {} sinks {} recent {}{}",
                            static_cast<int>(rule), lists, ring, sinks, recent,
                            with_pos ? " positions" : ""),
                [&](const Execute& run) {
                  KvView kv = bank.View();
                  kv.pos = with_pos ? pos.data() : nullptr;
                  kv.pos_lists = lists;
                  std::vector<float> out(n_lists * kStride, kPoison);
                  run(AgedScoresArgs{.in = {in.data(), kStride, ring},
                                     .kv = kv,
                                     .seqs = table.seqs.data(),
                                     .steps = steps.data(),
                                     .out = out.data(),
                                     .stride = kStride,
                                     .lists = lists,
                                     .n_seqs = table.n_seqs(),
                                     .sinks = sinks,
                                     .recent = recent,
                                     .rule = rule});
                  return Outputs{{"out", out, 0}};
                });
        }
      }
    }
  }
}

TEST_F(ParityTest, Pool) {
  Random random(34);
  const std::vector<int32_t> n = {0, 1, 3, 40, 20011};
  for (const int32_t lists : {1, 3}) {
    const int64_t stride = n.back() + 5;
    const auto in =
        random.Floats(n.size() * static_cast<size_t>(lists) * static_cast<size_t>(stride));
    for (const PoolKind kind : {PoolKind::kMean, PoolKind::kMax}) {
      for (const int32_t kernel : {1, 5, 7, 15, 63}) {
        Check(fmt::format("Pool {} lists {} kernel {}", lists, static_cast<int>(kind), kernel),
              [&](const Execute& run) {
                std::vector<float> out(in.size(), kPoison);
                run(PoolArgs{.in = in.data(),
                             .out = out.data(),
                             .n = n.data(),
                             .stride = stride,
                             .lists = lists,
                             .n_seqs = static_cast<int32_t>(n.size()),
                             .kernel = kernel,
                             .kind = kind});
                return Outputs{{"out", out, kind == PoolKind::kMax ? 0 : 1e-5}};
              });
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_score_test
