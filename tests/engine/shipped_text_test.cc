// The shipped model's greedy text against transformers' on the same dequantised weights in f32
// (tests/golden/shipped_text.json, made by scripts/make_text_goldens.py).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "text_parity.h"

namespace omnikv::shipped_text_test {
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

constexpr int kForcedSteps = 64;  // that measure the error

// Sanitizers slow this down some fifty times: the long prompts would take an hour.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kMaxPrompt = 600;
#else
constexpr size_t kMaxPrompt = 1 << 20;
#endif

// Text must be equal. As it runs by default it may differ where transformers' margin is below twice
// what its rounding moved logits by (against ours in f32) in steps of other prompts.
TEST(ShippedModel, GreedyTextIsTransformers) {
  std::ifstream file(OMNIKV_SOURCE_DIR "/tests/golden/shipped_text.json");
  const auto json = nlohmann::json::parse(file);
  const auto& cases = json.at("prompts");
  ASSERT_EQ(cases.size(), 20u);
  const auto tokens_of = [](const nlohmann::json& c, const char* key) {
    return c.at(key).get<std::vector<int32_t>>();
  };
  const auto fast = Load("fast", "auto");
  const auto exact = Load("full", "f32");
  const auto fast_session = Open(*fast);
  const auto exact_session = Open(*exact);
  // For the prompts of even and of odd numbers: the error in the shortest of the others.
  const auto error_without = [&](size_t half) {
    const nlohmann::json* shortest = nullptr;
    for (size_t i = 1 - half; i < cases.size(); i += 2) {
      if (shortest == nullptr || cases[i].at("prompt").size() < shortest->at("prompt").size()) {
        shortest = &cases[i];
      }
    }
    return TeacherForcedError(*exact_session, *fast_session, tokens_of(*shortest, "prompt"),
                              kForcedSteps, fast->vocab());
  };
  const std::array<double, 2> errors = {error_without(0), error_without(1)};
  int equal = 0;
  int left_out = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Tokens prompt = tokens_of(cases[i], "prompt");
    if (prompt.size() > kMaxPrompt) {
      ++left_out;
      continue;
    }
    const Tokens generated = tokens_of(cases[i], "generated");
    const auto margins = cases[i].at("margins").get<std::vector<double>>();
    ASSERT_EQ(margins.size(), generated.size());
    std::vector<Choice> want;
    for (size_t t = 0; t < generated.size(); ++t) want.push_back({generated[t], margins[t]});
    ASSERT_TRUE(fast_session->Prompt(prompt).ok());
    const auto result =
        fast_session->Generate({.max_tokens = static_cast<int64_t>(generated.size())});
    ASSERT_TRUE(result.ok()) << result.status().message();
    const std::string what = fmt::format("prompt {} of {} tokens", i, prompt.size());
    equal += ExpectSameText(what, want, result->tokens, errors[i % 2]) ? 1 : 0;
  }
  fmt::print(
      "{} of {} texts equal transformers', {} left out: prompts of more than {} tokens; rounding "
      "moved logits by {:.3f} and {:.3f} in other texts\n",
      equal, cases.size(), left_out, kMaxPrompt, errors[0], errors[1]);
  EXPECT_LT(left_out, 17);
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
}  // namespace omnikv::shipped_text_test
