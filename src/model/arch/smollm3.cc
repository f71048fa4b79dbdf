// SmolLM 3: Llama without positions on every fourth layer.
#include "model/arch/arch.h"
#include "model/gguf_config.h"
#include "model/hf_config.h"

namespace omnikv {
namespace {

constexpr int64_t kDefaultInterval = 4;

void SetNoRope(int64_t interval, ModelConfig& out) {
  for (int64_t i = interval - 1; i < out.n_layers; i += interval) {
    out.layers[static_cast<size_t>(i)].rope = -1;
  }
}

void FromHf(const HfConfig& in, ModelConfig& out) {
  const JsonFields& fields = in.fields();
  if (fields.Has("no_rope_layers")) {
    const std::vector<int64_t> rope = fields.Ints("no_rope_layers", 0, 1);  // 1: has positions
    if (rope.size() < out.layers.size()) {
      fields.Refuse("no_rope_layers", "an entry for every layer", StatusCode::kCorrupt);
      return;
    }
    for (size_t i = 0; i < out.layers.size(); ++i) out.layers[i].rope = rope[i] != 0 ? 0 : -1;
  } else {
    SetNoRope(fields.Int("no_rope_layer_interval", 1, INT32_MAX, kDefaultInterval), out);
  }
  if (!fields.Bool("use_sliding_window", false)) return;
  std::vector<bool> sliding(out.layers.size());
  for (size_t i = 0; i < sliding.size(); ++i) sliding[i] = out.layers[i].rope < 0;
  SetWindows(in.ReadSliding(sliding), in.ReadWindow(out.max_context, out), out);
}

}  // namespace

const Arch& Smollm3Arch() {
  static const Arch kArch = {
      .family = "smollm3",
      .hf_types = {"smollm3"},
      .gguf_types = {"smollm3"},
      .hf = {.rope_theta = 2000000, .tied_embeddings = true},
      .gguf_pairs = true,
      .from_hf = FromHf,
      .from_gguf = [](const GgufConfig&, ModelConfig& out) { SetNoRope(kDefaultInterval, out); },
  };
  return kArch;
}

}  // namespace omnikv
