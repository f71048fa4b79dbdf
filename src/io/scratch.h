// Bytes that are put away for a while: in memory, or in a file of a folder that has no name and
// goes with the process.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

// Thread-compatible.
class Scratch {
 public:
  // `folder`: where the file lies; empty: in memory. kFailed where it cannot be made there.
  static Result<Scratch> Create(const std::string& folder);
  ~Scratch();
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&& other) noexcept;

  // Behind what is there. Errors (no room on the disk) are those of status().
  void Append(const void* data, size_t bytes);
  Status status() const { return status_; }
  size_t size() const { return size_; }  // bytes
  // REQUIRES [offset, offset + bytes) inside size(). kFailed where the system cannot read it.
  Status Read(size_t offset, size_t bytes, void* to) const;

 private:
  Scratch() = default;

  std::string folder_;  // of the file; empty: in memory
  int file_ = -1;
  std::vector<std::byte> memory_;
  size_t size_ = 0;
  Status status_;
};

}  // namespace omnikv
