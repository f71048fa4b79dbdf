// SHA-256 (FIPS 180-4), for names that are made of what they name: whoever chooses the bytes cannot
// find others of the same name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace omnikv {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  void Add(const void* data, size_t bytes);
  // Of all that was added; nothing may be added behind it.
  Digest Value();

 private:
  void Compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_ = {};
  size_t filled_ = 0;  // bytes of block_
  uint64_t bytes_ = 0;
};

// 64 digits, 0 to 9 and a to f.
std::string HexOf(const Sha256::Digest& digest);

}  // namespace omnikv
