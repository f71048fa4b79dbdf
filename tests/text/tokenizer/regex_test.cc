// Oniguruma's syntax on PCRE2.
#include "text/tokenizer/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "text/tokenizer/work.h"

namespace omnikv::tok::regex_test {
namespace {

std::vector<std::string> Matches(const std::string& pattern, const std::string& text) {
  const auto regex = Regex::Compile(pattern);
  EXPECT_TRUE(regex.ok()) << regex.status().message();
  if (!regex.ok()) return {};
  RegexScratch scratch;
  std::vector<std::string> found;
  regex->ForEach(text, &scratch, [&](size_t begin, size_t end) {
    found.push_back(text.substr(begin, end - begin));
  });
  return found;
}

using Strings = std::vector<std::string>;

TEST(Regex, IntervalsRepeat) {
  EXPECT_EQ(Matches(R"(\p{N}{1,3}+)", "12345678"), Strings{"12345678"});
  EXPECT_EQ(Matches(R"(\p{N}{1,3})", "12345678"), (Strings{"123", "456", "78"}));
  EXPECT_EQ(Matches("a{2}?b", "aab b"), (Strings{"aab", "b"}));
  EXPECT_EQ(Matches("a{1,2}?", "aa"), (Strings{"a", "a"}));
  EXPECT_EQ(Matches("(ab|c){2}{2}", "abcabcab"), Strings{"abcabc"});
  EXPECT_EQ(Matches("xa{,2}", "xaaa"), Strings{"xaa"});
  EXPECT_EQ(Matches("a{x}|{", "a{x}{"), (Strings{"a{x}", "{"}));
  EXPECT_EQ(Matches("[ab]{2}+", "ababa"), Strings{"abab"});
}

TEST(Regex, FlagsEndWithTheirGroup) {
  EXPECT_EQ(Matches("a(?i)b|c", "aBaCcC"), (Strings{"aB", "aC"}));
  EXPECT_EQ(Matches("(?:a(?i)b)c", "aBc aBC"), Strings{"aBc"});
  EXPECT_EQ(Matches("(?m:a.)b", "a\nb"), Strings{"a\nb"});
  EXPECT_EQ(Matches("(?i-m:'S)", "'s"), Strings{"'s"});
}

TEST(Regex, LinesAlways) {
  EXPECT_EQ(Matches("^a|b$", "a b\na\nb"), (Strings{"a", "b", "a", "b"}));
  EXPECT_EQ(Matches(".+", "a\nb\r\n"), (Strings{"a", "b\r"}));
}

TEST(Regex, ClassesNestAndIntersect) {
  EXPECT_EQ(Matches("[a-z&&[^aeiou]]+", "hello"), (Strings{"h", "ll"}));
  EXPECT_EQ(Matches("[^a-z&&[aeiou]]", "ae1"), Strings{"1"});  // not (a letter and a vowel)
  EXPECT_EQ(Matches("[a[b-d]e]+", "abcdef"), Strings{"abcde"});
  EXPECT_EQ(Matches(R"([^\S\n]+)", " \n\t"), (Strings{" ", "\t"}));
  EXPECT_EQ(Matches(R"([^\W_]+)", "a_b"), (Strings{"a", "b"}));
  EXPECT_EQ(Matches("[]a]+", "]a["), Strings{"]a"});
  EXPECT_EQ(Matches(R"([\-\]\\^]+)", "-]\\^"), Strings{"-]\\^"});
  EXPECT_EQ(Matches("[[:upper:][:digit:]]+", "aB1c"), Strings{"B1"});
  EXPECT_EQ(Matches(R"([\x41-\u0043\x{1F600}]+)", "ABC\U0001F600D"), Strings{"ABC\U0001F600"});
}

TEST(Regex, Properties) {
  EXPECT_EQ(Matches(R"(\s)", "\u180E\u0085\u00A0\u200B"), (Strings{"\u0085", "\u00A0"}));
  EXPECT_EQ(Matches(R"(\w+)", "e\u0301 \u200D_\u00B2"), (Strings{"e\u0301", "_\u00B2"}));
  EXPECT_EQ(Matches(R"(\bx\b)", "x\u0301 x"), Strings{"x"});
  EXPECT_EQ(Matches(R"(\h+)", "fg"), Strings{"f"});
  EXPECT_EQ(Matches(R"(\v)", "\n\v"), Strings{"\v"});
  EXPECT_EQ(Matches(R"(\p{Han}+)", "\u6F22\u3001\u4EEE"), (Strings{"\u6F22", "\u4EEE"}));
  EXPECT_EQ(Matches(R"(\p{^Lu}\p{lowercase letter}\P{Nd})", "abc"), Strings{"abc"});
}

TEST(Regex, EmptyMatchesAdvanceByCharacters) {
  EXPECT_EQ(Matches("x*", "\u00e9x"), (Strings{"", "x"}));
  EXPECT_EQ(Matches("", "\u4eca"), (Strings{"", ""}));
}

TEST(Regex, RefusesByName) {
  const auto refusal = [](const std::string& p) { return Regex::Compile(p).status().message(); };
  using testing::HasSubstr;
  EXPECT_THAT(refusal("(*LIMIT_MATCH=1)"), HasSubstr("has '(*', which is not supported"));
  EXPECT_THAT(refusal("(?R)"), HasSubstr("\"(?R\""));
  EXPECT_THAT(refusal("(?x)a b"), HasSubstr("\"(?x\""));
  EXPECT_THAT(refusal(R"(\K)"), HasSubstr(R"("\K")"));
  EXPECT_THAT(refusal(R"(\xE4)"), HasSubstr(R"("\xE4")"));
  EXPECT_THAT(refusal(R"(\p{Klingon})"), HasSubstr("the property \"Klingon\""));
  EXPECT_THAT(refusal("[a"), HasSubstr("a class that is not closed"));
  EXPECT_THAT(refusal("(a"), HasSubstr("a group that is not closed"));
  EXPECT_THAT(refusal("a)"), HasSubstr("a ')' without '('"));
  EXPECT_THAT(refusal("*"), HasSubstr("nothing to repeat"));
  EXPECT_THAT(refusal("[z-a]"), HasSubstr("a range that runs backwards"));
  EXPECT_THAT(refusal("(?<=a+)b"), HasSubstr("is not valid: lookbehind assertion"));
  EXPECT_THAT(refusal(std::string(200, '(')), HasSubstr("nested too deeply"));
}

// A pattern made to backtrack for ever ends in an error, however the work is spread over places in
// the text, searches and texts.
TEST(Regex, HostilePatternsEnd) {
  const auto error = [](const std::string& pattern, const std::string& text, int times = 1) {
    const auto regex = Regex::Compile(pattern);
    EXPECT_TRUE(regex.ok()) << regex.status().message();
    RegexScratch scratch;
    try {
      for (int i = 0; i < times; ++i) regex->ForEach(text, &scratch, [](size_t, size_t) {});
    } catch (const WorkError& e) {
      EXPECT_EQ(e.code, StatusCode::kFailed);
      return e.message;
    }
    return std::string();
  };
  const std::string text(5000, 'a');
  EXPECT_EQ(error("(a+)+[bc]", text),
            "the regular expression '(a+)+[bc]' takes longer than the limits allow");
  EXPECT_NE(error("(?:a?){30}a{30}[bc]", text), "");
  // Just below the limit of one place, at each place.
  EXPECT_NE(error("(?:(?:a|a){20}\\x01|.)", text), "");
  EXPECT_EQ(error("(?:(?:a|a){4}\\x01|.)", text), "");
  // And in each of many texts.
  EXPECT_EQ(error("(?:a|a){16}[bc]", std::string(20, 'a')), "");
  EXPECT_NE(error("(?:a|a){16}[bc]", std::string(20, 'a'), 100000), "");
  // A control character on the screen is no part of a message.
  EXPECT_EQ(error("(a+)+[\x1b]", text).find('\x1b'), std::string::npos);
  EXPECT_EQ(Matches(R"((?:(?:a|b)c?)*)", std::string(1 << 20, 'a')).size(), 1u);
}

// Matches are found wherever they are: behind many places that have none.
TEST(Regex, FindsBehindLongGaps) {
  for (const size_t gap : {0, 1, 255, 256, 257, 511, 512, 5000}) {
    const std::string text = std::string(gap, '.') + "\u4eca7" + std::string(gap, '.') + "8";
    EXPECT_EQ(Matches(R"(\d)", text), (Strings{"7", "8"})) << gap;
    EXPECT_EQ(Matches(R"((?<=\x{4eca})\d|\d$)", text), (Strings{"7", "8"})) << gap;
    // Places that take more steps than are free, before a match.
    EXPECT_EQ(Matches(R"((?:(?:\.|\.){9}\x01|\d))", text), (Strings{"7", "8"})) << gap;
  }
}

}  // namespace
}  // namespace omnikv::tok::regex_test
