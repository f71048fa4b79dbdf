// What a plan says that a policy holds and reads is what a session of it does, and the settings
// that are solved for a share are the dearest within it.
#include "engine/policy_cost.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "../policy_settings.h"
#include "../test_data.h"
#include "engine/core.h"
#include "engine/row_group.h"
#include "sessions.h"

namespace omnikv::policy_cost_test {
namespace {

using ::testing::HasSubstr;

const std::string kRandom = TestData("tests/golden/policy_model");  // 8 layers of 2 KV heads
constexpr int64_t kTokens = 1000;
constexpr int64_t kContext = 1200;
constexpr double kWithinReach = 4;  // a share that every policy keeps

EngineOptions Options(PolicyOptions policy) {
  return {.model = kRandom,
          .device = "cpu",
          .context = kContext,
          .policy = std::move(policy),
          .kv_dtype = "f16",
          .prefill_chunk = 128};
}

// The costs that an engine's own parts give.
struct Costs {
  explicit Costs(Engine& engine)
      : core(CoreOf(engine)),
        model{.options = core.options,
              .config = core.config,
              .weight_bytes = core.weights.bytes,
              .format = DType::kBF16,
              .backend = *core.backend} {}
  EngineCore& core;
  CostModel model;
};

std::vector<PolicyOptions> Cases() {
  std::vector<PolicyOptions> cases;
  for (const PolicyInfo& info : AllPolicies()) {
    std::vector<SettingList> settings = info.test_settings;
    if (settings.empty()) settings.emplace_back();
    for (const SettingList& list : settings) {
      cases.push_back({.name = info.name, .settings = WithFiles(info, list, 8, 2)});
    }
  }
  return cases;
}

TEST(PolicyCost, IsWhatASessionHoldsAndReads) {
  for (const PolicyOptions& policy : Cases()) {
    const auto engine = Load(Options(policy));
    const Costs costs(*engine);
    const auto session = Take(engine->NewSession(policy));
    ASSERT_TRUE(session->Prompt(Numbers(kTokens, 1)).ok());
    const SessionStats stats = session->stats();
    SCOPED_TRACE(policy.name + ": " + stats.settings);
    const auto cost = CostOf(costs.model, policy, kTokens);
    ASSERT_TRUE(cost.ok()) << cost.status().message();
    EXPECT_EQ(cost->settings, stats.settings);
    // To the byte, but for lists with which rows that go are moved. Where passes say how many rows
    // each KV head keeps, the costs are those of the mean: within a block for each head.
    const Keeps keeps = GroupOf(*session).policy().Kept();
    const bool passes = keeps.passes;
    const size_t lists = GroupOf(*session).residency().Bytes();
    const double kv =
        static_cast<double>(kTokens) * static_cast<double>(costs.core.plan.kv_per_token);
    const double held = stats.held_fraction - static_cast<double>(lists) / kv;
    if (passes) {
      EXPECT_NEAR(cost->read_fraction, stats.read_fraction, 1.0 / kTokens);
      const double positions =
          8.0 * keeps.lists * 4 / static_cast<double>(costs.core.plan.kv_per_token);
      EXPECT_NEAR(cost->held_fraction, held, (1 + positions) * 64 / kTokens);
      ASSERT_TRUE(session->FillContext(kTokens).ok());  // of which each head keeps the mean
      EXPECT_NEAR(cost->held_fraction,
                  session->stats().held_fraction - static_cast<double>(lists) / kv, 1e-9);
    } else {
      EXPECT_DOUBLE_EQ(cost->read_fraction, stats.read_fraction);
      EXPECT_NEAR(cost->held_fraction, held, 1e-9);
    }
    EXPECT_EQ(cost->held.own, static_cast<size_t>(std::llround(cost->held_fraction * kv)));
    EXPECT_EQ(cost->held.host, 0u);
    EXPECT_GE(cost->reserved.own, cost->held.own);
  }
}

double Of(const PolicyCost& cost, CostMeasure measure) {
  return measure == CostMeasure::kHeld ? cost.held_fraction : cost.read_fraction;
}

// The value of the knob that was solved.
double KnobOf(const PolicyInfo& info, const PolicyOptions& policy) {
  for (const auto& [key, value] : policy.settings) {
    if (key == info.knob.key) return std::stod(value);
  }
  ADD_FAILURE() << info.name << " has no value of " << info.knob.key;
  return 0;
}

TEST(EqualCost, TheDearestSettingWithinTheShare) {
  const auto engine = Load(Options({.name = "full"}));
  const Costs costs(*engine);
  int reached = 0;
  int beyond = 0;
  for (const PolicyInfo& info : AllPolicies()) {
    const PolicyOptions given{.name = info.name, .settings = WithFiles(info, {}, 8, 2)};
    for (const CostMeasure measure : {CostMeasure::kHeld, CostMeasure::kRead}) {
      for (const double share : {0.15, 0.3, 0.6, kWithinReach}) {
        SCOPED_TRACE(fmt::format("{} {} {}", info.name, CostMeasureName(measure), share));
        const auto equal = SolveCost(costs.model, given, measure, share, kTokens);
        ASSERT_TRUE(equal.ok()) << equal.status().message();
        EXPECT_EQ(equal->cost.settings, CostOf(costs.model, equal->policy, kTokens)->settings);
        if (!equal->beyond.empty()) {
          ++beyond;
          EXPECT_GT(Of(equal->cost, measure), share);
          EXPECT_THAT(equal->beyond,
                      HasSubstr(fmt::format("{:.1f} % at least", 100 * Of(equal->cost, measure))));
          EXPECT_LT(share, kWithinReach);
        } else {
          ++reached;
          EXPECT_LE(Of(equal->cost, measure), share);
        }
        if (info.knob.key.empty()) continue;
        // The next value of the knob costs more, or is refused.
        const bool falls = info.knob.falls;
        const double value = KnobOf(info, equal->policy);
        const auto spec = std::find_if(info.settings.begin(), info.settings.end(),
                                       [&](const auto& s) { return s.key == info.knob.key; });
        const bool whole = spec->type == SettingType::kInt;
        const double step = whole ? 1 : (spec->max - spec->min) / 1024;
        const auto at = [&](double next) {
          PolicyOptions policy = equal->policy;
          for (auto& [key, text] : policy.settings) {
            if (key != info.knob.key) continue;
            text = whole ? fmt::format("{:.0f}", next) : fmt::format("{:.6f}", next);
          }
          return CostOf(costs.model, policy, kTokens);
        };
        if (equal->beyond.empty()) {
          const double next = falls ? value - step : value + step;
          if (next < spec->min || next > std::min<double>(spec->max, kTokens)) continue;
          const auto dearer = at(next);
          ASSERT_TRUE(dearer.ok()) << dearer.status().message();
          EXPECT_GT(Of(*dearer, measure), share) << "a nearer setting: " << dearer->settings;
        } else {
          const double next = falls ? value + step : value - step;
          if (next < spec->min || next > spec->max) continue;
          EXPECT_EQ(at(next).status().code(), StatusCode::kInvalidArgument);
        }
      }
    }
  }
  EXPECT_GT(reached, 60);
  EXPECT_GT(beyond, 15);
}

TEST(EqualCost, WhatIsSolvedIsNotGiven) {
  const auto engine = Load(Options({.name = "full"}));
  const Costs costs(*engine);
  EXPECT_TRUE(CheckKnob(costs.model, {.name = "full"}).ok());
  EXPECT_TRUE(CheckKnob(costs.model, {.name = "snapkv", .settings = {{"kernel", "7"}}}).ok());
  const Status given = CheckKnob(costs.model, {.name = "snapkv", .settings = {{"budget", "64"}}});
  EXPECT_EQ(given.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(given.message(),
            "policy snapkv: budget is given, but a comparison at equal cost solves it, expected "
            "other settings alone");
  // Other settings are kept, in place of what the knob brings along.
  const auto blocks = SolveCost(
      costs.model,
      {.name = "blocks", .settings = {{"block", "8"}, {"dense_layers", "0"}, {"sinks", "24"}}},
      CostMeasure::kRead, 0.5, kTokens);
  ASSERT_TRUE(blocks.ok()) << blocks.status().message();
  EXPECT_THAT(blocks->cost.settings, HasSubstr("sinks=24"));
  EXPECT_THAT(blocks->cost.settings, HasSubstr("block=8"));
  EXPECT_LE(blocks->cost.read_fraction, 0.5);
  // A policy that runs at no value of its knob says why.
  const auto duo = SolveCost(costs.model, {.name = "duo"}, CostMeasure::kRead, 0.5, kTokens);
  EXPECT_EQ(duo.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(duo.status().message(), HasSubstr("gates"));
}

}  // namespace
}  // namespace omnikv::policy_cost_test
