// Values as text, the way Python's str(), repr() and json.dumps() write them, and numbers read from
// text the way int() and float() do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "text/jinja/value.h"

namespace omnikv::jinja {

std::string FloatRepr(double d);

// str(v): a string as it is, markup included.
Str ToStr(Runtime& rt, const Value& v);
Str Repr(Runtime& rt, const Value& v);

struct JsonStyle {
  bool ascii = false;  // escape what is not ASCII
  bool sort_keys = false;
  std::optional<Str> indent;  // one level; absent: everything on one line
  Str item_separator{", "};
  Str key_separator{": "};
};
// Text that comes from strings of `v` keeps its origin; what JSON puts around it is not literal.
Str ToJson(Runtime& rt, const Value& v, const JsonStyle& style);

// HTML-escaped, as markup; what is markup already stays as it is.
Str Escape(Runtime& rt, const Str& s);

// nullopt: not a number. Fails on integers beyond 64 bits.
std::optional<int64_t> ParseInt(std::string_view text, int base);
std::optional<double> ParseFloat(std::string_view text);
// The integer part. Fails outside of 64 bits; nullopt for NaN.
std::optional<int64_t> TruncateFloat(double d);

}  // namespace omnikv::jinja
