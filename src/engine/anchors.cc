#include "engine/anchors.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace omnikv {

Status CheckLayerSimilarity(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                            const SimilarityOptions& options) {
  return CheckMeasuredTexts(core, texts, options.window, options.window, "rows that are measured");
}

Result<LayerSimilarity> MeasureLayerSimilarity(EngineCore& core,
                                               std::span<const std::vector<int32_t>> texts,
                                               const SimilarityOptions& options,
                                               const MeasureProgress& progress) {
  OKV_CHECK(options.tile >= 1 && options.tile <= options.window);
  OKV_RETURN_IF_ERROR(CheckLayerSimilarity(core, texts, options));
  LayerSimilarity mean(GlobalLayers(core.config), core.config.n_kv_heads);
  const auto part = 1 / static_cast<double>(texts.size());
  const auto add = [&](std::vector<double>& to, const std::vector<double>& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += part * from[i];
  };
  OKV_RETURN_IF_ERROR(MeasureTexts(
      core, texts, [&] { return std::make_unique<MeasureSimilarity>(options); },
      [&](const Policy& policy) {
        const auto& of_text = static_cast<const MeasureSimilarity&>(policy).measured();
        add(mean.shares, of_text.shares);
        add(mean.importance, of_text.importance);
      },
      progress));
  return mean;
}

std::vector<int32_t> BestAnchors(const std::vector<double>& gains, int32_t n, int32_t count) {
  OKV_CHECK(1 <= count && count <= n);
  const auto at = [n](int32_t i, int32_t j) { return static_cast<size_t>(i * n + j); };
  // best[k][j]: the highest sum over the layers before j, with k anchors among them; last[k][j]:
  // the last of those anchors.
  const auto width = static_cast<size_t>(n + 1);
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(static_cast<size_t>(count + 1),
                                        std::vector<double>(width, kNone));
  std::vector<std::vector<int32_t>> last(static_cast<size_t>(count + 1),
                                         std::vector<int32_t>(width, 0));
  best[0][0] = 0;
  for (size_t k = 1; k < best.size(); ++k) {
    for (int32_t anchor = 0; anchor < n; ++anchor) {
      double sum = best[k - 1][static_cast<size_t>(anchor)];
      if (sum == kNone) continue;
      for (int32_t end = anchor + 1; end <= n; ++end) {
        sum += gains[at(anchor, end - 1)];
        if (!(sum > best[k][static_cast<size_t>(end)])) continue;
        best[k][static_cast<size_t>(end)] = sum;
        last[k][static_cast<size_t>(end)] = anchor;
      }
    }
  }
  std::vector<int32_t> anchors(static_cast<size_t>(count));
  auto end = static_cast<size_t>(n);
  for (size_t k = anchors.size(); k > 0; --k) {
    anchors[k - 1] = last[k][end];
    end = static_cast<size_t>(anchors[k - 1]);
  }
  return anchors;
}

AnchorTable ChooseAnchors(const LayerSimilarity& similarity, int32_t count) {
  const int32_t n = similarity.n_layers;
  std::vector<double> gains(static_cast<size_t>(n * n), 0.0);
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = i; j < n; ++j) {
      gains[static_cast<size_t>(i * n + j)] =
          similarity.Of(i, j) * similarity.importance[static_cast<size_t>(j)];
    }
  }
  AnchorTable table{.anchors = BestAnchors(gains, n, count), .head_map = {}};
  auto next = table.anchors.begin();
  int32_t anchor = 0;
  for (int32_t layer = 0; layer < n; ++layer) {
    if (next != table.anchors.end() && *next == layer) anchor = *next++;
    for (int32_t u = 0; u < similarity.n_kv_heads; ++u) {
      int32_t head = 0;
      for (int32_t v = 1; v < similarity.n_kv_heads; ++v) {
        if (similarity.At(anchor, layer, u, v) > similarity.At(anchor, layer, u, head)) head = v;
      }
      table.head_map.push_back(layer == anchor ? u : head);
    }
  }
  return table;
}

}  // namespace omnikv
