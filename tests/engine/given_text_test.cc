// The logits of given texts by a policy's decode steps: those of Session::Step, whoever shares the
// steps, and the policy's own.
#include "engine/given_text.h"
#include "../test_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "omnikv/engine.h"

namespace omnikv::given_text_test {
namespace {

using ::testing::HasSubstr;

const std::string kGoldens = TestData("tests/golden/");
const std::string kRandom = kGoldens + "policy_model";  // 8 layers, vocabulary 128

using Rows = std::vector<std::vector<float>>;

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

// max|difference| / max|want| over all rows.
double Error(const Rows& got, const Rows& want) {
  EXPECT_EQ(got.size(), want.size());
  if (got.size() != want.size()) return INFINITY;
  double error = 0;
  double size = 0;
  for (size_t r = 0; r < want.size(); ++r) {
    for (size_t i = 0; i < want[r].size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(got[r][i]) - want[r][i]));
      size = std::max(size, std::abs(static_cast<double>(want[r][i])));
    }
  }
  return error / size;
}

const PolicyOptions kFull{.name = "full"};
const PolicyOptions kOmnikv{
    .name = "omnikv",
    .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}};
const PolicyOptions kStreaming{.name = "streaming", .settings = {{"budget", "24"}}};

class GivenTextTest : public ::testing::TestWithParam<const char*> {
 protected:
  // Null, and the test skipped, where there is no such device.
  std::unique_ptr<Engine> Load(EngineOptions options = {}) {
    if (options.model.empty()) options.model = kRandom;
    options.device = GetParam();
    options.threads = 2;
    options.precision = "full";
    options.kv_dtype = "f32";
    options.context = 256;
    auto engine = Engine::Load(options);
    if (engine.status().code() == StatusCode::kUnsupported) {
      skip_ = engine.status().message();
      return nullptr;
    }
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  // Of the largest logit: bits on `ref`, sums of f32 in another order elsewhere.
  double Tolerance() const {
    const std::string device = GetParam();
    return device == "ref" ? 0 : device == "cpu" ? 1e-5 : 1e-4;
  }
  std::string skip_;
};

// The rows of each text, and the number of steps.
std::vector<Rows> Decode(Engine& engine, const PolicyOptions& policy,
                         const std::vector<GivenText>& texts, int64_t* steps = nullptr) {
  std::vector<Rows> rows(texts.size());
  const auto taken =
      DecodeGivenTexts(CoreOf(engine), policy, texts,
                       [&](size_t text, int64_t position, const float* logits) -> Status {
                         EXPECT_EQ(position, texts[text].prompt_tokens - 1 +
                                                 static_cast<int64_t>(rows[text].size()));
                         rows[text].emplace_back(logits, logits + engine.vocab());
                         return {};
                       });
  EXPECT_TRUE(taken.ok()) << taken.status().message();
  if (taken.ok() && steps != nullptr) *steps = *taken;
  return rows;
}

// The same by hand.
Rows BySteps(Engine& engine, const PolicyOptions& policy, const GivenText& text) {
  const auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  const auto first_step = text.tokens.begin() + text.prompt_tokens;
  EXPECT_TRUE((*session)->Prompt({text.tokens.begin(), first_step}).ok());
  Rows rows;
  const auto take = [&] {
    rows.emplace_back((*session)->logits(), (*session)->logits() + engine.vocab());
  };
  take();
  for (auto token = first_step; token != text.tokens.end(); ++token) {
    EXPECT_TRUE((*session)->Step(*token).ok());
    take();
  }
  return rows;
}

Rows OfAPrompt(Engine& engine, const PolicyOptions& policy, const std::vector<int32_t>& tokens) {
  const auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  Rows rows;
  EXPECT_TRUE((*session)
                  ->PrefillLogits(tokens,
                                  [&](int64_t, const float* logits) {
                                    rows.emplace_back(logits, logits + engine.vocab());
                                  })
                  .ok());
  return rows;
}

TEST_P(GivenTextTest, OneTextIsStepsByHandBitForBit) {
  const auto engine = Load();
  if (engine == nullptr) GTEST_SKIP() << skip_;
  for (const PolicyOptions& policy : {kFull, kOmnikv, kStreaming}) {
    for (const int64_t prompt : {1, 40, 120}) {
      const GivenText text{.tokens = Numbers(120, 1), .prompt_tokens = prompt};
      int64_t steps = 0;
      const Rows got = Decode(*engine, policy, {text}, &steps)[0];
      EXPECT_EQ(steps, 120 - prompt);
      EXPECT_EQ(got.size(), static_cast<size_t>(121 - prompt));
      EXPECT_TRUE(got == BySteps(*engine, policy, text)) << policy.name << ", prompt " << prompt;
    }
  }
}

// Five texts in three places: they wait, join and leave; steps are shared.
TEST_P(GivenTextTest, TextsTogetherAreEachAlone) {
  const auto engine = Load({.max_sessions = 3});
  if (engine == nullptr) GTEST_SKIP() << skip_;
  std::vector<GivenText> texts;
  for (const size_t n : {110, 41, 90, 40, 100}) {
    texts.push_back({.tokens = Numbers(n, n), .prompt_tokens = 40});
  }
  for (const PolicyOptions& policy : {kFull, kOmnikv, kStreaming}) {
    int64_t steps = 0;
    const std::vector<Rows> together = Decode(*engine, policy, texts, &steps);
    EXPECT_EQ(steps, 70);  // 70, 1 and then 60, 50
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_LE(Error(together[i], BySteps(*engine, policy, texts[i])), Tolerance())
          << policy.name << ", text " << i;
    }
  }
}

// The policy acts in every step: what full attention gives is far from it. Of the same tokens as a
// prompt, only streaming gives what its steps give.
TEST_P(GivenTextTest, StepsArePolicysOwnAndPromptsAreDense) {
  const auto engine = Load();
  if (engine == nullptr) GTEST_SKIP() << skip_;
  const std::vector<int32_t> tokens = Numbers(120, 1);
  const GivenText text{.tokens = tokens};
  const double exact = std::max(Tolerance(), 1e-6);
  const Rows dense = OfAPrompt(*engine, kFull, tokens);
  EXPECT_LE(Error(Decode(*engine, kFull, {text})[0], dense), exact);
  for (const PolicyOptions& policy : {kOmnikv, kStreaming}) {
    const Rows own = Decode(*engine, policy, {text})[0];
    const Rows prompt = OfAPrompt(*engine, policy, tokens);
    const auto from_60 = [](const Rows& rows) { return Rows(rows.begin() + 60, rows.end()); };
    EXPECT_GT(Error(from_60(own), from_60(dense)), 0.01) << policy.name;
    if (policy.name == "omnikv") {
      EXPECT_TRUE(prompt == dense);
    } else {
      EXPECT_LE(Error(prompt, own), exact);
    }
  }
}

// Rotations that depend on the prompt's length allow no batch: one after another.
TEST_P(GivenTextTest, WhatTakesNoBatchRunsOneAfterAnother) {
  const auto engine = Load({.model = kGoldens + "models/llama_longrope", .max_sessions = 2});
  if (engine == nullptr) GTEST_SKIP() << skip_;
  const std::vector<GivenText> texts = {{.tokens = Numbers(30, 1), .prompt_tokens = 20},
                                        {.tokens = Numbers(33, 1), .prompt_tokens = 20}};
  int64_t steps = 0;
  const std::vector<Rows> rows = Decode(*engine, kFull, texts, &steps);
  EXPECT_EQ(steps, 23);
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_TRUE(rows[i] == BySteps(*engine, kFull, texts[i])) << "text " << i;
  }
}

TEST_P(GivenTextTest, RefusesWhatItCannotRunAndGivesThePlacesBack) {
  const auto engine = Load({.max_sessions = 2});
  if (engine == nullptr) GTEST_SKIP() << skip_;
  const GivenText good{.tokens = Numbers(20, 1)};
  const auto message = [&](const GivenText& bad) {
    bool called = false;
    const auto steps = DecodeGivenTexts(CoreOf(*engine), kFull, std::vector<GivenText>{good, bad},
                                        [&](size_t, int64_t, const float*) -> Status {
                                          called = true;
                                          return {};
                                        });
    EXPECT_FALSE(called);
    EXPECT_EQ(steps.status().code(), StatusCode::kInvalidArgument);
    return steps.status().message();
  };
  EXPECT_THAT(message({}), HasSubstr("text 2: "));
  EXPECT_THAT(message({.tokens = {1, 2, 128}}), HasSubstr("token 128"));
  EXPECT_THAT(message({.tokens = Numbers(257, 1)}), HasSubstr("257 tokens"));
  EXPECT_THAT(message({.tokens = {1, 2}, .prompt_tokens = 3}),
              HasSubstr("a prompt of 3 tokens is asked for, expected 1 to all 2"));
  EXPECT_THAT(message({.tokens = {1, 2}, .prompt_tokens = 0}), HasSubstr("a prompt of 0 tokens"));
  // One that takes no more ends the run.
  for (const size_t n_texts : {1, 2}) {
    int calls = 0;
    const auto steps = DecodeGivenTexts(
        CoreOf(*engine), kFull, std::vector<GivenText>(n_texts, good),
        [&](size_t, int64_t, const float*) { return ++calls < 5 ? Status() : Failed("no more"); });
    EXPECT_EQ(steps.status().message(), "no more");
    EXPECT_EQ(calls, 5);
  }
  EXPECT_EQ(Decode(*engine, kFull, {good, good}).size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Devices, GivenTextTest, ::testing::Values("ref", "cpu", "cuda"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace omnikv::given_text_test
