#include "text/tokenizer/byte_trie.h"

#include <algorithm>

namespace omnikv::tok {

ByteTrie::ByteTrie(std::vector<std::pair<std::string_view, int32_t>> keys) : root_(256, kNone) {
  std::stable_sort(keys.begin(), keys.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  // The keys under a node are a range of the sorted keys; nodes are made in the order of ranges.
  struct KeyRange {
    uint32_t begin;
    uint32_t end;
  };
  std::vector<KeyRange> level = {{0, static_cast<uint32_t>(keys.size())}};
  labels_.push_back(0);
  for (size_t depth = 0; !level.empty(); ++depth) {
    std::vector<KeyRange> next;
    for (KeyRange range : level) {
      int32_t value = -1;
      while (range.begin < range.end && keys[range.begin].first.size() == depth) {
        value = keys[range.begin++].second;
      }
      values_.push_back(value);
      first_child_.push_back(static_cast<uint32_t>(labels_.size()));
      while (range.begin < range.end) {
        const char label = keys[range.begin].first[depth];
        uint32_t end = range.begin + 1;
        while (end < range.end && keys[end].first[depth] == label) ++end;
        next.push_back({range.begin, end});
        labels_.push_back(static_cast<uint8_t>(label));
        range.begin = end;
      }
    }
    level.swap(next);
  }
  first_child_.push_back(static_cast<uint32_t>(labels_.size()));
  for (uint32_t i = first_child_[0]; i < first_child_[1]; ++i) root_[labels_[i]] = i;
}

}  // namespace omnikv::tok
