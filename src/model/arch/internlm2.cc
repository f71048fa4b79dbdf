// InternLM 2 and 2.5: Llama with names of its own, and q, k and v fused by group of KV head.
#include "model/arch/arch.h"
#include "model/hf_config.h"

namespace omnikv {

const Arch& Internlm2Arch() {
  static const Arch kArch = {
      .family = "internlm2",
      .hf_types = {"internlm2"},
      .gguf_types = {"internlm2"},
      .hf_names = {.embed = "tok_embeddings",
                   .head = "output",
                   .attn_norm = "attention_norm",
                   .q = "",
                   .k = "",
                   .v = "",
                   .qkv = "attention.wqkv",
                   .o = "attention.wo",
                   .ffn_norm = "ffn_norm",
                   .gate = "feed_forward.w1",
                   .up = "feed_forward.w3",
                   .down = "feed_forward.w2"},
      .qkv_order = QkvOrder::kGroups,
      .gguf_pairs = true,
      .from_hf =
          [](const HfConfig& in, ModelConfig& out) {
            out.qkv_bias = out.o_bias = in.fields().Bool("bias", true);
          },
  };
  return kArch;
}

}  // namespace omnikv
