// How well an index finds the best tokens, measured by the engine.
#include "engine/index_recall.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../test_data.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::index_recall_test {
namespace {

using ::testing::HasSubstr;

const std::string kRandom = TestData("tests/golden/policy_model");  // 8 layers, 2 KV heads of 16

EngineOptions OptionsOf(const std::string& device) {
  return {.model = kRandom,
          .device = device,
          .threads = 2,
          .context = 256,
          .policy = {.name = "full"},
          .kv_dtype = "f32",
          .precision = "full",
          .prefill_chunk = 48};
}

const std::vector<std::vector<int32_t>> kTexts{Numbers(203, 1), Numbers(160, 9)};

class IndexRecallOn : public OnDevice {};

// The more tokens get exact scores, the more of the best are found: of nearly all tokens, all. The
// index alone misses some.
TEST_P(IndexRecallOn, GrowsWithWhatIsRescored) {
  const IndexRecallOptions options{.wanted = {{16, 16}, {16, 24}, {16, 150}}, .rows = 4, .step = 2};
  const auto engine = Load(OptionsOf(GetParam()));
  const auto recalls = MeasureIndexRecall(CoreOf(*engine), kTexts, options);
  ASSERT_TRUE(recalls.ok()) << recalls.status().message();
  ASSERT_EQ(recalls->size(), 8u * 3);
  const auto reference = Load(OptionsOf("ref"));
  const auto expected = MeasureIndexRecall(CoreOf(*reference), kTexts, options);
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  double lowest = 1;
  for (size_t layer = 0; layer < 8; ++layer) {
    const double* of = &(*recalls)[3 * layer];
    EXPECT_GE(of[0], 0.5) << layer;
    EXPECT_LE(of[0], of[1] + 1e-9) << layer;
    EXPECT_EQ(of[2], 1) << layer;
    lowest = std::min(lowest, of[0]);
    // A token more or less in one of the 8 rows, where rounding turns a choice.
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(of[i], (*expected)[3 * layer + i], 1.01 / 128);
  }
  EXPECT_LT(lowest, 1);
}

INSTANTIATE_TEST_SUITE_P(Devices, IndexRecallOn, testing::Values("ref", "cpu", "cuda"), NameOf);

TEST(IndexRecall, RefusesWhatItCannotMeasure) {
  const auto engine = Load(OptionsOf("ref"));
  const auto message = [&](const std::vector<std::vector<int32_t>>& texts,
                           const IndexRecallOptions& options) {
    const Status status = CheckIndexRecall(CoreOf(*engine), texts, options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(MeasureIndexRecall(CoreOf(*engine), texts, options).status().message(),
              status.message());
    return status.message();
  };
  EXPECT_THAT(message({Numbers(100, 1)}, {.rows = 4}),
              HasSubstr("text 1: has 100 tokens, expected more than the "));
  EXPECT_THAT(message({Numbers(200, 1)}, {.wanted = {{8, 16}}, .rows = 49, .step = 1}),
              HasSubstr("the last 49 rows of a text are to be measured, expected at most the 48"));
  EXPECT_THAT(message({Numbers(300, 1)}, {.wanted = {{8, 16}}, .rows = 2, .step = 1}),
              HasSubstr("the context holds 256"));
}

}  // namespace
}  // namespace omnikv::index_recall_test
