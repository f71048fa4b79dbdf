#include "engine/head_gates.h"

#include <algorithm>

#include "policy/far_attention.h"

namespace omnikv {
namespace {

// The highest of shares [n_layers][n_rows][n_heads], over rows and over the `group` query heads of
// a KV head, is added to gates [n_layers][n_heads / group].
void AddHighest(const std::vector<float>& shares, size_t n_rows, size_t n_heads, size_t group,
                std::vector<double>& gates) {
  const size_t n_kv_heads = n_heads / group;
  for (size_t gate = 0; gate < gates.size(); ++gate) {
    float highest = 0;
    for (size_t row = 0; row < n_rows; ++row) {
      const float* const heads =
          &shares[(gate / n_kv_heads * n_rows + row) * n_heads + gate % n_kv_heads * group];
      highest = std::max(highest, *std::max_element(heads, heads + group));
    }
    gates[gate] += highest;
  }
}

}  // namespace

Status CheckHeadGates(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                      const HeadGatesOptions& options) {
  return CheckMeasuredTexts(core, texts, options.window, options.near.sinks + options.near.recent,
                            "that a streaming head reads");
}

Result<std::vector<double>> MeasureHeadGates(EngineCore& core,
                                             std::span<const std::vector<int32_t>> texts,
                                             const HeadGatesOptions& options,
                                             const MeasureProgress& progress) {
  OKV_RETURN_IF_ERROR(CheckHeadGates(core, texts, options));
  const auto n_heads = static_cast<size_t>(core.config.n_heads);
  const auto n_kv_heads = static_cast<size_t>(core.config.n_kv_heads);
  std::vector<double> gates(static_cast<size_t>(GlobalLayers(core.config)) * n_kv_heads, 0.0);
  OKV_RETURN_IF_ERROR(MeasureTexts(
      core, texts, [&] { return std::make_unique<FarAttention>(options.near, options.window); },
      [&](const Policy& policy) {
        const auto& far = static_cast<const FarAttention&>(policy);
        AddHighest(far.shares(), static_cast<size_t>(far.measured_rows()), n_heads,
                   n_heads / n_kv_heads, gates);
      },
      progress));
  for (double& gate : gates) gate /= static_cast<double>(texts.size());
  return gates;
}

}  // namespace omnikv
