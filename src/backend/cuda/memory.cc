#include "backend/cuda/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "base/log.h"

namespace omnikv::cuda {

std::string LastError() {
  return cudaGetErrorString(cudaGetLastError());
}

namespace {

// The most that a context takes (about 600 MiB on an H200), and that the driver takes later on
// (Llama-3-8B: some 60 MiB lost between the K/V of 32 layers, as much for code and graphs).
constexpr size_t kContextMost = size_t{1} << 30;
constexpr size_t kDriverMost = size_t{256} << 20;

}  // namespace

DeviceMemory::DeviceMemory(size_t cap) : cap_(cap) {
  size_t total = 0;
  if (cudaMemGetInfo(&free_at_start_, &total) == cudaSuccess) {
    context_ = std::min(total - free_at_start_, kContextMost);
  }
}

size_t DeviceMemory::Used(size_t free) const {
  const size_t gone = free_at_start_ - std::min(free, free_at_start_);
  return context_ + std::clamp(gone, *taken_, *taken_ + kDriverMost);
}

size_t DeviceMemory::Available() const {
  size_t free = 0;
  size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  if (cap_ == 0) return free;
  return std::min(free, cap_ - std::min(cap_, Used(free)));
}

Result<Buffer> DeviceMemory::Allocate(size_t bytes, std::string_view what, bool zeroed) {
  const size_t available = Available();
  void* data = nullptr;
  const bool refused = refuse_ && refuse_();
  if (refused || bytes > available ||
      cudaMalloc(&data, std::max<size_t>(bytes, 1)) != cudaSuccess) {
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
    if (!piece.ok()) throw OutOfMemory(piece.status().message());
    pieces_.push_back(std::move(*piece));
  }
  return pieces_.back().as<std::byte>();
}

}  // namespace omnikv::cuda

namespace omnikv {

std::optional<size_t> CudaMemoryInUse(int device) {
  size_t free = 0;
  size_t total = 0;
  if (cudaSetDevice(device) == cudaSuccess && cudaMemGetInfo(&free, &total) == cudaSuccess) {
    return total - free;
  }
  static_cast<void>(cudaGetLastError());
  return std::nullopt;
}

}  // namespace omnikv
