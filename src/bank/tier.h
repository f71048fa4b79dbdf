// A tier: memory of one kind that holds blocks of K/V. The bank decides which block lies where; a
// tier knows bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "omnikv/status.h"

namespace omnikv {

class Tier {
 public:
  virtual ~Tier() = default;
  // The address of block 0 of `stream`; blocks follow one another.
  virtual std::byte* Base(int32_t stream) const = 0;
  // Copies block `from` of `stream` to block `to`, on the main lane: after the work of steps on the
  // other lanes, which steps join before they end.
  virtual void CopyBlock(int32_t stream, int32_t from, int32_t to) = 0;
};

enum class TierKind {
  kDevice,  // the backend's own memory: a card's, or the host's under a host backend
  // Memory beside it: the host's where the backend has its own, or files on a disk
  // (Backend::AllocateOnDisk).
  kHost,
};

// The blocks of one stream of one layer in a tier.
struct TierStream {
  size_t block_bytes = 0;  // 0: another tier holds the stream
  int32_t n_blocks = 0;
  bool on_disk = false;  // of kHost
};

// Room for all blocks of `streams`, reserved at once, so that rows never move and growth never
// copies; on a host backend, physical memory is taken as blocks are first written. kHost is made
// ready in the background: Backend::AwaitShared comes before the first write.
Result<std::unique_ptr<Tier>> MakeTier(Backend& backend, TierKind kind,
                                       const std::vector<TierStream>& streams);

}  // namespace omnikv
