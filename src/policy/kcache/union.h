// The op that makes one list of those of a group's query heads, which share a KV head: a row of V
// that any of them chose is read once, and all of them weigh it.
#pragma once

#include <cstdint>

#include "backend/ops.h"

namespace omnikv {

// Lists hold tokens in ascending order, each once. Only the step's sequences are looked at.
struct UnionArgs {
  const SeqMeta* seqs;   // [n_seqs]
  const int32_t* index;  // [n_seqs, n_kv_heads, group, capacity]
  const int32_t* count;  // [n_seqs, n_kv_heads, group]: at most capacity
  int32_t* work;         // [n_seqs, n_kv_heads, group, capacity]
  int32_t* to_index;     // [n_seqs, n_kv_heads, to_capacity]: tokens of any list, ascending
  int32_t* to_count;     // [n_seqs, n_kv_heads]
  int64_t to_capacity;   // as many as the tokens of a group's lists may be
  int32_t n_seqs, n_kv_heads, group, capacity;
};

// Enqueues it on a card. Defined where CUDA is built (union.cu).
void UnionCuda(const void* args, const cuda::Launch& launch);

extern const CustomKernels kUnion;

}  // namespace omnikv
