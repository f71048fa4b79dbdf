// Text of files in messages: readable, and never obeyed by a terminal.
#include "base/printable.h"

#include <gtest/gtest.h>

namespace omnikv::printable_test {
namespace {

TEST(Printable, KeepsWhatCanBeRead) {
  EXPECT_EQ(Printable("model-7B \"x\""), "'model-7B \"x\"'");
  EXPECT_EQ(Printable("caf\u00e9 \u65e5\u672c\u8a9e \u0440\u0443 \U0001F600"),
            "'caf\u00e9 \u65e5\u672c\u8a9e \u0440\u0443 \U0001F600'");
}

TEST(Printable, EscapesWhatIsObeyed) {
  EXPECT_EQ(Printable("\x1b]0;title\x07\n\r\t"), "'\\x1b]0;title\\x07\\x0a\\x0d\\x09'");
  EXPECT_EQ(Printable(std::string_view("a\0b\x7f", 4)), "'a\\x00b\\x7f'");
  EXPECT_EQ(Printable("\u009b31m"), "'\\xc2\\x9b31m'");  // CSI in one character
  EXPECT_EQ(Printable("\u202egnp\u2066"), "'\\xe2\\x80\\xaegnp\\xe2\\x81\\xa6'");  // bidi
  EXPECT_EQ(Printable("\u200b\ufeff\u2028"), "'\\xe2\\x80\\x8b\\xef\\xbb\\xbf\\xe2\\x80\\xa8'");
  EXPECT_EQ(Printable("\U000E0041"), "'\\xf3\\xa0\\x81\\x81'");
}

TEST(Printable, EscapesWhatIsNoUtf8) {
  EXPECT_EQ(Printable("\xff\xc0\x80"), "'\\xff\\xc0\\x80'");
  EXPECT_EQ(Printable("\xed\xa0\x80"), "'\\xed\\xa0\\x80'");
  EXPECT_EQ(Printable("\xe6\x97"), "'\\xe6\\x97'");
  EXPECT_EQ(Printable("\x9b"
                      "31m"),
            "'\\x9b31m'");
}

TEST(Printable, CutsAtACharacter) {
  EXPECT_EQ(Printable(std::string(101, 'a')), "'" + std::string(100, 'a') + "...'");
  EXPECT_EQ(Printable(std::string(100, 'a')), "'" + std::string(100, 'a') + "'");
  EXPECT_EQ(Escaped("ab\u65e5x", 4), "ab...");
  EXPECT_EQ(Escaped("ab\u65e5x", 5), "ab\u65e5...");
}

}  // namespace
}  // namespace omnikv::printable_test
