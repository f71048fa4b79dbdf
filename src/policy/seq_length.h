// How long a sequence is, and how much of it the layers still hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "bank/declared_reads.h"

namespace omnikv {

// A sequence as a decode step finds it, in tokens, the step's own included.
struct SeqLength {
  int64_t tokens = 0;
  int64_t prompt = 0;  // of them, before the first generated one
  // Of them, whose rows are lost by choice, those of evictions apart; the fewest in a layer, and by
  // layer where Keeps::LayersDiffer.
  int64_t gone = 0;
  std::span<const int64_t> layer_gone = {};

  // Whose rows `layer` holds.
  int64_t Held(int32_t layer) const {
    return tokens - (layer_gone.empty() ? gone : layer_gone[static_cast<size_t>(layer)]);
  }
};

// Of a policy that keeps rows of a prompt, at its end. `layer_gone` has room for what is by layer.
inline SeqLength AtPromptEnd(const Keeps& keeps, int64_t tokens, std::vector<int64_t>& layer_gone) {
  layer_gone.clear();
  SeqLength at{.tokens = tokens, .prompt = tokens};
  if (keeps.rows == 0) return at;
  at.gone = tokens - std::min(tokens, keeps.rows);
  for (int32_t layer = 0; layer < static_cast<int32_t>(keeps.layer_rows.size()); ++layer) {
    layer_gone.push_back(tokens - keeps.RowsAfter(layer, tokens));
  }
  at.layer_gone = layer_gone;
  if (!layer_gone.empty()) at.gone = *std::min_element(layer_gone.begin(), layer_gone.end());
  return at;
}

}  // namespace omnikv
