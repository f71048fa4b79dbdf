// Granite 3 and 4 dense: Llama with four multipliers.
#include "model/arch/arch.h"
#include "model/gguf_config.h"
#include "model/hf_config.h"
#include "model/limits.h"

namespace omnikv {
namespace {

constexpr double kMax = ModelLimits::kScale;
constexpr double kMin = 1 / kMax;

}  // namespace

const Arch& GraniteArch() {
  static const Arch kArch = {
      .family = "granite",
      .hf_types = {"granite"},
      .gguf_types = {"granite"},
      .gguf_pairs = true,
      .from_hf =
          [](const HfConfig& in, ModelConfig& out) {
            const auto read = [&](const char* key) {
              return in.fields().Float(key, kMin, kMax, 1);
            };
            out.embed_scale = static_cast<float>(read("embedding_multiplier"));
            out.residual_scale = static_cast<float>(read("residual_multiplier"));
            out.attn_scale = static_cast<float>(read("attention_multiplier"));
            out.logits_scale = static_cast<float>(1 / read("logits_scaling"));
          },
      .from_gguf =
          [](const GgufConfig& in, ModelConfig& out) {
            const auto read = [&](const char* key, double fallback) {
              return in.Float(key, kMin, kMax, fallback);
            };
            out.embed_scale = static_cast<float>(read("embedding_scale", 1));
            out.residual_scale = static_cast<float>(read("residual_scale", 1));
            // 0, here and in the file, is one over the root of the head's size.
            out.attn_scale = static_cast<float>(in.Float("attention.scale", 0, kMax, 0));
            out.logits_scale = static_cast<float>(1 / read("logit_scale", 1));
            if (!in.Bool("rope.scaling.finetuned", true)) {
              in.Refuse("rope.scaling.finetuned", "false", "true: a model with rotary positions");
            }
          },
  };
  return kArch;
}

}  // namespace omnikv
