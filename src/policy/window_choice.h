// What policies share that choose once after a prompt by the weights of its last queries: SnapKV's
// score (Li et al. 2024), in the form that keeps one set per KV head (kvpress).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "policy/prompt_choice.h"

namespace omnikv {

// Each KV head keeps the last `window` tokens of the prompt, and of those before them the ones to
// which the window's queries give the most weight, smoothed over neighbours. Has the settings of
// WindowChoiceSettings. Thread-compatible.
class WindowChoice : public PromptChoice {
 public:
  // `name`: the policy's, for messages.
  explicit WindowChoice(std::string name) : name_(std::move(name)) {}

  void Plan(const LayerStep& step, AttendArgs& attend) final {
    if (step.chooses) attend.lse = lse_.as<float>();
  }
  int32_t LastRows() const final { return window_; }

 protected:
  Status ReadSettings(const PolicySettings& settings) override;
  Status Allocate() final;
  int32_t Recent() const final { return window_; }
  const float* Score(const LayerStep& step, const AttendArgs& attend, const SeqMeta* seq) final;

 private:
  std::string name_;
  int32_t window_ = 0;  // the prompt's last tokens, whose queries choose
  int32_t kernel_ = 1;  // tokens
  PoolKind pool_ = PoolKind::kMean;
  Buffer lse_;     // f32 [max_rows, n_heads]
  Buffer pooled_;  // f32 [n_kv_heads, max_context]
};

// Those of PromptChoiceSettings, and `own` behind those of the score.
std::vector<SettingSpec> WindowChoiceSettings(std::vector<SettingSpec> own);

}  // namespace omnikv
