// A tier: memory of one kind that holds physical blocks of K/V. The bank decides which block lies
// where; a tier knows bytes. Adding a tier is one file.
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
  // Where block 0 of layer `layer` lies; blocks follow one another.
  virtual std::byte* Base(int32_t layer) const = 0;
  // Copies block `from` to block `to` in every layer, on the main lane: after what steps did on the
  // others, which they join before they end.
  virtual void CopyBlock(int32_t from, int32_t to) = 0;
  // Bytes of memory that the first `n_blocks` blocks take.
  virtual size_t BytesFor(int32_t n_blocks) const = 0;
};

enum class TierKind {
  kOwn,   // the backend's own memory: a card's, or the host's under a host backend
  kHost,  // the host's memory, where the backend has its own
};

// Room for `n_blocks` blocks, reserved at once, so that rows never move and growth never copies; on
// a host backend, physical memory is taken as blocks are first written. kHost is made ready in the
// background: Backend::AwaitShared comes before the first write. `block_bytes` holds the bytes of
// one block in each layer, 0 for layers that this tier does not hold.
Result<std::unique_ptr<Tier>> MakeTier(Backend& backend, TierKind kind, int32_t n_blocks,
                                       std::vector<size_t> block_bytes);

}  // namespace omnikv
