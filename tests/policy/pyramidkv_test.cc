// How many rows each layer keeps, and that they are given back. Which rows, the oracle says
// (tests/engine/policy_oracle_test.cc).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv::pyramidkv_test {
namespace {

// The formula of the paper's code, of a prompt that is longer than the budget.
std::vector<int64_t> Capacities(int64_t budget, int64_t window, int64_t beta, int64_t layers,
                                int64_t tokens) {
  int64_t min = (budget - window) / beta;
  int64_t max = (budget - window) * 2 - min;
  if (max >= tokens - window) {
    max = tokens - window;
    min = (budget - window) * 2 - max;
  }
  const int64_t steps = (max - min) / (layers - 1);
  std::vector<int64_t> rows;
  for (int64_t layer = 0; layer < layers; ++layer) rows.push_back(max - layer * steps + window);
  return rows;
}

Result<Keeps> KeepsOf(const SettingList& given, int32_t n_layers, int64_t context,
                      std::unique_ptr<Policy>& policy) {
  const PolicyInfo* info = *FindPolicy("pyramidkv");
  OKV_ASSIGN_OR_RETURN(auto settings, PolicySettings::Parse(info->name, info->settings, given));
  policy = info->make();
  OKV_RETURN_IF_ERROR(policy->Prepare(
      {.n_layers = n_layers, .n_heads = 4, .n_kv_heads = 2, .dk = 16, .max_context = context},
      settings));
  return policy->Kept();
}

TEST(PyramidKv, EveryLayerKeepsWhatTheFormulaSays) {
  struct Shape {
    int64_t budget, window, beta, layers;
  };
  for (const auto& [budget, window, beta, layers] : {Shape{2048, 32, 20, 32},
                                                     {128, 8, 20, 32},
                                                     {1024, 32, 1, 28},
                                                     {1024, 32, 7, 61},
                                                     {40, 16, 3, 2},
                                                     {24, 8, 20, 80},
                                                     {2, 1, 20, 6}}) {
    std::unique_ptr<Policy> policy;
    const auto keeps = KeepsOf({{"budget", std::to_string(budget)},
                                {"window", std::to_string(window)},
                                {"beta", std::to_string(beta)}},
                               static_cast<int32_t>(layers), /*context=*/5000, policy);
    ASSERT_TRUE(keeps.ok()) << keeps.status().message();
    ASSERT_EQ(keeps->layer_rows.size(), static_cast<size_t>(layers));
    std::vector<int64_t> most(static_cast<size_t>(layers), 0);
    for (int64_t tokens = 1; tokens <= 5000; ++tokens) {
      std::vector<int64_t> rows;
      for (int32_t layer = 0; layer < layers; ++layer) {
        rows.push_back(keeps->RowsAfter(layer, tokens));
        most[static_cast<size_t>(layer)] = std::max(most[static_cast<size_t>(layer)], rows.back());
      }
      if (tokens <= budget) {
        ASSERT_EQ(rows, std::vector<int64_t>(static_cast<size_t>(layers), tokens));
        continue;
      }
      ASSERT_EQ(rows, Capacities(budget, window, beta, layers, tokens)) << tokens;
      // The mean is the budget, but for the rounding of the steps.
      const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      ASSERT_GE(sum, layers * budget);
      ASSERT_LE(sum, layers * budget + layers * (layers - 2) / 2);
    }
    EXPECT_EQ(most, keeps->layer_rows) << "budget " << budget << ", " << layers << " layers";
    EXPECT_EQ(keeps->rows, *std::max_element(most.begin(), most.end()));
  }
}

TEST(PyramidKv, OneLayerKeepsTheBudget) {
  std::unique_ptr<Policy> policy;
  const auto keeps = KeepsOf({{"budget", "64"}}, 1, 1000, policy);
  ASSERT_TRUE(keeps.ok());
  EXPECT_EQ(keeps->RowsAfter(0, 500), 64);
}

TEST(PyramidKv, SettingsThatContradictEachOtherAreRefused) {
  std::unique_ptr<Policy> policy;
  const auto wide = KeepsOf({{"budget", "32"}, {"window", "32"}}, 6, 1000, policy);
  ASSERT_FALSE(wide.ok());
  EXPECT_EQ(wide.status().message(),
            "policy pyramidkv: window is 32, expected fewer than the budget of 32");
  const auto even = KeepsOf({{"kernel", "4"}}, 6, 1000, policy);
  ASSERT_FALSE(even.ok());
  EXPECT_EQ(even.status().message(), "policy pyramidkv: kernel is 4, expected an odd number");
}

// A pyramid that is not steep is SnapKV, to the bit.
TEST(PyramidKv, WithBetaOneItIsSnapKv) {
  const SettingList snapkv = {{"budget", "24"}, {"window", "8"}};
  SettingList level = snapkv;
  level.emplace_back("beta", "1");
  const auto first = MakeRefBackend();
  const auto second = MakeRefBackend();
  StepFixture expected(*first, "snapkv", snapkv);
  StepFixture got(*second, "pyramidkv", level);
  ASSERT_EQ(got.Prompt(100), expected.Prompt(100));
  for (int i = 0; i < 5; ++i) ASSERT_EQ(got.Decode(), expected.Decode());
}

// What a sequence holds is the sum over its layers where each has a table of its own, and as much
// as the first one's in each where they share one.
TEST(PyramidKv, HoldsTheRowsOfItsLayers) {
  const SettingList settings = {{"budget", "40"}, {"window", "8"}};
  const std::vector<int64_t> rows = Capacities(40, 8, 20, 6, 100);  // 71 to 11
  for (const bool split : {true, false}) {
    const auto backend = MakeRefBackend();
    StepFixture fixture(*backend, "pyramidkv", settings, true, -1, split);
    fixture.Prompt(100);
    size_t blocks = 0;
    for (int32_t layer = 0; layer < 6; ++layer) {
      const int64_t held = rows[static_cast<size_t>(layer)];
      EXPECT_EQ(fixture.bank->LayerRows(fixture.seq, layer), held) << layer;
      EXPECT_EQ(fixture.Lengths().Held(layer), held) << layer;
      blocks += static_cast<size_t>((split ? held : rows[0]) + 7) / 8;
    }
    const size_t positions = 2 * 4;  // of a row, by KV head
    const size_t row = fixture.bank->config().RowBytes(0);
    EXPECT_EQ(fixture.bank->DeviceBytes(fixture.seq), blocks * 8 * row);
    EXPECT_EQ(fixture.bank->DeviceBytes(), blocks * 8 * (row + positions));
    for (int i = 0; i < 3; ++i) fixture.Decode();
    for (int32_t layer = 0; layer < 6; ++layer) {
      EXPECT_EQ(fixture.bank->LayerRows(fixture.seq, layer), rows[static_cast<size_t>(layer)] + 3);
    }
  }
}

}  // namespace
}  // namespace omnikv::pyramidkv_test
