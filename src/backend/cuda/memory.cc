#include "backend/cuda/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/log.h"

namespace omnikv::cuda {

std::string LastError() {
  return cudaGetErrorString(cudaGetLastError());
}

DeviceMemory::DeviceMemory(size_t cap) : cap_(cap) {
  size_t free = 0;
  size_t total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) base_ = total - free;
}

size_t DeviceMemory::Available() const {
  size_t free = 0;
  size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  const size_t used = base_ + *taken_;
  if (cap_ == 0) return free;
  return std::min(free, cap_ > used ? cap_ - used : 0);
}

Result<Buffer> DeviceMemory::Allocate(size_t bytes, std::string_view what, bool zeroed) {
  const size_t available = Available();
  void* data = nullptr;
  if (bytes > available || cudaMalloc(&data, std::max<size_t>(bytes, 1)) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return ResourceExhausted(fmt::format("{} of GPU memory for {} cannot be had ({} available)",
                                         HumanBytes(bytes), what, HumanBytes(available)));
  }
  if (zeroed && cudaMemsetAsync(data, 0, bytes, stream_) != cudaSuccess) {
    cudaFree(data);
    return Failed(fmt::format("GPU memory for {} cannot be cleared: {}", what, LastError()));
  }
  *taken_ += bytes;
  return Buffer(data, bytes, [taken = taken_, bytes](void* p) {
    if (p == nullptr) return;
    cudaFree(p);
    *taken -= bytes;
  });
}

std::byte* GrowingBuffer::Get(size_t bytes) {
  if (bytes == 0) return nullptr;
  if (pieces_.empty() || pieces_.back().size() < bytes) {
    const size_t before = pieces_.empty() ? 0 : pieces_.back().size();
    auto piece = memory_.Allocate(std::max(bytes, before + before / 2), what_, /*zeroed=*/false);
    OKV_CHECK(piece.ok(), "{}", piece.status().message());
    pieces_.push_back(std::move(*piece));
  }
  return pieces_.back().as<std::byte>();
}

}  // namespace omnikv::cuda
