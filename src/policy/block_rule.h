// How many blocks a layer reads that chooses blocks of tokens, and in which steps it chooses: the
// same on a device and on the host, and a function of lengths alone. So a step that ran ahead and
// is forgotten leaves no trace in it.
#pragma once

#include <cstdint>

#include "backend/score_ops.h"

namespace omnikv {

struct BlockRule {
  int32_t block = 1;         // tokens
  int32_t budget = 1;        // blocks that a layer reads, those included that it always does:
  int32_t sinks = 0;         // the first blocks
  int32_t recent = 1;        // and the last ones, 1 at least: the last block may not be full
  int32_t token_step = 1;    // steps that read one choice, from the first step after a prompt on
  int32_t preselect = -1;    // blocks of a prompt, between its first and last ones, that are ever
                             // chosen; -1: all
  int32_t prompt_alone = 0;  // 1: blocks of generated tokens have no scores, and come last

  // Blocks of a prompt that no later step reads.
  OMNIKV_HOST_DEVICE int32_t Excluded(int64_t prompt) const {
    if (preselect < 0) return 0;
    const int32_t between = UnitsOf(static_cast<int32_t>(prompt), block) - recent - sinks;
    return between > preselect ? between - preselect : 0;
  }
  // Whether a step that leaves n tokens reads all but those.
  OMNIKV_HOST_DEVICE bool ReadsRest(int64_t n, int64_t prompt) const {
    return UnitsOf(static_cast<int32_t>(n), block) - Excluded(prompt) <= budget;
  }
  // Blocks that such a step reads.
  OMNIKV_HOST_DEVICE int32_t BlocksRead(int64_t n, int64_t prompt) const {
    const int32_t blocks = UnitsOf(static_cast<int32_t>(n), block);
    const int32_t left = blocks - Excluded(prompt);
    if (left <= budget) return left;
    const auto whole = static_cast<int32_t>(prompt / block);
    const int32_t late = blocks - recent - (whole > sinks ? whole : sinks);
    const int32_t most = prompt_alone != 0 && late > 0 ? left - late : left;
    return most < budget ? most : budget;
  }
  // The tokens after the step whose choice it reads: n, where it chooses itself. A step chooses
  // where `token_step` says so, where it reads all the rest, and where it is the first that does
  // not.
  OMNIKV_HOST_DEVICE int64_t ChosenAt(int64_t n, int64_t prompt) const {
    if (token_step == 1 || n <= prompt || ReadsRest(n, prompt)) return n;
    const int64_t phase = prompt + 1 + (n - 1 - prompt) / token_step * token_step;
    const int64_t first = (int64_t{budget} + Excluded(prompt)) * block + 1;
    return first > phase ? first : phase;
  }
};

}  // namespace omnikv
