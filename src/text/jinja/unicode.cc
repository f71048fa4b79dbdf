#include "text/jinja/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "base/utf8.h"
#include "text/jinja/str.h"

namespace omnikv::jinja {
namespace {

constexpr char32_t kEscapedByte = 0xDC00;  // plus the byte

utf8proc_int32_t Cp(char32_t code) {
  return static_cast<utf8proc_int32_t>(code);
}

bool IsEscapedByte(char32_t code) {
  return code >= 0xDC80 && code <= 0xDCFF;
}

// The letters whose upper case is two or more ASCII letters.
const char* LongUpper(char32_t code) {
  switch (code) {
    case 0x00DF:
      return "SS";
    case 0xFB00:
      return "FF";
    case 0xFB01:
      return "FI";
    case 0xFB02:
      return "FL";
    case 0xFB03:
      return "FFI";
    case 0xFB04:
      return "FFL";
    case 0xFB05:
    case 0xFB06:
      return "ST";
    default:
      return nullptr;
  }
}

}  // namespace

Char CharAt(std::string_view text, size_t pos) {
  const Utf8Char c = Utf8CharAt(text, pos);
  if (c.size == 0) return {kEscapedByte + static_cast<unsigned char>(text[pos]), 1};
  return {c.code, c.size};
}

Char CharBefore(std::string_view text, size_t end) {
  for (size_t size = 2; size <= 4 && size <= end; ++size) {
    const Char c = CharAt(text.substr(0, end), end - size);
    if (c.size == size) return c;
  }
  return CharAt(text, end - 1);
}

void AppendUtf8(std::string* out, char32_t code) {
  if (IsEscapedByte(code)) {
    out->push_back(static_cast<char>(code - kEscapedByte));
  } else {
    omnikv::AppendUtf8(out, code);
  }
}

size_t CountChars(std::string_view text) {
  size_t n = 0;
  for (size_t i = 0; i < text.size(); ++n) i += CharAt(text, i).size;
  return n;
}

size_t ByteOffset(std::string_view text, size_t index) {
  size_t pos = 0;
  for (; index > 0 && pos < text.size(); --index) pos += CharAt(text, pos).size;
  return pos;
}

bool IsSpace(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20) || code == 0x85 ||
         code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 ||
         code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool IsLineBreak(char32_t code) {
  return (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 ||
         code == 0x2028 || code == 0x2029;
}

bool IsUpper(char32_t code) {
  return utf8proc_isupper(Cp(code)) != 0;
}
bool IsLower(char32_t code) {
  return utf8proc_islower(Cp(code)) != 0;
}
bool IsTitle(char32_t code) {
  return utf8proc_category(Cp(code)) == UTF8PROC_CATEGORY_LT;
}

bool IsAlpha(char32_t code) {
  const utf8proc_category_t category = utf8proc_category(Cp(code));
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool IsDecimal(char32_t code) {
  return utf8proc_category(Cp(code)) == UTF8PROC_CATEGORY_ND;
}

bool IsDigit(char32_t code) {
  return IsDecimal(code) || code == 0xB2 || code == 0xB3 || code == 0xB9 || code == 0x2070 ||
         (code >= 0x2074 && code <= 0x2079) || (code >= 0x2080 && code <= 0x2089);
}

bool IsNumeric(char32_t code) {
  const utf8proc_category_t category = utf8proc_category(Cp(code));
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool IsPrintable(char32_t code) {
  if (code == ' ') return true;
  switch (utf8proc_category(Cp(code))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

void AppendUpper(std::string* out, char32_t code) {
  if (const char* many = LongUpper(code)) {
    *out += many;
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_toupper(Cp(code))));
  }
}

void AppendFold(std::string* out, char32_t code) {
  std::array<utf8proc_int32_t, 4> folded{};
  int boundary_class = 0;
  const utf8proc_ssize_t n = utf8proc_decompose_char(Cp(code), folded.data(), folded.size(),
                                                     UTF8PROC_CASEFOLD, &boundary_class);
  for (utf8proc_ssize_t i = 0; i < n; ++i) {
    AppendUtf8(out, static_cast<char32_t>(folded[static_cast<size_t>(i)]));
  }
}

void AppendLowerAt(std::string* out, std::string_view text, size_t pos) {
  const Char c = CharAt(text, pos);
  const size_t end = pos + c.size;
  if (c.code == 0x130) {  // I with a dot above: i and a combining dot
    *out += "i\xCC\x87";
  } else if (c.code == 0x3A3 && pos > 0 && IsAlpha(CharBefore(text, pos).code) &&
             (end == text.size() || !IsAlpha(CharAt(text, end).code))) {
    AppendUtf8(out, 0x3C2);
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_tolower(Cp(c.code))));
  }
}

void AppendTitle(std::string* out, char32_t code) {
  if (const char* many = LongUpper(code)) {
    out->push_back(many[0]);
    for (const char* c = many + 1; *c != 0; ++c) out->push_back(static_cast<char>(*c | 0x20));
  } else {
    AppendUtf8(out, static_cast<char32_t>(utf8proc_totitle(Cp(code))));
  }
}

ByteRange Strip(std::string_view text, StripSide side, const std::string_view* chars,
                Budget* budget) {
  if (budget && chars) {
    budget->Bytes(chars->size() * sizeof(char32_t));
    budget->Work(chars->size() * std::bit_width(chars->size()) * 4);
  }
  std::vector<char32_t> set;  // sorted: `chars` may be as long as the text
  for (size_t i = 0; chars != nullptr && i < chars->size();) {
    const Char c = CharAt(*chars, i);
    set.push_back(c.code);
    i += c.size;
  }
  std::sort(set.begin(), set.end());
  const auto goes = [&](char32_t code) {
    if (budget) budget->Work(chars ? 4 + 4 * std::bit_width(set.size()) : 4);
    return chars ? std::binary_search(set.begin(), set.end(), code) : IsSpace(code);
  };
  ByteRange rest{0, text.size()};
  while (side != StripSide::kRight && rest.begin < rest.end) {
    const Char c = CharAt(text, rest.begin);
    if (!goes(c.code)) break;
    rest.begin += c.size;
  }
  while (side != StripSide::kLeft && rest.begin < rest.end) {
    const Char c = CharBefore(text, rest.end);
    if (!goes(c.code)) break;
    rest.end -= c.size;
  }
  return rest;
}

}  // namespace omnikv::jinja
