// Rotary frequencies with every published scaling.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace omnikv {

struct RopeFrequencies {
  std::vector<float> inv_freq;  // [dim / 2], radians a position
  float magnitude = 1;          // cos and sin are multiplied by it
};

// Frequencies for a context of `length` tokens: `dynamic` stretches its base, and `longrope` picks
// its factors, by it (both as transformers' modeling_rope_utils does); the others ignore it.
// Arithmetic is f32 where transformers' is, so that rotations agree far out.
RopeFrequencies ComputeRope(const RopeConfig& rope, int64_t max_context, int64_t length);

}  // namespace omnikv
