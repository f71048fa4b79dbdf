// What lanes hold of the matrices that tensor cores multiply (mma.cuh): pairs of 16-bit values,
// made of f32, of int8, or of what lies in shared memory. Lane l: g = l / 4, t = l % 4.
#pragma once

#include <type_traits>

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

// Two values in a register, the first in its low half.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <typename T>
__device__ __forceinline__ float2 UnpackPair(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
  }
}

// a, b as sums of two numbers of type T.
template <typename T>
__device__ __forceinline__ void SplitPair(float a, float b, uint32_t& high, uint32_t& low) {
  high = PackPair<T>(a, b);
  const float2 rounded = UnpackPair<T>(high);
  low = PackPair<T>(a - rounded.x, b - rounded.y);
}

// Four 8 x 8 matrices whose rows of 16 bytes lanes 0-7, 8-15, 16-23 and 24-31 name. Register i:
// row g, columns 2t and 2t + 1 of matrix i.
__device__ __forceinline__ void LoadMatrices(uint32_t (&a)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

// The same, each transposed: rows 2t and 2t + 1, column g.
__device__ __forceinline__ void LoadTransposed(uint32_t (&a)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

// From row g, columns 2t and 2t + 1 of an 8 x 8 matrix to rows 2t and 2t + 1, column g.
__device__ __forceinline__ uint32_t Transpose(uint32_t v) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

// Byte kFirst of x and kSecond of y, int8, as a pair of bf16: 128 + their low seven bits, less 128
// or 256 by their signs. Nothing is rounded.
template <int kFirst, int kSecond>
__device__ __forceinline__ uint32_t WidenPair(uint32_t x, uint32_t y) {
  const uint32_t bytes = __byte_perm(x, y, kFirst | (4 + kSecond) << 8);
  const uint32_t value = (bytes & 0x007f007fu) | 0x43004300u;
  const uint32_t zero = (bytes & 0x00800080u) | 0x43004300u;
  const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&value),
                                      *reinterpret_cast<const __nv_bfloat162*>(&zero));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace omnikv::cuda
