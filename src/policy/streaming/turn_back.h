// The op of `positions=cache`: queries for the sinks, turned back to their place in the cache.
#pragma once

#include "backend/ops.h"

namespace omnikv {

// Rotary positions are relative, so moving the window and the query together changes nothing
// between them: re-rotation is due only between the query and the sinks. Their queries are turned
// back from position p to min(p, budget - 1), the query's place in the cache.
struct TurnBackArgs {
  const float* q;         // [n_rows, n_heads, dk]
  float* out;             // [n_rows, n_heads, dk]
  const RowMeta* rows;    // [n_rows]
  const float* inv_freq;  // [n_freq]
  int32_t n_rows, n_heads, dk, n_freq, budget;
  int32_t unused = 0;  // where there would be padding
};

// Enqueues it on a cudaStream_t. Defined where CUDA is built (turn_back.cu).
void TurnBackCuda(const void* args, void* stream);

}  // namespace omnikv
