// What the house tests cannot know of `every_nth`: which tokens it reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv {
namespace {

using ::testing::ElementsAre;

TEST(EveryNth, ReadsFirstLastAndEveryNthToken) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "every_nth", {{"budget", "28"}});
  fixture.Prompt(100);
  fixture.Decode();
  int layers = 0;
  for (const TraceEntry& entry : fixture.trace.entries()) {
    const auto* attend = std::get_if<AttendArgs>(&entry.op);
    if (attend == nullptr) continue;
    ++layers;
    const PlanSegment& chosen = attend->plan.segments[0];
    const PlanSegment& recent = attend->plan.segments[1];
    ASSERT_TRUE(chosen.index != nullptr && recent.bounds != nullptr);
    // Of 87 older tokens 14: the first 4, and the 10 multiples of 8 after them.
    EXPECT_THAT(std::vector<int32_t>(chosen.index, chosen.index + *chosen.count),
                ElementsAre(0, 1, 2, 3, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80));
    EXPECT_THAT(std::vector<int32_t>(recent.bounds, recent.bounds + 2), ElementsAre(87, 101));
  }
  EXPECT_EQ(layers, 6);
}

}  // namespace
}  // namespace omnikv
