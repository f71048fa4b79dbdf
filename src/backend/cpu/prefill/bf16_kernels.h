// The prefill kernels that need AVX512-BF16: products of bf16 pairs summed in f32, at twice the
// rate of f32. Highway 1.0 has no such target, so these are intrinsics.
#pragma once

#include "backend/cpu/prefill/kernels.h"

namespace omnikv::prefill {

// Null where the CPU, the system or the build lacks AVX512-BF16.
const GemmKernels* Bf16GemmKernels();
const AttendKernels* Bf16AttendKernels();

// The part of Bf16AttendKernels between the two products: caps and masks t.logits, replaces them by
// the softmax weights in pairs, [tokens / 2, lanes], keeps t.top and t.sum, and scales t.o to the
// new maximum. REQUIRES those kernels.
void Bf16Softmax(const AttendTile& t);

}  // namespace omnikv::prefill
