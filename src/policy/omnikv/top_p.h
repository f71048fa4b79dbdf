// The op of `top_p`: of a list of the best tokens it leaves the fewest, from the best one on, whose
// scores together reach a share of the scores of all candidates (Twilight, arXiv 2502.02770, whose
// published search starts at the score of token 0 and so may leave too many). Sums are of whole
// numbers, as a draw's (docs/decisions/008): every backend leaves the same tokens of equal scores.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "backend/ops.h"

namespace omnikv {

// What a score counts is `2^40 score`, rounded down; nothing where it is no weight of attention: it
// is not above 0, or the token was chosen first (kChosenFirst) and stays whatever the others have.
// Sums over all tokens stay below 2^61 of up to 2^20 windows of heads.
struct TopPArgs {
  const float* scores;          // [n_seqs, lists, window, stride]: as TopKArgs has them
  const float* weights;         // [window]
  const SeqMeta* seqs;          // [n_seqs]
  const int32_t* n_candidates;  // [n_seqs]
  int32_t* index;               // [n_seqs, lists, capacity]: what TopK chose, ascending
  int32_t* count;               // [n_seqs, lists]: at most capacity
  int64_t stride;               // tokens
  uint64_t share;               // the bits of a double, 0 to 1
  int32_t window, lists, capacity, n_seqs;
};

// TopKArgs::scores' S[t] of list `list` of all sequences' lists.
OMNIKV_HOST_DEVICE inline float CombinedScore(const TopPArgs& a, int64_t list, int32_t t) {
  const float* rows = a.scores + list * a.window * a.stride;
  if (a.window == 1) return static_cast<float>(static_cast<double>(a.weights[0]) * rows[t]);
  const int32_t p = a.seqs[list / a.lists].kv_len - 1;
  double sum = 0;
  for (int32_t age = 0; age < a.window && t <= p - age; ++age) {
    const float* row = rows + int64_t{(p - age) % a.window} * a.stride;
    sum += static_cast<double>(a.weights[age]) * static_cast<double>(row[t]);
  }
  return static_cast<float>(sum);
}

OMNIKV_HOST_DEVICE inline uint64_t MassOf(float score) {
  constexpr float kMost = 1 << 20;
  if (!(score > 0) || score >= kChosenFirst) return 0;
  const float bounded = score < kMost ? score : kMost;
  return static_cast<uint64_t>(static_cast<double>(bounded) * 1099511627776.0);
}

// What the tokens that stay must have together.
OMNIKV_HOST_DEVICE inline uint64_t MassWanted(double share, uint64_t total) {
  const double wanted = ceil(share * static_cast<double>(total));
  return wanted < static_cast<double>(total) ? static_cast<uint64_t>(wanted) : total;
}

// An unsigned number of the same order, NaN as -inf.
OMNIKV_HOST_DEVICE inline uint32_t OrderOf(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if (bits == 0x80000000u) bits = 0;  // both zeros alike
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Enqueues it on a card. Defined where CUDA is built (top_p.cu).
void TopPCuda(const void* args, const cuda::Launch& launch);

extern const CustomKernels kTopP;

}  // namespace omnikv
