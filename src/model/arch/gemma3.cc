// Gemma 3, and the text part of its multimodal models: norms before and after, q and k normed per
// head, five sliding layers to one global, each kind with rotary frequencies of its own.
#include <cmath>

#include "base/dtype.h"
#include "model/arch/arch.h"
#include "model/gguf_config.h"
#include "model/hf_config.h"
#include "model/limits.h"

namespace omnikv {
namespace {

constexpr int32_t kGlobalRope = 0, kSlidingRope = 1;
constexpr double kGlobalTheta = 1e6, kSlidingTheta = 1e4;
constexpr int64_t kDefaultPeriod = 6;
constexpr int64_t kDefaultWindow = 4096;
constexpr double kMaxTheta = ModelLimits::kTheta;

// The root of d_model, in the embedding's precision: the models were trained with it rounded.
float EmbedScale(const TensorView* embed, const ModelConfig& config) {
  const auto scale = static_cast<float>(std::sqrt(static_cast<double>(config.d_model)));
  const bool exact = embed != nullptr && embed->type == StorageType::kF32;
  return exact ? scale : F32FromBf16(Bf16FromF32(scale));
}

// transformers 5 has an object for each type of layer; before, the scaling of rope_scaling was that
// of the global layers alone.
void ReadRopes(const HfConfig& in, ModelConfig& out) {
  const JsonFields& fields = in.fields();
  const double global = fields.Float("rope_theta", 1.0001, kMaxTheta, kGlobalTheta);
  const double sliding = fields.Float("rope_local_base_freq", 1.0001, kMaxTheta, kSlidingTheta);
  const std::optional<JsonFields> sets = fields.Object("rope_parameters");
  std::optional<JsonFields> global_set = fields.Object("rope_scaling");
  std::optional<JsonFields> sliding_set;
  if (sets) {
    if (!sets->Has("full_attention")) {
      sets->Refuse("full_attention", "rope parameters of the global layers", StatusCode::kCorrupt);
    }
    if (!global_set) global_set = sets->Object("full_attention");
    sliding_set = sets->Object("sliding_attention");
  }
  out.ropes = {in.ReadRope(global_set, global, out), in.ReadRope(sliding_set, sliding, out)};
}

void SetRopes(ModelConfig& out, const std::vector<bool>& sliding) {
  for (size_t i = 0; i < out.layers.size(); ++i) {
    out.layers[i].rope = sliding[i] ? kSlidingRope : kGlobalRope;
  }
}

void FromHf(const HfConfig& in, ModelConfig& out) {
  const JsonFields& fields = in.fields();
  ReadRopes(in, out);
  const int64_t period =
      fields.Int("sliding_window_pattern", 1, ModelLimits::kLayers,
                 fields.Int("_sliding_window_pattern", 1, ModelLimits::kLayers, kDefaultPeriod));
  std::vector<bool> sliding(out.layers.size());
  for (size_t i = 0; i < sliding.size(); ++i) {
    sliding[i] = (static_cast<int64_t>(i) + 1) % period != 0;
  }
  sliding = in.ReadSliding(sliding);
  SetRopes(out, sliding);
  SetWindows(sliding, in.ReadWindow(kDefaultWindow, out), out);

  const double scalar = fields.Float("query_pre_attn_scalar", 1e-3, 1e6, 256);
  out.attn_scale = static_cast<float>(1 / std::sqrt(scalar));
  out.attn_softcap = static_cast<float>(fields.Float("attn_logit_softcapping", 0, 1e6, 0));
  out.logits_softcap = static_cast<float>(fields.Float("final_logit_softcapping", 0, 1e6, 0));
  out.embed_scale = EmbedScale(in.FindEmbedding(), out);
}

void FromGguf(const GgufConfig& in, ModelConfig& out) {
  RopeConfig sliding_rope;
  sliding_rope.dim = out.ropes[0].dim;
  sliding_rope.theta = in.Float("rope.freq_base_swa", 1.0001, kMaxTheta, kSlidingTheta);
  out.ropes.push_back(sliding_rope);
  // Without a window every layer is a global one.
  if (in.Int("attention.sliding_window", 0, ModelLimits::kContext, 0) > 0) {
    const std::vector<bool> sliding = in.ReadSlidingPattern(kDefaultPeriod, out);
    SetRopes(out, sliding);
    SetWindows(sliding, in.ReadWindow(out), out);
  }
  // query_pre_attn_scalar is not in the file: the 27B, alone, has d_model / n_heads.
  constexpr int32_t kLayersOf27B = 62;
  const int32_t scalar = out.n_layers == kLayersOf27B ? out.d_model / out.n_heads : out.head_dim;
  out.attn_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(scalar)));
  out.logits_softcap = static_cast<float>(in.Float("final_logit_softcapping", 0, 1e6, 0));
  out.embed_scale = EmbedScale(in.file().Find("token_embd.weight"), out);
}

}  // namespace

const Arch& Gemma3Arch() {
  static const Arch kArch = {
      .family = "gemma3",
      .hf_types = {"gemma3_text", "gemma3"},
      .gguf_types = {"gemma3"},
      .hf_names = {.attn_post_norm = "post_attention_layernorm",
                   .ffn_norm = "pre_feedforward_layernorm",
                   .ffn_post_norm = "post_feedforward_layernorm"},
      .hf_prefixes = {{"model.", ""},
                      {"language_model.model.", "language_model."},
                      {"model.language_model.", ""}},
      // The multimodal models' text_config names only what differs from these.
      .hf = {.d_model = 2304,
             .ffn = 9216,
             .n_layers = 26,
             .n_heads = 8,
             .n_kv_heads = 4,
             .head_dim = 256,
             .vocab = 262208,
             .max_context = 131072,
             .tied_embeddings = true,
             .bos_id = 2,
             .eos_id = 1},
      .act = Activation::kGeluTanh,
      .qk_norm = QkNorm::kPerHead,
      .post_norm = true,
      .one_plus_norm = true,
      .own_ropes = true,
      .from_hf = FromHf,
      .from_gguf = FromGguf,
  };
  return kArch;
}

}  // namespace omnikv
