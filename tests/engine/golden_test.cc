// Every supported family against transformers' logits (tests/golden, made by
// scripts/make_model_goldens.py), on the reference and on the CPU, in prefill and in decode.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/safetensors.h"
#include "omnikv/engine.h"

namespace omnikv {
namespace {

const std::string kGoldens = OMNIKV_SOURCE_DIR "/tests/golden/models";

struct Golden {
  std::vector<int32_t> prompt, greedy;
  std::vector<float> margins;                     // of each greedy step
  std::vector<std::vector<float>> logits;         // [n_prompt][vocab]
  std::vector<std::vector<float>> greedy_logits;  // [n_greedy][vocab]
  bool f32 = false;
};

std::vector<std::vector<float>> Rows(const TensorSource& file, const std::string& name) {
  const TensorView* t = file.Find(name);
  EXPECT_NE(t, nullptr) << name;
  const auto columns = static_cast<size_t>(t->shape[1]);
  std::vector<std::vector<float>> rows(static_cast<size_t>(t->shape[0]),
                                       std::vector<float>(columns));
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(file.ReadValues(*t, r * columns, columns, DType::kF32, rows[r].data()).ok());
  }
  return rows;
}

Golden LoadGolden(const std::string& folder) {
  Golden golden;
  std::ifstream file(folder + "/golden.json");
  const auto json = nlohmann::json::parse(file);
  golden.prompt = json.at("prompt").get<std::vector<int32_t>>();
  golden.greedy = json.at("greedy").get<std::vector<int32_t>>();
  golden.margins = json.at("margins").get<std::vector<float>>();
  golden.f32 = json.at("dtype") == "float32";
  const auto tensors = SafetensorsModel::Open(folder + "/golden.safetensors");
  EXPECT_TRUE(tensors.ok()) << tensors.status().message();
  golden.logits = Rows(**tensors, "logits");
  golden.greedy_logits = Rows(**tensors, "greedy_logits");
  return golden;
}

size_t ArgMax(const float* v, size_t n) {
  return static_cast<size_t>(std::max_element(v, v + n) - v);
}

// max|Δ| / max|reference| of one position.
double Error(const float* got, const std::vector<float>& reference) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(got[i]) - reference[i]));
    size = std::max(size, std::abs(static_cast<double>(reference[i])));
  }
  return error / size;
}

double Margin(const std::vector<float>& logits) {
  std::vector<float> top(logits);
  std::partial_sort(top.begin(), top.begin() + 2, top.end(), std::greater<>());
  return top[0] - top[1];
}

double Largest(const std::vector<float>& v) {
  double largest = 0;
  for (float x : v) largest = std::max<double>(largest, std::abs(x));
  return largest;
}

// Runs the golden's prompt and greedy tokens. Every position's error over its largest logit is held
// to the bound, in prefill and in decode; the best token must be equal where the reference's margin
// exceeds what the error can turn, and every greedy token must be.
void CheckGolden(const std::string& family, const EngineOptions& options, const Golden& golden,
                 double bound) {
  const auto engine = Engine::Load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto session = (*engine)->NewSession({.name = "full"});
  ASSERT_TRUE(session.ok()) << session.status().message();
  const auto vocab = static_cast<size_t>((*engine)->vocab());
  double worst = 0;
  const auto check = [&](const float* logits, const std::vector<float>& reference) {
    const double error = Error(logits, reference);
    worst = std::max(worst, error);
    EXPECT_LE(error, bound);
    if (Margin(reference) > 2 * error * Largest(reference)) {
      EXPECT_EQ(ArgMax(logits, vocab), ArgMax(reference.data(), vocab));
    }
  };
  const Status prefill =
      (*session)->PromptLogits(golden.prompt, [&](int64_t position, const float* logits) {
        SCOPED_TRACE(fmt::format("position {}", position));
        check(logits, golden.logits[static_cast<size_t>(position)]);
      });
  ASSERT_TRUE(prefill.ok()) << prefill.message();
  const double worst_prefill = std::exchange(worst, 0);
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    SCOPED_TRACE(fmt::format("greedy token {}, margin {}", i, golden.margins[i]));
    check((*session)->logits(), golden.greedy_logits[i]);
    EXPECT_EQ(ArgMax((*session)->logits(), vocab), static_cast<size_t>(golden.greedy[i]));
    ASSERT_TRUE((*session)->Step(golden.greedy[i]).ok());
  }
  std::printf("%s on %s: prefill %.1e, decode %.1e of the largest logit\n", family.c_str(),
              options.device.c_str(), worst_prefill, worst);
}

class Family : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    golden_ = LoadGolden(kGoldens + "/" + std::get<0>(GetParam()));
    options_.model = kGoldens + "/" + std::get<0>(GetParam());
    options_.device = std::get<1>(GetParam());
    options_.threads = 2;
    options_.context = 64;  // some models' own is shorter than the prompt, on purpose
  }
  Golden golden_;
  EngineOptions options_;
};

// Nothing rounded but the weights: what transformers computes.
TEST_P(Family, MatchesTransformersInF32) {
  options_.kv_dtype = "f32";
  options_.precision = "full";
  CheckGolden(std::get<0>(GetParam()), options_, golden_, 2e-3);
}

// As it runs by default: f16 K/V.
TEST_P(Family, DefaultsMatchTransformers) {
  CheckGolden(std::get<0>(GetParam()), options_, golden_, golden_.f32 ? 2e-3 : 2e-2);
}

std::vector<std::string> Families() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kGoldens)) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Goldens, Family,
                         ::testing::Combine(::testing::ValuesIn(Families()),
                                            ::testing::Values("ref", "cpu")),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param) + "_" +
                                  std::get<1>(param_info.param);
                         });

// The policies against an independent implementation in NumPy (scripts/policy_oracle.py), on a
// random model where every layer matters, at budgets far below the context.
class PolicyOracle : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PolicyOracle, EveryLogitAgrees) {
  const auto& [device, chunk] = GetParam();
  const std::string folder = OMNIKV_SOURCE_DIR "/tests/golden";
  std::ifstream file(folder + "/policies.json");
  const auto json = nlohmann::json::parse(file);
  const auto tensors = SafetensorsModel::Open(folder + "/policies.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status().message();
  const auto prompt = json.at("prompt").get<std::vector<int32_t>>();
  const auto decode = json.at("decode").get<std::vector<int32_t>>();
  const auto engine = Engine::Load({.model = folder + "/" + json.at("model").get<std::string>(),
                                    .device = device,
                                    .threads = 2,
                                    .prefill_chunk = chunk});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  ASSERT_GT(json.at("cases").size(), 15u);
  for (const auto& c : json.at("cases")) {
    const auto name = c.at("name").get<std::string>();
    PolicyOptions policy{.name = c.at("policy"), .settings = {}, .force_indices = true};
    for (const auto& [key, value] : c.at("settings").items()) {
      policy.settings.emplace_back(key, value.get<std::string>());
    }
    const auto session = (*engine)->NewSession(policy);
    ASSERT_TRUE(session.ok()) << name << ": " << session.status().message();
    ASSERT_TRUE((*session)->Prompt(prompt).ok()) << name;
    const auto expected = Rows(**tensors, name);
    ASSERT_EQ(expected.size(), decode.size());
    double worst = 0;
    for (size_t i = 0; i < decode.size(); ++i) {
      ASSERT_TRUE((*session)->Step(decode[i]).ok()) << name;
      const double error = Error((*session)->logits(), expected[i]);
      worst = std::max(worst, error);
      ASSERT_LE(error, 1e-3) << name << ", step " << i;
    }
    std::printf("%s on %s: %.1e of the largest logit (the policy moves them by %.3f)\n",
                name.c_str(), device.c_str(), worst, c.at("moved_against_full").get<double>());
  }
}

// A chunk of 59 leaves two rows of the 120 to a third one, so that windows of queries straddle.
INSTANTIATE_TEST_SUITE_P(Devices, PolicyOracle,
                         ::testing::Combine(::testing::Values("ref", "cpu"),
                                            ::testing::Values(512, 59)),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param) + "_chunk" +
                                  std::to_string(std::get<1>(param_info.param));
                         });

}  // namespace
}  // namespace omnikv
