// The op of `prefill=sparse`: lists of chosen tokens in the order of the KV heads that read them.
#pragma once

#include <cstdint>

#include "backend/ops.h"

namespace omnikv {

// out[s][h][i] = index[s][list_of[h]][i] for i < count[s][h], and the lists of a sequence have
// equal counts.
struct MapListsArgs {
  const int32_t* index;    // [n_seqs, lists, capacity]
  const int32_t* count;    // [n_seqs, lists]
  const int32_t* list_of;  // [lists]
  int32_t* out;            // [n_seqs, lists, capacity], not `index`
  int32_t n_seqs, lists, capacity;
  int32_t unused = 0;  // where there would be padding
};

// Enqueues it on a card. Defined where CUDA is built (map_lists.cu).
void MapListsCuda(const void* args, const cuda::Launch& launch);
// The op, for every backend.
CustomArgs MapLists(const MapListsArgs& args);

}  // namespace omnikv
