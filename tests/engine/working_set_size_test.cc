// Working sets of a size that is asked for, on a card: what is read does not depend on it, only
// what travels does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../test_data.h"
#include "omnikv/engine.h"
#include "on_device.h"

namespace omnikv::working_set_size_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPrompt = 700;
constexpr int kSteps = 40;
constexpr int64_t kBudget = 128;
constexpr int64_t kTail = 16;

struct Outcome {
  std::vector<std::vector<float>> logits;  // after each step
  SessionStats stats;
};

Result<Outcome> Decode(int64_t working_set) {
  EngineOptions options{
      .model = TestData("models/omnikv-tiny-q8_0.gguf"), .device = "cuda", .context = 1024};
  options.place = "host";
  options.policy = {
      .name = "omnikv",
      .settings = {{"budget", std::to_string(kBudget)}, {"tail", std::to_string(kTail)}}};
  options.working_set = working_set;
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

class WorkingSetSize : public OnDevice {};

TEST_P(WorkingSetSize, ChangesOnlyWhatTravels) {
  const auto smallest = Decode(kBudget + kTail);
  ASSERT_TRUE(smallest.ok()) << smallest.status().message();
  ASSERT_TRUE(smallest->stats.hit_rate.has_value());
  EXPECT_LT(*smallest->stats.hit_rate, 1);
  double last_hits = *smallest->stats.hit_rate;
  size_t last_bytes = 0;
  for (const int64_t tokens : {256, 1024, 0}) {
    const auto other = Decode(tokens);
    ASSERT_TRUE(other.ok()) << tokens << ": " << other.status().message();
    EXPECT_EQ(other->logits, smallest->logits) << tokens;
    EXPECT_GE(*other->stats.hit_rate, last_hits - 0.01) << tokens;
    last_hits = *other->stats.hit_rate;
    last_bytes = other->stats.transfer_bytes_per_step;
  }
  // With room for the context a row comes once at most: here 12 layers, 512 bytes each.
  EXPECT_LE(last_bytes * kSteps, size_t{12} * 512 * (kPrompt + kSteps));
  const auto refused = Decode(143);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(),
              HasSubstr("`working_set` is 143, expected at least the 144 tokens"));
}

INSTANTIATE_TEST_SUITE_P(Devices, WorkingSetSize, testing::Values("cuda"), NameOf);

}  // namespace
}  // namespace omnikv::working_set_size_test
