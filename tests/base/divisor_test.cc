#include "base/divisor.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace omnikv {
namespace {

constexpr int32_t kMost = 0x7fffffff;

// Around each multiple of d that lies near an end of the numbers, where a factor that was rounded
// the wrong way shows first.
std::vector<int32_t> NumbersFor(int32_t d, std::mt19937& random) {
  std::vector<int32_t> numbers = {0, 1, kMost - 1, kMost};
  const int32_t most = kMost / d;
  for (const int32_t times : {1, 2, 3, most / 2, most - 1, most}) {
    for (int64_t n = int64_t{times} * d - 1; n <= int64_t{times} * d + 1; ++n) {
      if (n >= 0 && n <= kMost) numbers.push_back(static_cast<int32_t>(n));
    }
  }
  for (int i = 0; i < 100; ++i) numbers.push_back(static_cast<int32_t>(random() & kMost));
  return numbers;
}

TEST(Divisor, DividesAsDivisionDoes) {
  std::mt19937 random(7);
  std::vector<int32_t> divisors = {kMost, kMost - 1, 1 << 30, (1 << 30) + 1, (1 << 30) - 1};
  for (int32_t d = 1; d <= 4096; ++d) divisors.push_back(d);
  for (int i = 0; i < 4096; ++i) divisors.push_back(1 + static_cast<int32_t>(random() % kMost));
  for (const int32_t d : divisors) {
    const Divisor by = d;
    ASSERT_EQ(by, d);
    for (const int32_t n : NumbersFor(d, random)) {
      ASSERT_EQ(n / by, n / d) << n << " / " << d;
      ASSERT_EQ(n % by, n % d) << n << " % " << d;
      ASSERT_EQ(int64_t{n} / by, n / d) << n << " / " << d;
    }
  }
}

TEST(Divisor, IsTheNumberInAllElse) {
  const Divisor unit = 24;
  EXPECT_EQ(3 * unit, 72);
  EXPECT_EQ(unit % 16, 8);
  EXPECT_EQ(unit, Divisor(24));
  EXPECT_EQ(Divisor(), 0);
}

}  // namespace
}  // namespace omnikv
