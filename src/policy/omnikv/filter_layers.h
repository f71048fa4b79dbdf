// Which layers filter, which layers are dense, and which choice each layer reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "policy/policy.h"

namespace omnikv {

class FilterLayers {
 public:
  // From filters, dense_after_filter, select_every_layer and dense, presets resolved.
  static Result<FilterLayers> Resolve(const PolicyContext& context, PolicySettings& settings);

  // Each layer from the first filter on chooses for itself.
  bool every_layer() const { return every_layer_; }
  // Dense layers choose for themselves, by an index of their K: none reads everything.
  bool indexed() const { return indexed_; }
  int32_t n_filters() const { return static_cast<int32_t>(filters_.size()); }
  // Filters, and the layers below the first one and beside them that are not sparse. Indexed ones
  // read everything in prompts alone.
  bool Dense(int32_t layer) const { return dense_[static_cast<size_t>(layer)]; }
  // Whether decode steps that choose read everything there, and how many layers there are of these.
  bool ReadsAll(int32_t layer) const { return Dense(layer) && !indexed_; }
  double n_dense() const { return indexed_ ? 0 : n_dense_; }
  bool IsFilter(int32_t layer) const {
    return std::binary_search(filters_.begin(), filters_.end(), layer);
  }
  // The filter whose choice `layer` reads (for a filter: its own), by its number among the filters;
  // -1 below the first.
  int32_t FilterOf(int32_t layer) const {
    const auto above = std::upper_bound(filters_.begin(), filters_.end(), layer);
    return static_cast<int32_t>(above - filters_.begin()) - 1;
  }

  // Choices of a step, and whether `layer` makes one: filters and, indexed, all dense layers.
  int32_t n_choices() const { return n_choices_; }
  bool Chooses(int32_t layer) const { return IsFilter(layer) || (indexed_ && Dense(layer)); }
  // Whether it does so before its attention, which then reads the choice itself.
  bool ChoosesFirst(int32_t layer) const { return Chooses(layer) && (every_layer_ || indexed_); }
  // The choice that `layer` makes, or else the one that it reads, by its number in the order of
  // layers; -1: neither.
  int32_t ChoiceOf(int32_t layer) const { return choice_of_[static_cast<size_t>(layer)]; }

 private:
  std::vector<int32_t> filters_;    // ascending
  std::vector<bool> dense_;         // [n_layers]
  std::vector<int32_t> choice_of_;  // [n_layers]
  int32_t n_choices_ = 0;
  double n_dense_ = 0;  // layers
  bool every_layer_ = false;
  bool indexed_ = false;
};

}  // namespace omnikv
