// Filter layers for published models, and for any other until `analyze filters` has measured its.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace omnikv {

struct OmnikvPreset {
  std::vector<int32_t> filters;  // global-attention layers, from 0
  bool dense_after_filter = true;
  int64_t budget = 2048;  // tokens
  bool measured = false;  // the set was measured on such a model
  std::string source;     // where the set is from, for people
};

// By the model's name and its number of global-attention layers.
OmnikvPreset OmnikvPresetFor(std::string_view model_name, int32_t n_layers);

}  // namespace omnikv
