// Parity of attention: plans, head shapes, dtypes, scores.
#include <fmt/format.h>

#include "parity_data.h"

namespace omnikv::parity {
namespace {

TEST_F(ParityTest, AttendDenseShapes) {
  Random random(11);
  for (DType dtype : kKvTypes) {
    for (const Shape& s :
         {Shape{6, 2, 64, 64, dtype}, Shape{4, 4, 80, 80, dtype}, Shape{4, 1, 96, 96, dtype},
          Shape{8, 1, 128, 128, dtype}, Shape{16, 1, 64, 128, dtype}, Shape{2, 1, 256, 256, dtype},
          Shape{5, 1, 72, 24, dtype}, Shape{3, 1, 13, 7, dtype}, Shape{7, 7, 8, 8, dtype}}) {
      for (int32_t n : {1, 2, 65, 300}) {
        Attention(s, {1}, {n}, random).Run(fmt::format("dense over {}", n), AttnPlan::Dense());
      }
    }
  }
}

TEST_F(ParityTest, AttendRaggedRows) {
  Random random(12);
  for (DType dtype : kKvTypes) {
    const Shape s{6, 2, 64, 64, dtype};
    Attention(s, {1, 1}, {500, 3}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {1, 3, 4}, {40, 257, 4}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {17}, {130}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {64}, {64}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {30, 1, 40}, {30, 200, 90}, random).Run("window", AttnPlan::Dense(7));
  }
}

TEST_F(ParityTest, AttendLongContext) {
  Random random(13);
  Attention({4, 1, 64, 64, DType::kBF16}, {1}, {5000}, random).Run("dense", AttnPlan::Dense());
  Attention({2, 2, 64, 64, DType::kF16}, {2, 1}, {3000, 1500}, random)
      .Run("dense", AttnPlan::Dense());
}

TEST_F(ParityTest, AttendWindowsAndRanges) {
  Random random(14);
  const Shape s{4, 2, 64, 64, DType::kBF16};
  const std::vector<int32_t> lens = {200, 33};
  const Attention a(s, {2, 1}, lens, random);
  for (int32_t window : {1, 5, 64, 1000}) {
    a.Run(fmt::format("window {}", window), AttnPlan::Dense(window));
  }
  AttnPlan sinks;  // what `streaming` reads
  sinks.Add({.begin = 0, .end = 4});
  sinks.Add({.window = 16, .begin = 4});
  a.Run("sinks and window", sinks);
  const std::vector<int32_t> bounds = {150, 200, 0, 33};
  AttnPlan bounded;
  bounded.Add({.bounds = bounds.data()});
  a.Run("bounds", bounded);
  AttnPlan empty;
  empty.Add({.begin = 5, .end = 5});
  a.Run("empty range", empty);
  a.Run("no segments", AttnPlan{});
}

TEST_F(ParityTest, AttendLists) {
  Random random(15);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : {Shape{6, 2, 64, 64, dtype}, Shape{8, 2, 80, 64, dtype}}) {
      const std::vector<int32_t> lens = {400, 61, 17};
      const Attention a(s, {1, 2, 1}, lens, random);
      for (int32_t per_seq : {1, s.n_kv_heads}) {
        for (int32_t unit : {1, 4, 16}) {
          for (int32_t n : {0, 1, 9, 150}) {
            const Lists lists(lens, per_seq, unit, n, random);
            AttnPlan plan;
            plan.Add(lists.Segment());
            a.Run(fmt::format("{} lists of {} units of {}", per_seq, n, unit), plan);
          }
        }
      }
    }
  }
}

TEST_F(ParityTest, AttendSeveralSegments) {
  Random random(16);
  const Shape s{6, 2, 64, 64, DType::kBF16};
  const std::vector<int32_t> lens = {300, 90};
  const Attention a(s, {1, 2}, lens, random);
  const std::vector<int32_t> bounds = {200, 300, 60, 90};
  std::vector<int32_t> before;
  for (int32_t b : {200, 60}) before.push_back(b);
  for (int32_t per_seq : {1, 2}) {
    const Lists lists(before, per_seq, 1, 40, random);  // tokens before the range
    AttnPlan plan;
    plan.Add(lists.Segment());
    plan.Add({.bounds = bounds.data()});
    a.Run(fmt::format("{} lists and a range", per_seq), plan);
    a.Run(fmt::format("{} lists and a range, softcap", per_seq), plan, ScoreKind::kNone, 20.0f);
  }
  const auto other = random.Floats(a.q.size());
  AttnPlan split;  // two ranges with different queries
  split.Add({.begin = 0, .end = 50, .q = other.data()});
  split.Add({.begin = 50});
  a.Run("a segment with its own queries", split);
}

TEST_F(ParityTest, AttendScores) {
  Random random(17);
  for (DType dtype : kKvTypes) {
    for (const Shape& s : {Shape{6, 2, 64, 64, dtype}, Shape{8, 1, 128, 128, dtype},
                           Shape{4, 4, 24, 40, dtype}, Shape{5, 1, 64, 64, dtype}}) {
      const Attention a(s, {1, 2}, {333, 20}, random);
      for (ScoreKind kind : {ScoreKind::kLogits, ScoreKind::kHeadMax}) {
        const auto what = [&](const char* more) {
          return fmt::format("scores {}{}", static_cast<int>(kind), more);
        };
        a.Run(what(""), AttnPlan::Dense(), kind);
        a.Run(what(", softcap"), AttnPlan::Dense(), kind, 2.0f);
        a.Run(what(" only"), AttnPlan::Dense(), kind, 0, false);
        AttnPlan part;
        part.Add({.begin = 10, .end = 18});
        a.Run(what(" of a part"), part, kind);
      }
    }
  }
}

}  // namespace
}  // namespace omnikv::parity
