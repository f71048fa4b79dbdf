// Neighbouring values moved as one.
#pragma once

#include <cstring>
#include <type_traits>

#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {

template <typename T, int N>
struct Pack {
  T v[N];
};

// REQUIRES `from` at a multiple of the pack's bytes, or of 16.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadPack(const T* from) {
  constexpr size_t kBytes = sizeof(T) * N;
  using Word = std::conditional_t<
      kBytes % 16 == 0, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  Word words[kBytes / sizeof(Word)];
#pragma unroll
  for (size_t i = 0; i < kBytes / sizeof(Word); ++i) {
    words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  Pack<T, N> pack;
  memcpy(&pack, words, kBytes);
  return pack;
}

__device__ __forceinline__ uint32_t Bits(__half v) {
  return __half_as_ushort(v);
}
__device__ __forceinline__ uint32_t Bits(__nv_bfloat16 v) {
  return __bfloat16_as_ushort(v);
}

// Rounds to T, as FromF32 does. REQUIRES `to` in global memory, and what LoadPack does.
template <typename T, int N>
__device__ __forceinline__ void StorePack(T* to, const Pack<float, N>& from) {
  if constexpr (N == 1) {
    *to = FromF32<T>(from.v[0]);
  } else {
    // The compiler would split plain stores of this width.
    constexpr int kWords = static_cast<int>(sizeof(T)) * N / 4;
    uint32_t w[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        w[i] = __float_as_uint(from.v[i]);
      } else {
        w[i] = Bits(FromF32<T>(from.v[2 * i])) | Bits(FromF32<T>(from.v[2 * i + 1])) << 16;
      }
    }
    if constexpr (kWords == 1) {
      asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        asm volatile(
            "st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(to) + i / 4),
            "r"(w[i]), "r"(w[i + 1]), "r"(w[i + 2]), "r"(w[i + 3])
            : "memory");
      }
    }
  }
}

inline uintptr_t AddressBits(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}
inline uintptr_t AddressBits(int64_t n) {
  return static_cast<uintptr_t>(n);
}

// Whether all these addresses and distances are multiples of `bytes`.
template <typename... Values>
bool AreMultiples(size_t bytes, Values... values) {
  return (AddressBits(values) | ...) % bytes == 0;
}

// Calls body(T{}) with the type of `format`. REQUIRES one of f32, f16, bf16.
template <typename Body>
void WithType(DType format, const Body& body) {
  if (format == DType::kF16) {
    body(__half{});
  } else if (format == DType::kBF16) {
    body(__nv_bfloat16{});
  } else {
    body(float{});
  }
}

// Calls body(T{}) with the type of a plane's values.
template <typename Body>
void WithKvType(DType format, const Body& body) {
  if (format == DType::kQ8_0) return body(int8_t{});
  if (format == DType::kQ4_0) return body(Q4{});
  WithType(format, body);
}

}  // namespace omnikv::cuda
