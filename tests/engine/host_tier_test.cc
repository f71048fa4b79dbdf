// Sessions whose sparse layers live on the host, against sessions that have all near: on a card
// that is played by the reference backend, so that no card is needed, and on a card where there is
// one.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "../made_up_model.h"
#include "backend/ref/ref_backend.h"
#include "backend/trace/trace_backend.h"
#include "batch_as_sessions.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "model/generated.h"
#include "on_device.h"
#include "two_groups.h"

namespace omnikv::host_tier_test {
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
      .settings = {
          {"filters", "1,3"}, {"dense_after_filter", "0"}, {"tail", "8"}, {"budget", "24"}}};
  for (const auto& setting : more) policy.settings.push_back(setting);
  return policy;
}

// Where K/V lie: all on the card, or sparse layers on the host, with room for few of their rows on
// the card or for all.
enum class Room { kDevice, kFew, kAll };

class HostTier : public OnDevice {
 protected:
  static bool on_cuda() { return GetParam() == "cuda"; }
  // Bit by bit the same as kFew: to `ref` every place is. A card's kernels cut a choice into other
  // pieces than the slots that stand in for it.
  static Room Near() { return on_cuda() ? Room::kAll : Room::kDevice; }
  // The first layers have a sliding window where `windows` > 0.
  static std::unique_ptr<Engine> Make(Room room, const PolicyOptions& policy, size_t windows = 0,
                                      int32_t stages = 2);
};

std::unique_ptr<Engine> HostTier::Make(Room room, const PolicyOptions& policy, size_t windows,
                                       int32_t stages) {
  const std::string place = room == Room::kDevice ? "device" : "host";
  auto core = std::make_unique<EngineCore>();
  core->backend = on_cuda() ? *MakeBackend({.device = "cuda"}) : std::make_unique<Card>();
  core->options = {.context = 400, .place = place, .max_sessions = 16};
  core->options.policy = policy;
  core->options.kv_dtype = on_cuda() ? "f16" : "f32";
  core->options.prefill_chunk = 48;
  SmallShape shape{.max_context = 400};
  if (on_cuda()) shape.d_model = 128, shape.head_dim = 64, shape.ffn = 256;
  ModelConfig& config = core->config = SmallLlama(shape);
  for (size_t layer = 0; layer < windows; ++layer) {
    config.layers.insert(config.layers.begin(), config.layers[0]);
    config.layers[0].window = 24;
    ++config.n_layers;
  }
  auto weights = GenerateWeights(*core->backend, config, on_cuda() ? DType::kBF16 : DType::kF32);
  EXPECT_TRUE(weights.ok());
  core->weights = std::move(*weights);
  auto plan = PlanMemory(core->options, config, core->weights.bytes,
                         on_cuda() ? DType::kBF16 : DType::kF32, *core->backend);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const auto indexed = std::count(policy.settings.begin(), policy.settings.end(),
                                  SettingList::value_type("dense", "indexed"));
  const int32_t can_go = policy.name == "omnikv" && indexed == 0 ? 3 : 6;
  EXPECT_EQ(plan->host_layers, place == "host" ? can_go : 0);
  if (room == Room::kFew) plan->working_set = 40;  // some rows must leave
  if (room == Room::kAll) plan->working_set = 500;
  plan->stages = stages;
  auto engine = MakeEngine(std::move(core), *plan, 0);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

std::unique_ptr<Session> Open(Engine& engine, const PolicyOptions& policy) {
  auto session = engine.NewSession(policy);
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

// Policies whose steps differ: with and without a tail of tokens that is always read, a window of
// queries, plain attention up to a length.
const std::vector<SettingList> kPolicies = {
    {},
    {{"tail", "1"}},
    {{"tail", "4"}, {"selector", "uniform"}, {"window", "5"}},
    {{"tail", "1"}, {"dense_below", "190"}}};

// Turns of a chat, in pieces that end between two blocks and while a step is ahead.
TEST_P(HostTier, TurnsGiveTheSameTokens) {
  for (const SettingList& settings : kPolicies) {
    const PolicyOptions policy = Policy(settings);
    const auto own_engine = Make(Near(), policy);
    const auto host_engine = Make(Room::kFew, policy);
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
    EXPECT_GT(host->stats().held_bytes.host, 0u);
    ASSERT_TRUE(host->stats().hit_rate.has_value());
    EXPECT_GT(own->stats().hit_rate.value_or(1), *host->stats().hit_rate);
  }
}

// Forks part on the host as they do elsewhere; blocks that one leaves serve another.
TEST_P(HostTier, ForksGiveTheSameTokens) {
  for (const SettingList& settings : kPolicies) {
    const PolicyOptions policy = Policy(settings);
    std::vector<std::vector<int32_t>> told;  // by each engine
    for (const Room room : {Near(), Room::kFew}) {
      const auto engine = Make(room, policy);
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

TEST_P(HostTier, EveryTurnPrimesTheFirstStep) {
  const PolicyOptions policy = Policy({});
  const auto engine = Make(Room::kFew, policy);
  const auto session = Open(*engine, policy);
  for (const size_t turn : {150, 190, 100}) {
    ASSERT_TRUE(session->Prompt(Numbers(turn, 0)).ok());
    EXPECT_FALSE(session->stats().hit_rate.has_value());
    ASSERT_TRUE(session->Step(session->tokens().back()).ok());
    const SessionStats stats = session->stats();
    ASSERT_TRUE(stats.hit_rate.has_value());
    EXPECT_GT(*stats.hit_rate, 0);
    // Three layers of 24 rows, the step's own beside them, of 2 * (16 + 16) floats or 2 * (64 + 64)
    // halves.
    const double missed = (1 - *stats.hit_rate) * 3 * 24;
    const double row_bytes = on_cuda() ? 512 : 256;
    EXPECT_NEAR(static_cast<double>(stats.transfer_bytes_per_step), missed * row_bytes, 1);
  }
  // Made-up contexts have no last query.
  ASSERT_TRUE(session->FillContext(150).ok());
  ASSERT_TRUE(session->Step(7).ok());
  EXPECT_EQ(session->stats().hit_rate, 0.0);
}

// A choice of everything brings everything: nothing is left to fetch.
TEST_P(HostTier, AChoiceOfAllLeavesNothingToFetch) {
  PolicyOptions policy = Policy({});
  policy.settings.back().second = "200";
  const auto engine = Make(Room::kFew, policy);
  const auto session = Open(*engine, policy);
  ASSERT_TRUE(session->Prompt(Numbers(150, 0)).ok());
  Generate(*session, 20);
  const SessionStats stats = session->stats();
  EXPECT_EQ(stats.hit_rate, 1.0);
  EXPECT_EQ(stats.transfer_bytes_per_step, 0u);
}

// With one stage, a layer's past comes when the layer before it has been read.
TEST_P(HostTier, OneStageIsEnoughForPrompts) {
  const PolicyOptions policy = Policy({});
  const auto own_engine = Make(Near(), policy);
  const auto host_engine = Make(Room::kFew, policy, /*windows=*/0, /*stages=*/1);
  const auto own = Open(*own_engine, policy);
  const auto host = Open(*host_engine, policy);
  for (const size_t turn : {200, 90}) {
    ASSERT_TRUE(own->Prompt(Numbers(turn, 0)).ok());
    ASSERT_TRUE(host->Prompt(Numbers(turn, 0)).ok());
    ASSERT_EQ(Logits(*host_engine, *host), Logits(*own_engine, *own)) << "turn of " << turn;
    ASSERT_EQ(Generate(*host, 10), Generate(*own, 10)) << "turn of " << turn;
  }
}

// Eight sequences of other lengths, of which some wait, one leaves and another comes.
TEST_P(HostTier, BatchesGiveTheSameTokens) {
  for (const SettingList& settings : kPolicies) {
    const PolicyOptions policy = Policy(settings);
    const auto near_engine = Make(Near(), policy);
    const auto host_engine = Make(Room::kFew, policy);
    const auto near = *Batch::Open(CoreOf(*near_engine), policy, 8);
    const auto host = *Batch::Open(CoreOf(*host_engine), policy, 8);
    SCOPED_TRACE(near->settings());
    std::vector<Batch::Next> next;
    const auto join = [&](size_t tokens) {
      const auto member = near->Join(Numbers(tokens, tokens));
      ASSERT_TRUE(member.ok()) << member.status().message();
      const auto on_host = host->Join(Numbers(tokens, tokens));
      ASSERT_TRUE(on_host.ok()) << on_host.status().message();
      ASSERT_EQ(*member, *on_host);
      next.push_back({.member = *member, .token = static_cast<int32_t>(tokens % 100)});
    };
    const auto go_on = [&](std::span<Batch::Next> rows, int64_t steps) {
      const auto want = near->Generate(rows, steps);
      const auto got = host->Generate(rows, steps);
      ASSERT_TRUE(want.ok()) << want.status().message();
      ASSERT_TRUE(got.ok()) << got.status().message();
      ASSERT_EQ(*want, *got);
      for (size_t r = 0; r < rows.size(); ++r) {
        const int32_t member = rows[r].member;
        ASSERT_EQ(
            std::vector<float>(near->logits(member), near->logits(member) + near_engine->vocab()),
            std::vector<float>(host->logits(member), host->logits(member) + near_engine->vocab()))
            << "member " << member;
        rows[r].token = (*got)[r].back();
      }
    };
    for (size_t i = 0; i < 8; ++i) join(60 + 19 * i);
    go_on(next, 7);
    go_on(std::span(next).subspan(2, 3), 5);
    near->Leave(next[3].member);
    host->Leave(next[3].member);
    next.erase(next.begin() + 3);
    go_on(next, 3);
    join(120);
    go_on(next, 30);
    // In another order.
    std::reverse(next.begin(), next.end());
    go_on(next, 4);
  }
}

// Not on a card: a batch sums in another order than a session there.
class HostTierOnRef : public HostTier {};
INSTANTIATE_TEST_SUITE_P(On, HostTierOnRef, ::testing::Values("ref"), NameOf);

// A batch gives each of its sequences what a session gives.
TEST_P(HostTierOnRef, BatchesGiveWhatSessionsGive) {
  for (const PolicyOptions& policy :
       {Policy({}), Policy({{"dense", "indexed"}, {"rescore", "2"}})}) {
    std::vector<std::vector<int32_t>> prompts;
    for (size_t i = 0; i < 8; ++i) prompts.push_back(Numbers(60 + 19 * i, i));
    ExpectABatchGivesWhatSessionsGive(*Make(Room::kFew, policy), policy, prompts);
  }
}

// Decode rows of two groups, and beside them chunks of a prompt that joins one of them.
TEST_P(HostTier, StepsOfSeveralGroupsGiveTheSameLogits) {
  const PolicyOptions policy = Policy({});
  const auto near = LogitsOfTwoGroups(*Make(Near(), policy), policy, policy);
  const auto host = LogitsOfTwoGroups(*Make(Room::kFew, policy), policy, policy);
  ASSERT_EQ(near.size(), host.size());
  for (size_t i = 0; i < near.size(); ++i) ASSERT_EQ(near[i], host[i]) << "logits " << i;
}

TEST_P(HostTier, LayersThatPassThroughTheCardShareNoStep) {
  PolicyOptions policy{.name = "brutal_offload", .settings = {}};
  const auto engine = Make(Room::kFew, policy);
  EXPECT_EQ(Batch::Open(CoreOf(*engine), policy, 2).status().code(), StatusCode::kUnsupported);
  Stepper stepper(CoreOf(*engine));
  const auto a = *RowGroup::Open(CoreOf(*engine), policy, 1);
  const auto b = *RowGroup::Open(CoreOf(*engine), {.name = "full"}, 1);
  const std::vector<DecodeRow> rows = {{a.get(), *a->Join(), 3}, {b.get(), *b->Join(), 4}};
  std::vector<float> logits(2 * static_cast<size_t>(engine->vocab()));
  const Status status =
      stepper.Step(rows, std::vector<float*>{logits.data(), logits.data() + engine->vocab()});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("brutal_offload"), std::string::npos) << status.message();
  EXPECT_EQ(a->length(0), 0);
}

// Layers with a sliding window come first, so the block table of the first layer is another one.
TEST_P(HostTier, SlidingWindowsBesideWorkingSetsChangeNothing) {
  const PolicyOptions policy = Policy({});
  const auto near_engine = Make(Near(), policy, /*windows=*/2);
  const auto host_engine = Make(Room::kFew, policy, /*windows=*/2);
  const auto near = Open(*near_engine, policy);
  const auto host = Open(*host_engine, policy);
  ASSERT_TRUE(near->Prompt(Numbers(330, 0)).ok());
  ASSERT_TRUE(host->Prompt(Numbers(330, 0)).ok());
  ASSERT_EQ(Generate(*host, 40), Generate(*near, 40));
  EXPECT_EQ(Logits(*host_engine, *host), Logits(*near_engine, *near));
}

INSTANTIATE_TEST_SUITE_P(On, HostTier, ::testing::Values("ref", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::host_tier_test
