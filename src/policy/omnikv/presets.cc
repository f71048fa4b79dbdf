#include "policy/omnikv/presets.h"

#include <algorithm>
#include <cctype>

namespace omnikv {
namespace {

struct Row {
  std::string_view name_part;  // lower case; all of a model's name holds it
  int32_t n_layers;
  std::vector<int32_t> filters;
  bool dense_after_filter;
  int64_t budget;
  std::string_view source;
};

const std::vector<Row>& Rows() {
  static const std::vector<Row> kRows = {
      // Measured on this model: almost all of its long-range reading is done by layer 13
      // (docs/performance.md, "Filters of the shipped model").
      {"omnikv-tiny", 16, {2, 13}, false, 1024, "measured on this model"},
      {"llama-3", 32, {2, 8, 18}, true, 2048, "the paper, for Llama-3-8B-262K"},
      {"yi", 48, {6, 11, 30}, true, 2048, "the paper, for Yi-9B-200K"},
      {"llama-3", 80, {4, 19, 41}, true, 2048, "the paper, for Llama-3.1-70B"},
  };
  return kRows;
}

}  // namespace

OmnikvPreset OmnikvPresetFor(std::string_view model_name, int32_t n_layers) {
  std::string name(model_name);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Row& row : Rows()) {
    if (row.n_layers != n_layers || name.find(row.name_part) == std::string::npos) continue;
    return {row.filters, row.dense_after_filter, row.budget, true, std::string(row.source)};
  }
  // The published set of a 32-layer model at the same relative depths.
  OmnikvPreset preset{.filters = {}, .source = "a guess: the set of Llama-3-8B at the same depths"};
  for (const int32_t depth : {2, 8, 18}) {
    const int32_t layer = std::min((depth * n_layers + 16) / 32, n_layers - 1);
    if (preset.filters.empty() || layer > preset.filters.back()) preset.filters.push_back(layer);
  }
  return preset;
}

}  // namespace omnikv
