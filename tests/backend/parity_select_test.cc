// Parity of the score ops. Choices are compared exactly.
#include <fmt/format.h>

#include <tuple>

#include "parity_data.h"

namespace omnikv::parity::parity_select_test {
namespace {

TEST_F(ParityTest, ScoreReduce) {
  Random random(21);
  struct Heads {
    int32_t n_heads, lists;
    HeadReduce reduce;
    int32_t sinks;
    uint64_t kv_heads = 0;
    int32_t n_kv_heads = 0;
  };
  for (const auto& [n_heads, lists, reduce, sinks, kv_heads, n_kv_heads] :
       std::vector<Heads>{{1, 1, HeadReduce::kMax, 0},
                          {4, 1, HeadReduce::kMax, 0},
                          {7, 1, HeadReduce::kMax, 3},
                          {8, 2, HeadReduce::kSum, 0},
                          {12, 12, HeadReduce::kSum, 1},
                          {24, 2, HeadReduce::kMax, 70},  // more than some rows have tokens
                          {32, 8, HeadReduce::kSum, 70},
                          {4, 1, HeadReduce::kMax, 0, 0b10, 2},
                          {24, 1, HeadReduce::kMax, 3, 0b101001, 6},  // in several runs
                          {32, 2, HeadReduce::kSum, 0, 0b10010110, 8},
                          {64, 1, HeadReduce::kMax, 0, uint64_t{1} << 63, 64}}) {
    for (const auto& rows :
         {std::vector<RowMeta>{{0, 0}}, std::vector<RowMeta>{{0, 100}, {1, 37}, {1, 38}},
          std::vector<RowMeta>{{1, 40000}}}) {
      const auto n_rows = static_cast<int32_t>(rows.size());
      const int64_t stride = rows.back().pos + 70;
      const auto logits = random.Floats(static_cast<size_t>(n_rows * n_heads * stride), 5.0f);
      const auto lse = random.Floats(static_cast<size_t>(n_rows * n_heads), 3.0f);
      for (int32_t ring : {1, 4}) {
        for (bool softmax : {true, false}) {
          Check(fmt::format("ScoreReduce heads {} of {:#x} lists {} rows {} ring {} softmax {}",
                            n_heads, kv_heads, lists, n_rows, ring, softmax),
                [&](const Execute& run) {
                  std::vector<float> out(static_cast<size_t>(2 * lists * ring * stride), kPoison);
                  run(ScoreReduceArgs{.logits = logits.data(),
                                      .lse = softmax ? lse.data() : nullptr,
                                      .out = out.data(),
                                      .rows = rows.data(),
                                      .stride = stride,
                                      .ring = ring,
                                      .n_heads = n_heads,
                                      .lists = lists,
                                      .sinks = sinks,
                                      .n_rows = n_rows,
                                      .heads = reduce,
                                      .kv_heads = {kv_heads},
                                      .n_kv_heads = n_kv_heads});
                  const bool exact = !softmax && reduce == HeadReduce::kMax;
                  return Outputs{{"out", out, exact ? 0 : 1e-5}};
                });
        }
      }
    }
  }
}

// A batch's step: rows in any order, slots without a row.
TEST_F(ParityTest, ScoreReduceOfABatch) {
  Random random(24);
  constexpr int32_t kSlots = 7;
  constexpr int32_t kHeads = 4;
  const std::vector<RowMeta> rows = {{5, 0}, {0, 1500}, {6, 37}, {2, 40}, {3, 901}};
  const int64_t stride = 1504;
  const auto logits = random.Floats(rows.size() * kHeads * static_cast<size_t>(stride), 5.0f);
  const auto lse = random.Floats(rows.size() * kHeads, 3.0f);
  for (int32_t ring : {1, 3}) {
    for (bool softmax : {true, false}) {
      Check(fmt::format("ScoreReduce of a batch, ring {} softmax {}", ring, softmax),
            [&](const Execute& run) {
              std::vector<float> out(static_cast<size_t>(kSlots * ring * stride), kPoison);
              run(ScoreReduceArgs{.logits = logits.data(),
                                  .lse = softmax ? lse.data() : nullptr,
                                  .out = out.data(),
                                  .rows = rows.data(),
                                  .stride = stride,
                                  .ring = ring,
                                  .n_heads = kHeads,
                                  .n_rows = static_cast<int32_t>(rows.size())});
              return Outputs{{"out", out, softmax ? 1e-5 : 0}};
            });
    }
  }
}

// Of listed tokens and a range behind them, which may end past the row; the others stay.
TEST_F(ParityTest, ScoreReduceOfSomeTokens) {
  Random random(28);
  const std::vector<RowMeta> rows = {{2, 900}, {0, 40}, {3, 5000}};
  const std::vector<int32_t> range = {30, 42, 0, 0, 901, 901, 4000, 4700};  // of four sequences
  constexpr int64_t kStride = 5003;
  constexpr int32_t kHeads = 8;
  const auto logits = random.Floats(rows.size() * kHeads * kStride, 5.0f);
  const auto lse = random.Floats(rows.size() * kHeads, 3.0f);
  for (int32_t lists : {1, 2, 8}) {
    const Lists listed({30, 7, 901, 4000}, lists, 1, 777, random);
    for (int32_t ring : {1, 3}) {
      for (bool softmax : {true, false}) {
        for (HeadReduce heads : {HeadReduce::kMax, HeadReduce::kSum}) {
          for (int32_t form = 0; form < (ring == 1 ? 8 : 4); ++form) {
            const bool with_range = form % 2 != 0;
            const bool by_token = form / 2 % 2 != 0;
            const bool by_place = form / 4 != 0;
            Check(fmt::format("ScoreReduce of some, lists {} ring {} softmax {} range {}{}{}",
                              lists, ring, softmax, with_range, by_token ? " by token" : "",
                              by_place ? " by place" : ""),
                  [&](const Execute& run) {
                    const auto size = static_cast<size_t>(4 * lists * ring * kStride);
                    std::vector<float> out(size, kPoison);
                    SomeTokens some = listed.Tokens();
                    if (with_range) some.bounds = range.data();
                    some.by_place = by_place;
                    run(ScoreReduceArgs{.logits = logits.data(),
                                        .lse = softmax ? lse.data() : nullptr,
                                        .out = out.data(),
                                        .rows = rows.data(),
                                        .stride = kStride,
                                        .ring = ring,
                                        .n_heads = kHeads,
                                        .lists = lists,
                                        .sinks = 100,
                                        .n_rows = static_cast<int32_t>(rows.size()),
                                        .heads = heads,
                                        .only = some,
                                        .by_token = by_token});
                    const bool exact = !softmax && heads == HeadReduce::kMax;
                    return Outputs{{"out", out, exact ? 0 : 1e-5}};
                  });
          }
        }
      }
    }
  }
}

// Of units of tokens, of which the last one of a row may be partly there.
TEST_F(ParityTest, ScoreReduceOfUnits) {
  Random random(29);
  constexpr int32_t kHeads = 12;
  const std::vector<RowMeta> rows = {{1, 9006}, {0, 7}, {2, 8}, {3, 40000}};
  for (const int64_t stride : {5001, 5004}) {
    const auto logits = random.Floats(rows.size() * kHeads * static_cast<size_t>(stride), 5.0f);
    const auto lse = random.Floats(rows.size() * kHeads, 3.0f);
    for (const bool softmax : {true, false}) {
      Check(fmt::format("ScoreReduce of units, stride {} softmax {}", stride, softmax),
            [&](const Execute& run) {
              std::vector<float> out(rows.size() * static_cast<size_t>(stride), kPoison);
              run(ScoreReduceArgs{.logits = logits.data(),
                                  .lse = softmax ? lse.data() : nullptr,
                                  .out = out.data(),
                                  .rows = rows.data(),
                                  .stride = stride,
                                  .n_heads = kHeads,
                                  .unit = 8,
                                  .sinks = 2,
                                  .n_rows = static_cast<int32_t>(rows.size())});
              return Outputs{{"out", out, softmax ? 1e-5 : 0}};
            });
    }
  }
}

TEST_F(ParityTest, PlanRange) {
  std::vector<SeqMeta> seqs = {SeqMeta{}};  // a slot of a batch that is empty
  for (int32_t n : {1, 10, 300, 5000}) {
    for (int32_t generated : {0, 1, 8, 300, 5000}) {
      seqs.push_back({.q_begin = 0,
                      .q_len = 1,
                      .kv_len = n,
                      .table_off = 0,
                      .prompt_len = std::max(0, n - generated)});
    }
    seqs.push_back({.q_begin = 0, .q_len = 1, .kv_len = n, .table_off = 0, .prompt_len = n + 50});
  }
  const auto n_seqs = static_cast<int32_t>(seqs.size());
  for (int32_t budget : {1, 64, 10000}) {
    for (int32_t tail : {0, 5, 256, kWholeAnswer}) {
      for (const auto& [min_recent, share, dense_below, unit] :
           std::vector<std::tuple<int32_t, double, int32_t, int32_t>>{{0, 0.0, 0, 1},
                                                                      {1, 0.0, 0, 1},
                                                                      {16, 0.0, 300, 1},
                                                                      {0, 1.0, 0, 1},
                                                                      {0, 1e-4, 4999, 1},
                                                                      {16, 0.3, 10, 1},
                                                                      {0, 0.0, 1 << 30, 1},
                                                                      {0, 0.0, 0, 16},
                                                                      {1, 0.0, 0, 16},
                                                                      {3, 0.3, 10, 7},
                                                                      {1, 0.0, 300, 128}}) {
        const RangeRule rule{.share = share,
                             .budget = budget,
                             .tail = tail,
                             .min_recent = min_recent,
                             .dense_below = dense_below,
                             .unit = unit};
        Check("PlanRange", [&](const Execute& run) {
          std::vector<int32_t> bounds(seqs.size() * 2, -1);
          std::vector<int32_t> candidates(seqs.size(), -1);
          std::vector<int32_t> pick(seqs.size(), -1);
          run(PlanRangeArgs{.seqs = seqs.data(),
                            .n_seqs = n_seqs,
                            .rule = rule,
                            .bounds = bounds.data(),
                            .n_candidates = candidates.data(),
                            .n_pick = pick.data()});
          for (size_t s = 0; s < seqs.size(); ++s) {  // whatever the lengths
            const int32_t n = seqs[s].kv_len;
            const int32_t units = (n + unit - 1) / unit;
            EXPECT_GE(bounds[2 * s], 0);
            EXPECT_EQ(bounds[2 * s + 1], n);
            EXPECT_EQ(std::min(n, candidates[s] * unit), bounds[2 * s]);
            EXPECT_GE(pick[s], 0);
            if (n <= dense_below) {
              EXPECT_EQ(bounds[2 * s], 0);
              continue;
            }
            // The tail is read besides the budget, the rest is the budget's, as far as there is
            // any.
            const int32_t answer = n > seqs[s].prompt_len ? units - seqs[s].prompt_len / unit : 0;
            const int32_t besides = std::min(answer, tail);
            const int32_t read = units - candidates[s] + pick[s];
            EXPECT_EQ(read, std::min(units, besides + BudgetAt(budget, share, units)));
            EXPECT_LE(candidates[s], units - besides);
          }
          std::vector<int32_t> alone(bounds.size(), -1);
          run(PlanRangeArgs{
              .seqs = seqs.data(), .n_seqs = n_seqs, .rule = rule, .bounds = alone.data()});
          EXPECT_EQ(alone, bounds);
          return Outputs{{"bounds", AsFloats(bounds), 0},
                         {"n_candidates", AsFloats(candidates), 0},
                         {"n_pick", AsFloats(pick), 0}};
        });
      }
    }
  }
}

// Splits as a person would write them down.
TEST_F(ParityTest, SplitsOfWhatIsRead) {
  const auto split = [](const RangeRule& rule, int32_t n, int32_t prompt_len) {
    const RangeSplit s = SplitRange(rule, n, prompt_len);
    return std::vector<int32_t>{s.recent, s.n_pick, s.besides};
  };
  using Split = std::vector<int32_t>;  // recent, chosen, besides the budget
  const RangeRule plain{.budget = 24, .tail = 8};
  EXPECT_EQ(split(plain, 100, 100), (Split{0, 24, 0}));
  EXPECT_EQ(split(plain, 101, 100), (Split{1, 24, 1}));
  EXPECT_EQ(split(plain, 150, 100), (Split{8, 24, 8}));
  EXPECT_EQ(split(plain, 20, 10), (Split{8, 12, 8}));  // everything
  EXPECT_EQ(split(plain, 5, 0), (Split{5, 0, 5}));
  EXPECT_EQ(split({.budget = 24, .tail = kWholeAnswer}, 1100, 100), (Split{1000, 24, 1000}));
  // A window of 16 last queries takes of the budget what the tail does not have.
  const RangeRule window{.budget = 24, .tail = 8, .min_recent = 16};
  EXPECT_EQ(split(window, 100, 100), (Split{16, 8, 0}));
  EXPECT_EQ(split(window, 103, 100), (Split{16, 11, 3}));
  EXPECT_EQ(split(window, 190, 100), (Split{16, 16, 8}));
  EXPECT_EQ(split({.share = 0.25, .budget = 1000, .tail = 8}, 110, 100), (Split{8, 28, 8}));
  EXPECT_EQ(split({.budget = 24, .tail = 8, .dense_below = 101}, 101, 100), (Split{101, 0, 1}));
  // Pages of 16 tokens: 101 tokens are in 7, of which one is read as the last.
  const RangeRule pages{.budget = 4, .min_recent = 1, .unit = 16};
  EXPECT_EQ(split(pages, 101, 100), (Split{1, 3, 0}));
  EXPECT_EQ(split(pages, 112, 100), (Split{1, 3, 0}));
  EXPECT_EQ(split(pages, 40, 30), (Split{1, 2, 0}));  // everything
  // Generated tokens are in the last two.
  EXPECT_EQ(split({.budget = 4, .tail = 8, .unit = 16}, 101, 95), (Split{2, 4, 2}));
}

TEST_F(ParityTest, BudgetsByShare) {
  EXPECT_EQ(BudgetAt(64, 0, 10), 64);
  EXPECT_EQ(BudgetAt(10000, 0.25, 5), 2);  // rounded up
  EXPECT_EQ(BudgetAt(10000, 1e-6, 5), 1);
  EXPECT_EQ(BudgetAt(10000, 1, 777), 777);
  EXPECT_EQ(BudgetAt(100, 0.5, 777), 100);
  EXPECT_EQ(BudgetAt(10000, 0.25, 47, 8), 11);  // rounded down
  EXPECT_EQ(BudgetAt(10000, 0.25, 30, 8), 8);
  EXPECT_EQ(BudgetAt(5, 0.25, 30, 8), 5);
}

constexpr Scores kAllScores[] = {Scores::kNormal,   Scores::kManyTies, Scores::kAllEqual,
                                 Scores::kPositive, Scores::kNarrow,   Scores::kFalling,
                                 Scores::kBroken};

TEST_F(ParityTest, TopK) {
  Random random(22);
  for (Scores kind : kAllScores) {
    for (int32_t window : {1, 3, 8}) {
      CheckTopK(kind, window, {{1, 0, 5}}, 8, random);
      CheckTopK(kind, window, {{2, 1, 1}}, 8, random);
      CheckTopK(kind, window, {{100, 90, 40}, {7, 3, 9}, {50, 50, 0}}, 64, random);
      CheckTopK(kind, window, {{5, 5, 2}, {1000, 777, 100}}, 33, random);
      CheckTopK(kind, window, {{3000, 2999, -4}}, 16, random);
      CheckTopK(kind, window, {{2001, 2000, 500}, {4096, 4096, 7}}, 500, random);
      CheckTopK(kind, window, {{6001, 6000, 1000}, {8192, 8190, 8189}}, 8192, random);
      CheckTopK(kind, window, {{16384, 16384, 2048}, {9001, 9000, 1}}, 2048, random);
    }
    CheckTopK(kind, 1, {{4096, 4096, 64}, {4096, 4090, 500}}, 512, random);
    CheckTopK(kind, 1, {{70001, 70000, 2048}}, 2048, random);
    CheckTopK(kind, 1, {{131120, 131111, 2048}}, 2048, random);
    CheckTopK(kind, 1, {{131120, 131111, 1000}}, 1000, random);
    CheckTopK(kind, 1, {{70001, 70000, 60000}}, 60000, random);
    CheckTopK(kind, 1, {{300003, 300002, 3000}}, 3000, random);
    CheckTopK(kind, 4, {{40003, 40000, 1000}, {900, 800, 300}}, 1000, random);
  }
}

// Sequences of a batch: of any lengths, some empty, for one cluster of blocks each and for one
// block each.
TEST_F(ParityTest, TopKOfABatch) {
  Random random(25);
  for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kBroken}) {
    CheckTopK(kind, 1,
              {{0, 0, 512},
               {20001, 19800, 512},
               {40, 40, 512},
               {0, 0, 0},
               {17000, 16990, 300},
               {600, 599, 512},
               {1, 0, 512},
               {19000, 18000, 511}},
              512, random);
    CheckTopK(kind, 3, {{0, 0, 64}, {17000, 16800, 64}, {2, 1, 64}, {0, 0, 64}, {300, 299, 64}}, 64,
              random);
    CheckTopK(kind, 1, {{0, 0, 64}, {3000, 2800, 64}, {90, 80, 64}, {64, 64, 64}}, 64, random);
    std::vector<Choice> many;  // as many as decode together
    for (int32_t s = 0; s < 16; ++s) many.push_back({1200 * s, 1199 * s, 256});
    CheckTopK(kind, 1, many, 256, random);
    // More lists than a card has multiprocessors.
    CheckTopK(kind, 1, {{9001, 9000, 64}, {5000, 4990, 64}, {12000, 11000, 33}}, 64, random, 48);
  }
}

// Few of so many tokens that a cluster of blocks takes a list; lists of any lengths beside each
// other.
TEST_F(ParityTest, TopKOfFewOfMany) {
  Random random(27);
  for (Scores kind : kAllScores) {
    CheckTopK(kind, 1,
              {{131120, 131111, 128},
               {40000, 39990, 127},
               {2000, 1990, 128},
               {100, 100, 128},
               {20000, 19997, 0},
               {0, 0, 128}},
              128, random, 3);
    CheckTopK(kind, 1, {{32768, 32768, 1}, {20000, 16385, 100}}, 100, random, 9, {0, 1});
    CheckTopK(kind, 1, {{17004, 17001, 128}}, 128, random, 200);
    CheckTopK(kind, 1, {{131120, 131119, 64}}, 64, random, 17);
  }
}

// A list for each KV head; sequences that keep their choice, among them ones without candidates.
TEST_F(ParityTest, TopKOfLists) {
  Random random(26);
  const std::vector<Choice> choices = {{5, 5, 2}, {1000, 777, 100}, {0, 0, 9}, {800, 800, 33}};
  for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kBroken}) {
    for (int32_t window : {1, 3}) {
      for (int32_t lists : {1, 2, 8}) {
        for (const auto& keep :
             {std::vector<int32_t>{}, {0, 1, 0, 0}, {-1, 0, 1, 7}, {0, 0, 0, 0}}) {
          CheckTopK(kind, window, choices, 120, random, lists, keep);
        }
      }
    }
    CheckTopK(kind, 1, {{40003, 40000, 1000}, {900, 800, 300}, {70000, 66000, 5}}, 1000, random, 4,
              {0, 0, 1});
    CheckTopK(kind, 1, {{300, 300, 1000}, {270001, 270000, 999}}, 1000, random, 2, {0, 0});
  }
}

// The tokens of whole units, and those behind them: for a block of few threads, one block, and
// clusters. Lists have room for all, and none more.
TEST_F(ParityTest, TopKOfUnits) {
  Random random(30);
  for (const Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kBroken}) {
    CheckTopK(kind, 1, {{7, 5, 3}, {900, 890, 40}, {70, 64, 60}, {80, 70, 0}, {900, 800, -1}}, 488,
              random, 1, {}, 0, 8);
    CheckTopK(kind, 1, {{9006, 9001, 40}, {16, 15, 5}}, 327, random, 2, {0, 1}, 0, 8);
    CheckTopK(kind, 1, {{40007, 39999, 1000}, {26000, 25000, 900}}, 8007, random, 1, {}, 0, 8);
    CheckTopK(kind, 1, {{180007, 180001, 2000}}, 16008, random, 1, {}, 0, 8);
    CheckTopK(kind, 1, {{600006, 600005, 300}}, 2407, random, 1, {}, 0, 8);
  }
}

// As many as a block of few threads takes, one block, and clusters.
TEST_F(ParityTest, TopKAmongListedTokens) {
  Random random(27);
  for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kAllEqual, Scores::kBroken}) {
    for (int32_t window : {1, 3}) {
      for (int32_t lists : {1, 4}) {
        CheckTopK(kind, window, {{1, 0, 5}, {900, 890, 40}, {70, 70, 60}}, 64, random, lists, {},
                  61);
        CheckTopK(kind, window, {{5000, 4990, 300}, {2100, 2000, 7}}, 512, random, lists, {0, 1},
                  1800);
      }
      CheckTopK(kind, window, {{20001, 20000, 2048}, {9000, 8000, 2048}}, 2048, random, 1, {},
                8192);
      CheckTopK(kind, window, {{40001, 40000, 1000}}, 1000, random, 1, {}, 30000);
    }
    CheckTopK(kind, 1, {{100001, 100000, 1000}}, 1000, random, 1, {}, 70000);
  }
}

TEST_F(ParityTest, NextToken) {
  Random random(23);
  for (int64_t vocab : {1, 5, 33, 1000, 128256}) {
    for (int32_t n_rows : {1, 2, 7, 16}) {
      // Some rows of kBroken are not finite in all of their values.
      for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kAllEqual, Scores::kBroken}) {
        auto logits = MakeScores(kind, static_cast<size_t>(n_rows * vocab), random);
        if (kind == Scores::kNormal) logits[0] = std::numeric_limits<float>::lowest();
        Check(
            fmt::format("NextToken of {} rows {} kind {}", vocab, n_rows, static_cast<int>(kind)),
            [&](const Execute& run) {
              constexpr int32_t kRing = 3;
              std::vector<int32_t> tokens(static_cast<size_t>(n_rows), -1);
              std::vector<int32_t> out(static_cast<size_t>(n_rows * kRing), -1);
              std::vector<RowMeta> rows;
              std::vector<SeqMeta> seqs;
              for (int32_t r = 0; r < n_rows; ++r) {
                rows.push_back({n_rows - 1 - r, 100 + r});
                seqs.push_back({.q_begin = r,
                                .q_len = 1,
                                .kv_len = 101 + r,
                                .table_off = 4 * r,
                                .prompt_len = 9});
              }
              std::vector<uint32_t> step = {7};
              for (int turn = 0; turn < 2; ++turn) {
                run(NextTokenArgs{.logits = logits.data(),
                                  .tokens = tokens.data(),
                                  .rows = rows.data(),
                                  .seqs = seqs.data(),
                                  .out = out.data(),
                                  .step = step.data(),
                                  .vocab = vocab,
                                  .ring = kRing,
                                  .n_rows = n_rows});
              }
              std::vector<int32_t> meta = {static_cast<int32_t>(step[0])};
              for (const RowMeta& r : rows) meta.insert(meta.end(), {r.seq, r.pos});
              for (const SeqMeta& s : seqs) {
                meta.insert(meta.end(), {s.q_begin, s.q_len, s.kv_len, s.table_off, s.prompt_len});
              }
              return Outputs{{"tokens", AsFloats(tokens), 0},
                             {"out", AsFloats(out), 0},
                             {"meta", AsFloats(meta), 0}};
            });
      }
    }
  }
}

// Words of 32 bits, in halves that floats hold.
std::vector<float> Halves(const std::vector<uint32_t>& words) {
  std::vector<float> halves;
  for (const uint32_t w : words) {
    halves.insert(halves.end(), {static_cast<float>(w >> 16), static_cast<float>(w & 0xffff)});
  }
  return halves;
}

// Several draws of each row, every row with settings of its own. Weights are whole numbers, so that
// nothing rounds.
TEST_F(ParityTest, NextTokenDraws) {
  const std::vector<SampleMeta> settings = {
      {.temperature = 1},
      {.temperature = 0.8, .top_p = 0.95, .top_k = 40},
      {.repeat_penalty = 1.5f},
      {.temperature = 1.3, .top_p = 0.7, .repeat_penalty = 1.2f},
      {.temperature = 100, .min_p = 0.9},
      {.temperature = 2, .top_p = 0.999, .min_p = 0.01, .top_k = 777},
      {.temperature = 0.01, .top_p = 1e-9},
      {.temperature = 1, .repeat_penalty = 0.5f, .top_k = 1},
      {.temperature = 30, .top_p = 0.5, .min_p = 1e-3, .repeat_penalty = 3, .top_k = 60000},
      {.temperature = 1, .min_p = 1},
  };
  Random random(25);
  size_t next = 0;  // of the settings
  for (int64_t vocab : {1, 5, 33, 1000, 16387, 128256, 262208}) {
    for (size_t n_rows : {1, 2, 7, 16}) {
      for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kAllEqual, Scores::kPositive,
                          Scores::kNarrow, Scores::kBroken}) {
        const bool large = static_cast<int64_t>(n_rows) * vocab > 40000;
        if (large && (n_rows > 1 || (kind != Scores::kNormal && kind != Scores::kManyTies)))
          continue;
        auto logits = MakeScores(kind, n_rows * static_cast<size_t>(vocab), random);
        if (kind == Scores::kNormal) {
          for (float& v : logits) v *= 4;
        }
        std::vector<SampleMeta> metas;
        std::vector<uint32_t> was_seen;
        for (size_t r = 0; r < n_rows; ++r) {
          metas.push_back(settings[next++ % settings.size()]);
          metas.back().random = static_cast<uint64_t>(random.Int(0, 1 << 30)) << 20;
          for (int64_t w = 0; w < SeenWords(vocab); ++w) {
            was_seen.push_back(static_cast<uint32_t>(random.Int(0, 1 << 30)) * 5u);
          }
        }
        Check(fmt::format("NextToken draws {} rows {} kind {}", vocab, n_rows,
                          static_cast<int>(kind)),
              [&](const Execute& run) {
                constexpr int32_t kRing = 8;
                const auto rows_32 = static_cast<int32_t>(n_rows);
                std::vector<SampleMeta> sample = metas;
                std::vector<uint32_t> seen = was_seen;
                std::vector<int32_t> tokens(n_rows, -1);
                std::vector<int32_t> out(n_rows * kRing, -1);
                std::vector<RowMeta> rows;
                std::vector<SeqMeta> seqs(n_rows);
                for (int32_t r = 0; r < rows_32; ++r) rows.push_back({r, 0});
                std::vector<uint32_t> step = {6};
                for (int turn = 0; turn < 3; ++turn) {
                  run(NextTokenArgs{.logits = logits.data(),
                                    .tokens = tokens.data(),
                                    .rows = rows.data(),
                                    .seqs = seqs.data(),
                                    .sample = sample.data(),
                                    .seen = seen.data(),
                                    .out = out.data(),
                                    .step = step.data(),
                                    .vocab = vocab,
                                    .ring = kRing,
                                    .n_rows = rows_32});
                }
                std::vector<uint32_t> states;
                for (const SampleMeta& m : sample) {
                  states.push_back(static_cast<uint32_t>(m.random));
                  states.push_back(static_cast<uint32_t>(m.random >> 32));
                }
                return Outputs{{"tokens", AsFloats(tokens), 0},
                               {"out", AsFloats(out), 0},
                               {"states", Halves(states), 0},
                               {"seen", Halves(seen), 0}};
              });
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity::parity_select_test
