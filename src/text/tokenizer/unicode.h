// UTF-8 and the character properties that tokenizers ask for. Everything except IsValidUtf8,
// ReplaceInvalidUtf8 and IncompleteUtf8Tail REQUIRES well-formed UTF-8: the tokenizer checks its
// input once, at the door. Properties are Unicode 15's (utf8proc 2.8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace omnikv::tok {

struct Char {
  char32_t code;
  uint32_t size;  // bytes, 1 to 4
};

// The character at the first byte of `p`.
Char DecodeUtf8(const char* p);
// The character that ends at `end`. REQUIRES end > 0, a character boundary.
Char DecodeUtf8Before(std::string_view text, size_t end);

// Bytes of the character that starts with `lead`.
inline uint32_t Utf8Size(char lead) {
  const auto b = static_cast<uint8_t>(lead);
  return b < 0x80 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}

bool IsAscii(std::string_view text);
bool IsValidUtf8(std::string_view text);

// `text` with U+FFFD for every maximal ill-formed part, as the Unicode standard recommends.
std::string ReplaceInvalidUtf8(std::string_view text);

// How many bytes at the end of `text` start a character whose rest is missing (0 to 3).
size_t IncompleteUtf8Tail(std::string_view text);

bool IsWhitespace(char32_t c);      // White_Space
bool IsNumber(char32_t c);          // N
bool IsMark(char32_t c);            // M
bool IsNonspacingMark(char32_t c);  // Mn
bool IsOther(char32_t c);           // C without unassigned
// ASCII punctuation and symbols, and P.
bool IsPunctuation(char32_t c);
// \w of the Rust regex crate: Alphabetic, M, Nd, Pc, Join_Control.
bool IsWordChar(char32_t c);

// Full lower-case mapping, without context.
void AppendLower(std::string* out, char32_t c);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// Writes `text` in a normal form to `out`; false, with `out` unspecified, when it is in that form
// already. Linear in the text up to sorting each run of combining marks.
bool Normalize(NormalForm form, std::string_view text, std::string* out);

// Calls fn(cluster) for each extended grapheme cluster.
template <typename Fn>
void ForEachGrapheme(std::string_view text, const Fn& fn);

bool IsGraphemeBreak(char32_t before, char32_t after, int32_t* state);

template <typename Fn>
void ForEachGrapheme(std::string_view text, const Fn& fn) {
  int32_t state = 0;
  size_t begin = 0;
  char32_t previous = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = DecodeUtf8(text.data() + pos);
    if (pos > 0 && IsGraphemeBreak(previous, c.code, &state)) {
      fn(text.substr(begin, pos - begin));
      begin = pos;
    }
    previous = c.code;
    pos += c.size;
  }
  if (begin < text.size()) fn(text.substr(begin));
}

}  // namespace omnikv::tok
