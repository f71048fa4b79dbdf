// Methods of strings, lists, tuples and dicts.
#include <algorithm>

#include "text/jinja/builtins.h"
#include "text/jinja/print.h"
#include "text/jinja/str_format.h"
#include "text/jinja/str_ops.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

using namespace std::string_view_literals;

constexpr size_t kNone = std::string_view::npos;

// ---- case and white space ----

template <Case kHow>
Value ChangeCase(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a method that changes case", args, {});
  return Value(MapCase(rt, *self.str(), kHow));
}

template <StripSide kSide>
Value StripMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("strip", args, {"chars"});
  return Value(StripText(rt, *self.str(), kSide, params.Given(0) ? &params.Text(0) : nullptr));
}

Value ZFill(Runtime& rt, const Value& self, const Args& args) {
  const Params params("zfill", args, {"width"}, 1);
  const Str& s = *self.str();
  const int64_t pad = std::max<int64_t>(params.Int(0, 0), 0) - Length(rt, self);
  if (pad <= 0) return self;
  const size_t sign = !s.empty() && (s.text()[0] == '-' || s.text()[0] == '+') ? 1 : 0;
  StrBuilder out(&rt.budget);
  out.Append(s, 0, sign);
  out.Repeat(Str("0"), static_cast<size_t>(pad));
  out.Append(s, sign, s.size());
  return Value(std::move(out).Build(s.markup()));
}

enum class Align { kLeft, kRight, kCenter };

template <Align kAlign>
Value Justify(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a method that pads", args, {"width", "fillchar"}, 1);
  const Str fill = params.Find(1) ? params.Text(1) : Str(" ");
  if (CountChars(fill.text()) != 1) Fail("padding takes one character to fill with");
  const int64_t width = std::max<int64_t>(params.Int(0, 0), 0);
  const int64_t pad = std::max<int64_t>(width - Length(rt, self), 0);
  int64_t left = kAlign == Align::kRight ? pad : 0;
  if (kAlign == Align::kCenter) left = pad / 2 + (pad & width & 1);
  StrBuilder out(&rt.budget);
  out.Repeat(fill, static_cast<size_t>(left));
  out.Append(*self.str());
  out.Repeat(fill, static_cast<size_t>(pad - left));
  return Value(std::move(out).Build(self.str()->markup()));
}

// ---- splitting and joining ----

Value SplitMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("split", args, {"sep", "maxsplit"});
  const Str* separator = params.Given(0) ? &params.Text(0) : nullptr;
  return rt.List(Split(rt, *self.str(), separator, params.Int(1, -1)));
}

Value RSplitMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("rsplit", args, {"sep", "maxsplit"});
  const Str* separator = params.Given(0) ? &params.Text(0) : nullptr;
  return rt.List(SplitFromRight(rt, *self.str(), separator, params.Int(1, -1)));
}

Value SplitLinesMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("splitlines", args, {"keepends"});
  return rt.List(SplitLines(rt, *self.str(), params.Bool(0, false)));
}

template <bool kLast>
Value Partition(Runtime& rt, const Value& self, const Args& args) {
  const Params params("partition", args, {"sep"}, 1);
  const Str& s = *self.str();
  const Str& separator = params.Text(0);
  if (separator.empty()) Fail("partition got an empty separator");
  const size_t at = kLast ? FindLastText(rt.budget, s.text(), separator.text())
                          : FindText(rt.budget, s.text(), separator.text(), 0);
  std::vector<Value> parts(3, Value(Str()));
  if (at == kNone) {
    parts[kLast ? 2 : 0] = self;
  } else {
    parts[0] = Value(Slice(rt.budget, s, 0, at));
    parts[1] = Value(separator);
    parts[2] = Value(Slice(rt.budget, s, at + separator.size(), s.size()));
  }
  return rt.Tuple(std::move(parts));
}

Value Join(Runtime& rt, const Value& self, const Args& args) {
  const Params params("join", args, {"iterable"}, 1);
  const SeqPtr items = Iterate(rt, params.Get(0));
  StrBuilder out(&rt.budget);
  for (const Value& item : items->items) {
    if (!item.str()) Fail("join takes strings, not {}", Described(item));
    if (&item != &items->items.front()) out.Append(*self.str());
    out.Append(*item.str());
  }
  return Value(std::move(out).Build(self.str()->markup()));
}

// ---- searching ----

// The bytes of the characters [start, end) that the optional arguments `first` and `first` + 1
// name; kNone as begin when start is beyond the text.
ByteRange Window(const Params& params, size_t first, std::string_view text) {
  if (!params.Given(first) && !params.Given(first + 1)) return {0, text.size()};
  const auto length = static_cast<int64_t>(CountChars(text));
  int64_t start = params.Given(first) ? params.Int(first, 0) : 0;
  int64_t end = params.Given(first + 1) ? params.Int(first + 1, 0) : length;
  if (start < 0) start = std::max<int64_t>(start + length, 0);
  if (end < 0) end = std::max<int64_t>(end + length, 0);
  end = std::min(end, length);
  if (start > length || start > end) return {kNone, 0};
  return {ByteOffset(text, static_cast<size_t>(start)), ByteOffset(text, static_cast<size_t>(end))};
}

template <bool kLast>
int64_t FindChar(Runtime& rt, const Value& self, const Params& params) {
  const std::string_view text = self.str()->text();
  const ByteRange window = Window(params, 1, text);
  if (window.begin == kNone) return -1;
  const std::string_view searched = text.substr(0, window.end);
  const std::string_view needle = params.Text(0).text();
  const size_t at = kLast ? FindLastText(rt.budget, searched.substr(window.begin), needle)
                          : FindText(rt.budget, searched, needle, window.begin);
  if (at == kNone) return -1;
  return static_cast<int64_t>(CountChars(text.substr(0, at + (kLast ? window.begin : 0))));
}

template <bool kLast>
Value Find(Runtime& rt, const Value& self, const Args& args) {
  return Value(FindChar<kLast>(rt, self, Params("find", args, {"sub", "start", "end"}, 1)));
}

template <bool kLast>
Value Index(Runtime& rt, const Value& self, const Args& args) {
  const Params params("index", args, {"sub", "start", "end"}, 1);
  const int64_t at = FindChar<kLast>(rt, self, params);
  if (at < 0) Fail("index did not find '{:.100}'", params.Text(0).text());
  return Value(at);
}

Value Count(Runtime& rt, const Value& self, const Args& args) {
  const Params params("count", args, {"sub", "start", "end"}, 1);
  const std::string_view text = self.str()->text();
  const ByteRange window = Window(params, 1, text);
  if (window.begin == kNone) return Value(int64_t{0});
  const std::string_view searched = text.substr(0, window.end);
  const std::string_view needle = params.Text(0).text();
  if (needle.empty()) {
    return Value(static_cast<int64_t>(CountChars(searched.substr(window.begin)) + 1));
  }
  int64_t n = 0;
  for (size_t at = FindText(rt.budget, searched, needle, window.begin); at != kNone; ++n) {
    at = FindText(rt.budget, searched, needle, at + needle.size());
  }
  return Value(n);
}

template <bool kEnd>
bool HasAffix(Runtime& rt, std::string_view text, const Value& affix) {
  if (!affix.str()) Fail("startswith and endswith take strings, not {}", Described(affix));
  rt.budget.Scan(affix.str()->size());
  return kEnd ? text.ends_with(affix.str()->text()) : text.starts_with(affix.str()->text());
}

template <bool kEnd>
Value Affix(Runtime& rt, const Value& self, const Args& args) {
  const Params params(kEnd ? "endswith" : "startswith", args, {"affix", "start", "end"}, 1);
  const ByteRange window = Window(params, 1, self.str()->text());
  if (window.begin == kNone) return Value(false);
  const std::string_view text = self.str()->text().substr(window.begin, window.end - window.begin);
  const Value& affix = params.Get(0);
  if (affix.undefined()) Fail("{}", WhyUndefined(affix));
  const Seq* several = affix.seq();
  if (!several || several->kind != SeqKind::kTuple) return Value(HasAffix<kEnd>(rt, text, affix));
  return Value(std::any_of(several->items.begin(), several->items.end(),
                           [&](const Value& one) { return HasAffix<kEnd>(rt, text, one); }));
}

template <bool kEnd>
Value RemoveAffix(Runtime& rt, const Value& self, const Args& args) {
  const Params params(kEnd ? "removesuffix" : "removeprefix", args, {"affix"}, 1);
  const Str& s = *self.str();
  const size_t n = params.Text(0).size();
  if (!HasAffix<kEnd>(rt, s.text(), params.Get(0))) return self;
  return Value(kEnd ? Slice(rt.budget, s, 0, s.size() - n) : Slice(rt.budget, s, n, s.size()));
}

Value ReplaceMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("replace", args, {"old", "new", "count"}, 2);
  return Value(Replace(rt, *self.str(), params.Text(0), params.Text(1), params.Int(2, -1)));
}

Value Format(Runtime& rt, const Value& self, const Args& args) {
  return Value(FormatBraces(rt, *self.str(), args));
}

// ---- what a string is made of ----

template <bool (*kIs)(char32_t)>
Value All(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a method that looks at characters", args, {});
  const std::string_view text = self.str()->text();
  rt.budget.LookUp(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    if (!kIs(c.code)) return Value(false);
    pos += c.size;
  }
  return Value(!text.empty());
}

bool IsAlnum(char32_t code) {
  return IsAlpha(code) || IsNumeric(code);
}

Value IsAsciiMethod(Runtime&, const Value& self, const Args& args) {
  const Params params("isascii", args, {});
  const std::string_view text = self.str()->text();
  return Value(std::all_of(text.begin(), text.end(),
                           [](char c) { return static_cast<unsigned char>(c) < 0x80; }));
}

// At least one cased character, and none that `kWrong` or a title-case letter.
template <bool (*kRight)(char32_t), bool (*kWrong)(char32_t)>
Value AllCased(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a method that looks at case", args, {});
  const std::string_view text = self.str()->text();
  rt.budget.LookUp(text.size());
  bool any = false;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    if (kWrong(c.code) || IsTitle(c.code)) return Value(false);
    any |= kRight(c.code);
    pos += c.size;
  }
  return Value(any);
}

Value IsTitleMethod(Runtime& rt, const Value& self, const Args& args) {
  const Params params("istitle", args, {});
  const std::string_view text = self.str()->text();
  rt.budget.LookUp(text.size());
  bool any = false;
  bool in_word = false;
  for (size_t pos = 0; pos < text.size();) {
    const Char c = CharAt(text, pos);
    const bool starts = IsUpper(c.code) || IsTitle(c.code);
    const bool follows = IsLower(c.code);
    if ((starts && in_word) || (follows && !in_word)) return Value(false);
    in_word = starts || follows;
    any |= in_word;
    pos += c.size;
  }
  return Value(any);
}

// ---- lists, tuples and dicts ----

Value CountItems(Runtime& rt, const Value& self, const Args& args) {
  const Params params("count", args, {"value"}, 1);
  const auto& items = self.seq()->items;
  return Value(static_cast<int64_t>(std::count_if(
      items.begin(), items.end(), [&](const Value& v) { return Equal(rt, v, params.Get(0)); })));
}

Value IndexOfItem(Runtime& rt, const Value& self, const Args& args) {
  const Params params("index", args, {"value", "start", "end"}, 1);
  const auto& items = self.seq()->items;
  const auto size = static_cast<int64_t>(items.size());
  int64_t start = params.Int(1, 0);
  int64_t end = params.Int(2, size);
  if (start < 0) start = std::max<int64_t>(start + size, 0);
  if (end < 0) end += size;
  for (int64_t i = start; i < std::min(end, size); ++i) {
    if (Equal(rt, items[static_cast<size_t>(i)], params.Get(0))) return Value(i);
  }
  Fail("index did not find the value in {}", Described(self));
}

Value Copy(Runtime&, const Value& self, const Args& args) {
  const Params params("copy", args, {});
  return self;  // nothing can change either of them
}

Value Get(Runtime& rt, const Value& self, const Args& args) {
  const Params params("get", args, {"key", "default"}, 1);
  const Value* value = FindKey(rt, *self.dict(), params.Get(0));
  if (value) return *value;
  return params.Find(1) ? params.Get(1) : Value(None{});
}

Value Keys(Runtime& rt, const Value& self, const Args& args) {
  const Params params("keys", args, {});
  std::vector<Value> keys;
  for (const auto& item : self.dict()->items) keys.push_back(item.first);
  return rt.NewSeq(SeqKind::kView, std::move(keys), "dict_keys");
}

Value Values(Runtime& rt, const Value& self, const Args& args) {
  const Params params("values", args, {});
  std::vector<Value> values;
  for (const auto& item : self.dict()->items) values.push_back(item.second);
  return rt.NewSeq(SeqKind::kView, std::move(values), "dict_values");
}

Value Items(Runtime& rt, const Value& self, const Args& args) {
  const Params params("items", args, {});
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->items) items.push_back(rt.Tuple({key, value}));
  return rt.NewSeq(SeqKind::kView, std::move(items), "dict_items");
}

constexpr auto kStrMethods = std::to_array<NamedBuiltin>({
    {"capitalize"sv, ChangeCase<Case::kCapitalize>},
    {"casefold"sv, ChangeCase<Case::kFold>},
    {"center"sv, Justify<Align::kCenter>},
    {"count"sv, Count},
    {"endswith"sv, Affix<true>},
    {"find"sv, Find<false>},
    {"format"sv, Format},
    {"index"sv, Index<false>},
    {"isalnum"sv, All<IsAlnum>},
    {"isalpha"sv, All<IsAlpha>},
    {"isascii"sv, IsAsciiMethod},
    {"isdecimal"sv, All<IsDecimal>},
    {"isdigit"sv, All<IsDigit>},
    {"islower"sv, AllCased<IsLower, IsUpper>},
    {"isnumeric"sv, All<IsNumeric>},
    {"isspace"sv, All<IsSpace>},
    {"istitle"sv, IsTitleMethod},
    {"isupper"sv, AllCased<IsUpper, IsLower>},
    {"join"sv, Join},
    {"ljust"sv, Justify<Align::kLeft>},
    {"lower"sv, ChangeCase<Case::kLower>},
    {"lstrip"sv, StripMethod<StripSide::kLeft>},
    {"partition"sv, Partition<false>},
    {"removeprefix"sv, RemoveAffix<false>},
    {"removesuffix"sv, RemoveAffix<true>},
    {"replace"sv, ReplaceMethod},
    {"rfind"sv, Find<true>},
    {"rindex"sv, Index<true>},
    {"rjust"sv, Justify<Align::kRight>},
    {"rpartition"sv, Partition<true>},
    {"rsplit"sv, RSplitMethod},
    {"rstrip"sv, StripMethod<StripSide::kRight>},
    {"split"sv, SplitMethod},
    {"splitlines"sv, SplitLinesMethod},
    {"startswith"sv, Affix<false>},
    {"strip"sv, StripMethod<StripSide::kBoth>},
    {"swapcase"sv, ChangeCase<Case::kSwap>},
    {"title"sv, ChangeCase<Case::kTitle>},
    {"upper"sv, ChangeCase<Case::kUpper>},
    {"zfill"sv, ZFill},
});

constexpr auto kListMethods = std::to_array<NamedBuiltin>({
    {"copy"sv, Copy},
    {"count"sv, CountItems},
    {"index"sv, IndexOfItem},
});

constexpr auto kTupleMethods = std::to_array<NamedBuiltin>({
    {"count"sv, CountItems},
    {"index"sv, IndexOfItem},
});

constexpr auto kDictMethods = std::to_array<NamedBuiltin>({
    {"copy"sv, Copy},
    {"get"sv, Get},
    {"items"sv, Items},
    {"keys"sv, Keys},
    {"values"sv, Values},
});

}  // namespace

std::array<BuiltinTable, 4> Methods() {
  return {kStrMethods, kListMethods, kTupleMethods, kDictMethods};
}

const NamedBuiltin* FindMethod(const Value& self, std::string_view name) {
  if (self.str()) return FindIn(kStrMethods, name);
  if (self.dict()) return FindIn(kDictMethods, name);
  const Seq* seq = self.seq();
  if (!seq || !seq->HasIndex()) return nullptr;
  return seq->kind == SeqKind::kList ? FindIn(kListMethods, name) : FindIn(kTupleMethods, name);
}

}  // namespace omnikv::jinja
