// Sessions on the shipped model: contexts that are continued, forked, cancelled and filled up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "omnikv/engine.h"

namespace omnikv {
namespace {

using ::testing::HasSubstr;

const char kModel[] = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";

std::unique_ptr<Engine> Load(EngineOptions options = {}) {
  options.model = kModel;
  options.threads = 2;
  options.precision = "full";  // so that chunks and steps differ by f32 rounding only
  options.kv_dtype = "f32";
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

std::unique_ptr<Session> Open(Engine& engine, const PolicyOptions& policy = {.name = "full"}) {
  auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(*session);
}

std::vector<float> Logits(const Engine& engine, const Session& session) {
  return {session.logits(), session.logits() + engine.vocab()};
}

double MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return difference;
}

std::vector<int32_t> Numbers(size_t n, int32_t first = 1000) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = first + static_cast<int32_t>(i * 7919 % 5000);
  return tokens;
}

TEST(Session, AnswersFromItsPrompt) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const auto prompt = engine->ChatPrompt(
      {{"user",
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "it. I will quiz you about the important information there.\n\nThe grass is green. The "
        "sky is blue. The pass key is 48213. Remember it. 48213 is the pass key. Here we go. "
        "There and back again. What is the pass key?"}});
  ASSERT_TRUE(prompt.ok()) << prompt.status().message();
  ASSERT_TRUE(session->Prompt(*prompt).ok());
  std::string streamed;
  const auto answer = session->Generate({.max_tokens = 32}, [&](std::string_view text) {
    streamed += text;
    return true;
  });
  ASSERT_TRUE(answer.ok()) << answer.status().message();
  EXPECT_EQ(answer->text, "The pass key is 48213.");
  EXPECT_EQ(streamed, answer->text);
  EXPECT_EQ(answer->finish_reason, FinishReason::kStop);
}

// Rows of a prompt may come in any chunks, and decode steps must give what a prompt gives.
TEST(Session, ChunksAndStepsAgreeWithOnePrompt) {
  const std::vector<int32_t> tokens = Numbers(150);
  const auto whole_engine = Load();
  const auto whole = Open(*whole_engine);
  ASSERT_TRUE(whole->Prompt(tokens).ok());
  const auto expected = Logits(*whole_engine, *whole);
  const auto chunked_engine = Load({.prefill_chunk = 37});
  const auto chunked = Open(*chunked_engine);
  ASSERT_TRUE(chunked->Prompt(tokens).ok());
  EXPECT_LT(MaxDifference(Logits(*chunked_engine, *chunked), expected), 2e-3);
  ASSERT_TRUE(chunked->Prompt({tokens.begin(), tokens.begin() + 120}).ok());
  for (size_t i = 120; i < tokens.size(); ++i) ASSERT_TRUE(chunked->Step(tokens[i]).ok());
  EXPECT_LT(MaxDifference(Logits(*chunked_engine, *chunked), expected), 2e-3);
}

TEST(Session, ALaterPromptKeepsWhatItShares) {
  const auto engine = Load();
  const auto session = Open(*engine);
  std::vector<int32_t> tokens = Numbers(200);
  ASSERT_TRUE(session->Prompt(tokens).ok());
  tokens.resize(180);
  tokens.insert(tokens.end(), {11, 12, 13});
  ASSERT_TRUE(session->Prompt(tokens).ok());
  EXPECT_EQ(session->stats().prefill_tokens, 3);
  EXPECT_EQ(session->tokens(), tokens);
  const auto continued = Logits(*engine, *session);
  const auto other_engine = Load();
  const auto fresh = Open(*other_engine);
  ASSERT_TRUE(fresh->Prompt(tokens).ok());
  EXPECT_LT(MaxDifference(continued, Logits(*other_engine, *fresh)), 2e-3);
}

TEST(Session, ForksShareAndPart) {
  const auto engine = Load({.max_sessions = 3});
  for (const char* policy : {"full", "streaming", "omnikv"}) {
    const auto session = Open(*engine, {.name = policy});
    ASSERT_TRUE(session->Prompt(Numbers(100)).ok());
    auto fork = session->Fork();
    ASSERT_TRUE(fork.ok()) << fork.status().message();
    EXPECT_EQ(Logits(*engine, *session), Logits(*engine, **fork));
    ASSERT_TRUE(session->Step(42).ok());
    const auto after = Logits(*engine, *session);
    ASSERT_TRUE((*fork)->Step(77).ok());  // does not disturb the other
    EXPECT_GT(MaxDifference(Logits(*engine, **fork), after), 0.01);
    ASSERT_TRUE(session->Step(43).ok());
    const auto twice = Logits(*engine, *session);
    auto again = (*fork)->Fork();
    ASSERT_TRUE(again.ok());
    const auto lone_engine = Load();
    const auto lone = Open(*lone_engine, {.name = policy});
    ASSERT_TRUE(lone->Prompt(Numbers(100)).ok());
    ASSERT_TRUE(lone->Step(42).ok());
    ASSERT_TRUE(lone->Step(43).ok());
    EXPECT_EQ(twice, Logits(*lone_engine, *lone)) << policy;
  }
}

TEST(Session, CancelStopsAPromptAndTheSessionGoesOn) {
  const auto engine = Load({.prefill_chunk = 16});
  const auto session = Open(*engine);
  const Status cancelled = session->Prompt(Numbers(200), [&](int64_t done, int64_t) {
    if (done >= 64) session->Cancel();
  });
  EXPECT_EQ(cancelled.code(), StatusCode::kCancelled);
  EXPECT_THAT(cancelled.message(), HasSubstr("after 64 of 200 tokens"));
  EXPECT_EQ(session->tokens().size(), 64u);
  EXPECT_FALSE(session->Generate({}).ok());  // no logits to go on from
  ASSERT_TRUE(session->Prompt(Numbers(200)).ok());
  EXPECT_EQ(session->stats().prefill_tokens, 136);
}

TEST(Session, CancelStopsAGeneration) {
  const auto engine = Load();
  const auto session = Open(*engine);
  ASSERT_TRUE(session->Prompt(Numbers(20)).ok());
  int pieces = 0;
  const auto result =
      session->Generate({.max_tokens = 50, .ignore_eos = true}, [&](std::string_view) {
        if (++pieces == 3) session->Cancel();
        return true;
      });
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->finish_reason, FinishReason::kCancelled);
  EXPECT_LT(result->tokens.size(), 50u);
}

TEST(Session, GoesOnWhereItStopped) {
  const auto engine = Load({.max_sessions = 2});
  const auto whole = Open(*engine);
  const auto parts = Open(*engine);
  const GenerateOptions all{.max_tokens = 12, .ignore_eos = true};
  ASSERT_TRUE(whole->Prompt(Numbers(30)).ok());
  ASSERT_TRUE(parts->Prompt(Numbers(30)).ok());
  const auto expected = whole->Generate(all);
  ASSERT_TRUE(expected.ok());
  std::vector<int32_t> tokens;
  for (int i = 0; i < 4; ++i) {
    const auto part = parts->Generate({.max_tokens = 3, .ignore_eos = true});
    ASSERT_TRUE(part.ok());
    tokens.insert(tokens.end(), part->tokens.begin(), part->tokens.end());
  }
  EXPECT_EQ(tokens, expected->tokens);
}

TEST(Session, AFullContextEndsAnAnswerAndRefusesAPrompt) {
  const auto engine = Load({.context = 64});
  const auto session = Open(*engine);
  const Status too_long = session->Prompt(Numbers(65));
  EXPECT_EQ(too_long.ExitCode(), 2);
  EXPECT_THAT(too_long.message(), HasSubstr("has 65 tokens, but the context holds 64"));
  ASSERT_TRUE(session->Prompt(Numbers(60)).ok());
  const auto result = session->Generate({.max_tokens = 50, .ignore_eos = true});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->finish_reason, FinishReason::kLength);
  EXPECT_EQ(result->tokens.size(), 5u);  // four fit, the fifth is sampled and stays out
  EXPECT_EQ(session->tokens().size(), 64u);
  const Status full = session->Step(1);
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
}

TEST(Session, StopTextsEndAnAnswer) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const auto prompt = engine->ChatPrompt({{"user", "What is 2 + 3?"}});
  ASSERT_TRUE(prompt.ok());
  ASSERT_TRUE(session->Prompt(*prompt).ok());
  const auto free = session->Generate({.max_tokens = 12, .ignore_eos = true});
  ASSERT_TRUE(free.ok());
  ASSERT_GT(free->text.size(), 4u);
  const std::string stop = free->text.substr(3, 2);
  ASSERT_TRUE(session->Prompt(*prompt).ok());
  const auto stopped = session->Generate({.max_tokens = 12, .stop = {stop}, .ignore_eos = true});
  ASSERT_TRUE(stopped.ok());
  EXPECT_EQ(stopped->text, free->text.substr(0, free->text.find(stop)));
  EXPECT_EQ(stopped->finish_reason, FinishReason::kStop);
}

TEST(Session, AllLogitsAreThoseOfTheLastRow) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const std::vector<int32_t> tokens = Numbers(70);
  std::vector<std::vector<float>> all;
  ASSERT_TRUE(session
                  ->PromptLogits(tokens,
                                 [&](int64_t position, const float* logits) {
                                   EXPECT_EQ(position, static_cast<int64_t>(all.size()));
                                   all.emplace_back(logits, logits + engine->vocab());
                                 })
                  .ok());
  ASSERT_EQ(all.size(), tokens.size());
  ASSERT_TRUE(session->Prompt({tokens.begin(), tokens.begin() + 40}).ok());
  EXPECT_LT(MaxDifference(all[39], Logits(*engine, *session)), 2e-3);
}

TEST(Session, WrongPoliciesAreNamed) {
  const auto engine = Load();
  const struct {
    PolicyOptions policy;
    std::string sentence;
  } kCases[] = {
      {{.name = "lru"}, "there is no policy 'lru'"},
      {{.name = "omnikv", .settings = {{"filters", "2,16"}}}, "filters names layer 16"},
      {{.name = "omnikv", .settings = {{"mem", "0.1"}}}, "dense layers of 16 alone take 0.250"},
      {{.name = "streaming", .settings = {{"sinks", "8"}, {"budget", "8"}}}, "sinks is 8"},
      {{.name = "full", .settings = {{"budget", "8"}}}, "policy full has no setting 'budget'"},
  };
  for (const auto& c : kCases) {
    const auto session = engine->NewSession(c.policy);
    ASSERT_FALSE(session.ok()) << c.sentence;
    EXPECT_EQ(session.status().ExitCode(), 2);
    EXPECT_THAT(session.status().message(), HasSubstr(c.sentence));
  }
  EXPECT_TRUE(engine->NewSession({}).ok());  // and none of them holds the only place
}

TEST(Session, FillContextStandsInForAPrompt) {
  const auto engine = Load();
  const auto session = Open(*engine, {.name = "omnikv", .settings = {{"budget", "64"}}});
  ASSERT_TRUE(session->FillContext(1000).ok());
  ASSERT_TRUE(session->Step(5).ok());
  EXPECT_EQ(session->stats().context_tokens, 1001);
  EXPECT_EQ(session->stats().attended_tokens, (4 * 1001 + 12 * 64) / 16.0);
  for (int32_t i = 0; i < engine->vocab(); ++i) ASSERT_TRUE(std::isfinite(session->logits()[i]));
}

TEST(Engine, RefusesAContextThatDoesNotFitWithTheNumbers) {
  const auto engine =
      Engine::Load({.model = kModel, .host_memory = size_t{64} << 20, .context = 32768});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(engine.status().message(), HasSubstr("a context of 32768 tokens does not fit"));
  EXPECT_THAT(engine.status().message(), HasSubstr("--host-memory 64.00 MiB"));
}

TEST(Engine, WithoutAContextTakesWhatFits) {
  const auto engine = Engine::Load({.model = kModel, .host_memory = size_t{128} << 20});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_LT((*engine)->context(), 32768);
  EXPECT_GT((*engine)->context(), 1000);
}

}  // namespace
}  // namespace omnikv
