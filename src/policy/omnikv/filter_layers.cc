#include "policy/omnikv/filter_layers.h"

#include <fmt/format.h>

#include "policy/omnikv/omnikv_settings.h"

namespace omnikv {

Result<FilterLayers> FilterLayers::Resolve(const PolicyContext& context, PolicySettings& settings) {
  const int32_t n_layers = context.n_layers;
  if (n_layers == 0) {
    return Unsupported(
        "policy omnikv: every layer of this model attends to a sliding window, expected "
        "global-attention layers to filter");
  }
  ResolveOmnikvAuto(context.model_name, n_layers, settings);
  FilterLayers layers;
  layers.filters_ = settings.IntList("filters");
  if (layers.filters_.back() >= n_layers) {
    return InvalidArgument(
        fmt::format("policy omnikv: filters names layer {}, but the model's {} global-attention "
                    "layers are 0 to {}",
                    layers.filters_.back(), n_layers, n_layers - 1));
  }
  const bool after = settings.Bool("dense_after_filter");
  const int32_t first = layers.filters_.front();
  layers.every_layer_ = settings.Bool("select_every_layer");
  if (layers.every_layer_) {
    layers.filters_.clear();
    for (int32_t layer = first; layer < n_layers; ++layer) layers.filters_.push_back(layer);
  }
  layers.dense_.assign(static_cast<size_t>(n_layers), false);
  for (int32_t layer = 0; layer < n_layers; ++layer) {
    layers.dense_[static_cast<size_t>(layer)] =
        layer < first ||
        (!layers.every_layer_ && (layers.IsFilter(layer) || (after && layers.IsFilter(layer - 1))));
    if (layers.Dense(layer)) layers.n_dense_ += 1;
  }
  layers.indexed_ = settings.Text("dense") == "indexed";
  for (int32_t layer = 0; layer < n_layers; ++layer) {
    // A sparse layer reads what the filter below it chose, not what a dense layer between them did.
    const int32_t filter = layers.FilterOf(layer);
    const bool reads = filter >= 0 && !layers.Chooses(layer);
    layers.choice_of_.push_back(
        layers.Chooses(layer) ? layers.n_choices_++
        : reads
            ? layers.choice_of_[static_cast<size_t>(layers.filters_[static_cast<size_t>(filter)])]
            : -1);
  }
  return layers;
}

}  // namespace omnikv
