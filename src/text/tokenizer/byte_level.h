// The alphabet of byte-level BPE: every byte has a printable character of one or two bytes.
// Bytes 21-7E, A1-AC and AE-FF stand for themselves (as code points); the other 68, in order, for
// U+0100 and on.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace omnikv::tok {

inline constexpr std::array<char16_t, 256> kByteToChar = [] {
  std::array<char16_t, 256> table{};
  char16_t next = 0x100;
  for (unsigned b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    table[b] = printable ? static_cast<char16_t>(b) : next++;
  }
  return table;
}();

// Appends the character of each byte.
inline void AppendByteChars(std::string_view bytes, std::string* out) {
  for (const char c : bytes) {
    const char16_t code = kByteToChar[static_cast<uint8_t>(c)];
    if (code < 0x80) {
      *out += static_cast<char>(code);
    } else {
      *out += static_cast<char>(0xC0 | (code >> 6));
      *out += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
}

// Appends the bytes that the characters of `chars` (well-formed UTF-8) stand for; false, with *out
// as it was, when one is not of the alphabet.
inline bool AppendCharBytes(std::string_view chars, std::string* out) {
  const size_t old_size = out->size();
  for (size_t i = 0; i < chars.size();) {
    const auto lead = static_cast<uint8_t>(chars[i]);
    unsigned code = lead;
    size_t size = 1;
    if (lead >= 0xC0 && lead < 0xE0) {
      code = ((lead & 0x1Fu) << 6) | (static_cast<uint8_t>(chars[i + 1]) & 0x3Fu);
      size = 2;
    }
    // The characters from U+0100 on stand for 00-20, then 7F-A0, then AD.
    if (code >= 0x100) {
      const unsigned n = code - 0x100;
      code = n <= 0x20 ? n : n <= 0x42 ? n - 0x21 + 0x7F : n == 0x43 ? 0xAD : 0x100;
    } else if (kByteToChar[code] != code) {
      code = 0x100;
    }
    if (code >= 0x100 || (size == 1 && lead >= 0x80)) {
      out->resize(old_size);
      return false;
    }
    *out += static_cast<char>(code);
    i += size;
  }
  return true;
}

}  // namespace omnikv::tok
