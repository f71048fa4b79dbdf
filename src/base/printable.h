// Text that comes out of files, made fit for a message: files are not trusted, terminals obey.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace omnikv {

// What a message may show of one text of a file.
inline constexpr size_t kPrintableBytes = 100;

// `text` with \xNN for every byte that a terminal could obey or that would mislead a reader:
// control characters, line ends included, of ASCII and of Unicode; marks that turn the direction of
// text or are invisible; bytes that are no UTF-8. Letters of all scripts stay as they are. Cut, at
// a character, after `max_bytes` of `text`, which three dots then show.
std::string Escaped(std::string_view text, size_t max_bytes = std::string_view::npos);

// Escaped(text, max_bytes) in single quotes, the dots inside them.
std::string Printable(std::string_view text, size_t max_bytes = kPrintableBytes);

// What the system says of an errno. Thread-safe.
std::string ErrorText(int error);

}  // namespace omnikv
