#include "engine/measured_texts.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "engine/row_group.h"

namespace omnikv {

Status CheckMeasuredTexts(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                          int64_t window, int64_t least, const std::string& why) {
  if (GlobalLayers(core.config) == 0) {
    return Unsupported(
        fmt::format("{}: every layer has a sliding window, expected some that attend to all tokens",
                    core.options.model));
  }
  if (window > core.plan.chunk) {
    return InvalidArgument(
        fmt::format("the last {} rows of a text are to be measured, expected at most the {} rows "
                    "of a step (`prefill_chunk`)",
                    window, core.plan.chunk));
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = fmt::format("text {}", i + 1);
    OKV_RETURN_IF_ERROR(CheckTokens(core, texts[i]).Prefixed(text));
    if (static_cast<int64_t>(texts[i].size()) > least) continue;
    return InvalidArgument(fmt::format("{}: has {} tokens, expected more than the {} {}", text,
                                       texts[i].size(), least, why));
  }
  return {};
}

Status MeasureTexts(EngineCore& core, std::span<const std::vector<int32_t>> texts,
                    const std::function<std::unique_ptr<Policy>()>& make,
                    const std::function<void(const Policy& policy)>& visit,
                    const MeasureProgress& progress) {
  OKV_CHECK(!texts.empty());
  PolicyInfo measures;
  measures.name = "a measure of the engine's";
  measures.make = make;
  OKV_ASSIGN_OR_RETURN(const auto session, MakeSession(core, {}, &measures));
  const auto n_texts = static_cast<double>(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto of_text = [&](int64_t done, int64_t total) {
      const double part =
          static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1));
      progress((static_cast<double>(i) + part) / n_texts);
    };
    OKV_RETURN_IF_ERROR(
        session->Prompt(texts[i], progress ? Session::Progress(of_text) : Session::Progress()));
    visit(GroupOf(*session).policy());
  }
  return {};
}

}  // namespace omnikv
