// K of a token as if it stood at position 0, and heads in blocks, on a card.
#pragma once

#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"

namespace omnikv {

// Value i of a head of K, whose values begin at `values`, turned from position t to 0.
__device__ __forceinline__ float TurnedKey(const KvView& kv, const std::byte* values, int head,
                                           int i, int t, const float* inv_freq, int n_freq) {
  const float own = cuda::KvValue(kv.k, values, head, i);
  if (inv_freq == nullptr || i >= 2 * n_freq) return own;
  const bool low = i < n_freq;
  const float partner = cuda::KvValue(kv.k, values, head, low ? i + n_freq : i - n_freq);
  // The angle as RopeTable makes it.
  const double angle = __fmul_rn(static_cast<float>(t), inv_freq[low ? i : i - n_freq]);
  double s;
  double c;
  sincos(angle, &s, &c);
  return static_cast<float>(own * c + partner * (low ? s : -s));
}

// A block stores d values as StoreKvHead does: a warp takes kBlockValues of them. T: int8_t or Q4.
template <typename T>
__device__ __forceinline__ void StoreBlocks(const float* from, int d, std::byte* values,
                                            std::byte* scales) {
  constexpr int kBlock = static_cast<int>(kBlockValues);
  constexpr int kBytes = std::is_same_v<T, cuda::Q4> ? kBlock / 2 : kBlock;
  const int lane = static_cast<int>(threadIdx.x) % kBlock;
  const int warps = static_cast<int>(blockDim.x) / kBlock;
  for (int b = static_cast<int>(threadIdx.x) / kBlock; b < d / kBlock; b += warps) {
    cuda::StoreBlock<T>(from[b * kBlock + lane], values + b * kBytes, scales + b * 2);
  }
}

}  // namespace omnikv
