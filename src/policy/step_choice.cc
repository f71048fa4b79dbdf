#include "policy/step_choice.h"

namespace omnikv {

Status StepChoice::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
  room_ = settings.Int("room");
  step_stride_ = int64_t{budget_} + 1;
  ReadSettings(settings);
  if (context.backend == nullptr) return {};
  Backend& backend = *context.backend;
  OKV_RETURN_IF_ERROR(Allocate());
  OKV_ASSIGN_OR_RETURN(scores_, memory_.Take(backend, context.max_context, "scores"));
  OKV_ASSIGN_OR_RETURN(step_scores_,
                       memory_.Take(backend, context.max_seqs * step_stride_, "scores"));
  return choice_.Prepare(backend, memory_, {.budget = budget_}, /*n_seqs=*/1, /*lists=*/1, budget_,
                         "kept tokens");
}

void StepChoice::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (step.prefill && !step.chooses) return;
  Scored scored{.seqs = attend.seqs,
                .steps = step.steps != nullptr ? step.steps : attend.seqs,
                .n_seqs = attend.n_seqs,
                .out = step_scores_.as<float>(),
                .stride = step_stride_};
  if (step.prefill) {
    scored = {.seqs = scored.seqs + step.seq,
              .steps = scored.steps + step.seq,
              .n_seqs = 1,
              .out = scores_.as<float>(),
              .stride = context_.max_context};
  }
  Score(attend, scored);
  if (!step.prefill) return;
  choice_.EnqueueRange(scored.seqs, 1);
  choice_.EnqueueBest(scored.out, scored.stride, scored.seqs, 1);
}

std::optional<Retained> StepChoice::Retains(const LayerStep& step) const {
  if (!step.prefill) return Retained{.scores = {step_scores_.as<float>(), step_stride_}};
  if (!step.chooses) return std::nullopt;
  return choice_.Kept(step.seq);
}

}  // namespace omnikv
