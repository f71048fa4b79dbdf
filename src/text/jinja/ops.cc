#include "text/jinja/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "text/jinja/builtins.h"
#include "text/jinja/loop.h"
#include "text/jinja/print.h"
#include "text/jinja/str_format.h"
#include "text/jinja/unicode.h"

namespace omnikv::jinja {
namespace {

constexpr std::array<std::string_view, 7> kSymbols = {"+", "-", "*", "/", "//", "%", "**"};

std::optional<int64_t> AsInt(const Value& v) {
  if (const int64_t* i = v.integer()) return *i;
  if (const bool* b = v.boolean()) return *b ? 1 : 0;
  return {};
}

std::optional<double> AsFloat(const Value& v) {
  if (const double* d = v.real()) return *d;
  if (const auto i = AsInt(v)) return static_cast<double>(*i);
  return {};
}

[[noreturn]] void FailOverflow() {
  Fail("the result does not fit in a 64-bit integer");
}

Value IntPower(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) Fail("zero cannot be raised to a negative power");
    return Value(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  int64_t result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) FailOverflow();
    exponent >>= 1;
    if (exponent == 0) return Value(result);
    if (__builtin_mul_overflow(base, base, &base)) FailOverflow();
  }
}

Value IntArithmetic(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case BinaryOp::kAdd:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case BinaryOp::kSub:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case BinaryOp::kMul:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    case BinaryOp::kPow:
      return IntPower(a, b);
    default:
      if (b == 0) Fail("division by zero");
      if (op == BinaryOp::kDiv) return Value(static_cast<double>(a) / static_cast<double>(b));
      if (b == -1) {  // the only divisor for which / and % overflow
        overflow = op == BinaryOp::kFloorDiv && __builtin_sub_overflow(int64_t{0}, a, &result);
        break;
      }
      // Python rounds towards minus infinity, C++ towards zero.
      const bool adjust = a % b != 0 && (a % b < 0) != (b < 0);
      result = op == BinaryOp::kFloorDiv ? a / b - (adjust ? 1 : 0) : a % b + (adjust ? b : 0);
      break;
  }
  if (overflow) FailOverflow();
  return Value(result);
}

Value FloatArithmetic(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd:
      return Value(a + b);
    case BinaryOp::kSub:
      return Value(a - b);
    case BinaryOp::kMul:
      return Value(a * b);
    case BinaryOp::kPow: {
      if (a == 0 && b < 0) Fail("zero cannot be raised to a negative power");
      if (a < 0 && std::isfinite(a) && std::isfinite(b) && b != std::floor(b)) {
        Fail("a fractional power of a negative number is not real");
      }
      const double power = std::pow(a, b);
      if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) {
        Fail("the result does not fit in a float");
      }
      return Value(power);
    }
    default:
      break;
  }
  if (b == 0) Fail("division by zero");
  if (op == BinaryOp::kDiv) return Value(a / b);
  double mod = std::fmod(a, b);
  double quotient = (a - mod) / b;
  if (mod == 0) {
    mod = std::copysign(0.0, b);
  } else if ((b < 0) != (mod < 0)) {
    mod += b;
    quotient -= 1;
  }
  if (op == BinaryOp::kMod) return Value(mod);
  if (quotient == 0) return Value(std::copysign(0.0, a / b));
  const double floor = std::floor(quotient);
  return Value(quotient - floor > 0.5 ? floor + 1 : floor);
}

Value AddText(Runtime& rt, const Str& a, const Str& b) {
  const bool markup = a.markup() || b.markup();
  StrBuilder out(&rt.budget);
  out.Append(markup ? Escape(rt, a) : a);
  out.Append(markup ? Escape(rt, b) : b);
  return Value(std::move(out).Build(markup));
}

Value AddSequences(Runtime& rt, const Seq& a, const Seq& b) {
  const size_t n = a.items.size() + b.items.size();
  rt.budget.Afford(n * sizeof(Value));
  std::vector<Value> items;
  items.reserve(n);
  items.insert(items.end(), a.items.begin(), a.items.end());
  items.insert(items.end(), b.items.begin(), b.items.end());
  return a.kind == SeqKind::kList ? rt.List(std::move(items)) : rt.Tuple(std::move(items));
}

// Null unless `seq` is a list or a tuple, what + and * work on.
const Seq* Addable(const Value& v) {
  const Seq* seq = v.seq();
  return seq && seq->HasIndex() && seq->kind != SeqKind::kRange ? seq : nullptr;
}

Value Repeat(Runtime& rt, const Value& v, int64_t count) {
  const auto n = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (const Str* s = v.str()) {
    StrBuilder out(&rt.budget);
    out.Repeat(*s, n);
    return Value(std::move(out).Build(s->markup()));
  }
  const Seq& seq = *v.seq();
  std::vector<Value> items;
  if (!seq.items.empty()) {
    const size_t bytes = seq.items.size() * sizeof(Value);
    rt.budget.Afford(n > SIZE_MAX / bytes ? SIZE_MAX : n * bytes);
    for (size_t i = 0; i < n; ++i) {
      items.insert(items.end(), seq.items.begin(), seq.items.end());
    }
  }
  return seq.kind == SeqKind::kList ? rt.List(std::move(items)) : rt.Tuple(std::move(items));
}

// Names of methods that would change the object: refused, as the sandbox of transformers does.
bool IsMutator(const Value& object, std::string_view name) {
  static constexpr std::array<std::string_view, 8> kOfLists = {
      "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"};
  static constexpr std::array<std::string_view, 5> kOfDicts = {"clear", "pop", "popitem",
                                                               "setdefault", "update"};
  if (object.dict()) return std::find(kOfDicts.begin(), kOfDicts.end(), name) != kOfDicts.end();
  return object.seq() && object.seq()->kind == SeqKind::kList &&
         std::find(kOfLists.begin(), kOfLists.end(), name) != kOfLists.end();
}

// What `object.name` is when items are not looked at; undefined if there is no such attribute.
Value Attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (Namespace* ns = object.ns()) {
    if (const Value* value = ns->Find(rt, name)) return *value;
  } else if (Loop* loop = object.loop()) {
    return loop->Attribute(rt, name, object);
  } else if (const NamedBuiltin* method = FindMethod(object, name)) {
    rt.budget.Bytes(sizeof(Callable));
    return Value(std::make_shared<const Callable>(Callable{method->name, method->builtin, object}));
  } else if (IsMutator(object, name)) {
    return MakeUndefined(
        rt, fmt::format("a template cannot change {}, so it has no '{}'", Described(object), name));
  } else if (const Seq* seq = object.seq(); seq && seq->kind == SeqKind::kGroup) {
    if (name == "grouper") return seq->items[0];
    if (name == "list") return seq->items[1];
  }
  return MakeUndefined(rt, fmt::format("{} has no attribute '{:.100}'", Described(object), name));
}

// A slice as Python's slice.indices() normalises it: `count` items from `first` on.
struct Indices {
  int64_t first;
  int64_t step;
  int64_t count;
};

Indices NormaliseSlice(const Value& begin, const Value& end, const Value& step_value,
                       int64_t length) {
  const auto part = [](const Value& v, int64_t fallback) {
    if (v.none()) return fallback;
    const auto i = AsInt(v);
    if (!i) Fail("a slice takes integers, not {}", Described(v));
    return *i;
  };
  const int64_t step = part(step_value, 1);
  if (step == 0) Fail("a slice takes no step of zero");
  const int64_t low = step > 0 ? 0 : -1;
  const int64_t high = step > 0 ? length : length - 1;
  const auto clamp = [&](int64_t i) { return std::clamp(i < 0 ? i + length : i, low, high); };
  const int64_t first = begin.none() ? (step > 0 ? low : high) : clamp(part(begin, 0));
  const int64_t last = end.none() ? (step > 0 ? high : low) : clamp(part(end, 0));
  if (step > 0 ? first >= last : first <= last) return {first, step, 0};
  // Unsigned, so that the smallest step has a magnitude.
  const uint64_t stride = step > 0 ? static_cast<uint64_t>(step) : -static_cast<uint64_t>(step);
  const auto distance = static_cast<uint64_t>(step > 0 ? last - first : first - last);
  return {first, step, static_cast<int64_t>((distance - 1) / stride) + 1};
}

Value SliceText(Runtime& rt, const Str& s, const Value& begin, const Value& end,
                const Value& step) {
  const std::string_view text = s.text();
  rt.budget.Read(text.size());
  const Indices at = NormaliseSlice(begin, end, step, static_cast<int64_t>(CountChars(text)));
  if (at.step == 1) {
    const size_t first = ByteOffset(text, static_cast<size_t>(at.first));
    const size_t size = ByteOffset(text.substr(first), static_cast<size_t>(at.count));
    return Value(Slice(rt.budget, s, first, first + size));
  }
  rt.budget.Afford((text.size() + 1) * sizeof(size_t));
  std::vector<size_t> starts;  // of each character, in bytes
  for (size_t pos = 0; pos < text.size(); pos += CharAt(text, pos).size) starts.push_back(pos);
  StrBuilder out(&rt.budget);
  for (int64_t i = 0; i < at.count; ++i) {
    const size_t pos = starts[static_cast<size_t>(at.first + i * at.step)];
    out.Append(s, pos, pos + CharAt(text, pos).size);
  }
  return Value(std::move(out).Build(s.markup()));
}

}  // namespace

Value Arithmetic(Runtime& rt, BinaryOp op, const Value& a, const Value& b) {
  rt.budget.Node();
  const Str* text = a.str();
  if (op == BinaryOp::kMod && text) return Value(FormatPrintf(rt, *text, b));
  if (a.undefined()) Fail("{}", WhyUndefined(a));
  if (b.undefined()) Fail("{}", WhyUndefined(b));
  const auto i = AsInt(a);
  const auto j = AsInt(b);
  if (i && j) return IntArithmetic(op, *i, *j);
  const auto x = AsFloat(a);
  const auto y = AsFloat(b);
  if (x && y) return FloatArithmetic(op, *x, *y);
  const Seq* left = Addable(a);
  const Seq* right = Addable(b);
  if (op == BinaryOp::kAdd) {
    if (text && b.str()) return AddText(rt, *text, *b.str());
    if (left && right && (left->kind == SeqKind::kList) == (right->kind == SeqKind::kList)) {
      return AddSequences(rt, *left, *right);
    }
  } else if (op == BinaryOp::kMul) {
    if ((text || left) && j) return Repeat(rt, a, *j);
    if ((b.str() || right) && i) return Repeat(rt, b, *i);
  }
  Fail("'{}' does not work on {} and {}", kSymbols[static_cast<size_t>(op)], Described(a),
       Described(b));
}

Value Negate(const Value& v) {
  if (const double* d = v.real()) return Value(-*d);
  if (const auto i = AsInt(v)) return IntArithmetic(BinaryOp::kSub, 0, *i);
  if (v.undefined()) Fail("{}", WhyUndefined(v));
  Fail("'-' does not work on {}", Described(v));
}

Value Plus(const Value& v) {
  if (v.real()) return v;
  if (const auto i = AsInt(v)) return Value(*i);
  if (v.undefined()) Fail("{}", WhyUndefined(v));
  Fail("'+' does not work on {}", Described(v));
}

bool Compare(Runtime& rt, CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEq:
      return Equal(rt, a, b);
    case CompareOp::kNe:
      return !Equal(rt, a, b);
    case CompareOp::kLt:
      return Less(rt, a, b);
    case CompareOp::kGt:
      return Less(rt, b, a);
    case CompareOp::kLe:
      return Less(rt, a, b) || Equal(rt, a, b);
    case CompareOp::kGe:
      return Less(rt, b, a) || Equal(rt, a, b);
    case CompareOp::kIn:
      return Contains(rt, b, a);
    case CompareOp::kNotIn:
      return !Contains(rt, b, a);
  }
  return false;
}

Value GetAttr(Runtime& rt, const Value& object, std::string_view name) {
  rt.budget.Node();
  if (object.undefined()) Fail("{}", WhyUndefined(object));
  const Dict* dict = object.dict();
  // Methods, the refused ones too, come first even where a key has that name.
  if (dict && !FindMethod(object, name) && !IsMutator(object, name)) {
    if (const Value* value = dict->Find(rt, name)) return *value;
  }
  return Attribute(rt, object, name);
}

Value GetItem(Runtime& rt, const Value& object, const Value& key) {
  rt.budget.Node();
  if (object.undefined()) Fail("{}", WhyUndefined(object));
  if (const Dict* dict = object.dict()) {
    const bool hashable = !key.dict() && !(key.seq() && key.seq()->kind == SeqKind::kList);
    const Value* value = hashable ? FindKey(rt, *dict, key) : nullptr;
    if (value) return *value;
  } else if (const auto i = AsInt(key)) {
    if (const Str* s = object.str()) {
      const std::string_view text = s->text();
      rt.budget.Read(*i < 0 ? text.size() : std::min<size_t>(static_cast<size_t>(*i), text.size()));
      const auto length = *i < 0 ? static_cast<int64_t>(CountChars(text)) : 0;
      if (*i + length >= 0) {
        const size_t pos = ByteOffset(text, static_cast<size_t>(*i + length));
        if (pos < text.size()) {
          return Value(Slice(rt.budget, *s, pos, pos + CharAt(text, pos).size));
        }
      }
    } else if (const Seq* seq = object.seq(); seq && seq->HasIndex()) {
      const auto length = static_cast<int64_t>(seq->items.size());
      const int64_t at = *i < 0 ? *i + length : *i;
      if (at >= 0 && at < length) return seq->items[static_cast<size_t>(at)];
    }
  }
  if (const Str* name = key.str()) return Attribute(rt, object, name->text());
  return MakeUndefined(rt, fmt::format("{} has no such item", Described(object)));
}

Value GetSlice(Runtime& rt, const Value& object, const Value& begin, const Value& end,
               const Value& step) {
  rt.budget.Node();
  if (object.undefined()) Fail("{}", WhyUndefined(object));
  if (const Str* s = object.str()) return SliceText(rt, *s, begin, end, step);
  const Seq* seq = object.seq();
  if (!seq || !seq->HasIndex()) Fail("{} cannot be sliced", Described(object));
  const Indices at = NormaliseSlice(begin, end, step, static_cast<int64_t>(seq->items.size()));
  rt.budget.Afford(static_cast<size_t>(at.count) * sizeof(Value));
  std::vector<Value> items;
  for (int64_t i = 0; i < at.count; ++i) {
    items.push_back(seq->items[static_cast<size_t>(at.first + i * at.step)]);
  }
  return rt.NewSeq(seq->kind == SeqKind::kGroup ? SeqKind::kTuple : seq->kind, std::move(items),
                   seq->name);
}

}  // namespace omnikv::jinja
