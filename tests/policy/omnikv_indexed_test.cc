// dense=indexed of policy omnikv, apart from what the house tests and the oracle see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv::omnikv_indexed_test {
namespace {

using ::testing::ElementsAreArray;
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

// The last op of a kind in a step for which `is` holds.
template <typename Args, typename Is>
Args LastOf(const TraceBackend& trace, const Is& is) {
  Args last;
  for (const TraceEntry& entry : trace.entries()) {
    const auto* op = std::get_if<Args>(&entry.op);
    if (op != nullptr && is(*op)) last = *op;
  }
  return last;
}

// A step over a long context scores units of tokens first. Its candidates are the best of all
// tokens by the index nonetheless.
TEST(OmnikvIndexed, CandidatesOfUnitsAreTheBestOfAllTokens) {
  constexpr int64_t kStride = 256;
  for (const SettingList& which :
       std::vector<SettingList>{{{"budget", "2"}, {"rescore", "1"}},
                                {{"budget", "1"}, {"rescore", "2"}, {"score", "raw"}},
                                {{"budget", "2"}, {"rescore", "1"}, {"sinks", "1"}}}) {
    SCOPED_TRACE(::testing::PrintToString(which));
    SettingList settings = {
        {"filters", "5"}, {"tail", "3"}, {"dense", "indexed"}, {"dense_below", "0"}};
    settings.insert(settings.end(), which.begin(), which.end());
    const auto backend = MakeRefBackend();
    StepFixture fixture(*backend, "omnikv", settings);
    fixture.Prompt(120);
    for (int32_t n = 121; n < 150; ++n) {
      fixture.Decode();
      const auto in_units = [](const auto& op) { return op.unit == kIndexUnit; };
      auto scores = LastOf<IndexScoreArgs>(fixture.trace, in_units);
      if (n < 2 * 8 * kIndexUnit) {
        ASSERT_EQ(scores.q, nullptr) << n << " tokens";
        continue;
      }
      ASSERT_NE(scores.q, nullptr) << n << " tokens";
      std::vector<float> logits(static_cast<size_t>(scores.n_heads * kStride));
      std::vector<float> lse(static_cast<size_t>(scores.n_heads));
      std::vector<float> reduced(kStride);
      std::array<int32_t, 2> index = {-1, -1};
      int32_t count = 0;
      scores.unit = 1;
      scores.logits = logits.data();
      scores.lse = lse.data();
      scores.stride = kStride;
      backend->Enqueue(scores);
      auto reduce = LastOf<ScoreReduceArgs>(fixture.trace, in_units);
      reduce.unit = 1;  // of up to one sink, as of units
      reduce.logits = logits.data();
      reduce.lse = reduce.lse != nullptr ? lse.data() : nullptr;
      reduce.out = reduced.data();
      reduce.stride = kStride;
      backend->Enqueue(reduce);
      auto choice = LastOf<TopKArgs>(fixture.trace, in_units);
      choice.unit = 1;
      choice.scores = reduced.data();
      choice.stride = kStride;
      choice.index = index.data();
      choice.count = &count;
      choice.capacity = static_cast<int32_t>(index.size());
      backend->Enqueue(choice);
      const auto rescore = LastOf<RescoreArgs>(fixture.trace, [](const auto&) { return true; });
      ASSERT_EQ(count, 2);
      ASSERT_EQ(*rescore.tokens.count, 2);
      const int32_t* candidates = rescore.tokens.index;
      EXPECT_THAT(std::vector<int32_t>(candidates, candidates + 2), ElementsAreArray(index))
          << n << " tokens";
      // With their exact logits, and those of the last tokens, the sums are those of all tokens.
      RescoreArgs again = rescore;
      again.logits = logits.data();
      again.lse = lse.data();
      again.stride = kStride;
      again.by_token = false;
      backend->Enqueue(again);
      for (size_t h = 0; h < lse.size(); ++h) EXPECT_NEAR(rescore.lse[h], lse[h], 1e-5) << n;
      // And by them the step reads the same.
      const auto chosen = LastOf<TopKArgs>(
          fixture.trace, [&](const auto& op) { return op.among.index == candidates; });
      ASSERT_NE(chosen.index, nullptr);
      backend->Enqueue(reduce);
      const std::vector<int32_t> read(chosen.index, chosen.index + *chosen.count);
      choice.among = {.index = candidates, .count = rescore.tokens.count, .capacity = 2};
      choice.n_pick = chosen.n_pick;
      backend->Enqueue(choice);
      ASSERT_EQ(count, static_cast<int32_t>(read.size())) << n;
      EXPECT_THAT(read, ElementsAreArray(index.begin(), count)) << n;
      // What it counts as read of the index is what it read.
      int64_t rows = 0;
      for (const TraceEntry& entry : fixture.trace.entries()) {
        if (std::holds_alternative<IndexScoreArgs>(entry.op)) {
          rows += static_cast<int64_t>(entry.cost.kv_bytes) / scores.index.row_bytes;
        }
      }
      EXPECT_EQ(6 * fixture.policy->StateBytesRead(5, fixture.Lengths()),
                rows * scores.index.row_bytes);
    }
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
