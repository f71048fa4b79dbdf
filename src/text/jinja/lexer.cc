#include "text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "text/jinja/error.h"
#include "text/jinja/print.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

constexpr size_t kNone = std::string_view::npos;
constexpr size_t kMaxName = 255;  // bytes: names are compared again and again

// Longer operators before their prefixes.
constexpr std::array<std::string_view, 26> kOperators = {
    "//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "(",
    ")",  "[",  "]",  "{",  "}",  "<",  ">", "=", ".", ":", "|", ",", ";"};

// Every line end as \n, and none at the end of the source.
std::string NormaliseLines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out.push_back(source[i]);
    } else {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : owned_(NormaliseLines(source)), source_(owned_) {}

  std::vector<Token> Run();

 private:
  [[noreturn]] void Wrong(std::string message) const {
    throw SyntaxError{line_, std::move(message)};
  }
  char At(size_t pos) const { return pos < source_.size() ? source_[pos] : '\0'; }
  bool HasAt(size_t pos, std::string_view text) const {
    return source_.substr(std::min(pos, source_.size())).starts_with(text);
  }
  size_t SkipSpace(size_t pos) const;
  void MoveTo(size_t pos);  // counts the lines on the way
  Token& Push(TokenKind kind, std::string_view text = {});

  void Data(size_t end, char sign, bool may_strip);
  size_t NextTag(size_t pos) const;
  bool Raw(size_t tag);
  void Comment(size_t tag);
  void Tag(size_t tag, bool print);
  size_t TagEnd(bool print) const;  // just behind the end of the tag that stands here, or kNone
  void TokenInTag();
  bool Number();
  void String();
  std::string Unescape(std::string_view text) const;
  void Operator();

  const std::string owned_;
  const std::string_view source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;  // what was read last ended a line
  std::string open_;           // closing brackets that are due, innermost last
  std::vector<Token> tokens_;
};

size_t Lexer::SkipSpace(size_t pos) const {
  while (pos < source_.size()) {
    const Char c = CharAt(source_, pos);
    if (!IsSpace(c.code)) break;
    pos += c.size;
  }
  return pos;
}

void Lexer::MoveTo(size_t pos) {
  line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(pos_),
                                       source_.begin() + static_cast<ptrdiff_t>(pos), '\n'));
  if (pos > pos_) at_line_start_ = source_[pos - 1] == '\n';
  pos_ = pos;
}

Token& Lexer::Push(TokenKind kind, std::string_view text) {
  tokens_.push_back({kind, line_, std::string(text)});
  return tokens_.back();
}

// The text from here to `end`, less what the tag behind it takes away: all white space for '-', the
// indentation of its own line where it `may_strip` and its sign is not '+'.
void Lexer::Data(size_t end, char sign, bool may_strip) {
  std::string_view text = source_.substr(pos_, end - pos_);
  if (sign == '-') {
    text = text.substr(0, Strip(text, StripSide::kRight).end);
  } else if (sign != '+' && may_strip) {
    const size_t newline = text.rfind('\n');
    const size_t line = newline == kNone ? 0 : newline + 1;
    if ((line > 0 || at_line_start_) &&
        Strip(text.substr(line), StripSide::kLeft).begin == text.size() - line) {
      text = text.substr(0, line);
    }
  }
  if (!text.empty()) Push(TokenKind::kData, text);
  MoveTo(end);
}

size_t Lexer::NextTag(size_t pos) const {
  for (pos = source_.find('{', pos); pos != kNone; pos = source_.find('{', pos + 1)) {
    const char next = At(pos + 1);
    if (next == '{' || next == '%' || next == '#') return pos;
  }
  return kNone;
}

std::vector<Token> Lexer::Run() {
  while (pos_ < source_.size()) {
    const size_t tag = NextTag(pos_);
    if (tag == kNone) {
      Push(TokenKind::kData, source_.substr(pos_));
      MoveTo(source_.size());
      break;
    }
    const char kind = source_[tag + 1];
    if (kind == '%' && Raw(tag)) continue;
    Data(tag, At(tag + 2), kind != '{');
    if (kind == '#') {
      Comment(tag);
    } else {
      Tag(tag, kind == '{');
    }
  }
  Push(TokenKind::kEnd);
  return std::move(tokens_);
}

// {% raw %} ... {% endraw %}; false if no such thing begins at `tag`.
bool Lexer::Raw(size_t tag) {
  const auto skip_sign = [&](size_t at) { return At(at) == '-' || At(at) == '+' ? at + 1 : at; };
  size_t at = SkipSpace(skip_sign(tag + 2));
  if (!HasAt(at, "raw")) return false;
  at = SkipSpace(at + 3);
  const bool strip = HasAt(at, "-%}");
  if (!strip && !HasAt(at, "%}")) return false;
  Data(tag, At(tag + 2), true);
  MoveTo(strip ? SkipSpace(at + 3) : at + 2);
  for (size_t end = source_.find("{%", pos_); end != kNone; end = source_.find("{%", end + 1)) {
    at = SkipSpace(skip_sign(end + 2));
    if (!HasAt(at, "endraw")) continue;
    at = SkipSpace(at + 6);
    size_t after = kNone;
    if (HasAt(at, "-%}")) after = SkipSpace(at + 3);
    if (HasAt(at, "+%}")) after = at + 3;
    if (HasAt(at, "%}")) after = at + (At(at + 2) == '\n' ? 3 : 2);
    if (after == kNone) continue;
    Data(end, At(end + 2), true);
    MoveTo(after);
    return true;
  }
  Wrong("'{% raw %}' has no '{% endraw %}'");
}

void Lexer::Comment(size_t tag) {
  const char sign = At(tag + 2);
  const size_t begin = tag + (sign == '-' || sign == '+' ? 3 : 2);
  const size_t end = source_.find("#}", begin);
  if (end == kNone) Wrong("a comment has no '#}'");
  size_t after = end + 2;
  if (end > begin && source_[end - 1] == '-') {
    after = SkipSpace(after);
  } else if (!(end > begin && source_[end - 1] == '+') && At(after) == '\n') {
    ++after;
  }
  MoveTo(after);
}

void Lexer::Tag(size_t tag, bool print) {
  Push(print ? TokenKind::kPrintBegin : TokenKind::kBlockBegin);
  const char sign = At(tag + 2);
  MoveTo(tag + (sign == '-' || sign == '+' ? 3 : 2));
  open_.clear();
  while (true) {
    const size_t space = SkipSpace(pos_);
    // jinja2 looks for the end of a tag before white space, which makes no difference.
    MoveTo(space);
    if (pos_ >= source_.size()) Wrong(print ? "'{{' has no '}}'" : "'{%' has no '%}'");
    const size_t end = open_.empty() ? TagEnd(print) : kNone;
    if (end != kNone) {
      Push(print ? TokenKind::kPrintEnd : TokenKind::kBlockEnd);
      MoveTo(end);
      return;
    }
    TokenInTag();
  }
}

size_t Lexer::TagEnd(bool print) const {
  const std::string_view close = print ? "}}" : "%}";
  if (At(pos_) == '-' && HasAt(pos_ + 1, close)) return SkipSpace(pos_ + 3);
  if (print) return HasAt(pos_, close) ? pos_ + 2 : kNone;
  if (At(pos_) == '+' && HasAt(pos_ + 1, close)) return pos_ + 3;
  if (!HasAt(pos_, close)) return kNone;
  return pos_ + (At(pos_ + 2) == '\n' ? 3 : 2);
}

void Lexer::TokenInTag() {
  const char c = source_[pos_];
  if (IsDigit(c) && Number()) return;
  if (c == '_' || static_cast<unsigned char>(c) >= 0x80 || (c >= 'a' && c <= 'z') ||
      (c >= 'A' && c <= 'Z')) {
    size_t end = pos_;
    while (end < source_.size()) {
      const Char next = CharAt(source_, end);
      if (next.code != '_' && !IsAlpha(next.code) && !IsNumeric(next.code)) break;
      end += next.size;
    }
    if (end == pos_)
      Wrong(fmt::format("byte {:#04x} is not expected here", static_cast<uint8_t>(c)));
    if (end - pos_ > kMaxName) {
      Wrong(fmt::format("a name has {} bytes, at most {} are allowed", end - pos_, kMaxName));
    }
    Push(TokenKind::kName, source_.substr(pos_, end - pos_));
    return MoveTo(end);
  }
  if (c == '"' || c == '\'') return String();
  Operator();
}

// Digits may have single underscores between them.
bool Lexer::Number() {
  const auto digits = [&](size_t at) {
    size_t end = at;
    while (IsDigit(At(end)) || (end > at && At(end) == '_' && IsDigit(At(end + 1)))) ++end;
    return end;
  };
  size_t end = digits(pos_);
  const size_t integer_end = end;
  const bool may_be_float = pos_ == 0 || source_[pos_ - 1] != '.';  // not the 1.5 of a.1.5
  if (may_be_float && At(end) == '.' && IsDigit(At(end + 1))) end = digits(end + 1);
  if (may_be_float && (At(end) == 'e' || At(end) == 'E')) {
    const size_t exponent = At(end + 1) == '+' || At(end + 1) == '-' ? end + 2 : end + 1;
    if (IsDigit(At(exponent))) end = digits(exponent);
  }
  if (end != integer_end) {
    Push(TokenKind::kFloat).real = *ParseFloat(source_.substr(pos_, end - pos_));
    MoveTo(end);
    return true;
  }
  if (At(pos_) == '0') {
    const char mark = static_cast<char>(At(pos_ + 1) | 0x20);
    const std::string_view allowed = mark == 'x'   ? "0123456789abcdefABCDEF_"
                                     : mark == 'o' ? "01234567_"
                                     : mark == 'b' ? "01_"
                                                   : "";
    const size_t marked = allowed.empty() ? kNone : source_.find_first_not_of(allowed, pos_ + 2);
    const size_t marked_end = std::min(marked, source_.size());
    if (!allowed.empty() && marked_end > pos_ + 2) {
      end = marked_end;
    } else {  // 007 is 00 and 7, which no grammar rule takes
      end = pos_;
      while (At(end) == '0') ++end;
    }
  }
  try {
    const auto value = ParseInt(source_.substr(pos_, end - pos_), 0);
    if (!value) Wrong(fmt::format("'{:.40}' is not a number", source_.substr(pos_, end - pos_)));
    Push(TokenKind::kInteger).integer = *value;
  } catch (const Error& e) {
    Wrong(e.message);
  }
  MoveTo(end);
  return true;
}

void Lexer::String() {
  const char quote = source_[pos_];
  size_t end = pos_ + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) Wrong("a string has no end");
  Push(TokenKind::kString).text = Unescape(source_.substr(pos_ + 1, end - pos_ - 1));
  MoveTo(end + 1);
}

std::string Lexer::Unescape(std::string_view text) const {
  std::string out;
  const auto number = [&](size_t at, size_t n_digits) {  // hexadecimal, all digits required
    char32_t code = 0;
    for (size_t i = at; i < at + n_digits; ++i) {
      const char c = i < text.size() ? text[i] : '\0';
      const bool letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
      if (!IsDigit(c) && !letter) Wrong("a string has an incomplete '\\x', '\\u' or '\\U' escape");
      code = code << 4 | static_cast<char32_t>(letter ? (c | 0x20) - 'a' + 10 : c - '0');
    }
    if ((code >= 0xD800 && code <= 0xDFFF) || code > 0x10FFFF) {
      Wrong(fmt::format("a string has the escape of U+{:04X}, which is no character",
                        static_cast<uint32_t>(code)));
    }
    AppendUtf8(&out, code);
    return at + n_digits;
  };
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\') {
      out.push_back(text[i++]);
      continue;
    }
    const char c = text[i + 1];  // the lexer saw to it that there is one
    i += 2;
    constexpr std::string_view kFrom = "\\'\"abfnrtv";
    constexpr std::string_view kTo = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t at = kFrom.find(c); at != kNone) {
      out.push_back(kTo[at]);
    } else if (c == '\n') {
      // a line continued
    } else if (c >= '0' && c <= '7') {
      char32_t code = 0;
      const size_t stop = std::min(i + 2, text.size());
      for (--i; i < stop && text[i] >= '0' && text[i] <= '7'; ++i) {
        code = code << 3 | static_cast<char32_t>(text[i] - '0');
      }
      AppendUtf8(&out, code);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      i = number(i, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    } else if (c == 'N') {
      Wrong("a string has a '\\N' escape, which is not supported");
    } else if (static_cast<unsigned char>(c) >= 0x80) {
      // jinja2 turns the character into an escape first, whose backslash this one then escapes.
      const Char next = CharAt(text, i - 1);
      const auto code = static_cast<uint32_t>(next.code);
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
      i += next.size - 1;
    } else {
      out.push_back('\\');
      out.push_back(c);
    }
  }
  return out;
}

void Lexer::Operator() {
  for (const std::string_view op : kOperators) {
    if (!HasAt(pos_, op)) continue;
    if (op == "(") open_.push_back(')');
    if (op == "[") open_.push_back(']');
    if (op == "{") open_.push_back('}');
    if (op == ")" || op == "]" || op == "}") {
      if (open_.empty()) Wrong(fmt::format("'{}' closes nothing", op));
      if (open_.back() != op[0]) Wrong(fmt::format("'{}' found, expected '{}'", op, open_.back()));
      open_.pop_back();
    }
    Push(TokenKind::kOperator, op);
    return MoveTo(pos_ + op.size());
  }
  std::string shown;
  AppendUtf8(&shown, CharAt(source_, pos_).code);
  Wrong(fmt::format("'{}' is not expected here", shown));
}

}  // namespace

std::vector<Token> Tokenize(std::string_view source) {
  return Lexer(source).Run();
}

}  // namespace omnikv::jinja
