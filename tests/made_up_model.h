// Shapes of small models whose weights tests make up.
#pragma once

#include "model/config.h"

namespace omnikv {

struct SmallShape {
  int32_t n_layers = 6;
  int32_t d_model = 64;
  int32_t head_dim = 16;
  int32_t ffn = 96;
  int32_t vocab = 160;
  int64_t max_context = 0;
  float attn_scale = 1.2f;  // sharp enough that which tokens are read matters
};

// A llama with 4 heads and 2 KV heads.
inline ModelConfig SmallLlama(const SmallShape& shape) {
  ModelConfig config;
  config.family = "llama";
  config.n_layers = shape.n_layers;
  config.d_model = shape.d_model;
  config.n_heads = 4;
  config.n_kv_heads = 2;
  config.head_dim = shape.head_dim;
  config.ffn = shape.ffn;
  config.vocab = shape.vocab;
  config.max_context = shape.max_context;
  config.attn_scale = shape.attn_scale;
  config.ropes.push_back({.theta = 10000, .dim = shape.head_dim});
  config.layers.assign(static_cast<size_t>(shape.n_layers), LayerConfig{});
  return config;
}

}  // namespace omnikv
