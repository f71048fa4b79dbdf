#include "text/tokenizer/charsmap.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "text/tokenizer/unicode.h"

namespace omnikv::tok {
namespace {

// Longer keys are not found: an array with a loop in it would have keys without end.
constexpr size_t kMaxKeyBytes = 256;

uint32_t Offset(uint32_t unit) {
  return (unit >> 10) << ((unit & (1u << 9)) >> 6);
}

}  // namespace

Result<Charsmap> Charsmap::Parse(std::string_view blob) {
  uint32_t bytes = 0;
  if (blob.size() >= 4) std::memcpy(&bytes, blob.data(), 4);
  if (blob.size() < 8 || bytes % 4 != 0 || bytes == 0 || bytes > blob.size() - 4) {
    return Corrupt(fmt::format(
        "the precompiled character map has {} bytes and an array of {}, expected an array of u32 "
        "inside the map",
        blob.size(), bytes));
  }
  Charsmap map;
  map.units_.resize(bytes / 4);
  std::memcpy(map.units_.data(), blob.data() + 4, bytes);
  map.replacements_ = std::string(blob.substr(4 + size_t{bytes}));
  if (!IsValidUtf8(map.replacements_)) {
    return Corrupt("the replacements of the precompiled character map are not valid UTF-8");
  }
  return map;
}

std::optional<Charsmap::Match> Charsmap::Find(std::string_view text, bool longest) const {
  std::optional<Match> match;
  uint32_t node = Offset(units_[0]);
  for (size_t i = 0; i < std::min(text.size(), kMaxKeyBytes); ++i) {
    const auto c = static_cast<uint8_t>(text[i]);
    node ^= c;
    if (c == 0 || node >= units_.size()) break;
    const uint32_t unit = units_[node];
    if ((unit & ((1u << 31) | 0xFFu)) != c) break;
    node ^= Offset(unit);
    if (((unit >> 8) & 1u) == 0) continue;
    if (node >= units_.size()) break;
    const uint32_t value = units_[node] & ((1u << 31) - 1);
    if (value > replacements_.size()) break;
    const char* begin = replacements_.c_str() + value;
    if (value < replacements_.size() && (static_cast<uint8_t>(*begin) & 0xC0u) == 0x80u) break;
    match = Match{i + 1, std::string_view(begin, std::strlen(begin))};
    if (!longest) break;
  }
  return match;
}

std::optional<std::string> DecodeBase64(std::string_view text) {
  const auto value = [](char c) -> int {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
  };
  if (text.size() % 4 != 0) return std::nullopt;
  for (int i = 0; i < 2 && !text.empty() && text.back() == '='; ++i) text.remove_suffix(1);
  std::string out;
  out.reserve(text.size() / 4 * 3 + 2);
  uint32_t bits = 0;
  int n = 0;
  for (const char c : text) {
    const int v = value(c);
    if (v < 0) return std::nullopt;
    bits = (bits << 6) | static_cast<uint32_t>(v);
    n += 6;
    if (n >= 8) {
      n -= 8;
      out += static_cast<char>((bits >> n) & 0xFFu);
    }
  }
  return out;
}

}  // namespace omnikv::tok
