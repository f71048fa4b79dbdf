#include "policy/far_attention.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace omnikv {

Status FarAttention::Prepare(const PolicyContext& context, PolicySettings& settings) {
  static_cast<void>(settings);
  context_ = context;
  if (context.backend == nullptr) return {};
  OKV_CHECK(window_ <= context.max_rows, "{} rows, of {} in a step", window_, context.max_rows);
  const int64_t row_heads = int64_t{context.max_rows} * context.n_heads;
  for (Buffer* sums : {&all_, &near_sums_}) {
    OKV_ASSIGN_OR_RETURN(
        *sums, memory_.Take(*context.backend, context.n_layers * row_heads, "sums of weights"));
  }
  OKV_ASSIGN_OR_RETURN(
      unused_, memory_.Take(*context.backend, row_heads * context.dk, "a second attention"));
  return {};
}

bool FarAttention::Measures(const LayerStep& step, const AttendArgs& attend) const {
  return step.prefill && step.first_pos + attend.n_rows == step.prompt_end;
}

float* FarAttention::SumsOf(const Buffer& sums, int32_t layer) const {
  return sums.as<float>() + int64_t{layer} * context_.max_rows * context_.n_heads;
}

void FarAttention::Plan(const LayerStep& step, AttendArgs& attend) {
  if (Measures(step, attend)) attend.lse = SumsOf(all_, step.layer);
}

void FarAttention::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (!Measures(step, attend)) return;
  step_rows_ = attend.n_rows;
  AttendArgs near = attend;
  near.plan = near_.Plan();
  near.o = unused_.as<float>();
  near.lse = SumsOf(near_sums_, step.layer);
  context_.backend->Enqueue(near);
}

Status FarAttention::AfterPrefill(int64_t context_length) {
  static_cast<void>(context_length);
  measured_rows_ = std::min(window_, step_rows_);
  const auto n_heads = static_cast<size_t>(context_.n_heads);
  const size_t n = static_cast<size_t>(measured_rows_) * n_heads;
  const size_t skipped = static_cast<size_t>(step_rows_ - measured_rows_) * n_heads;
  shares_.resize(static_cast<size_t>(context_.n_layers) * n);
  std::vector<float> all(n), near(n);
  for (int32_t layer = 0; layer < context_.n_layers; ++layer) {
    Backend& backend = *context_.backend;
    backend.Download(all.data(), SumsOf(all_, layer) + skipped, n * sizeof(float));
    backend.Download(near.data(), SumsOf(near_sums_, layer) + skipped, n * sizeof(float));
    float* const shares = shares_.data() + static_cast<size_t>(layer) * n;
    for (size_t i = 0; i < n; ++i) {
      shares[i] = std::clamp(-std::expm1(near[i] - all[i]), 0.0f, 1.0f);
    }
  }
  return {};
}

}  // namespace omnikv
