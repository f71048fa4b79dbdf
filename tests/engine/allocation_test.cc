// On a real model, decoding allocates nothing. In a binary of its own: it counts
// every allocation of the process.
#include <gtest/gtest.h>

#include "../allocation_counter.h"
#include "omnikv/engine.h"

namespace omnikv::allocation_test {
namespace {

class Allocations : public ::testing::TestWithParam<const char*> {};

TEST_P(Allocations, NoneInAStep) {
  const auto engine = Engine::Load({.model = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf",
                                    .device = "cpu",
                                    .threads = 2,
                                    .context = 2048});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  PolicyOptions policy{.name = GetParam(), .settings = {}};
  if (policy.name != "full") policy.settings = {{"budget", "64"}};
  const auto session = (*engine)->NewSession(policy);
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->Prompt(std::vector<int32_t>(300, 40)).ok());
  // The first step of each kind is recorded: one of 16 completes a page of quest.
  for (int i = 0; i < 20; ++i) ASSERT_TRUE((*session)->Step(50 + i).ok());
  const int64_t before = g_allocations.load();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE((*session)->Step(60 + i).ok());
  EXPECT_EQ(g_allocations.load() - before, 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, Allocations,
                         ::testing::Values("full", "omnikv", "quest", "streaming"));

}  // namespace
}  // namespace omnikv::allocation_test
