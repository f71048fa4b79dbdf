// Logits of more rows than the kernels for few rows take, by cuBLASLt. The matrix of the logits is
// read once for up to kLogitsRows rows. Activations are split into two bf16 numbers, so that logits
// are near those of f32 in the fast precision too.
#pragma once

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/memory.h"

namespace omnikv::cuda {

inline constexpr int32_t kLogitsRows = 64;
// Outputs of a product: what it writes stays in the cache until it is read.
inline constexpr int64_t kLogitsBand = 32 * 1024;
// Bytes that `products` grows to, at most.
inline constexpr size_t kLogitsBytes = size_t{2} * kLogitsRows * kLogitsBand * sizeof(float);

// Whether it takes these arguments.
bool CanMultiplyLogits(const NormLogitsArgs& args);
// `rows` and `products` hold nothing from one op to the next. `launch` needs no scratch.
void MultiplyLogits(const NormLogitsArgs& args, CublasLt& gemm, GrowingBuffer& rows,
                    GrowingBuffer& products, const Launch& launch);

}  // namespace omnikv::cuda
