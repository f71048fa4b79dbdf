#include "engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "engine/stop_text.h"

namespace omnikv {
namespace {

using ::testing::HasSubstr;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::map<int32_t, double> Frequencies(const SamplingOptions& options,
                                      const std::vector<float>& logits, int draws) {
  Sampler sampler(options, static_cast<int32_t>(logits.size()));
  std::map<int32_t, double> frequency;
  for (int i = 0; i < draws; ++i) frequency[sampler.Sample(logits.data())] += 1.0 / draws;
  return frequency;
}

TEST(Sampler, GreedyTakesTheHighestAndOfEqualsTheFirst) {
  Sampler sampler({}, 5);
  const float logits[] = {1, 7, 3, 7, kNaN};
  EXPECT_EQ(sampler.Sample(logits), 1);
}

TEST(Sampler, NothingButNaNStillGivesAToken) {
  Sampler sampler({.temperature = 1}, 2);
  const float logits[] = {kNaN, kNaN};
  EXPECT_EQ(sampler.Sample(logits), 0);
}

TEST(Sampler, DrawsByProbability) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};
  const auto f = Frequencies({.temperature = 1, .seed = 3}, logits, 40000);
  EXPECT_NEAR(f.at(0), 1.0 / 8, 0.01);
  EXPECT_NEAR(f.at(1), 2.0 / 8, 0.01);
  EXPECT_NEAR(f.at(2), 5.0 / 8, 0.01);
}

TEST(Sampler, TemperatureSharpens) {
  const std::vector<float> logits = {0, 1};
  const auto f = Frequencies({.temperature = 0.5, .seed = 3}, logits, 40000);
  EXPECT_NEAR(f.at(1), 1 / (1 + std::exp(-2.0)), 0.01);
}

TEST(Sampler, TopKTopPAndMinPCutTheTail) {
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f),
                                     std::log(0.1f)};
  const auto kept = [&](SamplingOptions o) {
    o.temperature = 1;
    std::set<int32_t> tokens;
    for (const auto& [token, share] : Frequencies(o, logits, 4000)) tokens.insert(token);
    return tokens;
  };
  EXPECT_EQ(kept({}), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept({.top_k = 2}), (std::set<int32_t>{0, 1}));
  EXPECT_EQ(kept({.top_p = 0.65}), (std::set<int32_t>{0, 1}));
  EXPECT_EQ(kept({.top_p = 0.75}), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(kept({.min_p = 0.45}), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(kept({.top_p = 1e-9}), (std::set<int32_t>{0}));
}

TEST(Sampler, RepetitionPenaltyLowersWhatWasSeen) {
  Sampler sampler({.repeat_penalty = 2}, 3);
  const float logits[] = {3, 2, -1};
  sampler.See(0);
  EXPECT_EQ(sampler.Sample(logits), 1);
  sampler.See(1);
  const float negative[] = {-3, -2, -3.5f};  // seen ones become -6 and -4
  EXPECT_EQ(sampler.Sample(negative), 2);
}

TEST(Sampler, SameSeedSameTokens) {
  const std::vector<float> logits(64, 0.0f);
  const auto draw = [&](uint64_t seed) {
    Sampler sampler({.temperature = 1, .seed = seed}, 64);
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler.Sample(logits.data()));
    return tokens;
  };
  EXPECT_EQ(draw(5), draw(5));
  EXPECT_NE(draw(5), draw(6));
}

// SplitMix64's first number of a seed, in [0, 1).
double FirstUniform(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// By its definition: everything in order, then the cuts, then one walk.
int32_t SampleSorted(const SamplingOptions& o, const std::vector<float>& logits, double uniform) {
  std::vector<int32_t> order;
  for (size_t t = 0; t < logits.size(); ++t) {
    if (!std::isnan(logits[t])) order.push_back(static_cast<int32_t>(t));
  }
  const auto logit = [&](int32_t t) { return logits[static_cast<size_t>(t)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  if (o.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(o.top_k)));
  std::vector<double> weights;
  double total = 0;
  for (const int32_t t : order) {
    weights.push_back(std::exp((static_cast<double>(logit(t)) - logit(order[0])) / o.temperature));
    total += weights.back();
  }
  size_t kept = 0;
  double sum = 0;
  while (kept < order.size() &&
         (kept == 0 || (sum < o.top_p * total && weights[kept] >= o.min_p))) {
    sum += weights[kept++];
  }
  double at = uniform * sum;
  for (size_t i = 0; i < kept; ++i) {
    if ((at -= weights[i]) < 0) return order[i];
  }
  return order[kept - 1];
}

TEST(Sampler, DrawsWhatAFullSortWould) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(2000);
  for (int round = 0; round < 40; ++round) {
    for (float& v : logits) v = std::round(8 * normal(random)) / 8;  // with ties
    logits[7] = kNaN;
    logits[9] = -std::numeric_limits<float>::infinity();
    for (const double top_p : {0.2, 0.9, 0.9999, 1.0}) {
      for (const double min_p : {0.0, 0.01}) {
        for (const int32_t top_k : {0, 1, 300}) {
          SamplingOptions o{
              .temperature = 1.5, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = random()};
          Sampler sampler(o, 2000);
          EXPECT_EQ(sampler.Sample(logits.data()), SampleSorted(o, logits, FirstUniform(o.seed)));
        }
      }
    }
  }
}

TEST(Sampler, InfiniteLogitsAreCertain) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto f = Frequencies({.temperature = 1, .seed = 3}, {0, inf, 1, inf, -inf}, 4000);
  EXPECT_NEAR(f.at(1), 0.5, 0.05);
  EXPECT_NEAR(f.at(3), 0.5, 0.05);
}

TEST(Sampler, WrongOptionsAreNamed) {
  EXPECT_TRUE(CheckSampling({}).ok());
  EXPECT_THAT(CheckSampling({.temperature = -1}).message(), HasSubstr("--temp is -1"));
  EXPECT_THAT(CheckSampling({.temperature = std::nan("")}).message(), HasSubstr("--temp is nan"));
  EXPECT_THAT(CheckSampling({.top_k = -1}).message(), HasSubstr("--top-k is -1"));
  EXPECT_THAT(CheckSampling({.top_p = 0}).message(), HasSubstr("--top-p is 0"));
  EXPECT_THAT(CheckSampling({.min_p = 2}).message(), HasSubstr("--min-p is 2"));
  EXPECT_THAT(CheckSampling({.repeat_penalty = 0}).message(), HasSubstr("--repeat-penalty is 0"));
}

TEST(StopText, HoldsBackWhatMayBecomeAStop) {
  StopText text({"END", "\n\n"});
  EXPECT_EQ(text.Push("abE"), "ab");
  EXPECT_EQ(text.Push("N"), "");
  EXPECT_EQ(text.Push("x\n"), "ENx");
  EXPECT_EQ(text.Push("y"), "\ny");
  EXPECT_EQ(text.Push("zENDmore"), "z");
  EXPECT_TRUE(text.stopped());
  EXPECT_EQ(text.Push("never"), "");
  EXPECT_EQ(text.Flush(), "");
}

TEST(StopText, FlushGivesWhatWasHeld) {
  StopText text({"STOP", ""});
  EXPECT_EQ(text.Push("so STO"), "so ");
  EXPECT_FALSE(text.stopped());
  EXPECT_EQ(text.Flush(), "STO");
}

TEST(StopText, TheEarliestStopWins) {
  StopText text({"bcd", "b"});
  EXPECT_EQ(text.Push("abcd"), "a");
  EXPECT_TRUE(text.stopped());
}

}  // namespace
}  // namespace omnikv
