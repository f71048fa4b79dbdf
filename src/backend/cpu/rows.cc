#include "backend/cpu/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rows.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "backend/cpu/simd-inl.h"
#include "backend/kv_format.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

template <DType kType>
void EmbedRow(const std::byte* row, int64_t n, float scale, float* x) {
  using E = Elements<kType>;
  const VF s = hn::Set(DF(), scale);
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kStep)) {
    const auto left = static_cast<size_t>(n - i);
    VF a;
    VF b;
    if (left >= kStep) {
      E::LoadStep(row, a, b);
    } else {
      E::LoadTail(row, left, a, b);
    }
    StoreStep<kType>(hn::Mul(a, s), hn::Mul(b, s), x + i, left);
    row += E::kStepBytes;
  }
}

void EmbedRowQ8(const std::byte* row, int64_t n, float scale, float* x) {
  const DF d;
  const hn::Rebind<int8_t, DF> d8;
  for (int64_t i = 0; i < n; i += kQ8Block, row += kQ8BlockBytes) {
    F16 bits;
    std::memcpy(&bits, row, 2);
    const VF s = hn::Set(d, F32FromF16(bits));
    for (size_t j = 0; j < kQ8Block; j += kLanes) {
      const auto q = hn::LoadU(d8, reinterpret_cast<const int8_t*>(row + 2) + j);
      const VF v = hn::Mul(hn::ConvertTo(d, hn::PromoteTo(DI(), q)), s);
      hn::StoreU(hn::Mul(v, hn::Set(d, scale)), d, x + i + static_cast<int64_t>(j));
    }
  }
}

void Embed(const EmbedArgs& a, int32_t row) {
  const std::byte* from = a.table.Row(a.tokens[row]);
  const int64_t n = a.table.n_in;
  float* x = a.x + row * n;
  switch (a.table.format) {
    case DType::kF32:
      return EmbedRow<DType::kF32>(from, n, a.scale, x);
    case DType::kF16:
      return EmbedRow<DType::kF16>(from, n, a.scale, x);
    case DType::kBF16:
      return EmbedRow<DType::kBF16>(from, n, a.scale, x);
    case DType::kQ8_0:
      return EmbedRowQ8(from, n, a.scale, x);
    case DType::kQ4_0:
      return;  // no format of weights
  }
}

// 1 / sqrt(mean(v²) + eps).
HWY_INLINE float InverseRms(const float* v, int64_t n, float eps) {
  const DF d;
  VF a = hn::Zero(d);
  VF b = hn::Zero(d);
  const auto lanes = static_cast<int64_t>(kLanes);
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const VF v0 = hn::LoadU(d, v + i);
    const VF v1 = hn::LoadU(d, v + i + lanes);
    a = hn::MulAdd(v0, v0, a);
    b = hn::MulAdd(v1, v1, b);
  }
  for (; i < n; i += lanes) {
    const VF v0 = LoadFloats(v + i, static_cast<size_t>(n - i));
    a = hn::MulAdd(v0, v0, a);
  }
  return 1.0f / std::sqrt(Sum(hn::Add(a, b)) / static_cast<float>(n) + eps);
}

// body(i, left) for i = 0, lanes, 2 lanes, ...: `left` values of n from i on.
template <typename Body>
HWY_INLINE void ForVectors(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kLanes)) {
    body(i, static_cast<size_t>(n - i));
  }
}

HWY_INLINE void RmsNorm(const float* v, const float* w, int64_t n, float eps, float* out) {
  const VF inv = hn::Set(DF(), InverseRms(v, n, eps));
  ForVectors(n, [&](int64_t i, size_t left) HWY_ATTR {
    const VF scaled = hn::Mul(LoadFloats(v + i, left), inv);
    StoreFloats(hn::Mul(scaled, LoadFloats(w + i, left)), out + i, left);
  });
}

void Prologue(const Residual& in, int32_t row, float* h) {
  const DF d;
  float* x = in.x + int64_t{row} * in.d;
  if (in.y != nullptr) {
    const float* y = in.y + int64_t{row} * in.d;
    const bool normed = in.post_norm != nullptr;
    const VF inv = hn::Set(d, normed ? InverseRms(y, in.d, in.eps) : 1.0f);
    const VF scale = hn::Set(d, in.scale);
    ForVectors(in.d, [&](int64_t i, size_t left) HWY_ATTR {
      VF delta = LoadFloats(y + i, left);
      if (normed) delta = hn::Mul(hn::Mul(delta, inv), LoadFloats(in.post_norm + i, left));
      StoreFloats(hn::MulAdd(scale, delta, LoadFloats(x + i, left)), x + i, left);
    });
  }
  if (in.norm != nullptr) {
    RmsNorm(x, in.norm, in.d, in.eps, h);
  } else {
    std::memcpy(h, x, static_cast<size_t>(in.d) * sizeof(float));
  }
}

// v[i], v[i + n] = rotated by the angle of cos_sin[i], i < n.
HWY_INLINE void Rotate(const float* cos_sin, int64_t n, float* v) {
  const DF d;
  const auto lanes = static_cast<int64_t>(kLanes);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF c;
    VF s;
    hn::LoadInterleaved2(d, cos_sin + 2 * i, c, s);
    const VF low = hn::LoadU(d, v + i);
    const VF high = hn::LoadU(d, v + n + i);
    hn::StoreU(hn::NegMulAdd(high, s, hn::Mul(low, c)), d, v + i);
    hn::StoreU(hn::MulAdd(low, s, hn::Mul(high, c)), d, v + n + i);
  }
  for (; i < n; ++i) {
    const float low = v[i];
    const float high = v[n + i];
    v[i] = low * cos_sin[2 * i] - high * cos_sin[2 * i + 1];
    v[n + i] = high * cos_sin[2 * i] + low * cos_sin[2 * i + 1];
  }
}

HWY_INLINE void NormAndRotate(const NormQkvRopeAppendArgs& a, int32_t row, const float* norm,
                              int32_t n_heads, float* heads, float* raw) {
  const int64_t dk = a.kv.dk;
  if (a.qk_norm == QkNorm::kFull) RmsNorm(heads, norm, n_heads * dk, a.qk_norm_eps, heads);
  for (int32_t h = 0; h < n_heads; ++h) {
    float* v = heads + h * dk;
    if (a.qk_norm == QkNorm::kPerHead) RmsNorm(v, norm, dk, a.qk_norm_eps, v);
    if (raw != nullptr) std::memcpy(raw + h * dk, v, static_cast<size_t>(dk) * sizeof(float));
    if (a.cos_sin != nullptr) Rotate(a.cos_sin + int64_t{row} * a.n_freq * 2, a.n_freq, v);
  }
}

// StoreKvValue of n values. Highway's own DemoteTo truncates to bf16.
HWY_INLINE void StoreAs(DType dtype, const float* from, int64_t n, std::byte* to) {
  int64_t i = 0;
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
#if HWY_TARGET != HWY_SCALAR
  const DF d;
  const DU du;
  const hn::Rebind<uint16_t, DF> d16;
  const auto lanes = static_cast<int64_t>(kLanes);
  auto* out = reinterpret_cast<uint16_t*>(to);
  if (dtype == DType::kBF16) {
    for (; i + lanes <= n; i += lanes) {
      const VF f = hn::LoadU(d, from + i);
      const auto u = hn::BitCast(du, f);
      const auto high = hn::ShiftRight<16>(u);
      const auto odd = hn::And(high, hn::Set(du, 1));
      const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(du, 0x7fff)), odd));
      const auto nan = hn::RebindMask(du, hn::IsNaN(f));
      const auto bits = hn::IfThenElse(nan, hn::Or(high, hn::Set(du, 0x40)), rounded);
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(DI(), bits)), d16, out + i);
    }
  }
#if OKV_SAFE_MASKED_LOAD  // F16C rounds to nearest even; elsewhere the scalar conversion does
  if (dtype == DType::kF16) {
    const hn::Rebind<hwy::float16_t, DF> half;
    for (; i + lanes <= n; i += lanes) {
      const VF low =
          hn::Min(hn::Set(d, kMaxF16), hn::LoadU(d, from + i));  // in this order, NaN stays
      const VF v = hn::Max(hn::Set(d, -kMaxF16), low);
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(half, v)), d16, out + i);
    }
  }
#endif
#endif
  for (; i < n; ++i) StoreKvValue(dtype, to, static_cast<size_t>(i), from[i]);
}

#if HWY_TARGET != HWY_SCALAR
// The largest magnitude of a block, or NaN.
HWY_INLINE float BlockTop(const float* from) {
  const DF d;
  VF top = hn::Zero(d);
  VF nan = hn::Zero(d);  // Max may lose one
  for (size_t i = 0; i < kBlockValues; i += kLanes) {
    const VF v = hn::LoadU(d, from + i);
    top = hn::Max(top, hn::Abs(v));
    nan = hn::IfThenElse(hn::IsNaN(v), hn::Set(d, 1.0f), nan);
  }
  return Max(nan) > 0 ? std::numeric_limits<float>::quiet_NaN() : Max(top);
}

// StoreQ8Block, in vectors.
HWY_INLINE void StoreQ8(const float* from, std::byte* to, std::byte* scale_to) {
  const DF d;
  const hn::Rebind<int8_t, DF> d8;
  const F16 stored = Q8Scale(BlockTop(from));
  const float scale = F32FromF16(stored);
  std::memcpy(scale_to, &stored, sizeof(stored));
  const VF most = hn::Set(d, 127.0f);
  for (size_t i = 0; i < kBlockValues; i += kLanes) {
    // A scale of 0 or NaN: all values are 0.
    VF q = hn::Zero(d);
    if (scale > 0) q = hn::Div(hn::LoadU(d, from + i), hn::Set(d, scale));
    q = hn::Max(hn::Min(q, most), hn::Neg(most));
    hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(q)), d8, reinterpret_cast<int8_t*>(to + i));
  }
}

// StoreQ4Block, in vectors.
HWY_INLINE void StoreQ4(const float* from, std::byte* to, std::byte* scale_to) {
  constexpr size_t kHalf = kBlockValues / 2;
  const DF d;
  const hn::Rebind<uint8_t, DF> d8;
  float top = BlockTop(from);
  // With its sign: the first value of this magnitude.
  for (size_t i = 0; i < kBlockValues; i += kLanes) {
    const VF v = hn::LoadU(d, from + i);
    const intptr_t lane = hn::FindFirstTrue(d, hn::Eq(hn::Abs(v), hn::Set(d, top)));
    if (lane < 0) continue;
    top = from[i + static_cast<size_t>(lane)];
    break;
  }
  const Q4Scale scale = MakeQ4Scale(top);
  std::memcpy(scale_to, &scale.stored, sizeof(scale.stored));
  const auto codes = [&](const float* of) HWY_ATTR {
    const VF code = hn::Add(hn::Mul(hn::LoadU(d, of), hn::Set(d, scale.inverse)), hn::Set(d, 8.5f));
    const auto valid = hn::Gt(code, hn::Zero(d));  // and no NaN
    return hn::ConvertTo(DI(), hn::IfThenElseZero(valid, hn::Min(code, hn::Set(d, 15.0f))));
  };
  for (size_t i = 0; i < kHalf; i += kLanes) {
    const auto pairs = hn::Or(codes(from + i), hn::ShiftLeft<4>(codes(from + kHalf + i)));
    hn::StoreU(hn::DemoteTo(d8, pairs), d8, reinterpret_cast<uint8_t*>(to + i));
  }
}
#endif

// StoreKvHead, in vectors.
HWY_INLINE void StoreHead(const KvPlane& plane, int32_t head, int32_t n, const float* from,
                          std::byte* row) {
  if (!InBlocks(plane.dtype)) {
    return StoreAs(plane.dtype, from, n, row + head * plane.head_bytes);
  }
#if HWY_TARGET == HWY_SCALAR
  StoreKvHead(plane, head, n, from, row);
#else
  std::byte* to = row + head * plane.head_bytes;
  std::byte* scale_to = to + plane.ToScales(head);
  const int64_t block_bytes = KvHeadBytes(plane.dtype, static_cast<int32_t>(kBlockValues));
  for (int32_t at = 0; at < n; at += static_cast<int32_t>(kBlockValues)) {
    if (plane.dtype == DType::kQ8_0) {
      StoreQ8(from + at, to, scale_to);
    } else {
      StoreQ4(from + at, to, scale_to);
    }
    to += block_bytes;
    scale_to += sizeof(F16);
  }
#endif
}

void FinishQkv(const NormQkvRopeAppendArgs& a, int32_t row, float* k, const float* v) {
  const KvView& kv = a.kv;
  NormAndRotate(a, row, a.q_norm, a.n_heads, a.q + int64_t{row} * a.n_heads * kv.dk, nullptr);
  const int64_t k_row = int64_t{row} * kv.n_kv_heads * kv.dk;
  float* raw = a.k_raw_out != nullptr ? a.k_raw_out + k_row : nullptr;
  NormAndRotate(a, row, a.k_norm, kv.n_kv_heads, k, raw);
  const KvTarget to = TargetOf(a, a.rows[row]);
  for (int32_t h = 0; h < kv.n_kv_heads; ++h) {
    StoreHead(kv.k, h, kv.dk, k + int64_t{h} * kv.dk, to.k);
    StoreHead(kv.v, h, kv.dv, v + int64_t{h} * kv.dv, to.v);
    const std::byte* k_to = to.k + h * kv.k.head_bytes;
    for (int32_t i = 0; a.k_out != nullptr && i < kv.dk; ++i) {
      a.k_out[k_row + int64_t{h} * kv.dk + i] = LoadKvValue(kv.k, h, k_to, static_cast<size_t>(i));
    }
  }
}

void ScaleSoftcap(float* y, int64_t n, float scale, float softcap) {
  const DF d;
  const VF s = hn::Set(d, scale);
  const VF cap = hn::Set(d, softcap);
  const VF inverse = hn::Set(d, softcap > 0 ? 1.0f / softcap : 0.0f);
  ForVectors(n, [&](int64_t i, size_t left) HWY_ATTR {
    VF v = hn::Mul(LoadFloats(y + i, left), s);
    if (softcap > 0) v = Softcap(v, cap, inverse);
    StoreFloats(v, y + i, left);
  });
}

const RowKernels* RowTable() {
  static constexpr RowKernels kTable = {Embed, Prologue, FinishQkv, ScaleSoftcap};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(RowTable);
const RowKernels& GetRowKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(RowTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
