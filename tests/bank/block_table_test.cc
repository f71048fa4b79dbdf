#include "bank/block_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace omnikv::block_table_test {
namespace {

TEST(BlockTable, GrowTakesTheLowestBlocks) {
  BlockTable table(8, 2, 8);
  const int32_t a = table.NewSequence();
  const int32_t b = table.NewSequence();
  EXPECT_EQ(table.NewSequence(), -1);
  ASSERT_TRUE(table.Grow(a, 3));
  ASSERT_TRUE(table.Grow(b, 2));
  EXPECT_EQ(std::vector<int32_t>(table.entries(a), table.entries(a) + 3),
            (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(std::vector<int32_t>(table.entries(b), table.entries(b) + 2),
            (std::vector<int32_t>{3, 4}));
  table.Free(a);
  ASSERT_TRUE(table.Grow(b, 4));
  EXPECT_EQ(table.entries(b)[2], 0);
  EXPECT_EQ(table.entries(b)[3], 1);
}

TEST(BlockTable, FailedGrowthChangesNothing) {
  BlockTable table(4, 1, 8);
  const int32_t a = table.NewSequence();
  ASSERT_TRUE(table.Grow(a, 3));
  EXPECT_FALSE(table.Grow(a, 5));
  EXPECT_EQ(table.n_blocks(a), 3);
  EXPECT_EQ(table.free_blocks(), 1);
}

TEST(BlockTable, ForksShareUntilWritten) {
  BlockTable table(4, 2, 4);
  const int32_t a = table.NewSequence();
  ASSERT_TRUE(table.Grow(a, 2));
  const int32_t b = table.Fork(a);
  EXPECT_EQ(table.free_blocks(), 2);
  const auto owned = table.MakeOwn(b, 1);
  EXPECT_EQ(owned.from, 1);
  EXPECT_EQ(owned.to, 2);
  EXPECT_EQ(table.entries(a)[1], 1);
  EXPECT_EQ(table.entries(b)[1], 2);
  const auto again = table.MakeOwn(b, 1);
  EXPECT_EQ(again.from, again.to);
  table.Free(a);
  EXPECT_EQ(table.free_blocks(), 2);
  table.Free(b);
  EXPECT_EQ(table.free_blocks(), 4);
}

// Random growth, forks, cuts and writes: every block's references are exactly the table entries
// that name it, and nothing leaks.
TEST(BlockTable, ReferencesAgreeWithEntriesThroughRandomUse) {
  constexpr int32_t kSeqs = 5;
  BlockTable table(32, kSeqs, 16);
  std::mt19937 rng(7);
  for (int step = 0; step < 5000; ++step) {
    const auto seq = static_cast<int32_t>(rng() % kSeqs);
    if (!table.in_use(seq)) {
      table.NewSequence();
    } else if (rng() % 8 == 0) {
      table.Free(seq);
    } else if (rng() % 8 == 0) {
      table.Fork(seq);
    } else if (rng() % 2 == 0) {
      table.Grow(seq, table.n_blocks(seq) + static_cast<int32_t>(rng() % 4));
    } else if (table.n_blocks(seq) > 0) {
      const auto i = static_cast<int32_t>(rng() % static_cast<uint32_t>(table.n_blocks(seq)));
      if (rng() % 2 == 0) {
        table.MakeOwn(seq, i);
      } else {
        table.Shrink(seq, i);
      }
    }
    std::map<int32_t, int> used;
    for (int32_t s = 0; s < kSeqs; ++s) {
      if (!table.in_use(s)) continue;
      for (int32_t i = 0; i < table.n_blocks(s); ++i) ++used[table.entries(s)[i]];
    }
    ASSERT_EQ(table.free_blocks(), 32 - static_cast<int32_t>(used.size()));
  }
  for (int32_t s = 0; s < kSeqs; ++s) {
    if (table.in_use(s)) table.Free(s);
  }
  EXPECT_EQ(table.free_blocks(), 32);
}

}  // namespace
}  // namespace omnikv::block_table_test
