#include "text/jinja/str_ops.h"

#include <algorithm>
#include <limits>

namespace omnikv::jinja {
namespace {

constexpr size_t kNone = std::string_view::npos;

Case CaseOf(Case how, char32_t code, bool in_word, bool at_start) {
  switch (how) {
    case Case::kSwap:
      return IsUpper(code) ? Case::kLower : IsLower(code) ? Case::kUpper : Case::kSwap;
    case Case::kTitle:
      return in_word ? Case::kLower : Case::kTitle;
    case Case::kCapitalize:
      return at_start ? Case::kTitle : Case::kLower;
    default:
      return how;
  }
}

size_t Limit(int64_t max_count) {
  return max_count < 0 ? std::numeric_limits<size_t>::max() : static_cast<size_t>(max_count);
}

Value Piece(Runtime& rt, const Str& s, size_t begin, size_t end) {
  return Value(Slice(rt.budget, s, begin, end));
}

// The end of the run of characters from `pos` on that are all space, or all not.
size_t RunEnd(std::string_view text, size_t pos, bool space) {
  while (pos < text.size()) {
    const Char c = CharAt(text, pos);
    if (IsSpace(c.code) != space) break;
    pos += c.size;
  }
  return pos;
}

size_t RunBegin(std::string_view text, size_t end, bool space) {
  while (end > 0) {
    const Char c = CharBefore(text, end);
    if (IsSpace(c.code) != space) break;
    end -= c.size;
  }
  return end;
}

}  // namespace

Str MapCase(Runtime& rt, const Str& s, Case how) {
  StrBuilder out(&rt.budget);
  const std::string_view text = s.text();
  rt.budget.LookUp(text.size());
  bool in_word = false;
  std::string mapped;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    mapped.clear();
    switch (CaseOf(how, c.code, in_word, pos == 0)) {
      case Case::kUpper:
        AppendUpper(&mapped, c.code);
        break;
      case Case::kTitle:
        AppendTitle(&mapped, c.code);
        break;
      case Case::kLower:
        AppendLowerAt(&mapped, text, pos);
        break;
      case Case::kFold:
        AppendFold(&mapped, c.code);
        break;
      default:  // what swapping leaves alone
        AppendUtf8(&mapped, c.code);
        break;
    }
    out.AppendLike(mapped, s, pos);
    in_word = IsUpper(c.code) || IsLower(c.code) || IsTitle(c.code);
    pos += c.size;
  }
  return std::move(out).Build(s.markup());
}

Str StripText(Runtime& rt, const Str& s, StripSide side, const Str* chars) {
  const std::string_view set = chars ? chars->text() : std::string_view();
  const ByteRange rest = Strip(s.text(), side, chars ? &set : nullptr, &rt.budget);
  return Slice(rt.budget, s, rest.begin, rest.end);
}

Str Replace(Runtime& rt, const Str& s, const Str& from, const Str& to, int64_t max_count) {
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  StrBuilder out(&rt.budget);
  size_t pos = 0;
  size_t left = Limit(max_count);
  if (from.empty()) {  // before every character, and at the end
    for (; left > 0; --left) {
      out.Append(to);
      if (pos == text.size()) break;
      const size_t end = pos + CharAt(text, pos).size;
      out.Append(s, pos, end);
      pos = end;
    }
  } else {
    for (; left > 0; --left) {
      const size_t at = FindText(rt.budget, text, from.text(), pos);
      if (at == kNone) break;
      out.Append(s, pos, at);
      out.Append(to);
      pos = at + from.size();
    }
  }
  out.Append(s, pos, text.size());
  return std::move(out).Build(s.markup());
}

std::vector<Value> Split(Runtime& rt, const Str& s, const Str* separator, int64_t max_count) {
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  if (separator && separator->empty()) Fail("split got an empty separator");
  std::vector<Value> pieces;
  size_t left = Limit(max_count);
  if (!separator) {
    for (size_t pos = RunEnd(text, 0, true); pos < text.size();) {
      const size_t end = left-- > 0 ? RunEnd(text, pos, false) : text.size();
      pieces.push_back(Piece(rt, s, pos, end));
      pos = RunEnd(text, end, true);
    }
    return pieces;
  }
  size_t pos = 0;
  for (; left > 0; --left) {
    const size_t at = FindText(rt.budget, text, separator->text(), pos);
    if (at == kNone) break;
    pieces.push_back(Piece(rt, s, pos, at));
    pos = at + separator->size();
  }
  pieces.push_back(Piece(rt, s, pos, text.size()));
  return pieces;
}

std::vector<Value> SplitFromRight(Runtime& rt, const Str& s, const Str* separator,
                                  int64_t max_count) {
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  if (separator && separator->empty()) Fail("rsplit got an empty separator");
  std::vector<Value> pieces;
  size_t left = Limit(max_count);
  size_t end = text.size();
  if (!separator) {
    for (end = RunBegin(text, end, true); end > 0;) {
      const size_t begin = left-- > 0 ? RunBegin(text, end, false) : 0;
      pieces.push_back(Piece(rt, s, begin, end));
      end = RunBegin(text, begin, true);
    }
  } else {
    for (; left > 0; --left) {
      const size_t at = FindLastText(rt.budget, text.substr(0, end), separator->text());
      if (at == kNone) break;
      pieces.push_back(Piece(rt, s, at + separator->size(), end));
      end = at;
    }
    pieces.push_back(Piece(rt, s, 0, end));
  }
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

std::vector<Value> SplitLines(Runtime& rt, const Str& s, bool keep_ends) {
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  std::vector<Value> lines;
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const size_t stop = pos;
    pos += c.size;
    if (!IsLineBreak(c.code)) continue;
    if (c.code == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    lines.push_back(Piece(rt, s, begin, keep_ends ? pos : stop));
    begin = pos;
  }
  if (begin < text.size()) lines.push_back(Piece(rt, s, begin, text.size()));
  return lines;
}

}  // namespace omnikv::jinja
