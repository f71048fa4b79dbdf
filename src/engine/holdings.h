// What an engine holds, for those who watch it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/core.h"

namespace omnikv {

struct Holdings {
  // Of the tables of the bank that have blocks of their own.
  struct Blocks {
    int32_t table = 0;
    int64_t used = 0, total = 0;
  };
  std::vector<Blocks> blocks;
  TierBytes bytes;  // K/V in blocks that are in use, stages, policies and working sets
};
Holdings HoldingsOf(const EngineCore& core);
// `near` in the backend's own memory; beside it, in the host's memory and on a disk.
TierBytes BytesByTier(const EngineCore& core, size_t near, size_t on_host, size_t on_disk);

}  // namespace omnikv
