// Python's view of a string (code points, white space, case) on UTF-8 bytes.
//
// A byte that is not part of well-formed UTF-8 counts as one character with a code in
// [0xDC80, 0xDCFF], as Python's surrogateescape maps it; AppendUtf8 turns it back into that byte.
// So every function here is total, and text that was well-formed stays so.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace omnikv::jinja {

class Budget;

struct Char {
  char32_t code;
  size_t size;  // bytes in the text, 1 to 4
};

// The character that starts at byte `pos`. REQUIRES pos < text.size().
Char CharAt(std::string_view text, size_t pos);
// The character that ends before byte `end`. REQUIRES 0 < end <= text.size(), a character boundary.
Char CharBefore(std::string_view text, size_t end);
void AppendUtf8(std::string* out, char32_t code);

size_t CountChars(std::string_view text);
// The byte at which character `index` starts; text.size() when there are fewer.
size_t ByteOffset(std::string_view text, size_t index);

bool IsSpace(char32_t code);      // str.isspace, and \s of a regular expression
bool IsLineBreak(char32_t code);  // where str.splitlines splits
bool IsUpper(char32_t code);
bool IsLower(char32_t code);
bool IsTitle(char32_t code);
bool IsAlpha(char32_t code);
bool IsDecimal(char32_t code);
bool IsDigit(char32_t code);  // not the circled digits and such that Python counts in
bool IsNumeric(char32_t code);
bool IsPrintable(char32_t code);  // what repr() leaves unescaped

// Full case mappings, except that some 90 letters whose upper case is several letters (Greek ones
// with iota subscript, Armenian ligatures) stay or map to one.
void AppendUpper(std::string* out, char32_t code);
void AppendFold(std::string* out, char32_t code);
// Of the character at byte `pos`: a sigma that ends its word has a lower case of its own.
void AppendLowerAt(std::string* out, std::string_view text, size_t pos);
void AppendTitle(std::string* out, char32_t code);

// Bytes [begin, end) of `text` that remain when white space, or the characters of `chars`, are
// removed from its ends.
struct ByteRange {
  size_t begin;
  size_t end;
};
enum class StripSide { kLeft, kRight, kBoth };
// Where there is a budget, it pays for what is removed and for `chars`.
ByteRange Strip(std::string_view text, StripSide side, const std::string_view* chars = nullptr,
                Budget* budget = nullptr);

}  // namespace omnikv::jinja
