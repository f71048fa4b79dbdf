#include "base/printable.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <system_error>

#include "base/utf8.h"

namespace omnikv {
namespace {

// Characters that are obeyed or not seen: controls, formats, private use, unassigned ones, line and
// paragraph separators, and what Unicode calls ignorable.
bool IsUnsafe(char32_t code) {
  const utf8proc_property_t* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(code));
  return property->category == UTF8PROC_CATEGORY_CN ||
         property->category >= UTF8PROC_CATEGORY_ZL ||  // Zl, Zp, Cc, Cf, Cs, Co
         property->ignorable != 0;
}

}  // namespace

std::string Escaped(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = Utf8CharAt(text, pos);
    const size_t size = std::max<size_t>(c.size, 1);
    if (pos + size > max_bytes) return out + "...";
    if (c.size > 0 && !IsUnsafe(c.code)) {
      out += text.substr(pos, size);
    } else {
      for (const char byte : text.substr(pos, size)) {
        out += fmt::format("\\x{:02x}", static_cast<uint8_t>(byte));
      }
    }
    pos += size;
  }
  return out;
}

std::string Printable(std::string_view text, size_t max_bytes) {
  return fmt::format("'{}'", Escaped(text, max_bytes));
}

std::string ErrorText(int error) {
  return std::generic_category().message(error);
}

}  // namespace omnikv
