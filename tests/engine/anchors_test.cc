// Anchors and head maps from attention: what is measured is what NumPy gives, the program finds the
// best anchors there are, and kascade reads by the file.
#include "engine/anchors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "../test_data.h"
#include "golden_data.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::anchors_test {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
using Texts = std::vector<std::vector<int32_t>>;

const std::string kGoldens = TestData("tests/golden");
const std::string kRandom = kGoldens + "/policy_model";  // 8 layers, 2 KV heads
constexpr int32_t kLayers = 8;
constexpr int32_t kKvHeads = 2;

EngineOptions OptionsOf(const std::string& device, int32_t chunk = 48) {
  return {.model = kRandom,
          .device = device,
          .threads = 2,
          .context = 256,
          .policy = {.name = "full"},
          .kv_dtype = "f32",
          .precision = "full",
          .prefill_chunk = chunk};
}

// The last tokens of the fixtures' text.
Texts OracleTexts(const Json& json) {
  const Json text = ReadJson(kGoldens + "/policies.json");
  auto tokens = text.at("prompt").get<std::vector<int32_t>>();
  const auto decode = text.at("decode").get<std::vector<int32_t>>();
  tokens.insert(tokens.end(), decode.begin(), decode.end());
  Texts texts;
  for (const Json& n : json.at("lengths")) {
    texts.emplace_back(tokens.end() - n.get<ptrdiff_t>(), tokens.end());
  }
  return texts;
}

LayerSimilarity Measured(Engine& engine, const Texts& texts, const SimilarityOptions& options) {
  auto measured = MeasureLayerSimilarity(CoreOf(engine), texts, options);
  EXPECT_TRUE(measured.ok()) << measured.status().message();
  return measured.ok() ? std::move(*measured) : LayerSimilarity(kLayers, kKvHeads);
}

class AnchorsOn : public OnDevice {
 protected:
  // As the oracle: another choice of nearly the same weight moves a share by little.
  static void ExpectOracle(const LayerSimilarity& got, const Json& expected, double tolerance) {
    ASSERT_EQ(got.n_layers, kLayers);
    for (int32_t j = 0; j < kLayers; ++j) {
      const auto at = static_cast<size_t>(j);
      EXPECT_NEAR(got.importance[at], expected.at("importance").at(at).get<double>(), tolerance);
      for (int32_t i = 0; i <= j; ++i) {
        const Json& heads = expected.at("similarity").at(static_cast<size_t>(i)).at(at);
        for (int32_t u = 0; u < kKvHeads; ++u) {
          for (int32_t v = 0; v < kKvHeads; ++v) {
            const double share = got.At(i, j, u, v);
            const Json& of_oracle = heads.at(static_cast<size_t>(u)).at(static_cast<size_t>(v));
            EXPECT_NEAR(share, of_oracle.get<double>(), tolerance)
                << i << " -> " << j << ", head " << u << " by the choice of " << v;
            EXPECT_LE(share, 1 + 1e-6);
            EXPECT_GE(share, 0);
          }
          if (i == j) {
            EXPECT_EQ(got.At(i, j, u, u), 1);
          }
        }
      }
    }
  }
};

TEST_P(AnchorsOn, SimilarityIsWhatTheOracleGives) {
  const Json json = ReadJson(kGoldens + "/similarity.json");
  const Texts texts = OracleTexts(json);
  const double tolerance = GetParam() == "cuda" ? 1e-3 : 1e-5;
  for (const Json& c : json.at("cases")) {
    SCOPED_TRACE(c.at("name"));
    const SimilarityOptions options{.window = c.at("window"),
                                    .tile = c.at("tile"),
                                    .share = c.at("share"),
                                    .least = c.at("least")};
    for (const int32_t chunk : {48, 160}) {
      const auto engine = Load(OptionsOf(GetParam(), chunk));
      ExpectOracle(Measured(*engine, texts, options), c, tolerance);
      // First prompts that pass layer by layer.
      CoreOf(*engine).all_by_layer = true;
      ExpectOracle(Measured(*engine, texts, options), c, tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, AnchorsOn, testing::Values("ref", "cpu", "cuda"), NameOf);

// The sum that anchors give, layer by layer.
double SumOf(const std::vector<double>& gains, int32_t n, const std::vector<int32_t>& anchors) {
  double sum = 0;
  for (int32_t j = 0; j < n; ++j) {
    const auto after = std::upper_bound(anchors.begin(), anchors.end(), j);
    sum += gains[static_cast<size_t>(*(after - 1) * n + j)];
  }
  return sum;
}

TEST(Anchors, ProgramEqualsBruteForce) {
  std::mt19937 random(65);
  for (int trial = 0; trial < 200; ++trial) {
    const int32_t n = std::uniform_int_distribution<int32_t>(1, 10)(random);
    const int32_t count = std::uniform_int_distribution<int32_t>(1, n)(random);
    std::vector<double> gains(static_cast<size_t>(n * n));
    for (double& gain : gains) gain = std::uniform_real_distribution<double>(0, 1)(random);
    const std::vector<int32_t> anchors = BestAnchors(gains, n, count);
    ASSERT_EQ(anchors.size(), static_cast<size_t>(count));
    ASSERT_EQ(anchors.front(), 0);
    ASSERT_TRUE(std::is_sorted(anchors.begin(), anchors.end(), std::less_equal<>()));
    double best = 0;
    for (uint32_t set = 1; set < 1U << n; set += 2) {  // layer 0 is in all of them
      std::vector<int32_t> some;
      for (int32_t layer = 0; layer < n; ++layer) {
        if ((set >> layer & 1) != 0) some.push_back(layer);
      }
      if (some.size() == anchors.size()) best = std::max(best, SumOf(gains, n, some));
    }
    EXPECT_NEAR(SumOf(gains, n, anchors), best, 1e-12) << n << " layers, " << count << " anchors";
  }
}

TEST(Anchors, EqualSumsHaveTheLowestLastAnchor) {
  EXPECT_EQ(BestAnchors(std::vector<double>(16, 1.0), 4, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(BestAnchors(std::vector<double>(16, 1.0), 4, 4), (std::vector<int32_t>{0, 1, 2, 3}));
}

// Similarity and importance by hand: the head map of an anchor is the identity even where another
// head of the layer has the same choice, and layers that matter little have no anchor.
TEST(Anchors, ChoiceByHand) {
  LayerSimilarity s(4, 2);
  s.importance = {0.5, 0.5, 0.01, 0.5};
  for (int32_t i = 0; i < 4; ++i) {
    for (int32_t u = 0; u < 2; ++u) {
      for (int32_t v = 0; v < 2; ++v) s.At(i, i, u, v) = 1;
    }
  }
  const auto set = [&](int32_t i, int32_t j, double uu, double uv) {
    s.At(i, j, 0, 0) = s.At(i, j, 1, 1) = uu;
    s.At(i, j, 0, 1) = s.At(i, j, 1, 0) = uv;
  };
  set(0, 1, 0.9, 0.2);
  set(0, 2, 0.1, 0.1);
  set(0, 3, 0.1, 0.3);
  set(1, 2, 0.3, 0.4);
  set(1, 3, 0.2, 0.8);
  set(2, 3, 0.7, 0.6);
  EXPECT_DOUBLE_EQ(s.Of(1, 3), 0.8);
  const AnchorTable table = ChooseAnchors(s, 2);
  EXPECT_EQ(table.anchors, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(table.head_map, (std::vector<int32_t>{0, 1, 0, 1, 0, 0, 0, 1}));  // equal: the lower
  set(1, 3, 0.2, 1.2);  // more than its own choice, so that layer 1 is the better anchor
  EXPECT_EQ(ChooseAnchors(s, 2).anchors, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(ChooseAnchors(s, 2).head_map, (std::vector<int32_t>{0, 1, 0, 1, 1, 0, 1, 0}));
  EXPECT_EQ(ChooseAnchors(s, 1).head_map, (std::vector<int32_t>{0, 1, 0, 1, 0, 0, 1, 0}));
}

TEST(Anchors, MeasuredTablesHaveAnchorsAndTheIdentity) {
  const Json json = ReadJson(kGoldens + "/similarity.json");
  const auto engine = Load(OptionsOf("cpu"));
  const LayerSimilarity s =
      Measured(*engine, OracleTexts(json), {.window = 6, .tile = 1, .share = 0.2, .least = 8});
  for (int32_t count = 1; count <= kLayers; ++count) {
    const AnchorTable table = ChooseAnchors(s, count);
    ASSERT_EQ(table.anchors.size(), static_cast<size_t>(count));
    for (const int32_t anchor : table.anchors) {
      for (int32_t u = 0; u < kKvHeads; ++u) {
        EXPECT_EQ(table.head_map[static_cast<size_t>(anchor * kKvHeads + u)], u);
      }
    }
  }
}

TEST(Anchors, WhatCannotBeMeasuredIsASentence) {
  const auto engine = Load(OptionsOf("cpu"));
  const auto refusal = [&](const Texts& texts, int32_t window) {
    return CheckLayerSimilarity(CoreOf(*engine), texts, {.window = window}).message();
  };
  EXPECT_EQ(refusal({Numbers(33, 1)}, 32), "");
  EXPECT_EQ(refusal({Numbers(33, 1), Numbers(32, 1)}, 32),
            "text 2: has 32 tokens, expected more than the 32 rows that are measured");
  EXPECT_EQ(refusal({Numbers(90, 1)}, 49),
            "the last 49 rows of a text are to be measured, expected at most the 48 rows of a step "
            "(`prefill_chunk`)");
}

TEST(Anchors, ATileFitsAStep) {
  const auto engine = Load(OptionsOf("cpu"));
  const auto refusal = [&](const std::string& tile) {
    return engine
        ->NewSession({.name = "kascade", .settings = {{"prefill", "sparse"}, {"tile", tile}}})
        .status()
        .message();
  };
  EXPECT_EQ(refusal("48"), "");
  EXPECT_EQ(refusal("49"),
            "policy kascade: tile is 49, expected at most the 48 rows of a step (`prefill_chunk`)");
}

// The file beside the model gives anchors and map; a file of other anchors is not looked at, and is
// refused where it is named.
TEST(Anchors, KascadeFindsItsFileBesideTheModel) {
  namespace fs = std::filesystem;
  const fs::path folder = testing::TempDir() + "omnikv_anchors_" + std::to_string(::getpid());
  fs::create_directories(folder);
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::copy_file(fs::path(kRandom) / name, folder / name);
  }
  const std::string beside = folder / "kascade.tsv";
  const std::string named = folder / "named.tsv";
  const auto engine = Load({.model = folder, .device = "cpu", .context = 256, .max_sessions = 2});
  struct Outcome {
    std::string settings;
    Logits logits;
  };
  const auto run = [&](SettingList settings) {
    settings.emplace_back("least", "12");
    const auto session = Take(engine->NewSession({.name = "kascade", .settings = settings}));
    EXPECT_TRUE(session->Prompt(Numbers(120, 1)).ok());
    return Outcome{session->stats().settings, Decode(*engine, *session, 4)};
  };
  const AnchorTable table{.anchors = {0, 3},
                          .head_map = {0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0}};
  const Outcome published = run({});
  EXPECT_THAT(published.settings, HasSubstr("anchors=0,1,2,3,4"));
  EXPECT_THAT(published.settings, HasSubstr("head_map=identity"));
  std::ofstream(named) << AnchorTableText(table, kKvHeads);
  const Outcome by_name = run({{"head_map", named}});
  EXPECT_THAT(by_name.settings, HasSubstr("anchors=0,3 "));
  std::ofstream(beside) << AnchorTableText(table, kKvHeads);
  const Outcome found = run({});
  EXPECT_THAT(found.settings, HasSubstr("anchors=0,3 head_map=kascade.tsv "));
  EXPECT_EQ(found.logits, by_name.logits);
  const Outcome unmapped = run({{"head_map", "identity"}});
  EXPECT_THAT(unmapped.settings, HasSubstr("anchors=0,3 head_map=identity "));
  EXPECT_NE(unmapped.logits, found.logits);
  const Outcome others = run({{"anchors", "0,2"}});
  EXPECT_THAT(others.settings, HasSubstr("anchors=0,2 head_map=identity "));
  EXPECT_EQ(others.logits, run({{"anchors", "0,2"}, {"head_map", "identity"}}).logits);
  EXPECT_EQ(run({{"anchors", "0,3"}}).settings, found.settings);
  const auto refusal = [&](SettingList settings) {
    return engine->NewSession({.name = "kascade", .settings = std::move(settings)})
        .status()
        .message();
  };
  EXPECT_EQ(refusal({{"anchors", "0,2"}, {"head_map", named}}),
            "policy kascade: anchors is 0,2, expected those of head_map, 0,3 of " + named);
  // A file without anchors is a map for any.
  std::ofstream(named, std::ios::trunc) << AnchorTableText({{}, table.head_map}, kKvHeads);
  EXPECT_EQ(run({{"anchors", "0,3"}, {"head_map", named}}).logits, found.logits);
  const std::string map = AnchorTableText({{}, table.head_map}, kKvHeads);
  const auto refused = [&](const std::string& text) {
    std::ofstream(named, std::ios::trunc) << text;
    const std::string message = refusal({{"head_map", named}});
    const std::string prefix = "policy kascade: head_map: " + named + ": ";
    EXPECT_TRUE(message.starts_with(prefix)) << message;
    return message.substr(std::min(prefix.size(), message.size()));
  };
  EXPECT_EQ(refused("anchors\t0\t8\n" + map), "line 1 has '8', expected numbers from 0 to 7");
  for (const char* wrong : {"1\t2", "0\t3\t3", "0\t3\t2", "0\t1.5"}) {
    EXPECT_THAT(refused("anchors\t" + std::string(wrong) + "\n" + map),
                HasSubstr("expected ascending layers, from 0 on"));
  }
  EXPECT_EQ(refused("anchors\t\n" + map),
            "line 1 names no anchor, expected ascending layers, from 0 on");
  EXPECT_THAT(refused("anchors\t0"), HasSubstr("has 0 lines, expected 8"));
  EXPECT_EQ(refused("anchors\t0\n" + map.substr(4)),
            "has 7 lines, expected 8, one for each layer of the model that attends to all tokens");
  EXPECT_EQ(refused("anchors\t0\n0\t2\n"), "line 2 has '2', expected numbers from 0 to 1");
  std::string half = map;
  half.replace(4, 1, "0.5");
  EXPECT_EQ(refused("anchors\t0\n" + half), "line 3 has 0.5, expected whole numbers");
  EXPECT_EQ(refused(half), "line 2 has 0.5, expected whole numbers");
  EXPECT_THAT(refused("anchorz\t0\n" + map), HasSubstr("line 1 has 'anchorz'"));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace omnikv::anchors_test
