#include "text/jinja/str_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

constexpr int64_t kMaxWidth = 1'000'000;  // characters
constexpr int64_t kMaxPrecision = 400;    // digits; more are zeros

struct Spec {
  std::string_view fill = " ";
  char align = 0;  // '<' '>' '^' '=', 0: by type
  char sign = '-';
  bool alternate = false;
  char separator = 0;  // of thousands
  int64_t width = 0;
  int64_t precision = -1;
  char type = 0;
};

bool IsAsciiDigit(char c) {
  return c >= '0' && c <= '9';
}

// Reads digits at *pos; -1 if there are none.
int64_t ReadNumber(std::string_view text, size_t* pos) {
  int64_t value = -1;
  while (*pos < text.size() && IsAsciiDigit(text[*pos])) {
    value = std::max<int64_t>(value, 0) * 10 + (text[(*pos)++] - '0');
    if (value > kMaxWidth) Fail("a format asks for more than {} characters", kMaxWidth);
  }
  return value;
}

void Pad(StrBuilder* out, const Spec& spec, char default_align, const Str& prefix,
         const Str& body) {
  const auto width = static_cast<size_t>(spec.width);
  const size_t length = CountChars(prefix.text()) + CountChars(body.text());
  const size_t pad = width > length ? width - length : 0;
  const char align = spec.align != 0 ? spec.align : default_align;
  const size_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
  const Str fill(spec.fill);
  out->Repeat(fill, left);
  out->Append(prefix);
  if (align == '=') out->Repeat(fill, pad);
  out->Append(body);
  if (align != '=') out->Repeat(fill, pad - left);
}

std::string SignOf(bool negative, const Spec& spec) {
  if (!negative && spec.sign == '-') return {};
  return std::string(1, negative ? '-' : spec.sign);
}

void GroupThousands(std::string* digits, char separator) {
  const size_t end = std::min(digits->find_first_not_of("0123456789"), digits->size());
  for (size_t i = end; i > 3; i -= 3) digits->insert(i - 3, 1, separator);
}

void AppendInt(StrBuilder* out, int64_t value, const Spec& spec) {
  const uint64_t magnitude =
      value < 0 ? -static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  std::string prefix = SignOf(value < 0, spec);
  std::string digits;
  switch (spec.type) {
    case 'x':
      digits = fmt::format("{:x}", magnitude);
      break;
    case 'X':
      digits = fmt::format("{:X}", magnitude);
      break;
    case 'o':
      digits = fmt::format("{:o}", magnitude);
      break;
    case 'b':
      digits = fmt::format("{:b}", magnitude);
      break;
    default:
      digits = fmt::format("{}", magnitude);
      if (spec.separator != 0) GroupThousands(&digits, spec.separator);
      break;
  }
  if (spec.alternate && spec.type != 'd') prefix += {'0', spec.type};
  Pad(out, spec, '>', Str(prefix), Str(digits));
}

void AppendFloat(StrBuilder* out, double value, const Spec& spec) {
  const bool percent = spec.type == '%';
  const int precision = spec.precision < 0 ? 6 : static_cast<int>(spec.precision);
  std::string digits;
  if (spec.type == 0 && spec.precision < 0) {
    digits = FloatRepr(std::fabs(value));
  } else {
    const char type = percent ? 'f' : spec.type == 0 ? 'g' : spec.type;
    const char format[] = {'%', '.', '*', type, 0};
    std::array<char, 800> buffer;  // the largest double has 309 digits before the point
    const int size = std::snprintf(buffer.data(), buffer.size(), format, precision,
                                   std::fabs(percent ? value * 100 : value));
    digits.assign(buffer.data(), static_cast<size_t>(size));
  }
  if (spec.separator != 0) GroupThousands(&digits, spec.separator);
  if (percent) digits += '%';
  Pad(out, spec, '>', Str(SignOf(std::signbit(value) && !std::isnan(value), spec)), Str(digits));
}

Str Truncated(Runtime& rt, const Str& s, int64_t precision) {
  rt.budget.Read(s.size());  // here and for the width
  if (precision < 0) return s;
  return Slice(rt.budget, s, 0, ByteOffset(s.text(), static_cast<size_t>(precision)));
}

double ToFloat(const Value& v, char type) {
  if (v.undefined()) Fail("{}", WhyUndefined(v));
  if (const double* d = v.real()) return *d;
  if (const int64_t* i = v.integer()) return static_cast<double>(*i);
  if (const bool* b = v.boolean()) return *b ? 1 : 0;
  Fail("the format '{}' takes a number, not {}", type, Described(v));
}

bool IsFloatType(char type) {
  return std::string_view("eEfFgG%").find(type) != std::string_view::npos;
}

// ---- printf ----

class Printf {
 public:
  Printf(Runtime& rt, const Str& format, const Value& args)
      : rt_(rt), format_(format), args_(args), out_(&rt.budget) {
    const Seq* seq = args.seq();
    if (seq && (seq->kind == SeqKind::kTuple || seq->kind == SeqKind::kGroup)) tuple_ = seq;
  }

  Str Run();

 private:
  void Directive(size_t* pos);
  const Value& NextArg();
  int64_t NumberOrStar(size_t* pos);
  void Convert(const Value& v, Spec spec);

  Runtime& rt_;
  const Str& format_;
  const Value& args_;
  const Seq* tuple_ = nullptr;  // null: args_ is the one argument
  size_t used_ = 0;
  StrBuilder out_;
};

Str Printf::Run() {
  const std::string_view text = format_.text();
  rt_.budget.Read(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const size_t percent = std::min(text.find('%', pos), text.size());
    out_.Append(format_, pos, percent);
    pos = percent;
    if (pos < text.size()) Directive(&pos);
  }
  // Python lets an argument that can be subscripted go unused, unless it is a tuple.
  const bool may_be_unused = !tuple_ && (args_.dict() || args_.seq() || args_.undefined());
  if (!may_be_unused && used_ < (tuple_ ? tuple_->items.size() : 1)) {
    Fail("not all arguments of a '%' format are used");
  }
  return std::move(out_).Build(format_.markup());
}

const Value& Printf::NextArg() {
  if (used_ >= (tuple_ ? tuple_->items.size() : 1)) Fail("a '%' format has too few arguments");
  return tuple_ ? tuple_->items[used_++] : (++used_, args_);
}

int64_t Printf::NumberOrStar(size_t* pos) {
  const std::string_view text = format_.text();
  if (*pos >= text.size() || text[*pos] != '*') return ReadNumber(text, pos);
  ++*pos;
  const Value& v = NextArg();
  if (!v.integer()) Fail("'*' in a '%' format takes an integer, not {}", Described(v));
  if (std::abs(*v.integer() / 2) > kMaxWidth)
    Fail("a '%' format asks for {} characters", *v.integer());
  return *v.integer();
}

void Printf::Directive(size_t* pos) {
  const std::string_view text = format_.text();
  const auto more = [&] { return *pos < text.size(); };
  ++*pos;  // '%'
  rt_.budget.Node(8);
  Spec spec;
  const Value* named = nullptr;
  if (more() && text[*pos] == '(') {
    const size_t close = text.find(')', *pos);
    if (close == std::string_view::npos) Fail("a '%(' format has no ')'");
    if (!args_.dict()) Fail("a '%(name)' format takes a dict, not {}", Described(args_));
    const std::string_view name = text.substr(*pos + 1, close - *pos - 1);
    named = args_.dict()->Find(rt_, name);
    if (named == nullptr) Fail("a '%' format names '{:.100}', which is not there", name);
    *pos = close + 1;
  }
  bool zero = false;
  for (; more() && std::string_view("#0- +").find(text[*pos]) != std::string_view::npos; ++*pos) {
    const char flag = text[*pos];
    if (flag == '#') spec.alternate = true;
    if (flag == '0') zero = true;
    if (flag == '-') spec.align = '<';
    if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
  }
  spec.width = NumberOrStar(pos);
  if (spec.width < -1) spec.align = '<';
  if (spec.width < 0) spec.width = spec.width == -1 ? 0 : -spec.width;
  if (more() && text[*pos] == '.') {
    ++*pos;
    spec.precision = std::max<int64_t>(NumberOrStar(pos), 0);
  }
  while (more() && std::string_view("hlL").find(text[*pos]) != std::string_view::npos) ++*pos;
  if (!more()) Fail("a '%' format ends too early");
  spec.type = text[(*pos)++];
  if (spec.type == '%') return out_.AppendLike("%", format_, *pos - 1);
  if (zero && spec.align == 0 && spec.type != 's' && spec.type != 'r') {
    spec.align = '=';
    spec.fill = "0";
  }
  Convert(named ? *named : NextArg(), spec);
}

void Printf::Convert(const Value& v, Spec spec) {
  switch (spec.type) {
    case 's':
    case 'r': {
      Str s = spec.type == 's' ? ToStr(rt_, v) : Repr(rt_, v);
      if (format_.markup()) s = Escape(rt_, s);
      return Pad(&out_, spec, '>', Str(), Truncated(rt_, s, spec.precision));
    }
    case 'd':
    case 'i':
    case 'u': {
      spec.type = 'd';
      if (!v.real()) ToFloat(v, 'd');  // fails on what is no number
      const auto i = v.real()      ? TruncateFloat(*v.real())
                     : v.integer() ? *v.integer()
                                   : int64_t{*v.boolean()};
      if (!i) Fail("the format 'd' takes a number, not NaN");
      return AppendInt(&out_, *i, spec);
    }
    case 'x':
    case 'X':
    case 'o':
      if (!v.integer()) Fail("the format '{}' takes an integer, not {}", spec.type, Described(v));
      return AppendInt(&out_, *v.integer(), spec);
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
      spec.precision = std::min(spec.precision < 0 ? 6 : spec.precision, kMaxPrecision);
      return AppendFloat(&out_, ToFloat(v, spec.type), spec);
    default:
      Fail("a '%' format has no conversion '{}'", spec.type);
  }
}

// ---- str.format ----

Spec ParseSpec(std::string_view text) {
  Spec spec;
  size_t pos = 0;
  const auto is_align = [&](size_t at) {
    return at < text.size() && std::string_view("<>^=").find(text[at]) != std::string_view::npos;
  };
  const auto take = [&](char c) { return pos < text.size() && text[pos] == c && ++pos != 0; };
  const size_t first = text.empty() ? 0 : CharAt(text, 0).size;
  if (is_align(first)) {
    spec.fill = text.substr(0, first);
    spec.align = text[first];
    pos = first + 1;
  } else if (is_align(0)) {
    spec.align = text[pos++];
  }
  for (const char sign : {'+', '-', ' '}) {
    if (take(sign)) {
      spec.sign = sign;
      break;
    }
  }
  spec.alternate = take('#');
  if (take('0') && spec.align == 0) {
    spec.align = '=';
    spec.fill = "0";
  }
  spec.width = std::max<int64_t>(ReadNumber(text, &pos), 0);
  if (take(',')) spec.separator = ',';
  if (take('_')) spec.separator = '_';
  if (take('.')) {
    spec.precision = ReadNumber(text, &pos);
    if (spec.precision < 0) Fail("the format '{:.100}' lacks a precision", text);
  }
  if (pos < text.size()) spec.type = text[pos++];
  if (pos != text.size()) Fail("the format '{:.100}' is not understood", text);
  return spec;
}

class Braces {
 public:
  Braces(Runtime& rt, const Str& format, const Args& args)
      : rt_(rt), format_(format), args_(args), out_(&rt.budget) {}

  Str Run();

 private:
  void Field(std::string_view field);
  Value Lookup(std::string_view name);
  void Convert(const Value& v, const Spec& spec);

  Runtime& rt_;
  const Str& format_;
  const Args& args_;
  size_t next_ = 0;  // of the fields without a number
  StrBuilder out_;
};

Str Braces::Run() {
  const std::string_view text = format_.text();
  for (size_t pos = 0; pos < text.size();) {
    const size_t brace = std::min(text.find_first_of("{}", pos), text.size());
    out_.Append(format_, pos, brace);
    pos = brace;
    if (pos == text.size()) break;
    if (pos + 1 < text.size() && text[pos + 1] == text[pos]) {
      out_.Append(format_, pos, pos + 1);
      pos += 2;
      continue;
    }
    const size_t close = text.find('}', pos);
    if (text[pos] == '}' || close == std::string_view::npos) {
      Fail("a format string has a single '{}'", text[pos]);
    }
    Field(text.substr(pos + 1, close - pos - 1));
    pos = close + 1;
  }
  return std::move(out_).Build(format_.markup());
}

void Braces::Field(std::string_view field) {
  rt_.budget.Node(8);
  rt_.budget.Read(field.size());
  const size_t name_end = std::min(field.find_first_of("!:"), field.size());
  Value v = Lookup(field.substr(0, name_end));
  field.remove_prefix(name_end);
  if (!field.empty() && field[0] == '!') {
    const char conversion = field.size() > 1 ? field[1] : ' ';
    if (conversion != 's' && conversion != 'r') {
      Fail("a format string has the conversion '{}', expected s or r", conversion);
    }
    v = Value(conversion == 's' ? ToStr(rt_, v) : Repr(rt_, v));
    field.remove_prefix(2);
  }
  if (!field.empty() && field[0] != ':') Fail("a format string lacks ':' after a conversion");
  if (!field.empty()) field.remove_prefix(1);
  if (field.find('{') != std::string_view::npos) Fail("a format string nests fields");
  Convert(v, ParseSpec(field));
}

Value Braces::Lookup(std::string_view name) {
  const size_t head_end = std::min(name.find_first_of(".["), name.size());
  const std::string_view head = name.substr(0, head_end);
  Value v;
  if (head.empty() || std::all_of(head.begin(), head.end(), IsAsciiDigit)) {
    size_t pos = 0;
    const size_t index = head.empty() ? next_++ : static_cast<size_t>(ReadNumber(head, &pos));
    if (index >= args_.positional.size()) Fail("a format string has too few arguments");
    v = args_.positional[index];
  } else {
    const auto it = std::find_if(args_.named.begin(), args_.named.end(), [&](const auto& arg) {
      rt_.budget.Scan(arg.first.size() == head.size() ? head.size() : 0);
      return arg.first.text() == head;
    });
    if (it == args_.named.end()) {
      Fail("a format string names '{:.100}', which is not there", head);
    }
    v = it->second;
  }
  for (size_t pos = head_end; pos < name.size();) {
    if (name[pos] == '.') {
      const size_t end = std::min(name.find_first_of(".[", pos + 1), name.size());
      v = GetAttr(rt_, v, name.substr(pos + 1, end - pos - 1));
      pos = end;
    } else {
      const size_t close = name.find(']', pos);
      if (name[pos] != '[' || close == std::string_view::npos) {
        Fail("a format string has the field '{:.100}', which is not understood", name);
      }
      const std::string_view key = name.substr(pos + 1, close - pos - 1);
      size_t at = 0;
      const bool number = !key.empty() && std::all_of(key.begin(), key.end(), IsAsciiDigit);
      v = GetItem(rt_, v, number ? Value(ReadNumber(key, &at)) : rt_.Text(key));
      pos = close + 1;
    }
  }
  return v;
}

void Braces::Convert(const Value& v, const Spec& spec) {
  const bool is_int = v.integer() || (v.boolean() && spec.type != 0);
  if (v.real() || (is_int && IsFloatType(spec.type))) {
    if (spec.type != 0 && !IsFloatType(spec.type)) {
      Fail("the format '{}' does not take a float", spec.type);
    }
    Spec capped = spec;
    capped.precision = std::min(spec.precision, kMaxPrecision);
    return AppendFloat(&out_, ToFloat(v, spec.type), capped);
  }
  if (is_int) {
    if (spec.type != 0 && std::string_view("dxXob").find(spec.type) == std::string_view::npos) {
      Fail("the format '{}' does not take an integer", spec.type);
    }
    if (spec.precision >= 0) Fail("an integer takes no precision");
    Spec with_type = spec;
    if (spec.type == 0) with_type.type = 'd';
    return AppendInt(&out_, v.integer() ? *v.integer() : int64_t{*v.boolean()}, with_type);
  }
  if (spec.type != 0 && spec.type != 's') {
    Fail("the format '{}' does not take {}", spec.type, Described(v));
  }
  Str s = ToStr(rt_, v);
  if (format_.markup()) s = Escape(rt_, s);
  Pad(&out_, spec, '<', Str(), Truncated(rt_, s, spec.precision));
}

}  // namespace

Str FormatPrintf(Runtime& rt, const Str& format, const Value& args) {
  return Printf(rt, format, args).Run();
}

Str FormatBraces(Runtime& rt, const Str& format, const Args& args) {
  return Braces(rt, format, args).Run();
}

}  // namespace omnikv::jinja
