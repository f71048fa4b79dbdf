// Device memory: allocations that say what they are for, and scratch that grows.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace omnikv::cuda {

// The runtime's last error as a clause, and forgets it.
std::string LastError();

// Thrown inside this folder, from below an op; CudaBackend catches it (Backend::TakeFailure).
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory of the current card, under a cap of this process's own. The driver takes some for it too:
// a context before the first allocation, then code as kernels are first used, graphs, and what is
// lost between allocations. Where the driver tells no process apart (in containers), all that is
// known is the card's free memory, which other processes change too; so those are counted as what
// left the card, within bounds that hold for a process alone.
class DeviceMemory {
 public:
  // `cap`: bytes that the process may take on the card, what the driver takes for it included; 0:
  // no cap.
  explicit DeviceMemory(size_t cap);

  // Tests: allocations of which `refuse` says so fail.
  void RefuseIf(std::function<bool()> refuse) { refuse_ = std::move(refuse); }
  // Zeroing happens on `stream`.
  void UseStream(cudaStream_t stream) { stream_ = stream; }
  // kResourceExhausted with the figures.
  Result<Buffer> Allocate(size_t bytes, std::string_view what, bool zeroed = true);
  // Bytes that can still be had: free on the card, and under the cap.
  size_t Available() const;
  // What the driver had taken before the first allocation, about.
  size_t context_bytes() const { return context_; }

 private:
  // Bytes that the process has taken, about: at least what was allocated.
  size_t Used(size_t free) const;

  size_t cap_;
  size_t context_ = 0;        // bytes that the driver took before the first allocation
  size_t free_at_start_ = 0;  // on the card, then
  std::shared_ptr<size_t> taken_ = std::make_shared<size_t>(0);
  cudaStream_t stream_ = nullptr;
  std::function<bool()> refuse_;
};

// Device memory of a size that is only known op by op. What it held is lost when it grows; old
// pieces live on, because recorded graphs may use them.
class GrowingBuffer {
 public:
  GrowingBuffer(DeviceMemory& memory, std::string_view what) : memory_(memory), what_(what) {}

  // At least `bytes`; throws OutOfMemory.
  std::byte* Get(size_t bytes);

 private:
  DeviceMemory& memory_;
  std::string_view what_;
  std::vector<Buffer> pieces_;  // the last is the largest
};

}  // namespace omnikv::cuda
