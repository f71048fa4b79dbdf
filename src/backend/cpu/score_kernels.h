// Kernels of the ops that score tokens.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/cpu/matvec.h"
#include "backend/ops.h"
#include "base/round.h"

namespace omnikv {

// A block is whole units and at most so many tokens.
inline constexpr int32_t kScoreBlock = kMaxScoreUnit;
// Query heads whose scores are made together.
inline constexpr int32_t kScoreHeads = 4;

// One sequence's part of a ScoreArgs, all of its rows.
struct ScoreJob {
  const ScoreArgs* args = nullptr;
  int32_t seq = 0;
  int32_t n_rows = 0;        // that score
  const float* q = nullptr;  // in packed order: [n_rows, n_heads, q_stride]
  int64_t q_stride = 0;
};

// Floats of scratch of a block.
inline int64_t ScoreBlockFloats(const ScoreArgs& a) {
  return (2 * int64_t{a.lists} + kScoreHeads) * kScoreBlock;
}

// Floats that a key takes in the order in which it is loaded.
inline int64_t KeyFloats(int32_t dk) {
  return RoundUp(dk, kPackMultiple);
}

// The most values that a head with an index has.
inline constexpr int32_t kIndexDim = 1024;

// Values of half a head's query, as `index_score` reads them: zeros behind them.
inline int64_t HalfFloats(int32_t dk) {
  return RoundUp(dk / 2, kPackMultiple);
}

// What a block of tokens adds to the sum of a head's exponentials.
struct ExpSum {
  float top;  // the highest logit
  float sum;  // of exp(logit - top)
};

// How the sum of a head's exponentials changes: by what part of it, and to what.
struct ExpChange {
  float before, after;  // sums of exp(logit - lse)
};

struct ScoreKernels {
  // out[0, padded) = q[0, dk) in the order that `block` reads, for a K of `dtype`.
  void (*pack_query)(DType dtype, const float* q, int64_t dk, int64_t padded, float* out);
  // Scores of the units of tokens [begin, end).
  void (*block)(const ScoreJob& job, int64_t begin, int64_t end, float* scratch);
  // The summary of unit `unit` of sequence `seq`.
  void (*summary)(const BlockSummaryArgs& a, int32_t seq, int64_t unit);
  // The scores of units [begin, end) of sequence `seq`.
  void (*block_score)(const BlockScoreArgs& a, int32_t seq, int64_t begin, int64_t end);
  // sums [n_kv_heads, KeyFloats] = the sums of k / |k| of tokens [begin, end), values in the order
  // in which keys of this type are loaded.
  void (*key_directions)(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end,
                         float* sums);
  // The scores of tokens [begin, end); of kUnlike by `means`, what key_directions gives for all
  // tokens, of length 1 (or 0).
  void (*key_score)(const KeyScoreArgs& a, int32_t seq, int64_t begin, int64_t end,
                    const float* means);
  // The index rows of tokens [begin, end) of sequence `seq`.
  void (*index_keys)(const IndexKeysArgs& a, int32_t seq, int64_t begin, int64_t end);
  // The logits of tokens [begin, end) of row `row`, at most kScoreBlock, and sums [n_heads] of
  // them. `q` [n_heads, 2, HalfFloats]: the halves of its queries.
  void (*index_score)(const IndexScoreArgs& a, int32_t row, int64_t begin, int64_t end,
                      const float* q, ExpSum* sums);
  // The logits of tokens [begin, end) of those of list `list` of row `row`, at most kScoreBlock,
  // by the queries q [n_heads, KeyFloats] in packed order. sums [n_heads]: those of the list's
  // heads.
  void (*rescore)(const RescoreArgs& a, int32_t row, int32_t list, int32_t begin, int32_t end,
                  const float* q, ExpChange* sums);
  // out[i] of list `list` of sequence `seq`, i in [begin, end).
  void (*pool)(const PoolArgs& a, int32_t seq, int32_t list, int64_t begin, int64_t end);
};

const ScoreKernels& GetScoreKernels(const Isa& isa);

}  // namespace omnikv
