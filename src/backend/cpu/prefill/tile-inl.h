// The register-blocked product that every f32 kernel of this folder is made of, and a base-2
// exponential. Included once for each Highway target.
#if defined(OMNIKV_BACKEND_CPU_PREFILL_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OMNIKV_BACKEND_CPU_PREFILL_TILE_INL_H_
#undef OMNIKV_BACKEND_CPU_PREFILL_TILE_INL_H_
#else
#define OMNIKV_BACKEND_CPU_PREFILL_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace omnikv::prefill::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;

constexpr int64_t kVec = static_cast<int64_t>(hn::MaxLanes(DF()));
constexpr int64_t kLanes = 2 * kVec;

// Rows of accumulators of two vectors: what fits beside two operands and a broadcast in 32 or 16
// registers. More rows mean fewer loads a multiply-add.
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kRows = 12;
constexpr int kWideRows = 8;
#else
constexpr int kRows = 6;
constexpr int kWideRows = 4;
#endif

enum class Start { kZero, kLoad, kScaled };

// c[r, 0..V vectors) = start + sum over i < k of a[r * row_step + i * k_step] * b[i, ...].
// Start::kScaled multiplies what c holds by scale[lane].
template <int R, int V, Start kStart>
HWY_INLINE void MultiplyTile(const float* HWY_RESTRICT a, int64_t row_step, int64_t k_step,
                             const float* HWY_RESTRICT b, int64_t k, const float* scale,
                             float* HWY_RESTRICT c, int64_t ldc) {
  const DF d;
  VF acc[R][V];
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(2)
    for (int v = 0; v < V; ++v) {
      if constexpr (kStart == Start::kZero) {
        acc[r][v] = hn::Zero(d);
      } else {
        acc[r][v] = hn::Load(d, c + r * ldc + v * kVec);
        if constexpr (kStart == Start::kScaled) {
          acc[r][v] = hn::Mul(acc[r][v], hn::Load(d, scale + v * kVec));
        }
      }
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    VF x[V];
    HWY_UNROLL(2)
    for (int v = 0; v < V; ++v) x[v] = hn::Load(d, b + i * kLanes + v * kVec);
    HWY_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const VF w = hn::Set(d, a[r * row_step + i * k_step]);
      HWY_UNROLL(2)
      for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(w, x[v], acc[r][v]);
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(2)
    for (int v = 0; v < V; ++v) hn::Store(acc[r][v], d, c + r * ldc + v * kVec);
  }
}

// 2^x, relative error below 2e-7; 0 for x <= -127. REQUIRES x < 128.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const DI di;
  x = hn::Max(x, hn::Set(d, -127.0f));
  const VF whole = hn::Round(x);
  const VF f = hn::Sub(x, whole);     // [-0.5, 0.5]
  VF p = hn::Set(d, 1.32647429e-3f);  // minimax on that interval, exact at 0
  p = hn::MulAdd(p, f, hn::Set(d, 9.67151359e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.55073369e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.40222421e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.93146978e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto shifted = hn::ShiftLeft<23>(hn::ConvertTo(di, whole));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), shifted));
}

// tanh(x) = 1 - 2 / (e^2x + 1); absolute error below 2e-7.
HWY_INLINE VF Tanh(VF x) {
  const DF d;
  const VF limited = hn::Min(hn::Max(x, hn::Set(d, -20.0f)), hn::Set(d, 20.0f));
  const VF e = Exp2(hn::Mul(limited, hn::Set(d, 2.8853901f)));
  return hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
}

}  // namespace omnikv::prefill::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
