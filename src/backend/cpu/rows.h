// Kernels that work on rows of activations: embedding, the residual prologue, the norms, rotation
// and append after the Q/K/V projections, and what follows the output head.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/ops.h"

namespace omnikv {

struct RowKernels {
  // x[row] = scale * table[tokens[row]].
  void (*embed)(const EmbedArgs& a, int32_t row);
  // Updates row `row` of in.x and writes its h [d].
  void (*prologue)(const Residual& in, int32_t row, float* h);
  // Norms and rotates q (in a.q) and k of a row and appends k and v to the bank; k [n_kv_heads, dk]
  // is changed.
  void (*finish_qkv)(const NormQkvRopeAppendArgs& a, int32_t row, float* k, const float* v);
  // y = softcap(scale * y), softcap 0: none.
  void (*scale_softcap)(float* y, int64_t n, float scale, float softcap);
};

const RowKernels& GetRowKernels(const Isa& isa);

}  // namespace omnikv
