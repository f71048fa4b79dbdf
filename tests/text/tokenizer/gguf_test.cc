// Vocabularies of GGUF files: llama.cpp's own test vectors, and the shipped model against the
// tokenizer.json of the same vocabulary.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "golden.h"
#include "io/gguf.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv {
namespace {

const std::string kShared = std::string(OMNIKV_SOURCE_DIR) + "/../shared/";

// The vocabulary of a file, whose views live as long as `file`.
GgufVocab ReadVocab(const GgufFile& file, const std::string& name) {
  GgufVocab v;
  v.name = name;
  v.model = *file.GetStringOr("tokenizer.ggml.model", "");
  v.pre = *file.GetStringOr("tokenizer.ggml.pre", "");
  v.tokens = *file.StringArray("tokenizer.ggml.tokens");
  if (file.Has("tokenizer.ggml.scores")) v.scores = *file.FloatArray("tokenizer.ggml.scores");
  if (file.Has("tokenizer.ggml.token_type")) {
    const std::vector<int64_t> types = *file.IntArray("tokenizer.ggml.token_type");
    v.types.assign(types.begin(), types.end());
  }
  if (file.Has("tokenizer.ggml.merges")) v.merges = *file.StringArray("tokenizer.ggml.merges");
  const auto id = [&](const char* key, std::optional<int32_t>* out) {
    if (file.Has(key)) *out = static_cast<int32_t>(*file.GetUint(key));
  };
  id("tokenizer.ggml.bos_token_id", &v.bos);
  id("tokenizer.ggml.eos_token_id", &v.eos);
  id("tokenizer.ggml.unknown_token_id", &v.unk);
  const auto flag = [&](const char* key, std::optional<bool>* out) {
    if (file.Has(key)) *out = *file.GetBool(key);
  };
  flag("tokenizer.ggml.add_bos_token", &v.add_bos);
  flag("tokenizer.ggml.add_eos_token", &v.add_eos);
  flag("tokenizer.ggml.add_space_prefix", &v.add_space_prefix);
  return v;
}

std::unique_ptr<Tokenizer> LoadGguf(const std::string& path) {
  const auto file = GgufFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status().message();
  if (!file.ok()) return nullptr;
  auto tokenizer = Tokenizer::FromGguf(ReadVocab(**file, path));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

std::vector<std::string> Split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at; (at = text.find(separator, begin)) != std::string::npos;) {
    parts.push_back(text.substr(begin, at - begin));
    begin = at + separator.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

class GgmlVocab : public testing::TestWithParam<const char*> {};

TEST_P(GgmlVocab, GivesTheVectorsOfLlamaCpp) {
  const std::string path = kShared + "third-party/ggml-vocab/ggml-vocab-" + GetParam() + ".gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "there is no " << path;
  const auto t = LoadGguf(path);
  ASSERT_NE(t, nullptr);
  const auto inputs = Split(golden::ReadFile(path + ".inp"), "\n__ggml_vocab_test__\n");
  const auto outputs = Split(golden::ReadFile(path + ".out"), "\n");
  ASSERT_GT(inputs.size(), 40u);
  ASSERT_GE(outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<int32_t> want;
    for (const std::string& id : Split(outputs[i], " ")) {
      if (!id.empty()) want.push_back(std::stoi(id));
    }
    EXPECT_EQ(t->Encode(inputs[i], {.add_special = false}), want) << i << ": " << inputs[i];
    EXPECT_EQ(t->Decode(want, false), inputs[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Gguf, GgmlVocab,
                         testing::Values("gpt-2", "deepseek-llm", "llama-spm", "phi-3"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Gguf, ShippedModelEqualsItsTokenizerJson) {
  const std::string json_path = kShared + "models/tiny/tokenizer.json";
  const auto gguf = LoadGguf(std::string(OMNIKV_SOURCE_DIR) + "/models/omnikv-tiny-q8_0.gguf");
  ASSERT_NE(gguf, nullptr);
  EXPECT_EQ(gguf->vocab_size(), 8192);
  EXPECT_EQ(gguf->bos(), 0);
  EXPECT_EQ(gguf->IdToToken(2), "<|user|>");
  EXPECT_TRUE(gguf->IsSpecial(2));
  if (!std::filesystem::exists(json_path)) GTEST_SKIP() << "there is no " << json_path;
  const auto json = Tokenizer::FromJson(golden::ReadFile(json_path), json_path);
  ASSERT_TRUE(json.ok()) << json.status().message();
  const auto same = [&](const std::string& text) {
    const std::vector<int32_t> ids = gguf->Encode(text);
    EXPECT_EQ(ids, (*json)->Encode(text)) << text.substr(0, 200);
    EXPECT_EQ(gguf->Decode(ids, false), text) << text.substr(0, 200);
    return ids.size();
  };
  size_t n = 0;
  const golden::Strings strings;
  for (const std::string& text : strings.Hard()) n += same(text);
  golden::Lcg rng(4711);
  for (int i = 0; i < 2000; ++i) n += same(strings.Random(&rng));
  for (const char* name : {"text/speeches.txt", "text/factbook.txt"}) {
    n += same(golden::ReadFile(kShared + name));
  }
  n += same("<|begin_of_text|><|user|>What is the pass key?<|end|><|assistant|>");
  EXPECT_GT(n, 10000u);
}

// A sentencepiece vocabulary made by hand.
class Handmade : public testing::Test {
 protected:
  Handmade() {
    vocab_.name = "handmade";
    vocab_.model = "llama";
    Add("<unk>", 0, 2);
    Add("<s>", 0, 3);
    Add("</s>", 0, 3);
    for (int b = 0; b < 256; ++b) {
      char text[8];
      std::snprintf(text, sizeof(text), "<0x%02X>", static_cast<unsigned>(b));
      texts_.push_back(text);
      vocab_.scores.push_back(0);
      vocab_.types.push_back(6);
    }
    for (const char* text : {"\u2581", "a", "b", "c", "<", "s", ">", "/"}) Add(text, -10, 1);
    Add("ab", -1, 1);
    Add("bc", -2, 1);
    Add("\u2581ab", -3, 1);
    Add("s>", -4, 1);
    Add("<tool>", 0, 4);
    vocab_.unk = 0;
    vocab_.bos = 1;
    vocab_.eos = 2;
  }
  void Add(const char* text, float score, int32_t type) {
    texts_.push_back(text);
    vocab_.scores.push_back(score);
    vocab_.types.push_back(type);
  }
  std::unique_ptr<Tokenizer> Load() {
    vocab_.tokens.assign(texts_.begin(), texts_.end());
    auto tokenizer = Tokenizer::FromGguf(vocab_);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
  }
  std::string Tokens(const Tokenizer& t, const std::vector<int32_t>& ids) {
    std::string out;
    for (const int32_t id : ids) {
      if (!out.empty()) out.push_back(' ');
      out += t.IdToToken(id);
    }
    return out;
  }

  std::vector<std::string> texts_;
  GgufVocab vocab_;
};

TEST_F(Handmade, MergesByScoreFromTheLeft) {
  const auto t = Load();
  EXPECT_EQ(Tokens(*t, t->Encode("abc")), "<s> \u2581ab c");
  EXPECT_EQ(Tokens(*t, t->Encode("bcbc")), "<s> \u2581 bc bc");
  EXPECT_EQ(Tokens(*t, t->Encode("")), "<s>");
  EXPECT_EQ(Tokens(*t, t->Encode("a\u00e4")), "<s> \u2581 a <0xC3> <0xA4>");
  EXPECT_EQ(t->Decode(t->Encode("ab \u00e4  c"), true), "ab \u00e4  c");
}

TEST_F(Handmade, TextNeverMergesToSpecialTokens) {
  const auto t = Load();
  EXPECT_EQ(Tokens(*t, t->Encode("a<s>b")), "<s> \u2581 a <s> \u2581 b");
  EXPECT_EQ(Tokens(*t, t->Encode("a<s>b", {true, false})), "<s> \u2581 a < s> b");
  EXPECT_EQ(Tokens(*t, t->Encode("a<tool>b", {true, false})), "<s> \u2581 a <tool> \u2581 b");
}

TEST_F(Handmade, StreamsBytesAsCharacters) {
  const auto t = Load();
  StreamDecoder stream(t.get());
  std::string text;
  for (const int32_t id : t->Encode("\u00e4\u20ac")) {
    const std::string piece = stream.Push(id);
    EXPECT_TRUE(piece.empty() || piece == "\u00e4" || piece == "\u20ac") << piece;
    text += piece;
  }
  EXPECT_EQ(text, "\u00e4\u20ac");
  EXPECT_EQ(stream.Push(3 + 0xE2), "");
  EXPECT_EQ(stream.Flush(), "\uFFFD");
}

TEST_F(Handmade, UnigramTakesTheBestSpelling) {
  vocab_.model = "t5";
  vocab_.remove_extra_whitespaces = true;
  const auto t = Load();
  EXPECT_EQ(Tokens(*t, t->Encode("abc")), "\u2581ab c </s>");
  EXPECT_EQ(Tokens(*t, t->Encode("  a  bc ")), "\u2581 a \u2581 bc </s>");
  EXPECT_EQ(Tokens(*t, t->Encode("a??b", {false, true})), "\u2581 a <unk> b");
}

TEST_F(Handmade, RefusesByName) {
  const auto refusal = [&] {
    vocab_.tokens.assign(texts_.begin(), texts_.end());
    return Tokenizer::FromGguf(vocab_).status().message();
  };
  vocab_.model = "rwkv";
  EXPECT_EQ(refusal(),
            "handmade: tokenizer.ggml.model is \"rwkv\", supported are gpt2, llama and t5");
  vocab_.model = "gpt2";
  vocab_.pre = "nonesuch";
  EXPECT_NE(refusal().find("tokenizer.ggml.pre is \"nonesuch\", supported are: default"),
            std::string::npos);
  vocab_.pre = "qwen2";
  vocab_.merges = {"ab"};
  EXPECT_EQ(refusal(), "handmade: tokenizer.ggml.merges[0] has no space, expected \"left right\"");
  vocab_.merges.clear();
  vocab_.bos = 100000;
  EXPECT_EQ(refusal(), "handmade: tokenizer.ggml.bos_token_id is 100000, expected 0 to 271");
  vocab_.bos = 1;
  vocab_.scores.pop_back();
  EXPECT_EQ(refusal(),
            "handmade: tokenizer.ggml.scores has 271 entries, expected 272, one a token");
}

// Every name of the table leads to expressions that compile and split some text.
TEST_F(Handmade, KnowsItsPreTokenizers) {
  vocab_.model = "gpt2";
  vocab_.pre = "?";
  vocab_.tokens.assign(texts_.begin(), texts_.end());
  const std::string message = Tokenizer::FromGguf(vocab_).status().message();
  const auto names = Split(message.substr(message.find("are: ") + 5), " ");
  EXPECT_GT(names.size(), 60u);
  for (const std::string& name : names) {
    vocab_.pre = name;
    const auto t = Load();
    ASSERT_NE(t, nullptr) << name;
    EXPECT_EQ(t->Decode(t->Encode("abc s/a <s> cab", {false, false}), false), "abcs/a<s>cab")
        << name;
  }
}

}  // namespace
}  // namespace omnikv
