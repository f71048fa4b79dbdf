// The prefill kernels that need AVX512-BF16: products of bf16 pairs summed in f32, at twice the
// rate of f32. Highway 1.0 has no such target, so these are intrinsics.
#pragma once

#include "backend/cpu/prefill/kernels.h"

namespace omnikv::prefill {

// Null where the CPU, the system or the build lacks AVX512-BF16.
const GemmKernels* Bf16GemmKernels();
const AttendKernels* Bf16AttendKernels();

// Applies the softcap to t.logits [tokens, lanes], then the mask: logits of tokens that a row does
// not read become -inf. REQUIRES those kernels.
void Bf16CapAndMask(const AttendTile& t);

}  // namespace omnikv::prefill
