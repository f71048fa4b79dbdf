// What a model is: geometry and the switches in which families differ. Filled from config.json or
// from GGUF metadata by model/arch; forward.cc reads nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/ops.h"

namespace omnikv {

enum class RopeScaling : uint8_t { kNone, kLinear, kDynamic, kLlama3, kYarn, kLongrope };

// One set of rotary frequencies. Most models have one; Gemma 3 has one for global and one for
// sliding layers.
struct RopeConfig {
  double theta = 10000;
  int32_t dim = 0;  // values of a head that are rotated, in pairs (i, i + dim / 2)
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1;
  int64_t original_context = 0;                      // tokens the model was first trained with
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn: whole-numbered ramp bounds
  double magnitude = 0;                          // attention factor; 0: what the scaling implies
  double mscale = 0, mscale_all_dim = 0;         // yarn (DeepSeek's spelling); 0: absent
  std::vector<float> short_factor, long_factor;  // longrope, [dim / 2]
  std::vector<float> freq_factor;                // GGUF rope_freqs: inv_freq is divided by it

  bool operator==(const RopeConfig&) const = default;
};

struct LayerConfig {
  int32_t window = 0;  // sliding-window attention, tokens, the row's own included; 0: global
  int32_t rope = 0;    // index into ModelConfig::ropes; -1: no position encoding (NoPE)

  bool operator==(const LayerConfig&) const = default;
};

struct ModelConfig {
  std::string family;  // arch name: "llama", "qwen2", ...
  std::string name;    // the model's own name, where the files give one
  std::string path;    // of the files, as it was given; empty: there are none
  int32_t n_layers = 0;
  // Of the files, past the last, for multi-token prediction: nobody runs them.
  int32_t extra_layers = 0;
  int32_t d_model = 0;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t ffn = 0;
  int32_t vocab = 0;
  int64_t max_context = 0;  // tokens
  float norm_eps = 1e-5f;
  Activation act = Activation::kSilu;
  QkNorm qk_norm = QkNorm::kNone;
  bool pre_norm = true;    // a norm before attention and FFN (OLMo 2: none)
  bool post_norm = false;  // a norm after them, before the residual (OLMo 2, Gemma 3)
  float embed_scale = 1;
  float residual_scale = 1;
  float attn_scale = 0;  // 0 before loading means 1 / sqrt(head_dim)
  float attn_softcap = 0;
  float logits_scale = 1;  // logits are multiplied by it
  float logits_softcap = 0;
  bool tied_embeddings = false;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;  // projections that have a bias
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;  // [n_layers]
  std::vector<int32_t> eos_ids;     // every id that ends a sequence
  int32_t bos_id = -1;

  bool operator==(const ModelConfig&) const = default;
};

}  // namespace omnikv
