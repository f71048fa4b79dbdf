// Anchors and the map of heads for policy `kascade`, measured on texts (docs/decisions/065): which
// layers choose tokens best for the layers after them, and for each KV head whose tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/measured_texts.h"
#include "policy/anchor_table.h"
#include "policy/layer_similarity.h"

namespace omnikv {

// As CheckMeasuredTexts, for texts with a token before the window.
Status CheckLayerSimilarity(const EngineCore& core, std::span<const std::vector<int32_t>> texts,
                            const SimilarityOptions& options);

// The mean of the texts, of the least of each text's tiles. As CheckLayerSimilarity; REQUIRES a
// text, a tile of at most the window, and needs a free session.
Result<LayerSimilarity> MeasureLayerSimilarity(EngineCore& core,
                                               std::span<const std::vector<int32_t>> texts,
                                               const SimilarityOptions& options,
                                               const MeasureProgress& progress = {});

// Of gains [n, n], the gain of layer j where it reads what layer i <= j chose: the `count` anchors
// a, from 0 on, ascending, of the highest sum over all layers j of gains[a(j), j], where a(j) is
// the last anchor up to j. Of equal sums those whose last anchor is the lowest, and so on. REQUIRES
// 1 <= count <= n.
std::vector<int32_t> BestAnchors(const std::vector<double>& gains, int32_t n, int32_t count);

// `count` anchors, where a layer gains by its similarity to its anchor times its importance, and
// for each KV head of a layer the head of its anchor that does best for it, of equals the lowest.
AnchorTable ChooseAnchors(const LayerSimilarity& similarity, int32_t count);

}  // namespace omnikv
