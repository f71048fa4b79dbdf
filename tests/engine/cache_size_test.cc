// Working sets of a size that is asked for, on a card: what is read does not depend on it, only
// what travels does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/devices.h"
#include "omnikv/engine.h"

namespace omnikv {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPrompt = 700;
constexpr int kSteps = 40;
constexpr size_t kBudget = 128;
constexpr size_t kTail = 16;

struct Outcome {
  std::vector<std::vector<float>> logits;  // after each step
  SessionStats stats;
};

Result<Outcome> Decode(const std::string& cache) {
  EngineOptions options{.model = std::string(OMNIKV_SOURCE_DIR) + "/models/omnikv-tiny-q8_0.gguf",
                        .device = "cuda",
                        .context = 1024};
  options.place = "host";
  options.policy = {
      .name = "omnikv",
      .settings = {
          {"budget", std::to_string(kBudget)}, {"tail", std::to_string(kTail)}, {"cache", cache}}};
  OKV_ASSIGN_OR_RETURN(const auto engine, Engine::Load(options));
  OKV_ASSIGN_OR_RETURN(const auto session, engine->NewSession(options.policy));
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < kPrompt; ++i) prompt.push_back(static_cast<int32_t>(i * 37 % 125) + 300);
  OKV_RETURN_IF_ERROR(session->Prompt(prompt));
  Outcome outcome;
  for (int32_t i = 0; i < kSteps; ++i) {
    OKV_RETURN_IF_ERROR(session->Step(300 + i * 7 % 120));
    outcome.logits.emplace_back(session->logits(), session->logits() + engine->vocab());
  }
  outcome.stats = session->stats();
  return outcome;
}

TEST(CacheSize, ChangesOnlyWhatTravels) {
  const auto card = MakeBackend({.device = "cuda"});
  if (!card.ok()) GTEST_SKIP() << card.status().message();
  const auto smallest = Decode(std::to_string(kBudget + kTail));
  ASSERT_TRUE(smallest.ok()) << smallest.status().message();
  ASSERT_TRUE(smallest->stats.hit_rate.has_value());
  EXPECT_LT(*smallest->stats.hit_rate, 1);
  EXPECT_THAT(smallest->stats.settings, HasSubstr("cache=144"));
  double last_hits = *smallest->stats.hit_rate;
  size_t last_bytes = 0;
  for (const char* cache : {"256", "1024", "auto"}) {
    const auto other = Decode(cache);
    ASSERT_TRUE(other.ok()) << cache << ": " << other.status().message();
    EXPECT_EQ(other->logits, smallest->logits) << cache;
    EXPECT_GE(*other->stats.hit_rate, last_hits - 0.01) << cache;
    last_hits = *other->stats.hit_rate;
    last_bytes = other->stats.transfer_bytes_per_step;
  }
  // With room for the context a row comes once at most: here 12 layers, 512 bytes each.
  EXPECT_LE(last_bytes * kSteps, size_t{12} * 512 * (kPrompt + kSteps));
  const auto refused = Decode("143");
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(),
              HasSubstr("cache is 143, expected at least the 144 tokens"));
}

}  // namespace
}  // namespace omnikv
