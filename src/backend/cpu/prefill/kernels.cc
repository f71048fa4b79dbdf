#include "backend/cpu/prefill/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/prefill/kernels.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "backend/cpu/prefill/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv::prefill::HWY_NAMESPACE {

void Multiply(const uint32_t* w, int64_t ld_w, int64_t n, const uint32_t* panel, int64_t rows,
              int64_t k, const Ahead* ahead, float* acc, int64_t ld_acc) {
  const auto* a = reinterpret_cast<const float*>(w);
  const auto* b = reinterpret_cast<const float*>(panel);
  for (int64_t i = 0; i < n; i += kRows) {
    for (int f = 0; f < 2; ++f) ahead[f].Fetch(i / kRows, n / kRows);
    if (rows > kVec) {
      MultiplyTile<kRows, 2, Start::kLoad>(a + i * ld_w, ld_w, 1, b, k, nullptr, acc + i * ld_acc,
                                           ld_acc);
    } else {
      MultiplyTile<kRows, 1, Start::kLoad>(a + i * ld_w, ld_w, 1, b, k, nullptr, acc + i * ld_acc,
                                           ld_acc);
    }
  }
}

// Applies the softcap, then the mask: logits of tokens that a row does not read become -inf.
HWY_INLINE void CapAndMask(const AttendTile& t) {
  const DF d;
  const DI di;
  const VF log2e = hn::Set(d, 1.44269504f);
  for (int64_t lane = 0; lane < kLanes; lane += kVec) {
    const auto pos = hn::LoadU(di, t.pos + lane);
    const auto low = t.window > 0 ? hn::Sub(pos, hn::Set(di, t.window)) : hn::Set(di, -1);
    for (int32_t j = 0; j < t.tokens; ++j) {
      float* at = t.logits + j * kLanes + lane;
      VF s = hn::Load(d, at);
      if (t.cap > 0) {
        const VF capped = hn::Mul(hn::Set(d, t.cap), Tanh(hn::Div(s, hn::Set(d, t.cap))));
        s = hn::Mul(capped, log2e);
      }
      if (t.masked) {
        const auto token = hn::Set(di, t.first + j);
        const auto read = hn::And(hn::VecFromMask(di, hn::Gt(token, low)),
                                  hn::VecFromMask(di, hn::Not(hn::Gt(token, pos))));
        s = hn::IfThenElse(hn::MaskFromVec(hn::BitCast(d, read)), s,
                           hn::Set(d, -std::numeric_limits<float>::infinity()));
      }
      hn::Store(s, d, at);
    }
  }
}

// Turns logits into p = 2^(logit - top) with the new top; leaves in `decay` what older sums are
// to be multiplied by.
HWY_INLINE void Softmax(const AttendTile& t, float* decay) {
  const DF d;
  for (int64_t lane = 0; lane < kLanes; lane += kVec) {
    const VF old_top = hn::Load(d, t.top + lane);
    VF top = old_top;
    for (int32_t j = 0; j < t.tokens; ++j) {
      top = hn::Max(top, hn::Load(d, t.logits + j * kLanes + lane));
    }
    VF sum = hn::Zero(d);
    for (int32_t j = 0; j < t.tokens; ++j) {
      float* at = t.logits + j * kLanes + lane;
      const VF p = Exp2(hn::Sub(hn::Load(d, at), top));
      sum = hn::Add(sum, p);
      hn::Store(p, d, at);
    }
    const VF factor = Exp2(hn::Sub(old_top, top));
    hn::Store(factor, d, decay + lane);
    hn::Store(top, d, t.top + lane);
    hn::Store(hn::MulAdd(hn::Load(d, t.sum + lane), factor, sum), d, t.sum + lane);
  }
}

void AttendPanel(const AttendTile& t) {
  const auto* q = reinterpret_cast<const float*>(t.q);
  const auto* k = reinterpret_cast<const float*>(t.k);
  const auto* v = reinterpret_cast<const float*>(t.v);
  for (int32_t j = 0; j < t.tokens; j += kRows) {
    MultiplyTile<kRows, 2, Start::kZero>(k + j * t.ld_k, t.ld_k, 1, q, t.dk, nullptr,
                                         t.logits + j * kLanes, kLanes);
  }
  if (t.masked || t.cap > 0) CapAndMask(t);
  HWY_ALIGN float decay[kLanes];
  Softmax(t, decay);
  for (int32_t i = 0; i < t.dv; i += kWideRows) {
    MultiplyTile<kWideRows, 2, Start::kScaled>(v + i, 1, t.ld_v, t.logits, t.tokens, decay,
                                               t.o + i * kLanes, kLanes);
  }
}

void Attend(const AttendTile* panels, int64_t n, FunctionRef<void(int64_t)> before) {
  for (int64_t i = 0; i < n; ++i) {
    before(i);
    AttendPanel(panels[i]);
  }
}

// The values of a block, whose f16 scale is at `scale`.
void Q8Block(const std::byte* scale, const std::byte* values, float* out) {
  const DF d;
  const hn::Rebind<int8_t, DF> d8;
  F16 half;
  std::memcpy(&half, scale, sizeof(half));
  const VF factor = hn::Set(d, F32FromF16(half));
  const auto* in = reinterpret_cast<const int8_t*>(values);
  for (int64_t j = 0; j < static_cast<int64_t>(kQ8Block); j += kVec) {
    const VF q = hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(d8, in + j)));
    hn::StoreU(hn::Mul(q, factor), d, out + j);
  }
}

// The same of nibbles.
void Q4Block(const std::byte* scale, const std::byte* values, float* out) {
  constexpr auto kHalf = static_cast<int64_t>(kBlockValues) / 2;
  const DF d;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<uint8_t, DF> d8;
  F16 half;
  std::memcpy(&half, scale, sizeof(half));
  const VF factor = hn::Set(d, F32FromF16(half));
  const auto* in = reinterpret_cast<const uint8_t*>(values);
  const auto store = [&](auto codes, float* to) HWY_ATTR {
    const VF q = hn::ConvertTo(d, hn::Sub(codes, hn::Set(di, 8)));
    hn::StoreU(hn::Mul(q, factor), d, to);
  };
  for (int64_t j = 0; j < kHalf; j += kVec) {
    const auto pairs = hn::PromoteTo(di, hn::LoadU(d8, in + j));
    store(hn::And(pairs, hn::Set(di, 15)), out + j);
    store(hn::ShiftRight<4>(pairs), out + kHalf + j);
  }
}

void BlocksToF32(DType type, const std::byte* values, const std::byte* scales, int64_t n,
                 float* out) {
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kBlockValues), scales += sizeof(F16)) {
    if (type == DType::kQ8_0) {
      Q8Block(scales, values + i, out + i);
    } else {
      Q4Block(scales, values + i / 2, out + i);
    }
  }
}

void ToF32(DType type, const std::byte* src, int64_t n, float* out) {
  const DF d;
  int64_t i = 0;
  switch (type) {
    case DType::kF32:
      std::memcpy(out, src, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kBF16: {
      const hn::Rebind<hwy::bfloat16_t, DF> dh;
      const auto* in = reinterpret_cast<const hwy::bfloat16_t*>(src);
      for (; i + kVec <= n; i += kVec)
        hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, in + i)), d, out + i);
      break;
    }
    case DType::kF16: {
      const hn::Rebind<hwy::float16_t, DF> dh;
      const auto* in = reinterpret_cast<const hwy::float16_t*>(src);
      for (; i + kVec <= n; i += kVec)
        hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, in + i)), d, out + i);
      break;
    }
    case DType::kQ8_0:
      for (; i < n; i += static_cast<int64_t>(kQ8Block), src += kQ8BlockBytes) {
        Q8Block(src, src + sizeof(F16), out + i);
      }
      return;
    case DType::kQ4_0:
      return;
  }
  for (; i < n; ++i) out[i] = LoadAsF32(type, src, static_cast<size_t>(i));
}

void ToBf16(const float* src, int64_t n, Bf16* out) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> dh;
  int64_t i = 0;
  for (; i + kVec <= n; i += kVec) {
    const VF x = hn::LoadU(d, src + i);
    const auto bits = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
    const auto nan = hn::RebindMask(du, hn::IsNaN(x));
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(DI(), hn::IfThenElse(nan, quiet, rounded))), dh,
               out + i);
  }
  for (; i < n; ++i) out[i] = Bf16FromF32(src[i]);
}

void Pair(const Bf16* even, const Bf16* odd, int64_t n, uint32_t* out) {
  const hn::RebindToUnsigned<DF> d;
  const hn::Rebind<uint16_t, DF> dh;
  int64_t i = 0;
  for (; i + kVec <= n; i += kVec) {
    const auto low = hn::PromoteTo(d, hn::LoadU(dh, even + i));
    const auto high = hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(dh, odd + i)));
    hn::StoreU(hn::Or(low, high), d, out + i);
  }
  for (; i < n; ++i) out[i] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
}

using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;

#if HWY_TARGET != HWY_SCALAR
// Transposes the 128-bit blocks of kVec / 4 vectors: out[b] block g = in[g] block b.
HWY_INLINE void TransposeBlocks(const VU* in, VU* out) {
  const DU d;
#if HWY_TARGET <= HWY_AVX3
  for (int half = 0; half < 2; ++half) {
    const VU even =
        half == 0 ? hn::ConcatLowerLower(d, in[2], in[0]) : hn::ConcatUpperUpper(d, in[2], in[0]);
    const VU odd =
        half == 0 ? hn::ConcatLowerLower(d, in[3], in[1]) : hn::ConcatUpperUpper(d, in[3], in[1]);
    out[2 * half] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd), even);
    out[2 * half + 1] = hn::OddEvenBlocks(odd, hn::SwapAdjacentBlocks(even));
  }
#elif HWY_TARGET <= HWY_AVX2
  out[0] = hn::ConcatLowerLower(d, in[1], in[0]);
  out[1] = hn::ConcatUpperUpper(d, in[1], in[0]);
#else
  (void)d;
  out[0] = in[0];
#endif
}

// out[c, r] = src[r, c] for r, c < kVec.
HWY_INLINE void TransposeTile(const uint32_t* src, int64_t ld_src, uint32_t* out, int64_t ld_out) {
  const DU d;
  const hn::Repartition<uint64_t, DU> d2;
  constexpr int kBlocks = static_cast<int>(kVec / 4);
  VU quads[4][kBlocks];  // [c % 4][r / 4], block c / 4: four rows of column c
  HWY_UNROLL(4)
  for (int g = 0; g < kBlocks; ++g) {
    const uint32_t* at = src + 4 * g * ld_src;
    const VU r0 = hn::LoadU(d, at);
    const VU r1 = hn::LoadU(d, at + ld_src);
    const VU r2 = hn::LoadU(d, at + 2 * ld_src);
    const VU r3 = hn::LoadU(d, at + 3 * ld_src);
    const auto low01 = hn::BitCast(d2, hn::InterleaveLower(d, r0, r1));
    const auto low23 = hn::BitCast(d2, hn::InterleaveLower(d, r2, r3));
    const auto high01 = hn::BitCast(d2, hn::InterleaveUpper(d, r0, r1));
    const auto high23 = hn::BitCast(d2, hn::InterleaveUpper(d, r2, r3));
    quads[0][g] = hn::BitCast(d, hn::InterleaveLower(d2, low01, low23));
    quads[1][g] = hn::BitCast(d, hn::InterleaveUpper(d2, low01, low23));
    quads[2][g] = hn::BitCast(d, hn::InterleaveLower(d2, high01, high23));
    quads[3][g] = hn::BitCast(d, hn::InterleaveUpper(d2, high01, high23));
  }
  HWY_UNROLL(4)
  for (int c = 0; c < 4; ++c) {
    VU columns[kBlocks];
    TransposeBlocks(quads[c], columns);
    HWY_UNROLL(4)
    for (int b = 0; b < kBlocks; ++b) hn::StoreU(columns[b], d, out + (4 * b + c) * ld_out);
  }
}
#endif

void Transpose(const uint32_t* src, int64_t ld_src, int64_t rows, int64_t cols, uint32_t* out,
               int64_t ld_out) {
  int64_t whole_rows = 0;
  int64_t whole_cols = 0;
#if HWY_TARGET != HWY_SCALAR
  whole_rows = rows / kVec * kVec;
  whole_cols = cols / kVec * kVec;
  for (int64_t c = 0; c < whole_cols; c += kVec) {
    for (int64_t r = 0; r < whole_rows; r += kVec) {
      TransposeTile(src + r * ld_src + c, ld_src, out + c * ld_out + r, ld_out);
    }
  }
#endif
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r) {
      out[c * ld_out + r] = src[r * ld_src + c];
    }
  }
}

void Gate(bool gelu, float* gate, const float* up, int64_t n) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  for (int64_t i = 0; i < n; i += kVec) {
    const VF g = hn::LoadU(d, gate + i);
    VF act;
    if (gelu) {  // g (1 + tanh(sqrt(2/pi) (g + 0.044715 g³))) / 2
      const VF cubic = hn::MulAdd(hn::Mul(hn::Set(d, 0.044715f), g), g, one);
      const VF t = Tanh(hn::Mul(hn::Mul(hn::Set(d, 0.79788456f), g), cubic));
      act = hn::Mul(hn::Mul(hn::Set(d, 0.5f), g), hn::Add(one, t));
    } else {  // g / (1 + e^-g); e^-g is bounded so that Exp2 stays in its range
      const VF x = hn::Min(hn::Mul(g, hn::Set(d, -1.44269504f)), hn::Set(d, 126.0f));
      act = hn::Div(g, hn::Add(one, Exp2(x)));
    }
    hn::StoreU(hn::Mul(act, hn::LoadU(d, up + i)), d, gate + i);
  }
}

void Scale(const float* src, int64_t n, float value, float* out) {
  const DF d;
  int64_t i = 0;
  for (; i + kVec <= n; i += kVec) {
    hn::StoreU(hn::Mul(hn::LoadU(d, src + i), hn::Set(d, value)), d, out + i);
  }
  for (; i < n; ++i) out[i] = value * src[i];
}

const VectorKernels* Table() {
  static const VectorKernels kTable = {
      .name = hwy::TargetName(HWY_TARGET),
      .gemm = {.name = "f32", .lanes = kLanes, .pack = 1, .multiply = Multiply},
      .attend = {.name = "f32", .lanes = kLanes, .pack = 1, .attend = Attend},
      .to_f32 = ToF32,
      .blocks_to_f32 = BlocksToF32,
      .to_bf16 = ToBf16,
      .pair = Pair,
      .transpose = Transpose,
      .gate = Gate,
      .scale = Scale,
  };
  return &kTable;
}

}  // namespace omnikv::prefill::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv::prefill {
HWY_EXPORT(Table);
const VectorKernels& BestVectorKernels() {
  return *HWY_DYNAMIC_DISPATCH(Table)();
}
}  // namespace omnikv::prefill
#endif
