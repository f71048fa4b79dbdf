// What the language brings along: filters, tests, methods and functions, by name.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "text/jinja/value.h"

namespace omnikv::jinja {

struct NamedBuiltin {
  std::string_view name;  // lives for ever
  Builtin builtin;
};

// Null: no such name.
const NamedBuiltin* FindFilter(std::string_view name);
const NamedBuiltin* FindTest(std::string_view name);
const NamedBuiltin* FindMethod(const Value& self, std::string_view name);
const NamedBuiltin* FindFunction(std::string_view name);

// All there are of a kind, for tests that go through them.
using BuiltinTable = std::span<const NamedBuiltin>;
BuiltinTable ScalarFilters();    // on text and numbers
BuiltinTable SequenceFilters();  // on collections
BuiltinTable Tests();
BuiltinTable Functions();
std::array<BuiltinTable, 4> Methods();  // of strings, lists, tuples, dicts

inline const NamedBuiltin* FindIn(BuiltinTable table, std::string_view name) {
  for (const NamedBuiltin& entry : table) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

// The arguments of a call under the names of its parameters, as Python binds them. Fails on too
// many, on unknown and on missing ones.
class Params {
 public:
  static constexpr size_t kMax = 6;
  Params(std::string_view callee, const Args& args, std::initializer_list<std::string_view> names,
         size_t n_required = 0);

  const Value* Find(size_t i) const { return values_[i]; }  // null: not given
  const Value& Get(size_t i) const { return *values_[i]; }  // REQUIRES that it was given
  bool Given(size_t i) const { return values_[i] != nullptr && !values_[i]->none(); }
  bool Bool(size_t i, bool fallback) const;
  int64_t Int(size_t i, int64_t fallback) const;
  const Str& Text(size_t i) const;  // REQUIRES that it was given

 private:
  [[noreturn]] void Wrong(size_t i, std::string_view expected) const;

  std::string_view callee_;
  std::array<std::string_view, kMax> names_{};
  std::array<const Value*, kMax> values_{};
};

}  // namespace omnikv::jinja
