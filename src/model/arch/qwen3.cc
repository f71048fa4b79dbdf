// Qwen 3, dense: q and k normed per head, heads of a size of their own.
#include "model/arch/arch.h"
#include "model/arch/qwen.h"

namespace omnikv {

const Arch& Qwen3Arch() {
  static const Arch kArch = {
      .family = "qwen3",
      .hf_types = {"qwen3"},
      .gguf_types = {"qwen3"},
      .hf = {.head_dim = 128},
      .qk_norm = QkNorm::kPerHead,
      .from_hf = ReadQwenWindows,
  };
  return kArch;
}

}  // namespace omnikv
