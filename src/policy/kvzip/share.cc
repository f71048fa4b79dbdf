#include "policy/kvzip/share.h"

#include <cmath>
#include <functional>
#include <limits>

namespace omnikv {

std::vector<std::vector<int32_t>> Share::Best(std::vector<float> scores, int64_t tokens) const {
  std::vector<std::vector<int32_t>> best(static_cast<size_t>(lists));
  const auto n = static_cast<size_t>(tokens);
  const auto first = static_cast<size_t>(std::min(tokens, sinks));
  for (size_t i = 0; i < scores.size(); ++i) {
    if (std::isnan(scores[i])) scores[i] = 0;  // no order has room for it
    if (i % n < first) scores[i] = -1;         // no candidate
  }
  // Above `last`, all stay; of those that equal it, as many as are left.
  int64_t left = Chosen(tokens);
  float last = std::numeric_limits<float>::infinity();
  if (left > 0) {
    std::vector<float> sorted = scores;
    std::nth_element(sorted.begin(), sorted.begin() + (left - 1), sorted.end(), std::greater<>());
    last = sorted[static_cast<size_t>(left - 1)];
    left -= std::ranges::count_if(scores, [&](float score) { return score > last; });
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    const bool stays = i % n < first || scores[i] > last || (scores[i] == last && left-- > 0);
    if (stays) best[i / n].push_back(static_cast<int32_t>(i % n));
  }
  return best;
}

}  // namespace omnikv
