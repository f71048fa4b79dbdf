// Filters on text and numbers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"
#include "text/jinja/str_format.h"
#include "text/jinja/str_ops.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

using namespace std::string_view_literals;

// ---- text ----

Value String(Runtime& rt, const Value& self, const Args& args) {
  const Params params("string", args, {});
  return Value(ToStr(rt, self));
}

Value Safe(Runtime& rt, const Value& self, const Args& args) {
  const Params params("safe", args, {});
  StrBuilder out(&rt.budget);
  out.Append(ToStr(rt, self));
  return Value(std::move(out).Build(true));
}

Value EscapeFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("escape", args, {});
  return Value(Escape(rt, ToStr(rt, self)));
}

Str WithoutMarkup(Runtime& rt, const Str& s) {
  if (!s.markup()) return s;
  StrBuilder out(&rt.budget);
  out.Append(s);
  return std::move(out).Build();
}

Value ForceEscape(Runtime& rt, const Value& self, const Args& args) {
  const Params params("forceescape", args, {});
  return Value(Escape(rt, WithoutMarkup(rt, ToStr(rt, self))));
}

template <Case kHow>
Value ChangeCase(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a filter that changes case", args, {});
  return Value(MapCase(rt, ToStr(rt, self), kHow));
}

// Unlike str.title, words begin only after white space and opening brackets.
Value Title(Runtime& rt, const Value& self, const Args& args) {
  const Params params("title", args, {});
  const Str s = WithoutMarkup(rt, ToStr(rt, self));
  const std::string_view text = s.text();
  rt.budget.LookUp(text.size());
  StrBuilder out(&rt.budget);
  size_t rest = 0;  // where the lower-case part of the word begins
  bool at_start = true;
  std::string mapped;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    mapped.clear();
    if (at_start) {
      AppendUpper(&mapped, c.code);
      rest = pos + c.size;
    } else {
      AppendLowerAt(&mapped, text.substr(rest), pos - rest);
    }
    out.AppendLike(mapped, s, pos);
    at_start = IsSpace(c.code) || (c.code < 0x80 && "-({[<"sv.find(static_cast<char>(c.code)) !=
                                                        std::string_view::npos);
    pos += c.size;
  }
  return Value(std::move(out).Build());
}

Value Trim(Runtime& rt, const Value& self, const Args& args) {
  const Params params("trim", args, {"chars"});
  const Str* chars = params.Given(0) ? &params.Text(0) : nullptr;
  return Value(StripText(rt, ToStr(rt, self), StripSide::kBoth, chars));
}

Value ReplaceFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("replace", args, {"old", "new", "count"}, 2);
  const int64_t count = params.Given(2) ? params.Int(2, -1) : -1;
  return Value(Replace(rt, WithoutMarkup(rt, ToStr(rt, self)), ToStr(rt, params.Get(0)),
                       ToStr(rt, params.Get(1)), count));
}

Value Center(Runtime& rt, const Value& self, const Args& args) {
  const Params params("center", args, {"width"});
  const Value text(ToStr(rt, self));
  return FindMethod(text, "center")->builtin(rt, text, Args{{Value(params.Int(0, 80))}, {}});
}

Value Format(Runtime& rt, const Value& self, const Args& args) {
  if (args.named.empty()) {
    return Value(FormatPrintf(rt, ToStr(rt, self), rt.Tuple(args.positional)));
  }
  if (!args.positional.empty()) Fail("format takes positional or named arguments, not both");
  DictBuilder dict(rt);
  for (const auto& [name, value] : args.named) dict.Set(Value(name), value);
  return Value(FormatPrintf(rt, ToStr(rt, self), std::move(dict).Build()));
}

Value Indent(Runtime& rt, const Value& self, const Args& args) {
  const Params params("indent", args, {"width", "first", "blank"});
  if (self.undefined()) Fail("{}", WhyUndefined(self));
  if (!self.str()) Fail("indent takes a string, not {}", Described(self));
  Str indent;
  if (params.Find(0) && params.Get(0).str()) {
    indent = params.Text(0);
  } else {
    StrBuilder spaces(&rt.budget);
    spaces.Repeat(Str(" "), static_cast<size_t>(std::max<int64_t>(params.Int(0, 4), 0)));
    indent = std::move(spaces).Build();
  }
  const bool first = params.Bool(1, false);
  const bool blank = params.Bool(2, false);
  StrBuilder text(&rt.budget);  // with a line end more, so that a trailing one makes a last line
  text.Append(*self.str());
  text.Append("\n", false);
  const std::vector<Value> lines = SplitLines(rt, std::move(text).Build(), false);
  StrBuilder out(&rt.budget);
  for (const Value& line : lines) {
    const bool is_first = &line == &lines.front();
    if (!is_first) out.Append("\n", false);
    if (is_first ? first : blank || !line.str()->empty()) out.Append(indent);
    out.Append(*line.str());
  }
  return Value(std::move(out).Build(self.str()->markup()));
}

Value Truncate(Runtime& rt, const Value& self, const Args& args) {
  const Params params("truncate", args, {"length", "killwords", "end", "leeway"});
  if (self.undefined()) return self;
  if (!self.str()) Fail("truncate takes a string, not {}", Described(self));
  const Str& s = *self.str();
  const int64_t length = params.Int(0, 255);
  const Str end = params.Find(2) ? params.Text(2) : Str("...");
  const int64_t leeway = params.Given(3) ? params.Int(3, 5) : 5;
  const auto end_length = static_cast<int64_t>(CountChars(end.text()));
  if (length < end_length) Fail("truncate to {} characters leaves no room for the end", length);
  if (leeway < 0) Fail("truncate takes no leeway of {}", leeway);
  if (Length(rt, self) - leeway <= length) return self;
  const size_t cut = ByteOffset(s.text(), static_cast<size_t>(length - end_length));
  Str kept = Slice(rt.budget, s, 0, cut);
  if (!params.Bool(1, false)) {
    const size_t space = kept.text().rfind(' ');
    if (space != std::string_view::npos) kept = Slice(rt.budget, kept, 0, space);
  }
  StrBuilder out(&rt.budget);
  out.Append(kept);
  out.Append(s.markup() ? Escape(rt, end) : end);
  return Value(std::move(out).Build(s.markup()));
}

Value WordCount(Runtime& rt, const Value& self, const Args& args) {
  const Params params("wordcount", args, {});
  const Str s = ToStr(rt, self);
  const std::string_view text = s.text();
  rt.budget.LookUp(text.size());
  int64_t n = 0;
  bool in_word = false;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const bool word = c.code == '_' || IsAlpha(c.code) || IsNumeric(c.code);
    n += word && !in_word ? 1 : 0;
    in_word = word;
    pos += c.size;
  }
  return Value(n);
}

// ---- JSON ----

Value ToJsonFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = params.Bool(0, false);
  if (params.Given(1)) {
    if (params.Get(1).str()) {
      style.indent = params.Text(1);
    } else {
      StrBuilder spaces(&rt.budget);
      spaces.Repeat(Str(" "), static_cast<size_t>(std::max<int64_t>(params.Int(1, 0), 0)));
      style.indent = std::move(spaces).Build();
    }
    style.item_separator = Str(",");
  }
  if (params.Given(2)) {
    const Seq* pair = params.Get(2).seq();
    if (!pair || pair->items.size() != 2 || !pair->items[0].str() || !pair->items[1].str()) {
      Fail("tojson takes two strings as 'separators'");
    }
    style.item_separator = *pair->items[0].str();
    style.key_separator = *pair->items[1].str();
  }
  style.sort_keys = params.Bool(3, false);
  return Value(ToJson(rt, self, style));
}

constexpr size_t kMaxFromJson = size_t{1} << 24;  // bytes; the budget ends long before

// Not in transformers; some published templates use it on arguments that come as JSON text.
Value FromJsonFilter(Runtime& rt, const Value& self, const Args& args) {
  const Params params("from_json", args, {});
  if (!self.str()) Fail("from_json takes a string, not {}", Described(self));
  // The parser compares each key of an object with all before it.
  const size_t size = self.str()->size();
  rt.budget.Work(size > kMaxFromJson ? SIZE_MAX : size * size / 64 + 64 * size);
  rt.budget.Bytes(32 * size);
  const auto json = nlohmann::ordered_json::parse(self.str()->text(), nullptr, false);
  if (json.is_discarded()) Fail("from_json got text that is not JSON");
  return FromJson(rt, json, self.str()->AnyLiteral());
}

// ---- numbers ----

Value Abs(Runtime&, const Value& self, const Args& args) {
  const Params params("abs", args, {});
  if (const double* d = self.real()) return Value(std::fabs(*d));
  const Value positive = Plus(self);
  return *positive.integer() < 0 ? Negate(positive) : positive;
}

Value Int(Runtime& rt, const Value& self, const Args& args) {
  const Params params("int", args, {"default", "base"});
  if (self.undefined()) Fail("{}", WhyUndefined(self));
  if (self.integer()) return self;
  if (const bool* b = self.boolean()) return Value(int64_t{*b});
  std::optional<double> number;
  if (const Str* s = self.str()) {
    rt.budget.LookUp(s->size());
    const int64_t base = params.Int(1, 10);
    const bool known = base == 0 || (base >= 2 && base <= 36);
    const auto exact = ParseInt(s->text(), known ? static_cast<int>(base) : 1);
    if (exact) return Value(*exact);
    number = ParseFloat(s->text());
    if (number && std::isinf(*number)) number.reset();
  } else if (self.real()) {
    number = *self.real();
  }
  const auto truncated = number ? TruncateFloat(*number) : std::nullopt;
  if (truncated) return Value(*truncated);
  return params.Find(0) ? params.Get(0) : Value(int64_t{0});
}

Value Float(Runtime& rt, const Value& self, const Args& args) {
  const Params params("float", args, {"default"});
  if (self.undefined()) Fail("{}", WhyUndefined(self));
  if (self.real()) return self;
  if (const int64_t* i = self.integer()) return Value(static_cast<double>(*i));
  if (const bool* b = self.boolean()) return Value(*b ? 1.0 : 0.0);
  if (self.str()) {
    rt.budget.LookUp(self.str()->size());
    if (const auto number = ParseFloat(self.str()->text())) return Value(*number);
  }
  return params.Find(0) ? params.Get(0) : Value(0.0);
}

// To the nearest multiple of 10^-precision, ties to even, from the exact decimal expansion.
double RoundHalfEven(double value, int64_t precision) {
  if (!std::isfinite(value) || precision > 400) return value;
  if (precision < -400) return std::copysign(0.0, value);
  if (precision < 0) {
    const double unit = std::pow(10.0, static_cast<double>(-precision));
    return std::nearbyint(value / unit) * unit;
  }
  return *ParseFloat(fmt::format("{:.{}f}", value, precision));
}

Value Round(Runtime&, const Value& self, const Args& args) {
  const Params params("round", args, {"precision", "method"});
  const int64_t precision = params.Int(0, 0);
  const std::string_view method = params.Find(1) ? params.Text(1).text() : "common";
  if (method != "common" && method != "ceil" && method != "floor") {
    Fail("round got the method '{:.100}', expected common, ceil or floor", method);
  }
  const Value number = Plus(self);  // fails on what is no number
  if (method == "common") {
    if (const double* d = number.real()) return Value(RoundHalfEven(*d, precision));
    if (precision >= 0) return number;
    const double rounded = RoundHalfEven(static_cast<double>(*number.integer()), precision);
    return Value(TruncateFloat(rounded).value_or(0));
  }
  const double value = number.real() ? *number.real() : static_cast<double>(*number.integer());
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = value * scale;
  if (!std::isfinite(scaled) || scale == 0) Fail("round cannot round {}", FloatRepr(value));
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

// ---- any value ----

Value Default(Runtime&, const Value& self, const Args& args) {
  const Params params("default", args, {"default_value", "boolean"});
  if (!self.undefined() && !(params.Bool(1, false) && !Truthy(self))) return self;
  return params.Find(0) ? params.Get(0) : Value(Str());
}

Value Attr(Runtime& rt, const Value& self, const Args& args) {
  const Params params("attr", args, {"name"}, 1);
  // Of a dict only its methods: unlike self.name, this does not look at keys.
  if (self.dict() && !FindMethod(self, params.Text(0).text())) {
    return MakeUndefined(rt, "a dict has attributes only for its methods");
  }
  return GetAttr(rt, self, params.Text(0).text());
}

constexpr auto kFilters = std::to_array<NamedBuiltin>({
    {"abs"sv, Abs},
    {"attr"sv, Attr},
    {"capitalize"sv, ChangeCase<Case::kCapitalize>},
    {"center"sv, Center},
    {"d"sv, {Default, Builtin::Reads::kKind}},
    {"default"sv, {Default, Builtin::Reads::kKind}},
    {"e"sv, EscapeFilter},
    {"escape"sv, EscapeFilter},
    {"float"sv, Float},
    {"forceescape"sv, ForceEscape},
    {"format"sv, Format},
    {"from_json"sv, FromJsonFilter},
    {"indent"sv, Indent},
    {"int"sv, Int},
    {"lower"sv, ChangeCase<Case::kLower>},
    {"replace"sv, ReplaceFilter},
    {"round"sv, Round},
    {"safe"sv, Safe},
    {"string"sv, String},
    {"title"sv, Title},
    {"tojson"sv, ToJsonFilter},
    {"trim"sv, Trim},
    {"truncate"sv, Truncate},
    {"upper"sv, ChangeCase<Case::kUpper>},
    {"wordcount"sv, WordCount},
});

}  // namespace

BuiltinTable ScalarFilters() {
  return kFilters;
}

const NamedBuiltin* FindFilter(std::string_view name) {
  const NamedBuiltin* filter = FindIn(kFilters, name);
  return filter ? filter : FindIn(SequenceFilters(), name);
}

}  // namespace omnikv::jinja
