// What methods and filters do to strings. Every piece of a result keeps the origin of the piece it
// was made from, and markup stays markup.
#pragma once

#include <cstdint>

#include "text/jinja/unicode.h"
#include "text/jinja/value.h"

namespace omnikv::jinja {

enum class Case { kUpper, kLower, kFold, kSwap, kTitle, kCapitalize };
Str MapCase(Runtime& rt, const Str& s, Case how);

Str StripText(Runtime& rt, const Str& s, StripSide side, const Str* chars);
Str Replace(Runtime& rt, const Str& s, const Str& from, const Str& to, int64_t max_count);

// max_count < 0: no limit. Separator null: runs of white space. Fails on an empty separator.
std::vector<Value> Split(Runtime& rt, const Str& s, const Str* separator, int64_t max_count);
std::vector<Value> SplitFromRight(Runtime& rt, const Str& s, const Str* separator,
                                  int64_t max_count);
std::vector<Value> SplitLines(Runtime& rt, const Str& s, bool keep_ends);

}  // namespace omnikv::jinja
