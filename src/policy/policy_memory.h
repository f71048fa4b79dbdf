// What a policy allocates in Prepare, and how much of it there is.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "backend/backend.h"

namespace omnikv {

// Counts the bytes of the buffers that were taken. Thread-compatible.
class PolicyMemory {
 public:
  // Zeroed room for n values of 4 bytes. As Backend::Allocate, whose message names `what`.
  Result<Buffer> Take(Backend& backend, int64_t n, std::string_view what) {
    OKV_ASSIGN_OR_RETURN(Buffer buffer, backend.Allocate(static_cast<size_t>(n) * 4, what));
    bytes_ += buffer.size();
    return buffer;
  }
  // The same for several buffers, each of so many values.
  struct Room {
    Buffer& buffer;
    int64_t n;
  };
  Status Take(Backend& backend, std::string_view what, std::initializer_list<Room> rooms) {
    for (const Room& room : rooms) {
      OKV_ASSIGN_OR_RETURN(room.buffer, Take(backend, room.n, what));
    }
    return {};
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace omnikv
