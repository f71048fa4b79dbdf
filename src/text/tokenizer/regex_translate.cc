// Oniguruma's Ruby syntax to PCRE2's. Where they differ:
//   {n,m}+ repeats the repetition, {n}? makes it optional, {,m} starts at 0;
//   (?m) is PCRE2's (?s), ^ and $ are always those of a line, (?i) ends with its group and takes
//   the alternatives after it along;
//   \h is a hexadecimal digit, \v a vertical tab, \w and \b count marks, \s and \p{Script} are the
//   plain properties;
//   classes nest and intersect: [a-z&&[^aeiou]].
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <utility>
#include <vector>

#include "base/printable.h"
#include "text/tokenizer/regex.h"
#include "text/tokenizer/unicode.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace omnikv::tok {
namespace {

// Contents of character classes.
constexpr std::string_view kSpace = R"(\t-\r\x{85}\p{Z})";
constexpr std::string_view kAlpha =  // Alphabetic; M is more than its marks, and \w has all of M
    R"(\p{L}\p{Nl}\x{24B6}-\x{24E9}\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189})";
constexpr std::string_view kWordRest = R"(\p{M}\p{Nd}\p{Pc})";
// What \w and \b count too, but a class with \w in it does not: superscripts, fractions.
constexpr std::string_view kWordOdd = R"(\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";
constexpr std::string_view kHex = "0-9A-Fa-f";
constexpr std::string_view kAnything = R"([\x{0}-\x{10FFFF}])";
constexpr int kMaxDepth = 64;  // of groups and of classes

std::string Word() {
  return fmt::format("{}{}", kAlpha, kWordRest);
}

// The class content of a POSIX bracket or of a property of the same name; empty when unknown.
std::string PosixClass(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kClasses = {{
      {"digit", R"(\p{Nd})"},
      {"space", kSpace},
      {"upper", R"(\p{Uppercase})"},
      {"lower", R"(\p{Lowercase})"},
      {"punct", R"(\p{P}\p{S})"},
      {"xdigit", kHex},
      {"blank", R"(\t\p{Zs})"},
      {"cntrl", R"(\p{Cc})"},
      {"alpha", R"(\p{Alphabetic})"},
      {"alnum", R"(\p{Alphabetic}\p{Nd})"},
      {"ascii", R"(\x{0}-\x{7F})"},
  }};
  if (name == "word") return Word();
  for (const auto& [key, content] : kClasses) {
    if (key == name) return std::string(content);
  }
  return "";
}

bool Compiles(const std::string& pattern) {
  int error;
  PCRE2_SIZE offset;
  pcre2_code_8* code =
      pcre2_compile_8(reinterpret_cast<PCRE2_SPTR8>(pattern.data()), pattern.size(),
                      PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
  pcre2_code_free_8(code);
  return code != nullptr;
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  Result<std::string> Run() {
    groups_.push_back({0, 0});
    while (pos_ < in_.size()) {
      OKV_RETURN_IF_ERROR(Step());
    }
    if (groups_.size() != 1) return Refuse("a group that is not closed");
    out_.append(static_cast<size_t>(groups_.back().pending), ')');
    return std::move(out_);
  }

 private:
  static constexpr size_t kNone = std::string::npos;

  struct Group {
    size_t start;  // in out_, of its parenthesis
    int pending;   // groups that an (?i) inside it opened
  };

  // What one character may be: the union of `simple` (content of a PCRE2 class) and of `others`
  // (expressions that match one character each).
  struct Set {
    bool negated = false;
    std::string simple;
    std::vector<std::string> others;
  };

  Status Refuse(std::string_view what) const {
    return Unsupported(fmt::format("the regular expression {} has {}, which is not supported",
                                   Printable(in_), Escaped(what, kPrintableBytes)));
  }

  bool At(std::string_view text) const { return in_.substr(pos_).substr(0, text.size()) == text; }
  bool Take(std::string_view text) {
    if (!At(text)) return false;
    pos_ += text.size();
    return true;
  }

  // Starts an atom: what a quantifier that follows applies to.
  void Atom() {
    atom_ = out_.size();
    quantified_ = false;
  }
  void NoAtom() { atom_ = kNone; }

  Status Step() {
    const char c = in_[pos_];
    switch (c) {
      case '\\':
        return Escape();
      case '[': {
        Atom();
        ++pos_;
        OKV_ASSIGN_OR_RETURN(const std::string set, Class(0));
        out_ += set;
        return {};
      }
      case '(':
        return OpenGroup();
      case ')': {
        if (groups_.size() == 1) return Refuse("a ')' without '('");
        out_.append(static_cast<size_t>(groups_.back().pending) + 1, ')');
        atom_ = groups_.back().start;
        quantified_ = false;
        groups_.pop_back();
        ++pos_;
        return {};
      }
      case '|':
      case '^':
      case '$':
        NoAtom();
        out_ += c;
        ++pos_;
        return {};
      case '*':
      case '+':
      case '?':
        ++pos_;
        return Quantifier(std::string(1, c), /*interval=*/false, /*exact=*/false);
      case '{':
        return Interval();
      default: {
        Atom();
        const Char ch = DecodeUtf8(in_.data() + pos_);
        out_ += in_.substr(pos_, ch.size);
        pos_ += ch.size;
        return {};
      }
    }
  }

  // Appends a quantifier to the last atom, with the '?' or '+' that may follow.
  Status Quantifier(const std::string& quantifier, bool interval, bool exact) {
    if (atom_ == kNone) return Refuse("a quantifier with nothing to repeat");
    const auto wrap = [&] {
      out_.insert(atom_, "(?:");
      out_ += ')';
    };
    if (quantified_) wrap();
    out_ += quantifier;
    quantified_ = true;
    if (!interval) {
      if (At("?") || At("+")) out_ += in_[pos_++];
    } else if (At("?") && !exact) {
      out_ += in_[pos_++];
    }
    return {};  // after an interval '+' (and '?' after {n}) is a quantifier of its own
  }

  Status Interval() {
    size_t p = pos_ + 1;
    const auto number = [&] {
      const size_t begin = p;
      while (p < in_.size() && std::isdigit(static_cast<unsigned char>(in_[p])) != 0) ++p;
      return in_.substr(begin, p - begin);
    };
    const std::string_view low = number();
    std::string_view high = low;
    const bool comma = p < in_.size() && in_[p] == ',';
    if (comma) {
      ++p;
      high = number();
    }
    if (p >= in_.size() || in_[p] != '}' || (low.empty() && high.empty())) {
      Atom();  // not an interval: a brace
      out_ += "\\{";
      ++pos_;
      return {};
    }
    pos_ = p + 1;
    if (low.size() > 5 || high.size() > 5) return Refuse("an interval over 65535");
    const std::string text = comma ? fmt::format("{{{},{}}}", low.empty() ? "0" : low, high)
                                   : fmt::format("{{{}}}", low);
    return Quantifier(text, /*interval=*/true, /*exact=*/!comma);
  }

  Status OpenGroup() {
    if (groups_.size() > kMaxDepth) return Refuse("groups nested too deeply");
    const size_t start = out_.size();
    ++pos_;
    if (At("*")) return Refuse("'(*'");
    if (!Take("?")) {
      groups_.push_back({start, 0});
      out_ += '(';
      NoAtom();
      return {};
    }
    if (Take("#")) {
      const size_t close = in_.find(')', pos_);
      if (close == std::string_view::npos) return Refuse("a comment that is not closed");
      pos_ = close + 1;
      return {};
    }
    for (const std::string_view kind : {":", "=", "!", ">", "<=", "<!"}) {
      if (Take(kind)) {
        groups_.push_back({start, 0});
        out_ += fmt::format("(?{}", kind);
        NoAtom();
        return {};
      }
    }
    if (At("<") || At("'")) {
      const size_t close = in_.find(in_[pos_] == '<' ? '>' : '\'', pos_ + 1);
      if (close == std::string_view::npos) return Refuse("a group name that is not closed");
      groups_.push_back({start, 0});
      out_ += fmt::format("(?{}", in_.substr(pos_, close + 1 - pos_));
      pos_ = close + 1;
      NoAtom();
      return {};
    }
    // Flags: (?i) for the rest of the group, (?i:...) for a group.
    std::string flags;
    while (pos_ < in_.size() && (At("i") || At("m") || At("-"))) {
      flags += At("m") ? 's' : in_[pos_];
      ++pos_;
    }
    const bool rest = At(")");
    if (flags.empty() || (!rest && !At(":"))) {
      return Refuse(fmt::format("\"(?{}\"", in_.substr(pos_, 1)));
    }
    ++pos_;
    if (rest) {
      if (++groups_.back().pending > kMaxDepth) return Refuse("too many flags");
    } else {
      groups_.push_back({start, 0});
    }
    out_ += fmt::format("(?{}:", flags);
    NoAtom();
    return {};
  }

  // An escape outside a class.
  Status Escape() {
    if (pos_ + 1 >= in_.size()) return Refuse("a '\\' at its end");
    const char c = in_[pos_ + 1];
    Atom();
    switch (c) {
      case 'b':
      case 'B': {
        const std::string w = Word() + std::string(kWordOdd);
        out_ += c == 'b' ? fmt::format("(?:(?<=[{0}])(?![{0}])|(?<![{0}])(?=[{0}]))", w)
                         : fmt::format("(?:(?<=[{0}])(?=[{0}])|(?<![{0}])(?![{0}]))", w);
        pos_ += 2;
        NoAtom();
        return {};
      }
      case 'w':
      case 'W':
        out_ += fmt::format("[{}{}{}]", c == 'W' ? "^" : "", Word(), kWordOdd);
        pos_ += 2;
        return {};
      case 'A':
      case 'z':
      case 'Z':
      case 'G':
        out_ += in_.substr(pos_, 2);
        pos_ += 2;
        NoAtom();
        return {};
      case 'R':
      case 'X':
        out_ += in_.substr(pos_, 2);
        pos_ += 2;
        return {};
      case 'k': {
        const size_t close = in_.find('>', pos_);
        if (in_.substr(pos_ + 2, 1) != "<" || close == std::string_view::npos) {
          return Refuse("\"\\k\" without a name");
        }
        out_ += in_.substr(pos_, close + 1 - pos_);
        pos_ = close + 1;
        return {};
      }
      default:
        if (c >= '1' && c <= '9') {  // a back-reference, apart from digits that follow it
          size_t end = pos_ + 1;
          while (end < in_.size() && std::isdigit(static_cast<unsigned char>(in_[end])) != 0) ++end;
          out_ += fmt::format("\\g{{{}}}", in_.substr(pos_ + 1, end - pos_ - 1));
          pos_ = end;
          return {};
        }
        Set set;
        char32_t code;
        bool is_char;
        OKV_RETURN_IF_ERROR(ClassEscape(&set, &code, &is_char));
        out_ += is_char ? Quoted(code) : Expression(set);
        return {};
    }
  }

  // An escape that stands for a character (*is_char, *code) or a set, in or outside a class.
  Status ClassEscape(Set* set, char32_t* code, bool* is_char) {
    if (pos_ + 1 >= in_.size()) return Refuse("a '\\' at its end");
    const Char c = DecodeUtf8(in_.data() + pos_ + 1);
    pos_ += 1 + c.size;
    *is_char = false;
    const auto add = [&](std::string_view content, bool negated) {
      if (negated) {
        set->others.push_back(fmt::format("[^{}]", content));
      } else {
        set->simple += content;
      }
      return Status();
    };
    switch (c.code) {
      case 'd':
      case 'D':
        return add(R"(\p{Nd})", c.code == 'D');
      case 's':
      case 'S':
        return add(kSpace, c.code == 'S');
      case 'w':
      case 'W':
        return add(Word(), c.code == 'W');
      case 'h':
      case 'H':
        return add(kHex, c.code == 'H');
      case 'p':
      case 'P':
        return Property(c.code == 'P', set);
      default:
        break;
    }
    *is_char = true;
    static constexpr std::string_view kLetters = "tnrfvae";
    static constexpr std::string_view kCodes = "\t\n\r\f\v\a\x1B";
    if (c.code < 0x80) {
      const size_t i = kLetters.find(static_cast<char>(c.code));
      if (i != std::string_view::npos) {
        *code = static_cast<unsigned char>(kCodes[i]);
        return {};
      }
    }
    if (c.code == 'x' || c.code == 'u' || c.code == '0') return NumericEscape(c.code, code);
    if (c.code < 0x80 && std::isalnum(static_cast<int>(c.code)) != 0) {
      return Refuse(fmt::format("\"\\{}\"", static_cast<char>(c.code)));
    }
    *code = c.code;
    return {};
  }

  // \xHH, \x{H...}, \uHHHH, \0oo, behind their letter.
  Status NumericEscape(char32_t kind, char32_t* code) {
    const bool braces = kind == 'x' && Take("{");
    const size_t limit = braces ? 8 : kind == 'u' ? 4 : 2;
    const unsigned base = kind == '0' ? 8 : 16;
    uint64_t value = 0;
    size_t n = 0;
    for (; n < limit && pos_ < in_.size(); ++n, ++pos_) {
      const auto c = static_cast<unsigned char>(in_[pos_]);
      if (std::isxdigit(c) == 0) break;
      const unsigned digit = c <= '9' ? c - '0' : (c | 32u) - 'a' + 10;
      if (digit >= base) break;
      value = value * base + digit;
    }
    const bool complete = kind == '0' || (kind == 'u' ? n == 4 : n > 0);
    if (!complete || (braces && !Take("}"))) return Refuse("a malformed code point");
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000) ||
        (kind == 'x' && !braces && value > 0x7F)) {
      return Refuse(fmt::format("\"\\x{:X}\"", value));  // \xHH over 7F is a byte in Oniguruma
    }
    *code = static_cast<char32_t>(value);
    return {};
  }

  // {Name}, {^Name} or a letter, behind \p or \P.
  Status Property(bool negated, Set* set) {
    std::string name;
    if (Take("{")) {
      const size_t close = in_.find('}', pos_);
      if (close == std::string_view::npos) return Refuse("a property that is not closed");
      name = std::string(in_.substr(pos_, close - pos_));
      pos_ = close + 1;
    } else if (pos_ < in_.size()) {
      name.push_back(in_[pos_++]);
    }
    const std::string shown = name;
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.erase(0, 1);
    }
    std::string key;  // names are compared without case, spaces, '_' and '-'
    for (const char c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
        key += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      } else if (c != ' ' && c != '_' && c != '-') {
        return Refuse(fmt::format("the property \"{}\"", shown));
      }
    }
    std::string content = key == "punct" ? R"(\p{P})" : PosixClass(key);
    if (content.empty()) {
      content = GeneralCategory(key);
      if (content.empty() && Compiles(fmt::format("\\p{{sc:{}}}", name))) {
        content = fmt::format("\\p{{sc:{}}}", name);  // the script itself, not its extensions
      } else if (content.empty() && !key.empty() && Compiles(fmt::format("\\p{{{}}}", name))) {
        content = fmt::format("\\p{{{}}}", name);
      }
    }
    if (content.empty()) return Refuse(fmt::format("the property \"{}\"", shown));
    if (negated) {
      set->others.push_back(fmt::format("[^{}]", content));
    } else {
      set->simple += content;
    }
    return {};
  }

  // General categories by their short and long names, in lower case.
  static std::string GeneralCategory(std::string_view key) {
    static constexpr std::array<std::pair<std::string_view, std::string_view>, 37> kLong = {{
        {"letter", "L"},
        {"casedletter", "L&"},
        {"lc", "L&"},
        {"uppercaseletter", "Lu"},
        {"lowercaseletter", "Ll"},
        {"titlecaseletter", "Lt"},
        {"modifierletter", "Lm"},
        {"otherletter", "Lo"},
        {"mark", "M"},
        {"nonspacingmark", "Mn"},
        {"spacingmark", "Mc"},
        {"enclosingmark", "Me"},
        {"number", "N"},
        {"decimalnumber", "Nd"},
        {"letternumber", "Nl"},
        {"othernumber", "No"},
        {"punctuation", "P"},
        {"connectorpunctuation", "Pc"},
        {"dashpunctuation", "Pd"},
        {"openpunctuation", "Ps"},
        {"closepunctuation", "Pe"},
        {"initialpunctuation", "Pi"},
        {"finalpunctuation", "Pf"},
        {"otherpunctuation", "Po"},
        {"symbol", "S"},
        {"mathsymbol", "Sm"},
        {"currencysymbol", "Sc"},
        {"modifiersymbol", "Sk"},
        {"othersymbol", "So"},
        {"separator", "Z"},
        {"spaceseparator", "Zs"},
        {"lineseparator", "Zl"},
        {"paragraphseparator", "Zp"},
        {"other", "C"},
        {"control", "Cc"},
        {"format", "Cf"},
        {"privateuse", "Co"},
    }};
    for (const auto& [name, category] : kLong) {
      if (name == key) return fmt::format("\\p{{{}}}", category);
    }
    if (key == "any") return "\\x{0}-\\x{10FFFF}";
    if (key.size() > 2 || key.empty()) return "";
    std::string category(key);
    category[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(category[0])));
    const std::string property = fmt::format("\\p{{{}}}", category);
    return std::string_view("LMNPSZC").find(category[0]) != std::string_view::npos &&
                   Compiles(property)
               ? property
               : "";
  }

  // `code` as a literal, in or outside a class.
  static std::string Quoted(char32_t code) {
    if (code < 0x80 && std::isalnum(static_cast<int>(code)) != 0) {
      return std::string(1, static_cast<char>(code));
    }
    return fmt::format("\\x{{{:X}}}", static_cast<uint32_t>(code));
  }

  // A set as an expression that matches one character.
  static std::string Expression(const Set& set) {
    if (set.others.empty()) {
      if (set.simple.empty()) return set.negated ? std::string(kAnything) : "(?!)";
      return fmt::format("[{}{}]", set.negated ? "^" : "", set.simple);
    }
    std::string any = set.simple.empty() ? "" : fmt::format("[{}]", set.simple);
    for (const std::string& other : set.others) {
      any += any.empty() ? "" : "|";
      any += other;
    }
    if (set.negated) return fmt::format("(?:(?!{}){})", any, kAnything);
    return set.others.size() == 1 && set.simple.empty() ? any : fmt::format("(?:{})", any);
  }

  // A class behind its '[', through its ']'.
  Result<std::string> Class(int depth) {
    if (depth > kMaxDepth) return Refuse("classes nested too deeply");
    const bool negated = Take("^");
    std::vector<std::string> operands;  // of &&, as expressions
    Set set;
    bool first = true;
    for (;; first = false) {
      if (pos_ >= in_.size()) return Refuse("a class that is not closed");
      if (At("]") && !first) break;
      if (Take("&&")) {
        operands.push_back(Expression(set));
        set = Set();
        continue;
      }
      if (At("[:")) {
        const size_t close = in_.find(":]", pos_);
        if (close != std::string_view::npos) {
          std::string_view name = in_.substr(pos_ + 2, close - pos_ - 2);
          const bool negated_name = !name.empty() && name[0] == '^';
          if (negated_name) name.remove_prefix(1);
          const std::string content = PosixClass(name);
          if (content.empty()) return Refuse(fmt::format("the class \"[:{}:]\"", name));
          pos_ = close + 2;
          if (negated_name) {
            set.others.push_back(fmt::format("[^{}]", content));
          } else {
            set.simple += content;
          }
          continue;
        }
      }
      if (Take("[")) {
        OKV_ASSIGN_OR_RETURN(std::string inner, Class(depth + 1));
        set.others.push_back(std::move(inner));
        continue;
      }
      OKV_RETURN_IF_ERROR(ClassItem(&set));
    }
    ++pos_;
    set.negated = negated && operands.empty();
    if (operands.empty()) return Expression(set);
    operands.push_back(Expression(set));
    std::string all;
    for (size_t i = 0; i + 1 < operands.size(); ++i) all += fmt::format("(?={})", operands[i]);
    all = fmt::format("(?:{}{})", all, operands.back());
    return negated ? fmt::format("(?:(?!{}){})", all, kAnything) : all;
  }

  // One character of a class, when the next item is one; sets go to `set`.
  Status ClassChar(Set* set, char32_t* code, bool* is_char) {
    if (At("\\b")) {  // in a class: backspace
      pos_ += 2;
      *code = 8;
      *is_char = true;
      return {};
    }
    if (At("\\")) return ClassEscape(set, code, is_char);
    const Char c = DecodeUtf8(in_.data() + pos_);
    pos_ += c.size;
    *code = c.code;
    *is_char = true;
    return {};
  }

  // A character, a range or an escape.
  Status ClassItem(Set* set) {
    char32_t low;
    bool is_char;
    OKV_RETURN_IF_ERROR(ClassChar(set, &low, &is_char));
    if (!is_char) return {};
    set->simple += Quoted(low);
    const bool range = At("-") && pos_ + 1 < in_.size() && in_[pos_ + 1] != ']' &&
                       in_.substr(pos_ + 1, 2) != "&&" && in_[pos_ + 1] != '[';
    if (!range) return {};
    ++pos_;
    Set other;
    char32_t high;
    OKV_RETURN_IF_ERROR(ClassChar(&other, &high, &is_char));
    if (!is_char) {  // a-\d: the '-' is itself
      set->simple += "\\x{2D}" + other.simple;
      set->others.insert(set->others.end(), other.others.begin(), other.others.end());
      return {};
    }
    if (high < low) return Refuse("a range that runs backwards");
    set->simple += '-' + Quoted(high);
    return {};
  }

  std::string_view in_;
  size_t pos_ = 0;
  std::string out_;
  size_t atom_ = kNone;      // where in out_ the last atom starts
  bool quantified_ = false;  // the last atom has a quantifier
  std::vector<Group> groups_;
};

}  // namespace

Result<std::string> TranslateOniguruma(std::string_view pattern) {
  constexpr size_t kMaxBytes = 64 << 10;
  if (pattern.size() > kMaxBytes) {
    return Unsupported(fmt::format("a regular expression has {} bytes, at most {} are supported",
                                   pattern.size(), kMaxBytes));
  }
  if (!IsValidUtf8(pattern)) return Corrupt("a regular expression is not valid UTF-8");
  return Translator(pattern).Run();
}

}  // namespace omnikv::tok
