// A model family as data: how its files name things, and what it computes that others do not.
//
// Adding a family is adding one file to this folder: foo.cc, which defines `const Arch& FooArch()`.
// The build collects them (cmake/Archs.cmake).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace omnikv {

class GgufConfig;
class HfConfig;
class TensorSource;

// Names of tensors, without their ".weight" and ".bias"; empty: there is no such tensor. A layer's
// are "<body><layers>.<i>.<name>". The defaults are Llama's.
struct TensorNames {
  std::string_view embed = "embed_tokens";  // after the body's prefix
  std::string_view final_norm = "norm";     // after the body's prefix
  std::string_view head = "lm_head";        // after the head's prefix
  std::string_view layers = "layers";
  std::string_view attn_norm = "input_layernorm";
  std::string_view q = "self_attn.q_proj";
  std::string_view k = "self_attn.k_proj";
  std::string_view v = "self_attn.v_proj";
  std::string_view qkv;  // the three in one; taken where the file has it
  std::string_view o = "self_attn.o_proj";
  std::string_view q_norm = "self_attn.q_norm";
  std::string_view k_norm = "self_attn.k_norm";
  std::string_view attn_post_norm;
  std::string_view ffn_norm = "post_attention_layernorm";
  std::string_view gate = "mlp.gate_proj";
  std::string_view up = "mlp.up_proj";
  std::string_view gate_up;  // gate above up in one; taken where the file has no gate
  std::string_view down = "mlp.down_proj";
  std::string_view ffn_post_norm;
};

// GGUF's names are the same for every family.
inline constexpr TensorNames kGgufNames = {
    .embed = "token_embd",
    .final_norm = "output_norm",
    .head = "output",
    .layers = "blk",
    .attn_norm = "attn_norm",
    .q = "attn_q",
    .k = "attn_k",
    .v = "attn_v",
    .qkv = "attn_qkv",
    .o = "attn_output",
    .q_norm = "attn_q_norm",
    .k_norm = "attn_k_norm",
    .attn_post_norm = "post_attention_norm",
    .ffn_norm = "ffn_norm",
    .gate = "ffn_gate",
    .up = "ffn_up",
    .gate_up = "ffn_up",
    .down = "ffn_down",
    .ffn_post_norm = "post_ffw_norm",
};

// What stands before the names in a Hugging Face checkpoint.
struct TensorPrefix {
  std::string_view body = "model.";
  std::string_view head;
};

// The rows of a fused q, k and v projection.
enum class QkvOrder : uint8_t {
  kParts,   // all q, all k, all v
  kGroups,  // for each KV head: its q heads, its k head, its v head (InternLM 2)
};

// What transformers takes for a field that config.json leaves out; 0: the field must be there.
struct HfDefaults {
  int32_t d_model = 0;
  int32_t ffn = 0;
  int32_t n_layers = 0;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;  // 0: as many as heads
  int32_t head_dim = 0;    // 0: d_model / n_heads
  int32_t vocab = 0;
  int64_t max_context = 0;
  double norm_eps = 1e-6;
  double rope_theta = 10000;
  int64_t rope_original_context = 0;  // 0: max_context
  bool tied_embeddings = false;
  int32_t bos_id = -1, eos_id = -1;  // -1: none
};

struct Arch {
  std::string_view family;
  std::vector<std::string_view> hf_types;    // model_type in config.json
  std::vector<std::string_view> gguf_types;  // general.architecture
  TensorNames hf_names;
  std::vector<TensorPrefix> hf_prefixes = {TensorPrefix()};  // the first whose embedding exists
  HfDefaults hf;
  QkvOrder qkv_order = QkvOrder::kParts;
  Activation act = Activation::kSilu;  // where the files do not say
  QkNorm qk_norm = QkNorm::kNone;
  bool pre_norm = true;
  bool post_norm = false;
  bool one_plus_norm = false;  // checkpoints store w - 1 of a norm (GGUF files store w)
  bool gguf_pairs = false;     // GGUF files have q and k rows of rotary pairs side by side
  bool own_ropes = false;      // the functions below read the rotary frequencies too

  // Read what the family alone has, after the fields that all share. Null: nothing.
  void (*from_hf)(const HfConfig& in, ModelConfig& out) = nullptr;
  void (*from_gguf)(const GgufConfig& in, ModelConfig& out) = nullptr;
};

// All families of this build, by name.
const std::vector<const Arch*>& AllArchs();

// The one of that family name. REQUIRES it to exist.
const Arch& ArchOf(std::string_view family);

// The prefix that a checkpoint's tensors have: the first whose embedding is there, else the first.
const TensorPrefix& FindPrefix(const Arch& arch, const TensorSource& tensors);

// Gives the layers that slide, `sliding` [n_layers], their window.
void SetWindows(const std::vector<bool>& sliding, int32_t window, ModelConfig& config);

}  // namespace omnikv
