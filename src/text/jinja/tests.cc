// Tests: what stands after `is`.
#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/print.h"

namespace omnikv::jinja {
namespace {

using namespace std::string_view_literals;

// A test without arguments that looks at the value alone.
template <bool (*kIs)(const Value&)>
Value Simple(Runtime&, const Value& self, const Args& args) {
  const Params params("the test", args, {});
  return Value(kIs(self));
}

bool IsUndefined(const Value& v) {
  return v.undefined() != nullptr;
}
bool IsDefined(const Value& v) {
  return !IsUndefined(v);
}
bool IsNone(const Value& v) {
  return v.none();
}
bool IsBoolean(const Value& v) {
  return v.boolean() != nullptr;
}
bool IsTrue(const Value& v) {
  return v.boolean() && *v.boolean();
}
bool IsFalse(const Value& v) {
  return v.boolean() && !*v.boolean();
}
bool IsInteger(const Value& v) {
  return v.integer() != nullptr;
}
bool IsFloat(const Value& v) {
  return v.real() != nullptr;
}
bool IsNumber(const Value& v) {
  return v.boolean() || v.integer() || v.real();
}
bool IsString(const Value& v) {
  return v.str() != nullptr;
}
bool IsMapping(const Value& v) {
  return v.dict() != nullptr;
}
bool IsEscaped(const Value& v) {
  return v.str() && v.str()->markup();
}
// Undefined has a length, items and a call operator: they fail only when used.
bool IsCallable(const Value& v) {
  return v.callable() || v.loop() || IsUndefined(v);
}
bool IsSequence(const Value& v) {
  return v.str() || v.dict() || IsUndefined(v) || (v.seq() && v.seq()->HasIndex());
}
bool IsIterable(const Value& v) {
  return v.str() || v.dict() || v.seq() || v.loop() || IsUndefined(v);
}

Value Modulo(Runtime& rt, const Value& self, const Value& divisor, int64_t wanted) {
  return Value(Equal(rt, Arithmetic(rt, BinaryOp::kMod, self, divisor), Value(wanted)));
}

Value Odd(Runtime& rt, const Value& self, const Args& args) {
  const Params params("odd", args, {});
  return Modulo(rt, self, Value(int64_t{2}), 1);
}

Value Even(Runtime& rt, const Value& self, const Args& args) {
  const Params params("even", args, {});
  return Modulo(rt, self, Value(int64_t{2}), 0);
}

Value DivisibleBy(Runtime& rt, const Value& self, const Args& args) {
  const Params params("divisibleby", args, {"num"}, 1);
  return Modulo(rt, self, params.Get(0), 0);
}

// Of the text of any value.
Value CaseTest(Runtime& rt, const Value& self, const Args& args, std::string_view method) {
  const Value text(ToStr(rt, self));
  return FindMethod(text, method)->builtin(rt, text, args);
}

Value Lower(Runtime& rt, const Value& self, const Args& args) {
  return CaseTest(rt, self, args, "islower");
}

Value Upper(Runtime& rt, const Value& self, const Args& args) {
  return CaseTest(rt, self, args, "isupper");
}

Value SameAs(Runtime& rt, const Value& self, const Args& args) {
  const Params params("sameas", args, {"other"}, 1);
  return Value(Same(rt, self, params.Get(0)));
}

template <CompareOp kOp>
Value Comparison(Runtime& rt, const Value& self, const Args& args) {
  const Params params("a test that compares", args, {"other"}, 1);
  return Value(Compare(rt, kOp, self, params.Get(0)));
}

Value IsFilter(Runtime&, const Value& self, const Args& args) {
  const Params params("filter", args, {});
  return Value(self.str() && FindFilter(self.str()->text()));
}

Value IsTest(Runtime&, const Value& self, const Args& args) {
  const Params params("test", args, {});
  return Value(self.str() && FindTest(self.str()->text()));
}

constexpr auto kTests = std::to_array<NamedBuiltin>({
    {"!="sv, Comparison<CompareOp::kNe>},
    {"<"sv, Comparison<CompareOp::kLt>},
    {"<="sv, Comparison<CompareOp::kLe>},
    {"=="sv, Comparison<CompareOp::kEq>},
    {">"sv, Comparison<CompareOp::kGt>},
    {">="sv, Comparison<CompareOp::kGe>},
    {"boolean"sv, {Simple<IsBoolean>, Builtin::Reads::kKind}},
    {"callable"sv, {Simple<IsCallable>, Builtin::Reads::kKind}},
    {"defined"sv, {Simple<IsDefined>, Builtin::Reads::kKind}},
    {"divisibleby"sv, DivisibleBy},
    {"eq"sv, Comparison<CompareOp::kEq>},
    {"equalto"sv, Comparison<CompareOp::kEq>},
    {"escaped"sv, {Simple<IsEscaped>, Builtin::Reads::kKind}},
    {"even"sv, Even},
    {"false"sv, {Simple<IsFalse>, Builtin::Reads::kKind}},
    {"filter"sv, IsFilter},
    {"float"sv, {Simple<IsFloat>, Builtin::Reads::kKind}},
    {"ge"sv, Comparison<CompareOp::kGe>},
    {"greaterthan"sv, Comparison<CompareOp::kGt>},
    {"gt"sv, Comparison<CompareOp::kGt>},
    {"in"sv, Comparison<CompareOp::kIn>},
    {"integer"sv, {Simple<IsInteger>, Builtin::Reads::kKind}},
    {"iterable"sv, {Simple<IsIterable>, Builtin::Reads::kKind}},
    {"le"sv, Comparison<CompareOp::kLe>},
    {"lessthan"sv, Comparison<CompareOp::kLt>},
    {"lower"sv, Lower},
    {"lt"sv, Comparison<CompareOp::kLt>},
    {"mapping"sv, {Simple<IsMapping>, Builtin::Reads::kKind}},
    {"ne"sv, Comparison<CompareOp::kNe>},
    {"none"sv, {Simple<IsNone>, Builtin::Reads::kKind}},
    {"number"sv, {Simple<IsNumber>, Builtin::Reads::kKind}},
    {"odd"sv, Odd},
    {"sameas"sv, SameAs},
    {"sequence"sv, {Simple<IsSequence>, Builtin::Reads::kKind}},
    {"string"sv, {Simple<IsString>, Builtin::Reads::kKind}},
    {"test"sv, IsTest},
    {"true"sv, {Simple<IsTrue>, Builtin::Reads::kKind}},
    {"undefined"sv, {Simple<IsUndefined>, Builtin::Reads::kKind}},
    {"upper"sv, Upper},
});

}  // namespace

BuiltinTable Tests() {
  return kTests;
}

const NamedBuiltin* FindTest(std::string_view name) {
  return FindIn(kTests, name);
}

}  // namespace omnikv::jinja
