// Element types of weights, K/V rows and activations, and scalar conversions between them.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace omnikv {

// How numbers are stored. kQ8_0 and kQ4_0 are GGUF's block formats: 32 values, an f16 scale then 32
// int8, or then 32 nibbles. kQ4_0 is of K and V only, whose scales lie apart (kv_format.h): weights
// of this format become bf16.
enum class DType : uint8_t { kF32, kF16, kBF16, kQ8_0, kQ4_0 };

inline constexpr size_t kBlockValues = 32;             // that share a scale, in both formats
inline constexpr size_t kQ8Block = kBlockValues;       // values in a Q8_0 block
inline constexpr size_t kQ8BlockBytes = 2 + kQ8Block;  // f16 scale, then int8[32]
inline constexpr size_t kQ4BlockBytes = 2 + kBlockValues / 2;  // f16 scale, then two values a byte

inline constexpr bool InBlocks(DType t) {
  return t == DType::kQ8_0 || t == DType::kQ4_0;
}

inline std::string_view DTypeName(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kQ8_0:
      return "q8_0";
    case DType::kQ4_0:
      return "q4_0";
  }
  return "?";
}

// Bytes that `n` consecutive values take, and their scales. Where InBlocks, n is a multiple of
// kBlockValues.
inline constexpr size_t DTypeBytes(DType t, size_t n) {
  switch (t) {
    case DType::kF32:
      return 4 * n;
    case DType::kF16:
    case DType::kBF16:
      return 2 * n;
    case DType::kQ8_0:
      return n / kQ8Block * kQ8BlockBytes;
    case DType::kQ4_0:
      return n / kBlockValues * kQ4BlockBytes;
  }
  return 0;
}

using Bf16 = uint16_t;  // the upper half of an IEEE-754 binary32
using F16 = uint16_t;   // IEEE-754 binary16

constexpr float F32FromBf16(Bf16 v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v) << 16);
}

// Round to nearest, ties to even; NaN stays a quiet NaN.
constexpr Bf16 Bf16FromF32(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<Bf16>((u >> 16) | 0x40u);
  return static_cast<Bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The highest that is not above f, and the lowest that is not below it. REQUIRES a number.
constexpr Bf16 Bf16NotAbove(float f) {
  const auto u = std::bit_cast<uint32_t>(f);
  return static_cast<Bf16>((u + (u >> 31) * 0xffffu) >> 16);
}
constexpr Bf16 Bf16NotBelow(float f) {
  return static_cast<Bf16>(Bf16NotAbove(-f) ^ 0x8000u);
}

inline float F32FromF16(F16 h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 0x1fu;
  const uint32_t man = h & 0x3ffu;
  if (exp == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (man << 13));
  if (exp == 0) {  // zero or subnormal: man * 2^-24 is exact in f32
    const float f = static_cast<float>(man) * 0x1p-24f;
    return sign ? -f : f;
  }
  return std::bit_cast<float>(sign | ((exp + 112) << 23) | (man << 13));
}

// Round to nearest, ties to even; overflow becomes infinity; NaN stays a quiet NaN.
inline F16 F16FromF32(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const auto sign = static_cast<F16>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<F16>(sign | 0x7e00u);
  if (a >= 0x477ff000u) return static_cast<F16>(sign | 0x7c00u);  // rounds past 65504
  if (a < 0x38800000u) {  // subnormal: adding 2^-1 aligns the mantissa, the FPU rounds
    const float r = std::bit_cast<float>(a) + 0.5f;
    return static_cast<F16>(sign | (std::bit_cast<uint32_t>(r) - 0x3f000000u));
  }
  return static_cast<F16>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

// Value `i` of an array of type `t` (scalar; for references, loaders and tests, not for kernels).
// REQUIRES t != kQ4_0.
inline float LoadAsF32(DType t, const void* data, size_t i) {
  switch (t) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF16:
      return F32FromF16(static_cast<const F16*>(data)[i]);
    case DType::kBF16:
      return F32FromBf16(static_cast<const Bf16*>(data)[i]);
    case DType::kQ8_0: {
      const auto* b = static_cast<const uint8_t*>(data) + i / kQ8Block * kQ8BlockBytes;
      F16 scale;
      std::memcpy(&scale, b, 2);
      return F32FromF16(scale) * static_cast<float>(static_cast<int8_t>(b[2 + i % kQ8Block]));
    }
    case DType::kQ4_0:
      break;
  }
  return 0;
}

// Stores f as value `i` of an array of type `t`, rounded to nearest even. REQUIRES !InBlocks(t).
inline void StoreFromF32(DType t, void* data, size_t i, float f) {
  switch (t) {
    case DType::kF32:
      static_cast<float*>(data)[i] = f;
      break;
    case DType::kF16:
      static_cast<F16*>(data)[i] = F16FromF32(f);
      break;
    case DType::kBF16:
      static_cast<Bf16*>(data)[i] = Bf16FromF32(f);
      break;
    case DType::kQ8_0:
    case DType::kQ4_0:
      break;
  }
}

}  // namespace omnikv
