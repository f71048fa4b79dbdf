// What a policy keeps of a layer's tokens beside their K/V, per unit of tokens: the bank pages it
// as it pages the K/V. What the steps of a policy write there follows from the K/V of the unit's
// tokens alone, so sequences that share a block share its states.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace omnikv {

struct StateSpec {
  int32_t layer = 0;  // of the bank; a policy counts global-attention layers
  // Tokens: a divisor or a multiple of BankConfig::block_tokens; a divisor where the policy drops
  // tokens.
  int32_t unit = 1;
  int64_t bytes_per_unit = 0;
  std::string name;  // what is kept: streams that differ in nothing are one

  bool operator==(const StateSpec&) const = default;
};

// The states of one layer, as long as someone holds them. Opened by Bank::OpenStates.
struct StateStream {
  StateSpec spec;
  Buffer memory;
  StateView view;

  size_t BlockBytes() const {
    return static_cast<size_t>(view.block_units) * static_cast<size_t>(view.row_bytes);
  }
  std::byte* Block(int32_t block) const {
    return view.base + static_cast<size_t>(block) * BlockBytes();
  }
};
using StateStreams = std::vector<std::shared_ptr<const StateStream>>;

inline std::vector<StateView> ViewsOf(const StateStreams& streams) {
  std::vector<StateView> views;
  for (const auto& stream : streams) views.push_back(stream->view);
  return views;
}

}  // namespace omnikv
