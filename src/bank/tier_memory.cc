// Tiers in memory that kernels reach: the backend's own, and the host's beside it.
#include <utility>

#include "bank/tier.h"

namespace omnikv {
namespace {

class MemoryTier : public Tier {
 public:
  MemoryTier(Backend& backend, std::vector<Buffer> memory, std::vector<TierStream> streams)
      : backend_(backend), memory_(std::move(memory)), streams_(std::move(streams)) {}

  std::byte* Base(int32_t stream) const override {
    return memory_[static_cast<size_t>(stream)].as<std::byte>();
  }
  void CopyBlock(int32_t stream, int32_t from, int32_t to) override {
    const size_t bytes = streams_[static_cast<size_t>(stream)].block_bytes;
    if (bytes == 0) return;
    std::byte* base = Base(stream);
    backend_.Upload(base + static_cast<size_t>(to) * bytes,
                    base + static_cast<size_t>(from) * bytes, bytes);
  }

 private:
  Backend& backend_;
  std::vector<Buffer> memory_;
  std::vector<TierStream> streams_;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeTier(Backend& backend, TierKind kind,
                                       const std::vector<TierStream>& streams) {
  std::vector<Buffer> memory;
  for (const TierStream& stream : streams) {
    Buffer& buffer = memory.emplace_back();
    const size_t bytes = stream.block_bytes * static_cast<size_t>(stream.n_blocks);
    if (bytes == 0) continue;
    OKV_ASSIGN_OR_RETURN(buffer, kind == TierKind::kDevice ? backend.Allocate(bytes, "K/V")
                                 : stream.on_disk          ? backend.AllocateOnDisk(bytes, "K/V")
                                                  : backend.AllocateSharedLater(bytes, "K/V"));
  }
  return std::unique_ptr<Tier>(std::make_unique<MemoryTier>(backend, std::move(memory), streams));
}

}  // namespace omnikv
