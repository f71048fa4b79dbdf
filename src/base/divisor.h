// Division by a number that stays, as kernels need it: one multiplication.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

#include "base/host_device.h"

namespace omnikv {

// A number that others are divided by; in all else it is the number itself. On a card a division
// takes some twenty instructions, each of which waits for the one before (of 64 bits some seventy).
// So the host works out a factor once, and n / d is (2 * n * factor) >> (32 + shift), exactly
// (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, theorem
// 4.2). By 0 nothing may be divided.
class Divisor {
 public:
  Divisor() = default;  // of no value
  // REQUIRES d >= 0.
  constexpr Divisor(int32_t d) : d_(d), factor_(0), shift_(0) {  // implicit: it is a number
    if (d <= 0) return;
    shift_ = static_cast<uint32_t>(std::bit_width(static_cast<uint32_t>(d) - 1));
    factor_ = static_cast<uint32_t>(
        ((uint64_t{1} << (31 + shift_)) + static_cast<uint32_t>(d) - 1) / static_cast<uint32_t>(d));
  }
  OMNIKV_HOST_DEVICE constexpr operator int32_t() const { return d_; }

  // REQUIRE 0 <= n < 2^31 and a divisor above 0.
  template <std::integral N>
  OMNIKV_HOST_DEVICE friend constexpr N operator/(N n, const Divisor& by) {
    return static_cast<N>(by.Quotient(static_cast<uint32_t>(n)));
  }
  template <std::integral N>
  OMNIKV_HOST_DEVICE friend constexpr N operator%(N n, const Divisor& by) {
    const auto of = static_cast<uint32_t>(n);
    return static_cast<N>(of - by.Quotient(of) * static_cast<uint32_t>(by.d_));
  }

  bool operator==(const Divisor&) const = default;
  template <std::integral N>
  OMNIKV_HOST_DEVICE friend constexpr bool operator==(const Divisor& a, N b) {
    return a.d_ == b;
  }

 private:
  OMNIKV_HOST_DEVICE constexpr uint32_t Quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{2 * n} * factor_ >> 32) >> shift_;
  }

  int32_t d_;
  uint32_t factor_;  // 2^(31 + shift) / d, rounded up: below 2^32, as 2^shift < 2 d
  uint32_t shift_;   // the least s with d <= 2^s
};

}  // namespace omnikv
