// What Policy::ObserveResidual sees.
#pragma once

#include <cstdint>

namespace omnikv {

// The residual of one layer in one step, in the backend's memory.
struct ResidualRows {
  const float* x = nullptr;  // [n_rows, d]
  int32_t n_rows = 0;
  int32_t d = 0;          // values of a row
  bool attended = false;  // with what the layer's attention gave; else as it came into the layer
};

}  // namespace omnikv
