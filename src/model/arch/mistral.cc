// Mistral 7B and its successors of one architecture: Llama with a window on every layer, which
// later versions leave out.
#include "model/arch/arch.h"
#include "model/hf_config.h"

namespace omnikv {

const Arch& MistralArch() {
  static const Arch kArch = {
      .family = "mistral",
      .hf_types = {"mistral"},
      .from_hf =
          [](const HfConfig& in, ModelConfig& out) {
            constexpr int64_t kDefaultWindow = 4096;
            const int32_t window = in.ReadWindow(kDefaultWindow, out);
            for (LayerConfig& layer : out.layers) layer.window = window;
          },
  };
  return kArch;
}

}  // namespace omnikv
