// The policies against an independent implementation in NumPy (scripts/policy_oracle.py), on a
// random model where every layer matters, at budgets far below the context: the logits of every
// step, and the tokens that every layer reads in it.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "backend/resolve_plan.h"
#include "backend/trace/trace_backend.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "golden_rows.h"

namespace omnikv {
namespace {

using Json = nlohmann::json;

const std::string kGoldens = OMNIKV_SOURCE_DIR "/tests/golden";

struct Inner {
  explicit Inner(std::unique_ptr<Backend> backend) : own(std::move(backend)) {}
  std::unique_ptr<Backend> own;
};

// A device whose ops are logged, when asked.
class Traced : private Inner, public TraceBackend {
 public:
  explicit Traced(std::unique_ptr<Backend> backend)
      : Inner(std::move(backend)), TraceBackend(*own) {
    set_logging(false);
  }
};

// By how much of the largest a device's logits may differ in full precision.
double Tolerance(const std::string& device) {
  return device == "ref" ? 1e-6 : device == "cpu" ? 1e-5 : 1e-4;
}

// The tokens whose bits are set in a hexadecimal number.
std::vector<int32_t> Tokens(const std::string& hex) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < hex.size(); ++i) {
    const int digit = std::stoi(hex.substr(hex.size() - 1 - i, 1), nullptr, 16);
    for (int bit = 0; bit < 4; ++bit) {
      if ((digit >> bit & 1) != 0) tokens.push_back(static_cast<int32_t>(4 * i) + bit);
    }
  }
  return tokens;
}

class PolicyOracle : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void SetUp() override {
    std::ifstream file(kGoldens + "/policies.json");
    json_ = Json::parse(file);
    const EngineOptions options{.model = kGoldens + "/" + json_.at("model").get<std::string>(),
                                .device = device(),
                                .threads = 2,
                                .precision = "full",
                                .prefill_chunk = std::get<1>(GetParam())};
    auto backend = MakeBackend(options);
    if (!backend.ok() && device() == "cuda") GTEST_SKIP() << backend.status().message();
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    auto traced = std::make_unique<Traced>(std::move(*backend));
    trace_ = traced.get();
    auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
      return std::unique_ptr<Backend>(std::move(traced));
    });
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    auto tensors = SafetensorsModel::Open(kGoldens + "/policies.safetensors");
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    tensors_ = std::move(*tensors);
  }
  static std::string device() { return std::get<0>(GetParam()); }
  void RunCase(const Json& c);
  // Whether every layer read in the step that was traced what the oracle says.
  bool ReadsAsTheOracle(const Json& c, size_t step);

  Json json_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<TensorSource> tensors_;
  TraceBackend* trace_ = nullptr;
  int decisions_ = 0;  // filters times steps
  int excused_ = 0;    // of them, which rounding may turn
};

bool PolicyOracle::ReadsAsTheOracle(const Json& c, size_t step) {
  size_t layer = 0;
  const auto length = c.at("prompt_tokens").get<int32_t>() + static_cast<int32_t>(step) + 1;
  std::vector<int32_t> everything(static_cast<size_t>(length));
  for (int32_t t = 0; t < length; ++t) everything[static_cast<size_t>(t)] = t;
  for (const TraceEntry& entry : trace_->entries()) {
    const auto* attend = std::get_if<AttendArgs>(&entry.op);
    if (attend == nullptr || attend->o == nullptr) continue;
    const auto filter = c.at("reads").at(layer++).get<std::string>();
    const auto expected =
        filter.empty() ? everything : Tokens(c.at("chosen").at(filter).at(step).get<std::string>());
    for (const std::vector<int32_t>& tokens : ResolvePlan(*trace_, *attend)) {
      if (tokens == expected) continue;
      const double gap = filter.empty() ? 1 : c.at("gaps").at(filter).at(step).get<double>();
      EXPECT_TRUE(gap > 0 && gap < 10 * Tolerance(device()))
          << "layer " << layer - 1 << " reads other tokens at step " << step << ": "
          << ::testing::PrintToString(tokens) << ", not " << ::testing::PrintToString(expected);
      return false;
    }
  }
  EXPECT_EQ(layer, c.at("reads").size());
  return true;
}

void PolicyOracle::RunCase(const Json& c) {
  const auto name = c.at("name").get<std::string>();
  SCOPED_TRACE(name);
  PolicyOptions policy{.name = c.at("policy"), .settings = {}, .force_indices = true};
  for (const auto& [key, value] : c.at("settings").items()) {
    policy.settings.emplace_back(key, value.get<std::string>());
  }
  auto prompt = json_.at("prompt").get<std::vector<int32_t>>();
  prompt.resize(c.at("prompt_tokens").get<size_t>());
  const auto decode = json_.at("decode").get<std::vector<int32_t>>();
  const auto session = engine_->NewSession(policy);
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->Prompt(prompt).ok());
  const auto expected = Rows(*tensors_, name);
  ASSERT_EQ(expected.size(), decode.size());
  const bool chooses = c.contains("chosen");
  double worst = 0;
  for (size_t i = 0; i < decode.size(); ++i) {
    trace_->Clear();
    trace_->set_logging(chooses);
    ASSERT_TRUE((*session)->Step(decode[i]).ok());
    trace_->set_logging(false);
    if (chooses) {
      decisions_ += static_cast<int>(c.at("chosen").size());
      if (!ReadsAsTheOracle(c, i)) {
        if (HasFailure()) return;
        ++excused_;  // what follows rests on other tokens
        std::printf("%s on %s: step %zu chose others of nearly the same score\n", name.c_str(),
                    device().c_str(), i);
        break;
      }
    }
    // Every fourth logit, then the largest of all.
    const float* logits = (*session)->logits();
    double error = 0;
    for (size_t k = 0; k + 1 < expected[i].size(); ++k) {
      error = std::max(error, std::abs(static_cast<double>(logits[4 * k]) - expected[i][k]));
    }
    error /= expected[i].back();
    worst = std::max(worst, error);
    ASSERT_LE(error, Tolerance(device())) << "step " << i;
  }
  std::printf("%s on %s: %.1e of the largest logit (the policy moves them by %.3f)\n", name.c_str(),
              device().c_str(), worst, c.at("moved_against_full").get<double>());
}

TEST_P(PolicyOracle, EveryLogitAndEveryChoiceAgrees) {
  ASSERT_GT(json_.at("cases").size(), 20u);
  for (const Json& c : json_.at("cases")) RunCase(c);
  std::printf("%d decisions on %s, %d of them excused\n", decisions_, device().c_str(), excused_);
  EXPECT_GT(decisions_, 1000);
  EXPECT_LE(100 * excused_, decisions_);
}

// A chunk of 59 leaves two rows of the 120 to a third one, so that windows of queries straddle.
INSTANTIATE_TEST_SUITE_P(Devices, PolicyOracle,
                         ::testing::Combine(::testing::Values("ref", "cpu", "cuda"),
                                            ::testing::Values(512, 59)),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param) + "_chunk" +
                                  std::to_string(std::get<1>(param_info.param));
                         });

}  // namespace
}  // namespace omnikv
