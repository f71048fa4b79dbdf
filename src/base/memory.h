// Memory that lives as long as a model or a session: aligned, on huge pages where the system has
// them, zeroed, and reserved without being used until it is touched.
#pragma once

#include <cstddef>

#include "omnikv/status.h"

namespace omnikv {

// A page-aligned span of anonymous memory, zero until written. Physical pages are taken on first
// touch, so a reservation larger than the machine is allowed (the context bank relies on it).
// Movable; the pages go back when it is destroyed. Thread-compatible.
class Pages {
 public:
  Pages() = default;
  ~Pages() { Release(); }
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // At least `bytes` bytes; fails with kResourceExhausted and the figures when the kernel refuses.
  static Result<Pages> Reserve(size_t bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Release();

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Bytes of physical memory that the machine and the control group still let this process take.
size_t AvailableMemory();

// Resident bytes of this process.
size_t ResidentMemory();

// CPU time, wall clock and so on are std::chrono's; physical cores the control group allows:
// one logical CPU per core of the affinity mask, at most the cgroup's quota rounded up, at least 1.
int PhysicalCores();

}  // namespace omnikv
