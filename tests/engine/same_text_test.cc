// Tokens that have the same text, whoever spelled it.
#include "engine/same_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../test_data.h"

namespace omnikv::same_text_test {
namespace {

class SameTextTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    std::ifstream file(TestData("tests/text/tokenizer/data/" + name + ".tokenizer.json"));
    const std::string json((std::istreambuf_iterator<char>(file)), {});
    auto tokenizer = Tokenizer::FromJson(json, name);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    tokenizer_ = std::move(*tokenizer);
    auto texts = TokenTexts::Of(*tokenizer_);
    ASSERT_TRUE(texts.ok()) << texts.status().message();
    texts_.emplace(*texts);
    all_ = texts_->All();
  }
  // As the tokenizer spells it, behind other text.
  std::vector<int32_t> Tokens(const std::string& text) const {
    const EncodeOptions options{.add_special = false, .parse_special = false};
    std::vector<int32_t> tokens = *tokenizer_->Encode("a. " + text, options);
    const std::vector<int32_t> before = *tokenizer_->Encode("a.", options);
    EXPECT_EQ(CommonPrefix(tokens, before), before.size());
    return tokens;
  }
  // The same in tokens of a byte or a letter each, from token `from` on.
  std::vector<int32_t> Letters(const std::vector<int32_t>& tokens, size_t from) const {
    std::vector<int32_t> letters(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(from));
    for (size_t i = from; i < tokens.size(); ++i) {
      for (std::string text = Text(tokens[i]); !text.empty();) {
        const int32_t id = Shortest(text);
        EXPECT_GE(id, 0) << text;
        if (id < 0) return letters;
        letters.push_back(id);
        text.erase(0, Text(id).size());
      }
    }
    return letters;
  }
  SameText Of(const std::vector<int32_t>& kept, const std::vector<int32_t>& prompt) const {
    return BeginningOf(*texts_, kept, prompt);
  }
  std::string TextOf(const std::vector<int32_t>& tokens, int64_t n) const {
    std::string text;
    for (int64_t i = 0; i < n; ++i) text += Text(tokens[static_cast<size_t>(i)]);
    return text;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<TokenTexts> texts_;
  std::vector<std::string> all_;

 private:
  const std::string& Text(int32_t id) const { return all_[static_cast<size_t>(id)]; }
  static size_t CommonPrefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                               a.begin());
  }
  // The token of fewest bytes with which `text` begins.
  int32_t Shortest(const std::string& text) const {
    int32_t found = -1;
    for (int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
      const std::string& one = Text(id);
      if (one.empty() || !text.starts_with(one)) continue;
      if (found < 0 || one.size() < Text(found).size()) found = id;
    }
    return found;
  }
};

TEST_P(SameTextTest, IsFoundUnderOtherTokens) {
  const std::vector<int32_t> tokens = Tokens("The grass is green, the sky is blue");
  const std::vector<int32_t> letters = Letters(tokens, 2);
  ASSERT_GT(letters.size(), tokens.size());
  SameText same = Of(letters, tokens);
  EXPECT_EQ(same.kept, std::ssize(letters));
  EXPECT_EQ(same.prompt, std::ssize(tokens));
  // Tokens after it are those of the longer one.
  std::vector<int32_t> longer = tokens;
  longer.insert(longer.end(), tokens.begin() + 2, tokens.end());
  same = Of(letters, longer);
  EXPECT_EQ(same.kept, std::ssize(letters));
  EXPECT_EQ(same.prompt, std::ssize(tokens));
  // Equal tokens are the same as they are.
  same = Of(longer, longer);
  EXPECT_EQ(same.kept, std::ssize(longer));
  EXPECT_EQ(same.prompt, std::ssize(longer));
}

TEST_P(SameTextTest, EndsWhereTheTextsPart) {
  const std::vector<int32_t> tokens = Tokens("The grass is green, the sky is blue");
  const std::vector<int32_t> others = Letters(Tokens("The grass is grey, the sky is blue"), 2);
  const SameText same = Of(others, tokens);
  EXPECT_EQ(TextOf(others, same.kept), TextOf(tokens, same.prompt));
  EXPECT_GT(same.prompt, 2);
  EXPECT_LT(same.prompt, std::ssize(tokens) - 4) << "not past the word that differs";
  // What ends within a token of the other is the same up to the token before.
  std::vector<int32_t> part = Letters(tokens, 2);
  part.resize(part.size() - 1);
  const SameText cut = Of(part, tokens);
  EXPECT_EQ(cut.prompt, std::ssize(tokens) - 1);
  EXPECT_EQ(TextOf(part, cut.kept), TextOf(tokens, cut.prompt));
}

// The text of a special token, spelled by a user, is not that token.
TEST_P(SameTextTest, SpecialTokensAreTheSameAsThemselves) {
  int32_t special = 0;
  while (special < tokenizer_->vocab_size() && !tokenizer_->IsSpecial(special)) ++special;
  ASSERT_LT(special, tokenizer_->vocab_size());
  std::vector<int32_t> kept = Tokens("The grass is green");
  std::vector<int32_t> prompt = Letters(kept, 2);
  const auto n = std::ssize(kept);
  const auto m = std::ssize(prompt);
  kept.push_back(special);
  std::vector<int32_t> spelled = prompt;
  const std::vector<int32_t> more = Letters(Tokens(std::string(tokenizer_->IdToToken(special))), 0);
  spelled.insert(spelled.end(), more.begin(), more.end());
  EXPECT_EQ(Of(kept, spelled).kept, n);
  EXPECT_EQ(Of(kept, spelled).prompt, m);
  prompt.push_back(special);
  EXPECT_EQ(Of(kept, prompt).kept, n + 1);
  EXPECT_EQ(Of(kept, prompt).prompt, m + 1);
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, SameTextTest, testing::Values("o200k", "llama2"),
                         [](const auto& of) { return std::string(of.param); });

}  // namespace
}  // namespace omnikv::same_text_test
