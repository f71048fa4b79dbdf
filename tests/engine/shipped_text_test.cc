// The shipped model's greedy text against transformers' on the same dequantised weights in f32
// (tests/golden/shipped_text.json, made by scripts/make_text_goldens.py).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "omnikv/engine.h"

namespace omnikv {
namespace {

std::unique_ptr<Engine> Load(const std::string& precision, const std::string& kv_dtype) {
  EngineOptions options;
  options.model = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";
  options.threads = 2;
  options.precision = precision;
  options.kv_dtype = kv_dtype;
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

std::unique_ptr<Session> Open(Engine& engine) {
  auto session = engine.NewSession({.name = "full"});
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(*session);
}

// Sanitizers slow this down some fifty times: the long prompts would take an hour.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kMaxPrompt = 600;
#else
constexpr size_t kMaxPrompt = 1 << 20;
#endif

// The logits after the prompt and `tokens`, teacher-forced.
std::vector<float> LogitsAfter(Engine& engine, Session& session, std::vector<int32_t> prompt,
                               const std::vector<int32_t>& tokens) {
  EXPECT_TRUE(session.Prompt(prompt).ok());
  for (const int32_t token : tokens) EXPECT_TRUE(session.Step(token).ok());
  return {session.logits(), session.logits() + engine.vocab()};
}

// Text must be equal. Where it first differs, the rounding of that run (against ours in f32, which
// must choose as transformers does) has to explain it: half of the reference's margin or more.
TEST(ShippedModel, GreedyTextIsTransformers) {
  std::ifstream file(OMNIKV_SOURCE_DIR "/tests/golden/shipped_text.json");
  const auto json = nlohmann::json::parse(file);
  const auto fast = Load("fast", "auto");
  const auto exact = Load("full", "f32");
  const auto fast_session = Open(*fast);
  const auto exact_session = Open(*exact);
  int equal = 0;
  int left_out = 0;
  ASSERT_EQ(json.at("prompts").size(), 20u);
  for (const auto& c : json.at("prompts")) {
    const auto prompt = c.at("prompt").get<std::vector<int32_t>>();
    if (prompt.size() > kMaxPrompt) {
      ++left_out;
      continue;
    }
    const auto expected = c.at("generated").get<std::vector<int32_t>>();
    const auto margins = c.at("margins").get<std::vector<double>>();
    ASSERT_TRUE(fast_session->Prompt(prompt).ok());
    const auto result =
        fast_session->Generate({.max_tokens = static_cast<int64_t>(expected.size())});
    ASSERT_TRUE(result.ok()) << result.status().message();
    const auto at = static_cast<size_t>(std::mismatch(expected.begin(), expected.end(),
                                                      result->tokens.begin(), result->tokens.end())
                                            .first -
                                        expected.begin());
    if (at == expected.size()) {
      ++equal;
      continue;
    }
    const std::vector<int32_t> before(expected.begin(), expected.begin() + static_cast<long>(at));
    const auto rounded = LogitsAfter(*fast, *fast_session, prompt, before);
    const auto precise = LogitsAfter(*exact, *exact_session, prompt, before);
    double error = 0;
    for (size_t i = 0; i < precise.size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(rounded[i]) - precise[i]));
    }
    fmt::print("{} tokens: differs at {}, margin {}, error {:.3f}\n", prompt.size(), at,
               margins[at], error);
    EXPECT_EQ(std::max_element(precise.begin(), precise.end()) - precise.begin(), expected[at]);
    EXPECT_LE(margins[at], 2 * error) << prompt.size() << " tokens, step " << at;
  }
  fmt::print("{} of 20 texts equal transformers', {} left out: prompts of more than {} tokens\n",
             equal, left_out, kMaxPrompt);
  EXPECT_GE(equal + left_out, 15);
  EXPECT_GE(equal, 3);
}

// More text than the tokenizer takes is refused.
TEST(ShippedModel, RefusesTextsThatAreTooLong) {
  const auto engine = Load("fast", "auto");
  std::string text((size_t{256} << 20) + 1, 'a');
  const auto message = "the text has 268435457 bytes, expected at most 268435456";
  for (const auto& ids :
       {engine->Tokenize(text, true, true), engine->ChatPrompt({{"user", text}})}) {
    ASSERT_FALSE(ids.ok());
    EXPECT_EQ(ids.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(ids.status().message(), message);
  }
}

}  // namespace
}  // namespace omnikv
