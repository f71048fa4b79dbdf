// Vocabularies of GGUF files: small ones of every model against what tokenizers and sentencepiece
// give, llama.cpp's own test vectors and the shipped model where those are found.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "golden.h"
#include "io/gguf.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::gguf_test {
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

std::string FromBase64(const std::string& text) {
  static constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int n = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) break;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    n += 6;
    if (n < 8) continue;
    n -= 8;
    bytes += static_cast<char>(bits >> n & 0xff);
  }
  return bytes;
}

// The vocabulary of a tokenizer.json of byte-level BPE, as a GGUF file would hold it.
struct ByteLevelVocab {
  explicit ByteLevelVocab(const std::string& kind)
      : json(golden::ReadJson(kind + ".tokenizer.json")) {
    for (const auto& [text, id] : json["model"]["vocab"].items()) Set(id, text, 1);
    for (const auto& added : json["added_tokens"]) {
      const auto text = added["content"].get<std::string>();
      const bool special = added["special"].get<bool>();
      // GGUF has no word for tokens that swallow spaces.
      const bool plain = !added["lstrip"].get<bool>() && !added["rstrip"].get<bool>();
      if (!plain) beyond.push_back(text);
      Set(added["id"], text, !plain ? 5 : special ? 3 : 4);
    }
    for (const auto& merge : json["model"]["merges"]) {
      merges.push_back(merge.is_string()
                           ? merge.get<std::string>()
                           : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
    }
    vocab.name = kind;
    vocab.model = "gpt2";
    vocab.tokens.assign(texts.begin(), texts.end());
    vocab.merges.assign(merges.begin(), merges.end());
  }
  void Set(const nlohmann::json& id, const std::string& text, int32_t type) {
    const auto i = id.get<size_t>();
    if (i >= texts.size()) {
      texts.resize(i + 1);
      vocab.types.resize(i + 1, 5);
    }
    texts[i] = text;
    vocab.types[i] = type;
  }

  nlohmann::json json;
  std::vector<std::string> texts, merges, beyond;
  GgufVocab vocab;
};

struct PreCase {
  const char* kind;
  const char* pre;
};

class ByteLevelGguf : public testing::TestWithParam<PreCase> {};

// Ids of tokenizers, as golden_test holds them against the tokenizer.json. Left out are strings
// that its normalizer changes (GGUF has none) or that hold a token GGUF cannot describe.
TEST_P(ByteLevelGguf, GivesTheIdsOfTheLibrary) {
  ByteLevelVocab v(GetParam().kind);
  v.vocab.pre = GetParam().pre;
  const auto gguf = Tokenizer::FromGguf(v.vocab);
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  const auto json = Tokenizer::FromJson(v.json.dump(), GetParam().kind);
  ASSERT_TRUE(json.ok()) << json.status().message();
  const nlohmann::json g = golden::ReadJson(std::string(GetParam().kind) + ".golden.json");
  size_t compared = 0;
  const auto same = [&](const std::string& text, const std::vector<int32_t>& want) {
    const auto holds = [&](const std::string& token) {
      return text.find(token) != std::string::npos;
    };
    if (std::any_of(v.beyond.begin(), v.beyond.end(), holds)) return;
    if (*(*json)->Decode(want, false) != text) return;
    ++compared;
    EXPECT_EQ(*(*gguf)->Encode(text, {.add_special = false}), want) << text;
    EXPECT_EQ(*(*gguf)->Decode(want, false), text);
  };
  const golden::Strings strings;
  const std::vector<std::string> hard = strings.Hard();
  for (size_t i = 0; i < hard.size(); ++i) same(hard[i], g["hard"][i]);
  golden::Lcg rng(g["seed"].get<uint64_t>());
  const auto& hashes = g["random"].get_ref<const std::string&>();
  for (size_t i = 0; i < hashes.size() / 16; ++i) {
    const std::string text = strings.Random(&rng);
    const std::vector<int32_t> ids = *(*json)->Encode(text, {.add_special = false});
    ASSERT_EQ(golden::HashIds(ids), hashes.substr(16 * i, 16));
    same(text, ids);
  }
  EXPECT_GT(compared, 1000u);
}

INSTANTIATE_TEST_SUITE_P(Gguf, ByteLevelGguf,
                         testing::Values(PreCase{"gpt2", "gpt-2"}, PreCase{"llama3", "llama-bpe"},
                                         PreCase{"qwen2", "qwen2"}, PreCase{"o200k", "gpt-4o"},
                                         PreCase{"kimi", "kimi-k2"}, PreCase{"falcon", "falcon"}),
                         [](const auto& test) { return std::string(test.param.kind); });

class SentencePieceGguf : public testing::TestWithParam<const char*> {};

TEST_P(SentencePieceGguf, GivesTheIdsOfSentencePiece) {
  const nlohmann::json g = golden::ReadJson("sentencepiece.json")[GetParam()];
  const auto texts = g["tokens"].get<std::vector<std::string>>();
  const std::string charsmap = FromBase64(g["charsmap"].get_ref<const std::string&>());
  GgufVocab v;
  v.name = v.model = GetParam();
  v.tokens.assign(texts.begin(), texts.end());
  v.scores = g["scores"].get<std::vector<float>>();
  v.types = g["types"].get<std::vector<int32_t>>();
  v.precompiled_charsmap = charsmap;
  v.remove_extra_whitespaces = v.model == "t5";
  const auto unknown = std::find(v.types.begin(), v.types.end(), 2);
  v.unk = static_cast<int32_t>(unknown - v.types.begin());
  const auto t = Tokenizer::FromGguf(v);
  ASSERT_TRUE(t.ok()) << t.status().message();
  // sentencepiece never parses special tokens.
  const EncodeOptions plain = {.add_special = false, .parse_special = false};
  const golden::Strings strings;
  const std::vector<std::string> hard = strings.Hard();
  // With extra spaces sentencepiece removes U+2581 at the end too; llama.cpp does not.
  const auto trimmed = [&](const std::string& text) {
    return v.remove_extra_whitespaces.value() && text.ends_with("\u2581");
  };
  for (size_t i = 0; i < hard.size(); ++i) {
    if (trimmed(hard[i])) continue;
    auto ids = *(*t)->Encode(hard[i], plain);
    auto want = g["hard"][i].get<std::vector<int32_t>>();
    // Spellings of one score: sentencepiece adds in float and takes another order.
    const bool ties = v.model == "t5" && hard[i] == std::string(300, 'a');
    if (ties) std::sort(ids.begin(), ids.end());
    if (ties) std::sort(want.begin(), want.end());
    EXPECT_EQ(ids, want) << hard[i];
  }
  golden::Lcg rng(g["seed"].get<uint64_t>());
  const auto& hashes = g["random"].get_ref<const std::string&>();
  ASSERT_GE(hashes.size() / 16, 2000u);
  size_t wrong = 0;
  for (size_t i = 0; i < hashes.size() / 16; ++i) {
    const std::string text = strings.Random(&rng);
    const std::vector<int32_t> ids = *(*t)->Encode(text, plain);
    if (i < g["first"].size()) {
      EXPECT_EQ(ids, g["first"][i].get<std::vector<int32_t>>()) << text;
    }
    if (trimmed(text) || golden::HashIds(ids) == hashes.substr(16 * i, 16)) continue;
    if (++wrong <= 5) ADD_FAILURE() << "random string " << i << ": " << text;
  }
  EXPECT_EQ(wrong, 0u);
}

INSTANTIATE_TEST_SUITE_P(Gguf, SentencePieceGguf, testing::Values("llama", "t5"));

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
    EXPECT_EQ(*t->Encode(inputs[i], {.add_special = false}), want) << i << ": " << inputs[i];
    EXPECT_EQ(*t->Decode(want, false), inputs[i]);
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
    const std::vector<int32_t> ids = *gguf->Encode(text);
    EXPECT_EQ(ids, *(*json)->Encode(text)) << text.substr(0, 200);
    EXPECT_EQ(*gguf->Decode(ids, false), text) << text.substr(0, 200);
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
  EXPECT_EQ(Tokens(*t, *t->Encode("abc")), "<s> \u2581ab c");
  EXPECT_EQ(Tokens(*t, *t->Encode("bcbc")), "<s> \u2581 bc bc");
  EXPECT_EQ(Tokens(*t, *t->Encode("")), "<s>");
  EXPECT_EQ(Tokens(*t, *t->Encode("a\u00e4")), "<s> \u2581 a <0xC3> <0xA4>");
  EXPECT_EQ(*t->Decode(*t->Encode("ab \u00e4  c"), true), "ab \u00e4  c");
}

TEST_F(Handmade, TextNeverMergesToSpecialTokens) {
  const auto t = Load();
  EXPECT_EQ(Tokens(*t, *t->Encode("a<s>b")), "<s> \u2581 a <s> \u2581 b");
  EXPECT_EQ(Tokens(*t, *t->Encode("a<s>b", {true, false})), "<s> \u2581 a < s> b");
  EXPECT_EQ(Tokens(*t, *t->Encode("a<tool>b", {true, false})), "<s> \u2581 a <tool> \u2581 b");
}

TEST_F(Handmade, StreamsBytesAsCharacters) {
  const auto t = Load();
  StreamDecoder stream(t.get());
  std::string text;
  for (const int32_t id : std::vector<int32_t>(*t->Encode("\u00e4\u20ac"))) {
    const std::string piece = *stream.Push(id);
    EXPECT_TRUE(piece.empty() || piece == "\u00e4" || piece == "\u20ac") << piece;
    text += piece;
  }
  EXPECT_EQ(text, "\u00e4\u20ac");
  EXPECT_EQ(*stream.Push(3 + 0xE2), "");
  EXPECT_EQ(*stream.Flush(), "\uFFFD");
}

TEST_F(Handmade, UnigramTakesTheBestSpelling) {
  vocab_.model = "t5";
  vocab_.remove_extra_whitespaces = true;
  const auto t = Load();
  EXPECT_EQ(Tokens(*t, *t->Encode("abc")), "\u2581ab c </s>");
  EXPECT_EQ(Tokens(*t, *t->Encode("  a  bc ")), "\u2581 a \u2581 bc </s>");
  EXPECT_EQ(Tokens(*t, *t->Encode("a??b", {false, true})), "\u2581 a <unk> b");
}

TEST_F(Handmade, RefusesByName) {
  const auto refusal = [&] {
    vocab_.tokens.assign(texts_.begin(), texts_.end());
    return Tokenizer::FromGguf(vocab_).status().message();
  };
  vocab_.model = "rwkv";
  EXPECT_EQ(refusal(),
            "handmade: tokenizer.ggml.model is 'rwkv', supported are gpt2, llama and t5");
  vocab_.model = "gpt2";
  vocab_.pre = "nonesuch";
  EXPECT_NE(refusal().find("tokenizer.ggml.pre is 'nonesuch', supported are: default"),
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
    EXPECT_EQ(*t->Decode(*t->Encode("abc s/a <s> cab", {false, false}), false), "abcs/a<s>cab")
        << name;
  }
}

}  // namespace
}  // namespace omnikv::gguf_test
