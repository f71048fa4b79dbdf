#include "engine/index_recall.h"

#include <fmt/format.h>

#include <algorithm>

namespace omnikv {

Status CheckIndexRecall(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                        const IndexRecallOptions& options) {
  if (core.config.head_dim % 2 != 0) {
    return Unsupported(fmt::format("{}: a key has {} values, expected an even number",
                                   core.options.model, core.config.head_dim));
  }
  const int64_t rows = int64_t{options.rows - 1} * options.step + 1;
  int64_t rescored = 0;
  for (const RecallOf& of : options.wanted) rescored = std::max<int64_t>(rescored, of.rescored);
  return CheckMeasuredTexts(core, texts, rows, rescored + rows - 1,
                            "of which an index finds all, since most get exact scores");
}

Result<std::vector<double>> MeasureIndexRecall(EngineCore& core,
                                               std::span<const std::vector<int32_t>> texts,
                                               const IndexRecallOptions& options,
                                               const MeasureProgress& progress) {
  OKV_RETURN_IF_ERROR(CheckIndexRecall(core, texts, options));
  std::vector<double> recalls;  // the policy's are of all texts so far
  OKV_RETURN_IF_ERROR(MeasureTexts(
      core, texts,
      [&] { return std::make_unique<IndexRecall>(options.wanted, options.rows, options.step); },
      [&](const Policy& policy) { recalls = static_cast<const IndexRecall&>(policy).recalls(); },
      progress));
  return recalls;
}

}  // namespace omnikv
