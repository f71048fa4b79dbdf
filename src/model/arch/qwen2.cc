// Qwen 1.5 to 2.5, dense: biases on q, k and v; a window on the upper layers where it is switched
// on (no published model does).
#include "model/arch/arch.h"
#include "model/arch/qwen.h"

namespace omnikv {

const Arch& Qwen2Arch() {
  static const Arch kArch = {
      .family = "qwen2",
      .hf_types = {"qwen2"},
      .gguf_types = {"qwen2"},
      .from_hf =
          [](const HfConfig& in, ModelConfig& out) {
            out.qkv_bias = true;
            out.o_bias = false;
            ReadQwenWindows(in, out);
          },
  };
  return kArch;
}

}  // namespace omnikv
