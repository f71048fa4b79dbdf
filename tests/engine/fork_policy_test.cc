// Sessions of one policy on the context of another: what they share, and that neither notices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string_view>

#include "../policy_settings.h"
#include "../test_data.h"
#include "golden_data.h"
#include "omnikv/engine.h"
#include "on_device.h"
#include "policy/policy.h"
#include "sessions.h"

namespace omnikv::fork_policy_test {
namespace {

using ::testing::HasSubstr;

const std::string kRandom = TestData("tests/golden/policy_model");  // vocabulary 128
const std::string kWindows = TestData("tests/golden/models/gemma3");

// What a file says of it.
std::string Saved(Session& session) {
  const std::string path = testing::TempDir() + "omnikv_fork_" + std::to_string(::getpid());
  EXPECT_TRUE(session.Save(path).ok());
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::remove(path.c_str());
  return bytes;
}

// Every policy of this build, with a budget far below the prompts here where it has one.
std::vector<PolicyOptions> Policies() {
  std::vector<PolicyOptions> policies;
  for (const PolicyInfo& info : AllPolicies()) {
    policies.push_back({.name = info.name, .settings = WithFiles(info, FirstSettings(info), 8, 2)});
  }
  return policies;
}

bool DensePrompts(const std::string& policy) {
  return (*FindPolicy(policy))->make()->DensePrompts();
}

class ForkPolicyOn : public OnDevice {
 protected:
  // The same bits on ref; elsewhere prompts came in other pieces.
  void ExpectSame(const Logits& got, const Logits& expected) {
    ASSERT_EQ(got.size(), expected.size());
    if (GetParam() == "ref") {
      EXPECT_EQ(got, expected);
      return;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << i;
    }
  }
};

TEST_P(ForkPolicyOn, IsASessionOfThatPolicy) {
  const auto engine =
      Load({.model = kRandom, .device = GetParam(), .prefill_chunk = 48, .max_sessions = 4});
  const std::vector<int32_t> prompt = Numbers(203, 1);
  const auto total = static_cast<int64_t>(prompt.size());
  struct Fresh {
    PolicyOptions policy;
    std::string saved;  // after the prompt
    Logits logits;      // of the steps after it
  };
  std::vector<Fresh> all;
  for (const PolicyOptions& policy : Policies()) {
    const auto session = Take(engine->NewSession(policy));
    ASSERT_TRUE(session->Prompt(prompt).ok());
    const std::string saved = Saved(*session);
    all.push_back({policy, saved, Decode(*engine, *session, 40)});
  }
  for (const auto& [policy, saved, expected] : all) {
    for (const auto& [parent_policy, _, alone] : all) {
      SCOPED_TRACE(parent_policy.name + " to " + policy.name);
      const auto parent = Take(engine->NewSession(parent_policy));
      ASSERT_TRUE(parent->Prompt(prompt).ok());
      const auto fork = Take(parent->Fork(policy));
      EXPECT_EQ(fork->tokens(), prompt);
      EXPECT_TRUE(GetParam() != "ref" || Saved(*fork) == saved);  // states and all
      ExpectSame(Decode(*engine, *fork, 40), expected);
      // Rows of prompts that read everything are the same, unless they are gone.
      constexpr std::string_view kDrop[] = {
          "expected_attention", "h2o",    "keydiff", "knorm", "kvzip",
          "pyramidkv",          "snapkv", "strided", "tova"};
      const bool drops = std::ranges::count(kDrop, parent_policy.name) > 0;
      const bool shares = DensePrompts(policy.name) && DensePrompts(parent_policy.name) && !drops &&
                          // Those weigh all rows themselves.
                          policy.name != "h2o" && policy.name != "expected_attention";
      const SessionStats stats = fork->stats();
      EXPECT_EQ(stats.policy, policy.name);
      if (shares) {
        EXPECT_LT(stats.prefill_tokens, 40);
        EXPECT_LT(stats.recomputed_tokens, 16);  // of the unit that warm rows begin in
      } else {
        EXPECT_EQ(stats.prefill_tokens, total);
        EXPECT_GT(stats.recomputed_tokens, total - 40);
      }
      // The parent goes on as if there were no fork.
      EXPECT_EQ(Decode(*engine, *parent, 40), alone);
    }
  }
}

// An answer of a policy that reads everything is as good as a prompt; one that was read sparsely is
// computed anew.
TEST_P(ForkPolicyOn, TakesAnAnswerForAPrompt) {
  const auto engine =
      Load({.model = kRandom, .device = GetParam(), .prefill_chunk = 48, .max_sessions = 4});
  const PolicyOptions window = {.name = "omnikv",
                                .settings = {{"dense_below", "0"},
                                             {"filters", "1,4"},
                                             {"budget", "24"},
                                             {"tail", "4"},
                                             {"selector", "exp"}}};
  const auto full = Take(engine->NewSession({.name = "full"}));
  const auto sparse = Take(engine->NewSession(window));
  for (Session* parent : {full.get(), sparse.get()}) {
    ASSERT_TRUE(parent->Prompt(Numbers(120, 1)).ok());
    Decode(*engine, *parent, 30);
    for (const PolicyOptions& policy :
         {PolicyOptions{.name = "full"}, window,
          PolicyOptions{.name = "quest", .settings = {{"budget", "64"}, {"page", "64"}}},
          PolicyOptions{.name = "snapkv", .settings = {{"budget", "40"}}}}) {
      SCOPED_TRACE(policy.name);
      Logits expected;
      {
        const auto fresh = Take(engine->NewSession(policy));
        ASSERT_TRUE(fresh->Prompt(parent->tokens()).ok());
        expected = Decode(*engine, *fresh, 20);
      }
      const auto fork = Take(parent->Fork(policy));
      if (parent == full.get()) {
        EXPECT_LE(fork->stats().recomputed_tokens, policy.name == "quest" ? 63 : 0);
      } else {
        EXPECT_GE(fork->stats().recomputed_tokens + 32, 30);
        EXPECT_EQ(fork->stats().prefill_tokens, policy.name == "quest"    ? 150 - 64
                                                : policy.name == "snapkv" ? 32
                                                                          : 30);
      }
      // Steps of another policy since compute other bits on other devices than ref.
      ExpectSame(Decode(*engine, *fork, 20), expected);
    }
  }
}

// A policy that gives up a row per step from some length on shares what it held before.
TEST_P(ForkPolicyOn, APolicyThatDropsSharesUntilItDoes) {
  const auto engine =
      Load({.model = kRandom, .device = GetParam(), .prefill_chunk = 48, .max_sessions = 3});
  const auto parent = Take(engine->NewSession({.name = "tova", .settings = {{"budget", "190"}}}));
  ASSERT_TRUE(parent->Prompt(Numbers(185, 1)).ok());
  for (const bool dropped : {false, true}) {
    Decode(*engine, *parent, dropped ? 7 : 3);
    const auto fork = Take(parent->Fork({.name = "full"}));
    // Its steps have a budget, so rows of the answer are computed anew.
    EXPECT_EQ(fork->stats().prefill_tokens, dropped ? 195 : 3);
    EXPECT_EQ(fork->stats().recomputed_tokens, dropped ? 194 : 2);
    const auto fresh = Take(engine->NewSession({.name = "full"}));
    ASSERT_TRUE(fresh->Prompt(parent->tokens()).ok());
    ExpectSame(Decode(*engine, *fork, 20), Decode(*engine, *fresh, 20));
  }
}

// Rows before a window are gone, so rows to begin with must lie near the end.
TEST_P(ForkPolicyOn, WindowsAreSharedWhereTheyReach) {
  const auto engine = Load({.model = kWindows,
                            .device = GetParam(),
                            .kv_dtype = "f32",
                            .precision = "full",
                            .prefill_chunk = 48,
                            .max_sessions = 3});
  const PolicyOptions quest = {
      .name = "quest", .settings = {{"budget", "128"}, {"page", "128"}, {"dense_layers", "0"}}};
  for (const int64_t length : {300, 382}) {
    const auto parent = Take(engine->NewSession({.name = "full"}));
    ASSERT_TRUE(parent->Prompt(Numbers(static_cast<size_t>(length), 1)).ok());
    const auto fork = Take(parent->Fork(quest));
    EXPECT_EQ(fork->stats().prefill_tokens, length == 300 ? 300 - 256 : length);
    const auto fresh = Take(engine->NewSession(quest));
    ASSERT_TRUE(fresh->Prompt(parent->tokens()).ok());
    ExpectSame(Decode(*engine, *fork, 20), Decode(*engine, *fresh, 20));
  }
}

TEST_P(ForkPolicyOn, RefusesWhatASessionCannotHave) {
  const auto engine =
      Load({.model = kRandom, .device = GetParam(), .context = 256, .max_sessions = 2});
  const auto parent = Take(engine->NewSession({.name = "full"}));
  const auto early = Take(parent->Fork({.name = "quest"}));
  EXPECT_TRUE(early->tokens().empty());
  ASSERT_TRUE(early->Prompt({3, 4}).ok());
  ASSERT_TRUE(parent->Prompt(Numbers(60, 1)).ok());
  const auto third = parent->Fork({.name = "quest"});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.status().code(), StatusCode::kResourceExhausted);
  const auto unknown = parent->Fork({.name = "fulll"});
  ASSERT_FALSE(unknown.ok());
  EXPECT_THAT(unknown.status().message(), HasSubstr("fulll"));
  ASSERT_TRUE(parent->Step(5).ok());
}

// A later prompt that needs rows which are gone starts over, and says so.
TEST_P(ForkPolicyOn, CountsWhatALaterPromptComputesAgain) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .prefill_chunk = 48});
  const auto session = Take(engine->NewSession({.name = "tova", .settings = {{"budget", "24"}}}));
  std::vector<int32_t> prompt = Numbers(100, 1);
  ASSERT_TRUE(session->Prompt(prompt).ok());
  EXPECT_EQ(session->stats().recomputed_tokens, 0);
  prompt.insert(prompt.end(), {7, 8, 9});
  ASSERT_TRUE(session->Prompt(prompt).ok());  // goes on
  EXPECT_EQ(session->stats().prefill_tokens, 3);
  EXPECT_EQ(session->stats().recomputed_tokens, 0);
  prompt.resize(90);
  ASSERT_TRUE(session->Prompt(prompt).ok());  // into rows that are gone
  EXPECT_EQ(session->stats().prefill_tokens, 90);
  EXPECT_EQ(session->stats().recomputed_tokens, 89);
}

INSTANTIATE_TEST_SUITE_P(Devices, ForkPolicyOn, testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::fork_policy_test
