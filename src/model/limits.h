// What a model's numbers may be: far beyond any published model, small enough that no product of
// them overflows and nothing is allocated wildly because a file says so.
#pragma once

#include <cstdint>
#include <string>

#include "backend/sampling.h"
#include "model/config.h"
#include "omnikv/status.h"

namespace omnikv {

struct ModelLimits {
  static constexpr int64_t kLayers = 1024;
  static constexpr int64_t kWidth = 1 << 18;  // d_model, n_heads * head_dim
  static constexpr int64_t kHeads = 4096;
  static constexpr int64_t kHeadDim = 1024;
  static constexpr int64_t kFfn = 1 << 20;
  static constexpr int64_t kVocab = kMaxSampleVocab;
  static constexpr int64_t kContext = 1 << 30;  // tokens
  static constexpr double kTheta = 1e15;
  static constexpr double kScale = 1e6;  // multipliers and factors, and one over it
};

// Relations between numbers that the readers have bounded one by one. `path` is for messages.
Status CheckConfig(const std::string& path, const ModelConfig& config);

}  // namespace omnikv
