// Numbers of the command line: units, ranges, and what is none.
#include "base/numbers.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace omnikv::numbers_test {
namespace {

TEST(Numbers, WholeOnesMayHaveAUnit) {
  EXPECT_EQ(ParseWhole<int64_t>("0"), 0);
  EXPECT_EQ(ParseWhole<int64_t>("4096"), 4096);
  EXPECT_EQ(ParseWhole<int64_t>("-3"), -3);
  EXPECT_EQ(ParseWhole<int64_t>("010"), 10);  // not octal
  for (const char* kibi : {"32k", "32K", "32kb", "32KB", "32kib", "32KiB"}) {
    EXPECT_EQ(ParseWhole<int64_t>(kibi), 32768) << kibi;
  }
  for (const char* giga : {"8g", "8G", "8gb", "8GB", "8gib", "8GiB", "8192m", "8.0g"}) {
    EXPECT_EQ(ParseWhole<uint64_t>(giga), uint64_t{8} << 30) << giga;
  }
  EXPECT_EQ(ParseWhole<uint64_t>("1.5GiB"), uint64_t{3} << 29);
  EXPECT_EQ(ParseWhole<uint64_t>("1.3k"), 1331u);
  EXPECT_EQ(ParseWhole<uint64_t>("2t"), uint64_t{2} << 40);
  EXPECT_EQ(ParseWhole<uint64_t>("1000B"), 1000u);
}

TEST(Numbers, TheWholeRangeAndNoMore) {
  const auto most = std::to_string(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(ParseWhole<uint64_t>(most), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(ParseWhole<int64_t>("-9223372036854775808"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(ParseWhole<int64_t>("8388607t"), int64_t{8388607} << 40);
  for (const char* large : {"9223372036854775808", "99999999999999999999", "8388608t", "8388607.5t",
                            "9007199254740992k", "-9007199254740993k"}) {
    EXPECT_EQ(ParseWhole<int64_t>(large), std::nullopt) << large;
  }
  for (const char* text : {"-1", "18446744073709551616", "16777216t"}) {
    EXPECT_EQ(ParseWhole<uint64_t>(text), std::nullopt) << text;
  }
}

TEST(Numbers, JunkIsNone) {
  for (const char* junk :
       {"",   " ",   "k",   "x",     "1x",  "1 k", " 1",   "1 ",  "0x10",  "1e3", "1.5",
        "+1", "1ib", "1kk", "1kibb", "1ki", ".5g", "1.k.", "--1", "-1.5k", "nan"}) {
    EXPECT_EQ(ParseWhole<int64_t>(junk), std::nullopt) << "'" << junk << "'";
  }
  for (const char* junk : {"", "x", "1x", " 1", "1 ", "0x1p3", "nan", "inf", "-inf", "1e999"}) {
    EXPECT_EQ(ParseReal(junk), std::nullopt) << "'" << junk << "'";
  }
  EXPECT_EQ(ParseReal("0.7"), 0.7);
  EXPECT_EQ(ParseReal("-1"), -1);
  EXPECT_EQ(ParseReal("1e-4"), 1e-4);
}

}  // namespace
}  // namespace omnikv::numbers_test
