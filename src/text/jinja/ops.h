// The operators of expressions on values.
#pragma once

#include <string_view>

#include "text/jinja/value.h"

namespace omnikv::jinja {

enum class BinaryOp { kAdd, kSub, kMul, kDiv, kFloorDiv, kMod, kPow };
enum class CompareOp { kEq, kNe, kLt, kLe, kGt, kGe, kIn, kNotIn };

// Fails where Python does, and on integers beyond 64 bits.
Value Arithmetic(Runtime& rt, BinaryOp op, const Value& a, const Value& b);
Value Negate(const Value& v);
Value Plus(const Value& v);
bool Compare(Runtime& rt, CompareOp op, const Value& a, const Value& b);

// object.name: an attribute or a method, else object['name'], else undefined.
Value GetAttr(Runtime& rt, const Value& object, std::string_view name);
// object[key]: an item, else an attribute or a method, else undefined.
Value GetItem(Runtime& rt, const Value& object, const Value& key);
// object[begin:end:step]; none stands for a part left out.
Value GetSlice(Runtime& rt, const Value& object, const Value& begin, const Value& end,
               const Value& step);

}  // namespace omnikv::jinja
