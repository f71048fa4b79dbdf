// Llama 1 to 3.3, and the many models that use its code. GGUF files call Mistral llama too.
#include "model/arch/arch.h"
#include "model/gguf_config.h"

namespace omnikv {

const Arch& LlamaArch() {
  static const Arch kArch = {
      .family = "llama",
      .hf_types = {"llama"},
      .gguf_types = {"llama"},
      .gguf_pairs = true,
      .from_gguf =
          [](const GgufConfig& in, ModelConfig& out) {
            const int32_t window = in.ReadWindow(out);
            for (LayerConfig& layer : out.layers) layer.window = window;
          },
  };
  return kArch;
}

}  // namespace omnikv
