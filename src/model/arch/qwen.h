// What Qwen 2 and Qwen 3 share.
#pragma once

#include <vector>

#include "model/hf_config.h"

namespace omnikv {

// use_sliding_window, sliding_window, max_window_layers: the layers from the last number on slide.
inline void ReadQwenWindows(const HfConfig& in, ModelConfig& out) {
  constexpr int64_t kDefaultWindow = 4096;
  constexpr int64_t kDefaultFirst = 28;
  if (!in.fields().Bool("use_sliding_window", false)) return;
  const int64_t first = in.fields().Int("max_window_layers", 0, INT32_MAX, kDefaultFirst);
  std::vector<bool> sliding(out.layers.size());
  for (size_t i = 0; i < sliding.size(); ++i) sliding[i] = static_cast<int64_t>(i) >= first;
  SetWindows(in.ReadSliding(sliding), in.ReadWindow(kDefaultWindow, out), out);
}

}  // namespace omnikv
