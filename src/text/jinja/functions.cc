// Functions every template can call.
#include <array>
#include <ctime>

#include "text/jinja/builtins.h"
#include "text/jinja/print.h"

namespace omnikv::jinja {
namespace {

using namespace std::string_view_literals;

constexpr uint64_t kMaxRange = 100'000;  // items, jinja2's own limit

Value Range(Runtime& rt, const Value&, const Args& args) {
  const Params params("range", args, {"start", "stop", "step"}, 1);
  const bool from_zero = params.Find(1) == nullptr;
  const int64_t start = from_zero ? 0 : params.Int(0, 0);
  const int64_t stop = params.Int(from_zero ? 0 : 1, 0);
  const int64_t step = params.Int(2, 1);
  if (step == 0) Fail("range takes no step of zero");
  uint64_t count = 0;
  if (step > 0 ? start < stop : start > stop) {
    const uint64_t distance = step > 0 ? static_cast<uint64_t>(stop) - static_cast<uint64_t>(start)
                                       : static_cast<uint64_t>(start) - static_cast<uint64_t>(stop);
    const uint64_t stride = step > 0 ? static_cast<uint64_t>(step) : -static_cast<uint64_t>(step);
    count = (distance - 1) / stride + 1;
  }
  if (count > kMaxRange) Fail("a range has {} items, at most {} are allowed", count, kMaxRange);
  rt.budget.Afford(count * sizeof(Value));
  std::vector<Value> items;
  items.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {  // unsigned: steps between far ends pass 64 bits
    items.emplace_back(
        static_cast<int64_t>(static_cast<uint64_t>(start) + i * static_cast<uint64_t>(step)));
  }
  return rt.NewSeq(SeqKind::kRange, std::move(items), "range");
}

// The entries that dict(...) and namespace(...) take: those of a dict or of a list of pairs, then
// the named arguments.
std::vector<std::pair<Value, Value>> Entries(Runtime& rt, std::string_view callee,
                                             const Args& args) {
  if (args.positional.size() > 1) {
    Fail("{} takes at most one positional argument, not {}", callee, args.positional.size());
  }
  std::vector<std::pair<Value, Value>> entries;
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    if (from.undefined()) Fail("{}", WhyUndefined(from));
    if (const Dict* dict = from.dict()) {
      entries = dict->items;
    } else {
      const SeqPtr pairs = Iterate(rt, from);
      for (const Value& pair : pairs->items) {
        const SeqPtr two = Iterate(rt, pair);
        if (two->items.size() != 2) Fail("{} got an entry that is no pair", callee);
        entries.emplace_back(two->items[0], two->items[1]);
      }
    }
  }
  for (const auto& [name, value] : args.named) entries.emplace_back(Value(name), value);
  return entries;
}

Value MakeDict(Runtime& rt, const Value&, const Args& args) {
  DictBuilder dict(rt);
  for (auto& [key, value] : Entries(rt, "dict", args)) dict.Set(key, value);
  return std::move(dict).Build();
}

Value MakeNamespace(Runtime& rt, const Value&, const Args& args) {
  Namespace* ns = rt.NewNamespace();
  for (auto& [key, value] : Entries(rt, "namespace", args)) {
    if (!key.str()) Fail("namespace got {} as the name of an attribute", Described(key));
    rt.SetAttribute(ns, *key.str(), value);
  }
  return Value(ns);
}

Value JoinerCall(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a joiner", args, {});
  Namespace* state = self.ns();
  if (Truthy(*state->Find(rt, "used"))) return *state->Find(rt, "separator");
  rt.SetAttribute(state, Str("used"), Value(true));
  return Value(Str());
}

// joiner(sep): a function that gives "" when first called and sep from then on.
Value MakeJoiner(Runtime& rt, const Value&, const Args& args) {
  const Params params("joiner", args, {"sep"});
  Namespace* state = rt.NewNamespace();
  rt.SetAttribute(state, Str("separator"), params.Find(0) ? params.Get(0) : Value(Str(", ")));
  rt.SetAttribute(state, Str("used"), Value(false));
  return Value(std::make_shared<const Callable>(Callable{"joiner", JoinerCall, Value(state)}));
}

Value RaiseException(Runtime& rt, const Value&, const Args& args) {
  const Params params("raise_exception", args, {"message"}, 1);
  Fail("the template raised: {}", ToStr(rt, params.Get(0)).text());
}

// strftime directive by directive, so that no text of a template is a format for the C library.
Str FormatTime(Runtime& rt, std::string_view format, bool literal) {
  constexpr std::string_view kDirectives = "aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyY%";
  StrBuilder out(&rt.budget);
  for (size_t pos = 0; pos < format.size(); ++pos) {
    if (format[pos] != '%') {
      out.Append(format.substr(pos, 1), literal);
      continue;
    }
    rt.budget.Node(4);
    size_t end = pos + 1;
    if (end < format.size() && "-_0^#"sv.find(format[end]) != std::string_view::npos) ++end;
    const char directive = end < format.size() ? format[end] : 0;
    if (directive == 'f') {
      out.Append("000000", literal);  // the time is known to the second
    } else if (directive == 'z' || directive == 'Z') {
      // empty, as for Python's times without a zone
    } else if (directive != 0 && kDirectives.find(directive) != std::string_view::npos) {
      const std::string one(format.substr(pos, end - pos + 1));
      std::array<char, 128> buffer;
      const size_t size = std::strftime(buffer.data(), buffer.size(), one.c_str(), &rt.now);
      out.Append(std::string_view(buffer.data(), size), literal);
    } else {
      Fail("strftime_now does not know the format '{:.100}'", format.substr(pos));
    }
    pos = end;
  }
  return std::move(out).Build();
}

Value StrftimeNow(Runtime& rt, const Value&, const Args& args) {
  const Params params("strftime_now", args, {"format"}, 1);
  const Str& format = params.Text(0);
  return Value(FormatTime(rt, format.text(), format.AnyLiteral()));
}

constexpr auto kFunctions = std::to_array<NamedBuiltin>({
    {"dict"sv, MakeDict},
    {"joiner"sv, MakeJoiner},
    {"namespace"sv, MakeNamespace},
    {"raise_exception"sv, RaiseException},
    {"range"sv, Range},
    {"strftime_now"sv, StrftimeNow},
});

}  // namespace

BuiltinTable Functions() {
  return kFunctions;
}

const NamedBuiltin* FindFunction(std::string_view name) {
  return FindIn(kFunctions, name);
}

}  // namespace omnikv::jinja
