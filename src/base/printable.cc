#include "base/printable.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <cstdint>

namespace omnikv {
namespace {

// Characters that are obeyed or not seen: controls, formats, private use, unassigned ones, line and
// paragraph separators, and what Unicode calls ignorable.
bool IsUnsafe(utf8proc_int32_t code) {
  const utf8proc_property_t* property = utf8proc_get_property(code);
  switch (property->category) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return true;
    default:
      return property->ignorable != 0;
  }
}

}  // namespace

std::string Escaped(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    utf8proc_int32_t code = 0;
    const utf8proc_ssize_t n =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + pos,
                         static_cast<utf8proc_ssize_t>(text.size() - pos), &code);
    const size_t size = n > 0 ? static_cast<size_t>(n) : 1;
    if (pos + size > max_bytes) return out + "...";
    if (n > 0 && !IsUnsafe(code)) {
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

}  // namespace omnikv
