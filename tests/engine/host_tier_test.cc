// Sessions whose sparse layers live on the host, against sessions that have all on one side: on a
// card that is played by the reference backend, so that no card is needed.
#include <gtest/gtest.h>

#include "backend/ref/ref_backend.h"
#include "backend/trace/trace_backend.h"
#include "engine/core.h"
#include "model/generated.h"

namespace omnikv {
namespace {

struct Inner {
  std::unique_ptr<Backend> ref = MakeRefBackend();
};

// Takes itself for a device: the engine places layers, runs steps ahead, and reads tokens later.
class Card : private Inner, public TraceBackend {
 public:
  Card() : TraceBackend(*ref) { set_logging(false); }
  bool OnDevice() const override { return true; }
};

PolicyOptions Policy(const SettingList& more) {
  PolicyOptions policy{
      .name = "omnikv",
      .settings = {{"filters", "1,3"}, {"dense_after_filter", "0"}, {"budget", "24"}}};
  for (const auto& setting : more) policy.settings.push_back(setting);
  return policy;
}

std::unique_ptr<Engine> Make(const std::string& place, const PolicyOptions& policy) {
  auto core = std::make_unique<EngineCore>();
  core->backend = std::make_unique<Card>();
  core->options = {.context = 400, .place = place, .max_sessions = 3};
  core->options.policy = policy;
  core->options.kv_dtype = "f32";
  core->options.prefill_chunk = 48;
  ModelConfig& config = core->config;
  config.family = "llama";
  config.n_layers = 6;
  config.d_model = 64;
  config.n_heads = 4;
  config.n_kv_heads = 2;
  config.head_dim = 16;
  config.ffn = 96;
  config.vocab = 160;
  config.max_context = 400;
  config.attn_scale = 1.2f;  // sharp enough that which tokens are read matters
  config.ropes.push_back({.theta = 10000, .dim = 16});
  config.layers.assign(6, LayerConfig{});
  auto weights = GenerateWeights(*core->backend, config, DType::kF32);
  EXPECT_TRUE(weights.ok());
  core->weights = std::move(*weights);
  auto plan = PlanMemory(core->options, config, core->weights.bytes, true, *core->backend);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->host_layers, place == "host" ? 3 : 0);
  if (place == "host") plan->cache_tokens = 40;  // of 400: some rows must leave
  auto engine = MakeEngine(std::move(core), *plan, 0);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

std::unique_ptr<Session> Open(Engine& engine, const PolicyOptions& policy) {
  auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(*session);
}

std::vector<int32_t> Numbers(size_t n, size_t first) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((first + i) * 37 % 160);
  return tokens;
}

std::vector<int32_t> Generate(Session& session, int64_t n) {
  const auto result = session.Generate({.max_tokens = n, .ignore_eos = true});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result->tokens : std::vector<int32_t>{};
}

std::vector<float> Logits(const Engine& engine, const Session& session) {
  return {session.logits(), session.logits() + engine.vocab()};
}

// Policies whose steps differ: with and without a tail of tokens that is always read, a window of
// queries, plain attention up to a length.
const std::vector<SettingList> kPolicies = {
    {},
    {{"tail", "1"}},
    {{"tail", "4"}, {"selector", "uniform"}, {"window", "5"}},
    {{"tail", "1"}, {"dense_below", "190"}}};

// Turns of a chat, in pieces that end between two blocks and while a step is ahead.
TEST(HostTier, TurnsGiveTheSameTokens) {
  for (const SettingList& settings : kPolicies) {
    const PolicyOptions policy = Policy(settings);
    const auto own_engine = Make("device", policy);
    const auto host_engine = Make("host", policy);
    const auto own = Open(*own_engine, policy);
    const auto host = Open(*host_engine, policy);
    SCOPED_TRACE(own->stats().settings);
    for (const size_t turn : {130, 185, 150, 240}) {
      ASSERT_TRUE(own->Prompt(Numbers(turn, 0)).ok());
      ASSERT_TRUE(host->Prompt(Numbers(turn, 0)).ok());
      for (const int64_t n : {3, 30, 1, 15}) {
        ASSERT_EQ(Generate(*host, n), Generate(*own, n)) << "turn of " << turn;
        ASSERT_EQ(Logits(*host_engine, *host), Logits(*own_engine, *own));
        // Not what it would have gone on with: a row that was made ahead is made anew.
        ASSERT_TRUE(own->Step(static_cast<int32_t>(n)).ok());
        ASSERT_TRUE(host->Step(static_cast<int32_t>(n)).ok());
      }
    }
    EXPECT_GT(host->stats().host_bytes, 0u);
    ASSERT_TRUE(host->stats().hit_rate.has_value());
    EXPECT_FALSE(own->stats().hit_rate.has_value());
  }
}

// Forks part on the host as they do elsewhere; blocks that one leaves serve another.
TEST(HostTier, ForksGiveTheSameTokens) {
  for (const SettingList& settings : kPolicies) {
    const PolicyOptions policy = Policy(settings);
    std::vector<std::vector<int32_t>> told;  // by each engine
    for (const char* place : {"device", "host"}) {
      const auto engine = Make(place, policy);
      const auto session = Open(*engine, policy);
      std::vector<int32_t>& all = told.emplace_back();
      const auto say = [&](Session& of, int64_t n) {
        for (const int32_t token : Generate(of, n)) all.push_back(token);
      };
      ASSERT_TRUE(session->Prompt(Numbers(150, 0)).ok());
      for (int round = 0; round < 3; ++round) {
        say(*session, 7);
        auto fork = session->Fork();
        ASSERT_TRUE(fork.ok()) << fork.status().message();
        ASSERT_TRUE((*fork)->Step(17 + round).ok());
        ASSERT_TRUE(session->Step(40 + round).ok());  // leaves the block that both ended in
        say(**fork, 9);
        say(*session, 5);
        {
          auto second = (*fork)->Fork();
          ASSERT_TRUE(second.ok());
          ASSERT_TRUE((*second)->Prompt(Numbers(170, 0)).ok());
          say(**second, 11);
        }
        fork->reset();
        say(*session, 30);
      }
      EXPECT_EQ(all.size(), 3u * (7 + 9 + 5 + 11 + 30));
    }
    EXPECT_EQ(told[0], told[1]) << settings.size();
  }
}

TEST(HostTier, EveryTurnPrimesTheFirstStep) {
  const PolicyOptions policy = Policy({});
  const auto engine = Make("host", policy);
  const auto session = Open(*engine, policy);
  for (const size_t turn : {150, 190, 100}) {
    ASSERT_TRUE(session->Prompt(Numbers(turn, 0)).ok());
    EXPECT_FALSE(session->stats().hit_rate.has_value());
    ASSERT_TRUE(session->Step(session->tokens().back()).ok());
    const SessionStats stats = session->stats();
    ASSERT_TRUE(stats.hit_rate.has_value());
    EXPECT_GT(*stats.hit_rate, 0);
    // Three layers of 23 rows, the step's own beside them, of 2 * (16 + 16) floats.
    const double missed = (1 - *stats.hit_rate) * 3 * 23;
    EXPECT_NEAR(static_cast<double>(stats.transfer_bytes_per_step), missed * 256, 1);
  }
  // Made-up contexts have no last query.
  ASSERT_TRUE(session->FillContext(150).ok());
  ASSERT_TRUE(session->Step(7).ok());
  EXPECT_EQ(session->stats().hit_rate, 0.0);
}

// A choice of everything brings everything: nothing is left to fetch.
TEST(HostTier, AChoiceOfAllLeavesNothingToFetch) {
  PolicyOptions policy = Policy({});
  policy.settings.back().second = "200";
  const auto engine = Make("host", policy);
  const auto session = Open(*engine, policy);
  ASSERT_TRUE(session->Prompt(Numbers(150, 0)).ok());
  Generate(*session, 20);
  const SessionStats stats = session->stats();
  EXPECT_EQ(stats.hit_rate, 1.0);
  EXPECT_EQ(stats.transfer_bytes_per_step, 0u);
}

}  // namespace
}  // namespace omnikv
