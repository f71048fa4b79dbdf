// Vector primitives that the kernels share, for the target being compiled. Vectors are full ones
// of N floats; rows of any dtype are read in steps of 2 N values as two of them.
//
// "Packed" order: the order in which LoadStep gives values. For bf16 a step is N even values, then
// N odd ones, because a pair of bf16 in a 32-bit lane splits with one shift and one mask; for the
// other types it is the natural order. Activations are brought into it once (Pack) and results
// back (StoreStep).

#if defined(OMNIKV_BACKEND_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OMNIKV_BACKEND_CPU_SIMD_INL_H_
#undef OMNIKV_BACKEND_CPU_SIMD_INL_H_
#else
#define OMNIKV_BACKEND_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
inline constexpr size_t kLanes = HWY_LANES(float);
inline constexpr size_t kStep = 2 * kLanes;  // values that LoadStep reads

// Highway's target, by what we have code for: newer versions know several kinds of AVX-512. Macros
// keep their text until they are used, so these hold for every target in turn.
#define OKV_AVX512 (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3)
#define OKV_AVX2 (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3 && HWY_TARGET <= HWY_AVX2)

// Registers decide how much a kernel may block: AVX-512 and NEON have 32, AVX2 and SSE 16.
#define OKV_MANY_REGISTERS (OKV_AVX512 || HWY_TARGET == HWY_NEON)
#if OKV_MANY_REGISTERS
inline constexpr int kRegisterRows = 4;
#else
inline constexpr int kRegisterRows = 2;
#endif

// Masked loads that never touch what the mask excludes.
#define OKV_SAFE_MASKED_LOAD (OKV_AVX512 || OKV_AVX2)

// Loads v here, not again in each of its uses.
template <class V>
HWY_INLINE void KeepInRegister(V& v) {
#if OKV_AVX512
  asm("" : "+v"(v.raw));
#elif OKV_AVX2
  asm("" : "+x"(v.raw));
#else
  (void)v;
#endif
}

// Fetches a line of a K/V row ahead of its use, to the first or the second level of the cache.
HWY_INLINE void PrefetchRow(const std::byte* p, bool second_level) {
  if (second_level) {
    __builtin_prefetch(p, /*rw=*/0, /*locality=*/2);
  } else {
    __builtin_prefetch(p, /*rw=*/0, /*locality=*/3);
  }
}

// The first `n` floats at p, zeros after them; n may be anything.
HWY_INLINE VF LoadFloats(const float* p, size_t n) {
  const DF d;
  if (n >= kLanes) return hn::LoadU(d, p);
#if OKV_SAFE_MASKED_LOAD
  return hn::MaskedLoad(hn::FirstN(d, n), d, p);
#else
  alignas(64) float buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(float));
  return hn::Load(d, buffer);
#endif
}

// Stores the first `n` lanes.
HWY_INLINE void StoreFloats(VF v, float* p, size_t n) {
  const DF d;
  if (n >= kLanes) {
    hn::StoreU(v, d, p);
    return;
  }
  alignas(64) float buffer[kLanes];
  hn::Store(v, d, buffer);
  std::memcpy(p, buffer, n * sizeof(float));
}

template <DType kType>
struct Elements;

template <>
struct Elements<DType::kF32> {
  static constexpr size_t kStepBytes = 4 * kStep;
  static HWY_INLINE void LoadStep(const std::byte* p, VF& a, VF& b) {
    const DF d;
    const auto* f = reinterpret_cast<const float*>(p);
    a = hn::LoadU(d, f);
    b = hn::LoadU(d, f + kLanes);
  }
  static HWY_INLINE void LoadTail(const std::byte* p, size_t n, VF& a, VF& b) {
    const auto* f = reinterpret_cast<const float*>(p);
    a = LoadFloats(f, n);
    b = n > kLanes ? LoadFloats(f + kLanes, n - kLanes) : hn::Zero(DF());
  }
};

template <>
struct Elements<DType::kF16> {
  static constexpr size_t kStepBytes = 2 * kStep;
  static HWY_INLINE void LoadStep(const std::byte* p, VF& a, VF& b) {
    const hn::Rebind<hwy::float16_t, DF> d16;
    const auto* h = reinterpret_cast<const hwy::float16_t*>(p);
    a = hn::PromoteTo(DF(), hn::LoadU(d16, h));
    b = hn::PromoteTo(DF(), hn::LoadU(d16, h + kLanes));
  }
  static HWY_INLINE void LoadTail(const std::byte* p, size_t n, VF& a, VF& b) {
    alignas(64) std::byte buffer[kStepBytes] = {};
    std::memcpy(buffer, p, 2 * n);
    LoadStep(buffer, a, b);
  }
};

template <>
struct Elements<DType::kBF16> {
  static constexpr size_t kStepBytes = 2 * kStep;
  static HWY_INLINE void Split(hn::Vec<DU> pairs, VF& even, VF& odd) {
    const DF d;
    const DU du;
    KeepInRegister(pairs);  // else both uses load: a quarter slower from cache (Zen 5)
    even = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
    odd = hn::BitCast(d, hn::And(pairs, hn::Set(du, 0xffff0000u)));
  }
#if HWY_TARGET == HWY_SCALAR
  static HWY_INLINE void LoadStep(const std::byte* p, VF& a, VF& b) {
    uint32_t pair;
    std::memcpy(&pair, p, 4);
    Split(hn::Set(DU(), pair), a, b);
  }
#else
  static HWY_INLINE void LoadStep(const std::byte* p, VF& a, VF& b) {
    const hn::Repartition<uint8_t, DF> d8;
    Split(hn::BitCast(DU(), hn::LoadU(d8, reinterpret_cast<const uint8_t*>(p))), a, b);
  }
#endif
  static HWY_INLINE void LoadTail(const std::byte* p, size_t n, VF& a, VF& b) {
#if OKV_SAFE_MASKED_LOAD
    if (n % 2 == 0) {
      const DU du;
      Split(hn::MaskedLoad(hn::FirstN(du, n / 2), du, reinterpret_cast<const uint32_t*>(p)), a, b);
      return;
    }
#endif
    alignas(64) std::byte buffer[kStepBytes] = {};
    std::memcpy(buffer, p, 2 * n);
    LoadStep(buffer, a, b);
  }
};

// Values without their scales, which lie apart from them in rows of K and V: int8.
template <>
struct Elements<DType::kQ8_0> {
  static constexpr size_t kStepBytes = kStep;
  static HWY_INLINE VF Load(const std::byte* p) {
    const hn::Rebind<int8_t, DF> d8;
    return hn::ConvertTo(DF(),
                         hn::PromoteTo(DI(), hn::LoadU(d8, reinterpret_cast<const int8_t*>(p))));
  }
  static HWY_INLINE void LoadStep(const std::byte* p, VF& a, VF& b) {
    a = Load(p);
    b = Load(p + kLanes);
  }
  static HWY_INLINE void LoadTail(const std::byte* p, size_t, VF& a, VF& b) {
    LoadStep(p, a, b);  // blocks are whole steps: there is no tail
  }
};

// The same: nibbles. Pairs are kLanes bytes, a lane each: value i of a block in the low nibble and
// value i + 16 in the high one.
template <>
struct Elements<DType::kQ4_0> {
  static HWY_INLINE hn::Vec<DI> LoadPairs(const std::byte* p) {
    const hn::Rebind<uint8_t, DF> d8;
    return hn::PromoteTo(DI(), hn::LoadU(d8, reinterpret_cast<const uint8_t*>(p)));
  }
  static HWY_INLINE VF Value(hn::Vec<DI> pairs, bool high) {
    const DI di;
    if (high) pairs = hn::ShiftRight<4>(pairs);
#if OKV_AVX512  // looks at the low four bits alone
    alignas(64) static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                      0,  1,  2,  3,  4,  5,  6,  7};
    return VF{_mm512_permutexvar_ps(pairs.raw, hn::Load(DF(), kValues).raw)};
#else
    const auto code = hn::And(pairs, hn::Set(di, 15));
    return hn::ConvertTo(DF(), hn::Sub(code, hn::Set(di, 8)));
#endif
  }
  // Values [at, at + kStep) of a head.
  static HWY_INLINE void LoadStep(const std::byte* head, size_t at, VF& a, VF& b) {
    constexpr size_t kHalf = kBlockValues / 2;
    const std::byte* p = head + at / kBlockValues * kHalf + at % kHalf;
    const auto pairs = LoadPairs(p);
    if constexpr (kStep == kBlockValues) {
      a = Value(pairs, false);
      b = Value(pairs, true);
    } else {
      const bool high = at % kBlockValues >= kHalf;
      a = Value(pairs, high);
      b = Value(LoadPairs(p + kLanes), high);
    }
  }
};

// The f16 at p, in every lane.
HWY_INLINE VF LoadScale(const std::byte* p) {
  const hn::CappedTag<float, 1> one;
  const hn::Rebind<hwy::float16_t, hn::CappedTag<float, 1>> half;
  const auto scale =
      hn::PromoteTo(one, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
  return hn::Set(DF(), hn::GetLane(scale));
}

// Values [at, at + kStep) of a head of n values of K or V, without their scales.
template <DType kType>
HWY_INLINE void LoadHeadValues(const std::byte* head, size_t at, size_t n, VF& a, VF& b) {
  using E = Elements<kType>;
  if constexpr (kType == DType::kQ4_0) {
    E::LoadStep(head, at, a, b);
  } else {
    const std::byte* p = head + at / kStep * E::kStepBytes;
    if (at + kStep <= n) {
      E::LoadStep(p, a, b);
    } else {
      E::LoadTail(p, n - at, a, b);
    }
  }
}

// The same with them: they lie `to_scales` behind.
template <DType kType>
HWY_INLINE void LoadHeadStep(const std::byte* head, int64_t to_scales, size_t at, size_t n, VF& a,
                             VF& b) {
  LoadHeadValues<kType>(head, at, n, a, b);
  if constexpr (InBlocks(kType)) {
    const VF scale = LoadScale(head + to_scales + at / kBlockValues * 2);
    a = hn::Mul(a, scale);
    b = hn::Mul(b, scale);
  }
}

// Writes the first `n` values of a step back in natural order.
template <DType kType>
HWY_INLINE void StoreStep(VF a, VF b, float* p, size_t n) {
  const DF d;
  if constexpr (kType == DType::kBF16) {
    if (n >= kStep) {
      hn::StoreInterleaved2(a, b, d, p);
      return;
    }
    alignas(64) float buffer[kStep];
    hn::StoreInterleaved2(a, b, d, buffer);
    std::memcpy(p, buffer, n * sizeof(float));
  } else {
    StoreFloats(a, p, n);
    if (n > kLanes) StoreFloats(b, p + kLanes, n - kLanes);
  }
}

// out[0, padded) = x[0, n) in packed order, then zeros. REQUIRES padded % kStep == 0.
template <DType kType>
HWY_INLINE void Pack(const float* x, size_t n, size_t padded, float* out) {
  const DF d;
  for (size_t i = 0; i < padded; i += kStep) {
    VF a;
    VF b;
    if (kType == DType::kBF16 && i + kStep <= n) {
      hn::LoadInterleaved2(d, x + i, a, b);
    } else if (kType == DType::kBF16) {
      alignas(64) float buffer[kStep] = {};
      if (i < n) std::memcpy(buffer, x + i, (n - i) * sizeof(float));
      hn::LoadInterleaved2(d, buffer, a, b);
    } else {
      a = i < n ? LoadFloats(x + i, n - i) : hn::Zero(d);
      b = i + kLanes < n ? LoadFloats(x + i + kLanes, n - i - kLanes) : hn::Zero(d);
    }
    hn::StoreU(a, d, out + i);
    hn::StoreU(b, d, out + i + kLanes);
  }
}

HWY_INLINE float Sum(VF v) {
  return hn::GetLane(hn::SumOfLanes(DF(), v));
}
HWY_INLINE float Max(VF v) {
  return hn::GetLane(hn::MaxOfLanes(DF(), v));
}

// out[0, 4) = the sums of the lanes of a, b, c and d: a transposition, much cheaper than four sums.
HWY_INLINE void Sum4(VF a, VF b, VF c, VF e, float* out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(e);
#else
  const DF d;
  const hn::RepartitionToWide<DU> dw;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto x = hn::BitCast(dw, ab);
  const auto y = hn::BitCast(dw, ce);
  const VF blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, x, y)),
                            hn::BitCast(d, hn::InterleaveUpper(dw, x, y)));
#if HWY_CAP_GE512
  const hn::Half<DF> dh;
  const hn::Half<decltype(dh)> dq;
  const auto half = hn::Add(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks));
  hn::StoreU(hn::Add(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half)), dq, out);
#elif HWY_CAP_GE256
  const hn::Half<DF> dh;
  hn::StoreU(hn::Add(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks)), dh, out);
#else
  hn::StoreU(blocks, d, out);
#endif
#endif
}

// e^x to about 2 ulp; 0 below -87.3, and no infinity: 2.4e38 above 88.3.
HWY_INLINE VF Exp(VF x) {
  const DF d;
  const DI di;
  const VF low = hn::Set(d, -87.3f);
  const VF clamped = hn::Min(hn::Max(x, low), hn::Set(d, 88.3f));
  // x = n ln 2 + r, ln 2 in two parts so that r is exact to the last bits.
  const VF n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // e^r on |r| <= ln 2 / 2: Taylor to degree 7, error below 1e-8.
  VF p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenElseZero(hn::Ge(x, low), hn::Mul(p, hn::BitCast(d, exponent)));
}

// 2^x for x <= 0 (and a little above) to about 2 ulp; 0 below -126.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
#if OKV_AVX512
  const VF clamped = hn::Max(x, hn::Set(d, -200.0f));  // scalef underflows to 0
#else
  const VF low = hn::Set(d, -126.0f);
  const VF clamped = hn::Max(x, low);
#endif
  const VF n = hn::Round(clamped);
  const VF r = hn::Sub(clamped, n);
  VF p = hn::Set(d, 1.5403530e-4f);  // ln2^k / k!, down to k = 0: error below 2e-7
  p = hn::MulAdd(p, r, hn::Set(d, 1.3333558e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 9.6181291e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.5504109e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 2.4022651e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
#if OKV_AVX512
  return VF{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const DI di;
  const auto scaled = hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::ConvertTo(di, n)));
  return hn::IfThenElseZero(hn::Ge(x, low), hn::BitCast(d, scaled));
#endif
}

// tanh to about 1e-7 of its value.
HWY_INLINE VF Tanh(VF x) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  const VF e = Exp(hn::Mul(hn::Set(d, -2.0f), hn::Abs(x)));
  const VF large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const VF x2 = hn::Mul(x, x);  // the series where 1 - e cancels
  VF p = hn::Set(d, 62.0f / 2835);
  p = hn::MulAdd(p, x2, hn::Set(d, -17.0f / 315));
  p = hn::MulAdd(p, x2, hn::Set(d, 2.0f / 15));
  p = hn::MulAdd(p, x2, hn::Set(d, -1.0f / 3));
  const VF small = hn::MulAdd(hn::Mul(p, x2), x, x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 0.25f)), small, large);
}

// cap * tanh(x / cap).
HWY_INLINE VF Softcap(VF x, VF cap, VF inverse_cap) {
  return hn::Mul(cap, Tanh(hn::Mul(x, inverse_cap)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#endif  // OMNIKV_BACKEND_CPU_SIMD_INL_H_
