// Sessions on the shipped model, on the CPU and on a card: contexts that are continued, forked,
// cancelled and filled up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <latch>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "../test_data.h"
#include "golden_data.h"
#include "omnikv/engine.h"
#include "on_device.h"

namespace omnikv::session_test {
namespace {

using ::testing::HasSubstr;

const std::string kModel = TestData("models/omnikv-tiny-q8_0.gguf");
const std::string kGoldens = TestData("tests/golden/models");
const std::string kRandom = TestData("tests/golden/policy_model");  // every layer matters

std::unique_ptr<Engine> LoadOn(const std::string& device, EngineOptions options = {}) {
  if (options.model.empty()) options.model = kModel;
  options.device = device;
  options.threads = 2;
  options.precision = "full";  // so that chunks and steps differ by f32 rounding only
  options.kv_dtype = "f32";
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

class SessionTest : public OnDevice {
 protected:
  static std::unique_ptr<Engine> Load(EngineOptions options = {}) {
    return LoadOn(GetParam(), std::move(options));
  }
  // Of K/V and what policies keep.
  static size_t KvBytes(const Session& session) {
    const SessionStats stats = session.stats();
    return GetParam() == "cuda" ? stats.held_bytes.device : stats.held_bytes.host;
  }
};

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

TEST_P(SessionTest, AnswersFromItsPrompt) {
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
TEST_P(SessionTest, ChunksAndStepsAgreeWithOnePrompt) {
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

TEST_P(SessionTest, ALaterPromptKeepsWhatItShares) {
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

// What a policy forgets by choice is given back too; later turns go on from what it keeps.
TEST_P(SessionTest, ForgottenRowsAreGivenBack) {
  const auto engine = Load({.model = kRandom, .context = 1024, .max_sessions = 2});
  const std::vector<PolicyOptions> policies = {
      {.name = "tova", .settings = {{"budget", "100"}}},
      {.name = "snapkv", .settings = {{"budget", "100"}, {"turn", "recompress"}}},
      {.name = "snapkv", .settings = {{"budget", "100"}}}};
  const size_t block = [&] {
    const auto full = Open(*engine, {.name = "full"});
    EXPECT_TRUE(full->Prompt(std::vector<int32_t>(64, 5)).ok());
    return KvBytes(*full);
  }();
  for (const PolicyOptions& policy : policies) {
    const auto session = Open(*engine, policy);
    SCOPED_TRACE(session->stats().settings);
    const size_t own = KvBytes(*session);  // the policy's
    const auto blocks = [&] { return (KvBytes(*session) - own) / block; };
    std::vector<int32_t> tokens(400);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 120) + 3;
    ASSERT_TRUE(session->Prompt(tokens).ok());
    EXPECT_EQ(blocks(), 2u);
    EXPECT_EQ(session->stats().context_tokens, 400);
    const bool evicts = policy.name == "tova";
    for (int32_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(session->Step(i + 3).ok());
      EXPECT_EQ(session->stats().attended_tokens, evicts ? 101 : 101 + i);
    }
    EXPECT_EQ(blocks(), evicts ? 2u : 4u);
    // The next turn reads what is left, and leaves as much.
    tokens = session->tokens();
    tokens.insert(tokens.end(), 30, 7);
    ASSERT_TRUE(session->Prompt(tokens).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 30);
    const bool all = policy.settings.size() == 1 && !evicts;
    EXPECT_EQ(blocks(), all ? 4u : 2u);
    // Of what is gone nothing can be made: such a prompt starts over.
    tokens.resize(350);
    ASSERT_TRUE(session->Prompt(tokens).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 350);
    const auto fresh = Open(*engine, policy);
    ASSERT_TRUE(fresh->Prompt(tokens).ok());
    EXPECT_EQ(Logits(*engine, *session), Logits(*engine, *fresh));
  }
}

// What streaming never reads again is given back; a prompt that is cut back into it starts over.
TEST_P(SessionTest, DroppedTokensAreGivenBack) {
  const auto engine = Load({.max_sessions = 2});
  const PolicyOptions policy{.name = "streaming", .settings = {{"budget", "24"}}};
  const auto session = Open(*engine, policy);
  ASSERT_TRUE(session->Prompt(Numbers(64)).ok());
  const size_t block = KvBytes(*session);
  ASSERT_GT(block, 0u);
  ASSERT_TRUE(session->Prompt(Numbers(400)).ok());
  for (int32_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(session->Step(i).ok());
    EXPECT_LE(KvBytes(*session), 3 * block);  // the sinks' and at most two of the window
  }
  ASSERT_TRUE(session->Prompt(Numbers(300)).ok());
  const auto cut_back = Logits(*engine, *session);
  const auto fresh = Open(*engine, policy);
  ASSERT_TRUE(fresh->Prompt(Numbers(300)).ok());
  EXPECT_EQ(cut_back, Logits(*engine, *fresh));
}

TEST_P(SessionTest, ForksShareAndPart) {
  const auto engine = Load({.max_sessions = 3});
  const std::vector<PolicyOptions> policies = {
      // budgets that make them choose, from a state
      {.name = "full"},
      {.name = "streaming", .settings = {{"budget", "24"}}},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"budget", "24"}, {"selector", "exp"}, {"window", "8"}}},
      {.name = "tova", .settings = {{"budget", "24"}}},
      {.name = "snapkv", .settings = {{"budget", "24"}, {"window", "8"}}},
      {.name = "pyramidkv", .settings = {{"budget", "24"}, {"window", "8"}}},
      {.name = "quest", .settings = {{"budget", "32"}}},
      {.name = "quest", .settings = {{"budget", "128"}, {"page", "64"}}}};
  for (const PolicyOptions& policy : policies) {
    const auto session = Open(*engine, policy);
    ASSERT_TRUE(session->Prompt(Numbers(200)).ok());
    auto fork = session->Fork();
    ASSERT_TRUE(fork.ok()) << fork.status().message();
    EXPECT_EQ(Logits(*engine, *session), Logits(*engine, **fork));
    ASSERT_TRUE(session->Step(42).ok());
    const auto after = Logits(*engine, *session);
    ASSERT_TRUE((*fork)->Step(77).ok());  // does not disturb the other
    ASSERT_TRUE((*fork)->Step(78).ok());
    EXPECT_GT(MaxDifference(Logits(*engine, **fork), after), 0.01);
    ASSERT_TRUE(session->Step(43).ok());
    const auto twice = Logits(*engine, *session);
    auto again = (*fork)->Fork();
    ASSERT_TRUE(again.ok());
    const auto lone_engine = Load();
    const auto alone = [&](int32_t first, int32_t second) {
      const auto lone = Open(*lone_engine, policy);
      EXPECT_TRUE(lone->Prompt(Numbers(200)).ok());
      EXPECT_TRUE(lone->Step(first).ok());
      EXPECT_TRUE(lone->Step(second).ok());
      return Logits(*lone_engine, *lone);
    };
    EXPECT_EQ(twice, alone(42, 43)) << policy.name;
    EXPECT_EQ(Logits(*engine, **fork), alone(77, 78)) << policy.name;
  }
}

// longrope has other factors past its original context (16 here), so keys that were rotated for a
// shorter one are not kept.
TEST_P(SessionTest, LongropeRotatesAnewWhenAPromptCrossesItsLimit) {
  EngineOptions options{.model = kGoldens + "/llama_longrope",
                        .device = GetParam(),
                        .threads = 2,
                        .kv_dtype = "f32",
                        .precision = "full",
                        .max_sessions = 3};
  const auto engine = Engine::Load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto tokens = [](size_t n) {
    std::vector<int32_t> t(n);
    for (size_t i = 0; i < n; ++i) t[i] = static_cast<int32_t>(i * 37 % 200);
    return t;
  };
  const auto fresh = [&](size_t n, int32_t next) {
    const auto session = Open(**engine);
    EXPECT_TRUE(session->Prompt(tokens(n)).ok());
    EXPECT_TRUE(session->Step(next).ok());
    return Logits(**engine, *session);
  };
  const auto session = Open(**engine);
  ASSERT_TRUE(session->Prompt(tokens(10)).ok());
  for (const size_t n : {40, 12, 16, 17}) {
    const int64_t kept = n == 16 ? 12 : 0;  // the only one on the side of the one before
    ASSERT_TRUE(session->Prompt(tokens(n)).ok());
    EXPECT_EQ(session->stats().prefill_tokens, static_cast<int64_t>(n) - kept);
    const auto fork = session->Fork();  // takes over how the keys are rotated
    ASSERT_TRUE(fork.ok());
    ASSERT_TRUE((*fork)->Step(7).ok());
    EXPECT_LT(MaxDifference(Logits(**engine, **fork), fresh(n, 7)), 1e-4) << n;
  }
}

// A context's keys stay rotated as they were while it grows a token at a time; so does its fork's.
TEST_P(SessionTest, AForkRotatesAsItsParentsKeysAre) {
  const auto engine = Engine::Load({.model = kGoldens + "/llama_dynamic",
                                    .device = GetParam(),
                                    .threads = 2,
                                    .context = 64,
                                    .kv_dtype = "f32",
                                    .max_sessions = 2});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto session = Open(**engine);
  ASSERT_TRUE(session->Prompt(std::vector<int32_t>(4, 5)).ok());
  ASSERT_TRUE(session->Prompt(std::vector<int32_t>(60, 5)).ok());  // keeps the first one's
  const auto fork = session->Fork();
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(session->Step(7).ok());
  ASSERT_TRUE((*fork)->Step(7).ok());
  EXPECT_EQ(Logits(**engine, *session), Logits(**engine, **fork));
}

TEST_P(SessionTest, CancelStopsAPromptAndTheSessionGoesOn) {
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

TEST_P(SessionTest, CancelInTheLastChunkStopsAPromptToo) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const Status cancelled =
      session->Prompt(Numbers(30), [&](int64_t, int64_t) { session->Cancel(); });
  EXPECT_EQ(cancelled.code(), StatusCode::kCancelled);
  EXPECT_THAT(cancelled.message(), HasSubstr("after 30 of 30 tokens"));
  EXPECT_EQ(session->tokens(), Numbers(30));
  EXPECT_FALSE(session->Generate({}).ok());
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  EXPECT_EQ(session->stats().prefill_tokens, 1);
}

TEST_P(SessionTest, CancelAfterAPromptStopsItsGeneration) {
  const auto engine = Load();
  const auto session = Open(*engine);
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  session->Cancel();
  const auto stopped = session->Generate({.max_tokens = 5, .ignore_eos = true});
  ASSERT_TRUE(stopped.ok());
  EXPECT_EQ(stopped->finish_reason, FinishReason::kCancelled);
  EXPECT_TRUE(stopped->tokens.empty());
  const auto next = session->Generate({.max_tokens = 5, .ignore_eos = true});
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(next->tokens.size(), 5u);
  session->Cancel();  // for nothing that runs: a new prompt forgets it
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  EXPECT_EQ(session->Generate({.max_tokens = 5, .ignore_eos = true})->tokens.size(), 5u);
}

TEST_P(SessionTest, CancelComesFromAnyThread) {
  const auto engine = Load({.prefill_chunk = 16});
  const auto session = Open(*engine);
  // Runs `call` with a function that hands over to a thread that cancels.
  const auto with_canceller = [&](const auto& call) {
    std::latch reached(1);
    std::latch cancelled(1);
    std::thread canceller([&] {
      reached.wait();
      session->Cancel();
      cancelled.count_down();
    });
    bool done = false;
    call([&] {
      if (std::exchange(done, true)) return;
      reached.count_down();
      cancelled.wait();
    });
    if (!done) reached.count_down();
    canceller.join();
  };
  with_canceller([&](const auto& cancel) {
    const Status status = session->Prompt(Numbers(200), [&](int64_t done, int64_t) {
      if (done >= 64) cancel();
    });
    EXPECT_THAT(status.message(), HasSubstr("after 64 of 200 tokens"));
  });
  ASSERT_TRUE(session->Prompt(Numbers(200)).ok());
  with_canceller([&](const auto& cancel) {
    const auto result =
        session->Generate({.max_tokens = 500, .ignore_eos = true}, [&](std::string_view) {
          cancel();
          return true;
        });
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->finish_reason, FinishReason::kCancelled);
    EXPECT_LT(result->tokens.size(), 500u);
  });
}

// The rows that are in are then the whole prompt: a step is what it is after a prompt of just
// those, its own token, generated, is read, and the policy's window is over their last queries.
TEST_P(SessionTest, StepsGoOnFromACancelledPrompt) {
  const auto engine = Load({.model = kRandom, .prefill_chunk = 16, .max_sessions = 3});
  std::vector<int32_t> prompt(150);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 37 % 120) + 3;
  const std::vector<int32_t> other(prompt.rbegin(), prompt.rend());
  const std::vector<int32_t> part(prompt.begin(), prompt.begin() + 64);
  const PolicyOptions kPolicies[] = {
      {.name = "full"},
      {.name = "streaming", .settings = {{"budget", "24"}}},
      {.name = "omnikv", .settings = {{"dense_below", "0"}, {"budget", "24"}, {"tail", "4"}}},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"budget", "24"}, {"tail", "all"}, {"score", "raw"}}},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"budget", "24"}, {"selector", "uniform"}}},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"budget", "24"}, {"selector", "exp"}, {"window", "5"}}},
      {.name = "tova", .settings = {{"budget", "24"}}},
      {.name = "snapkv", .settings = {{"budget", "24"}, {"window", "8"}}},
      {.name = "snapkv", .settings = {{"budget", "24"}, {"window", "8"}, {"turn", "recompress"}}},
      {.name = "expected_attention", .settings = {{"budget", "24"}}},
      {.name = "pyramidkv",
       .settings = {{"budget", "24"}, {"window", "8"}, {"turn", "recompress"}}}};
  for (const PolicyOptions& policy : kPolicies) {
    const auto session = Open(*engine, policy);
    const auto fresh = Open(*engine, policy);
    SCOPED_TRACE(session->stats().settings);
    ASSERT_TRUE(session->Prompt(other).ok());  // what it left counts no more
    const Status cancelled = session->Prompt(prompt, [&](int64_t done, int64_t) {
      if (done >= 64) session->Cancel();
    });
    ASSERT_EQ(cancelled.code(), StatusCode::kCancelled);
    EXPECT_EQ(session->tokens(), part);
    ASSERT_TRUE(fresh->Prompt(part).ok());
    for (const int32_t token : {42, 43, 44}) {
      ASSERT_TRUE(session->Step(token).ok());
      ASSERT_TRUE(fresh->Step(token).ok());
      // The last rows are computed anew in a step of their own: on the reference to the same bits.
      const std::vector<float> expected = Logits(*engine, *fresh);
      const double tolerance = GetParam() == "ref" ? 0 : F32Tolerance(GetParam());
      ASSERT_LE(Error(session->logits(), expected), tolerance) << token;
      EXPECT_EQ(session->stats().attended_tokens, fresh->stats().attended_tokens);
    }
    const auto fork = session->Fork();
    ASSERT_TRUE(fork.ok());
    const auto answer = session->Generate({.max_tokens = 5, .ignore_eos = true});
    ASSERT_TRUE(answer.ok()) << answer.status().message();
    EXPECT_EQ(answer->tokens, fresh->Generate({.max_tokens = 5, .ignore_eos = true})->tokens);
  }
}

TEST_P(SessionTest, CancelStopsAGeneration) {
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

TEST_P(SessionTest, GoesOnWhereItStopped) {
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

TEST_P(SessionTest, GoesOnAsOneDrawWould) {
  const auto engine = Load({.max_sessions = 2});
  const auto session = Open(*engine);
  const auto generate = [&](Session& of, int64_t n, uint64_t seed) {
    const auto part =
        of.Generate({.max_tokens = n,
                     .sampling = {.temperature = 1.5, .repeat_penalty = 1.7, .seed = seed},
                     .ignore_eos = true});
    EXPECT_TRUE(part.ok()) << part.status().message();
    return part->tokens;
  };
  const auto both = [](std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  const std::vector<int32_t> whole = generate(*session, 24, 3);
  for (const int64_t first : {1, 12, 23}) {  // a prompt begins anew
    ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
    const std::vector<int32_t> head = generate(*session, first, 3);
    const auto fork = session->Fork();
    ASSERT_TRUE(fork.ok());
    EXPECT_EQ(both(head, generate(*session, 24 - first, 3)), whole);
    EXPECT_EQ(both(head, generate(**fork, 24 - first, 3)), whole);
  }
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  EXPECT_NE(both(generate(*session, 12, 3), generate(*session, 12, 4)), whole);
}

// A token that was drawn but is not in the bank yet counts for the penalty.
TEST_P(SessionTest, ThePenaltyKnowsTheLastToken) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const GenerateOptions one{
      .max_tokens = 1, .sampling = {.repeat_penalty = 100}, .ignore_eos = true};
  ASSERT_TRUE(session->Prompt(Numbers(30)).ok());
  std::set<int32_t> seen;
  for (int i = 0; i < 12; ++i) {
    const auto token = session->Generate(one);
    ASSERT_TRUE(token.ok());
    EXPECT_TRUE(seen.insert(token->tokens[0]).second) << token->tokens[0] << " again";
  }
}

TEST_P(SessionTest, AFullContextEndsAnAnswerAndRefusesAPrompt) {
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

TEST_P(SessionTest, StopTextsEndAnAnswer) {
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

// Special tokens are not part of the text, so they are stopped at by their ids.
TEST_P(SessionTest, AStopMayBeASpecialToken) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const auto prompt = engine->ChatPrompt({{"user", "What is 2 + 3?"}});
  ASSERT_TRUE(prompt.ok());
  ASSERT_TRUE(session->Prompt(*prompt).ok());
  const auto free = session->Generate({.max_tokens = 64});
  ASSERT_TRUE(free.ok());
  ASSERT_EQ(free->finish_reason, FinishReason::kStop);
  const std::string end = *engine->Detokenize({free->tokens.back()});
  ASSERT_TRUE(session->Prompt(*prompt).ok());
  const auto stopped = session->Generate({.max_tokens = 64, .stop = {end}, .ignore_eos = true});
  ASSERT_TRUE(stopped.ok());
  EXPECT_EQ(stopped->finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped->tokens, free->tokens);
  EXPECT_EQ(stopped->text, free->text);
}

TEST_P(SessionTest, StopsNeedATokenizer) {
  const auto engine = Engine::Load({.model = kGoldens + "/llama", .device = GetParam()});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto session = Open(**engine);
  ASSERT_TRUE(session->Prompt({1, 2, 3}).ok());
  const Status status = session->Generate({.max_tokens = 2, .stop = {"x"}}).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("`stop`"));
  EXPECT_THAT(status.message(), HasSubstr("tokenizer.json: no such file"));
  EXPECT_TRUE(session->Generate({.max_tokens = 2}).ok());
}

TEST_P(SessionTest, AllLogitsAreThoseOfTheLastRow) {
  const auto engine = Load();
  const auto session = Open(*engine);
  const std::vector<int32_t> tokens = Numbers(70);
  std::vector<std::vector<float>> all;
  ASSERT_TRUE(session
                  ->PrefillLogits(tokens,
                                  [&](int64_t position, const float* logits) {
                                    EXPECT_EQ(position, static_cast<int64_t>(all.size()));
                                    all.emplace_back(logits, logits + engine->vocab());
                                  })
                  .ok());
  ASSERT_EQ(all.size(), tokens.size());
  ASSERT_TRUE(session->Prompt({tokens.begin(), tokens.begin() + 40}).ok());
  EXPECT_LT(MaxDifference(all[39], Logits(*engine, *session)), 2e-3);
}

TEST_P(SessionTest, WrongPoliciesAreNamed) {
  const auto engine = Load();
  const struct {
    PolicyOptions policy;
    std::string sentence;
  } kCases[] = {
      {{.name = "lru"}, "there is no policy 'lru'"},
      {{.name = "omnikv", .settings = {{"dense_below", "0"}, {"filters", "2,16"}}},
       "filters names layer 16"},
      {{.name = "omnikv", .settings = {{"dense_below", "0"}, {"mem", "0.1"}}},
       "dense layers of 16 alone take 0.250"},
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

TEST_P(SessionTest, FillContextStandsInForAPrompt) {
  const auto engine = Load();
  const auto session =
      Open(*engine, {.name = "omnikv", .settings = {{"dense_below", "0"}, {"budget", "64"}}});
  ASSERT_TRUE(session->FillContext(1000).ok());
  ASSERT_TRUE(session->Step(5).ok());
  EXPECT_EQ(session->stats().context_tokens, 1001);
  EXPECT_EQ(session->stats().attended_tokens, (4 * 1001 + 12 * (64 + 1)) / 16.0);
  for (int32_t i = 0; i < engine->vocab(); ++i) ASSERT_TRUE(std::isfinite(session->logits()[i]));
}

TEST_P(SessionTest, ARefusedFillLeavesAnUsableSession) {
  const auto engine = Load({.context = 128, .max_sessions = 2});
  const auto session = Open(*engine);
  ASSERT_TRUE(session->Prompt(Numbers(20)).ok());
  for (const int64_t tokens : {int64_t{-1}, int64_t{0}, int64_t{129}, int64_t{1} << 62}) {
    EXPECT_EQ(session->FillContext(tokens).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(session->tokens(), Numbers(20));
  EXPECT_TRUE(session->Generate({.max_tokens = 2}).ok());
  ASSERT_TRUE(session->Prompt(Numbers(40)).ok());
  EXPECT_TRUE(session->Generate({.max_tokens = 2}).ok());
}

INSTANTIATE_TEST_SUITE_P(Devices, SessionTest, testing::Values("cpu", "cuda"), NameOf);

TEST(Engine, SaysThatAContextIsLongerThanTheTrainedOne) {
  testing::internal::CaptureStderr();
  ASSERT_NE(LoadOn("cpu", {.context = 40000}), nullptr);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("`context` is 40000, but the model was trained for 32768 tokens"));
  testing::internal::CaptureStderr();
  ASSERT_NE(LoadOn("cpu", {.context = 32768}), nullptr);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// Of a cap and what the machine has, the smaller counts.
TEST(Engine, ACapAboveTheMachineIsNotMemory) {
  constexpr size_t kTiB = size_t{1} << 40;
  testing::internal::CaptureStderr();
  const auto engine =
      Engine::Load({.model = kModel, .device = "cpu", .host_memory = 1000 * kTiB, .context = 64});
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("`host_memory` is 1000.00 TiB"));
  const auto refused = Engine::Load(
      {.model = kModel, .device = "cpu", .host_memory = 1000 * kTiB, .context = 1 << 30});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("of available memory"));
}

TEST(Engine, NamesTheContextsItTakes) {
  for (const int64_t context : {int64_t{-1}, (int64_t{1} << 30) + 1, int64_t{1} << 62}) {
    const auto engine = Engine::Load({.model = kModel, .device = "cpu", .context = context});
    ASSERT_FALSE(engine.ok());
    EXPECT_EQ(engine.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(engine.status().message(), HasSubstr("`context` is " + std::to_string(context)));
  }
}

TEST(Engine, SaysWhyThereIsNoText) {
  namespace fs = std::filesystem;
  const fs::path folder =
      fs::temp_directory_path() / ("omnikv_engine_text_" + std::to_string(getpid()));
  fs::remove_all(folder);
  fs::create_directories(folder);
  const fs::path model = kGoldens + "/llama";
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::copy_file(model / name, folder / name);
  }
  const auto load = [&] {
    auto engine = Engine::Load({.model = folder.string(), .device = "cpu", .context = 64});
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  };
  EXPECT_THAT(load()->Tokenize("x", false, false).status().message(),
              HasSubstr("tokenizer.json: no such file"));
  std::ofstream(folder / "tokenizer.json")
      << R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})";
  EXPECT_THAT(load()->ChatPrompt({{"user", "a"}}).status().message(),
              HasSubstr("has no chat template"));
  std::ofstream(folder / "chat_template.jinja") << "{% if %}";
  EXPECT_THAT(load()->ChatPrompt({{"user", "a"}}).status().message(),
              HasSubstr("chat_template.jinja"));
  fs::remove_all(folder);
}

TEST(Engine, RefusesAContextThatDoesNotFitWithTheNumbers) {
  const auto engine = Engine::Load(
      {.model = kModel, .device = "cpu", .host_memory = size_t{64} << 20, .context = 32768});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(engine.status().message(), HasSubstr("a context of 32768 tokens does not fit"));
  EXPECT_THAT(engine.status().message(), HasSubstr("`host_memory` 64.00 MiB"));
}

TEST(Engine, WithoutAContextTakesWhatFits) {
  const auto engine =
      Engine::Load({.model = kModel, .device = "cpu", .host_memory = size_t{128} << 20});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_LT((*engine)->context(), 32768);
  EXPECT_GT((*engine)->context(), 1000);
}

}  // namespace
}  // namespace omnikv::session_test
