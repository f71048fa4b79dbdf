// Every kind of tokenizer.json against what the tokenizers library does with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "golden.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::golden_test {
namespace {

using golden::HashIds;
using golden::HashText;
using nlohmann::json;

constexpr size_t kHashes = 5;  // of a hard string

// The `i`th hash of a list; all dashes where the library gave no answer.
std::string Hash(const json& hashes, size_t i) {
  return hashes.get_ref<const std::string&>().substr(16 * i, 16);
}
bool NoAnswer(const std::string& hash) {
  return hash[0] == '-';
}

const golden::Strings& Material() {
  static const golden::Strings strings;
  return strings;
}

std::unique_ptr<Tokenizer> Load(const std::string& text, const std::string& name) {
  auto tokenizer = Tokenizer::FromJson(text, name);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

std::string Quote(const std::string& text) {
  return json(text).dump(-1, ' ', true);
}

void CheckHard(const Tokenizer& t, const json& g) {
  const std::vector<std::string> hard = Material().Hard();
  for (size_t i = 0; i < hard.size(); ++i) {
    SCOPED_TRACE("hard string " + std::to_string(i) + ": " + Quote(hard[i]));
    const std::vector<int32_t> ids = *t.Encode(hard[i], {.add_special = false});
    if (g.contains("hard")) {
      ASSERT_EQ(ids, g["hard"][i].get<std::vector<int32_t>>());
    }
    const auto check = [&](size_t k, const std::string& hash) {
      const std::string want = Hash(g["hard_hash"], kHashes * i + k);
      return NoAnswer(want) || want == hash;
    };
    EXPECT_TRUE(check(0, HashIds(*t.Encode(hard[i])))) << "with special tokens";
    EXPECT_TRUE(check(1, HashIds(ids))) << json(ids);
    const std::string text = *t.Decode(ids, false);
    EXPECT_TRUE(check(3, HashText(text))) << Quote(text);
    EXPECT_TRUE(check(4, HashText(*t.Decode(ids, true)))) << Quote(*t.Decode(ids, true));
  }
}

// Special tokens as plain text. Models that hold special tokens as words of their own give them
// away in the library, never here: those strings are left to the test of literal spans.
void CheckPlain(const Tokenizer& t, const json& g) {
  const std::vector<std::string> hard = Material().Hard();
  for (size_t i = 0; i < hard.size(); ++i) {
    const std::vector<int32_t> ids =
        *t.Encode(hard[i], {.add_special = false, .parse_special = false});
    for (const int32_t id : ids) {
      EXPECT_TRUE(!t.IsSpecial(id) || t.IdToToken(id) == "<unk>") << Quote(hard[i]);
    }
    const std::string want = Hash(g["hard_hash"], kHashes * i + 2);
    if (hard[i].find("<s>") != std::string::npos || NoAnswer(want)) continue;
    EXPECT_EQ(HashIds(ids), want) << Quote(hard[i]) << " " << json(ids);
  }
}

void CheckRandom(const Tokenizer& t, const json& g) {
  golden::Lcg rng(g["seed"].get<uint64_t>());
  const size_t n = g["random"].get_ref<const std::string&>().size() / 16;
  size_t wrong = 0;
  for (size_t i = 0; i < n; ++i) {
    const std::string text = Material().Random(&rng);
    const std::vector<int32_t> ids = *t.Encode(text, {.add_special = false});
    if (g.contains("first") && i < g["first"].size()) {
      EXPECT_EQ(ids, g["first"][i].get<std::vector<int32_t>>()) << i << ": " << Quote(text);
    }
    const std::string want = Hash(g["random"], i);
    if (NoAnswer(want) || want == HashIds(ids)) continue;
    if (++wrong <= 5) ADD_FAILURE() << "random string " << i << ": " << Quote(text) << json(ids);
  }
  EXPECT_EQ(wrong, 0u) << "of " << n << " random strings";
  // Any ids decode to what the library makes of them.
  for (size_t i = 0; i < g["decode"].get_ref<const std::string&>().size() / 16; ++i) {
    std::vector<int32_t> ids(rng.Below(12));
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(rng.Below(g["vocab_size"].get<uint32_t>()));
    }
    const bool skip = rng.Below(2) == 1;
    const std::string want = Hash(g["decode"], i);
    const std::string text = *t.Decode(ids, skip);
    EXPECT_TRUE(NoAnswer(want) || want == HashText(text)) << json(ids) << skip << Quote(text);
  }
}

// What Push lets out is a prefix of the final text, of the text of the tokens so far as well, and
// of a `live` tokenizer all of that that is certain.
void CheckStreams(const Tokenizer& t, const json& g) {
  for (size_t i = 0; i < g["hard"].size(); ++i) {
    const auto ids = g["hard"][i].get<std::vector<int32_t>>();
    const std::string all = *t.Decode(ids, false);
    StreamDecoder stream(&t, false);
    std::string text;
    for (size_t k = 0; k < ids.size(); ++k) {
      text += *stream.Push(ids[k]);
      ASSERT_EQ(all.compare(0, text.size(), text), 0) << i << " after token " << k;
      if (k >= g["stream"][i].size()) continue;
      const auto certain = g["stream"][i][k].get<size_t>();
      EXPECT_LE(text.size(), certain) << i << " after token " << k;
      const std::string so_far =
          *t.Decode({ids.begin(), ids.begin() + static_cast<long>(k) + 1}, false);
      EXPECT_EQ(so_far.compare(0, text.size(), text), 0);
      if (g["live"].get<bool>() && so_far.find("\uFFFD") == std::string::npos) {
        EXPECT_EQ(text.size(), certain) << i << " after token " << k;
      }
    }
    EXPECT_EQ(text + *stream.Flush(), all);
  }
}

class Kinds : public testing::TestWithParam<const char*> {};

TEST_P(Kinds, AgreesWithTheLibrary) {
  const std::string name = GetParam();
  const auto t = Load(golden::ReadFile(golden::DataPath(name + ".tokenizer.json")), name);
  ASSERT_NE(t, nullptr);
  const json g = golden::ReadJson(name + ".golden.json");
  EXPECT_EQ(t->vocab_size(), g["vocab_size"].get<int32_t>());
  CheckHard(*t, g);
  CheckPlain(*t, g);
  CheckRandom(*t, g);
  CheckStreams(*t, g);
}

INSTANTIATE_TEST_SUITE_P(Golden, Kinds,
                         testing::Values("gpt2", "llama3", "qwen2", "o200k", "kimi", "digits_split",
                                         "falcon", "llama2", "metaspace_first", "gemma", "unigram",
                                         "unigram_bytes", "characters", "affixes", "small_bytes"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Golden, Variants) {
  const json goldens = golden::ReadJson("variants.golden.json");
  size_t n = 0;
  for (const json& variant : golden::ReadJson("variants.json")) {
    const auto name = variant["name"].get<std::string>();
    SCOPED_TRACE(name);
    json j = golden::ReadJson(variant["base"].get<std::string>() + ".tokenizer.json");
    for (const auto& [path, value] : variant["set"].items()) {
      const size_t dot = path.find('.');
      (dot == std::string::npos ? j[path] : j[path.substr(0, dot)][path.substr(dot + 1)]) = value;
    }
    const auto t = Load(j.dump(), name);
    if (t == nullptr) continue;
    CheckHard(*t, goldens[name]);
    CheckRandom(*t, goldens[name]);
    ++n;
  }
  EXPECT_GT(n, 100u);
}

}  // namespace
}  // namespace omnikv::golden_test
