// The ops of policy blocks: choices that stand for several tokens, keys that stand for a prompt's
// blocks, and blocks of a prompt that are never read again.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "backend/ops.h"
#include "policy/block_rule.h"

namespace omnikv {

// K of one layer as ops of 128 bytes can hold it.
struct KeyRows {
  const std::byte* base;
  int64_t row_bytes, head_bytes;
  const std::byte* scales;  // in blocks; else null
  int64_t scale_head_bytes;
  const int32_t* block_table;
  int16_t dtype, token_rows;
  int32_t block_tokens;

  static KeyRows Of(const KvView& kv) {
    return {kv.k.base,
            kv.k.row_bytes,
            kv.k.head_bytes,
            kv.k.scales,
            kv.k.scale_head_bytes,
            kv.block_table,
            static_cast<int16_t>(kv.k.dtype),
            static_cast<int16_t>(kv.token_rows),
            kv.block_tokens};
  }
  KvPlane Plane() const {
    return {.base = const_cast<std::byte*>(base),
            .row_bytes = row_bytes,
            .head_bytes = head_bytes,
            .dtype = static_cast<DType>(dtype),
            .scales = const_cast<std::byte*>(scales),
            .scale_head_bytes = scale_head_bytes};
  }
  OMNIKV_HOST_DEVICE int64_t Row(int32_t table_off, int32_t t) const {
    const int64_t block = block_table[table_off + t / block_tokens];
    return block * (block_tokens * token_rows) + t % block_tokens;
  }
  OMNIKV_HOST_DEVICE const std::byte* Head(int64_t row, int32_t head) const {
    return base + row * row_bytes + head * head_bytes;
  }
  OMNIKV_HOST_DEVICE int64_t ToScales(int32_t head) const {
    return scales == nullptr ? 0 : scales - base + head * (scale_head_bytes - head_bytes);
  }
};

// Before the layers of a decode step, for each sequence with a row in it, by `rule`:
//   n_pick = BlocksRead less the last blocks;  keep = 1 where the step reads an older choice
// Choices stand in two places, the newer one in the first. A step that chooses moves it to the
// second place before, unless it is of a step that was forgotten. A step that keeps takes the
// second one back where the first is of a step that was forgotten. `made` says of each place after
// how many tokens its choice was made.
// Sequences without rows keep what they have.
struct HoldChoiceArgs {
  const SeqMeta* seqs;          // [n_seqs]
  const int32_t* n_candidates;  // [n_seqs]
  int32_t* n_pick;              // [n_seqs]
  int32_t* keep;                // [n_seqs]
  int32_t* made;                // [2, n_seqs]; null: one place, and every step chooses
  int32_t* index;               // [2, choices, n_seqs, list_words]
  int32_t* count;               // [2, choices, n_seqs, lists]
  SeqMeta* own_seqs;            // [n_seqs]: seqs with table_off = s * own_stride; null: not wanted
  BlockRule rule;
  int32_t n_seqs, choices, lists, list_words, own_stride;
};

enum class BlockKeys : int32_t {
  kMean,         // of the units that the step's rows complete: the mean of their keys
  kBest,         // of all units of a prompt: the mean of the `best` keys of the highest scores; of
                 // the last one, where it is not whole, that of its keys
  kBoundsMean,   // of a prompt's whole units, for each query head low and high: the mean, twice
  kBoundsMax,    // the maxima or 0, twice
  kBoundsOf,     // minima and maxima of every so-many-th key
  kBoundsQuest,  // minima, and maxima or 0, of KV head h for query head h; nothing for the others
  kBoundsBest,   // the sum of the best keys, twice; with several of them the lower and the higher
                 // of it and 0
};

// Keys that stand for units: out[s][u], of the sequence `seq` alone, or of all where it is -1.
struct BlockKeysArgs {
  KeyRows k;
  const SeqMeta* seqs;
  const float* scores;  // [heads, stride]: of the tokens, for each head of `out`
  float* out;           // [n_seqs, units, arrays, heads, dk]: 2 arrays of bounds, else 1
  int32_t n_kv_heads, heads, dk, unit, best, every, stride, units, n_seqs;
  BlockKeys keys;
};

// Scores of a list's blocks, from those of heads or lists in a row: for u < ceil(kv_len / block)
//   out[s][l][u] = kChosenFirst where u < sinks, else -infinity where bias is that, else the lowest
//                  number there is where prompt_alone and u >= prompt_len / block, else the sum of
//                  in[s][h][u] over the n_in / lists rows h of list l
struct ListScoresArgs {
  const float* in;    // [n_seqs, n_in, stride]
  const float* bias;  // [n_seqs, lists, stride]: 0, or -infinity; null: none
  float* out;         // [n_seqs, lists, stride]
  const SeqMeta* seqs;
  int32_t n_seqs, n_in, lists, stride, block, sinks, prompt_alone;
  int32_t unused = 0;  // where there would be padding
};

// What a prompt's last rows weigh of its tokens, the whole prompt in each row's softmax, also what
// comes after it (as the published code of KTransformers has it): for t < kv_len
//   out[h][t] = sum over the last `window` rows r of exp(scale * q[r][h]·k[t]) / sum over t' of
//   that
struct TokenWeightsArgs {
  KeyRows k;
  const float* q;       // [n_rows, n_heads, dk]
  const SeqMeta* seqs;  // [1]
  float* norms;         // [window, n_heads, 2]: maximum of the logits, sum of exp(logit - that)
  float* out;           // [n_heads, stride]
  int32_t n_heads, n_kv_heads, dk, window, stride;
  uint32_t scale_bits, softcap_bits;  // of float
  int32_t max_rows;                   // rows that the step has, at least the window's
};

// Blocks by the weights of their tokens: for u < n, the units before the last `recent` ones,
//   out[l][u] = kChosenFirst where u < sinks, else the sum of in[h][t] over the n_in / lists rows h
//               of list l and over the tokens from u * block - widen to (u + 1) * block + widen
//               that are of units below n
//   n_candidates[0] = n;  n_pick[0] = the first of them and `preselect` more, if there are
struct BlockWeightsArgs {
  const float* in;      // [n_in, in_stride]
  float* out;           // [lists, stride]
  const SeqMeta* seqs;  // [1]
  int32_t* n_candidates;
  int32_t* n_pick;
  BlockRule rule;
  int32_t n_in, in_stride, lists, stride, widen;
};

// ListScoresArgs::bias of a sequence after a prompt: -infinity for the units below n_candidates[0]
// that are not in the list of `chosen`, the list's own or the only one.
struct ExcludeArgs {
  const int32_t* index;  // [chosen, capacity]: ascending
  const int32_t* count;  // [chosen]
  const int32_t* n_candidates;
  float* bias;  // [lists, stride]
  int32_t chosen, capacity, lists, stride;
};

CustomArgs HoldChoice(const HoldChoiceArgs& args);
CustomArgs MakeBlockKeys(const BlockKeysArgs& args);
CustomArgs ListScores(const ListScoresArgs& args);
CustomArgs TokenWeights(const TokenWeightsArgs& args);
CustomArgs BlockWeights(const BlockWeightsArgs& args);
CustomArgs Exclude(const ExcludeArgs& args);

// Of the ops with these arguments, now.
Cost HoldChoiceCost(const void* args, HostArrays& arrays);
Cost BlockKeysCost(const void* args, HostArrays& arrays);
Cost ListScoresCost(const void* args, HostArrays& arrays);
Cost TokenWeightsCost(const void* args, HostArrays& arrays);
Cost BlockWeightsCost(const void* args, HostArrays& arrays);
Cost ExcludeCost(const void* args, HostArrays& arrays);

// On a card. Defined where CUDA is built (block_ops.cu).
void HoldChoiceCuda(const void* args, const cuda::Launch& launch);
void BlockKeysCuda(const void* args, const cuda::Launch& launch);
void ListScoresCuda(const void* args, const cuda::Launch& launch);
void TokenWeightsCuda(const void* args, const cuda::Launch& launch);
void BlockWeightsCuda(const void* args, const cuda::Launch& launch);
void ExcludeCuda(const void* args, const cuda::Launch& launch);

// What forms of these ops on all devices share.

OMNIKV_HOST_DEVICE inline bool HasBounds(BlockKeys keys) {
  return keys >= BlockKeys::kBoundsMean;
}

// The units that BlockKeysArgs makes keys of.
OMNIKV_HOST_DEVICE inline UnitRange UnitsMade(const BlockKeysArgs& a, const SeqMeta& seq) {
  if (a.keys == BlockKeys::kMean) return CompletedUnits(seq, a.unit);
  return {0, HasBounds(a.keys) ? seq.kv_len / a.unit : UnitsOf(seq.kv_len, a.unit)};
}

// What a step does with the choices of a sequence.
enum class HoldMove : int32_t { kNothing, kToSecond, kToFirst };
struct HoldStep {
  int32_t keep;
  HoldMove move;
  int32_t first, second;  // HoldChoiceArgs::made
};
OMNIKV_HOST_DEVICE inline HoldStep HoldStepOf(const BlockRule& rule, const SeqMeta& seq,
                                              int32_t first, int32_t second) {
  const int32_t n = seq.kv_len;
  const auto made = static_cast<int32_t>(rule.ChosenAt(n, seq.prompt_len));
  if (made < n && first == made) return {1, HoldMove::kNothing, first, second};
  if (made < n && second == made) return {1, HoldMove::kToFirst, made, second};
  if (first < n) return {0, HoldMove::kToSecond, made, first};
  return {0, HoldMove::kNothing, made, second};
}

}  // namespace omnikv
