// Where a model's K/V go on a card of any size, without a card: plans are arithmetic.
#include "engine/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "bank/working_sets.h"
#include "model/generated.h"

namespace omnikv::placement_test {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

constexpr size_t kGiB = size_t{1} << 30;

// A card with so much memory; runs nothing.
class Card : public HostBackend {
 public:
  explicit Card(size_t memory) : memory_(memory) {}
  std::string_view Name() const override { return "card"; }
  std::string Describe() const override { return "a card"; }
  Support Supports(const Op&) const override { return {}; }
  size_t AvailableMemory() const override { return memory_; }
  bool OnDevice() const override { return true; }

 protected:
  void Run(const Op&) override {}

 private:
  size_t memory_;
};

// Llama-3-8B, 128K tokens of f16 K/V: weights 15 GiB, K/V 16 GiB.
class PlacementTest : public testing::Test {
 protected:
  PlacementTest() {
    options_.context = 131072;
    options_.policy = {.name = "omnikv",
                       .settings = {{"filters", "2,8,18"},
                                    {"budget", "1792"},
                                    {"tail", "256"},
                                    {"dense_after_filter", "1"}}};
  }
  Result<MemoryPlan> Plan(size_t memory) const {
    const Card card(memory);
    return PlanMemory(options_, config_, weights_, DType::kBF16, card);
  }
  // What the plan puts on the card; all of the policy's room taken.
  static size_t OnCard(const MemoryPlan& plan) {
    return plan.weights + plan.activations + plan.kv + plan.working_sets + plan.policies;
  }

  EngineOptions options_;
  ModelConfig config_ = *GeometryConfig("llama3-8b");
  size_t weights_ = GeneratedWeightBytes(config_, DType::kBF16);
};

TEST_F(PlacementTest, ALargeCardHoldsEverything) {
  const auto plan = Plan(80 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->host_layers, 0);
  EXPECT_EQ(plan->kv_host, 0u);
  EXPECT_EQ(plan->kv, size_t{131072} * 131072);  // 128 KiB a token
  EXPECT_LE(OnCard(*plan), 80 * kGiB);
}

TEST_F(PlacementTest, SessionsShareAsManyTokensAsFit) {
  options_.policy = {.name = "full"};
  options_.place = "device";
  options_.max_sessions = 8;
  EXPECT_FALSE(Plan(60 * kGiB).ok());  // of a context each
  options_.kv_tokens = EngineOptions::kAsManyAsFit;
  int64_t last = 0;
  for (const size_t gib : {40, 60, 80, 300}) {
    const auto plan = Plan(gib * kGiB);
    ASSERT_TRUE(plan.ok()) << gib << ": " << plan.status().message();
    EXPECT_LE(OnCard(*plan), gib * kGiB);
    EXPECT_GT(plan->kv_tokens, last);
    EXPECT_EQ(MakeBankConfig(config_, *plan, 8).PoolTokens(), plan->kv_tokens + 8 * 64);
    // What is left is a part in sixteen of what there was, and what policies take.
    EXPECT_TRUE(gib == 300 || OnCard(*plan) > (gib - 2) * kGiB) << gib;
    last = plan->kv_tokens;
  }
  EXPECT_EQ(last, 8 * 131072);
  options_.kv_tokens = 200'000;
  const auto plan = Plan(60 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->kv, size_t{200'000} * 131072);
  EXPECT_THAT(Plan(36 * kGiB).status().message(), HasSubstr("does not fit"));
  options_.kv_tokens = 1000;
  EXPECT_THAT(Plan(60 * kGiB).status().message(),
              HasSubstr("`kv_tokens` is 1000, expected at least the context of 131072"));
  options_.kv_tokens = -2;
  EXPECT_THAT(Plan(60 * kGiB).status().message(), HasSubstr("`kv_tokens` is -2"));
}

TEST_F(PlacementTest, ASmallerCardSendsSparseLayersAway) {
  int32_t last = 0;
  for (const size_t gib : {30, 28, 26, 24}) {
    const auto plan = Plan(gib * kGiB);
    ASSERT_TRUE(plan.ok()) << gib << ": " << plan.status().message();
    EXPECT_LE(OnCard(*plan), gib * kGiB);
    EXPECT_GE(plan->host_layers, last) << "less memory, fewer layers on the host";
    last = plan->host_layers;
    ASSERT_GT(plan->host_layers, 0);
    EXPECT_GE(plan->working_set, 2048);
    EXPECT_EQ(plan->kv / (32u - static_cast<size_t>(plan->host_layers)),
              plan->kv_host / static_cast<size_t>(plan->host_layers));
    // Filters, the layers after them and those below the first stay.
    for (const size_t dense : {0, 1, 2, 3, 8, 9, 18, 19}) {
      EXPECT_EQ(plan->tiers[dense], TierKind::kDevice) << "layer " << dense;
    }
    const MemoryNeeds needs = NeedsOf(*plan, Card(gib * kGiB));
    EXPECT_EQ(needs.host_layers.size(), static_cast<size_t>(plan->host_layers));
    EXPECT_EQ(needs.host_layers.back(), 31) << "the last layers go first";
    EXPECT_EQ(needs.working_set, plan->working_set);
    // The stages and the working sets are counted byte by byte.
    const BankConfig bank = MakeBankConfig(config_, *plan, 1);
    const WorkingSetConfig sets{.reads = {.selection_of = std::vector<int32_t>(32, -1),
                                          .n_selections = 3,
                                          .max_tokens = 2048},
                                .n_slots = plan->working_set};
    EXPECT_GT(plan->working_sets, Bank::StageBytes(bank) + WorkingSets::Bytes(bank, sets));
  }
}

// Dense layers that read few rows go after all others, and have no working set.
TEST_F(PlacementTest, LayersThatReadInPlaceGoLast) {
  options_.policy.settings.push_back({"dense", "indexed"});
  bool dense = false;
  for (const size_t gib : {30, 26, 24, 22, 20, 19}) {
    const auto plan = Plan(gib * kGiB);
    ASSERT_TRUE(plan.ok()) << gib << ": " << plan.status().message();
    EXPECT_LE(OnCard(*plan), gib * kGiB);
    for (const size_t layer : {0, 1, 2, 3, 8, 9, 18, 19}) {
      if (plan->tiers[layer] == TierKind::kDevice) continue;
      dense = true;
      EXPECT_GE(plan->host_layers, 25) << "before a layer with a working set";
    }
  }
  EXPECT_TRUE(dense);
  options_.place = "host";
  const auto all = Plan(27 * kGiB);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ(all->host_layers, 32);
  // The room that their K/V leave widens the working sets of the other 24.
  options_.policy.settings.pop_back();
  const auto sparse = Plan(27 * kGiB);
  ASSERT_TRUE(sparse.ok()) << sparse.status().message();
  EXPECT_EQ(sparse->host_layers, 24);
  EXPECT_GT(all->working_set, sparse->working_set);
}

// A stage has room for a layer: prompts get a second one where it fits.
TEST_F(PlacementTest, OneStageIsForContextsThatWouldNotFitOtherwise) {
  config_ = *GeometryConfig("llama-1b");
  weights_ = GeneratedWeightBytes(config_, DType::kBF16);
  options_.context = 262144;
  options_.place = "host";
  options_.policy.settings = {{"filters", "2,8"}, {"budget", "2048"}, {"dense", "indexed"}};
  constexpr size_t kStep = size_t{64} << 20;
  std::vector<int32_t> stages;  // by less and less memory
  for (size_t memory = 8 * kGiB; true; memory -= kStep) {
    const auto plan = Plan(memory);
    if (!plan.ok()) break;
    EXPECT_LE(OnCard(*plan), memory);
    EXPECT_EQ(plan->host_layers, 16);
    EXPECT_GE(plan->working_sets, Bank::StageBytes(MakeBankConfig(config_, *plan, 1)));
    if (stages.empty() || stages.back() != plan->stages) stages.push_back(plan->stages);
  }
  EXPECT_EQ(stages, (std::vector<int32_t>{2, 1}));
}

// The host attends for layers that read a selection, and leaves those that read in place alone.
TEST_F(PlacementTest, LayersThatReadInPlaceAreNotAttendedToAway) {
  options_.place = "host";
  options_.host_reads = "attend";
  const auto sparse = Plan(27 * kGiB);
  ASSERT_TRUE(sparse.ok()) << sparse.status().message();
  ASSERT_EQ(sparse->host_layers, 24);
  options_.policy.settings.push_back({"dense", "indexed"});
  const auto all = Plan(27 * kGiB);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_TRUE(all->attends_away);
  EXPECT_EQ(all->host_layers, 32);
  const auto rows = [&](const MemoryPlan& plan) {
    return plan.working_sets - Bank::StageBytes(MakeBankConfig(config_, plan, 1));
  };
  EXPECT_EQ(rows(*all), rows(*sparse)) << "the card keeps last tokens of 24 layers";
  // Where no layer reads a selection, the others still go.
  options_.host_reads = "auto";
  options_.policy.settings.push_back({"select_every_layer", "1"});
  const auto none = Plan(27 * kGiB);
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_FALSE(none->attends_away);
  EXPECT_EQ(none->host_layers, 32);
  EXPECT_EQ(none->working_set, 0);
}

// Whoever attends there reads other tokens of each KV head: where heads fill their rows.
TEST_F(PlacementTest, RowsLieByHeadWhereTheHostReadsListsOfHeads) {
  options_.place = "host";
  const auto by_head = [&](const char* policy, const char* host_reads, DType dtype) {
    options_.policy = {.name = policy, .settings = {}};
    options_.host_reads = host_reads;
    options_.kv_dtype = DTypeName(dtype);
    const auto plan = Plan(40 * kGiB);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return std::vector<bool>{};
    std::vector<bool> layers;
    for (const LayerSpec& layer : MakeBankConfig(config_, *plan, 1).layers) {
      EXPECT_TRUE(layer.OnHost() || !layer.streams.front().by_head);
      layers.push_back(layer.streams.front().by_head);
    }
    return layers;
  };
  const auto count = [](const std::vector<bool>& layers) {
    return std::count(layers.begin(), layers.end(), true);
  };
  EXPECT_EQ(count(by_head("blocks", "auto", DType::kBF16)), 30);
  EXPECT_EQ(count(by_head("blocks", "attend", DType::kQ8_0)), 30);
  EXPECT_EQ(count(by_head("blocks", "fetch", DType::kBF16)), 0);
  EXPECT_EQ(count(by_head("omnikv", "attend", DType::kBF16)), 0) << "one list for all heads";
  config_.head_dim = 64;
  EXPECT_EQ(count(by_head("blocks", "auto", DType::kBF16)), 30);
  EXPECT_EQ(count(by_head("blocks", "auto", DType::kQ8_0)), 0) << "rows of 136 bytes";
}

TEST_F(PlacementTest, MoreMemoryWidensTheWorkingSets) {
  options_.place = "host";
  const auto small = Plan(24 * kGiB);
  const auto large = Plan(27 * kGiB);
  ASSERT_TRUE(small.ok() && large.ok());
  EXPECT_EQ(small->host_layers, 24);
  EXPECT_EQ(large->host_layers, 24);
  EXPECT_GT(large->working_set, small->working_set);
  EXPECT_LE(large->working_set, 131072 + 1);
}

// Selections that no working set can hold are attended to by the host: the card keeps the last
// tokens alone. What can be fetched is fetched unless that is asked for.
TEST_F(PlacementTest, WhatCannotBeFetchedIsAttendedToAway) {
  const PolicyOptions omnikv = options_.policy;
  options_.policy = {.name = "blocks", .settings = {{"dense_layers", "0"}}};
  const auto plan = Plan(24 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_TRUE(plan->attends_away);
  EXPECT_TRUE(NeedsOf(*plan, Card(24 * kGiB)).attends_away);
  EXPECT_GT(plan->host_layers, 0);
  // 33 blocks of 128, a block of the bank where they begin and one that ran ahead.
  EXPECT_EQ(plan->working_set, 33 * 128 + 2 * 64);
  const size_t rows = plan->working_sets - Bank::StageBytes(MakeBankConfig(config_, *plan, 1));
  EXPECT_GT(rows, static_cast<size_t>(plan->host_layers * plan->working_set) * 4096);
  EXPECT_LT(rows, static_cast<size_t>(plan->host_layers * plan->working_set) * 4096 + (1 << 20));
  options_.host_reads = "fetch";
  options_.policy.settings.emplace_back("lists", "per_kv_head");
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("`host_reads` is fetch"));
  options_.policy = omnikv;
  EXPECT_FALSE(Plan(24 * kGiB)->attends_away);
  options_.host_reads = "attend";
  EXPECT_TRUE(Plan(24 * kGiB)->attends_away);
  options_.policy.settings.emplace_back("tail", "all");
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("tail is all"));
}

// Selections of units may be fetched: the card has slots for what a list holds at least, and the
// last tokens.
TEST_F(PlacementTest, SlotsOfUnitsAreCounted) {
  options_.policy = {.name = "blocks", .settings = {{"dense_layers", "0"}}};
  options_.host_reads = "fetch";
  options_.place = "host";
  const auto rows = [&](const MemoryPlan& plan) {
    return plan.working_sets - Bank::StageBytes(MakeBankConfig(config_, plan, 1));
  };
  constexpr int64_t kRead = 130 * 128;  // of which 33 blocks of 128 are the last ones
  options_.working_set = kRead;
  const auto least = Plan(27 * kGiB);
  ASSERT_TRUE(least.ok()) << least.status().message();
  EXPECT_TRUE(least->fetches_units);
  EXPECT_FALSE(least->attends_away);
  EXPECT_EQ(least->host_layers, 32);
  EXPECT_EQ(least->working_set, kRead);
  const size_t held = size_t{32} * (kRead + 2 * 64) * 4096;
  EXPECT_GT(rows(*least), held);
  EXPECT_LT(rows(*least), held + (2 << 20));
  options_.working_set = 0;
  const auto more = Plan(27 * kGiB);
  ASSERT_TRUE(more.ok()) << more.status().message();
  EXPECT_GT(more->working_set, least->working_set);
  EXPECT_LE(OnCard(*more), 27 * kGiB);
  options_.working_set = kRead - 1;
  EXPECT_THAT(Plan(27 * kGiB).status().message(),
              HasSubstr("expected at least the 16640 tokens that a layer reads in a step"));
  options_.working_set = 0;
  EXPECT_FALSE(Plan(least->weights + least->activations + rows(*least)).ok());
}

// Of layers whose attention reads the last tokens alone, the card keeps these and no stage; what
// the policy copies is counted before anything is opened.
TEST_F(PlacementTest, TheLastRowsAndThePolicysCopiesAreCounted) {
  options_.policy = {.name = "infllm"};
  EXPECT_EQ(Plan(64 * kGiB)->host_layers, 0);
  const auto plan = Plan(24 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_GT(plan->host_layers, 0);
  EXPECT_TRUE(NeedsOf(*plan, Card(24 * kGiB)).keeps_last);
  EXPECT_FALSE(plan->attends_away);
  // A window of 4,096 and a chunk of 512, a block where they begin and one that ran ahead.
  EXPECT_EQ(plan->working_set, 4096 + 512 + 2 * 64);
  EXPECT_EQ(Bank::StageBytes(MakeBankConfig(config_, *plan, 1)), 0u);
  const size_t rows = static_cast<size_t>(plan->host_layers * plan->working_set) * 4096;
  EXPECT_EQ(plan->working_sets, rows + 131072 / 64 * 4);
  // Copies of 38 blocks in each of 32 layers.
  EXPECT_GT(plan->policy, size_t{32} * 38 * 128 * 4096);
  EXPECT_LE(plan->policy, plan->policies);
  EXPECT_LE(OnCard(*plan), 24 * kGiB);
  options_.place = "host";
  EXPECT_EQ(Plan(24 * kGiB)->host_layers, 32);
  options_.policy.settings = {{"recent", "131072"}};  // nothing is far
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("reads no layer sparsely"));
}

TEST_F(PlacementTest, AWorkingSetThatIsAskedForIsCounted) {
  options_.place = "host";
  const auto by_itself = Plan(27 * kGiB);
  ASSERT_TRUE(by_itself.ok());
  ASSERT_GT(by_itself->working_set, 8192);
  size_t last = 0;
  for (const int64_t tokens : {2048, 4096, 8192}) {
    options_.working_set = tokens;
    const auto plan = Plan(27 * kGiB);
    ASSERT_TRUE(plan.ok()) << tokens << ": " << plan.status().message();
    EXPECT_EQ(plan->working_set, tokens);
    EXPECT_LE(OnCard(*plan), 27 * kGiB);
    // A row of 24 layers, 4 KiB each, and a little for its place in the maps.
    if (last > 0) {
      EXPECT_GT(plan->working_sets, last + size_t{2048} * 24 * 4096);
      EXPECT_LT(plan->working_sets, last + size_t{4096} * 24 * 4200);
    }
    last = plan->working_sets;
  }
  // What would be more than the context is the context.
  options_.working_set = 1000000;
  const auto whole = Plan(80 * kGiB);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  EXPECT_EQ(whole->working_set, 131072);
}

// A larger working set sends more layers away, not fewer tokens into the working set.
TEST_F(PlacementTest, AWorkingSetCostsLayers) {
  const auto by_itself = Plan(28 * kGiB);
  ASSERT_TRUE(by_itself.ok());
  options_.working_set = 16384;
  const auto wide = Plan(28 * kGiB);
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_EQ(wide->working_set, 16384);
  EXPECT_GT(wide->host_layers, by_itself->host_layers);
  EXPECT_LE(OnCard(*wide), 28 * kGiB);
}

TEST_F(PlacementTest, RefusesAWorkingSetThatCannotBe) {
  options_.place = "host";
  options_.working_set = 1000;
  const auto small = Plan(80 * kGiB);
  ASSERT_FALSE(small.ok());
  EXPECT_EQ(small.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(small.status().message(),
              HasSubstr("`working_set` is 1000, expected at least the 2048 tokens that a layer "
                        "reads in a step, or auto"));
  options_.working_set = 131072;
  const auto large = Plan(24 * kGiB);
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(large.status().message(),
              HasSubstr("`working_set` is 131072 tokens, which do not fit; auto"));
}

TEST_F(PlacementTest, RefusesWhatCannotFitWithTheNumbers) {
  const auto tiny = Plan(17 * kGiB);
  ASSERT_FALSE(tiny.ok());
  EXPECT_EQ(tiny.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(tiny.status().message(), HasSubstr("131072 tokens does not fit"));
  options_.host_memory = kGiB;
  const auto no_host = Plan(24 * kGiB);
  ASSERT_FALSE(no_host.ok());
  EXPECT_THAT(no_host.status().message(), HasSubstr("`host_memory` 1.00 GiB"));
  options_.host_memory = 0;
  options_.place = "device";
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("does not fit"));
  options_.place = "host";
  options_.policy = {.name = "full"};
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("reads no layer sparsely"));
}

TEST_F(PlacementTest, NamesTheLongestContextThatFits) {
  options_.place = "device";
  options_.policy = {.name = "full"};
  for (const int32_t sessions : {1, 3}) {
    options_.max_sessions = sessions;
    options_.context = 131072;
    const std::string said(Plan(24 * kGiB).status().message());
    const std::string before = "room for ";
    const size_t at = said.find(before);
    ASSERT_NE(at, std::string::npos) << said;
    options_.context = std::stoll(said.substr(at + before.size()));
    EXPECT_TRUE(Plan(24 * kGiB).ok()) << said;
    ++options_.context;
    EXPECT_FALSE(Plan(24 * kGiB).ok()) << said;
  }
}

// As few of the last layers as make it fit, then as many stages as there is room for.
TEST_F(PlacementTest, StreamedLayersGoLastFirst) {
  options_.context = 65536;  // K/V 8 GiB
  options_.policy = {.name = "brutal_offload"};
  EXPECT_EQ(Plan(80 * kGiB)->host_layers, 0);
  int32_t last = 0;
  for (const size_t gib : {22, 20, 18, 17}) {
    const auto plan = Plan(gib * kGiB);
    ASSERT_TRUE(plan.ok()) << gib << ": " << plan.status().message();
    EXPECT_LE(OnCard(*plan), gib * kGiB);
    EXPECT_GT(plan->host_layers, last) << "less memory, more layers on the host";
    last = plan->host_layers;
    EXPECT_EQ(std::count(plan->tiers.end() - last, plan->tiers.end(), TierKind::kHost), last);
    EXPECT_EQ(plan->working_sets, Bank::StageBytes(MakeBankConfig(config_, *plan, 1)));
    EXPECT_GE(plan->stages, 2);
    EXPECT_LE(plan->stages, 5);
    // One layer fewer would not have fitted with the least of stages.
    const size_t layer = plan->kv_host / static_cast<size_t>(last);
    const size_t spare = plan->policies + static_cast<size_t>(plan->stages - 2) * layer;
    const size_t policy_room = size_t{65536} * (32 + 64) * 4;
    EXPECT_LT(spare, layer + policy_room) << gib;
  }
  options_.policy.settings = {{"ahead", "1"}};
  EXPECT_EQ(Plan(20 * kGiB)->stages, 2);
  options_.place = "host";
  EXPECT_EQ(Plan(80 * kGiB)->host_layers, 32);
}

TEST_F(PlacementTest, StreamedLayersThatAreAskedForAlwaysGo) {
  options_.context = 65536;
  options_.policy = {.name = "brutal_offload", .settings = {{"layers", "24"}}};
  for (const char* place : {"auto", "host"}) {
    options_.place = place;
    for (const size_t gib : {80, 20}) {
      const auto plan = Plan(gib * kGiB);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      EXPECT_EQ(plan->host_layers, 24);
      EXPECT_EQ(plan->tiers[7], TierKind::kDevice);
      EXPECT_EQ(plan->tiers[8], TierKind::kHost);
      EXPECT_EQ(plan->stages, 5);
    }
  }
  const auto tight = Plan(18 * kGiB);
  ASSERT_TRUE(tight.ok()) << tight.status().message();
  EXPECT_LT(tight->stages, 5);
  options_.policy.settings.emplace_back("ahead", "4");
  EXPECT_THAT(Plan(18 * kGiB).status().message(),
              HasSubstr("65536 tokens does not fit with 24 layers on the host"));
  options_.place = "device";
  EXPECT_EQ(Plan(80 * kGiB)->host_layers, 0);
  options_.policy.settings = {{"layers", "33"}};  // what the session will refuse
  EXPECT_EQ(Plan(80 * kGiB)->host_layers, 0);
}

TEST_F(PlacementTest, NamesThePoliciesUnderWhichItFits) {
  options_.context = 65536;
  const std::pair<const char*, std::vector<const char*>> kRefused[] = {
      {"full", {"auto", "device", "host"}}, {"streaming", {"host"}}};
  for (const auto& [name, places] : kRefused) {
    options_.policy = {.name = name};
    for (const char* place : places) {
      options_.place = place;
      EXPECT_THAT(
          Plan(20 * kGiB).status().message(),
          HasSubstr("`place` auto `policy` blocks or brutal_offload or infllm or kcache or omnikv "
                    "or quest"));
      EXPECT_THAT(Plan(17 * kGiB).status().message(),
                  EndsWith("`place` auto `policy` blocks or brutal_offload or infllm or quest"));
      EXPECT_THAT(Plan(15 * kGiB).status().message(), Not(HasSubstr("`policy`")));
    }
  }
  options_.place = "auto";
  options_.policy = {.name = "full"};
  options_.host_memory = kGiB;
  EXPECT_THAT(Plan(20 * kGiB).status().message(), Not(HasSubstr("`policy`")));
}

TEST_F(PlacementTest, TheCapIsTheCards) {
  options_.gpu_memory = 24 * kGiB;
  const auto plan = Plan(139 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->available, 24 * kGiB);
  EXPECT_GT(plan->host_layers, 0);
  EXPECT_LE(OnCard(*plan), 24 * kGiB);
}

// V of the layers that read few of them are on the host, whatever room there is; K, V of the first
// layer, stages for V of one layer, and room for the rows that a step copies, are on the card.
TEST_F(PlacementTest, ValuesThatAreReadByRowLeave) {
  options_.policy = {.name = "kcache"};
  const size_t plane = size_t{1024} * 2;  // of a token in a layer
  const size_t tokens = 131072 + 64;
  // 128 rows of each of 4 heads, their numbers in 8 lists, and an entry for each block of a
  // context.
  const auto chosen = [](int64_t context) {
    return 512 * 2 * size_t{2048} + 8 * 512 * 4 + static_cast<size_t>((context + 63) / 64) * 4;
  };
  for (const auto& [place, host_reads] :
       {std::pair{"auto", "auto"}, {"auto", "attend"}, {"host", "auto"}, {"host", "fetch"}}) {
    options_.place = place;
    options_.host_reads = host_reads;
    const bool copies = options_.host_reads == "fetch";
    const auto plan = Plan(80 * kGiB);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->sums_away, !copies);
    EXPECT_EQ(plan->kv, tokens * 33 * plane);
    EXPECT_EQ(plan->kv_host, tokens * 31 * plane);
    EXPECT_EQ(plan->working_sets, 2 * tokens * plane + (copies ? chosen(131072) : 0));
    EXPECT_EQ(plan->host_layers, 0);
    EXPECT_EQ(plan->kv_per_token, 64 * plane);
    const MemoryNeeds needs = NeedsOf(*plan, Card(80 * kGiB));
    ASSERT_EQ(needs.host_values.size(), 31u);
    EXPECT_EQ(needs.host_values.front(), 1);
    EXPECT_TRUE(needs.host_layers.empty());
    EXPECT_EQ(needs.sums_away, !copies);
    EXPECT_EQ(OnCard(*plan), 80 * kGiB);
  }
  options_.host_reads = "auto";
  // One stage where two have no room.
  size_t room = 26 * kGiB;
  while (room > 23 * kGiB && Plan(room).ok() && Plan(room)->stages == 2) room -= kGiB / 16;
  const auto one = Plan(room);
  ASSERT_TRUE(one.ok()) << one.status().message();
  EXPECT_EQ(one->stages, 1);
  EXPECT_EQ(one->working_sets, tokens * plane);
  EXPECT_TRUE(Plan(26 * kGiB).ok()) << "16 GiB of K/V, 8.75 of it here, beside 15 of weights";
  EXPECT_THAT(Plan(23 * kGiB).status().message(), HasSubstr("a context of 131072 tokens does not"));
  options_.place = "device";
  EXPECT_EQ(Plan(80 * kGiB)->kv, 131072 * 64 * plane);
  EXPECT_EQ(Plan(80 * kGiB)->kv_host, 0u);
  const BankConfig here = MakeBankConfig(config_, *Plan(80 * kGiB), 1);
  EXPECT_EQ(here.layers[0].streams.size(), 1u);
  EXPECT_EQ(here.layers[1].streams.size(), 2u)
      << "K apart from V, where a step passes over K alone";
  EXPECT_FALSE(here.layers[1].OnHost());
  options_.place = "auto";
  options_.host_memory = 4 * kGiB;
  EXPECT_THAT(Plan(80 * kGiB).status().message(),
              HasSubstr("V of 31 layers of a context of 131072 tokens go to the host and take 7."));
  options_.host_memory = 0;
  options_.context = 0;  // what fits
  config_.max_context = 1 << 20;
  const auto cut = Plan(26 * kGiB);
  ASSERT_TRUE(cut.ok()) << cut.status().message();
  EXPECT_GT(cut->context, 131072);
  EXPECT_LE(OnCard(*cut), 26 * kGiB);
  const BankConfig bank = MakeBankConfig(config_, *cut, 1);
  EXPECT_EQ(cut->kv_host, Bank::ReservedBytes(bank, TierKind::kHost));
  EXPECT_TRUE(cut->sums_away);
  EXPECT_EQ(cut->working_sets, Bank::StageBytes(bank));
  // Sliding-window layers keep both planes.
  config_.layers[5].window = 1024;
  options_.context = 65536;
  const auto mixed = Plan(80 * kGiB);
  ASSERT_TRUE(mixed.ok()) << mixed.status().message();
  EXPECT_TRUE(mixed->values_away);
  EXPECT_FALSE(mixed->values_apart[5]);
  EXPECT_FALSE(mixed->values_apart[0]);
  EXPECT_TRUE(mixed->values_apart[6]);
}

// A policy that drops tokens is planned by the tokens that it holds, whatever the context.
TEST_F(PlacementTest, DroppedTokensTakeNoRoom) {
  options_.policy = {.name = "streaming", .settings = {{"budget", "1024"}, {"sinks", "4"}}};
  std::vector<size_t> kv;
  for (const int64_t context : {65536, 1 << 20, 3000000}) {
    options_.context = context;
    const auto plan = Plan(18 * kGiB);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->max_held, 4 + 1024 - 4 - 1);  // the next token's own row is the last
    EXPECT_EQ(plan->host_layers, 0);
    kv.push_back(plan->kv);
  }
  EXPECT_EQ(kv[0], kv[1]);
  EXPECT_EQ(kv[0], kv[2]);
  // Blocks of 64 tokens of the budget, the two that it begins and ends in, and a prompt's chunk.
  const auto rows = static_cast<size_t>(1024 + 2 * 64 + 512);
  EXPECT_LE(kv[0], rows * Bank::BytesPerToken(MakeBankConfig(config_, *Plan(18 * kGiB), 1)));
}

// The host's memory as the backend's, with so much of it.
class Host : public Card {
 public:
  explicit Host(size_t memory) : Card(memory) {}
  std::string_view Name() const override { return "cpu"; }
  bool OnDevice() const override { return false; }
};

class DiskPlacementTest : public PlacementTest {
 protected:
  DiskPlacementTest() { options_.kv_folder = testing::TempDir(); }
  Result<MemoryPlan> Plan(size_t memory) const {
    const Host host(memory);
    return PlanMemory(options_, config_, weights_, DType::kBF16, host);
  }
};

TEST_F(DiskPlacementTest, SparseLayersGoToTheDiskWhereMemoryIsTooSmall) {
  options_.context = 32768;  // K/V of 4 GiB, less than the disks of most machines have room for
  const auto all = Plan(80 * kGiB);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ(all->host_layers, 0);
  EXPECT_EQ(NeedsOf(*all, Host(80 * kGiB)).kv_disk, 0u);
  const auto plan = Plan(18 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  // As few as on a card of this size, and as wide working sets.
  EngineOptions of_card = options_;
  of_card.kv_folder = "";
  const Card card(18 * kGiB);
  const auto beside = PlanMemory(of_card, config_, weights_, DType::kBF16, card);
  ASSERT_TRUE(beside.ok()) << beside.status().message();
  EXPECT_GT(plan->host_layers, 0);
  EXPECT_EQ(plan->tiers, beside->tiers);
  EXPECT_EQ(plan->working_set, beside->working_set);
  EXPECT_LE(OnCard(*plan), 18 * kGiB);
  const MemoryNeeds needs = NeedsOf(*plan, Host(18 * kGiB));
  EXPECT_FALSE(needs.on_device);
  EXPECT_EQ(needs.kv_host, 0u);
  EXPECT_EQ(needs.kv_disk, plan->kv_host);
  EXPECT_GE(needs.kv_disk, size_t{32768} * 4096 * static_cast<size_t>(plan->host_layers));
  options_.host_memory = 18 * kGiB;
  EXPECT_EQ(Plan(80 * kGiB)->tiers, plan->tiers);
  options_.place = "disk";
  EXPECT_EQ(Plan(80 * kGiB)->host_layers, 24);
}

// V of kcache lie on the disk where memory is too small, and nowhere else.
TEST_F(DiskPlacementTest, ValuesAloneGoWhereMemoryIsTooSmall) {
  options_.policy = {.name = "kcache"};
  options_.context = 16384;
  EXPECT_FALSE(Plan(80 * kGiB)->values_away);
  options_.place = "disk";
  EXPECT_TRUE(Plan(80 * kGiB)->values_away);
}

TEST_F(DiskPlacementTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  options_.disk_space = kGiB;
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("layers of a context of 131072 tokens "
                                                            "go to the disk and take"));
  EXPECT_THAT(Plan(24 * kGiB).status().message(),
              HasSubstr("expected at most `disk_space` 1.00 GiB"));
  options_.disk_space = size_t{1} << 60;
  options_.max_sessions = 4096;  // 51 TiB
  options_.place = "disk";
  EXPECT_THAT(Plan(size_t{1} << 50).status().message(), HasSubstr("GiB free in "));
  options_ = {.context = 131072, .kv_folder = "/no/such/folder"};
  EXPECT_THAT(Plan(80 * kGiB).status().message(), HasSubstr("/no/such/folder"));
}

TEST_F(DiskPlacementTest, OptionsThatContradictAreRefused) {
  for (const char* place : {"device", "host"}) {
    options_.place = place;
    EXPECT_THAT(Plan(80 * kGiB).status().message(), HasSubstr("`place` is given"));
  }
  options_.place = "disk";
  options_.kv_folder = "";
  EXPECT_THAT(Plan(80 * kGiB).status().message(), HasSubstr("no `kv_folder`"));
  options_.place = "auto";
  options_.disk_space = 1;
  EXPECT_THAT(Plan(80 * kGiB).status().message(), HasSubstr("`disk_space` is given"));
}

// Beside a card: host memory, and a disk for what exceeds it.
class DiskOfCardTest : public DiskPlacementTest {
 protected:
  DiskOfCardTest() {
    options_.context = 32768;  // 128 MiB of K/V in a layer
    options_.host_memory = 2 * kGiB;
    options_.policy.settings.back() = {"dense_after_filter", "0"};
  }
  Result<MemoryPlan> Plan(size_t memory) const {
    const Card card(memory);
    return PlanMemory(options_, config_, weights_, DType::kBF16, card);
  }
};

TEST_F(DiskOfCardTest, WhatExceedsTheHostsMemoryGoesToTheDisk) {
  const auto near = Plan(80 * kGiB);
  ASSERT_TRUE(near.ok()) << near.status().message();
  EXPECT_EQ(near->host_layers, 0);
  EXPECT_FALSE(near->on_disk);
  const auto few = Plan(18 * kGiB);  // those that leave fit in the host's memory
  ASSERT_TRUE(few.ok()) << few.status().message();
  EXPECT_GT(few->host_layers, 0);
  EXPECT_EQ(few->OnDisk(), 0u);
  EXPECT_EQ(few->OnHost(), few->kv_host);
  options_.place = "host";
  const auto plan = Plan(24 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->host_layers, 27);
  // As few as necessary, of those that leave the last ones.
  const auto there = std::count(plan->disk_layers.begin(), plan->disk_layers.end(), true);
  const size_t layer = plan->kv_host / 27;
  ASSERT_GT(there, 10);
  EXPECT_EQ(plan->kv_disk, static_cast<size_t>(there) * layer);
  EXPECT_LE(plan->OnHost(), 2 * kGiB);
  EXPECT_GT(plan->OnHost() + layer, 2 * kGiB);
  EXPECT_GT(plan->disk_way, size_t{40} << 20);
  std::vector<size_t> leave;
  for (size_t l = 0; l < plan->tiers.size(); ++l) {
    if (plan->tiers[l] == TierKind::kHost) leave.push_back(l);
  }
  for (size_t i = 0; i < leave.size(); ++i) {
    EXPECT_EQ(plan->disk_layers[leave[i]], i + static_cast<size_t>(there) >= leave.size()) << i;
  }
  const MemoryNeeds needs = NeedsOf(*plan, Card(24 * kGiB));
  EXPECT_EQ(needs.kv_disk, plan->kv_disk);
  EXPECT_EQ(needs.kv_host + needs.kv_disk, plan->kv_host);
  EXPECT_EQ(needs.host_layers.size(), 27u);
  // The bank lies so.
  const BankConfig bank = MakeBankConfig(config_, *plan, 1);
  EXPECT_EQ(Bank::ReservedOnDisk(bank), plan->kv_disk);
  options_.place = "disk";
  const auto all = Plan(80 * kGiB);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ(all->kv_disk, all->kv_host);
  EXPECT_EQ(NeedsOf(*all, Card(80 * kGiB)).kv_host, 0u);
  options_.policy = {.name = "brutal_offload"};
  EXPECT_EQ(Plan(80 * kGiB)->kv_disk, size_t{32} * layer);
}

// Units come to slots from a disk, though the host would attend to them in its memory.
TEST_F(DiskOfCardTest, UnitsAreFetchedFromThere) {
  options_.policy = {.name = "blocks", .settings = {{"dense_layers", "0"}}};
  options_.place = "host";
  const auto plan = Plan(24 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_FALSE(plan->attends_away);
  EXPECT_TRUE(plan->fetches_units);
  EXPECT_GT(plan->kv_disk, 0u);
  options_.host_memory = 8 * kGiB;
  const auto in_memory = Plan(24 * kGiB);
  EXPECT_TRUE(in_memory->attends_away);
  EXPECT_EQ(in_memory->OnDisk(), 0u);
}

TEST_F(DiskOfCardTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  options_.place = "host";
  options_.disk_space = kGiB;
  EXPECT_THAT(Plan(24 * kGiB).status().message(),
              HasSubstr("layers of a context of 32768 tokens go to the disk and take"));
  EXPECT_THAT(Plan(24 * kGiB).status().message(),
              HasSubstr("expected at most `disk_space` 1.00 GiB"));
  options_.disk_space = 0;
  options_.host_memory = size_t{30} << 20;  // too little for the way to the card
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("go to the host and take"));
  // What the card reads in place, or the host, stays in the host's memory.
  options_.host_memory = kGiB;
  for (const char* policy : {"infllm", "kcache"}) {
    options_.policy = {.name = policy};
    EXPECT_THAT(Plan(24 * kGiB).status().message(),
                HasSubstr("expected at most `host_memory` 1.00 GiB, since they cannot lie on the "
                          "disk of a card"))
        << policy;
  }
  options_.policy = {.name = "quest"};
  options_.host_reads = "attend";
  EXPECT_THAT(Plan(24 * kGiB).status().message(), HasSubstr("since they cannot lie on the disk"));
  options_.place = "disk";
  EXPECT_THAT(Plan(24 * kGiB).status().message(),
              HasSubstr("`place` is disk, but `policy` quest with `host_reads` attend"));
  options_.policy = {.name = "full"};
  options_.host_reads = "auto";
  EXPECT_THAT(Plan(80 * kGiB).status().message(),
              HasSubstr("`place` is disk, but policy full reads no layer sparsely"));
  // Others would fit, those alone that can lie on the disk of a card.
  options_.host_memory = size_t{200} << 20;
  EXPECT_THAT(Plan(17 * kGiB).status().message(),
              EndsWith("`place` auto `policy` brutal_offload or omnikv"));
}

}  // namespace
}  // namespace omnikv::placement_test
