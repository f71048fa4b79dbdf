// What the kernels of matvec.cu and matvec_{tiles,stationary,hopper}.cu share: the order in which
// a product's rows are read, and what becomes of the finished ones.
//
// An item is what one thread finishes: a row of weights, or two rows whose products meet (gate and
// up; the two values that a rotation mixes). Items of all parts form one list.
#pragma once

#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {

struct Work {
  Product product;            // without `qkv`, a pointer of the host:
  NormQkvRopeAppendArgs qkv;  // of kRope
  int32_t rows_per_item = 1;  // 1 or 2
  int32_t n_items = 0;
  int32_t item_end[3] = {};  // items of the parts up to this one
  int32_t n_in = 0;
  int32_t data_bytes = 0;  // of a row of weights
};

// The product of up to kMaxDecodeRows rows, on tensor cores. REQUIRES a format other than f32, and
// rows that can be copied 16 bytes at a time.
void MultiplyTiles(const Work& work, const Launch& launch);

// The same, faster, for up to 8 rows and bf16 on cards with clusters. False, and nothing done,
// where it does not apply.
bool MultiplyStationary(const Work& work, const Launch& launch);

// The same for up to 16 rows and bf16 on Hopper cards, in builds with code for sm_90a. False where
// it does not apply.
bool MultiplyHopper(const Work& work, const Launch& launch);

// --- Items.

struct RowRef {
  int32_t part;
  int32_t row;
};

// Row `side` (0, or 1 of two) of an item.
__device__ __forceinline__ RowRef FindRow(const Work& work, int32_t item, int32_t side) {
  if (work.product.finish == Finish::kGated) return {side, item};
  int32_t part = 0;
  while (item >= work.item_end[part]) ++part;
  const int32_t i = item - (part > 0 ? work.item_end[part - 1] : 0);
  if (work.product.finish != Finish::kRope) return {part, i};
  const int32_t half = (part == 2 ? work.qkv.kv.dv : work.qkv.kv.dk) / 2;
  return {part, i + (i / half + side) * half};
}

__device__ __forceinline__ const std::byte* FindWeights(const Work& work, int32_t item,
                                                        int32_t side) {
  const RowRef at = FindRow(work, item, side);
  const WeightRef& w = work.product.parts[at.part].w;
  return static_cast<const std::byte*>(w.data) + at.row * w.row_bytes;
}

// Row r of the activations.
__device__ __forceinline__ const float* FindInput(const Work& work, int32_t r) {
  const Product& p = work.product;
  return p.x + int64_t{p.x_rows != nullptr ? p.x_rows[r] : r} * work.n_in;
}

// Neighbouring values, 16 bytes aligned.
__device__ __forceinline__ void LoadFour(const float* from, float* to) {
  const Pack<float, 4> four = LoadPack<4>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = four.v[i];
}
__device__ __forceinline__ void LoadEight(const float* from, float* to) {
  LoadFour(from, to);
  LoadFour(from + 4, to + 4);
}

// Where row r of a kRope puts its K and V.
__device__ __forceinline__ KvTarget FindKvRow(const Work& work, int32_t r) {
  return TargetOf(work.qkv, work.qkv.rows[r]);
}

// --- Finishing.

// What finishing an item needs from memory: asked for early, there when the products are.
struct Operands {
  float bias[2] = {0, 0};
  float value[2] = {0, 0};  // kRope: cosine and sine
};

// Where it lies; null: zero.
struct OperandRefs {
  const float* bias[2] = {};
  const float* value[2] = {};
};

__device__ __forceinline__ OperandRefs FindOperands(const Work& work, int32_t item, int32_t r) {
  const Product& p = work.product;
  OperandRefs refs;
#pragma unroll
  for (int32_t side = 0; side < 2; ++side) {
    if (side == work.rows_per_item) break;
    const RowRef at = FindRow(work, item, side);
    const float* bias = p.parts[at.part].bias;
    if (bias != nullptr) refs.bias[side] = bias + at.row;
  }
  const RowRef at = FindRow(work, item, 0);
  if (p.finish == Finish::kRope && at.part < 2 && work.qkv.cos_sin != nullptr) {
    refs.value[0] = work.qkv.cos_sin + (int64_t{r} * work.qkv.n_freq + at.row % work.qkv.kv.dk) * 2;
    refs.value[1] = refs.value[0] + 1;
  }
  return refs;
}

__device__ __forceinline__ Operands LoadOperands(const Work& work, int32_t item, int32_t r) {
  const OperandRefs refs = FindOperands(work, item, r);
  Operands operands;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (refs.bias[side] != nullptr) operands.bias[side] = __ldg(refs.bias[side]);
    if (refs.value[side] != nullptr) operands.value[side] = *refs.value[side];
  }
  return operands;
}

// Stores row r of an item, of products a and b (b: of the second row, where there is one).
__device__ __forceinline__ void FinishItem(const Work& work, int32_t item, int32_t r,
                                           const KvTarget& kv_row, const Operands& operands,
                                           float a, float b) {
  const Product& p = work.product;
  const RowRef at = FindRow(work, item, 0);
  const ProductPart& part = p.parts[at.part];
  const int64_t out = r * part.w.n_out + at.row;
  a += operands.bias[0];
  b += operands.bias[1];
  switch (p.finish) {
    case Finish::kStore:
      part.y[out] = a;
      return;
    case Finish::kAdd:
      atomicAdd(part.y + out, p.scale * a);  // so that no thread waits for the residual
      return;
    case Finish::kGated:
      part.y[out] = Activate(p.act, a) * b;
      return;
    case Finish::kLogits:
      part.y[out] = Softcap(p.scale * a, p.softcap);
      return;
    case Finish::kRope:
      break;
  }
  const KvView& kv = work.qkv.kv;
  if (at.part < 2 && work.qkv.cos_sin != nullptr) {
    const float low = a;
    a = low * operands.value[0] - b * operands.value[1];
    b = b * operands.value[0] + low * operands.value[1];
  }
  const int32_t width = at.part == 2 ? kv.dv : kv.dk;
  if (at.part == 0) {
    work.qkv.q[out] = a;
    work.qkv.q[out + width / 2] = b;
    return;
  }
  const int32_t head = at.row / width;
  const int32_t i = at.row - head * width;
  std::byte* to =
      at.part == 1 ? kv_row.k + head * kv.k.head_bytes : kv_row.v + head * kv.v.head_bytes;
  StoreValue(kv.k.dtype, to, i, a);
  StoreValue(kv.k.dtype, to, i + width / 2, b);
}

// --- Weights in registers.

// Two 16-bit values, the lower first.
template <DType kFormat>
__device__ __forceinline__ float2 UnpackPair(uint32_t pair) {
  if constexpr (kFormat == DType::kBF16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// --- Activations for bf16, as the sum of three bf16 values: the upper half of what is left of
// each.

// The upper halves of two values in a word.
__device__ __forceinline__ uint32_t TopHalves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
__device__ __forceinline__ float WithoutTop(float v) {
  return v - __uint_as_float(__float_as_uint(v) & 0xffff0000u);
}

// --- Activations for Q8_0, where unpacking each weight would take longer than reading it: those
// of a block as integers of 22 bits and a common power of two, in three digits of a byte each, for
// products of int8. The error is some 2^-22 of the largest of the block.

// max(top, |v|); NaN if one of them is.
__device__ __forceinline__ float MaxMagnitude(float top, float v) {
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(top) : "f"(top), "f"(fabsf(v)));
  return top;
}

struct DigitScale {
  float scale;  // of the digits; NaN where `top` is not finite
  float inverse;

  // 2^21 <= 1.015625 top / scale < 2^22: for three digits from -128 to 127, with which top / scale
  // may reach 2^22 - 2^15 - 2^7.
  __device__ __forceinline__ explicit DigitScale(float top) {
    constexpr uint32_t kOne = 1u << 23;  // of an exponent
    const uint32_t power = max(__float_as_uint(1.015625f * top) & 0x7f800000u, 40 * kOne);
    scale = __uint_as_float(power == 255 * kOne ? 0x7fc00000u : power - 21 * kOne);
    inverse = __uint_as_float((254 + 21) * kOne - power);
  }
};

// v[i] / scale = d0 + 256 d1 + 65536 d2, four values to a word of each digit.
__device__ __forceinline__ void ToDigits(const float* v, float inverse, uint32_t& d0, uint32_t& d1,
                                         uint32_t& d2) {
  // As a float, 2^23 + 0x408080 plus the integer: in its three low bytes are the digits, plus 128,
  // 128 and 64.
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(v[i], inverse, 12615808.0f));
  const uint32_t low01 = __byte_perm(bits[0], bits[1], 0x5140);
  const uint32_t low23 = __byte_perm(bits[2], bits[3], 0x5140);
  const uint32_t high01 = __byte_perm(bits[0], bits[1], 0x0062);
  const uint32_t high23 = __byte_perm(bits[2], bits[3], 0x0062);
  d0 = __byte_perm(low01, low23, 0x5410) ^ 0x80808080u;
  d1 = __byte_perm(low01, low23, 0x7632) ^ 0x80808080u;
  d2 = (__byte_perm(high01, high23, 0x5410) + 0x40404040u) ^ 0x80808080u;
}

// What sums of products start from: as a float, 1.5 * 2^23, and n more is that plus n.
inline constexpr int kDigitSum = 0x4b400000;

// d0 + 256 d1 + 65536 d2 of such sums, below 2^22 each.
__device__ __forceinline__ float JoinDigits(int d0, int d1, int d2) {
  const auto value = [](int d) { return __int_as_float(d) - 12582912.0f; };
  return value(d2) * 65536.0f + (value(d1) * 256.0f + value(d0));
}

}  // namespace omnikv::cuda
