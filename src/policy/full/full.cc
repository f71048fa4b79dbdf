// Full attention: every layer reads every token. The measure of all others.
#include "policy/policy.h"

namespace omnikv {
namespace {

class Full : public Policy {
 public:
  Status Prepare(const PolicyContext&, PolicySettings&) override { return {}; }
  void Plan(const LayerStep&, AttendArgs& attend) override { attend.plan = AttnPlan::Dense(); }
  int64_t TokensRead(int32_t, const SeqLength& at) const override { return at.tokens; }
  bool Budgeted(int32_t) const override { return false; }
};

}  // namespace

PolicyInfo FullPolicy() {
  return {.name = "full",
          .summary = "every layer reads every token",
          .facts = {.source = "attention as trained",
                    .chooses = "never",
                    .keeps = "all rows, on the device",
                    .reads = "N rows",
                    .holds = "N rows",
                    .loses = "nothing"},
          .settings = {},
          .make = [] { return std::make_unique<Full>(); },
          .batches = true,
          .covering = [](int64_t) { return std::vector<SettingList>{{}}; },
          .exempt = "",
          .test_settings = {},
          .recommended = nullptr};
}

}  // namespace omnikv
