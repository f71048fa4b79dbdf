// Dot products of the reference.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace omnikv {

// out[r, v] = the sum over i of value(v, i) * x[r, i], for n_vectors vectors of n values and n_rows
// rows of x. Each sum goes up in i, in double, as it would alone; but a sum alone waits for every
// addition, and eight side by side do not. Most of the time of all tests goes by here.
template <typename Value>
void RefDots(int64_t n_vectors, int64_t n, const Value& value, int64_t n_rows, const float* x,
             double* out) {
  constexpr int64_t kSide = 8;
  std::vector<double> values(static_cast<size_t>(n * kSide));  // [n, kSide]
  for (int64_t first = 0; first < n_vectors; first += kSide) {
    const int64_t side = std::min(kSide, n_vectors - first);
    for (int64_t v = 0; v < side; ++v) {
      for (int64_t i = 0; i < n; ++i) {
        values[static_cast<size_t>(i * kSide + v)] = value(first + v, i);
      }
    }
    for (int64_t r = 0; r < n_rows; ++r) {
      double sums[kSide] = {};
      for (int64_t i = 0; i < n; ++i) {
        const double factor = x[r * n + i];
        for (int64_t v = 0; v < kSide; ++v) {
          sums[v] += values[static_cast<size_t>(i * kSide + v)] * factor;
        }
      }
      std::copy_n(sums, side, out + r * n_vectors + first);
    }
  }
}

}  // namespace omnikv
