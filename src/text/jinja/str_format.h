// Python's two ways to fill in a format string.
#pragma once

#include "text/jinja/value.h"

namespace omnikv::jinja {

// `format % args`: args is a tuple, a dict for %(name)s, or one value. %c is not supported.
Str FormatPrintf(Runtime& rt, const Str& format, const Value& args);

// str.format: positional and named fields with attributes and items, conversions, and the format
// specifications of strings and numbers, not nested.
Str FormatBraces(Runtime& rt, const Str& format, const Args& args);

}  // namespace omnikv::jinja
