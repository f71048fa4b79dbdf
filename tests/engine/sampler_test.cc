#include "engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "engine/stop_text.h"

namespace omnikv::sampler_test {
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
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> few[] = {{-1, -0.0f, 0, -0.0f, kNaN},
                                    {kNaN, -kInfinity, kNaN, -kInfinity, kNaN},
                                    {kNaN, -3, -2, -4, -kInfinity},
                                    {-kNaN, 1e-40f, 2, kInfinity, kInfinity}};
  const int32_t highest[] = {1, 1, 2, 3};
  for (size_t i = 0; i < std::size(few); ++i) EXPECT_EQ(sampler.Sample(few[i].data()), highest[i]);
  std::mt19937 random(1);
  for (const size_t vocab : {1, 31, 1000}) {
    Sampler of_many({}, static_cast<int32_t>(vocab));
    std::vector<float> many(vocab);
    for (float& logit : many) logit = static_cast<float>(static_cast<int>(random() % 400) - 399);
    EXPECT_EQ(of_many.Sample(many.data()),
              std::max_element(many.begin(), many.end()) - many.begin());
  }
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

// How far n draws are from what is expected: sum of (seen - expected)^2 / expected.
double ChiSquare(const std::vector<double>& expected, const std::vector<int>& drawn, int n) {
  double sum = 0;
  for (size_t t = 0; t < expected.size(); ++t) {
    if (expected[t] == 0) {
      EXPECT_EQ(drawn[t], 0) << "token " << t;
      continue;
    }
    const double difference = drawn[t] - n * expected[t];
    sum += difference * difference / (n * expected[t]);
  }
  return sum;
}

// Draws of a backend's op, which goes on by itself, against probabilities by their definition.
TEST(Sampler, BackendsDrawByProbability) {
  constexpr int kVocab = 40;
  constexpr int kDraws = 20000;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1.5f);
  std::vector<float> logits(kVocab);
  for (float& v : logits) v = normal(random);
  const auto ref = MakeRefBackend();
  CpuBackend cpu({.threads = 1});
  uint64_t seed = 100;
  for (Backend* backend : {ref.get(), static_cast<Backend*>(&cpu)}) {
    for (const auto& [top_k, top_p, min_p] : std::vector<std::tuple<int32_t, double, double>>{
             {0, 1.0, 0.0}, {12, 1.0, 0.0}, {0, 0.8, 0.0}, {0, 1.0, 0.1}, {30, 0.9, 0.01}}) {
      std::vector<int32_t> order(kVocab);
      std::iota(order.begin(), order.end(), 0);
      const auto weight = [&](int32_t t) { return std::exp(logits[static_cast<size_t>(t)] / 1.2); };
      std::sort(order.begin(), order.end(), [&](int a, int b) { return weight(a) > weight(b); });
      if (top_k > 0) order.resize(static_cast<size_t>(top_k));
      double total = 0;
      for (const int32_t t : order) total += weight(t);
      double kept = 0;
      std::vector<double> expected(kVocab, 0);
      for (const int32_t t : order) {
        if (kept >= top_p * total || weight(t) < min_p * weight(order[0])) break;
        kept += expected[static_cast<size_t>(t)] = weight(t);
      }
      size_t likely = 0;
      for (double& p : expected) likely += (p /= kept) > 0 ? 1 : 0;
      SampleMeta meta{
          .temperature = 1.2, .top_p = top_p, .min_p = min_p, .top_k = top_k, .random = seed += 7};
      std::vector<uint32_t> seen(2, 0);
      int32_t token = 0;
      int32_t out = 0;
      RowMeta row{0, 0};
      SeqMeta seq{};
      uint32_t step = 0;
      const auto recording = backend->Record([&] {
        backend->Enqueue(NextTokenArgs{.logits = logits.data(),
                                       .tokens = &token,
                                       .rows = &row,
                                       .seqs = &seq,
                                       .sample = &meta,
                                       .seen = seen.data(),
                                       .out = &out,
                                       .step = &step,
                                       .vocab = kVocab,
                                       .n_rows = 1});
      });
      std::vector<int> drawn(kVocab, 0);
      for (int i = 0; i < kDraws; ++i) {
        backend->Replay(*recording);
        ++drawn[static_cast<size_t>(token)];
      }
      // A chi square of f degrees is about normal, of mean f and deviation sqrt(2 f).
      const double f = static_cast<double>(likely) - 1;
      EXPECT_LT(ChiSquare(expected, drawn, kDraws), f + 4 * std::sqrt(2 * f)) << top_k << top_p;
      EXPECT_EQ(row.pos, kDraws);
      EXPECT_EQ(step, static_cast<uint32_t>(kDraws));
    }
  }
}

TEST(Sampler, WeightsAreExponentials) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> uniform(0, 35);
  for (const double temperature : {0.05, 0.7, 1.0, 3.0, 100.0}) {
    for (int i = 0; i < 20000; ++i) {
      const float distance = i < 100 ? static_cast<float>(i) * 1e-5f : uniform(random);
      const double exact =
          std::exp(-static_cast<double>(distance) / temperature) * static_cast<double>(kWeightOne);
      const auto weight = static_cast<double>(SampleWeight(-distance, 0, SampleScale(temperature)));
      ASSERT_NEAR(weight, exact, 1 + 2e-9 * exact) << distance << " at " << temperature;
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
  EXPECT_THAT(CheckSampling({.temperature = -1}).message(), HasSubstr("`temperature` is -1"));
  EXPECT_THAT(CheckSampling({.temperature = std::nan("")}).message(),
              HasSubstr("`temperature` is nan"));
  EXPECT_THAT(CheckSampling({.top_k = -1}).message(), HasSubstr("`top_k` is -1"));
  EXPECT_THAT(CheckSampling({.top_p = 0}).message(), HasSubstr("`top_p` is 0"));
  EXPECT_THAT(CheckSampling({.min_p = 2}).message(), HasSubstr("`min_p` is 2"));
  EXPECT_THAT(CheckSampling({.repeat_penalty = 0}).message(), HasSubstr("`repeat_penalty` is 0"));
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
}  // namespace omnikv::sampler_test
