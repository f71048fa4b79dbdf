#include "base/numbers.h"

#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>

namespace omnikv {
namespace {

// The power of two that a unit stands for.
std::optional<int> UnitShift(std::string_view text) {
  std::string unit;
  for (const char c : text) {
    unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (unit.empty() || unit == "b") return 0;
  const size_t power = std::string_view("kmgt").find(unit[0]);
  const std::string_view rest = std::string_view(unit).substr(1);
  if (power == std::string_view::npos || !(rest.empty() || rest == "b" || rest == "ib")) {
    return std::nullopt;
  }
  return 10 * (static_cast<int>(power) + 1);
}

}  // namespace

template <typename T>
std::optional<T> ParseWhole(std::string_view text) {
  const char* const end = text.data() + text.size();
  T whole = 0;
  auto [at, error] = std::from_chars(text.data(), end, whole);
  if (error != std::errc()) return std::nullopt;
  double fraction = 0;
  if (at != end && *at == '.') {
    const auto parsed = std::from_chars(at, end, fraction, std::chars_format::fixed);
    if (parsed.ec != std::errc() || whole < 0) return std::nullopt;
    at = parsed.ptr;
  }
  const std::optional<int> shift = UnitShift({at, static_cast<size_t>(end - at)});
  if (!shift || (fraction != 0 && *shift == 0)) return std::nullopt;
  const T most = std::numeric_limits<T>::max() >> *shift;
  const T least = std::numeric_limits<T>::min() >> *shift;
  if (whole < least || whole > most - (fraction != 0 ? 1 : 0)) return std::nullopt;
  return whole * (T{1} << *shift) + static_cast<T>(std::ldexp(fraction, *shift));
}

template std::optional<int64_t> ParseWhole(std::string_view text);
template std::optional<uint64_t> ParseWhole(std::string_view text);

std::optional<double> ParseReal(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace omnikv
