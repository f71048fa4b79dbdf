#include "policy/omnikv/presets.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace omnikv {
namespace {

struct Row {
  std::string_view name;  // as Words() writes it; a model's name holds these words in a row
  int32_t n_layers;
  std::vector<int32_t> filters;
  bool dense_after_filter;
  int64_t budget;
};

const std::vector<Row>& Rows() {
  static const std::vector<Row> kRows = {
      // Measured on this model: almost all of its long-range reading is done by layer 13
      // (docs/performance.md, "Filters of the shipped model").
      {"-omnikv-tiny-", 16, {2, 13}, false, 1024},
      // The paper, for Llama-3-8B-262K, Yi-9B-200K and Llama-3.1-70B.
      {"-llama-3-", 32, {2, 8, 18}, true, 2048},
      {"-yi-", 48, {6, 11, 30}, true, 2048},
      {"-llama-3-", 80, {4, 19, 41}, true, 2048},
  };
  return kRows;
}

// The words of a name in lower case, each between hyphens; a number begins a word:
// "Meta Llama3.1 8B" is "-meta-llama-3-1-8b-".
std::string Words(std::string_view name) {
  std::string words = "-";
  for (const char c : name) {
    const auto u = static_cast<unsigned char>(c);
    const bool number = std::isdigit(u) != 0;
    const bool after_letter = std::isalpha(static_cast<unsigned char>(words.back())) != 0;
    if (number && after_letter) words += '-';
    if (std::isalnum(u) != 0) {
      words += static_cast<char>(std::tolower(u));
    } else if (words.back() != '-') {
      words += '-';
    }
  }
  return words + '-';
}

}  // namespace

OmnikvPreset OmnikvPresetFor(std::string_view model_name, int32_t n_layers) {
  const std::string words = Words(model_name);
  for (const Row& row : Rows()) {
    if (row.n_layers != n_layers || words.find(row.name) == std::string::npos) continue;
    return {row.filters, row.dense_after_filter, row.budget, true};
  }
  // A guess: the published set of a 32-layer model at the same relative depths.
  OmnikvPreset preset;
  for (const int32_t depth : {2, 8, 18}) {
    const int32_t layer = std::min((depth * n_layers + 16) / 32, n_layers - 1);
    if (preset.filters.empty() || layer > preset.filters.back()) preset.filters.push_back(layer);
  }
  return preset;
}

}  // namespace omnikv
