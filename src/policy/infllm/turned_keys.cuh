// K of a token as if it stood at position 0, and heads of kQ8_0, on a card.
#pragma once

#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"

namespace omnikv {

// Value i of a head of K, whose values begin at `values`.
__device__ __forceinline__ float KeyValue(const KvPlane& plane, const std::byte* values, int head,
                                          int i) {
  if (plane.dtype == DType::kQ8_0) {
    return cuda::HeadValue<int8_t>(values, plane.ToScales(head), i);
  }
  return cuda::LoadValue(plane.dtype, values, i);
}

// The same of the head turned from position t to 0.
__device__ __forceinline__ float TurnedKey(const KvView& kv, const std::byte* values, int head,
                                           int i, int t, const float* inv_freq, int n_freq) {
  const float own = KeyValue(kv.k, values, head, i);
  if (inv_freq == nullptr || i >= 2 * n_freq) return own;
  const bool low = i < n_freq;
  const float partner = KeyValue(kv.k, values, head, low ? i + n_freq : i - n_freq);
  // The angle as RopeTable makes it.
  const double angle = __fmul_rn(static_cast<float>(t), inv_freq[low ? i : i - n_freq]);
  double s;
  double c;
  sincos(angle, &s, &c);
  return static_cast<float>(own * c + partner * (low ? s : -s));
}

// A block stores d values as StoreKvHead does: a warp takes kQ8Block of them.
__device__ __forceinline__ void StoreQ8Head(const float* from, int d, std::byte* values,
                                            std::byte* scales) {
  constexpr int kBlock = static_cast<int>(kQ8Block);
  const int lane = static_cast<int>(threadIdx.x) % kBlock;
  const int warps = static_cast<int>(blockDim.x) / kBlock;
  for (int b = static_cast<int>(threadIdx.x) / kBlock; b < d / kBlock; b += warps) {
    const float v = from[b * kBlock + lane];
    float top = cuda::WarpMax(fabsf(v));
    if (__any_sync(cuda::kAllLanes, isnan(v))) top = v - v + NAN;
    const __half stored = __float2half_rn(top > 127 * 65504.0f ? 65504.0f : top / 127);
    const float scale = __half2float(stored);
    if (lane == 0) reinterpret_cast<__half*>(scales)[b] = stored;
    const float q = scale > 0 ? rintf(v / scale) : 0.0f;
    reinterpret_cast<int8_t*>(values)[b * kBlock + lane] =
        static_cast<int8_t>(fminf(fmaxf(q, -127.0f), 127.0f));
  }
}

}  // namespace omnikv
