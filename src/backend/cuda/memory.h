// Device memory: allocations that say what they are for, and scratch that grows.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace omnikv::cuda {

// The runtime's last error as a clause, and forgets it.
std::string LastError();

// Memory of the current card, under a cap of this process's own.
class DeviceMemory {
 public:
  // `cap`: bytes that the process may take on the card, what the driver takes for it included; 0:
  // no cap.
  explicit DeviceMemory(size_t cap);

  // Zeroing happens on `stream`.
  void UseStream(cudaStream_t stream) { stream_ = stream; }
  // kResourceExhausted with the figures.
  Result<Buffer> Allocate(size_t bytes, std::string_view what, bool zeroed = true);
  // Bytes that can still be had: free on the card, and under the cap.
  size_t Available() const;

 private:
  size_t cap_;
  size_t base_ = 0;  // bytes that the driver took before the first allocation
  std::shared_ptr<size_t> taken_ = std::make_shared<size_t>(0);
  cudaStream_t stream_ = nullptr;
};

// Device memory of a size that is only known op by op. What it held is lost when it grows; old
// pieces live on, because recorded graphs may use them.
class GrowingBuffer {
 public:
  GrowingBuffer(DeviceMemory& memory, std::string_view what) : memory_(memory), what_(what) {}

  // At least `bytes`; aborts when there is no memory: callers plan for it.
  std::byte* Get(size_t bytes);

 private:
  DeviceMemory& memory_;
  std::string_view what_;
  std::vector<Buffer> pieces_;  // the last is the largest
};

}  // namespace omnikv::cuda
