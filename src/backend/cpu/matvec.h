// Matrix-vector kernels for one to a few rows of activations, where reading the weights is all the
// time there is. Weights stay in their format; activations stay f32.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/ops.h"

namespace omnikv {

// Rows of activations in the packed order of a weight format (simd-inl.h).
struct PackedRows {
  const float* x = nullptr;  // [m, ld], zeros past n_in
  int64_t ld = 0;
  int32_t m = 0;
};

// Packed rows are padded to a multiple of this on every target.
inline constexpr int64_t kPackMultiple = 32;

struct MatvecKernels {
  // out[0, padded) = x[0, n) in the packed order of `format`.
  void (*pack)(DType format, const float* x, int64_t n, int64_t padded, float* out);
  // y[i, o] = W[o] · x[i] + bias[o] for o in [begin, end).
  void (*rows)(const WeightRef& w, const PackedRows& x, const float* bias, int64_t begin,
               int64_t end, float* y, int64_t ldy);
  // out[i, o] = act(gate) * up for o in [begin, end); a.in and a.n_rows are not looked at.
  void (*gated)(const NormGatedFfnArgs& a, const PackedRows& x_gate, const PackedRows& x_up,
                int64_t begin, int64_t end);
};

const MatvecKernels& GetMatvecKernels(const Isa& isa);

}  // namespace omnikv
