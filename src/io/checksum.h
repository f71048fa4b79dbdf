// A checksum of bytes that come in pieces: XXH3 with 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace omnikv {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&& other) noexcept;
  Checksum& operator=(Checksum&& other) noexcept;
  void Add(const void* data, size_t bytes);
  uint64_t Value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace omnikv
