// Rotary frequencies against those of transformers (tests/model/data/rope.json), read from the
// parameters as config.json has them.
#include "model/rope.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "model/hf_config.h"

namespace omnikv::rope_test {
namespace {

using Json = nlohmann::json;

class NoTensors : public TensorSource {
 public:
  NoTensors() : TensorSource("none") {}
};

// Steps of the float32 grid between two positive numbers.
int64_t Ulps(float a, float b) {
  return std::abs(static_cast<int64_t>(std::bit_cast<int32_t>(a)) - std::bit_cast<int32_t>(b));
}

struct Case {
  std::string name;
  RopeConfig rope;
  int64_t max_context = 0;
  int64_t length = 0;
  float magnitude = 0;
  std::vector<float> inv_freq;
};

std::vector<Case> ReadCases() {
  const Result<Json> json = ReadJsonFile(OMNIKV_SOURCE_DIR "/tests/model/data/rope.json");
  EXPECT_TRUE(json.ok()) << json.status().message();
  std::vector<Case> cases;
  for (const Json& item : *json) {
    const Json& rope = item.at("rope");
    const bool longrope = rope.at("rope_type") == "longrope";
    Status status;
    const Json nothing = Json::object();
    const NoTensors tensors;
    const HfConfig config(ArchOf(longrope ? "phi3" : "llama"),
                          JsonFields("config.json", &nothing, &status), tensors);
    ModelConfig model;
    model.head_dim = item.at("head_dim");
    model.max_context = item.at("max_context");
    cases.push_back(
        {item.at("name"), config.ReadRope(JsonFields("config.json", &rope, &status), 10000, model),
         model.max_context, item.at("length"), item.at("magnitude"), item.at("inv_freq")});
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return cases;
}

TEST(Rope, IsThatOfTransformers) {
  const std::vector<Case> cases = ReadCases();
  ASSERT_EQ(cases.size(), 14u);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const RopeFrequencies rope = ComputeRope(c.rope, c.max_context, c.length);
    ASSERT_EQ(rope.inv_freq.size(), c.inv_freq.size());
    EXPECT_FLOAT_EQ(rope.magnitude, c.magnitude);
    // The base of dynamic scaling is a float32 power before it is raised to another.
    const int64_t tolerance = c.rope.scaling == RopeScaling::kDynamic ? 2 : 1;
    for (size_t i = 0; i < c.inv_freq.size(); ++i) {
      EXPECT_LE(Ulps(rope.inv_freq[i], c.inv_freq[i]), tolerance) << "frequency " << i;
    }
  }
}

TEST(Rope, AllButDynamicAndLongropeIgnoreTheLength) {
  for (const Case& c : ReadCases()) {
    SCOPED_TRACE(c.name);
    const bool by_length =
        c.rope.scaling == RopeScaling::kDynamic || c.rope.scaling == RopeScaling::kLongrope;
    EXPECT_EQ(ComputeRope(c.rope, c.max_context, 1).inv_freq !=
                  ComputeRope(c.rope, c.max_context, 1 << 20).inv_freq,
              by_length);
  }
}

// GGUF files of Llama 3 hold the scaling's outcome: what each frequency is divided by.
TEST(Rope, FrequencyFactorsDivide) {
  RopeConfig rope{.theta = 500000, .dim = 8};
  const std::vector<float> plain = ComputeRope(rope, 100, 100).inv_freq;
  rope.freq_factor = {1, 1.5f, 4, 8};
  const std::vector<float> divided = ComputeRope(rope, 100, 100).inv_freq;
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(divided[i], plain[i] / rope.freq_factor[i]);
}

}  // namespace
}  // namespace omnikv::rope_test
