// A fast hash of short byte strings, for tables that live in memory only.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace omnikv::tok {

// Both halves of the 128-bit product, folded.
inline uint64_t MixBits(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t HashPair(uint32_t a, uint32_t b) {
  return MixBits((uint64_t{a} << 32 | b) ^ 0x9E3779B97F4A7C15u, 0xD6E8FEB86659FD93u);
}

inline uint64_t HashBytes(std::string_view s) {
  constexpr uint64_t kMultiplier = 0xA0761D6478BD642Fu;
  const char* p = s.data();
  size_t n = s.size();
  uint64_t h = 0xE7037ED1A0B428DBu ^ n;
  uint64_t word;
  for (; n > 8; n -= 8, p += 8) {
    std::memcpy(&word, p, 8);
    h = MixBits(h ^ word, kMultiplier);
  }
  word = 0;
  if (n == 8) {
    std::memcpy(&word, p, 8);
  } else if (n >= 4) {
    uint32_t low;
    uint32_t high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + n - 4, 4);
    word = uint64_t{high} << 32 | low;
  } else if (n > 0) {
    word = static_cast<uint8_t>(p[0]) | uint64_t{static_cast<uint8_t>(p[n / 2])} << 8 |
           uint64_t{static_cast<uint8_t>(p[n - 1])} << 16;
  }
  return MixBits(h ^ word, 0x8EBC6AF09C88C6E3u);
}

}  // namespace omnikv::tok
