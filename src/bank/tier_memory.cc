// Tiers in memory that kernels reach: the backend's own, and the host's beside it.
#include <utility>

#include "bank/tier.h"

namespace omnikv {
namespace {

class MemoryTier : public Tier {
 public:
  MemoryTier(Backend& backend, std::vector<Buffer> layers, std::vector<size_t> block_bytes)
      : backend_(backend), layers_(std::move(layers)), block_bytes_(std::move(block_bytes)) {}

  std::byte* Base(int32_t layer) const override {
    return layers_[static_cast<size_t>(layer)].as<std::byte>();
  }
  void CopyBlock(int32_t from, int32_t to) override {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      auto* base = layers_[layer].as<std::byte>();
      const size_t bytes = block_bytes_[layer];
      if (bytes == 0) continue;
      backend_.Upload(base + static_cast<size_t>(to) * bytes,
                      base + static_cast<size_t>(from) * bytes, bytes);
    }
  }
  size_t BytesFor(int32_t n_blocks) const override {
    size_t bytes = 0;
    for (size_t b : block_bytes_) bytes += b * static_cast<size_t>(n_blocks);
    return bytes;
  }

 private:
  Backend& backend_;
  std::vector<Buffer> layers_;
  std::vector<size_t> block_bytes_;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeTier(Backend& backend, TierKind kind, int32_t n_blocks,
                                       std::vector<size_t> block_bytes) {
  std::vector<Buffer> layers;
  for (const size_t bytes : block_bytes) {
    Buffer& layer = layers.emplace_back();
    const size_t total = bytes * static_cast<size_t>(n_blocks);
    if (total == 0) continue;
    OKV_ASSIGN_OR_RETURN(layer, kind == TierKind::kOwn ? backend.Allocate(total, "K/V")
                                                       : backend.AllocateSharedLater(total, "K/V"));
  }
  return std::unique_ptr<Tier>(
      std::make_unique<MemoryTier>(backend, std::move(layers), std::move(block_bytes)));
}

}  // namespace omnikv
