// dense=indexed of policy omnikv, apart from what the house tests and the oracle see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv::omnikv_indexed_test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kPrompt = 100;

// Logits of a few steps after a prompt, on the reference.
std::vector<std::vector<float>> LogitsOf(const SettingList& settings) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "omnikv", settings);
  fixture.Prompt(kPrompt);
  std::vector<std::vector<float>> logits;
  for (int i = 0; i < 6; ++i) logits.push_back(fixture.Decode());
  return logits;
}

// Where every token gets an exact score, an index finds what a pass over K finds. Every layer
// chooses for itself in both.
TEST(OmnikvIndexed, EqualsExactScoresWhereAllTokensAreRescored) {
  for (const SettingList& which :
       std::vector<SettingList>{{},
                                {{"lists", "per_kv_head"}},
                                {{"score", "raw"}},
                                {{"sinks", "3"}},
                                {{"top_p", "0.5"}},
                                {{"selector", "exp"}, {"window", "5"}}}) {
    SettingList exact = {{"filters", "0"},
                         {"select_every_layer", "1"},
                         {"budget", "24"},
                         {"tail", "2"},
                         {"dense_below", "0"}};
    exact.insert(exact.end(), which.begin(), which.end());
    SettingList indexed = exact;
    indexed.insert(indexed.end(), {{"dense", "indexed"}, {"rescore", "10"}});
    SettingList rough = exact;
    rough.insert(rough.end(), {{"dense", "indexed"}, {"rescore", "1"}});
    SCOPED_TRACE(::testing::PrintToString(which));
    const auto expected = LogitsOf(exact);
    EXPECT_EQ(LogitsOf(indexed), expected);
    // Half of the weight lies on tokens that the index ranks among its best, too.
    if (which == SettingList{{"top_p", "0.5"}}) continue;
    EXPECT_NE(LogitsOf(rough), expected) << "the index alone is as good: the test sees nothing";
  }
}

// Dense layers choose for themselves; those that read a choice read that of the filter.
TEST(OmnikvIndexed, DenseLayersReadTheirOwnChoice) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "omnikv",
                      {{"filters", "1,3"},
                       {"dense_after_filter", "1"},
                       {"budget", "16"},
                       {"tail", "2"},
                       {"dense_below", "0"},
                       {"dense", "indexed"}});
  ASSERT_EQ(fixture.policy->States().size(), 5u);
  fixture.Prompt(kPrompt);
  fixture.Decode();
  std::vector<const int32_t*> read;
  for (const TraceEntry& entry : fixture.trace.entries()) {
    const auto* attend = std::get_if<AttendArgs>(&entry.op);
    if (attend == nullptr) continue;
    ASSERT_EQ(attend->plan.n_segments, 2);
    read.push_back(attend->plan.segments[0].index);
  }
  ASSERT_EQ(read.size(), 6u);
  for (size_t layer = 0; layer < 5; ++layer) {
    for (size_t other = 0; other < layer; ++other) EXPECT_NE(read[layer], read[other]);
  }
  EXPECT_EQ(read[5], read[3]);  // not what layer 4 chose
}

// Layers that filter write their index in every step, whoever reads it.
TEST(OmnikvIndexed, ShortContextsKeepTheIndex) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "omnikv",
                      {{"filters", "1"},
                       {"dense_after_filter", "0"},
                       {"budget", "120"},
                       {"dense_below", "0"},
                       {"dense", "indexed"}},
                      /*force_indices=*/false);
  fixture.Prompt(kPrompt);
  fixture.Decode();
  int32_t written = 0;
  int32_t scored = 0;
  for (const TraceEntry& entry : fixture.trace.entries()) {
    written += std::holds_alternative<IndexKeysArgs>(entry.op) ? 1 : 0;
    scored += std::holds_alternative<IndexScoreArgs>(entry.op) ? 1 : 0;
  }
  EXPECT_EQ(written, 2);
  EXPECT_EQ(scored, 0);
}

TEST(OmnikvIndexed, OddHeadsAreRefused) {
  const PolicyInfo* info = *FindPolicy("omnikv");
  PolicySettings settings =
      *PolicySettings::Parse(info->name, info->settings, {{"dense", "indexed"}});
  const Status status = info->make()->Prepare({.model_name = "test",
                                               .n_layers = 6,
                                               .n_heads = 4,
                                               .n_kv_heads = 2,
                                               .dk = 15,
                                               .max_rows = 16,
                                               .max_context = 256},
                                              settings);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("a key of this model has 15 values"));
}

}  // namespace
}  // namespace omnikv::omnikv_indexed_test
