// KV heads that have rows of their own (docs/decisions/075): what a step enqueues of them.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "backend/ref/ref_backend.h"
#include "step_fixture.h"

namespace omnikv {
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
  std::set<int64_t> held;  // rows of the heads
  for (int32_t table = 0; table < 12; ++table) held.insert(steps.bank->Rows(steps.seq, table));
  EXPECT_GT(held.size(), 3u);
}

}  // namespace
}  // namespace omnikv
