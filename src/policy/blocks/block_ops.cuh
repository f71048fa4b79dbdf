// What the kernels of policy blocks share.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/kernels/common.cuh"
#include "policy/blocks/block_ops.h"

namespace omnikv {

constexpr int kThreads = 256;

// Calls launch(T{}) with the type that K's values have.
template <typename Launch>
void ByType(int32_t dtype, const Launch& launch) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF32:
      return launch(float{});
    case DType::kF16:
      return launch(__half{});
    case DType::kBF16:
      return launch(__nv_bfloat16{});
    case DType::kQ8_0:
      return launch(int8_t{});
    case DType::kQ4_0:
      return launch(cuda::Q4{});
  }
}

}  // namespace omnikv
