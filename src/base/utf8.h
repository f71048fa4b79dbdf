// Characters of UTF-8 text, one at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace omnikv {

struct Utf8Char {
  char32_t code;
  size_t size;  // bytes, 1 to 4; 0: the bytes are no well-formed character
};

// The character at byte `pos`. REQUIRES pos < text.size().
Utf8Char Utf8CharAt(std::string_view text, size_t pos);

// REQUIRES code <= 0x10FFFF.
void AppendUtf8(std::string* out, char32_t code);

}  // namespace omnikv
