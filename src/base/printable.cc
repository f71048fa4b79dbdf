#include "base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace omnikv {
namespace {

struct Char {
  char32_t code;
  size_t size;  // bytes; 0: no UTF-8
};

Char CharAt(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(pos);
  if (lead < 0x80) return {lead, 1};
  const size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || pos + size > text.size()) return {0, 0};
  char32_t code = lead & (0x7Fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(pos + i) & 0xC0u) != 0x80) return {0, 0};
    code = code << 6 | (byte(pos + i) & 0x3Fu);
  }
  static constexpr std::array<char32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast[size] || surrogate || code > 0x10FFFF) return {0, 0};
  return {code, size};
}

// Characters that are obeyed or not seen: general categories Cc and Cf, line and paragraph
// separators, noncharacters and the like. Ascending ranges.
bool IsUnsafe(char32_t c) {
  static constexpr std::array<std::pair<char32_t, char32_t>, 22> kRanges = {{
      {0x0000, 0x001F}, {0x007F, 0x009F}, {0x00AD, 0x00AD}, {0x034F, 0x034F}, {0x0600, 0x0605},
      {0x061C, 0x061C}, {0x06DD, 0x06DD}, {0x070F, 0x070F}, {0x0890, 0x0891}, {0x08E2, 0x08E2},
      {0x115F, 0x1160}, {0x17B4, 0x17B5}, {0x180B, 0x180F}, {0x200B, 0x200F}, {0x2028, 0x202E},
      {0x2060, 0x206F}, {0x3164, 0x3164}, {0xFDD0, 0xFDEF}, {0xFE00, 0xFE0F}, {0xFEFF, 0xFEFF},
      {0xFFA0, 0xFFA0}, {0xFFF0, 0xFFFB},
  }};
  if (c >= 0xE000) {  // private use, tags and what no script uses
    if (c <= 0xF8FF || c >= 0xE0000 || (c & 0xFFFE) == 0xFFFE) return true;
    if (c >= 0x110BD && c <= 0x1D17A) {
      return c == 0x110BD || c == 0x110CD || (c >= 0x13430 && c <= 0x1345F) ||
             (c >= 0x1BCA0 && c <= 0x1BCA3) || c >= 0x1D173;
    }
  }
  return std::any_of(kRanges.begin(), kRanges.end(),
                     [c](const auto& range) { return c >= range.first && c <= range.second; });
}

}  // namespace

std::string Escaped(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const size_t size = std::max<size_t>(c.size, 1);
    if (pos + size > max_bytes) return out + "...";
    if (c.size > 0 && !IsUnsafe(c.code)) {
      out += text.substr(pos, size);
    } else {
      for (const char byte : text.substr(pos, size)) {
        out += fmt::format("\\x{:02x}", static_cast<uint8_t>(byte));
      }
    }
    pos += size;
  }
  return out;
}

std::string Printable(std::string_view text, size_t max_bytes) {
  return fmt::format("'{}'", Escaped(text, max_bytes));
}

}  // namespace omnikv
