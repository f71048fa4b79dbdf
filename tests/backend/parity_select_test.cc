// Parity of the score ops. Choices are compared exactly.
#include <fmt/format.h>

#include <cstring>

#include "parity.h"

namespace omnikv::parity {
namespace {

std::vector<float> AsFloats(const std::vector<int32_t>& v) {
  return std::vector<float>(v.begin(), v.end());  // below 2^24: exact
}

TEST(ParityTest, ScoreReduce) {
  Random random(21);
  for (int32_t n_heads : {1, 4, 7}) {
    for (const auto& rows :
         {std::vector<RowMeta>{{0, 0}}, std::vector<RowMeta>{{0, 100}, {1, 37}, {1, 38}},
          std::vector<RowMeta>{{1, 40000}}}) {
      const auto n_rows = static_cast<int32_t>(rows.size());
      const int64_t stride = rows.back().pos + 70;
      const auto logits = random.Floats(static_cast<size_t>(n_rows * n_heads * stride), 5.0f);
      const auto lse = random.Floats(static_cast<size_t>(n_rows * n_heads), 3.0f);
      for (int32_t ring : {1, 4}) {
        for (bool softmax : {true, false}) {
          Check(fmt::format("ScoreReduce heads {} rows {} ring {} softmax {}", n_heads, n_rows,
                            ring, softmax),
                [&](const Execute& run) {
                  std::vector<float> out(static_cast<size_t>(2 * ring * stride), kPoison);
                  run(ScoreReduceArgs{.logits = logits.data(),
                                      .lse = softmax ? lse.data() : nullptr,
                                      .out = out.data(),
                                      .rows = rows.data(),
                                      .stride = stride,
                                      .ring = ring,
                                      .n_heads = n_heads,
                                      .n_rows = n_rows});
                  return Outputs{{"out", out, softmax ? 1e-5 : 0}};
                });
        }
      }
    }
  }
}

TEST(ParityTest, PlanRange) {
  std::vector<SeqMeta> seqs;
  for (int32_t n : {1, 10, 300, 5000}) {
    for (int32_t generated : {0, 1, 300}) {
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
    for (int32_t tail : {0, 256}) {
      for (const auto& [min_recent, share] : std::vector<std::pair<int32_t, double>>{
               {0, 0.0}, {1, 0.0}, {16, 0.0}, {0, 1.0}, {0, 1e-4}, {16, 0.3}}) {
        Check("PlanRange", [&](const Execute& run) {
          std::vector<int32_t> bounds(seqs.size() * 2, -1);
          std::vector<int32_t> candidates(seqs.size(), -1);
          std::vector<int32_t> pick(seqs.size(), -1);
          run(PlanRangeArgs{.seqs = seqs.data(),
                            .n_seqs = n_seqs,
                            .budget = budget,
                            .share = share,
                            .tail = tail,
                            .min_recent = min_recent,
                            .bounds = bounds.data(),
                            .n_candidates = candidates.data(),
                            .n_pick = pick.data()});
          for (size_t s = 0; s < seqs.size(); ++s) {  // whatever the lengths
            EXPECT_GE(bounds[2 * s], 0);
            EXPECT_LE(bounds[2 * s], seqs[s].kv_len);
            EXPECT_LE(pick[s], budget);
          }
          return Outputs{{"bounds", AsFloats(bounds), 0},
                         {"n_candidates", AsFloats(candidates), 0},
                         {"n_pick", AsFloats(pick), 0}};
        });
      }
    }
  }
}

TEST(ParityTest, BudgetsByShare) {
  EXPECT_EQ(BudgetAt(64, 0, 10), 64);
  EXPECT_EQ(BudgetAt(10000, 0.25, 5), 2);  // rounded up
  EXPECT_EQ(BudgetAt(10000, 1e-6, 5), 1);
  EXPECT_EQ(BudgetAt(10000, 1, 777), 777);
  EXPECT_EQ(BudgetAt(100, 0.5, 777), 100);
}

// What the scores of a choice look like.
enum class Scores { kNormal, kManyTies, kAllEqual, kPositive, kNarrow, kBroken };

std::vector<float> MakeScores(Scores kind, size_t n, Random& random) {
  std::vector<float> v = random.Floats(n);
  for (size_t i = 0; i < n; ++i) {
    switch (kind) {
      case Scores::kNormal:
        break;
      case Scores::kManyTies:
        v[i] = std::round(v[i]);  // includes -0 and 0
        break;
      case Scores::kAllEqual:
        v[i] = -1.5f;
        break;
      case Scores::kPositive:
        v[i] = std::exp(8 * v[i]);
        break;
      case Scores::kNarrow:
        v[i] = 1.0f + 1e-6f * v[i];
        break;
      case Scores::kBroken:
        if (i % 5 == 0) v[i] = std::numeric_limits<float>::quiet_NaN();
        if (i % 7 == 0) v[i] = -std::numeric_limits<float>::infinity();
        if (i % 101 == 0) v[i] = std::numeric_limits<float>::infinity();
        break;
    }
  }
  return v;
}

struct Choice {
  int32_t kv_len, n_candidates, n_pick;
};

void CheckTopK(Scores kind, int32_t window, const std::vector<Choice>& choices, int32_t capacity,
               Random& random) {
  std::vector<SeqMeta> seqs;
  std::vector<int32_t> n_candidates;
  std::vector<int32_t> n_pick;
  int64_t stride = 1;
  for (const Choice& c : choices) {
    seqs.push_back({.q_begin = 0, .q_len = 1, .kv_len = c.kv_len, .table_off = 0, .prompt_len = 0});
    n_candidates.push_back(c.n_candidates);
    n_pick.push_back(c.n_pick);
    stride = std::max<int64_t>(stride, c.kv_len);
  }
  const auto n_seqs = static_cast<int32_t>(choices.size());
  const auto scores = MakeScores(kind, static_cast<size_t>(n_seqs * window * stride), random);
  std::vector<float> weights = random.Floats(static_cast<size_t>(window));
  weights[0] = 1.0f;
  Check(fmt::format("TopK kind {} window {} of {} first {}", static_cast<int>(kind), window, n_seqs,
                    choices[0].n_candidates),
        [&](const Execute& run) {
          std::vector<int32_t> index(static_cast<size_t>(n_seqs * capacity), -1);
          std::vector<int32_t> count(choices.size(), -1);
          run(TopKArgs{.scores = scores.data(),
                       .weights = weights.data(),
                       .seqs = seqs.data(),
                       .n_candidates = n_candidates.data(),
                       .n_pick = n_pick.data(),
                       .index = index.data(),
                       .count = count.data(),
                       .stride = stride,
                       .window = window,
                       .capacity = capacity,
                       .n_seqs = n_seqs});
          return Outputs{{"count", AsFloats(count), 0}, {"index", AsFloats(index), 0}};
        });
}

TEST(ParityTest, TopK) {
  Random random(22);
  for (Scores kind : {Scores::kNormal, Scores::kManyTies, Scores::kAllEqual, Scores::kPositive,
                      Scores::kNarrow, Scores::kBroken}) {
    for (int32_t window : {1, 3, 8}) {
      CheckTopK(kind, window, {{1, 0, 5}}, 8, random);
      CheckTopK(kind, window, {{2, 1, 1}}, 8, random);
      CheckTopK(kind, window, {{100, 90, 40}, {7, 3, 9}, {50, 50, 0}}, 64, random);
      CheckTopK(kind, window, {{5, 5, 2}, {1000, 777, 100}}, 33, random);
      CheckTopK(kind, window, {{3000, 2999, -4}}, 16, random);
    }
    CheckTopK(kind, 1, {{70001, 70000, 2048}}, 2048, random);
    CheckTopK(kind, 4, {{40003, 40000, 1000}, {900, 800, 300}}, 1000, random);
  }
}

}  // namespace
}  // namespace omnikv::parity
