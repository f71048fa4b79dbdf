// The op by which queries leave their positions: what policies share that let tokens stand
// elsewhere than in the text.
#pragma once

#include "backend/ops.h"

namespace omnikv {

// Rotary positions are relative: a query that is turned from its position p to another one meets a
// key as if it stood there. out = q, turned from p to the nearest position in [least, most].
struct TurnQueriesArgs {
  const float* q;         // [n_rows, n_heads, dk]
  float* out;             // [n_rows, n_heads, dk], not q
  const RowMeta* rows;    // [n_rows]
  const float* inv_freq;  // [n_freq]; null: nothing turns
  int32_t n_rows, n_heads, dk, n_freq;
  int32_t least, most;
};

CustomArgs TurnQueries(const TurnQueriesArgs& args);

// Enqueues it on a card. Defined where CUDA is built (turn_queries.cu).
void TurnQueriesCuda(const void* args, const cuda::Launch& launch);

}  // namespace omnikv
