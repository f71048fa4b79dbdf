// Which share of the rows of all layers and KV heads stays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace omnikv {

struct Share {
  double ratio = 0;
  int64_t sinks = 0;  // tokens, which stay besides
  int64_t lists = 1;  // KV heads of all layers

  // Rows behind the sinks that stay of a prompt of so many tokens, in all lists.
  int64_t Chosen(int64_t tokens) const {
    const int64_t all = std::max<int64_t>(0, tokens - sinks) * lists;
    return static_cast<int64_t>(ratio * static_cast<double>(all));
  }
  // Rows of a list, in the mean.
  int64_t Mean(int64_t tokens) const { return std::min(tokens, sinks + Chosen(tokens) / lists); }
  // The tokens that stay in each list, ascending: the sinks, and those of the highest scores
  // [lists, tokens], 0 or more, in all lists together; of equals the first.
  std::vector<std::vector<int32_t>> Best(std::vector<float> scores, int64_t tokens) const;
};

}  // namespace omnikv
