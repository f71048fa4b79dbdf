// K and V in q8_0: logits near those with f16 K/V under every policy, and what is refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "../policy_settings.h"
#include "../test_data.h"
#include "on_device.h"
#include "policy/policy.h"
#include "text_parity.h"

namespace omnikv {
namespace {

using ::testing::HasSubstr;

const std::string kShipped = TestData("models/omnikv-tiny-q8_0.gguf");
const std::string kHeadsOf8 = TestData("tests/golden/policy_model");

Result<std::unique_ptr<Engine>> Load(const std::string& device, const std::string& kv_dtype,
                                     const std::string& model = kShipped) {
  return Engine::Load({.model = model,
                       .device = device,
                       .threads = 2,
                       .context = 1500,
                       .kv_dtype = kv_dtype,
                       .precision = "full"});
}

// The longest text of the goldens that fits.
Tokens Prompt() {
  std::ifstream file(TestData("tests/golden/shipped_text.json"));
  Tokens best;
  const auto json = nlohmann::json::parse(file);
  for (const auto& c : json.at("prompts")) {
    auto prompt = c.at("prompt").get<Tokens>();
    if (prompt.size() < 1300 && prompt.size() > best.size()) best = std::move(prompt);
  }
  return best;
}

// Of a device and a policy.
class KvFormat : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    if (const std::string reason = WhyNotOn(device()); !reason.empty()) GTEST_SKIP() << reason;
  }
  static const std::string& device() { return std::get<0>(GetParam()); }
};

std::vector<std::string> PolicyNames() {
  std::vector<std::string> names;
  for (const PolicyInfo& info : AllPolicies()) names.push_back(info.name);
  return names;
}

// The defaults, but for kascade: of a tenth of the tokens, its default, the shipped model's anchors
// choose others where K is rounded, and the logits differ by as much as the choices do.
SettingList Chosen(const PolicyInfo& info) {
  if (info.name != "kascade") return {};
  return {{"share", "0.5"}};
}

// Logits of the shipped model have a standard deviation of some 2; docs/architecture.md states the
// bound.
TEST_P(KvFormat, Q8LogitsAreNearThoseOfF16) {
  constexpr int kSteps = 24;
  constexpr double kMost = 0.5;
  const auto f16 = Load(device(), "f16");
  const auto q8 = Load(device(), "q8_0");
  ASSERT_TRUE(f16.ok()) << f16.status().message();
  ASSERT_TRUE(q8.ok()) << q8.status().message();
  const Tokens prompt = Prompt();
  const PolicyInfo& info = **FindPolicy(std::get<1>(GetParam()));
  const PolicyOptions policy{.name = info.name, .settings = WithFiles(info, Chosen(info), 16, 2)};
  const auto want = (*f16)->NewSession(policy);
  const auto got = (*q8)->NewSession(policy);
  ASSERT_TRUE(want.ok()) << want.status().message();
  ASSERT_TRUE(got.ok()) << got.status().message();
  const double error = TeacherForcedError(**want, **got, prompt, kSteps, (*f16)->vocab());
  fmt::print("{}: logits of q8_0 K/V differ from those of f16 by {:.3f} at most, {} tokens\n",
             info.name, error, prompt.size());
  EXPECT_GT(error, 0);
  EXPECT_LT(error, kMost);
  const auto held = [](const Session& session) {
    const SessionStats stats = session.stats();
    return static_cast<double>(stats.held_bytes.device + stats.held_bytes.host);
  };
  EXPECT_LT(held(**got), 0.8 * held(**want));  // 34 bytes for 64, and states of the policy
}

INSTANTIATE_TEST_SUITE_P(Devices, KvFormat,
                         testing::Combine(testing::Values("cpu", "cuda"),
                                          testing::ValuesIn(PolicyNames())),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param) + "_" +
                                  std::get<1>(param_info.param);
                         });

TEST(KvFormatRefusals, AreSentences) {
  const auto unknown = Load("cpu", "q4_0");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().message(),
            "`kv_dtype` is 'q4_0', expected auto, f16, bf16, f32 or q8_0");
  const auto odd = Load("cpu", "q8_0", kHeadsOf8);
  ASSERT_FALSE(odd.ok());
  EXPECT_THAT(odd.status().message(),
              HasSubstr("`kv_dtype` is q8_0, but the model's heads have 16 values, expected a "
                        "multiple of 32"));
}

}  // namespace
}  // namespace omnikv
