#include <cstring>
#include <utility>

#include "bank/tier.h"

namespace omnikv {
namespace {

class HostTier : public Tier {
 public:
  HostTier(std::vector<Buffer> layers, std::vector<size_t> block_bytes)
      : layers_(std::move(layers)), block_bytes_(std::move(block_bytes)) {}

  std::string_view Name() const override { return "host"; }
  std::byte* Base(int32_t layer) const override {
    return layers_[static_cast<size_t>(layer)].as<std::byte>();
  }
  void CopyBlock(int32_t from, int32_t to) override {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      auto* base = layers_[layer].as<std::byte>();
      const size_t bytes = block_bytes_[layer];
      std::memcpy(base + static_cast<size_t>(to) * bytes, base + static_cast<size_t>(from) * bytes,
                  bytes);
    }
  }
  size_t BytesFor(int32_t n_blocks) const override {
    size_t bytes = 0;
    for (size_t b : block_bytes_) bytes += b * static_cast<size_t>(n_blocks);
    return bytes;
  }

 private:
  std::vector<Buffer> layers_;
  std::vector<size_t> block_bytes_;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeHostTier(Backend& backend, int32_t n_blocks,
                                           std::vector<size_t> block_bytes) {
  std::vector<Buffer> layers;
  for (size_t bytes : block_bytes) {
    OKV_ASSIGN_OR_RETURN(Buffer layer,
                         backend.Allocate(bytes * static_cast<size_t>(n_blocks), "K/V"));
    layers.push_back(std::move(layer));
  }
  return std::unique_ptr<Tier>(
      std::make_unique<HostTier>(std::move(layers), std::move(block_bytes)));
}

}  // namespace omnikv
