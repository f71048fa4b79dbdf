// The ops of infllm. A layer's tokens that have left the local window are *far*. Those that a step
// reads are copied, with K turned back to position 0, to far memory: the first tokens (sinks), the
// blocks that were chosen last (an LRU), and the rest, which no whole block has yet. A table of
// blocks per step puts those that are read after one another, so that one dense attention reads
// them: what this file calls their places.
#pragma once

#include <cstdint>

#include "backend/ops.h"

namespace omnikv {

// The numbers that all ops of a session share.
struct FarShape {
  int32_t sinks = 0;   // tokens, whole blocks
  int32_t recent = 1;  // tokens of the local window, a row's own included
  int32_t block = 1;   // tokens
  int32_t most = 1;    // blocks that a step chooses
  int32_t cache = 1;   // blocks that the LRU has room for, `most` at least
  int32_t rest = 1;    // blocks that the rest may be in

  bool operator==(const FarShape&) const = default;

  // Blocks that a step chooses among which begins with n tokens: those that have left its window
  // whole. Block b is the tokens from sinks + b * block on.
  OMNIKV_HOST_DEVICE int32_t Blocks(int64_t n) const {
    return n < sinks + recent ? 0 : static_cast<int32_t>((n - sinks - recent) / block);
  }
  OMNIKV_HOST_DEVICE int32_t Chosen(int64_t n) const { return Blocks(n) < most ? Blocks(n) : most; }
  // Far tokens that such a step leaves out.
  OMNIKV_HOST_DEVICE int32_t LeftOut(int64_t n) const { return (Blocks(n) - Chosen(n)) * block; }
  OMNIKV_HOST_DEVICE int32_t SinkBlocks() const { return sinks / block; }
  // Blocks of a layer's far memory for a sequence: sinks, LRU, rest; and of its table.
  OMNIKV_HOST_DEVICE int32_t Slots() const { return SinkBlocks() + cache + rest; }
  OMNIKV_HOST_DEVICE int32_t Entries() const { return SinkBlocks() + most + rest; }
};

// Where the rows of a step stand among the places, once a step (or a layer of a prompt):
//   gone = recent + LeftOut(n), n the tokens before the step
//   to_rows[r] = {seq, max(0, pos - gone)} of row skip + r
//   to_seqs[s] as the places number it; bounds[s] = {0, places, none for who has no far tokens}
//   units[s] = one row and Blocks(n) tokens, for scores of blocks: the sequence's own row of a
//              decode step, row 0 of a prompt
//   n_candidates, n_pick = Blocks(n), Chosen(n)
// Sequences without rows get none of all.
struct LocateFarArgs {
  const RowMeta* rows;    // [n_rows]
  const SeqMeta* seqs;    // [n_seqs]
  RowMeta* to_rows;       // [n_rows - skip]
  SeqMeta* to_seqs;       // [n_seqs]
  SeqMeta* units;         // [n_seqs]
  int32_t* bounds;        // [n_seqs, 2]
  int32_t* n_candidates;  // [n_seqs]
  int32_t* n_pick;        // [n_seqs]
  FarShape shape;
  int32_t n_rows, n_seqs;
  int32_t skip;     // rows of a prompt that have no far tokens
  int32_t prefill;  // 1: rows of a prompt
};
CustomArgs LocateFar(const LocateFarArgs& args);

// out = the mean of n_rows rows of `width` values.
struct MeanRowsArgs {
  const float* in;
  float* out;
  int32_t n_rows, width;
};
CustomArgs MeanRows(const MeanRowsArgs& args);

// The LRU of a layer takes the blocks that were chosen: those that it has not take free slots, the
// first ones, and then those of the blocks whose last choice is longest ago (of equals the lower
// block). A sequence's first step finds it empty. Writes the table of the step, the blocks that
// must be copied, and the other far tokens that must: what no step before has copied.
struct KeepBlocksArgs {
  const SeqMeta* seqs;   // [n_seqs]
  const int32_t* index;  // [n_seqs, most]: chosen blocks, ascending
  const int32_t* count;  // [n_seqs]; nobody's where there are none to choose among
  int32_t* owner;        // [n_seqs, cache]: block; -1: none
  uint32_t* stamp;       // [n_seqs, cache]: the step of its last choice
  uint32_t* clock;       // [n_seqs]: steps
  int32_t* table;        // [n_seqs, Entries()]
  int32_t* miss;         // [n_seqs, most, 2]: block, slot
  int32_t* n_miss;       // [n_seqs]
  int32_t* copied;       // [n_seqs]: far tokens that were copied
  int32_t* range;        // [n_seqs, 2]: those to copy now
  FarShape shape;
  int32_t n_seqs;
  int32_t unused = 0;  // where there would be padding
};
CustomArgs KeepBlocks(const KeepBlocksArgs& args);

// Copies what KeepBlocks said, of a layer. K is turned from its token's position to 0.
struct CopyFarArgs {
  KvView from;
  KvView to;                      // far memory: block s * Slots() + slot
  int32_t* pos = nullptr;         // [tokens of `to`]: positions of the tokens
  const SeqMeta* seqs = nullptr;  // [n_seqs]
  const int32_t* miss = nullptr;  // of KeepBlocks
  const int32_t* n_miss = nullptr;
  const int32_t* range = nullptr;
  const float* inv_freq = nullptr;  // [n_freq]; null: no rotation
  FarShape shape;
  int32_t n_freq = 0;
  int32_t n_seqs = 0;
  int32_t n_rows = 0;  // of the step

  bool operator==(const CopyFarArgs&) const = default;
};
// The arguments must live as long as a recording of the op does: so do those below.
CustomArgs CopyFar(const CopyFarArgs* args);

// Sums of local weights of the last so many steps are kept, so that steps which ran ahead may be
// forgotten.
inline constexpr int32_t kWeightRing = 5;

// Sums of the weights that tokens get while they are in the local window, of each query head. For
// tokens t of the window of any row p of the step, p0 the first row and n = kv_len:
//   sums[n % ring][h][t % stride] = (t < p0: sums[p0 % ring][h][t % stride]) +
//       sum over rows p >= t, p < t + recent, of exp(softcap(scale * q[p][h]·k[t]) - lse[p][h])
// and what older tokens of unfinished blocks have is carried along. stride: tokens that are in the
// window or in an unfinished block of a step, at least.
struct WeighLocalArgs {
  KvView kv;
  const float* q = nullptr;    // [n_rows, n_heads, dk]
  const float* lse = nullptr;  // [n_rows, n_heads]: over all that the rows read
  const SeqMeta* seqs = nullptr;
  float* sums = nullptr;  // [n_seqs, kWeightRing, n_heads, stride]
  FarShape shape;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  int32_t stride = 0;  // tokens
  float scale = 1;
  float softcap = 0;

  bool operator==(const WeighLocalArgs&) const = default;
};
CustomArgs WeighLocal(const WeighLocalArgs* args);

// The same sums of a decode step, of one row a sequence, whose attention has left its logits: K is
// not read again.
struct AddWeightsArgs {
  const float* logits;   // [n_rows, n_heads, logit_stride]: of the tokens of the window
  const float* lse;      // [n_rows, n_heads]: over all that the rows read
  const SeqMeta* seqs;   // [n_seqs]
  float* sums;           // of WeighLocal
  int64_t logit_stride;  // tokens
  FarShape shape;
  int32_t n_seqs, n_heads;
  int32_t stride;      // tokens
  int32_t unused = 0;  // where there would be padding
};
CustomArgs AddWeights(const AddWeightsArgs& args);

// Keys of the blocks that are whole once the step's rows are in, of each query head: the mean of K,
// turned to position 0, of the block's `representatives` tokens with the highest sums of local
// weights (of equals the first).
struct RepresentArgs {
  KvView kv;
  const SeqMeta* seqs = nullptr;
  const float* sums = nullptr;      // of WeighLocal
  float* keys = nullptr;            // [n_seqs, max_blocks, n_heads, dk]
  const float* inv_freq = nullptr;  // [n_freq]; null: no rotation
  FarShape shape;
  int32_t n_freq = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  int32_t n_rows = 0;  // of the step
  int32_t stride = 0;
  int32_t representatives = 1;
  int32_t max_blocks = 0;

  bool operator==(const RepresentArgs&) const = default;
};
CustomArgs Represent(const RepresentArgs* args);

// Sums of list (s, step that left n tokens, h).
template <typename T>
OMNIKV_HOST_DEVICE T* LocalSums(T* sums, int32_t s, int32_t n, int32_t h, int32_t n_heads,
                                int32_t stride) {
  return sums + ((int64_t{s} * kWeightRing + n % kWeightRing) * n_heads + h) * stride;
}
// The first token whose sum is still to be used by a step that begins with n tokens.
OMNIKV_HOST_DEVICE inline int32_t FirstSummed(const FarShape& shape, int32_t n) {
  return shape.sinks + shape.Blocks(n) * shape.block;
}
// The first token whose sum such a step writes: that one, or the first that the step appends.
OMNIKV_HOST_DEVICE inline int32_t FirstWritten(const FarShape& shape, int32_t n) {
  const int32_t first = FirstSummed(shape, n);
  return first < n ? first : n;
}

// The same on a card. Defined where CUDA is built (far_ops.cu, local_weights.cu).
void LocateFarCuda(const void* args, const cuda::Launch& launch);
void MeanRowsCuda(const void* args, const cuda::Launch& launch);
void KeepBlocksCuda(const void* args, const cuda::Launch& launch);
void CopyFarCuda(const void* args, const cuda::Launch& launch);
void WeighLocalCuda(const void* args, const cuda::Launch& launch);
void AddWeightsCuda(const void* args, const cuda::Launch& launch);
void RepresentCuda(const void* args, const cuda::Launch& launch);

}  // namespace omnikv
