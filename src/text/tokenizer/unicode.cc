#include "text/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace omnikv::tok {
namespace {

// Length of the well-formed character at the start of `text`, or 0; then *bad is the length of the
// maximal ill-formed part. Table 3-7 of the Unicode standard.
size_t ScanUtf8(std::string_view text, size_t* bad) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = at(0);
  *bad = 1;
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size() || at(i) < low || at(i) > high) {
      *bad = i;
      return 0;
    }
    low = 0x80;
    high = 0xBF;
  }
  return size;
}

size_t AsciiPrefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<uint8_t>(text[i]) < 0x80) ++i;
  return i;
}

utf8proc_category_t Category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

const utf8proc_property_t* Property(char32_t c) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
}

}  // namespace

Char DecodeUtf8(const char* p) {
  const auto* b = reinterpret_cast<const uint8_t*>(p);
  if (b[0] < 0x80) return {b[0], 1};
  if (b[0] < 0xE0) return {((b[0] & 0x1Fu) << 6) | (b[1] & 0x3Fu), 2};
  if (b[0] < 0xF0) return {((b[0] & 0x0Fu) << 12) | ((b[1] & 0x3Fu) << 6) | (b[2] & 0x3Fu), 3};
  return {((b[0] & 0x07u) << 18) | ((b[1] & 0x3Fu) << 12) | ((b[2] & 0x3Fu) << 6) | (b[3] & 0x3Fu),
          4};
}

Char DecodeUtf8Before(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while ((static_cast<uint8_t>(text[begin]) & 0xC0u) == 0x80u) --begin;
  return DecodeUtf8(text.data() + begin);
}

bool IsAscii(std::string_view text) {
  return AsciiPrefix(text) == text.size();
}

bool IsValidUtf8(std::string_view text) {
  size_t bad;
  while (!text.empty()) {
    text.remove_prefix(AsciiPrefix(text));
    while (!text.empty() && static_cast<uint8_t>(text[0]) >= 0x80) {
      const size_t size = ScanUtf8(text, &bad);
      if (size == 0) return false;
      text.remove_prefix(size);
    }
  }
  return true;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 16);
  while (!text.empty()) {
    size_t bad;
    if (const size_t size = ScanUtf8(text, &bad); size > 0) {
      out += text.substr(0, size);
      text.remove_prefix(size);
    } else {
      out += "\uFFFD";
      text.remove_prefix(bad);
    }
  }
  return out;
}

size_t IncompleteUtf8Tail(std::string_view text) {
  for (size_t n = 1; n <= 3 && n <= text.size(); ++n) {
    const auto b = static_cast<uint8_t>(text[text.size() - n]);
    if ((b & 0xC0u) == 0x80u) continue;
    size_t bad;
    // Incomplete, rather than ill-formed, when only the end of the text stopped the scan.
    return ScanUtf8(text.substr(text.size() - n), &bad) == 0 && b >= 0xC2 && b <= 0xF4 && bad == n
               ? n
               : 0;
  }
  return 0;
}

bool IsWhitespace(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsNumber(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  const auto k = Category(c);
  return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool IsMark(char32_t c) {
  if (c < 0x300) return false;
  const auto k = Category(c);
  return k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_MC || k == UTF8PROC_CATEGORY_ME;
}

bool IsNonspacingMark(char32_t c) {
  return c >= 0x300 && Category(c) == UTF8PROC_CATEGORY_MN;
}

bool IsOther(char32_t c) {
  const auto k = Category(c);
  return k == UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CF || k == UTF8PROC_CATEGORY_CS ||
         k == UTF8PROC_CATEGORY_CO;
}

bool IsPunctuation(char32_t c) {
  if (c < 0x80)
    return c > ' ' && c < 0x7F && !(c >= '0' && c <= '9') && !((c | 32) >= 'a' && (c | 32) <= 'z');
  const auto k = Category(c);
  return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

bool IsWordChar(char32_t c) {
  if (c < 0x80) return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_';
  const auto k = Category(c);
  if (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_NL) return true;  // L, M, Nd, Nl
  if (k == UTF8PROC_CATEGORY_PC || c == 0x200C || c == 0x200D) return true;
  // The symbols among the Alphabetic: circled and squared letters.
  return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
         (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
}

void AppendLower(std::string* out, char32_t c) {
  AppendUtf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
  if (c == 0x130) {  // the one character whose lower case is two: i and a dot above
    out->pop_back();
    *out += "i\u0307";
  }
}

bool IsGraphemeBreak(char32_t before, char32_t after, int32_t* state) {
  return utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(before),
                                          static_cast<utf8proc_int32_t>(after), state);
}

// ---- normal forms ---------------------------------------------------------------------------
//
// The text is cut before every character that nothing before it can reorder or compose with; a
// segment of one character that has no mapping is copied. utf8proc_map would do, but it sorts
// combining marks in quadratic time, which a long run of them turns into hours.

namespace {

struct FormOptions {
  bool compose;
  bool compatibility;
};

// Whether canonical composition may join `c` to a character before it.
bool ComposesBackwards(char32_t c) {
  if (c >= 0x1161 && c <= 0x11C2) return true;  // Hangul vowels and trailing consonants
  const utf8proc_uint16_t index = Property(c)->comb_index;
  return index >= 0x8000 && index != UINT16_MAX;
}

bool HasMapping(char32_t c, FormOptions o) {
  if (c >= 0xAC00 && c <= 0xD7A3) return !o.compose;
  const utf8proc_property_t* p = Property(c);
  return p->decomp_seqindex != UINT16_MAX && (o.compatibility || p->decomp_type == 0);
}

// The full decomposition of `c`, appended to *out, marks unsorted.
void Decompose(char32_t c, FormOptions o, std::vector<utf8proc_int32_t>* out) {
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                      (o.compatibility ? UTF8PROC_COMPAT : 0));
  utf8proc_int32_t buffer[32];  // the longest full decomposition has 18 characters
  const utf8proc_ssize_t n =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), buffer, 32, options, nullptr);
  if (n > 0 && n <= 32) {
    out->insert(out->end(), buffer, buffer + n);
  } else {
    out->push_back(static_cast<utf8proc_int32_t>(c));
  }
}

bool StartsSegment(char32_t c, FormOptions o, std::vector<utf8proc_int32_t>* scratch) {
  if (c < 0x300) return true;
  char32_t first = c;
  if (HasMapping(c, o)) {
    scratch->clear();
    Decompose(c, o, scratch);
    first = static_cast<char32_t>(scratch->front());
  }
  return Property(first)->combining_class == 0 && !ComposesBackwards(first);
}

// Appends one segment of more than a plain character.
void AppendSegment(std::string_view segment, FormOptions o, std::vector<utf8proc_int32_t>* codes,
                   std::string* out) {
  codes->clear();
  for (size_t i = 0; i < segment.size();) {
    const Char c = DecodeUtf8(segment.data() + i);
    Decompose(c.code, o, codes);
    i += c.size;
  }
  const auto combining_class = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto run = codes->begin(); run != codes->end();) {
    if (combining_class(*run) == 0) {
      ++run;
      continue;
    }
    const auto end =
        std::find_if(run, codes->end(), [&](auto c) { return combining_class(c) == 0; });
    std::stable_sort(run, end,
                     [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    run = end;
  }
  size_t n = codes->size();
  if (o.compose) {
    n = static_cast<size_t>(utf8proc_normalize_utf32(
        codes->data(), static_cast<utf8proc_ssize_t>(n),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE)));
  }
  for (size_t i = 0; i < n; ++i) AppendUtf8(out, static_cast<char32_t>((*codes)[i]));
}

}  // namespace

bool Normalize(NormalForm form, std::string_view text, std::string* out) {
  const FormOptions o = {form == NormalForm::kNfc || form == NormalForm::kNfkc,
                         form == NormalForm::kNfkc || form == NormalForm::kNfkd};
  size_t pos = AsciiPrefix(text);
  if (pos == text.size()) return false;
  out->clear();
  out->reserve(text.size() + text.size() / 8);
  std::vector<utf8proc_int32_t> codes;
  // The segment that is open starts at `begin`; `plain` while it is one character without mapping.
  size_t begin = pos == 0 ? 0 : pos - 1;
  out->append(text, 0, begin);
  bool plain = true;
  pos = begin;
  while (pos < text.size()) {
    const Char c = DecodeUtf8(text.data() + pos);
    if (pos > begin && StartsSegment(c.code, o, &codes)) {
      const std::string_view segment = text.substr(begin, pos - begin);
      plain ? void(out->append(segment)) : AppendSegment(segment, o, &codes, out);
      begin = pos;
      plain = true;
    } else if (pos > begin) {
      plain = false;
    }
    plain = plain && (c.code < 0xA0 || (c.code < 0x300 && form == NormalForm::kNfc) ||
                      (!HasMapping(c.code, o) && Property(c.code)->combining_class == 0));
    pos += c.size;
  }
  const std::string_view segment = text.substr(begin);
  plain ? void(out->append(segment)) : AppendSegment(segment, o, &codes, out);
  return true;
}

}  // namespace omnikv::tok
