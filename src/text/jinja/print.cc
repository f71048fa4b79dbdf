#include "text/jinja/print.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "text/jinja/loop.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

class Printer {
 public:
  explicit Printer(Runtime& rt) : rt_(rt), out_(&rt.budget) {}

  void Repr(const Value& v);
  void Json(const Value& v, const JsonStyle& style, size_t level);
  void Put(std::string_view text) { out_.Append(text, false); }
  Str Build() { return std::move(out_).Build(); }

 private:
  void ReprStr(const Str& s);
  void ReprSeq(const Seq& seq);
  void ReprItems(const std::vector<Value>& items);
  void JsonStr(const Str& s, bool ascii);
  void JsonKey(const Value& key, const JsonStyle& style);
  void JsonBreak(const JsonStyle& style, size_t level);

  Runtime& rt_;
  StrBuilder out_;
};

void Printer::Repr(const Value& v) {
  const DepthGuard guard(rt_);
  rt_.budget.Node();
  if (v.undefined()) {
    Put("Undefined");
  } else if (v.none()) {
    Put("None");
  } else if (const bool* b = v.boolean()) {
    Put(*b ? "True" : "False");
  } else if (const int64_t* i = v.integer()) {
    Put(fmt::format("{}", *i));
  } else if (const double* d = v.real()) {
    Put(FloatRepr(*d));
  } else if (const Str* s = v.str()) {
    if (s->markup()) Put("Markup(");
    ReprStr(*s);
    if (s->markup()) Put(")");
  } else if (const Seq* seq = v.seq()) {
    ReprSeq(*seq);
  } else if (const Dict* dict = v.dict()) {
    Put("{");
    for (const auto& [key, value] : dict->items) {
      if (&key != &dict->items.front().first) Put(", ");
      Repr(key);
      Put(": ");
      Repr(value);
    }
    Put("}");
  } else if (const Namespace* ns = v.ns()) {
    Put("<Namespace {");
    for (const auto& [key, value] : ns->attributes) {
      if (&key != &ns->attributes.front().first) Put(", ");
      ReprStr(key);
      Put(": ");
      Repr(value);
    }
    Put("}>");
  } else if (v.callable()) {
    Put(fmt::format("<{} '{}'>", v.callable()->macro ? "Macro" : "function", v.callable()->name));
  } else {
    Put("<LoopContext>");
  }
}

void Printer::ReprSeq(const Seq& seq) {
  switch (seq.kind) {
    case SeqKind::kList:
      Put("[");
      ReprItems(seq.items);
      Put("]");
      break;
    case SeqKind::kTuple:
    case SeqKind::kGroup:
      Put("(");
      ReprItems(seq.items);
      Put(seq.items.size() == 1 ? ",)" : ")");
      break;
    case SeqKind::kRange:
      Fail("a range cannot be printed, only what is in it: use the filter list");
    case SeqKind::kGenerator:
      Put("<generator object>");
      break;
    case SeqKind::kView:
      Put(seq.name);
      Put("([");
      ReprItems(seq.items);
      Put("])");
      break;
  }
}

void Printer::ReprItems(const std::vector<Value>& items) {
  for (const Value& item : items) {
    if (&item != &items.front()) Put(", ");
    Repr(item);
  }
}

void Printer::ReprStr(const Str& s) {
  const std::string_view text = s.text();
  rt_.budget.LookUp(text.size());
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  Put({&quote, 1});
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const auto code = static_cast<uint32_t>(c.code);
    std::string escaped;
    if (c.code == static_cast<unsigned char>(quote) || c.code == '\\') {
      escaped = {'\\', static_cast<char>(c.code)};
    } else if (c.code == '\n') {
      escaped = "\\n";
    } else if (c.code == '\r') {
      escaped = "\\r";
    } else if (c.code == '\t') {
      escaped = "\\t";
    } else if (!IsPrintable(c.code)) {
      escaped = code < 0x100     ? fmt::format("\\x{:02x}", code)
                : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                                 : fmt::format("\\U{:08x}", code);
    }
    if (escaped.empty()) {
      out_.Append(s, pos, pos + c.size);
    } else {
      out_.AppendLike(escaped, s, pos);
    }
    pos += c.size;
  }
  Put({&quote, 1});
}

void Printer::JsonBreak(const JsonStyle& style, size_t level) {
  if (!style.indent) return;
  Put("\n");
  out_.Repeat(*style.indent, level);
}

void Printer::Json(const Value& v, const JsonStyle& style, size_t level) {
  const DepthGuard guard(rt_);
  rt_.budget.Node();
  const Seq* seq = v.seq();
  if (v.none()) {
    Put("null");
  } else if (const bool* b = v.boolean()) {
    Put(*b ? "true" : "false");
  } else if (const int64_t* i = v.integer()) {
    Put(fmt::format("{}", *i));
  } else if (const double* d = v.real()) {
    Put(std::isnan(*d)   ? "NaN"
        : std::isinf(*d) ? (*d > 0 ? "Infinity" : "-Infinity")
                         : FloatRepr(*d));
  } else if (const Str* s = v.str()) {
    JsonStr(*s, style.ascii);
  } else if (seq && seq->HasIndex() && seq->kind != SeqKind::kRange) {
    if (seq->items.empty()) return Put("[]");
    Put("[");
    for (const Value& item : seq->items) {
      if (&item != &seq->items.front()) out_.Append(style.item_separator);
      JsonBreak(style, level + 1);
      Json(item, style, level + 1);
    }
    JsonBreak(style, level);
    Put("]");
  } else if (const Dict* dict = v.dict()) {
    if (dict->items.empty()) return Put("{}");
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict->items) items.push_back(&item);
    if (style.sort_keys) {
      std::stable_sort(items.begin(), items.end(),
                       [&](const auto* a, const auto* c) { return Less(rt_, a->first, c->first); });
    }
    Put("{");
    for (const auto* item : items) {
      if (item != items.front()) out_.Append(style.item_separator);
      JsonBreak(style, level + 1);
      JsonKey(item->first, style);
      out_.Append(style.key_separator);
      Json(item->second, style, level + 1);
    }
    JsonBreak(style, level);
    Put("}");
  } else {
    if (v.undefined()) Fail("tojson got an undefined value: {}", WhyUndefined(v));
    Fail("tojson cannot write {}", Described(v));
  }
}

void Printer::JsonKey(const Value& key, const JsonStyle& style) {
  if (key.str()) return JsonStr(*key.str(), style.ascii);
  if (!key.none() && !key.boolean() && !key.integer() && !key.real()) {
    Fail("tojson cannot write {} as the key of an object", Described(key));
  }
  Put("\"");
  Json(key, style, 0);
  Put("\"");
}

void Printer::JsonStr(const Str& s, bool ascii) {
  const std::string_view text = s.text();
  rt_.budget.Node();
  rt_.budget.Read(2 * text.size());
  Put("\"");
  size_t copied = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const auto code = static_cast<uint32_t>(c.code);
    std::string escaped;
    if (c.code == '"' || c.code == '\\') {
      escaped = {'\\', static_cast<char>(c.code)};
    } else if (c.code == '\n') {
      escaped = "\\n";
    } else if (c.code == '\r') {
      escaped = "\\r";
    } else if (c.code == '\t') {
      escaped = "\\t";
    } else if (c.code == '\f') {
      escaped = "\\f";
    } else if (c.code == '\b') {
      escaped = "\\b";
    } else if (c.code < 0x20 || (ascii && code > 0x7E && code < 0x10000)) {
      escaped = fmt::format("\\u{:04x}", code);
    } else if (ascii && code >= 0x10000) {
      escaped = fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((code - 0x10000) >> 10),
                            0xDC00 + ((code - 0x10000) & 0x3FF));
    }
    if (!escaped.empty()) {
      out_.Append(s, copied, pos);
      out_.AppendLike(escaped, s, pos);
      copied = pos + c.size;
    }
    pos += c.size;
  }
  out_.Append(s, copied, text.size());
  Put("\"");
}

bool IsDigitOf(char c, int base, int* digit) {
  int d = 36;
  if (c >= '0' && c <= '9') d = c - '0';
  if (c >= 'a' && c <= 'z') d = c - 'a' + 10;
  if (c >= 'A' && c <= 'Z') d = c - 'A' + 10;
  *digit = d;
  return d < base;
}

std::string_view Trimmed(std::string_view text) {
  const ByteRange rest = Strip(text, StripSide::kBoth);
  return text.substr(rest.begin, rest.end - rest.begin);
}

}  // namespace

std::string FloatRepr(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d > 0 ? "inf" : "-inf";
  std::array<char, 40> buffer;
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), d, std::chars_format::scientific);
  const std::string text(buffer.data(), end.ptr);
  const int exponent = std::atoi(text.c_str() + text.find('e') + 1);
  if (exponent < -4 || exponent >= 16) return text;
  const auto fixed =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), d, std::chars_format::fixed);
  std::string plain(buffer.data(), fixed.ptr);
  if (plain.find('.') == std::string::npos) plain += ".0";
  return plain;
}

Str ToStr(Runtime& rt, const Value& v) {
  if (const Str* s = v.str()) return *s;
  return v.undefined() ? Str() : Repr(rt, v);
}

Str Repr(Runtime& rt, const Value& v) {
  Printer printer(rt);
  printer.Repr(v);
  return printer.Build();
}

Str ToJson(Runtime& rt, const Value& v, const JsonStyle& style) {
  Printer printer(rt);
  printer.Json(v, style, 0);
  return printer.Build();
}

Str Escape(Runtime& rt, const Str& s) {
  if (s.markup()) return s;
  StrBuilder out(&rt.budget);
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  size_t copied = 0;
  for (size_t pos = 0; pos < text.size(); ++pos) {
    std::string_view escaped;
    switch (text[pos]) {
      case '&':
        escaped = "&amp;";
        break;
      case '<':
        escaped = "&lt;";
        break;
      case '>':
        escaped = "&gt;";
        break;
      case '\'':
        escaped = "&#39;";
        break;
      case '"':
        escaped = "&#34;";
        break;
      default:
        continue;
    }
    out.Append(s, copied, pos);
    out.AppendLike(escaped, s, pos);
    copied = pos + 1;
  }
  out.Append(s, copied, text.size());
  return std::move(out).Build(true);
}

std::optional<int64_t> ParseInt(std::string_view text, int base) {
  text = Trimmed(text);
  bool negative = false;
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (text.size() > 1 && text[0] == '0') {
    const char mark = static_cast<char>(text[1] | 0x20);
    const int marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (marked != 0 && (base == marked || base == 0)) {
      base = marked;
      text.remove_prefix(text.size() > 2 && text[2] == '_' ? 3 : 2);
    }
  }
  if (base == 0) {
    if (text.size() > 1 && text[0] == '0' && text.find_first_not_of("0_") != text.npos) return {};
    base = 10;
  }
  if (base < 2 || base > 36 || text.empty()) return {};
  int64_t value = 0;
  bool overflow = false;
  for (size_t i = 0; i < text.size(); ++i) {
    int digit = 0;
    if (text[i] == '_') {  // between two digits only
      if (i == 0 || i + 1 == text.size() || text[i - 1] == '_') return {};
      continue;
    }
    if (!IsDigitOf(text[i], base, &digit)) return {};
    overflow |= __builtin_mul_overflow(value, base, &value);
    overflow |= __builtin_sub_overflow(value, digit, &value);  // negative: it holds the minimum
  }
  if (!negative) overflow |= __builtin_sub_overflow(int64_t{0}, value, &value);
  if (overflow) Fail("the integer {:.40} does not fit in 64 bits", text);
  return value;
}

std::optional<double> ParseFloat(std::string_view text) {
  text = Trimmed(text);
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](size_t at) {
      return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at]));
    };
    if (text[i] == '_') {
      if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1)) return {};
      continue;
    }
    digits.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(text[i]))));
  }
  const size_t start = !digits.empty() && (digits[0] == '+' || digits[0] == '-') ? 1 : 0;
  const std::string_view body = std::string_view(digits).substr(start);
  const bool named = body == "inf" || body == "infinity" || body == "nan";
  if (!named && body.find_first_not_of("0123456789.e+-") != body.npos) return {};
  if (!named && (body.empty() || body.find_first_not_of("+-") != 0)) return {};
  double value = 0;
  const auto [end, error] = std::from_chars(body.data(), body.data() + body.size(), value);
  if (end != body.data() + body.size() || error == std::errc::invalid_argument) return {};
  if (error == std::errc::result_out_of_range) value = std::strtod(body.data(), nullptr);
  return digits[0] == '-' ? -value : value;
}

std::optional<int64_t> TruncateFloat(double d) {
  if (std::isnan(d)) return {};
  // Both bounds are powers of two, exact as double.
  if (!(d >= -9223372036854775808.0 && d < 9223372036854775808.0)) {
    Fail("{} does not fit in a 64-bit integer", FloatRepr(d));
  }
  return static_cast<int64_t>(d);
}

}  // namespace omnikv::jinja
