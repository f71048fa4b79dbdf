// An example of a policy outside of src/: docs/policy_guide.md explains it. In a decode step every
// layer reads `budget` tokens: half of them are the last ones, the others are the first tokens and
// every n-th token up to there. n is the smallest power of two that the budget allows, and what is
// left of the budget goes to tokens in the middle of such a gap.
#include <algorithm>
#include <bit>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class EveryNth : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    budget_ = settings.Int("budget");
    stride_ = context.max_context;
    if (context.backend == nullptr) return {};
    std::vector<float> ranks;
    for (int32_t seq = 0; seq < context.max_seqs; ++seq) {
      for (int64_t t = 0; t < stride_; ++t) ranks.push_back(Rank(t));
    }
    const auto n = static_cast<int64_t>(ranks.size());
    OKV_ASSIGN_OR_RETURN(ranks_, memory_.Take(*context.backend, n, "the ranks of tokens"));
    context.backend->Upload(ranks_.as(), ranks.data(), ranks_.size());
    const auto capacity = static_cast<int32_t>(std::min(budget_, context.max_context));
    const RangeRule rule{.budget = capacity, .min_recent = capacity / 2};
    return choice_.Prepare(*context.backend, memory_, rule, context.max_seqs, /*lists=*/1, capacity,
                           "selected tokens");
  }

  void BeginStep(int32_t, const AttendArgs& step) override {
    choice_.EnqueueRange(step.seqs, step.n_seqs);
    choice_.EnqueueBest(ranks_.as<float>(), stride_, step.seqs, step.n_seqs);
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.prefill) return;
    attend.plan = AttnPlan{};
    attend.plan.Add(choice_.List());
    attend.plan.Add(choice_.Range());
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return std::min(at.tokens, budget_);
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  // Tokens are selected by rank, and the more often 2 divides a position, the higher it ranks.
  static float Rank(int64_t t) {
    constexpr int64_t kSinks = 4;  // first tokens
    return t < kSinks ? 64.0f : static_cast<float>(std::countr_zero(static_cast<uint64_t>(t)));
  }

  int64_t budget_ = 0;  // tokens
  int64_t stride_ = 0;  // ranks of a sequence
  PolicyMemory memory_;
  Buffer ranks_;  // f32 [max_seqs, stride]
  ListChoice choice_;
};

}  // namespace

PolicyInfo EveryNthPolicy() {
  return {.name = "every_nth",
          .summary = "the first tokens, every n-th token and the last tokens (an example)",
          .kind = PolicyKind::kSelects,
          .knob = {.key = "budget"},
          .settings = {{.key = "budget",
                        .default_value = "1024",
                        .help = "tokens a layer reads",
                        .min = 2,
                        .max = 1e9}},
          .make = [] { return std::make_unique<EveryNth>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .test_settings = {{{"budget", "40"}}, {{"budget", "2"}}}};
}

}  // namespace omnikv
