// Filter layers for published models, and a guess for any other.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace omnikv {

struct OmnikvPreset {
  std::vector<int32_t> filters;  // global-attention layers, from 0
  bool dense_after_filter = true;
  int64_t budget = 2048;  // tokens
  bool measured = false;  // on such a model; else a guess
};

// By the model's name, as its files spell it, and its number of global-attention layers, at
// least 1.
OmnikvPreset OmnikvPresetFor(std::string_view model_name, int32_t n_layers);

}  // namespace omnikv
