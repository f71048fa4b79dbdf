// TOVA (Oren et al. 2024, the published src/tova_cache.py): each layer keeps `budget` tokens. After
// a prompt, those that its last query gives the most weight, mean over heads; then every step gives
// up the one that its own query weighs least.
#include <fmt/format.h>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class Tova : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
    room_ = settings.Int("room");
    step_stride_ = int64_t{budget_} + 1;
    return context.backend != nullptr ? Allocate() : Status();
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (!step.prefill || step.chooses) attend.lse = lse_.as<float>();
  }

  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (step.prefill && !step.chooses) return;
    ScoreArgs score{.q = attend.q,
                    .lse = attend.lse,
                    .kv = attend.kv,
                    .seqs = attend.seqs,
                    .out = step_scores_.as<float>(),
                    .stride = step_stride_,
                    .n_rows = attend.n_rows,
                    .n_seqs = attend.n_seqs,
                    .n_heads = attend.n_heads,
                    .heads = HeadReduce::kMean,
                    .queries = QueryReduce::kLast,
                    .scale = attend.scale,
                    .softcap = attend.softcap};
    if (step.prefill) {
      score.seqs += step.seq;
      score.n_seqs = 1;
      score.out = scores_.as<float>();
      score.stride = context_.max_context;
    }
    context_.backend->Enqueue(score);
    if (!step.prefill) return;
    choice_.EnqueueRange(score.seqs, 1);
    choice_.EnqueueBest(score.out, score.stride, score.seqs, 1);
  }

  Keeps Kept() const override { return {.rows = budget_, .every_step = true, .room = room_}; }
  std::optional<Retained> Retains(const LayerStep& step) const override {
    if (!step.prefill) {
      return Retained{.scores = {step_scores_.as<float>(), step_stride_}};
    }
    if (!step.chooses) return std::nullopt;
    return choice_.Kept(step.seq);
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return std::min(at.tokens - at.gone, step_stride_);
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  int64_t Besides(const SeqLength&) const override { return 1; }  // the step's own token
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return TokensRead(layer, at);
  }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  Status Allocate() {
    Backend& backend = *context_.backend;
    OKV_ASSIGN_OR_RETURN(
        lse_, memory_.Take(backend, int64_t{context_.max_rows} * context_.n_heads, "sums"));
    OKV_ASSIGN_OR_RETURN(scores_, memory_.Take(backend, context_.max_context, "scores"));
    OKV_ASSIGN_OR_RETURN(step_scores_,
                         memory_.Take(backend, context_.max_seqs * step_stride_, "scores"));
    return choice_.Prepare(backend, memory_, {.budget = budget_}, /*n_seqs=*/1, /*lists=*/1,
                           budget_, "kept tokens");
  }

  PolicyContext context_;
  int32_t budget_ = 0;       // tokens
  int64_t room_ = 0;         // tokens
  int64_t step_stride_ = 0;  // scores of a sequence in a decode step
  PolicyMemory memory_;
  Buffer lse_;          // f32 [max_rows, n_heads]
  Buffer scores_;       // f32 [max_context]: of a prompt
  Buffer step_scores_;  // f32 [max_seqs, budget + 1]
  ListChoice choice_;   // a prompt's rows that stay
};

}  // namespace

PolicyInfo TovaPolicy() {
  return {.name = "tova",
          .summary = "the tokens of the most weight, one given up at each step (TOVA)",
          .facts = {.source = "TOVA, Oren et al. 2024",
                    .chooses = "after the prompt and at every step, by the weights of the last "
                               "query, mean of all heads",
                    .keeps = "b rows of each layer, on the device",
                    .reads = "b + 1 rows, and their K once more",
                    .holds = "b rows",
                    .loses = "most of the prompt (8 of 8 answers)"},
          .settings = {{.key = "budget",
                        .type = SettingType::kInt,
                        .default_value = "1024",
                        .help = "tokens that a layer keeps",
                        .min = 1,
                        .max = 1e9},
                       RoomSetting()},
          .make = [] { return std::make_unique<Tova>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "1"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
