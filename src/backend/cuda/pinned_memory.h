// Memory of the host that kernels and copy engines reach. Large pieces take seconds to come by from
// the driver, which clears and maps them page by page: here they lie on huge pages near the card,
// many threads fault them in, and the driver only pins what is there.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace omnikv::cuda {

// Zeroed memory that one card reaches by the same pointer. Thread-compatible; buffers may outlive
// it, and wait for the card when they are given back.
class PinnedMemory {
 public:
  explicit PinnedMemory(int device) : device_(device) {}

  // Ready on return. kResourceExhausted with the figures.
  Result<Buffer> Allocate(size_t bytes, std::string_view what);
  // Returns at once where it is large: nothing may use it before Await has returned, ok.
  Result<Buffer> AllocateLater(size_t bytes, std::string_view what);
  // Waits for what AllocateLater gave: kResourceExhausted with the figures if some of it cannot be
  // had.
  Status Await();

 private:
  class Region;

  // Whether `bytes` are worth a Region, and the card takes memory that it did not allocate itself.
  bool TakesRegion(size_t bytes);
  Result<std::shared_ptr<Region>> Start(size_t bytes, std::string_view what);

  int device_;
  std::optional<bool> registers_;               // once asked
  std::vector<std::weak_ptr<Region>> started_;  // and not awaited
  size_t left_ = 0;  // bytes of the host beside those, while there are any
};

}  // namespace omnikv::cuda
