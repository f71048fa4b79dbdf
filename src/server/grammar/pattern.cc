// Regular expressions of schemas, before xgrammar reads them.
#include <fmt/format.h>

#include "server/grammar/schema.h"

namespace omnikv::server {
namespace {

constexpr int kMaxGroups = 50;  // within one another

Status Has(std::string_view what) {
  return Unsupported(fmt::format("has {}, which is not supported", what));
}

// The escape at pattern[i], a backslash.
Status CheckEscape(const std::string& pattern, size_t i) {
  if (i + 1 == pattern.size()) return InvalidArgument("ends in a backslash");
  const char c = pattern[i + 1];
  switch (c) {
    case 'b':
    case 'B':
      return Has("a word boundary");
    case 'p':
    case 'P':
      return Has("a class of Unicode");
    case 'k':
      return Has("a back-reference");
    case 'A':
    case 'Z':
    case 'z':
    case 'G':
      return Has("an anchor other than ^ and $");
    default:
      if (c >= '1' && c <= '9') return Has("a back-reference");
      return {};
  }
}

}  // namespace

Status CheckPattern(const std::string& pattern, const SchemaLimits& limits) {
  if (pattern.size() > limits.pattern_bytes) {
    return ResourceExhausted(
        fmt::format("has {} bytes, expected at most {}", pattern.size(), limits.pattern_bytes));
  }
  int groups = 0;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      // In a class \b is a backspace.
      if (!(in_class && i + 1 < pattern.size() && pattern[i + 1] == 'b')) {
        OKV_RETURN_IF_ERROR(CheckEscape(pattern, i));
      }
      ++i;
    } else if (in_class) {
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
    } else if (c == '(') {
      if (++groups > kMaxGroups) {
        return ResourceExhausted(
            fmt::format("has groups deeper than {} within one another", kMaxGroups));
      }
      if (pattern.compare(i, 2, "(?") == 0 && pattern.compare(i, 3, "(?:") != 0) {
        return Has("a group that begins with (? and is not (?:");
      }
    } else if (c == ')') {
      if (--groups < 0) return InvalidArgument("closes a group that is not open");
    } else if ((c == '^' && i != 0) || (c == '$' && i + 1 != pattern.size())) {
      return Has("an anchor in its middle");
    }
  }
  if (in_class || groups != 0) return InvalidArgument("ends in the middle of a group");
  return {};
}

}  // namespace omnikv::server
