#include "engine/index_recall.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "engine/row_group.h"

namespace omnikv {

Status CheckIndexRecall(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                        const IndexRecallOptions& options) {
  if (GlobalLayers(core.config) == 0) {
    return Unsupported(
        fmt::format("{}: every layer has a sliding window, expected some that attend to all tokens",
                    core.options.model));
  }
  if (core.config.head_dim % 2 != 0) {
    return Unsupported(fmt::format("{}: a key has {} values, expected an even number",
                                   core.options.model, core.config.head_dim));
  }
  const int64_t rows = int64_t{options.rows - 1} * options.step + 1;
  if (rows > core.plan.chunk) {
    return InvalidArgument(
        fmt::format("the last {} rows of a text are to be measured, expected at most the {} rows "
                    "of a step (`prefill_chunk`)",
                    rows, core.plan.chunk));
  }
  int64_t rescored = 0;
  for (const RecallOf& of : options.wanted) rescored = std::max<int64_t>(rescored, of.rescored);
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = fmt::format("text {}", i + 1);
    OKV_RETURN_IF_ERROR(CheckTokens(core, texts[i]).Prefixed(text));
    if (static_cast<int64_t>(texts[i].size()) >= rescored + rows) continue;
    return InvalidArgument(
        fmt::format("{}: has {} tokens, expected at least {}: where most get exact scores, an "
                    "index finds all",
                    text, texts[i].size(), rescored + rows));
  }
  return {};
}

Result<std::vector<double>> MeasureIndexRecall(EngineCore& core,
                                               std::span<const std::vector<int32_t>> texts,
                                               const IndexRecallOptions& options,
                                               const IndexRecallProgress& progress) {
  OKV_CHECK(!texts.empty());
  OKV_RETURN_IF_ERROR(CheckIndexRecall(core, texts, options));
  PolicyInfo measures;
  measures.name = "index_recall";
  measures.make = [&] {
    return std::make_unique<IndexRecall>(options.wanted, options.rows, options.step);
  };
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
  }
  return static_cast<const IndexRecall&>(GroupOf(*session).policy()).recalls();
}

}  // namespace omnikv
