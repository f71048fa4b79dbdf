#include "engine/chunk_pacer.h"

#include <gtest/gtest.h>

#include <vector>

namespace omnikv::chunk_pacer_test {
namespace {

// A step of 8 decode rows and a chunk of `rows` after `past` tokens, in milliseconds: as a card
// takes for a model of 8B.
double StepTime(int32_t rows, int64_t past) {
  return 7.5 + 0.02 * rows + 1e-6 * rows * static_cast<double>(past);
}

// The rows of the chunks of a prompt, and how many steps went past the limit.
struct Paced {
  std::vector<int32_t> rows;
  int over = 0;
};

Paced Pace(double limit, int64_t prompt, int32_t max_rows) {
  Paced paced;
  ChunkPacer pacer(limit, StepTime(0, 0), ChunkPacer::kTileOfCard, 8, max_rows);
  for (int64_t pos = 0; pos < prompt;) {
    paced.rows.push_back(pacer.rows());
    const double ms = StepTime(pacer.rows(), pos);
    paced.over += ms > limit;
    pos += pacer.rows();
    pacer.Took(ms);
  }
  return paced;
}

TEST(ChunkPacer, TakesWhatTheLimitAllowsAndLessAsThePastGrows) {
  const Paced paced = Pace(16, 32 * 1024, 4096);
  EXPECT_EQ(paced.rows[0], 120);
  EXPECT_EQ(paced.rows[1], 248);  // 10 ms, and 12.6 with a tile more
  EXPECT_EQ(paced.rows.back(), 120);
  EXPECT_LE(paced.over, static_cast<int>(paced.rows.size()) / 50);
  int changes = 0;
  for (size_t i = 1; i < paced.rows.size(); ++i) changes += paced.rows[i] != paced.rows[i - 1];
  EXPECT_LE(changes, 8) << "it goes back and forth";
}

TEST(ChunkPacer, AlwaysGoesOn) {
  for (const int32_t rows : Pace(1, 4096, 4096).rows) EXPECT_EQ(rows, 120);
}

TEST(ChunkPacer, KeepsWhatItLearntWhenOthersDecode) {
  ChunkPacer pacer(100, 5, ChunkPacer::kTileOfHost, 0, 512);
  for (int i = 0; i < 6; ++i) pacer.Took(10);
  EXPECT_EQ(pacer.rows(), 7 * 16);
  pacer.Beside(0, 50, 8);
  EXPECT_EQ(pacer.rows(), 7 * 16);
  pacer.Took(60);  // past the new limit
  EXPECT_EQ(pacer.rows(), 6 * 16);
  pacer.Beside(200, 50, 8);
  EXPECT_EQ(pacer.rows(), 13 * 16 - 200);
}

TEST(ChunkPacer, KeepsToTheRowsOfAStep) {
  const Paced paced = Pace(1000, 8192, 300);
  for (const int32_t rows : paced.rows) EXPECT_LE(rows, 300);
  EXPECT_EQ(paced.rows.back(), 300);
  EXPECT_EQ(Pace(1000, 64, 40).rows[0], 40);
}

}  // namespace
}  // namespace omnikv::chunk_pacer_test
