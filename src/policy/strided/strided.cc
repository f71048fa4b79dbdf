// A cache whose resolution falls with age, chosen by positions alone: each layer keeps `budget`
// tokens, all of the last ones, every second one of those before them, then every fourth, and so
// on. The token that goes is the oldest by its stride, the highest (age + 1/2) / gcd(position,
// 2^30) (AgeRule::kStrided). It is what a choice by attention must beat.
#include <algorithm>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class Strided : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
    sinks_ = static_cast<int32_t>(std::min(settings.Int("sinks"), int64_t{budget_} - 1));
    room_ = settings.Int("room");
    step_stride_ = int64_t{budget_} + 1;
    return context.backend != nullptr ? Allocate() : Status();
  }

  void Plan(const LayerStep&, AttendArgs&) override {}

  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (step.prefill && !step.chooses) return;
    AgedScoresArgs scores{.kv = attend.kv,
                          .seqs = attend.seqs,
                          .steps = step.steps != nullptr ? step.steps : attend.seqs,
                          .out = step_scores_.as<float>(),
                          .stride = step_stride_,
                          .n_seqs = attend.n_seqs,
                          .sinks = sinks_,
                          .rule = AgeRule::kStrided};
    if (step.prefill) {
      scores.seqs += step.seq;
      scores.steps += step.seq;
      scores.n_seqs = 1;
      scores.out = scores_.as<float>();
      scores.stride = context_.max_context;
    }
    context_.backend->Enqueue(scores);
    if (!step.prefill) return;
    choice_.EnqueueRange(scores.seqs, 1);
    choice_.EnqueueBest(scores.out, scores.stride, scores.seqs, 1);
  }

  Keeps Kept() const override { return {.rows = budget_, .every_step = true, .room = room_}; }
  std::optional<Retained> Retains(const LayerStep& step) const override {
    if (!step.prefill) return Retained{.scores = {step_scores_.as<float>(), step_stride_}};
    if (!step.chooses) return std::nullopt;
    return choice_.Kept(step.seq);
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return std::min(at.tokens - at.gone, step_stride_);
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  int64_t Besides(const SeqLength&) const override { return 1; }  // the step's own token
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  Status Allocate() {
    Backend& backend = *context_.backend;
    OKV_ASSIGN_OR_RETURN(scores_, memory_.Take(backend, context_.max_context, "scores"));
    OKV_ASSIGN_OR_RETURN(step_scores_,
                         memory_.Take(backend, context_.max_seqs * step_stride_, "scores"));
    return choice_.Prepare(backend, memory_, {.budget = budget_}, /*n_seqs=*/1, /*lists=*/1,
                           budget_, "kept tokens");
  }

  PolicyContext context_;
  int32_t budget_ = 0;       // tokens
  int32_t sinks_ = 0;        // tokens, in the budget
  int64_t room_ = 0;         // tokens
  int64_t step_stride_ = 0;  // scores of a sequence in a decode step
  PolicyMemory memory_;
  Buffer scores_;       // f32 [max_context]: of a prompt
  Buffer step_scores_;  // f32 [max_seqs, budget + 1]
  ListChoice choice_;   // a prompt's rows that stay
};

}  // namespace

PolicyInfo StridedPolicy() {
  return {.name = "strided",
          .summary = "the last tokens, every second one before them, then every fourth, and so on",
          .facts = {.source = "ours, a baseline without scores",
                    .chooses = "after the prompt and at every step, by position alone",
                    .keeps = "b rows of each layer, on the device",
                    .reads = "b + 1 rows",
                    .holds = "b rows",
                    .loses = "most single tokens of the past (8 of 8 answers)"},
          .settings = {{.key = "budget",
                        .default_value = "1024",
                        .help = "tokens that a layer keeps, sinks included",
                        .min = 1,
                        .max = 1e9},
                       {.key = "sinks",
                        .default_value = "4",
                        .help = "first tokens that stay, below the budget",
                        .max = 1e9},
                       RoomSetting()},
          .make = [] { return std::make_unique<Strided>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}}, {{"budget", "1"}, {"sinks", "0"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
