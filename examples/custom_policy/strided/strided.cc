// An example of a policy outside of src/: docs/policy_guide.md explains it. In a decode step every
// layer reads `budget` tokens: half of them are the last ones, the others are the first tokens and
// every n-th token up to there. n is the smallest power of two that the budget allows, and what is
// left of the budget goes to tokens in the middle of such a gap.
#include <algorithm>
#include <bit>

#include "policy/policy.h"

namespace omnikv {
namespace {

class Strided : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = settings.Int("budget");
    capacity_ = static_cast<int32_t>(std::min(budget_, context.max_context));
    rule_ = {.budget = capacity_, .min_recent = capacity_ / 2};
    return context.backend == nullptr ? Status() : Allocate();
  }

  void BeginStep(int32_t, const AttendArgs& step) override {
    context_.backend->Enqueue(PlanRangeArgs{.seqs = step.seqs,
                                            .n_seqs = step.n_seqs,
                                            .rule = rule_,
                                            .bounds = bounds_.as<int32_t>(),
                                            .n_candidates = n_candidates_.as<int32_t>(),
                                            .n_pick = n_pick_.as<int32_t>()});
    context_.backend->Enqueue(TopKArgs{.scores = scores_.as<float>(),
                                       .weights = weight_.as<float>(),
                                       .seqs = step.seqs,
                                       .n_candidates = n_candidates_.as<int32_t>(),
                                       .n_pick = n_pick_.as<int32_t>(),
                                       .index = index_.as<int32_t>(),
                                       .count = count_.as<int32_t>(),
                                       .stride = stride_,
                                       .capacity = capacity_,
                                       .n_seqs = step.n_seqs});
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.prefill) return;
    PlanSegment chosen;
    chosen.kind = SegmentKind::kList;
    chosen.index = index_.as<int32_t>();
    chosen.count = count_.as<int32_t>();
    chosen.capacity = capacity_;
    PlanSegment recent;
    recent.bounds = bounds_.as<int32_t>();
    attend.plan = AttnPlan{};
    attend.plan.Add(chosen);
    attend.plan.Add(recent);
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return std::min(at.tokens, budget_);
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  size_t Bytes() const override { return bytes_; }

 private:
  // Tokens are selected by rank, and the more often 2 divides a position, the higher it ranks.
  static float Rank(int64_t t) {
    constexpr int64_t kSinks = 4;  // first tokens
    return t < kSinks ? 64.0f : static_cast<float>(std::countr_zero(static_cast<uint64_t>(t)));
  }

  Status Allocate() {
    const auto room = [&](Buffer& buffer, int64_t n) -> Status {
      OKV_ASSIGN_OR_RETURN(
          buffer, context_.backend->Allocate(static_cast<size_t>(n) * 4, "strided tokens"));
      bytes_ += buffer.size();
      return {};
    };
    const auto seqs = int64_t{context_.max_seqs};
    stride_ = (context_.max_context + 15) / 16 * 16;
    OKV_RETURN_IF_ERROR(room(scores_, seqs * stride_));
    OKV_RETURN_IF_ERROR(room(weight_, 1));
    OKV_RETURN_IF_ERROR(room(bounds_, 2 * seqs));
    OKV_RETURN_IF_ERROR(room(n_candidates_, seqs));
    OKV_RETURN_IF_ERROR(room(n_pick_, seqs));
    OKV_RETURN_IF_ERROR(room(index_, seqs * capacity_));
    OKV_RETURN_IF_ERROR(room(count_, seqs));
    std::vector<float> ranks(static_cast<size_t>(seqs * stride_));
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = Rank(static_cast<int64_t>(i) % stride_);
    const float one = 1;
    context_.backend->Upload(scores_.as(), ranks.data(), ranks.size() * sizeof(float));
    context_.backend->Upload(weight_.as(), &one, sizeof(one));
    return {};
  }

  PolicyContext context_;
  int64_t budget_ = 0;    // tokens
  int32_t capacity_ = 0;  // tokens that a list has room for
  int64_t stride_ = 0;    // tokens that a row of scores has room for
  RangeRule rule_;
  size_t bytes_ = 0;  // of all buffers
  Buffer scores_, weight_, bounds_, n_candidates_, n_pick_, index_, count_;
};

}  // namespace

PolicyInfo StridedPolicy() {
  return {.name = "strided",
          .summary = "the first tokens, every n-th token and the last tokens (an example)",
          .settings = {{.key = "budget",
                        .default_value = "1024",
                        .help = "tokens a layer reads",
                        .min = 2,
                        .max = 1e9}},
          .make = [] { return std::make_unique<Strided>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .variants = {{{"budget", "40"}}, {{"budget", "2"}}}};
}

}  // namespace omnikv
