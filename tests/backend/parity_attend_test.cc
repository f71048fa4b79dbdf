// Parity of attention: plans, head shapes, dtypes, scores.
#include <fmt/format.h>

#include <algorithm>

#include "parity_data.h"

namespace omnikv::parity::parity_attend_test {
namespace {

TEST_F(ParityTest, AttendDenseShapes) {
  Random random(11);
  for (DType dtype : kKvFormats) {
    for (const Shape& s :
         {Shape{6, 2, 64, 64, dtype}, Shape{6, 2, 32, 96, dtype}, Shape{10, 1, 64, 64, dtype},
          Shape{16, 1, 128, 128, dtype}, Shape{4, 4, 80, 80, dtype}, Shape{4, 1, 96, 96, dtype},
          Shape{8, 1, 128, 128, dtype}, Shape{16, 1, 64, 128, dtype}, Shape{2, 1, 256, 256, dtype},
          Shape{5, 1, 72, 24, dtype}, Shape{3, 1, 13, 7, dtype}, Shape{7, 7, 8, 8, dtype}}) {
      if (!Fits(s)) continue;
      for (int32_t n : {1, 2, 65, 300}) {
        Attention(s, {1}, {n}, random).Run(fmt::format("dense over {}", n), AttnPlan::Dense());
      }
    }
  }
}

TEST_F(ParityTest, AttendRaggedRows) {
  Random random(12);
  for (DType dtype : kKvFormats) {
    const Shape s{6, 2, 64, 64, dtype};
    Attention(s, {1, 1}, {500, 3}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {1, 3, 4}, {40, 257, 4}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {17}, {130}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {64}, {64}, random).Run("dense", AttnPlan::Dense());
    Attention(s, {30, 1, 40}, {30, 200, 90}, random).Run("window", AttnPlan::Dense(7));
  }
}

// KV heads with rows of their own are sequences of one KV head: many of a row each, more than a
// launch takes, some without rows; and three of a prompt's rows each.
TEST_F(ParityTest, AttendHeadsApart) {
  Random random(47);
  std::vector<int32_t> rows, lens;
  for (int32_t i = 0; i < 48; ++i) {
    rows.push_back(i / 8 % 3 == 1 ? 0 : 1);
    lens.push_back(rows.back() == 0 ? 0 : 1 + i * i % 271);
  }
  for (DType dtype : kKvFormats) {
    const Shape s{4, 1, 128, 128, dtype};
    Attention(s, rows, lens, random).Run("rows of heads apart", AttnPlan::Dense());
    const std::vector<int32_t> held = {40, 257, 91};
    Attention prompt(s, {40, 40, 40}, held, random);
    prompt.busy_seqs = 3;
    prompt.Run("a prompt's rows by head", AttnPlan::Dense());
  }
}

TEST_F(ParityTest, AttendLongContext) {
  Random random(13);
  Attention({4, 1, 64, 64, DType::kBF16}, {1}, {5000}, random).Run("dense", AttnPlan::Dense());
  for (DType dtype : {DType::kF16, DType::kQ8_0, DType::kQ4_0}) {
    Attention({2, 2, 64, 64, dtype}, {2, 1}, {3000, 1500}, random).Run("dense", AttnPlan::Dense());
  }
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
  for (DType dtype : kKvFormats) {
    for (const Shape& s : {Shape{6, 2, 64, 64, dtype}, Shape{8, 2, 80, 64, dtype}}) {
      if (!Fits(s)) continue;
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

// K and V apart: rows as far apart in both, and rows that are not; rows of single heads. Steps of
// few rows and prompts.
TEST_F(ParityTest, AttendOtherPlanes) {
  Random random(21);
  for (DType dtype : kKvFormats) {
    for (const Shape& s : {Shape{6, 2, 64, 64, dtype}, Shape{8, 2, 128, 128, dtype},
                           Shape{8, 2, 80, 64, dtype}, Shape{5, 1, 72, 24, dtype}}) {
      if (!Fits(s)) continue;
      const std::vector<int32_t> lens = {400, 61, 170};
      for (const std::vector<int32_t>& q_len :
           {std::vector<int32_t>{1, 2, 1}, std::vector<int32_t>{70, 1, 100}}) {
        for (const Planes planes : kOtherPlanes) {
          const bool many_sums = q_len.front() > 1 && s.dk != 128;
          if (planes == Planes::kByHead && many_sums) continue;
          const Attention a(s, q_len, lens, random, 64, planes);
          a.Run("dense", AttnPlan::Dense());
          a.Run("window", AttnPlan::Dense(33));
          AttnPlan sinks;
          sinks.Add({.begin = 0, .end = 4});
          sinks.Add({.window = 16, .begin = 4});
          a.Run("sinks and window", sinks);
          for (int32_t per_seq : {1, s.n_kv_heads}) {
            const Lists lists(lens, per_seq, 4, 40, random);
            AttnPlan plan;
            plan.Add(lists.Segment());
            a.Run(fmt::format("{} lists", per_seq), plan);
          }
          a.Run("logits", AttnPlan::Dense(), ScoreKind::kLogits);
          a.Run("maximum over heads only", AttnPlan::Dense(), ScoreKind::kHeadMax, 0, false);
        }
      }
    }
  }
}

// A decode step of a batch: one row a sequence, in any order, between sequences without rows.
struct BatchOf {
  BatchOf(const Shape& s, std::vector<int32_t> kv_len, Random& random)
      : attention(s, QLens(kv_len), kv_len, random, 64), lens(std::move(kv_len)) {
    auto& rows = attention.step.rows;
    std::reverse(rows.begin(), rows.end());
    std::swap(rows.front(), rows[rows.size() / 2]);
    for (size_t r = 0; r < rows.size(); ++r) {
      attention.step.seqs[static_cast<size_t>(rows[r].seq)].q_begin = static_cast<int32_t>(r);
    }
  }
  static std::vector<int32_t> QLens(const std::vector<int32_t>& kv_len) {
    std::vector<int32_t> q_len;
    for (const int32_t n : kv_len) q_len.push_back(n > 0 ? 1 : 0);
    return q_len;
  }

  Attention attention;
  std::vector<int32_t> lens;
};

TEST_F(ParityTest, AttendBatches) {
  Random random(18);
  const std::vector<std::vector<int32_t>> batches = {
      {300, 0, 7, 1200, 64, 0, 1, 129},
      {50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65},
      {0, 900, 0}};
  for (DType dtype : kKvTypes) {
    for (const Shape& s :
         {Shape{8, 2, 128, 128, dtype}, Shape{6, 3, 64, 64, dtype}, Shape{3, 1, 24, 40, dtype}}) {
      for (const std::vector<int32_t>& lens : batches) {
        const BatchOf batch(s, lens, random);
        const Attention& a = batch.attention;
        a.Run("batch", AttnPlan::Dense());
        a.Run("batch, logits", AttnPlan::Dense(), ScoreKind::kLogits);
        a.Run("batch, maximum over heads", AttnPlan::Dense(), ScoreKind::kHeadMax);
        a.Run("batch, maximum over heads only", AttnPlan::Dense(), ScoreKind::kHeadMax, 0, false);
        AttnPlan sinks;
        sinks.Add({.begin = 0, .end = 4});
        sinks.Add({.window = 30, .begin = 4});
        a.Run("batch, sinks and window", sinks);
        for (int32_t per_seq : {1, s.n_kv_heads}) {
          std::vector<int32_t> before;
          std::vector<int32_t> bounds;
          for (int32_t n : lens) {
            before.push_back(n * 2 / 3);
            bounds.insert(bounds.end(), {n * 2 / 3, n});
          }
          const Lists lists(before, per_seq, 1, 90, random);
          AttnPlan plan;
          plan.Add(lists.Segment());
          plan.Add({.bounds = bounds.data()});
          a.Run(fmt::format("batch, {} lists and bounds", per_seq), plan);
        }
      }
    }
  }
}

// Rows that end where the part of a warp or of a block ends, and beside it; KV heads that are dealt
// to blocks in all ways.
TEST_F(ParityTest, AttendAcrossBlocks) {
  Random random(20);
  const std::vector<std::vector<int32_t>> few_heads = {{16},
                                                       {17},
                                                       {130},
                                                       {2112},
                                                       {2113},
                                                       {4223},
                                                       std::vector<int32_t>(16, 128),
                                                       {1024, 1024, 1024, 1040, 1, 1007},
                                                       {16, 16, 16, 4096, 16},
                                                       {3, 2000, 0, 40, 2100, 16}};
  const std::vector<std::vector<int32_t>> many_heads = {{17}, {700}, {16, 16, 16, 300, 16}};
  for (const int32_t n_kv_heads : {1, 2, 4, 5, 8, 32, 48, 150}) {
    const Shape s{2 * n_kv_heads, n_kv_heads, 64, 64, DType::kBF16};
    for (const std::vector<int32_t>& lens : n_kv_heads <= 8 ? few_heads : many_heads) {
      const BatchOf batch(s, lens, random);
      batch.attention.Run("dense", AttnPlan::Dense());
      const Lists lists(lens, n_kv_heads, 1, 1500, random);  // each head another number
      AttnPlan plan;
      plan.Add(lists.Segment());
      batch.attention.Run("lists", plan);
    }
  }
  for (const Shape& s : {Shape{16, 1, 128, 128, DType::kF16}, Shape{30, 2, 128, 128, DType::kBF16},
                         Shape{16, 2, 256, 256, DType::kBF16}, Shape{9, 1, 96, 96, DType::kF16},
                         Shape{32, 8, 128, 128, DType::kBF16}, Shape{7, 1, 80, 80, DType::kBF16}}) {
    for (const std::vector<int32_t>& lens : many_heads) {
      BatchOf(s, lens, random).attention.Run("dense", AttnPlan::Dense());
    }
  }
}

// As long as what a budget of 2048 reads of eight sequences.
TEST_F(ParityTest, AttendALongBatch) {
  Random random(19);
  const BatchOf batch({8, 2, 128, 128, DType::kF16}, {2600, 2300, 300, 2500, 2048, 2401, 2222, 17},
                      random);
  std::vector<int32_t> before;
  std::vector<int32_t> bounds;
  for (int32_t n : batch.lens) {
    before.push_back(std::max(0, n - 256));
    bounds.insert(bounds.end(), {before.back(), n});
  }
  const Lists lists(before, 1, 1, 1792, random);
  AttnPlan plan;
  plan.Add(lists.Segment());
  plan.Add({.bounds = bounds.data()});
  batch.attention.Run("long batch, lists and bounds", plan);
  batch.attention.Run("long batch, logits", AttnPlan::Dense(), ScoreKind::kLogits);
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
}  // namespace omnikv::parity::parity_attend_test
