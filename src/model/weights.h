// A model's weights in a backend's memory, held once, in the formats they were stored in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "omnikv/status.h"

namespace omnikv {

// One layer. Absent parts (bias, norms a family lacks) are null. Norm weights are f32 and final:
// "1 + w" families are folded at load. q and k rows are in the "half" rotary pairing, whatever the
// file's; fused projections are split into parts of the same memory.
struct LayerWeights {
  const float* attn_norm = nullptr;  // [d_model]
  WeightRef wq;                      // [n_heads * head_dim, d_model]
  WeightRef wk, wv;                  // [n_kv_heads * head_dim, d_model]
  WeightRef wo;                      // [d_model, n_heads * head_dim]
  const float *bq = nullptr, *bk = nullptr, *bv = nullptr, *bo = nullptr;  // [n_out of each]
  const float *q_norm = nullptr, *k_norm = nullptr;  // see QkNorm: [head_dim] or [n_out]
  const float* attn_post_norm = nullptr;             // [d_model]
  const float* ffn_norm = nullptr;                   // [d_model]
  WeightRef gate, up, down;                          // [ffn, d] [ffn, d] [d, ffn]
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  const float* ffn_post_norm = nullptr;  // [d_model]
};

struct Weights {
  WeightRef embed;                    // [vocab, d_model]
  const float* final_norm = nullptr;  // [d_model]
  WeightRef head;                     // [vocab, d_model]; the embedding's memory when tied
  const float* head_bias = nullptr;
  std::vector<LayerWeights> layers;

  std::vector<Buffer> memory;  // what the above points into
  size_t bytes = 0;            // of it
  // Of all matrices; none where they differ. An f32 model is computed, and its K/V are kept, in
  // f32.
  std::optional<DType> format;
  // "Q4_K (32 tensors) is dequantised to bf16": what was not kept as stored, for `info`.
  std::vector<std::string> notes;
};

}  // namespace omnikv
