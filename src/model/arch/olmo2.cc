// OLMo 2: norms after attention and FFN instead of before, and over all of q and of k.
#include "model/arch/arch.h"
#include "model/gguf_config.h"

namespace omnikv {

const Arch& Olmo2Arch() {
  static const Arch kArch = {
      .family = "olmo2",
      .hf_types = {"olmo2"},
      .gguf_types = {"olmo2"},
      .hf_names = {.attn_norm = "",
                   .attn_post_norm = "post_attention_layernorm",
                   .ffn_norm = "",
                   .ffn_post_norm = "post_feedforward_layernorm"},
      .hf = {.norm_eps = 1e-5},
      .qk_norm = QkNorm::kFull,
      .pre_norm = false,
      .post_norm = true,
      .from_gguf =
          [](const GgufConfig& in, ModelConfig&) {
            if (const int64_t window = in.Int("attention.sliding_window", 0, INT32_MAX, 0)) {
              in.Refuse("attention.sliding_window", std::to_string(window),
                        "none: OLMo 2, not OLMo 3");
            }
          },
  };
  return kArch;
}

}  // namespace omnikv
