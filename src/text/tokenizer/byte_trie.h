// A set of byte strings with values, walked byte by byte.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace omnikv::tok {

// Nodes lie level by level, the children of a node side by side, so a step reads one short run of
// labels.
class ByteTrie {
 public:
  static constexpr uint32_t kRoot = 0;
  static constexpr uint32_t kNone = UINT32_MAX;

  // Of equal keys the last one counts. Values are not negative.
  explicit ByteTrie(std::vector<std::pair<std::string_view, int32_t>> keys);
  ByteTrie() : ByteTrie(std::vector<std::pair<std::string_view, int32_t>>()) {}

  // The child of `node` along `byte`, or kNone.
  uint32_t Step(uint32_t node, uint8_t byte) const {
    if (node == kRoot) return root_[byte];
    const uint8_t* begin = labels_.data() + first_child_[node];
    const uint32_t n = first_child_[node + 1] - first_child_[node];
    const void* found = n == 0 ? nullptr : std::memchr(begin, byte, n);
    if (found != nullptr) {
      return static_cast<uint32_t>(static_cast<const uint8_t*>(found) - labels_.data());
    }
    return kNone;
  }
  int32_t Value(uint32_t node) const { return values_[node]; }  // -1: no key ends here

 private:
  std::vector<uint32_t> root_;         // [256]
  std::vector<uint8_t> labels_;        // [nodes]
  std::vector<uint32_t> first_child_;  // [nodes + 1]
  std::vector<int32_t> values_;        // [nodes]
};

}  // namespace omnikv::tok
