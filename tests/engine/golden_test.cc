// Every supported family against transformers' logits (tests/golden, made by
// scripts/make_model_goldens.py), on the reference, on the CPU and on a card, in prefill and in
// decode.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <utility>

#include "../test_data.h"
#include "golden_data.h"
#include "omnikv/engine.h"
#include "on_device.h"

namespace omnikv::golden_test {
namespace {

const std::string kGoldens = TestData("tests/golden/models");

struct Golden {
  std::vector<int32_t> prompt, greedy;
  std::vector<float> margins;                     // of each greedy step
  std::vector<std::vector<float>> logits;         // [n_prompt][vocab]
  std::vector<std::vector<float>> greedy_logits;  // [n_greedy][vocab]
  bool f32 = false;
  float bf16 = 0;  // by how much bf16 throughout moves logits, of the largest
};

Golden LoadGolden(const std::string& folder) {
  Golden golden;
  const auto json = ReadJson(folder + "/golden.json");
  golden.prompt = json.at("prompt").get<std::vector<int32_t>>();
  golden.greedy = json.at("greedy").get<std::vector<int32_t>>();
  golden.margins = json.at("margins").get<std::vector<float>>();
  golden.f32 = json.at("dtype") == "float32";
  golden.bf16 =
      json.at("bf16_moves_logits_by").get<float>() / json.at("largest_logit").get<float>();
  const auto tensors = SafetensorsModel::Open(folder + "/golden.safetensors");
  EXPECT_TRUE(tensors.ok()) << tensors.status().message();
  golden.logits = Rows(**tensors, "logits");
  golden.greedy_logits = Rows(**tensors, "greedy_logits");
  return golden;
}

// Runs the golden's prompt and greedy tokens. Every position's error over its largest logit is held
// to the bound, in prefill and in decode, and every greedy token must be transformers': on a card
// where its margin exceeds what the error that was measured in prefill can turn.
void CheckGolden(const std::string& family, const EngineOptions& options, const Golden& golden,
                 double bound) {
  const auto engine = Engine::Load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto session = (*engine)->NewSession({.name = "full"});
  ASSERT_TRUE(session.ok()) << session.status().message();
  const auto vocab = static_cast<size_t>((*engine)->vocab());
  double worst = 0;
  int unclear = 0;  // tokens that may be others
  const auto check = [&](const float* logits, const std::vector<float>& reference) {
    const double error = Error(logits, reference);
    worst = std::max(worst, error);
    EXPECT_LE(error, bound);
  };
  const Status prefill =
      (*session)->PrefillLogits(golden.prompt, [&](int64_t position, const float* logits) {
        SCOPED_TRACE(fmt::format("position {}", position));
        check(logits, golden.logits[static_cast<size_t>(position)]);
      });
  ASSERT_TRUE(prefill.ok()) << prefill.message();
  const double worst_prefill = std::exchange(worst, 0);
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    SCOPED_TRACE(fmt::format("greedy token {}, margin {}", i, golden.margins[i]));
    const std::vector<float>& expected = golden.greedy_logits[i];
    check((*session)->logits(), expected);
    if (options.device == "cuda" && Margin(expected) <= 2 * worst_prefill * Largest(expected)) {
      ++unclear;
    } else {
      EXPECT_EQ(ArgMax((*session)->logits(), vocab), static_cast<size_t>(golden.greedy[i]));
    }
    ASSERT_TRUE((*session)->Step(golden.greedy[i]).ok());
  }
  fmt::print(
      "golden: {} on {}, {}, K/V {}: prefill {:.1e}, decode {:.1e} of the largest logit, "
      "bound {:.1e}, {} of {} tokens compared\n",
      family, options.device, options.precision, options.kv_dtype, worst_prefill, worst, bound,
      golden.greedy.size() - static_cast<size_t>(unclear), golden.greedy.size());
}

class Family : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const auto& [family, device] = GetParam();
    if (const std::string reason = WhyNotOn(device); !reason.empty()) GTEST_SKIP() << reason;
    golden_ = LoadGolden(kGoldens + "/" + family);
    options_.model = kGoldens + "/" + family;
    options_.device = device;
    options_.threads = 2;
    options_.context = 64;  // some models' own is shorter than the prompt, on purpose
  }
  Golden golden_;
  EngineOptions options_;
};

// Of f32 sums in another order; measured 6e-6 at most on ref and cpu. Where gemma3's weights are
// bf16, embeddings are scaled by a factor that is rounded to bf16 as it is in a bf16 run of
// transformers, while the golden was made in f32: 3.4e-4.
double ExactBound(const std::string& family, const std::string& device) {
  return family == "gemma3" ? 5e-4 : F32Tolerance(device);
}

// Nothing rounded but the weights: what transformers computes.
TEST_P(Family, MatchesTransformersInF32) {
  const auto& [family, device] = GetParam();
  options_.kv_dtype = "f32";
  options_.precision = "full";
  CheckGolden(family, options_, golden_, ExactBound(family, device));
}

// As it runs by default: f16 K/V, which is 8e-3 in phi3 and less elsewhere, and on a card prompts
// whose products round to bf16: at most twice of what rounding everything to bf16 costs (measured
// 1.6 times in llama_tied_bias).
TEST_P(Family, DefaultsMatchTransformers) {
  const auto& [family, device] = GetParam();
  const double bound = golden_.f32        ? ExactBound(family, device)
                       : device == "cuda" ? std::max<double>(2 * golden_.bf16, 1e-2)
                                          : 1e-2;
  CheckGolden(family, options_, golden_, bound);
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
                                            ::testing::Values("ref", "cpu", "cuda")),
                         NameOfBoth);

}  // namespace
}  // namespace omnikv::golden_test
