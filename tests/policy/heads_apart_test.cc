// KV heads that have rows of their own (docs/decisions/075), and heads of a class that do (049,
// 077): what a step enqueues of them.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv::heads_apart_test {
namespace {

// A decode step has one op for all heads of a layer where it had one, and one more that makes its
// rows theirs.
TEST(HeadsApart, ADecodeStepHasOneOpForAllHeads) {
  const auto ref = MakeRefBackend();
  StepFixture steps(*ref, "kvzip", {{"ratio", "0.3"}, {"chunk", "64"}}, /*force_indices=*/true,
                    /*more_slots=*/-1, /*split=*/true);
  steps.Prompt(90);
  steps.Decode();
  std::map<std::string, int> ops;
  for (const TraceEntry& entry : steps.trace.entries()) {
    ++ops[std::string(OpName(entry.op))];
    const auto* attend = std::get_if<AttendArgs>(&entry.op);
    if (attend == nullptr) continue;
    EXPECT_EQ(attend->n_rows, 2);  // of two KV heads
    EXPECT_EQ(attend->n_heads, 2);
    EXPECT_EQ(attend->kv.n_kv_heads, 1);
    EXPECT_EQ(attend->plan, AttnPlan::Dense());
  }
  for (const char* name : {"Attend", "StoreRows", "LocateRows", "NormQkvRopeAppend"}) {
    EXPECT_EQ(ops[name], 6) << name;
  }
  EXPECT_EQ(ops["PickHeads"], 0);
}

// Heads of a class have one attention, which reads and writes at their places of the layer's
// queries and outputs, and new rows of two classes are stored at once. It is the same where all
// heads lie in one table.
TEST(HeadsApart, AClassHasOneAttention) {
  const auto ref = MakeRefBackend();
  const SettingList settings = {{"sinks", "4"}, {"recent", "16"}, {"by_layer", "1"}};
  StepFixture apart(*ref, "duo", settings, /*force_indices=*/true, /*more_slots=*/-1,
                    /*split=*/true);
  StepFixture together(*ref, "duo", settings);
  const auto expect_ops = [](StepFixture& steps, int stores) {
    std::map<std::string, int> ops;
    std::map<uint64_t, int> heads;
    for (const TraceEntry& entry : steps.trace.entries()) {
      ++ops[std::string(OpName(entry.op))];
      const auto* attend = std::get_if<AttendArgs>(&entry.op);
      if (attend == nullptr) continue;
      ++heads[attend->TakePart().bits];
      EXPECT_EQ(attend->n_heads, 4);
      EXPECT_EQ(attend->kv.n_kv_heads, 2);
    }
    EXPECT_EQ(heads, (std::map<uint64_t, int>{{1, 6}, {2, 6}}));
    EXPECT_EQ(ops["PickHeads"], 0);
    EXPECT_EQ(ops["StoreRows"], stores);
  };
  for (int32_t step = 0; step < 3; ++step) {
    EXPECT_EQ(step == 0 ? apart.Prompt(30) : apart.Decode(),
              step == 0 ? together.Prompt(30) : together.Decode());
    if (step == 0) continue;
    expect_ops(apart, 6);
    expect_ops(together, 0);
  }
}

// Rows that are apart are those that lists name of a layer with all heads, and each head holds as
// many as it reads.
TEST(HeadsApart, HoldWhatTheyReadAndReadTheSame) {
  const auto ref = MakeRefBackend();
  const SettingList settings = {{"ratio", "0.3"}, {"chunk", "64"}};
  StepFixture apart(*ref, "kvzip", settings, /*force_indices=*/true, /*more_slots=*/-1,
                    /*split=*/true);
  StepFixture together(*ref, "kvzip", settings);
  EXPECT_EQ(apart.Prompt(150), together.Prompt(150));
  std::set<int64_t> differ;
  for (int32_t step = 0; step < 40; ++step) {
    SCOPED_TRACE(step);
    EXPECT_EQ(apart.Decode(), together.Decode());
    for (int32_t layer = 0; layer < 6; ++layer) {
      const int64_t a = apart.bank->Rows(apart.seq, 2 * layer);
      const int64_t b = apart.bank->Rows(apart.seq, 2 * layer + 1);
      differ.insert(a - b);
      EXPECT_EQ(a + b, apart.policy->HeadTokensReadLast(layer, 0, apart.Lengths(), 2));
      EXPECT_EQ(a + b, together.policy->HeadTokensReadLast(layer, 0, together.Lengths(), 2));
    }
  }
  EXPECT_GT(differ.size(), 3u);
}

}  // namespace
}  // namespace omnikv::heads_apart_test
