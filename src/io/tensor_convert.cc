// Block formats and float types to f32, f16 and bf16. Layouts are those of ggml: a block format
// stores values in blocks of 32 (legacy) or 256 (K-quants, sub-blocks of 16 or 32 with their own
// 4- or 6-bit scales). Loops have fixed trip counts, so that the compiler vectorises them.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "io/tensor.h"

namespace omnikv {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as they lie in memory");

constexpr size_t kLegacy = 32;   // values in a legacy block
constexpr size_t kSuper = 256;   // values in a K-quant block
constexpr size_t kChunk = 2048;  // values widened to f32 at a time before they are narrowed: 8 KB

float LoadF16(const uint8_t* p) {
  F16 h;
  std::memcpy(&h, p, sizeof h);
  return F32FromF16(h);
}

// Each Decode* turns one block at `b` into f32 values at `y`.

void DecodeQ8_0(const uint8_t* __restrict b, float* __restrict y) {
  const float d = LoadF16(b);
  for (size_t j = 0; j < kLegacy; ++j) y[j] = d * static_cast<float>(static_cast<int8_t>(b[2 + j]));
}

// In all 4- and 5-bit legacy formats, the low nibbles are the first 16 values, the high ones the
// rest; qh holds the fifth bits of values 0 to 31.
void DecodeQ4_0(const uint8_t* __restrict b, float* __restrict y) {  // f16 d, nibbles[16]
  const float d = LoadF16(b);
  for (size_t j = 0; j < kLegacy / 2; ++j) {
    const int q = b[2 + j];
    y[j] = static_cast<float>((q & 15) - 8) * d;
    y[j + kLegacy / 2] = static_cast<float>((q >> 4) - 8) * d;
  }
}

void DecodeQ4_1(const uint8_t* __restrict b, float* __restrict y) {  // f16 d, f16 min, nibbles[16]
  const float d = LoadF16(b);
  const float min = LoadF16(b + 2);
  for (size_t j = 0; j < kLegacy / 2; ++j) {
    const int q = b[4 + j];
    y[j] = static_cast<float>(q & 15) * d + min;
    y[j + kLegacy / 2] = static_cast<float>(q >> 4) * d + min;
  }
}

// Values 0 to 31 of a 5-bit block, unsigned, from its u32 of fifth bits and its nibbles.
void Unpack5(const uint8_t* __restrict fifth, const uint8_t* __restrict nibbles,
             int* __restrict q) {
  uint32_t high;
  std::memcpy(&high, fifth, sizeof high);
  for (uint32_t j = 0; j < kLegacy / 2; ++j) {
    q[j] = static_cast<int>((nibbles[j] & 15u) | (high >> j & 1u) << 4);
    q[j + kLegacy / 2] = static_cast<int>((nibbles[j] >> 4) | (high >> (j + 16) & 1u) << 4);
  }
}

void DecodeQ5_0(const uint8_t* __restrict b, float* __restrict y) {  // f16 d, u32 qh, nibbles[16]
  const float d = LoadF16(b);
  int q[kLegacy];
  Unpack5(b + 2, b + 6, q);
  for (size_t j = 0; j < kLegacy; ++j) y[j] = static_cast<float>(q[j] - 16) * d;
}

void DecodeQ5_1(const uint8_t* __restrict b, float* __restrict y) {  // f16 d, f16 min, qh, nibbles
  const float d = LoadF16(b);
  const float min = LoadF16(b + 2);
  int q[kLegacy];
  Unpack5(b + 4, b + 8, q);
  for (size_t j = 0; j < kLegacy; ++j) y[j] = static_cast<float>(q[j]) * d + min;
}

// Both 2-bit layouts: bytes [half][32]; the four bit pairs of a byte are 32 values apart. Group g
// of 16 values lies in half g / 8, pair g % 8 / 2, bytes 16 * (g % 2) on.
struct Pairs {
  size_t byte;  // of the group's first value in qs[64]
  int shift;    // of its bit pair
};
constexpr Pairs PairsOf(size_t group) {
  return {group / 8 * 32 + group % 2 * 16, static_cast<int>(group % 8 / 2 * 2)};
}

void DecodeQ2_K(const uint8_t* __restrict b, float* __restrict y) {
  const uint8_t* scales = b;   // [16] low nibble scale, high nibble min
  const uint8_t* qs = b + 16;  // [64]
  const float d = LoadF16(b + 80);
  const float dmin = LoadF16(b + 82);
  for (size_t g = 0; g < kSuper / 16; ++g) {
    const float scale = d * static_cast<float>(scales[g] & 15);
    const float min = dmin * static_cast<float>(scales[g] >> 4);
    const auto [byte, shift] = PairsOf(g);
    for (size_t l = 0; l < 16; ++l) {
      y[16 * g + l] = scale * static_cast<float>((qs[byte + l] >> shift) & 3) - min;
    }
  }
}

void DecodeQ3_K(const uint8_t* __restrict b, float* __restrict y) {
  const uint8_t* hmask = b;        // [32] bit g / 2 of byte l: the third bit of value l of group g
  const uint8_t* qs = b + 32;      // [64]
  const uint8_t* packed = b + 96;  // [12] 16 scales of 6 bits, biased by 32
  const float d = LoadF16(b + 108);
  for (size_t g = 0; g < kSuper / 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    const int high = (packed[8 + g % 4] >> (g / 4 * 2)) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const auto [byte, shift] = PairsOf(g);
    for (size_t l = 0; l < 16; ++l) {
      const int third = (hmask[g % 2 * 16 + l] >> (g / 2)) & 1;
      y[16 * g + l] = scale * static_cast<float>((((qs[byte + l] >> shift) & 3) | third << 2) - 4);
    }
  }
}

// The 12 packed bytes of Q4_K and Q5_K: 6-bit scale and min of sub-block j of 8.
struct ScaleMin {
  float scale;
  float min;
};
ScaleMin UnpackScaleMin(const uint8_t* packed, size_t j) {
  if (j < 4) return {static_cast<float>(packed[j] & 63), static_cast<float>(packed[j + 4] & 63)};
  return {static_cast<float>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4),
          static_cast<float>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4)};
}

// f16 d, f16 dmin, scales[12], then nibbles[4][32]: sub-blocks 2i and 2i + 1 share 32 bytes.
void DecodeQ4_K(const uint8_t* __restrict b, float* __restrict y) {
  const float d = LoadF16(b);
  const float dmin = LoadF16(b + 2);
  for (size_t j = 0; j < 8; ++j) {
    const ScaleMin s = UnpackScaleMin(b + 4, j);
    const float scale = d * s.scale;
    const float min = dmin * s.min;
    const uint8_t* qs = b + 16 + j / 2 * 32;
    const int shift = static_cast<int>(j % 2 * 4);
    for (size_t l = 0; l < 32; ++l) {
      y[32 * j + l] = scale * static_cast<float>((qs[l] >> shift) & 15) - min;
    }
  }
}

// As Q4_K with fifth bits [32] before the nibbles: bit j of byte l belongs to value l of sub-block
// j.
void DecodeQ5_K(const uint8_t* __restrict b, float* __restrict y) {
  const float d = LoadF16(b);
  const float dmin = LoadF16(b + 2);
  const uint8_t* fifth = b + 16;
  for (size_t j = 0; j < 8; ++j) {
    const ScaleMin s = UnpackScaleMin(b + 4, j);
    const float scale = d * s.scale;
    const float min = dmin * s.min;
    const uint8_t* qs = b + 48 + j / 2 * 32;
    const int shift = static_cast<int>(j % 2 * 4);
    for (size_t l = 0; l < 32; ++l) {
      const int q = ((qs[l] >> shift) & 15) | ((fifth[l] >> j) & 1) << 4;
      y[32 * j + l] = scale * static_cast<float>(q) - min;
    }
  }
}

// Low nibbles [half][64], upper bit pairs [half][32], i8 scales[16], f16 d. Quarter k of a half
// takes nibble k / 2 of bytes 32 * (k % 2) on, and bit pair k.
void DecodeQ6_K(const uint8_t* __restrict b, float* __restrict y) {
  const float d = LoadF16(b + 208);
  for (size_t g = 0; g < kSuper / 16; ++g) {
    const size_t half = g / 8;
    const size_t quarter = g % 8 / 2;
    const uint8_t* low = b + half * 64 + quarter % 2 * 32 + g % 2 * 16;
    const uint8_t* high = b + 128 + half * 32 + g % 2 * 16;
    const int low_shift = static_cast<int>(quarter / 2 * 4);
    const int high_shift = static_cast<int>(quarter * 2);
    const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
    for (size_t l = 0; l < 16; ++l) {
      const int q = ((low[l] >> low_shift) & 15) | ((high[l] >> high_shift) & 3) << 4;
      y[16 * g + l] = scale * static_cast<float>(q - 32);
    }
  }
}

// n values from whole blocks at src, which may be misaligned.
template <void (*kDecode)(const uint8_t*, float*), size_t kValues, size_t kBytes>
void DecodeBlocks(const uint8_t* src, size_t n, float* dst) {
  for (size_t i = 0; i < n / kValues; ++i) kDecode(src + i * kBytes, dst + i * kValues);
}

template <typename T, float (*kWiden)(T)>
void Widen(const uint8_t* __restrict src, size_t n, float* __restrict dst) {
  for (size_t i = 0; i < n; ++i) {
    T v;
    std::memcpy(&v, src + i * sizeof v, sizeof v);
    dst[i] = kWiden(v);
  }
}

void ToF32(StorageType type, const uint8_t* src, size_t n, float* dst) {
  switch (type) {
    case StorageType::kF32:
      std::memcpy(dst, src, 4 * n);
      return;
    case StorageType::kF16:
      return Widen<F16, F32FromF16>(src, n, dst);
    case StorageType::kBF16:
      return Widen<Bf16, F32FromBf16>(src, n, dst);
    case StorageType::kQ8_0:
      return DecodeBlocks<DecodeQ8_0, kLegacy, 34>(src, n, dst);
    case StorageType::kQ4_0:
      return DecodeBlocks<DecodeQ4_0, kLegacy, 18>(src, n, dst);
    case StorageType::kQ4_1:
      return DecodeBlocks<DecodeQ4_1, kLegacy, 20>(src, n, dst);
    case StorageType::kQ5_0:
      return DecodeBlocks<DecodeQ5_0, kLegacy, 22>(src, n, dst);
    case StorageType::kQ5_1:
      return DecodeBlocks<DecodeQ5_1, kLegacy, 24>(src, n, dst);
    case StorageType::kQ2_K:
      return DecodeBlocks<DecodeQ2_K, kSuper, 84>(src, n, dst);
    case StorageType::kQ3_K:
      return DecodeBlocks<DecodeQ3_K, kSuper, 110>(src, n, dst);
    case StorageType::kQ4_K:
      return DecodeBlocks<DecodeQ4_K, kSuper, 144>(src, n, dst);
    case StorageType::kQ5_K:
      return DecodeBlocks<DecodeQ5_K, kSuper, 176>(src, n, dst);
    case StorageType::kQ6_K:
      return DecodeBlocks<DecodeQ6_K, kSuper, 210>(src, n, dst);
    default:
      OKV_CHECK(false, "{} is not convertible", StorageTypeName(type));
  }
}

template <uint16_t (*kNarrow)(float)>
void Narrow(const float* __restrict src, size_t n, uint16_t* __restrict dst) {
  for (size_t i = 0; i < n; ++i) dst[i] = kNarrow(src[i]);
}

}  // namespace

void ConvertValues(StorageType type, const std::byte* from, size_t n_values, DType out, void* dst) {
  const size_t block = BlockValues(type);
  const size_t block_bytes = BlockBytes(type);
  OKV_CHECK(IsConvertible(type), "{} is not convertible", StorageTypeName(type));
  OKV_CHECK(out != DType::kQ8_0);
  OKV_CHECK(n_values % block == 0, "{} values of blocks of {}", n_values, block);
  if (n_values == 0) return;
  const auto* src = reinterpret_cast<const uint8_t*>(from);
  if (NativeDType(type) == out) {
    std::memcpy(dst, src, DTypeBytes(out, n_values));
    return;
  }
  if (out == DType::kF32) {
    ToF32(type, src, n_values, static_cast<float*>(dst));
    return;
  }
  float wide[kChunk];
  auto* narrow = static_cast<uint16_t*>(dst);
  for (size_t done = 0; done < n_values; done += kChunk) {
    const size_t n = std::min(kChunk, n_values - done);
    ToF32(type, src + done / block * block_bytes, n, wide);
    if (out == DType::kBF16) {
      Narrow<Bf16FromF32>(wide, n, narrow + done);
    } else {
      Narrow<F16FromF32>(wide, n, narrow + done);
    }
  }
}

}  // namespace omnikv
