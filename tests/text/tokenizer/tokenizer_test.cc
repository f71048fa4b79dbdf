// What the goldens cannot show: spans of a prompt, refusals, ill-formed input, hostile patterns,
// threads, and that nothing takes quadratic time.
#include "text/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "golden.h"

namespace omnikv::tokenizer_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json Base(const std::string& name) {
  return golden::ReadJson(name + ".tokenizer.json");
}

std::unique_ptr<Tokenizer> Make(const json& j) {
  auto tokenizer = Tokenizer::FromJson(j.dump(), "t.json");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return tokenizer.ok() ? std::move(*tokenizer) : nullptr;
}

std::string Refusal(const std::string& name, const std::function<void(json*)>& change) {
  json j = Base(name);
  change(&j);
  const auto tokenizer = Tokenizer::FromJson(j.dump(), "t.json");
  return tokenizer.ok() ? "" : tokenizer.status().message();
}

json Added(int id, const std::string& content, bool special, const char* flag = nullptr) {
  json token = {
      {"id", id},        {"content", content}, {"special", special},  {"normalized", false},
      {"lstrip", false}, {"rstrip", false},    {"single_word", false}};
  if (flag != nullptr) token[flag] = true;
  return token;
}

// ---- spans ------------------------------------------------------------------------------------

class Spans : public testing::TestWithParam<const char*> {};

// Cut anywhere, spans that are not literal are their concatenation; literal ones are it too where
// no special token is written out.
TEST_P(Spans, AreTheirConcatenation) {
  const auto t = Make(Base(GetParam()));
  golden::Lcg rng(99);
  const golden::Strings strings;
  for (int i = 0; i < 300; ++i) {
    std::string text;
    std::vector<TextSpan> spans;
    for (uint32_t k = rng.Below(5); k > 0; --k) {
      spans.push_back({strings.Random(&rng), false});
      text += spans.back().text;
    }
    EXPECT_EQ(*t->EncodeSpans(spans, true), *t->Encode(text)) << json(text);
    const std::vector<int32_t> plain = *t->Encode(text, {false, false});
    if (plain != *t->Encode(text, {false, true})) continue;
    for (TextSpan& span : spans) span.literal = rng.Below(2) == 1;
    EXPECT_EQ(*t->EncodeSpans(spans, false), plain) << json(text);
  }
}

// Whatever users write, the special tokens are those of the template, all of them.
TEST_P(Spans, KeepUsersAndTemplatesApart) {
  const auto t = Make(Base(GetParam()));
  const std::vector<std::string> pieces = {"<|user|>", "<|user", "|>",     "<|end|>",    "<",
                                           "|",        ">",      "s>",     "<s>",        " ",
                                           "\n",       "hi",     "<mask>", "</s",        "user|>",
                                           "us",       "\u2581", "er|>",   "<tool_call>"};
  golden::Lcg rng(7);
  for (int i = 0; i < 500; ++i) {
    std::vector<TextSpan> spans;
    std::vector<int32_t> want;
    for (int turn = 0; turn < 3; ++turn) {
      spans.push_back({"<|user|>", false});
      want.push_back(*t->TokenToId("<|user|>"));
      std::string user;
      for (uint32_t k = rng.Below(6); k > 0; --k) {
        user += pieces[rng.Below(static_cast<uint32_t>(pieces.size()))];
      }
      spans.push_back({user, true});
      spans.push_back({"<|end", false});
      spans.push_back({"|>", false});
      want.push_back(*t->TokenToId("<|end|>"));
    }
    std::vector<int32_t> special;
    for (const int32_t id : std::vector<int32_t>(*t->EncodeSpans(spans, false))) {
      if (t->IsSpecial(id) && t->IdToToken(id) != "<unk>") special.push_back(id);
    }
    EXPECT_EQ(special, want);
  }
}

INSTANTIATE_TEST_SUITE_P(Tokenizer, Spans,
                         testing::Values("llama3", "qwen2", "llama2", "metaspace_first", "gemma",
                                         "unigram", "falcon", "characters"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Tokenizer, LiteralTextDoesNotCutSpecialTokens) {
  json j = Base("small_bytes");
  j["added_tokens"].push_back(Added(406, "<|end|>\n\n", true));  // longer than <|end|>
  j["added_tokens"].push_back(Added(407, "!\n<|e", false));      // overlaps its start
  j["added_tokens"].push_back(Added(408, "!\n", false));
  const auto t = Make(j);
  const int32_t end = *t->TokenToId("<|end|>");
  EXPECT_EQ(*t->Encode("<|end|>\n\n"), std::vector<int32_t>{406});
  EXPECT_EQ(t->EncodeSpans({{"<|end|>", false}, {"\n\n", true}}, false)->front(), end);
  // As one text the ordinary token comes first; from a user it must not reach into the template.
  EXPECT_EQ(t->Encode("!\n<|end|>")->front(), 407);
  EXPECT_EQ(*t->EncodeSpans({{"!\n", true}, {"<|end|>", false}}, false),
            (std::vector<int32_t>{408, end}));
  EXPECT_EQ(*t->EncodeSpans({{"!", true}, {"\n", false}}, false), std::vector<int32_t>{408});
}

TEST(Tokenizer, NormalizedSpecialTokensAreFoundBesideLiteralText) {
  json j = Base("llama2");
  for (json& token : j["added_tokens"]) token["normalized"] = true;
  const auto t = Make(j);
  const auto ids = *t->EncodeSpans({{"<|user|>", false}, {"<|user|>", true}}, false);
  const int32_t user = *t->TokenToId("<|user|>");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), user), 1);
  EXPECT_EQ(ids.front(), user);
}

// ---- input ------------------------------------------------------------------------------------

TEST(Tokenizer, IllFormedTextReadsAsReplacementCharacters) {
  const auto t = Make(Base("gpt2"));
  EXPECT_EQ(*t->Encode("a\xFF"
                       "b\xE4\xBD"),
            *t->Encode("a\uFFFD"
                       "b\uFFFD"));
  EXPECT_EQ(*t->Encode("\xF0\x9F\x98 \xC0\x80"), *t->Encode("\uFFFD \uFFFD\uFFFD"));
  EXPECT_EQ(*t->EncodeSpans({{"\xE4", false}, {"\xBD\xA0", false}}, false),
            *t->Encode("\uFFFD\uFFFD\uFFFD"));
  EXPECT_EQ(*t->Decode(*t->Encode(std::string("a\0b", 3)), false), std::string("a\0b", 3));
}

TEST(Tokenizer, UnknownIdsDecodeToNothing) {
  const auto t = Make(Base("gpt2"));
  EXPECT_EQ(*t->Decode({-1, t->vocab_size(), INT32_MAX, INT32_MIN}, false), "");
  EXPECT_EQ(t->IdToToken(-1), "");
  EXPECT_FALSE(t->IsSpecial(t->vocab_size()));
  EXPECT_EQ(t->TokenToId("no such token"), std::nullopt);
  EXPECT_EQ(t->TokenToId("<|user|>"), t->vocab_size() - 6);
}

TEST(Tokenizer, OneForManyThreads) {
  const auto t = Make(Base("o200k"));
  const std::string text = "Threads share it: \u4f60\u597d, caf\u00e9 123 don't <|user|>";
  const std::vector<int32_t> want = *t->Encode(text);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 200; ++k) {
        ASSERT_EQ(*t->Encode(text), want);
        ASSERT_EQ(*t->Decode(want, false), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A long text of one letter, of marks, of nothing but spaces: minutes if anything is quadratic.
TEST(Tokenizer, LongWordsAreNoTrap) {
  for (const char* name : {"gpt2", "llama2", "unigram", "qwen2"}) {
    const auto t = Make(Base(name));
    for (const std::string unit : {"a", " ", "\u0301\u0316", "\u4eca", "\n", "<|", "1"}) {
      std::string text = "x";
      while (text.size() < (1 << 18)) text += unit;
      const std::vector<int32_t> ids = *t->Encode(text);
      EXPECT_FALSE(ids.empty());
      EXPECT_FALSE(t->Decode(ids, false)->empty());
    }
  }
}

// ---- refusals ---------------------------------------------------------------------------------

TEST(Tokenizer, RefusesWhatItDoesNotKnowByName) {
  const auto type = [](const char* where, const char* name) {
    return Refusal("gpt2", [=](json* j) { (*j)[where] = {{"type", name}}; });
  };
  EXPECT_THAT(type("normalizer", "Magic"),
              HasSubstr("t.json: normalizer has the type 'Magic', supported are Sequence, NFC"));
  EXPECT_THAT(type("pre_tokenizer", "UnicodeScripts"), HasSubstr("'UnicodeScripts', supported"));
  EXPECT_THAT(type("decoder", "CTC"), HasSubstr("decoder has the type 'CTC', supported are"));
  EXPECT_THAT(type("post_processor", "Magic"), HasSubstr("TemplateProcessing"));
  EXPECT_EQ(type("model", "WordPiece"),
            "t.json: model has the type 'WordPiece', supported are BPE and Unigram");
  EXPECT_THAT(Refusal("llama3",
                      [](json* j) {
                        (*j)["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "a(?~b)";
                      }),
              HasSubstr("pre_tokenizer.pretokenizers[0].pattern: the regular expression 'a(?~b)' "
                        "has \"(?~\", which is not supported"));
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["model"]["dropout"] = 0.1; }),
              HasSubstr("model.dropout is 0.1"));
}

TEST(Tokenizer, RefusesFilesThatContradictThemselves) {
  EXPECT_EQ(Tokenizer::FromJson("{\"a\": ", "t.json").status().message(),
            "t.json: is not valid JSON at byte 7");
  EXPECT_EQ(Tokenizer::FromJson("[]", "t.json").status().message(), "t.json: is not a JSON object");
  EXPECT_EQ(Tokenizer::FromJson("{}", "t.json").status().message(),
            "t.json: model is null, expected an object");
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["model"]["merges"][3] = "abc"; }),
              HasSubstr("has a string without exactly one space in model.merges, expected"));
  EXPECT_THAT(Refusal("gpt2",
                      [](json* j) {
                        (*j)["model"]["merges"][3] = {"a", "no such"};
                      }),
              HasSubstr("model.merges[3] is 'a' and 'no such', expected two tokens"));
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["model"]["vocab"]["a"] = -1; }),
              HasSubstr("has the number -1 in model.vocab, expected ids from 0"));
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["model"]["vocab"]["a"] = 1'000'000'000; }),
              HasSubstr("model.vocab has the id 1000000000 and 1000 tokens, expected ids below"));
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["model"].erase("merges"); }),
              HasSubstr("model lacks vocab (a map of token to id) or merges (a list)"));
  EXPECT_THAT(Refusal("unigram", [](json* j) { (*j)["model"]["unk_id"] = 100'000; }),
              HasSubstr("model.unk_id is 100000, expected a number from 0 to 699"));
  EXPECT_THAT(Refusal("gpt2", [](json* j) { (*j)["added_tokens"][0]["id"] = "0"; }),
              HasSubstr("added_tokens[0].id is '0', expected a number"));
  EXPECT_THAT(
      Refusal("gpt2", [](json* j) { (*j)["added_tokens"][0]["content"] = std::string(2000, 'x'); }),
      HasSubstr("has 2000 bytes of content, expected at most 1024"));
  EXPECT_THAT(
      Refusal("llama3",
              [](json* j) {
                (*j)["post_processor"]["processors"][1]["special_tokens"]["<s>"]["ids"] = {9999};
              }),
      HasSubstr("special_tokens.<s>.ids[0] is 9999, expected a number from 0 to 1005"));
  EXPECT_THAT(
      Refusal("gpt2",
              [](json* j) {
                (*j)["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", "AAA"}};
              }),
      HasSubstr("normalizer.precompiled_charsmap is 'AAA', expected base64"));
  EXPECT_THAT(Refusal("gpt2",
                      [](json* j) {
                        json deep = nullptr;
                        for (int i = 0; i < 70; ++i) deep = json::array({deep});
                        (*j)["normalizer"] = deep;
                      }),
              HasSubstr("nests deeper than 64 levels"));
  std::string cut = Base("gpt2").dump();
  cut.resize(cut.size() / 2);
  EXPECT_THAT(Tokenizer::FromJson(cut, "t.json").status().message(), HasSubstr("not valid JSON"));
}

TEST(Tokenizer, IgnoresTruncationAndPadding) {
  json j = Base("gpt2");
  j["truncation"] = {{"max_length", 1}};
  j["padding"] = {{"strategy", "BatchLongest"}};
  EXPECT_EQ(*Make(j)->Encode("hello world"), *Make(Base("gpt2"))->Encode("hello world"));
}

TEST(Tokenizer, ReadsMergesOfEitherForm) {
  json j = Base("o200k");
  for (json& merge : j["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  const auto a = Make(j);
  const auto b = Make(Base("o200k"));
  for (const std::string& text : golden::Strings().Hard())
    EXPECT_EQ(*a->Encode(text), *b->Encode(text));
}

// ---- limits -----------------------------------------------------------------------------------

json Replacing(const std::string& from, const std::string& to, int times, const char* list) {
  json steps = json::array();
  for (int i = 0; i < times; ++i) {
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}});
  }
  return {{"type", "Sequence"}, {list, steps}};
}

TEST(Tokenizer, StepsThatMultiplyTextAreRefused) {
  const auto refused = [](const Status& status, const std::string& where) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
    EXPECT_THAT(status.message(), HasSubstr("t.json: " + where));
    EXPECT_THAT(status.message(), HasSubstr("bytes out of"));
  };
  json j = Base("gpt2");
  j["normalizer"] = Replacing("a", "aa", 40, "normalizers");
  EXPECT_TRUE(Make(j)->Encode("b").ok());
  refused(Make(j)->Encode("a").status(), "normalizer.normalizers[2");
  refused(Make(j)->EncodeSpans({{"a", true}}, true).status(), "normalizer.normalizers[2");
  // At load, by a token that is looked for in normalized text.
  json added = Added(5000, "a", false);
  added["normalized"] = true;
  j["added_tokens"].push_back(added);
  refused(Tokenizer::FromJson(j.dump(), "t.json").status(), "normalizer.normalizers[2");

  j = Base("gpt2");
  j["normalizer"] = {
      {"type", "Replace"}, {"pattern", {{"Regex", ""}}}, {"content", std::string(100'000, 'a')}};
  refused(Make(j)->Encode(std::string(1000, 'b')).status(), "normalizer: makes");
  j["normalizer"] = {{"type", "Prepend"}, {"prepend", std::string(100'000, 'a')}};
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "b<|user|>";
  EXPECT_TRUE(Make(j)->Encode("b").ok());
  refused(Make(j)->Encode(text).status(), "");

  j = Base("gpt2");  // every byte as two, again and again
  json levels = json::array();
  for (int i = 0; i < 40; ++i) {
    levels.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  }
  j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", levels}};
  refused(Make(j)->Encode("\u00e9").status(), "pre_tokenizer.pretokenizers[2");

  j = Base("gpt2");
  j["decoder"] = Replacing("a", "aa", 40, "decoders");
  const auto t = Make(j);
  const std::vector<int32_t> a = {*t->TokenToId("a")};
  refused(t->Decode(a, false).status(), "decoder.decoders[2");
  StreamDecoder stream(t.get());
  refused(stream.Push(a[0]).status(), "decoder.decoders[2");
}

TEST(Tokenizer, LargeTextIsFine) {
  const std::string text(size_t{16} << 20, 'x');
  for (const char* name : {"gpt2", "gemma"}) {
    const auto t = Make(Base(name));
    const auto ids = t->Encode(text);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_GT(ids->size(), 1u << 17);
  }
}

TEST(Tokenizer, RegexesPayForAllOfATextAndOfALoad) {
  json j = Base("gpt2");
  j["pre_tokenizer"] = {{"type", "Split"},
                        {"pattern", {{"Regex", "(?:(?:a|a){22}\\x01|.)"}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
  const auto t = Make(j);
  EXPECT_TRUE(t->Encode("aaab").ok());
  const Status status = t->Encode(std::string(1000, 'a')).status();
  EXPECT_EQ(status.code(), StatusCode::kFailed);
  EXPECT_EQ(status.message(),
            "t.json: pre_tokenizer: the regular expression '(?:(?:a|a){22}\\x01|.)' takes longer "
            "than the limits allow");

  j = Base("gpt2");
  j["normalizer"] = {
      {"type", "Replace"}, {"pattern", {{"Regex", "(?:a|a)*[bc]"}}}, {"content", "c"}};
  for (int i = 0; i < 300; ++i) {
    json added = Added(2000 + i, std::string(40, 'a') + std::to_string(i), false);
    added["normalized"] = true;
    j["added_tokens"].push_back(added);
  }
  EXPECT_THAT(Tokenizer::FromJson(j.dump(), "t.json").status().message(),
              HasSubstr("t.json: normalizer: the regular expression '(?:a|a)*[bc]' takes longer"));
}

TEST(Tokenizer, PostProcessorsAreBounded) {
  json j = Base("gpt2");
  json many = json::array();
  for (int i = 0; i < 2000; ++i) many.push_back({{"SpecialToken", {{"id", "x"}, {"type_id", 0}}}});
  many.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  j["post_processor"] = {{"type", "TemplateProcessing"},
                         {"single", many},
                         {"special_tokens", {{"x", {{"ids", {1}}}}}}};
  EXPECT_THAT(Tokenizer::FromJson(j.dump(), "t.json").status().message(),
              HasSubstr("post_processor puts more than 1024 tokens around a text"));
  json steps = json::array();
  for (int i = 0; i < 300; ++i) steps.push_back({{"type", "ByteLevel"}});
  j["post_processor"] = {{"type", "Sequence"}, {"processors", steps}};
  EXPECT_THAT(Tokenizer::FromJson(j.dump(), "t.json").status().message(),
              HasSubstr("has more than 256 steps"));
}

TEST(Tokenizer, DocumentsAreBounded) {
  const auto message = [](const std::string& text) {
    return Tokenizer::FromJson(text, "t.json").status().message();
  };
  std::string values = "{\"x\": [1";
  for (int i = 0; i < 2'000'000; ++i) values += ",1";
  EXPECT_EQ(message(values + "]}"), "t.json: holds more than 2000000 values");
  EXPECT_EQ(message(std::string(1 << 20, '[')), "t.json: nests deeper than 64 levels");
  json j = Base("gpt2");
  j["model"]["type"] = "\x1b[31m" + std::string(100'000, 'X');
  const std::string type = message(j.dump());
  EXPECT_EQ(type.find('\x1b'), std::string::npos);
  EXPECT_LT(type.size(), 300u);
  GgufVocab vocab;
  vocab.name = "v.gguf";
  vocab.model = "llama";
  vocab.tokens.assign((size_t{1} << 18) + 1, "x");
  vocab.types.assign(vocab.tokens.size(), 3);
  EXPECT_THAT(Tokenizer::FromGguf(vocab).status().message(),
              HasSubstr("special and added tokens, expected at most"));
}

// ---- tokens that are held back ------------------------------------------------------------------

TEST(Tokenizer, HeldBackTokensAreNotTyped) {
  json j = Base("gpt2");
  for (json& token : j["added_tokens"]) token["special"] = false;
  json normalized = Added(3000, "[INST]", false);
  normalized["normalized"] = true;
  j["added_tokens"].push_back(normalized);
  j["added_tokens"].push_back(Added(3001, "\n\n", false));
  j["added_tokens"].push_back(Added(3002, "user", false));
  j["added_tokens"].push_back(Added(3003, "[OTHER]", false));
  const auto t = Make(j);
  const auto has = [&](const std::vector<TextSpan>& spans, const std::string& token) {
    const auto ids = t->EncodeSpans(spans, false);
    EXPECT_TRUE(ids.ok());
    return std::count(ids->begin(), ids->end(), *t->TokenToId(token)) == 1;
  };
  EXPECT_TRUE(has({{"<|user|>", true}}, "<|user|>"));  // as the file says
  EXPECT_TRUE(has({{"[INST]", true}}, "[INST]"));
  ASSERT_TRUE(t->HoldBack("<|user|>user\n\n[INST]").ok());
  for (const char* token : {"<|user|>", "[INST]"}) {
    EXPECT_FALSE(has({{token, true}}, token)) << token;
    EXPECT_FALSE(has(
        {{std::string(token).substr(0, 3), true}, {std::string(token).substr(3), false}}, token))
        << token;
    EXPECT_TRUE(has({{token, false}}, token)) << token;
    EXPECT_TRUE(has({{token, false}, {"x", true}}, token)) << token;
    EXPECT_EQ(*t->Encode(token, {false, false}), std::vector<int32_t>{*t->TokenToId(token)});
    EXPECT_EQ(*t->Decode({*t->TokenToId(token)}, /*skip_special=*/true), token);
  }
  // Words, white space and what the template does not write stay as the file says.
  for (const char* token : {"\n\n", "user", "[OTHER]"}) {
    EXPECT_TRUE(has({{token, true}}, token)) << token;
  }
}

}  // namespace
}  // namespace omnikv::tokenizer_test
