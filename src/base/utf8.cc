#include "base/utf8.h"

#include <utf8proc.h>

#include <array>

namespace omnikv {

Utf8Char Utf8CharAt(std::string_view text, size_t pos) {
  utf8proc_int32_t code = 0;
  const utf8proc_ssize_t size =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + pos,
                       static_cast<utf8proc_ssize_t>(text.size() - pos), &code);
  if (size <= 0) return {0, 0};
  return {static_cast<char32_t>(code), static_cast<size_t>(size)};
}

void AppendUtf8(std::string* out, char32_t code) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const utf8proc_ssize_t size =
      utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes.data());
  out->append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(size));
}

}  // namespace omnikv
