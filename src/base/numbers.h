// Numbers as people write them, on the command line and in files.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace omnikv {

// A whole number, with a unit if it likes: "4096", "32k", "8gb", "1.5GiB". k, m, g and t, in either
// case and with or without "b" or "ib", are 1024 and its powers, for tokens as for bytes. Nothing
// when `text` is none, or does not fit T (int64_t or uint64_t); a fraction needs a unit.
template <typename T>
std::optional<T> ParseWhole(std::string_view text);

// A finite number: "0.7", "-1", "1e-4".
std::optional<double> ParseReal(std::string_view text);

}  // namespace omnikv
