// Sessions whose V are on the host, of which decode steps fetch few or have the host sum few,
// against sessions that have all near: on cards that are played by the reference backend, one of
// which runs its lanes in random order, and on a card where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "../made_up_model.h"
#include "as_device.h"
#include "backend/ref/ref_backend.h"
#include "batch_as_sessions.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "lanes_backend.h"
#include "model/generated.h"
#include "on_device.h"
#include "two_groups.h"

namespace omnikv::values_away_test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kLayers = 6;
constexpr size_t kBlock = 64;

PolicyOptions KCache(const SettingList& more = {}) {
  PolicyOptions policy{.name = "kcache", .settings = {{"budget", "16"}}};
  for (const auto& setting : more) policy.settings.push_back(setting);
  return policy;
}

// V of all layers but the first away, or of all, or of the last two.
const std::vector<PolicyOptions> kPolicies = {
    KCache(),
    KCache({{"first_layers", "0"}, {"renormalise", "on"}}),
    KCache({{"first_layers", "4"}}),
};

class ValuesAway : public OnDevice {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNotOn(device()); !reason.empty()) GTEST_SKIP() << reason;
  }
  static std::string device() { return GetParam().substr(0, GetParam().find('_')); }
  static bool on_cuda() { return device() == "cuda"; }
  // Whether the host sums V.
  static bool sums() { return device() != GetParam(); }
  // Not where sums are rounded otherwise: a value of K that then becomes another of 16 bits may
  // change a choice.
  static bool InF16() { return on_cuda() && !sums(); }
  static std::unique_ptr<Backend> MakeCard() {
    // A prompt that reads rows of an answer would round what differs in the last bits to bf16.
    if (on_cuda()) return *MakeBackend({.device = "cuda", .precision = sums() ? "full" : "fast"});
    if (device() == "ref") return std::make_unique<AsDevice>(MakeRefBackend());
    return std::make_unique<LanesBackend>(MakeRefBackend(), size_t{1} << 30, seed_++);
  }
  // `stages`, if not 0: through which prompts bring V, instead of those that the plan has.
  // `grouped`: query heads share KV heads.
  static std::unique_ptr<Engine> Make(const PolicyOptions& policy, const std::string& place,
                                      int32_t stages = 0, bool grouped = true) {
    auto core = std::make_unique<EngineCore>();
    core->backend = MakeCard();
    core->options = {.context = 400, .place = place, .prefill_chunk = 48, .max_sessions = 10};
    core->options.policy = policy;
    core->options.host_reads = sums() ? "attend" : "fetch";
    core->options.kv_dtype = InF16() ? "f16" : "f32";
    SmallShape shape{.max_context = 400};
    if (on_cuda()) shape.d_model = 128, shape.head_dim = 64, shape.ffn = 256;
    core->config = SmallLlama(shape);
    if (!grouped) core->config.n_kv_heads = core->config.n_heads;
    core->weights =
        *GenerateWeights(*core->backend, core->config, on_cuda() ? DType::kBF16 : DType::kF32);
    auto plan = PlanMemory(core->options, core->config, core->weights.bytes,
                           on_cuda() ? DType::kBF16 : DType::kF32, *core->backend);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(!plan->values_away, place == "device" || policy.name != "kcache");
    EXPECT_EQ(plan->kv_host == 0, !plan->values_away);
    EXPECT_EQ(plan->sums_away, plan->values_away && sums());
    if (stages > 0) plan->stages = stages;
    auto engine = MakeEngine(std::move(core), *plan, 0);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  static size_t LayersAway(Engine& engine) {
    size_t n = 0;
    const Bank& bank = *CoreOf(engine).bank;
    for (int32_t layer = 0; layer < bank.n_layers(); ++layer) n += bank.OnHost(layer) ? 1 : 0;
    return n;
  }
  // The same logits, but for the rounding of those by which the host sums.
  static void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected) {
    if (!sums()) {
      ASSERT_EQ(got, expected);
      return;
    }
    ASSERT_EQ(got.size(), expected.size());
    double most = 0;
    double error = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      most = std::max<double>(most, std::abs(expected[i]));
      error = std::max<double>(error, std::abs(got[i] - expected[i]));
    }
    ASSERT_LE(error, F32Tolerance(device()) * most);
  }
  // Bytes of K, and of V, of one token in one layer.
  static size_t PlaneBytes() { return 2 * (on_cuda() ? 64 : 16) * (InF16() ? 2 : 4); }

 private:
  static inline uint32_t seed_ = 1;
};

std::unique_ptr<Session> Take(Result<std::unique_ptr<Session>> session) {
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(*session);
}

std::vector<int32_t> Generate(Session& session, int64_t n) {
  const auto result = session.Generate({.max_tokens = n, .ignore_eos = true});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result->tokens : std::vector<int32_t>{};
}

std::vector<float> Logits(const Engine& engine, const Session& session) {
  return {session.logits(), session.logits() + engine.vocab()};
}

// Turns of a chat, some of which cut the context, in pieces that end between two blocks and while a
// step is ahead.
TEST_P(ValuesAway, TurnsGiveTheSameTokens) {
  for (const PolicyOptions& policy : kPolicies) {
    const auto near_engine = Make(policy, "device");
    const auto away_engine = Make(policy, "auto");
    const auto near = Take(near_engine->NewSession(policy));
    const auto away = Take(away_engine->NewSession(policy));
    SCOPED_TRACE(near->stats().settings);
    for (const size_t turn : {130, 185, 150, 240}) {
      ASSERT_TRUE(near->Prompt(Numbers(turn, 0)).ok());
      ASSERT_TRUE(away->Prompt(Numbers(turn, 0)).ok());
      ExpectSame(Logits(*away_engine, *away), Logits(*near_engine, *near));
      for (const int64_t n : {3, 30, 1, 15}) {
        ASSERT_EQ(Generate(*away, n), Generate(*near, n)) << "turn of " << turn;
        ExpectSame(Logits(*away_engine, *away), Logits(*near_engine, *near));
        // Not what it would have gone on with: a row that was made ahead is made anew.
        ASSERT_TRUE(near->Step(static_cast<int32_t>(n)).ok());
        ASSERT_TRUE(away->Step(static_cast<int32_t>(n)).ok());
      }
    }
    // A turn behind an answer, whose rows no stage has seen.
    std::vector<int32_t> longer = near->tokens();
    longer.resize(longer.size() + 30, 9);
    const size_t before = CoreOf(*away_engine).bank->BytesStaged();
    ASSERT_TRUE(near->Prompt(longer).ok());
    ASSERT_TRUE(away->Prompt(longer).ok());
    ExpectSame(Logits(*away_engine, *away), Logits(*near_engine, *near));
    const size_t staged = CoreOf(*away_engine).bank->BytesStaged();
    const size_t layers = LayersAway(*away_engine);
    if (layers > 2) {  // than stages, which keep what they have
      EXPECT_GE(staged - before, layers * 240 * PlaneBytes()) << "prompts read V in place";
    }
    Generate(*away, 5);
    EXPECT_EQ(CoreOf(*away_engine).bank->BytesStaged(), staged) << "steps bring V to a stage";
  }
}

// A prompt of several chunks, and one behind an answer, through one stage.
TEST_P(ValuesAway, OneStageGivesTheSameTokens) {
  const auto near_engine = Make(KCache(), "device");
  const auto away_engine = Make(KCache(), "auto", /*stages=*/1);
  const auto near = Take(near_engine->NewSession(KCache()));
  const auto away = Take(away_engine->NewSession(KCache()));
  for (const size_t turn : {150, 260}) {
    ASSERT_TRUE(near->Prompt(Numbers(turn, 0)).ok());
    ASSERT_TRUE(away->Prompt(Numbers(turn, 0)).ok());
    ExpectSame(Logits(*away_engine, *away), Logits(*near_engine, *near));
    ASSERT_EQ(Generate(*away, 20), Generate(*near, 20));
  }
}

// A choice by logits, which stand by the rows of a step, and not by its sequences.
TEST_P(ValuesAway, HeadsWithKvOfTheirOwnGiveTheSameLogits) {
  const PolicyOptions few = KCache({{"budget", "8"}});
  const auto of = [&](const char* place) { return Make(KCache(), place, 0, /*grouped=*/false); };
  const auto near = LogitsOfTwoGroups(*of("device"), KCache(), few);
  const auto away = LogitsOfTwoGroups(*of("host"), KCache(), few);
  ASSERT_EQ(near.size(), away.size());
  for (size_t i = 0; i < near.size(); ++i) ExpectSame(away[i], near[i]);
}

TEST_P(ValuesAway, ForksGiveTheSameTokens) {
  std::vector<std::vector<int32_t>> told;  // by each engine
  for (const char* place : {"device", "auto"}) {
    const auto engine = Make(KCache(), place);
    const auto session = Take(engine->NewSession(KCache()));
    std::vector<int32_t>& all = told.emplace_back();
    const auto say = [&](Session& of, int64_t n) {
      for (const int32_t token : Generate(of, n)) all.push_back(token);
    };
    ASSERT_TRUE(session->Prompt(Numbers(150, 0)).ok());
    for (int round = 0; round < 3; ++round) {
      say(*session, 7);
      auto fork = Take(session->Fork());
      ASSERT_TRUE(fork->Step(17 + round).ok());
      ASSERT_TRUE(session->Step(40 + round).ok());  // leaves the block that both ended in
      say(*fork, 9);
      say(*session, 5);
      const auto second = Take(fork->Fork());
      ASSERT_TRUE(second->Prompt(Numbers(170, 0)).ok());
      say(*second, 11);
      fork.reset();
      say(*session, 30);
    }
    EXPECT_EQ(all.size(), 3u * (7 + 9 + 5 + 11 + 30));
  }
  EXPECT_EQ(told[0], told[1]);
}

// Every session goes on as it would have, wherever V are; a bank of other streams says no.
TEST_P(ValuesAway, SavedContextsGoOn) {
  const std::string file = std::filesystem::path(testing::TempDir()) /
                           ("omnikv_values_away_" + std::to_string(::getpid()) + GetParam());
  const auto near = Make(KCache(), "device");
  const auto away = Make(KCache(), "auto");
  const auto session = Take(away->NewSession(KCache()));
  ASSERT_TRUE(session->Prompt(Numbers(150, 0)).ok());
  Generate(*session, 9);
  ASSERT_TRUE(session->Save(file).ok());
  const auto restored = Take(away->Restore(file));
  EXPECT_EQ(Logits(*away, *restored), Logits(*away, *session));
  EXPECT_EQ(Generate(*restored, 20), Generate(*session, 20));
  ASSERT_TRUE(restored->Prompt(Numbers(220, 0)).ok());
  ASSERT_TRUE(session->Prompt(Numbers(220, 0)).ok());
  EXPECT_EQ(Generate(*restored, 20), Generate(*session, 20));
  const auto here = Take(near->Restore(file));
  EXPECT_EQ(Generate(*here, 20), Generate(*Take(away->Restore(file)), 20));
  const PolicyOptions full{.name = "full"};
  const auto whole = Make(full, "device");
  const Status elsewhere = whole->Restore(file).status();
  EXPECT_EQ(elsewhere.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(elsewhere.message(), HasSubstr("other streams"));
  ASSERT_TRUE(Take(whole->NewSession(full))->Save(file).ok());
  EXPECT_THAT(away->Restore(file).status().message(), HasSubstr("other streams"));
  std::filesystem::remove(file);
}

// Device memory per token is that of K, and of V in the first layers.
TEST_P(ValuesAway, BytesHeldPerToken) {
  for (const int32_t first : {0, 1, 4}) {
    const PolicyOptions policy = KCache({{"first_layers", std::to_string(first)}});
    const auto engine = Make(policy, "auto");
    const auto session = Take(engine->NewSession(policy));
    size_t device[2], host[2];
    for (const size_t blocks : {2, 5}) {
      ASSERT_TRUE(session->FillContext(static_cast<int64_t>(blocks * kBlock)).ok());
      const SessionStats stats = session->stats();
      device[blocks / 5] = stats.held_bytes.device;
      host[blocks / 5] = stats.held_bytes.host;
    }
    const size_t plane = 3 * kBlock * PlaneBytes();
    EXPECT_EQ(device[1] - device[0], static_cast<size_t>(kLayers + first) * plane);
    EXPECT_EQ(host[1] - host[0], static_cast<size_t>(kLayers - first) * plane);
    EXPECT_EQ(host[0], static_cast<size_t>(kLayers - first) * 2 * kBlock * PlaneBytes());
    // A step fetches from there, for each KV head, what two query heads chose, 16 rows of V each,
    // or nothing.
    ASSERT_TRUE(session->Step(7).ok());
    const size_t sent = session->stats().transfer_bytes_per_step;
    const size_t of_one = static_cast<size_t>(kLayers - first) * 16 * PlaneBytes();
    EXPECT_GE(sent, sums() ? 0 : of_one);
    EXPECT_LE(sent, sums() ? 0 : 2 * of_one);
  }
}

// Decode rows of two groups, and beside them chunks of a prompt that joins one of them.
TEST_P(ValuesAway, StepsOfSeveralGroupsGiveTheSameLogits) {
  const PolicyOptions few = KCache({{"budget", "8"}});
  const auto near = LogitsOfTwoGroups(*Make(KCache(), "device"), KCache(), few);
  const auto away = LogitsOfTwoGroups(*Make(KCache(), "host"), KCache(), few);
  ASSERT_EQ(near.size(), away.size());
  for (size_t i = 0; i < near.size(); ++i) ExpectSame(away[i], near[i]);
}

// Policies that know nothing of it read the same, only slower.
TEST_P(ValuesAway, OtherPoliciesRunBesideIt) {
  const auto near_engine = Make(KCache(), "device");
  const auto away_engine = Make(KCache(), "auto");
  const std::vector<PolicyOptions> others = {
      {.name = "full"},
      {.name = "brutal_offload"},
      {.name = "streaming", .settings = {{"budget", "70"}}},
      {.name = "quest", .settings = {{"budget", "32"}}},
      {.name = "omnikv", .settings = {{"filters", "1,3"}, {"budget", "24"}}}};
  for (const PolicyOptions& policy : others) {
    SCOPED_TRACE(policy.name);
    std::vector<std::vector<float>> told;
    std::vector<size_t> brought;
    for (const auto* engine : {&near_engine, &away_engine}) {
      const auto session = Take((*engine)->NewSession(KCache()));
      ASSERT_TRUE(session->Prompt(Numbers(200, 0)).ok());
      Generate(*session, 3);
      const auto fork = Take(session->Fork(policy));
      for (const size_t turn : {0, 230}) {
        if (turn > 0) {
          ASSERT_TRUE(fork->Prompt(Numbers(turn, 0)).ok());
        }
        Generate(*fork, 12);
        told.push_back(Logits(**engine, *fork));
      }
      brought.push_back(fork->stats().transfer_bytes_per_step);
    }
    EXPECT_EQ(brought[0], 0u);
    EXPECT_GT(brought[1], 0u) << "V that are read in place cross the bus";
    ExpectSame(told[2], told[0]);
    ExpectSame(told[3], told[1]);
  }
  for (const char* name : {"tova", "snapkv"}) {
    const Status refused = away_engine->NewSession({.name = name}).status();
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
    EXPECT_THAT(refused.message(), HasSubstr(std::string("open the engine with ") + name));
    EXPECT_EQ(away_engine->CheckPolicy({.name = name}).message(), refused.message());
  }
}

// Not on a card: a batch sums in another order than a session there.
class ValuesAwayOfBatches : public ValuesAway {};

TEST_P(ValuesAwayOfBatches, GiveWhatSessionsGive) {
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < 5; ++i) prompts.push_back(Numbers(60 + 31 * i, i));
  for (const bool grouped : {true, false}) {
    ExpectABatchGivesWhatSessionsGive(*Make(KCache(), "auto", 0, grouped), KCache(), prompts);
  }
}

INSTANTIATE_TEST_SUITE_P(On, ValuesAway,
                         ::testing::Values("ref", "lanes", "cuda", "ref_sums", "lanes_sums",
                                           "cuda_sums"),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(On, ValuesAwayOfBatches,
                         ::testing::Values("ref", "lanes", "ref_sums", "lanes_sums"), NameOf);

}  // namespace
}  // namespace omnikv::values_away_test
