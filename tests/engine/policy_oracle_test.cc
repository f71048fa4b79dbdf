// The policies against an independent implementation in NumPy (scripts/policy_oracle.py), and
// against kvpress (scripts/make_kvpress_goldens.py), on a random model where every layer matters,
// at budgets far below the context: the logits of every step, and the tokens that every KV head of
// every layer reads in it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "../test_data.h"
#include "backend/forwarding_backend.h"
#include "backend/resolve_plan.h"
#include "backend/trace/trace_backend.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "golden_data.h"
#include "on_device.h"
#include "policy/policy.h"

namespace omnikv::policy_oracle_test {
namespace {

using Json = nlohmann::json;

const std::string kGoldens = TestData("tests/golden");
constexpr size_t kKvHeads = 2;  // of the model

// The device, and what every attention on it reads when it runs alone: a plan may hold the tokens
// of another layer, or of the next step, when the step is over.
class Probe : public ForwardingBackend {
 public:
  explicit Probe(std::unique_ptr<Backend> backend)
      : ForwardingBackend(*backend), own_(std::move(backend)) {}

  double TimeAlone(const Op& op) override {
    if (std::holds_alternative<NormQkvRopeAppendArgs>(op)) layers.emplace_back();
    if (const auto* copy = std::get_if<CompactArgs>(&op); copy != nullptr && !copy->InPlace()) {
      copied_ = *copy;
    }
    if (const auto* sum = std::get_if<SumValuesArgs>(&op); sum != nullptr) {
      layers.back().resize(static_cast<size_t>(sum->lists));
      for (size_t h = 0; h < layers.back().size(); ++h) {
        int32_t n = 0;
        inner().Download(&n, sum->count + h, 4);
        std::vector<int32_t>& tokens = layers.back()[h];
        tokens.resize(static_cast<size_t>(n));
        inner().Download(tokens.data(), sum->index + h * static_cast<size_t>(sum->capacity),
                         tokens.size() * 4);
      }
    }
    const auto* attend = std::get_if<AttendArgs>(&op);
    if (attend != nullptr && attend->o != nullptr) {
      // A layer may take several, of other heads or other tokens.
      auto read = ResolvePlan(inner(), *attend);
      if (attend->kv == copied_.kv) FindCopied(read);
      layers.back().resize(read.size());
      for (size_t h = 0; h < read.size(); ++h) {
        std::vector<int32_t>& tokens = layers.back()[h];
        tokens.insert(tokens.end(), read[h].begin(), read[h].end());
        std::sort(tokens.begin(), tokens.end());
      }
    }
    return inner().TimeAlone(op);
  }

  std::vector<std::vector<std::vector<int32_t>>> layers;  // positions by layer and head of a list

 private:
  // What is read of a copy of rows, by list, becomes what was copied.
  void FindCopied(std::vector<std::vector<int32_t>>& read) {
    std::vector<int32_t> listed(static_cast<size_t>(copied_.capacity));
    for (size_t h = 0; h < read.size(); ++h) {
      inner().Download(listed.data(), copied_.index + h * listed.size(), listed.size() * 4);
      for (int32_t& token : read[h]) token = listed.at(static_cast<size_t>(token));
    }
  }

  std::unique_ptr<Backend> own_;
  CompactArgs copied_;  // the last copy of rows to other memory, by list
};

struct Inner {
  explicit Inner(std::unique_ptr<Backend> backend) : probe(std::move(backend)) {}
  Probe probe;
};

// A device whose ops are logged, and probed, when asked. `card`: it is taken for one, with memory
// of its own.
class Traced : private Inner, public TraceBackend {
 public:
  Traced(std::unique_ptr<Backend> backend, bool card)
      : Inner(std::move(backend)), TraceBackend(probe), card_(card || inner().OnDevice()) {
    set_logging(false);
  }
  bool OnDevice() const override { return card_; }
  // Probes nothing, or the next step from its start.
  void Begin(bool probing) {
    Clear();
    probe.layers.clear();
    set_logging(probing);
  }
  const auto& layers() const { return probe.layers; }

 private:
  bool card_;
};

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

// The tokens that the oracle reads by a key of a case's choices, in a step with `length` tokens.
std::vector<int32_t> Expected(const Json& c, const std::string& key, size_t step, int32_t length) {
  std::vector<int32_t> tokens;
  int32_t since = 0;  // the first token that is read without a choice
  if (!key.empty()) {
    const Json& steps = c.at("chosen").at(key);
    const size_t last = std::min(step, steps.size() - 1);
    tokens = Tokens(steps.at(last).get<std::string>());
    since = length - static_cast<int32_t>(step - last);
  }
  for (int32_t t = since; t < length; ++t) tokens.push_back(t);
  return tokens;
}

// The gap of that choice: by step in a list, or in a table of those that may matter.
double Gap(const Json& c, const std::string& key, size_t step) {
  const auto gaps = c.at("gaps").find(key);
  if (gaps == c.at("gaps").end()) return 1;
  return gaps->is_array() ? gaps->at(step).get<double>() : gaps->value(std::to_string(step), 1.0);
}

// Of one file of cases, on a device by name, with "_away" where K/V may live beside it.
class PolicyOracle
    : public ::testing::TestWithParam<std::tuple<std::string, int, std::string_view>> {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNotOn(device()); !reason.empty()) GTEST_SKIP() << reason;
    const std::string file = kGoldens + "/" + std::string(std::get<2>(GetParam()));
    cases_ = ReadJson(file + ".json").at("cases");
    for (const Json& c : cases_) {
      const auto found = FindPolicy(c.at("policy"));
      if (!found.ok()) GTEST_SKIP() << found.status().message();
    }
    json_ = ReadJson(kGoldens + "/policies.json");
    auto tensors = SafetensorsModel::Open(file + ".safetensors");
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    tensors_ = std::move(*tensors);
  }
  void OpenEngine(const PolicyOptions& policy) {
    const EngineOptions options{.model = ModelFolder(),
                                .device = device(),
                                .threads = 2,
                                .host_reads = !away()  ? "auto"
                                              : sums() ? "attend"
                                                       : "fetch",
                                .policy = policy,
                                .precision = "full",
                                .prefill_chunk = std::get<1>(GetParam())};
    auto backend = MakeBackend(options);
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    auto traced = std::make_unique<Traced>(std::move(*backend), away());
    traced_ = traced.get();
    auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
      return std::unique_ptr<Backend>(std::move(traced));
    });
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    for (int32_t layer = 0; away() && layer < CoreOf(*engine_).bank->n_layers(); ++layer) {
      ASSERT_TRUE(CoreOf(*engine_).bank->OnHost(layer));
    }
  }
  static std::string device() {
    const std::string& name = std::get<0>(GetParam());
    return name.substr(0, name.find('_'));
  }
  // V of `kcache` on the host, which steps copy or the host sums.
  static bool away() { return device() != std::get<0>(GetParam()); }
  static bool sums() { return std::get<0>(GetParam()).ends_with("_sums"); }
  std::string ModelFolder() const { return kGoldens + "/" + json_.at("model").get<std::string>(); }
  PolicyOptions PolicyOf(const Json& c) const;
  void RunCase(const Json& c);
  void ExpectDecisions() const;
  // Whether every KV head of every layer, or every query head where each has a list of its own,
  // read in the step that was probed what the oracle says.
  bool ReadsAsTheOracle(const Json& c, size_t step);

  Json json_;   // model and texts
  Json cases_;  // of the file
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<TensorSource> tensors_;
  Traced* traced_ = nullptr;
  int decisions_ = 0;
  int excused_ = 0;  // of them, which rounding may turn
};

bool PolicyOracle::ReadsAsTheOracle(const Json& c, size_t step) {
  const auto length = c.at("prompt_tokens").get<int32_t>() + static_cast<int32_t>(step) + 1;
  const auto& layers = traced_->layers();
  if (layers.size() != c.at("reads").size()) {
    ADD_FAILURE() << layers.size() << " layers read, expected " << c.at("reads").size();
    return false;
  }
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const Json& keys = c.at("reads").at(layer);
    EXPECT_EQ(layers[layer].size(), keys.is_array() ? keys.size() : kKvHeads);
    for (size_t head = 0; head < layers[layer].size(); ++head) {
      const auto key = (keys.is_array() ? keys.at(head) : keys).get<std::string>();
      const auto expected = Expected(c, key, step, length);
      const std::vector<int32_t>& tokens = layers[layer][head];
      if (tokens == expected) continue;
      const double gap = key.empty() ? 1 : Gap(c, key, step);
      EXPECT_TRUE(gap > 0 && gap < 10 * FullTolerance(device()))
          << "head " << head << " of layer " << layer << " reads other tokens at step " << step
          << ": " << ::testing::PrintToString(tokens) << ", not "
          << ::testing::PrintToString(expected);
      return false;
    }
  }
  return true;
}

PolicyOptions PolicyOracle::PolicyOf(const Json& c) const {
  PolicyOptions policy{.name = c.at("policy"), .settings = {}, .force_indices = true};
  for (const auto& [key, value] : c.at("settings").items()) {
    const auto text = value.get<std::string>();
    policy.settings.emplace_back(key, key == "gates" || (key == "head_map" && text != "identity")
                                          ? ModelFolder() + "/" + text
                                          : text);
  }
  return policy;
}

void PolicyOracle::RunCase(const Json& c) {
  const auto name = c.at("name").get<std::string>();
  SCOPED_TRACE(name);
  auto prompt = json_.at("prompt").get<std::vector<int32_t>>();
  prompt.resize(c.at("prompt_tokens").get<size_t>());
  const auto decode = json_.at("decode").get<std::vector<int32_t>>();
  const auto session = engine_->NewSession(PolicyOf(c));
  ASSERT_TRUE(session.ok()) << session.status().message();
  if (c.contains("first_turn")) {
    const auto tokens = c.at("first_turn").at(0).get<size_t>();
    const auto answer = c.at("first_turn").at(1).get<size_t>();
    const auto end = prompt.begin() + static_cast<ptrdiff_t>(tokens);
    ASSERT_TRUE((*session)->Prompt({prompt.begin(), end}).ok());
    for (size_t i = 0; i < answer; ++i) ASSERT_TRUE((*session)->Step(decode[i]).ok());
    prompt.insert(end, decode.begin(), decode.begin() + static_cast<ptrdiff_t>(answer));
    prompt.resize(prompt.size() - answer);
  }
  ASSERT_TRUE((*session)->Prompt(prompt).ok());
  const auto expected = Rows(*tensors_, name);
  ASSERT_EQ(expected.size(), decode.size());
  const bool chooses = c.contains("chosen");
  // What kvpress gives was computed in float32 (3e-6 from float64).
  const bool rounded = std::get<2>(GetParam()) == "policies_kvpress";
  const double tolerance = std::max(FullTolerance(device()), rounded ? 5e-6 : 0.0);
  double worst = 0;
  for (size_t i = 0; i < decode.size(); ++i) {
    traced_->Begin(chooses);
    ASSERT_TRUE((*session)->Step(decode[i]).ok());
    traced_->set_logging(false);
    if (chooses) {
      for (const Json& steps : c.at("chosen")) decisions_ += i < steps.size() ? 1 : 0;
      if (!ReadsAsTheOracle(c, i)) {
        if (HasFailure()) return;
        // What follows rests on other tokens, so none of it is compared.
        int not_compared = 1;
        for (const Json& steps : c.at("chosen")) {
          not_compared += std::max(0, static_cast<int>(steps.size()) - static_cast<int>(i) - 1);
        }
        decisions_ += not_compared - 1;
        excused_ += not_compared;
        std::printf("%s on %s: step %zu chose others of nearly the same score\n", name.c_str(),
                    device().c_str(), i);
        break;
      }
    }
    const double error = ErrorOfOracle((*session)->logits(), expected[i]);
    worst = std::max(worst, error);
    ASSERT_LE(error, tolerance) << "step " << i;
  }
  std::printf("%s on %s: %.1e of the largest logit (the policy moves them by %.3f)\n", name.c_str(),
              device().c_str(), worst, c.at("moved_against_full").get<double>());
}

void PolicyOracle::ExpectDecisions() const {
  std::printf("%d decisions on %s, %d of them excused\n", decisions_, device().c_str(), excused_);
  EXPECT_GT(decisions_, 200);
  EXPECT_LE(100 * excused_, decisions_);
}

TEST_P(PolicyOracle, EveryLogitAndEveryChoiceAgrees) {
  ASSERT_GE(cases_.size(), 9u);
  PolicyOptions of_engine{.name = "full"};
  if (away()) of_engine = {.name = "kcache", .settings = {{"first_layers", "0"}}};
  OpenEngine(of_engine);
  for (const Json& c : cases_) RunCase(c);
  ExpectDecisions();
}

// The same where the bank keeps what the policy wants kept, and gives the rest back.
class PolicyOracleOnItsEngine : public PolicyOracle {};

TEST_P(PolicyOracleOnItsEngine, EveryLogitAndEveryChoiceAgrees) {
  for (const Json& c : cases_) {
    OpenEngine(PolicyOf(c));
    RunCase(c);
  }
  ExpectDecisions();
}

// A chunk of 59 leaves two rows of the 120 to a third one, so that windows of queries straddle.
std::string NameOfCase(const ::testing::TestParamInfo<PolicyOracle::ParamType>& param_info) {
  return std::string(std::get<2>(param_info.param)) + "_" + std::get<0>(param_info.param) +
         "_chunk" + std::to_string(std::get<1>(param_info.param));
}
INSTANTIATE_TEST_SUITE_P(
    Devices, PolicyOracle,
    ::testing::Combine(::testing::Values("ref", "cpu", "cuda"), ::testing::Values(512, 59),
                       ::testing::Values("policies", "policies_streaming", "policies_tova",
                                         "policies_snapkv", "policies_quest", "policies_duo",
                                         "policies_kcache", "policies_knorm", "policies_keydiff",
                                         "policies_expected_attention", "policies_h2o",
                                         "policies_blocks", "policies_strided", "policies_kascade",
                                         "policies_omnikv", "policies_omnikv_indexed",
                                         "policies_omnikv_duo", "policies_infllm",
                                         "policies_pyramidkv", "policies_kvzip",
                                         "policies_kvpress")),
    NameOfCase);
INSTANTIATE_TEST_SUITE_P(Devices, PolicyOracleOnItsEngine,
                         ::testing::Combine(::testing::Values("ref", "cpu", "cuda"),
                                            ::testing::Values(512, 59),
                                            ::testing::Values("policies_duo", "policies_omnikv_duo",
                                                              "policies_pyramidkv",
                                                              "policies_kvzip")),
                         NameOfCase);
INSTANTIATE_TEST_SUITE_P(Away, PolicyOracle,
                         ::testing::Combine(::testing::Values("ref_away", "cpu_away", "cuda_away",
                                                              "ref_sums", "cpu_sums", "cuda_sums"),
                                            ::testing::Values(512, 59),
                                            ::testing::Values("policies_kcache")),
                         NameOfCase);

}  // namespace
}  // namespace omnikv::policy_oracle_test
