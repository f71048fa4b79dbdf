// A tier: memory of one kind that holds physical blocks of K/V. The bank decides which block lies
// where; a tier knows bytes. Adding a tier is one file (DESIGN §2 rule 4).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "omnikv/status.h"

namespace omnikv {

class Tier {
 public:
  virtual ~Tier() = default;
  virtual std::string_view Name() const = 0;  // "host", "device", "disk"
  // Where block 0 of layer `layer` lies; blocks follow one another.
  virtual std::byte* Base(int32_t layer) const = 0;
  // Copies block `from` to block `to` in every layer.
  virtual void CopyBlock(int32_t from, int32_t to) = 0;
  // Bytes of memory that the first `n_blocks` blocks take.
  virtual size_t BytesFor(int32_t n_blocks) const = 0;
};

// Memory of the backend's host side. Room for `n_blocks` blocks is reserved at once, so that rows
// never move and growth never copies; physical memory is taken as blocks are first written.
// `block_bytes` holds the bytes of one block in each layer.
Result<std::unique_ptr<Tier>> MakeHostTier(Backend& backend, int32_t n_blocks,
                                           std::vector<size_t> block_bytes);

}  // namespace omnikv
