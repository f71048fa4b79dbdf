// How many blocks of the bank a sequence will take, known from its policy before it begins.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core.h"

namespace omnikv {

// Blocks by table of the bank: of all tables that draw on the same blocks at the first of them, and
// 0 at the others.
using BlockCounts = std::vector<int64_t>;

// The most that a sequence of the policy has at a time, whose first prompt has `prompt` tokens and
// which has `total` in the end. A block more than its rows fill, for one that is half another's.
BlockCounts MostBlocks(const EngineCore& core, const Policy& policy, int64_t prompt, int64_t total);

// kResourceExhausted, with both numbers, where the bank has fewer than those in all.
Status CheckBlocks(const EngineCore& core, const BlockCounts& most, int64_t total);

}  // namespace omnikv
