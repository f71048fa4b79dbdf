// What ops read and write, where a number of theirs is not plain from their arguments.
#include <gtest/gtest.h>

#include "backend/ops.h"

namespace omnikv {
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

}  // namespace
}  // namespace omnikv
