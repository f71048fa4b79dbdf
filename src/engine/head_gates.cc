#include "engine/head_gates.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "engine/row_group.h"
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
  if (GlobalLayers(core.config) == 0) {
    return Unsupported(
        fmt::format("{}: every layer has a sliding window, expected some that attend to all tokens",
                    core.options.model));
  }
  if (options.window > core.plan.chunk) {
    return InvalidArgument(
        fmt::format("the last {} rows of a text are to be measured, expected at most the {} rows "
                    "of a step (`prefill_chunk`)",
                    options.window, core.plan.chunk));
  }
  const int64_t near = options.near.sinks + options.near.recent;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = fmt::format("text {}", i + 1);
    OKV_RETURN_IF_ERROR(CheckTokens(core, texts[i]).Prefixed(text));
    if (static_cast<int64_t>(texts[i].size()) > near) continue;
    return InvalidArgument(
        fmt::format("{}: has {} tokens, expected more than the {} that a streaming head reads",
                    text, texts[i].size(), near));
  }
  return {};
}

Result<std::vector<double>> MeasureHeadGates(EngineCore& core,
                                             std::span<const std::vector<int32_t>> texts,
                                             const HeadGatesOptions& options,
                                             const HeadGatesProgress& progress) {
  OKV_CHECK(!texts.empty());
  OKV_RETURN_IF_ERROR(CheckHeadGates(core, texts, options));
  PolicyInfo measures;
  measures.name = "far_attention";
  measures.make = [&] { return std::make_unique<FarAttention>(options.near, options.window); };
  OKV_ASSIGN_OR_RETURN(const auto session, MakeSession(core, {}, &measures));
  const auto& far = static_cast<const FarAttention&>(GroupOf(*session).policy());
  const auto n_heads = static_cast<size_t>(core.config.n_heads);
  const auto n_kv_heads = static_cast<size_t>(core.config.n_kv_heads);
  std::vector<double> gates(static_cast<size_t>(GlobalLayers(core.config)) * n_kv_heads, 0.0);
  const auto n_texts = static_cast<double>(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto of_text = [&](int64_t done, int64_t total) {
      const double part =
          static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1));
      progress((static_cast<double>(i) + part) / n_texts);
    };
    OKV_RETURN_IF_ERROR(
        session->Prompt(texts[i], progress ? Session::Progress(of_text) : Session::Progress()));
    AddHighest(far.shares(), static_cast<size_t>(far.measured_rows()), n_heads,
               n_heads / n_kv_heads, gates);
  }
  for (double& gate : gates) gate /= n_texts;
  return gates;
}

}  // namespace omnikv
