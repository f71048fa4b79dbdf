// Whole multiples.
#pragma once

#include <cstdint>

namespace omnikv {

// The least multiple of `multiple` that is not below n. REQUIRES n >= 0 and multiple > 0.
constexpr int64_t RoundUp(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace omnikv
