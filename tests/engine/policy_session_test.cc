// Policies as sessions run them: what later prompts keep, the measures that are reported, memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "../test_data.h"
#include "engine/core.h"
#include "golden_data.h"
#include "omnikv/engine.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::policy_session_test {
namespace {

using ::testing::HasSubstr;

const std::string kShipped = TestData("models/omnikv-tiny-q8_0.gguf");
const std::string kRandom = TestData("tests/golden/policy_model");        // vocabulary 128
const std::string kAllSliding = TestData("tests/golden/models/mistral");  // windows of 8 tokens

class PolicySessionOn : public OnDevice {};

// A window holds the last queries of the prompt, not those of an answer that was taken back.
TEST_P(PolicySessionOn, WindowsOfALaterPromptAreThoseOfAFreshOne) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 2});
  std::vector<int32_t> second = Numbers(90, 1);
  second.insert(second.end(), {11, 12, 13});
  for (const char* selector : {"last", "uniform", "exp"}) {
    const PolicyOptions policy{.name = "omnikv",
                               .settings = {{"dense_below", "0"},
                                            {"filters", "1,4"},
                                            {"budget", "24"},
                                            {"tail", "4"},
                                            {"selector", selector}}};
    const auto session = Take(engine->NewSession(policy));
    ASSERT_TRUE(session->Prompt(Numbers(120, 1)).ok());
    Decode(*engine, *session, 9);
    ASSERT_TRUE(session->Prompt(second).ok());
    EXPECT_LE(session->stats().prefill_tokens, 16);
    const auto fresh = Take(engine->NewSession(policy));
    ASSERT_TRUE(fresh->Prompt(second).ok());
    const auto got = Decode(*engine, *session, 9);
    const auto expected = Decode(*engine, *fresh, 9);
    if (GetParam() == "ref") {
      EXPECT_EQ(got, expected) << selector;
      continue;
    }
    for (size_t i = 0; i < expected.size(); ++i) {  // the prompt came in other pieces
      EXPECT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << selector << i;
    }
  }
}

// Sums of weights in the local window go on in a later turn. A cut takes back queries that they
// hold, so the sequence starts over.
TEST_P(PolicySessionOn, LocalWeightsGoOnAndStartOverWhereTheyMust) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 2});
  const PolicyOptions policy{
      .name = "infllm",
      .settings = {
          {"budget", "16"}, {"block", "8"}, {"sinks", "8"}, {"recent", "24"}, {"chunk", "16"}}};
  const std::vector<int32_t> first = Numbers(96, 1);  // whole chunks
  std::vector<int32_t> longer = first;
  for (const int32_t token : Numbers(50, 2)) longer.push_back(token);
  std::vector<int32_t> other(first.begin(), first.begin() + 90);
  for (const int32_t token : Numbers(40, 3)) other.push_back(token);
  const auto session = Take(engine->NewSession(policy));
  ASSERT_TRUE(session->Prompt(first).ok());
  for (const auto& [prompt, computed, again] : {std::tuple(longer, int64_t{50}, int64_t{0}),
                                                std::tuple(other, int64_t{130}, int64_t{90})}) {
    ASSERT_TRUE(session->Prompt(prompt).ok());
    EXPECT_EQ(session->stats().prefill_tokens, computed);
    EXPECT_EQ(session->stats().recomputed_tokens, again);
    const auto fresh = Take(engine->NewSession(policy));
    ASSERT_TRUE(fresh->Prompt(prompt).ok());
    EXPECT_EQ(Decode(*engine, *session, 20), Decode(*engine, *fresh, 20));
    ASSERT_TRUE(session->Prompt(prompt).ok());  // without the answer
  }
}

// No two tokens stand further apart than the window, however long the context is.
TEST_P(PolicySessionOn, FarTokensAtFourTimesTheTrainedLength) {
  if (GetParam() == "ref") GTEST_SKIP() << "takes minutes on ref";
  const auto engine = Load({.model = kRandom, .device = GetParam(), .context = 4 * 1024 + 16});
  const auto session = Take(engine->NewSession({.name = "infllm",
                                                .settings = {{"budget", "256"},
                                                             {"block", "32"},
                                                             {"sinks", "32"},
                                                             {"recent", "256"},
                                                             {"chunk", "128"}}}));
  ASSERT_TRUE(session->Prompt(Numbers(4 * 1024, 1)).ok());
  for (const std::vector<float>& logits : Decode(*engine, *session, 8)) {
    for (const float logit : logits) ASSERT_TRUE(std::isfinite(logit));
  }
  EXPECT_LT(session->stats().read_fraction, 0.25);
}

// Pages of K that a fork or a cut left unfinished: what follows is as in sessions that knew nothing
// of either. Pages of 128 tokens have two blocks each.
TEST_P(PolicySessionOn, BoundsOfPagesAreThoseOfAFreshSession) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 3});
  for (const auto& [page, budget, score] :
       {std::tuple{"16", "48", "min_max"}, {"128", "256", "min_max"}, {"16", "48", "mean_std"}}) {
    const PolicyOptions policy{
        .name = "quest",
        .settings = {{"budget", budget}, {"page", page}, {"dense_layers", "0"}, {"score", score}}};
    SCOPED_TRACE(fmt::format("pages of {}, {}", page, score));
    const auto step = [](Session& session, int32_t n, int32_t seed) {
      for (int32_t i = 0; i < n; ++i) ASSERT_TRUE(session.Step(3 + (i * 7 + seed) % 120).ok());
    };
    const auto expect_same = [&](Session& session, Session& fresh) {
      ASSERT_EQ(session.tokens(), fresh.tokens());
      const auto got = Decode(*engine, session, 6);
      const auto expected = Decode(*engine, fresh, 6);
      for (size_t i = 0; i < expected.size(); ++i) {  // prompts came in other pieces
        EXPECT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << i;
      }
    };
    const std::vector<int32_t> prompt = Numbers(470, 1);
    const std::vector<int32_t> shorter = Numbers(450, 1);
    const auto session = Take(engine->NewSession(policy));
    ASSERT_TRUE(session->Prompt(prompt).ok());
    const auto fork = session->Fork();
    ASSERT_TRUE(fork.ok());
    step(**fork, 50, 1);
    ASSERT_TRUE(session->Prompt(shorter).ok());  // into a page that both share
    step(*session, 70, 2);
    std::vector<int32_t> later((*fork)->tokens().begin(), (*fork)->tokens().begin() + 490);
    later.insert(later.end(), {9, 8, 7});
    ASSERT_TRUE((*fork)->Prompt(later).ok());
    EXPECT_EQ((*fork)->stats().prefill_tokens, 3);
    const auto fresh = Take(engine->NewSession(policy));
    ASSERT_TRUE(fresh->Prompt(prompt).ok());
    step(*fresh, 20, 1);
    ASSERT_TRUE(fresh->Prompt(later).ok());
    expect_same(**fork, *fresh);
    ASSERT_TRUE(fresh->Prompt({5}).ok());  // starts over
    ASSERT_TRUE(fresh->Prompt(shorter).ok());
    step(*fresh, 70, 2);
    expect_same(*session, *fresh);
  }
}

TEST_P(PolicySessionOn, ReportsTheFractionOfAllKvThatIsRead) {
  const auto engine = Load({.model = kShipped, .device = GetParam()});
  const struct {
    PolicyOptions policy;
    double attended;  // tokens at a context of 1001, mean over the 16 layers
    double keys = 0;  // whose K alone is read besides, for scores
  } kCases[] = {
      {{.name = "full"}, 1001},
      {{.name = "streaming", .settings = {{"budget", "64"}}}, 64},
      {{.name = "omnikv", .settings = {{"dense_below", "0"}, {"budget", "64"}}},
       (4 * 1001 + 12 * (64 + 1)) / 16.0},
      {{.name = "omnikv", .settings = {{"dense_below", "0"}, {"mem", "1"}}, .force_indices = true},
       1001},
      {{.name = "omnikv",
        .settings = {{"dense_below", "0"}, {"budget", "64"}, {"select_every_layer", "1"}}},
       (2 * 1001 + 14 * (64 + 1)) / 16.0,
       14 * 1001 / 16.0},
      // 62 pages of 16 tokens and one of 9: 64 of these tokens' pages at most, so 57; the bounds of
      // a page are twice the K of a token, those of means and deviations in f32.
      {{.name = "quest", .settings = {{"budget", "64"}}},
       (2 * 1001 + 14 * 57) / 16.0,
       14 * 63 * 2 / 16.0},
      {{.name = "quest", .settings = {{"budget", "64"}, {"score", "mean_std"}}},
       (2 * 1001 + 14 * 57) / 16.0,
       14 * 63 * 4 / 16.0},
      // The step's token completes a page, whose bounds are made of its K.
      {{.name = "quest", .settings = {{"budget", "64"}, {"page", "1"}}},
       (2 * 1001 + 14 * 64) / 16.0,
       14 * (1001 * 2 + 1) / 16.0},
  };
  for (const auto& c : kCases) {
    const auto session = Take(engine->NewSession(c.policy));
    ASSERT_TRUE(session->FillContext(1000).ok());
    ASSERT_TRUE(session->Step(5).ok());
    const SessionStats stats = session->stats();
    EXPECT_DOUBLE_EQ(stats.attended_tokens, c.attended) << stats.settings;
    EXPECT_DOUBLE_EQ(stats.read_fraction, (c.attended + c.keys / 2) / 1001) << stats.settings;
  }
}

// A fraction holds for the whole answer, however short the prompt was; the tail comes on top.
TEST_P(PolicySessionOn, MemHoldsAsTheContextGrows) {
  const auto engine = Load({.model = kShipped, .device = GetParam()});
  const auto session = Take(engine->NewSession(
      {.name = "omnikv", .settings = {{"dense_below", "0"}, {"mem", "0.4"}, {"tail", "1"}}}));
  ASSERT_TRUE(session->Prompt(Numbers(5, 1)).ok());
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(session->Step(100 + i).ok());
    const SessionStats stats = session->stats();
    EXPECT_GE(stats.read_fraction, 0.4 - 1e-9);
    EXPECT_LE(stats.read_fraction, 0.4 + 2 * 12.0 / 16 / static_cast<double>(stats.context_tokens));
  }
  EXPECT_EQ(session->stats().budget_tokens, 13);  // 0.2 of 65: (0.4 * 16 - 4) / 12
  EXPECT_THAT(session->stats().settings, HasSubstr("budget=auto"));
}

TEST_P(PolicySessionOn, ModelsOfSlidingWindowsOnly) {
  const auto engine = Load({.model = kAllSliding, .device = GetParam(), .context = 64});
  const auto refused = engine->NewSession({.name = "omnikv"});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.status().message(), HasSubstr("policy omnikv: every layer of this model"));
  const auto session = Take(engine->NewSession({}));
  ASSERT_TRUE(session->Prompt(Numbers(40, 1)).ok());
  EXPECT_EQ(session->stats().policy, "full");
  EXPECT_EQ(session->stats().attended_tokens, 8);
  EXPECT_EQ(session->stats().read_fraction, 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, PolicySessionOn, testing::Values("ref", "cpu", "cuda"), NameOf);

TEST(PolicySession, HeldBytesAreBlocksAndWhatPoliciesKeep) {
  const auto engine = Load({.model = kShipped, .context = 1000, .max_sessions = 2});
  const auto full = Take(engine->NewSession({.name = "full"}));
  EXPECT_EQ(full->stats().held_bytes.host, 0u);
  ASSERT_TRUE(full->Prompt({7}).ok());
  const size_t block = full->stats().held_bytes.host;
  EXPECT_GT(block, 0u);
  ASSERT_TRUE(full->Prompt(Numbers(64, 1)).ok());
  EXPECT_EQ(full->stats().held_bytes.host, block);
  ASSERT_TRUE(full->Prompt(Numbers(65, 1)).ok());
  EXPECT_EQ(full->stats().held_bytes.host, 2 * block);
  {
    const auto fork = full->Fork();
    ASSERT_TRUE(fork.ok());
    EXPECT_EQ(full->stats().held_bytes.host, 2 * block);  // shared
  }
  const size_t window_bytes = 2 * 16 * 1008 * sizeof(float);  // of two filters, 16 queries each
  {
    const auto omnikv = Take(engine->NewSession(
        {.name = "omnikv", .settings = {{"dense_below", "0"}, {"selector", "exp"}}}));
    EXPECT_GT(full->stats().held_bytes.host, 2 * block + window_bytes);
    EXPECT_LT(full->stats().held_bytes.host, 2 * block + 2 * window_bytes);
  }
  EXPECT_EQ(full->stats().held_bytes.host, 2 * block);
}

// Of one session what it keeps, over the K/V of its tokens; blocks round up.
TEST(PolicySession, ReportsTheFractionOfAllKvThatIsHeld) {
  const auto engine = Load({.model = kShipped, .context = 8192, .max_sessions = 2});
  const auto full = Take(engine->NewSession({.name = "full"}));
  ASSERT_TRUE(full->FillContext(6000).ok());
  const auto held = static_cast<double>(full->stats().held_bytes.host);
  EXPECT_DOUBLE_EQ(full->stats().held_fraction, 6016 / 6000.0);  // 94 blocks
  const auto streaming =
      Take(engine->NewSession({.name = "streaming", .settings = {{"budget", "64"}}}));
  ASSERT_TRUE(streaming->FillContext(6000).ok());
  ASSERT_TRUE(streaming->Step(5).ok());
  EXPECT_DOUBLE_EQ(streaming->stats().held_fraction, 3 * 64 / 6001.0);
  EXPECT_DOUBLE_EQ(full->stats().held_fraction, 6016 / 6000.0);
  // All that is open counts in bytes.
  EXPECT_DOUBLE_EQ(static_cast<double>(full->stats().held_bytes.host), held * 97 / 94);
}

// Blocks that bounds of their keys stand for, with a choice per KV head, are pages of Quest: to the
// bit, and in the same memory.
TEST_P(PolicySessionOn, BlocksByBoundsAreThePagesOfQuest) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 2});
  for (const char* size : {"4", "16"}) {
    const auto quest = Take(engine->NewSession(
        {.name = "quest", .settings = {{"budget", "48"}, {"page", size}, {"heads", "sum"}}}));
    ASSERT_TRUE(quest->Prompt(Numbers(150, 1)).ok());
    const size_t bytes = CoreOf(*engine).bank->StateBytes();
    const auto blocks = Take(engine->NewSession({.name = "blocks",
                                                 .settings = {{"budget", "48"},
                                                              {"block", size},
                                                              {"sinks", "0"},
                                                              {"recent", "0"},
                                                              {"representative", "quest"},
                                                              {"lists", "per_kv_head"}}}));
    EXPECT_EQ(CoreOf(*engine).bank->StateBytes(), bytes);
    ASSERT_TRUE(blocks->Prompt(Numbers(150, 1)).ok());
    EXPECT_EQ(Decode(*engine, *blocks, 20), Decode(*engine, *quest, 20)) << size;
  }
}

// Sessions of one policy share the memory of its states, which counts as what it keeps. Two scores
// of quest keep different things of the same size.
TEST(PolicySession, StatesAreSharedAndCounted) {
  const auto engine = Load({.model = kShipped, .context = 1000, .max_sessions = 4});
  const Bank& bank = *CoreOf(*engine).bank;
  const PolicyOptions quest{.name = "quest"};
  EXPECT_EQ(bank.StateBytes(), 0u);
  {
    const auto one = Take(engine->NewSession(quest));
    const size_t bytes = bank.StateBytes();
    EXPECT_GT(bytes, 0u);
    const auto two = Take(engine->NewSession(quest));
    EXPECT_EQ(bank.StateBytes(), bytes);
    const auto more =
        Take(engine->NewSession({.name = "quest", .settings = {{"dense_layers", "0"}}}));
    EXPECT_EQ(bank.StateBytes(), bytes / 14 * 16);  // of 16 layers
    {
      const auto other =
          Take(engine->NewSession({.name = "quest", .settings = {{"score", "mean_std"}}}));
      EXPECT_EQ(bank.StateBytes(), bytes / 14 * 16 + 2 * bytes);  // in f32
    }
    ASSERT_TRUE(one->Prompt(Numbers(640, 1)).ok());
    // A page's bounds are as large as K of two of its 16 tokens.
    const auto full = 640.0 * static_cast<double>(Bank::BytesPerToken(bank.config()));
    const double states = full * 14 / 16 / 16;
    EXPECT_GE(one->stats().held_fraction * full, full + states);
    EXPECT_LE(one->stats().held_fraction * full, full + states + 16384);  // and its lists
  }
  EXPECT_EQ(bank.StateBytes(), 0u);
}

// The plan leaves room for them, and a session that finds none is refused.
TEST(PolicySession, StatesCountAgainstHostMemory) {
  EngineOptions options{.model = kShipped, .host_memory = size_t{160} << 20};
  const PolicyOptions quest{.name = "quest", .settings = {{"score", "mean_std"}}};
  const auto plain = Load(options);
  const auto refused = plain->NewSession(quest);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("policy quest keeps"));
  options.policy = quest;
  const auto planned = Load(options);
  EXPECT_LT(planned->context(), plain->context());
  EXPECT_TRUE(planned->NewSession(quest).ok());
  options.context = plain->context();
  const auto too_long = Engine::Load(options);
  ASSERT_FALSE(too_long.ok());
  EXPECT_THAT(too_long.status().message(), HasSubstr("K/V and the policy's states"));
}

// What the settings leave nothing to select of is refused when the prompt is in.
TEST(PolicySession, RefusesAPromptOfWhichNothingIsSelected) {
  const auto engine = Load({.model = kShipped, .context = 4096});
  const auto session = Take(engine->NewSession(
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"mem", "0.26"}, {"selector", "uniform"}}}));
  const Status refused = session->Prompt(Numbers(500, 1));
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(),
              HasSubstr("policy omnikv: the budget at 501 tokens of context is 7"));
  EXPECT_FALSE(session->Generate({.max_tokens = 1}).ok());
  EXPECT_FALSE(session->Step(5).ok());
  EXPECT_TRUE(session->Prompt(Numbers(2000, 1)).ok());
  EXPECT_TRUE(session->Step(5).ok());
}

TEST(PolicySession, WhatPoliciesKeepCountsAgainstHostMemory) {
  const auto engine = Load(
      {.model = kShipped, .host_memory = size_t{256} << 20, .context = 4096, .max_sessions = 2});
  const PolicyOptions large{.name = "omnikv",
                            .settings = {{"dense_below", "0"},
                                         {"selector", "uniform"},
                                         {"window", "4096"},
                                         {"budget", "4096"},
                                         {"select_every_layer", "1"}}};
  const auto refused = engine->NewSession(large);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("policy omnikv keeps 896."));
  EXPECT_THAT(refused.status().message(), HasSubstr("`host_memory` 256.00 MiB leaves"));
  EXPECT_TRUE(engine->NewSession({.name = "omnikv"}).ok());
}

// A context that was cut to what fits leaves room for the policy.
TEST(PolicySession, ACutContextHasRoomForThePolicy) {
  const auto engine = Load({.model = kShipped, .host_memory = size_t{128} << 20});
  EXPECT_LT(engine->context(), 32768);
  for (const char* name : {"auto", "full", "streaming", "omnikv"}) {
    const auto session = engine->NewSession({.name = name});
    EXPECT_TRUE(session.ok()) << name << ": " << session.status().message();
  }
}

}  // namespace
}  // namespace omnikv::policy_session_test
