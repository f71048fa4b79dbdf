// Layers with a sliding window keep the rows of their window alone, and answer as if they kept all.
#include <gtest/gtest.h>

#include <memory>

#include "../made_up_model.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "model/generated.h"
#include "on_device.h"

namespace omnikv::windows_test {
namespace {

constexpr int64_t kContext = 2048;
constexpr int32_t kWindow = 100;

ModelConfig Config() {
  ModelConfig config = SmallLlama({.max_context = kContext});
  for (const size_t layer : {0, 1, 3, 4, 5}) config.layers[layer].window = kWindow;
  return config;
}

class SlidingWindows : public OnDevice {
 protected:
  // `chunk` rows of a prompt at a time.
  static std::unique_ptr<Engine> Make(int32_t chunk) {
    auto core = std::make_unique<EngineCore>();
    core->options = {.device = GetParam(),
                     .threads = 2,
                     .context = kContext,
                     .policy = {.name = "full"},
                     .kv_dtype = "f32",
                     .precision = "full",
                     .prefill_chunk = chunk,
                     .max_sessions = 2};
    core->config = Config();
    auto backend = MakeBackend(core->options);
    EXPECT_TRUE(backend.ok()) << backend.status().message();
    core->backend = std::move(*backend);
    core->weights = *GenerateWeights(*core->backend, core->config, DType::kF32);
    const auto plan =
        PlanMemory(core->options, core->config, core->weights.bytes, DType::kF32, *core->backend);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    auto engine = MakeEngine(std::move(core), *plan, 0);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  static std::vector<int32_t> Tokens(int64_t n) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>((i * 37 + 11) % 160));
    return tokens;
  }
  static std::vector<float> Logits(const Session& session) {
    return {session.logits(), session.logits() + Config().vocab};
  }
  // The logits after `tokens`, computed by rows that see every key: nothing is dropped within a
  // chunk.
  static std::vector<float> Whole(const std::vector<int32_t>& tokens) {
    const auto engine = Make(kContext);
    const auto session = *engine->NewSession({.name = "full"});
    EXPECT_TRUE(session->Prompt(tokens).ok());
    return Logits(*session);
  }
  static void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(got[i]) - expected[i]));
      size = std::max(size, std::abs(static_cast<double>(expected[i])));
    }
    EXPECT_LE(error, F32Tolerance(GetParam()) * size);
  }
};

TEST_P(SlidingWindows, HoldTheWindowAndAnswerAsIfTheyHeldAll) {
  const auto engine = Make(48);
  const auto session = *engine->NewSession({.name = "full"});
  const std::vector<int32_t> tokens = Tokens(1600);
  ASSERT_TRUE(session->Prompt({tokens.begin(), tokens.begin() + 1500}).ok());
  const size_t row = Bank::BytesPerToken(CoreOf(*engine).bank->config()) / 6;
  for (size_t n = 1500; n < tokens.size(); ++n) {
    const size_t held = session->stats().held_bytes.device + session->stats().held_bytes.host;
    const size_t all = (n + 63) / 64 * 64;
    EXPECT_LE(held, row * (all + 5 * (kWindow + kSpareTokens + 2 * 64))) << n;
    ASSERT_TRUE(session->Step(tokens[n]).ok());
  }
  ExpectNear(Logits(*session), Whole(tokens));
}

// What was dropped cannot be read again: a cut below it starts over, one above it does not.
TEST_P(SlidingWindows, ACutGoesOnOrStartsOver) {
  const auto engine = Make(48);
  const auto session = *engine->NewSession({.name = "full"});
  const std::vector<int32_t> tokens = Tokens(1500);
  for (const auto& [keep, goes_on] :
       {std::pair<size_t, bool>{1480, true}, {1450, true}, {300, false}}) {
    ASSERT_TRUE(session->Prompt(tokens).ok());
    std::vector<int32_t> other(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(keep));
    for (const int32_t t : Tokens(20)) other.push_back((t + 1) % 160);
    ASSERT_TRUE(session->Prompt(other).ok());
    const int64_t computed = session->stats().prefill_tokens;
    EXPECT_EQ(computed, goes_on ? 20 : static_cast<int64_t>(other.size())) << keep;
    ExpectNear(Logits(*session), Whole(other));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, SlidingWindows, testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::windows_test
