// Names that come out of files, made fit for a message: files are not trusted, terminals obey.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace omnikv {

// `name` in single quotes; anything but printable ASCII as \xNN; clipped after 100 bytes.
inline std::string Printable(std::string_view name) {
  constexpr size_t kMaxBytes = 100;
  std::string out = "'";
  for (const char c : name.substr(0, kMaxBytes)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  return out + (name.size() > kMaxBytes ? "...'" : "'");
}

}  // namespace omnikv
