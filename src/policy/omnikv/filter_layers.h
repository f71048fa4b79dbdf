// Which layers filter, which read everything, and whose choice the others read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "policy/policy.h"

namespace omnikv {

class FilterLayers {
 public:
  // From filters, dense_after_filter and select_every_layer, presets resolved.
  static Result<FilterLayers> Resolve(const PolicyContext& context, PolicySettings& settings);

  // Each layer from the first filter on chooses for itself.
  bool every_layer() const { return every_layer_; }
  int32_t n_filters() const { return static_cast<int32_t>(filters_.size()); }
  double n_dense() const { return n_dense_; }
  bool Dense(int32_t layer) const { return dense_[static_cast<size_t>(layer)]; }
  bool IsFilter(int32_t layer) const {
    return std::binary_search(filters_.begin(), filters_.end(), layer);
  }
  // The filter whose choice `layer` reads (for a filter: its own), by its number among the filters;
  // -1 below the first.
  int32_t FilterOf(int32_t layer) const {
    const auto above = std::upper_bound(filters_.begin(), filters_.end(), layer);
    return static_cast<int32_t>(above - filters_.begin()) - 1;
  }

 private:
  std::vector<int32_t> filters_;  // ascending
  std::vector<bool> dense_;       // [n_layers]
  double n_dense_ = 0;            // layers
  bool every_layer_ = false;
};

}  // namespace omnikv
