// Phi-3 mini and medium, Phi-3.5 mini, Phi-4 and Phi-4 mini: fused projections, rotation of a part
// of a head, LongRoPE.
#include "model/arch/arch.h"
#include "model/gguf_config.h"
#include "model/hf_config.h"

namespace omnikv {

const Arch& Phi3Arch() {
  static const Arch kArch = {
      .family = "phi3",
      .hf_types = {"phi3"},
      .gguf_types = {"phi3"},
      .hf_names = {.q = "",
                   .k = "",
                   .v = "",
                   .qkv = "self_attn.qkv_proj",
                   .gate = "",
                   .up = "",
                   .gate_up = "mlp.gate_up_proj"},
      .hf = {.norm_eps = 1e-5, .rope_original_context = 4096},
      .from_hf =
          [](const HfConfig& in, ModelConfig& out) {
            const int32_t window = in.ReadWindow(out.max_context, out);
            for (LayerConfig& layer : out.layers) layer.window = window;
          },
      .from_gguf =
          [](const GgufConfig& in, ModelConfig& out) {
            const int32_t window = in.ReadWindow(out);
            for (LayerConfig& layer : out.layers) layer.window = window;
          },
  };
  return kArch;
}

}  // namespace omnikv
