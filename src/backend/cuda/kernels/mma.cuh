// Products of 16-bit numbers on tensor cores.
#pragma once

#include <type_traits>

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

// c [16, 8] += a [16, 16] b [16, 8]. Lane l with g = l / 4 and t = l % 4 holds
// of c rows g, g, g + 8, g + 8, columns 2t, 2t + 1, 2t, 2t + 1;
// of a rows g, g + 8, g, g + 8, columns 2t and 2t + 1 (twice), 2t + 8 and 2t + 9 (twice);
// of b column g, rows 2t and 2t + 1, then 2t + 8 and 2t + 9.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace omnikv::cuda
