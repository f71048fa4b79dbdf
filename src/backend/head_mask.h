// Some of the KV heads of a layer, as the ops are told of them.
#pragma once

#include <cstdint>
#include <span>

#include "base/host_device.h"

#ifndef __CUDA_ARCH__
#include <bit>
#endif

namespace omnikv {

// KV heads that a mask can tell apart.
inline constexpr int32_t kMaxMaskedHeads = 64;

// Bit h: KV head h, below kMaxMaskedHeads. Without a bit: all heads, however many there are.
struct HeadMask {
  uint64_t bits = 0;

  // Of no heads: all.
  static HeadMask Of(std::span<const int32_t> heads) {
    HeadMask mask;
    for (const int32_t h : heads) mask.bits |= uint64_t{1} << h;
    return mask;
  }
  bool operator==(const HeadMask&) const = default;
  OMNIKV_HOST_DEVICE bool All() const { return bits == 0; }
  OMNIKV_HOST_DEVICE bool Has(int32_t head) const { return All() || (bits >> head & 1) != 0; }
  // How many they are, of a layer of n heads.
  OMNIKV_HOST_DEVICE int32_t Count(int32_t n) const { return All() ? n : Ones(bits); }
  // How many of them come before `head`: which of them it is, counted from 0.
  OMNIKV_HOST_DEVICE int32_t Before(int32_t head) const {
    return All() ? head : Ones(bits & ((uint64_t{1} << head) - 1));
  }
  // Head i of them, in ascending order.
  OMNIKV_HOST_DEVICE int32_t Head(int32_t i) const {
    if (All()) return i;
    uint64_t left = bits;
    OMNIKV_ROLLED
    for (; i > 0; --i) left &= left - 1;
    return Ones((left & (~left + 1)) - 1);
  }

 private:
  OMNIKV_HOST_DEVICE static int32_t Ones(uint64_t of) {
#ifdef __CUDA_ARCH__
    return __popcll(of);
#else
    return std::popcount(of);
#endif
  }
};

}  // namespace omnikv
