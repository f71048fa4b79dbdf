#include "policy/prompt_choice.h"

#include <iterator>

namespace omnikv {

Status PromptChoice::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
  OKV_RETURN_IF_ERROR(ReadSettings(settings));
  keeps_ = {.rows = budget_,
            .first_prompt = settings.Text("turn") != "recompress",
            .room = settings.Int("room"),
            .lists = context.n_kv_heads,
            .sums = WeighsAllRows()};
  SetLayerRows(keeps_);
  if (context.backend == nullptr) return {};
  OKV_ASSIGN_OR_RETURN(scores_, TakeScores());
  OKV_RETURN_IF_ERROR(Allocate());
  return choice_.Prepare(backend(), memory_, {.budget = budget_, .min_recent = Recent()},
                         /*n_seqs=*/1, context.n_kv_heads, static_cast<int32_t>(keeps_.rows),
                         "kept tokens");
}

void PromptChoice::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (step.chooses_after && WeighsAllRows()) Weigh(step, attend);
  if (!step.chooses) return;
  const SeqMeta* seq = attend.seqs + step.seq;
  if (keeps_.LayersDiffer()) {
    const int64_t rows = keeps_.RowsAfter(step.layer, step.prompt_end);
    choice_.EnqueueRange(seq, 1, static_cast<int32_t>(rows));
  } else {
    choice_.EnqueueRange(seq, 1);
  }
  choice_.EnqueueBest(Score(step, attend, seq), context_.max_context, seq, 1);
}

std::optional<Retained> PromptChoice::Retains(const LayerStep& step) const {
  if (!step.chooses) return std::nullopt;
  return choice_.Kept(step.seq);
}

std::vector<SettingSpec> PromptChoiceSettings(std::vector<SettingSpec> own, double least_budget) {
  std::vector<SettingSpec> settings = {{.key = "budget",
                                        .type = SettingType::kInt,
                                        .default_value = "1024",
                                        .help = "tokens of the prompt that each KV head keeps",
                                        .min = least_budget,
                                        .max = 1e9}};
  std::move(own.begin(), own.end(), std::back_inserter(settings));
  settings.push_back(TurnSetting());
  settings.push_back(RoomSetting());
  return settings;
}

}  // namespace omnikv
