// What ops read and write, where a number of theirs is not plain from their arguments.
#include <gtest/gtest.h>

#include <vector>

#include "backend/kv_format.h"
#include "backend/ops.h"

namespace omnikv::cost_test {
namespace {

// Pieces of 16 tokens: two listed ones, and the last tokens, which begin a fourth piece.
TEST(CostOfOps, ThePieceThatIsBegunCounts) {
  const SeqMeta seq{.q_len = 1, .kv_len = 132};
  const int32_t count = 2;
  const int32_t bounds[] = {80, 132};
  const Cost cost = CostOf(PieceTableArgs{
      .seqs = &seq, .count = &count, .bounds = bounds, .piece_tokens = 16, .n_seqs = 1});
  EXPECT_EQ(cost.bytes_written, 4u * (2 + 4));
  EXPECT_EQ(cost.bytes_read, sizeof(SeqMeta) + 12 + 8 * 2 + 4 * 4);
}

// Two of four heads, and then one of the others besides.
TEST(CostOfOps, RowsOfTheHeadsThatAViewHasAreStored) {
  std::vector<std::byte> row(4 * (64 + 32) * 2);
  const KvView made = MakeKvView(row.data(), nullptr, 16, DType::kF16, 4, 64, 32);
  constexpr uint64_t kHead = 2 * (64 + 32);
  StoreRowsArgs store{.from = made, .kv = made.OfHeads({5}, 4), .n_rows = 3};
  EXPECT_EQ(CostOf(store).bytes_written, 3 * 2 * kHead);
  store.rest = made.OfHeads({8}, 4);
  EXPECT_EQ(CostOf(store).bytes_written, 3 * 3 * kHead);
  EXPECT_EQ(CostOf(store).bytes_read, 3 * 3 * kHead);
  store.kv.heads = {};
  store.rest = {};
  EXPECT_EQ(CostOf(store).bytes_written, 3 * 4 * kHead);
}

}  // namespace
}  // namespace omnikv::cost_test
