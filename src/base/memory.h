// Memory that lives as long as a model or a session: aligned, on huge pages where the system has
// them, zeroed, and reserved without being used until it is touched.
#pragma once

#include <cstddef>
#include <string>

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

// Bytes of physical memory that the machine and the control groups (version 1 or 2) still let this
// process take, and at most what its limit of address space leaves; file pages that are given back
// when memory is short count as free. `root` is where /proc and /sys lie, here and below; tests
// have their own.
size_t AvailableMemory(const std::string& root = "");

// Resident bytes of this process.
size_t ResidentMemory();

// Physical cores the control groups allow: one logical CPU per core of the affinity mask, at most
// their quota rounded up, at least 1.
int PhysicalCores(const std::string& root = "");

}  // namespace omnikv
