#include "model/gguf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/printable.h"
#include "model/limits.h"
#include "model/loader.h"

namespace omnikv {
namespace {

using Limits = ModelLimits;

constexpr int64_t kControlToken = 3;  // tokenizer.ggml.token_type
constexpr int64_t kUserToken = 4;

// Control tokens that end an answer, whatever the model: Hugging Face folders list them in
// generation_config.json, GGUF files name one or two of them.
constexpr std::array<std::string_view, 12> kEndTexts = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>",    "<|end_of_text|>", "<|endoftext|>", "<|end|>",
    "<|return|>", "<|EOT|>",    "<end_of_turn>", "<EOT>",           "_<EOT>",        "[EOT]"};

}  // namespace

void GgufConfig::Fail(Status status) const {
  if (status_->ok()) *status_ = std::move(status);
}

void GgufConfig::Refuse(std::string_view key, std::string_view value,
                        std::string_view expected) const {
  Fail(Unsupported(
      fmt::format("{}: {} is {}, expected {}", file_.path(), Key(key), value, expected)));
}

int64_t GgufConfig::Int(std::string_view key, int64_t min, int64_t max,
                        std::optional<int64_t> fallback) const {
  const std::string name = Key(key);
  if (!file_.Has(name) && fallback) return *fallback;
  if (!file_.Has(name)) {
    Fail(NotFound(fmt::format("{}: has no metadata '{}', expected an integer from {} to {}",
                              file_.path(), name, min, max)));
    return min;
  }
  Result<int64_t> value = file_.GetInt(name);
  if (!value.ok()) {
    const Result<std::vector<int64_t>> each = file_.IntArray(name);
    if (!each.ok() || each->empty()) {
      Fail(value.status());
      return min;
    }
    if (std::adjacent_find(each->begin(), each->end(), std::not_equal_to<>()) != each->end()) {
      Refuse(key, fmt::format("an array of {} that differ", each->size()),
             "the same number for every layer");
    }
    value = each->front();
  }
  if (*value < min || *value > max) {
    Fail(Corrupt(fmt::format("{}: {} is {}, expected an integer from {} to {}", file_.path(), name,
                             *value, min, max)));
    return min;
  }
  return *value;
}

double GgufConfig::Float(std::string_view key, double min, double max,
                         std::optional<double> fallback) const {
  const std::string name = Key(key);
  if (!file_.Has(name) && fallback) return *fallback;
  const Result<double> value = file_.GetFloat(name);
  if (!value.ok()) {
    Fail(value.status());
    return max;
  }
  if (!(*value >= min && *value <= max)) {  // nor NaN
    Fail(Corrupt(fmt::format("{}: {} is {}, expected a number from {} to {}", file_.path(), name,
                             *value, min, max)));
    return max;
  }
  return *value;
}

bool GgufConfig::Bool(std::string_view key, bool fallback) const {
  const Result<bool> value = file_.GetBoolOr(Key(key), fallback);
  if (!value.ok()) Fail(value.status());
  return value.ok() ? *value : fallback;
}

std::string GgufConfig::String(std::string_view key, std::string fallback) const {
  const Result<std::string_view> value = file_.GetStringOr(Key(key), fallback);
  if (!value.ok()) Fail(value.status());
  return value.ok() ? std::string(*value) : fallback;
}

std::vector<float> GgufConfig::ReadFactors(std::string_view tensor, int64_t n) const {
  const TensorView* view = file_.Find(tensor);
  if (view == nullptr) return {};
  std::vector<float> factors(static_cast<size_t>(n));
  if (view->shape != std::vector<int64_t>{n} || view->type != StorageType::kF32) {
    Fail(Corrupt(fmt::format("{}: tensor '{}' is {} [{}], expected F32 [{}]", file_.path(), tensor,
                             StorageTypeName(view->type), fmt::join(view->shape, ", "), n)));
    return factors;
  }
  if (const Status read = file_.ReadValues(*view, 0, factors.size(), DType::kF32, factors.data());
      !read.ok()) {
    Fail(read);
    return factors;
  }
  for (const float f : factors) {
    if (!(f >= 1 / Limits::kScale && f <= Limits::kScale)) {
      Fail(Corrupt(fmt::format("{}: tensor '{}' holds {}, expected factors from {} to {}",
                               file_.path(), tensor, f, 1 / Limits::kScale, Limits::kScale)));
    }
  }
  return factors;
}

RopeConfig GgufConfig::ReadRope(const ModelConfig& config) const {
  RopeConfig rope;
  rope.theta = Float("rope.freq_base", 1.0001, Limits::kTheta, 10000);
  rope.dim = static_cast<int32_t>(Int("rope.dimension_count", 2, config.head_dim, config.head_dim));
  if (rope.dim % 2 != 0 || (arch_.gguf_pairs && rope.dim != config.head_dim)) {
    Refuse(
        "rope.dimension_count", std::to_string(rope.dim),
        arch_.gguf_pairs ? fmt::format("{}, the whole head", config.head_dim) : "an even number");
  }
  // A factor without a type is linear; so is the key it had before.
  const double scale = Float("rope.scaling.factor", 0, Limits::kScale,
                             Float("rope.scale_linear", 0, Limits::kScale, 0));
  std::string type = String("rope.scaling.type", scale > 0 ? "linear" : "none");
  rope.freq_factor = ReadFactors("rope_freqs.weight", rope.dim / 2);
  rope.short_factor = ReadFactors("rope_factors_short.weight", rope.dim / 2);
  rope.long_factor = ReadFactors("rope_factors_long.weight", rope.dim / 2);
  if (!rope.long_factor.empty()) type = "longrope";  // Phi-3 files give no type

  const auto original_context = [&] {
    return Int("rope.scaling.original_context_length", 2, Limits::kContext, config.max_context);
  };
  if (type == "linear") {
    if (scale > 0) rope.scaling = RopeScaling::kLinear;
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::kYarn;
    rope.original_context = original_context();
    if (scale == 0) Refuse("rope.scaling.factor", "0 or absent", "a factor, with yarn");
    rope.magnitude = Float("rope.scaling.yarn_attn_factor", 0, Limits::kScale, 0);
    rope.beta_fast = Float("rope.scaling.yarn_beta_fast", 1e-3, Limits::kScale, 32);
    rope.beta_slow = Float("rope.scaling.yarn_beta_slow", 1e-3, Limits::kScale, 1);
    rope.mscale_all_dim = Float("rope.scaling.yarn_log_multiplier", 0, Limits::kScale, 0);
    if (rope.mscale_all_dim > 0) rope.mscale = 1;
    const double extrapolation = Float("rope.scaling.yarn_ext_factor", -1, Limits::kScale, 1);
    if (extrapolation != 1 && extrapolation != -1) {  // -1: not set
      Refuse("rope.scaling.yarn_ext_factor", fmt::to_string(extrapolation), "1");
    }
  } else if (type == "longrope") {
    rope.scaling = RopeScaling::kLongrope;
    rope.original_context = original_context();
    if (rope.short_factor.empty() || rope.long_factor.empty()) {
      Fail(
          Corrupt(fmt::format("{}: has no tensors 'rope_factors_short.weight' and "
                              "'rope_factors_long.weight', expected both with {} longrope",
                              file_.path(), Key("rope.scaling.type"))));
    }
    rope.factor =
        static_cast<double>(config.max_context) / static_cast<double>(rope.original_context);
    rope.magnitude = Float("rope.scaling.attn_factor", 0, Limits::kScale, 0);
  } else if (type != "none") {
    Refuse("rope.scaling.type", Printable(type), "none, linear, yarn or longrope");
  }
  if (rope.scaling == RopeScaling::kLinear || rope.scaling == RopeScaling::kYarn) {
    rope.factor = std::max(scale, 1 / Limits::kScale);
  }
  if (const double factor = Float("rope.scaling.attn_factor", 0, Limits::kScale, 1);
      factor != 1 && rope.scaling != RopeScaling::kLongrope) {
    Refuse("rope.scaling.attn_factor", fmt::to_string(factor), "1 unless longrope is used");
  }
  return rope;
}

int32_t GgufConfig::ReadWindow(const ModelConfig& config) const {
  const int64_t window = Int("attention.sliding_window", 0, Limits::kContext, 0);
  return window < config.max_context ? static_cast<int32_t>(window) : 0;
}

std::vector<bool> GgufConfig::ReadSlidingPattern(int64_t fallback,
                                                 const ModelConfig& config) const {
  constexpr std::string_view kKey = "attention.sliding_window_pattern";
  const auto n_layers = static_cast<size_t>(config.n_layers);
  std::vector<bool> sliding(n_layers);
  if (const Result<std::vector<int64_t>> each = file_.IntArray(Key(kKey)); each.ok()) {
    if (each->size() != n_layers) {
      Fail(Corrupt(fmt::format("{}: {} has {} entries, expected one for each of {} layers",
                               file_.path(), Key(kKey), each->size(), n_layers)));
      return sliding;
    }
    for (size_t i = 0; i < n_layers; ++i) sliding[i] = (*each)[i] != 0;
    return sliding;
  }
  const auto period = static_cast<size_t>(Int(kKey, 1, Limits::kLayers, fallback));
  for (size_t i = 0; i < n_layers; ++i) sliding[i] = (i + 1) % period != 0;
  return sliding;
}

namespace {

// The id under tokenizer.ggml.<key>_token_id, -1 without it.
Result<int32_t> ReadTokenId(const GgufFile& file, std::string_view key, int32_t vocab) {
  const std::string name = fmt::format("tokenizer.ggml.{}_token_id", key);
  OKV_ASSIGN_OR_RETURN(const int64_t id, file.GetIntOr(name, -1));
  if (id < -1 || id >= vocab) {
    return Corrupt(
        fmt::format("{}: {} is {}, expected a token below {}", file.path(), name, id, vocab));
  }
  return static_cast<int32_t>(id);
}

void AddEndToken(int32_t id, ModelConfig& out) {
  if (std::find(out.eos_ids.begin(), out.eos_ids.end(), id) == out.eos_ids.end()) {
    out.eos_ids.push_back(id);
  }
}

// Adds the tokens that end an answer by their text.
void AddEndTexts(const GgufFile& file, ModelConfig& out) {
  const Result<std::vector<std::string_view>> tokens = file.StringArray("tokenizer.ggml.tokens");
  const Result<std::vector<int64_t>> types = file.IntArray("tokenizer.ggml.token_type");
  if (!tokens.ok() || !types.ok()) return;
  const size_t n = std::min({tokens->size(), types->size(), static_cast<size_t>(out.vocab)});
  for (size_t i = 0; i < n; ++i) {
    if ((*types)[i] != kControlToken && (*types)[i] != kUserToken) continue;
    if (std::find(kEndTexts.begin(), kEndTexts.end(), (*tokens)[i]) == kEndTexts.end()) continue;
    AddEndToken(static_cast<int32_t>(i), out);
  }
}

Status ReadTokens(const GgufFile& file, ModelConfig& out) {
  OKV_ASSIGN_OR_RETURN(out.bos_id, ReadTokenId(file, "bos", out.vocab));
  for (const char* key : {"eos", "eot", "eom"}) {
    OKV_ASSIGN_OR_RETURN(const int32_t id, ReadTokenId(file, key, out.vocab));
    if (id >= 0) AddEndToken(id, out);
  }
  AddEndTexts(file, out);
  return Status();
}

Result<const Arch*> FindArch(const GgufFile& file, std::string_view architecture) {
  for (const Arch* arch : AllArchs()) {
    const auto& types = arch->gguf_types;
    if (std::find(types.begin(), types.end(), architecture) != types.end()) return arch;
  }
  return Unsupported(fmt::format("{}: general.architecture is {}, expected a supported family: {}",
                                 file.path(), Printable(architecture),
                                 fmt::join(SupportedFamilies(), ", ")));
}

}  // namespace

Result<ModelConfig> ReadGgufConfig(const GgufFile& file) {
  OKV_ASSIGN_OR_RETURN(const std::string_view architecture, file.GetString("general.architecture"));
  OKV_ASSIGN_OR_RETURN(const Arch* arch, FindArch(file, architecture));
  OKV_ASSIGN_OR_RETURN(const std::string_view kind, file.GetStringOr("general.type", "model"));
  if (kind != "model") {
    return Unsupported(
        fmt::format("{}: general.type is {}, expected model", file.path(), Printable(kind)));
  }
  const TensorView* embed = file.Find("token_embd.weight");
  if (embed == nullptr || embed->shape.size() != 2 || embed->shape[0] > Limits::kVocab) {
    return Corrupt(fmt::format("{}: has {}, expected a matrix of at most {} rows", file.path(),
                               embed == nullptr
                                   ? "no tensor 'token_embd.weight'"
                                   : fmt::format("tensor 'token_embd.weight' of shape [{}]",
                                                 fmt::join(embed->shape, ", ")),
                               Limits::kVocab));
  }

  Status status;
  const GgufConfig in(*arch, file, std::string(architecture), &status);
  ModelConfig out;
  out.family = arch->family;
  OKV_ASSIGN_OR_RETURN(out.name, [&]() -> Result<std::string> {
    OKV_ASSIGN_OR_RETURN(const std::string_view name, file.GetStringOr("general.name", ""));
    return std::string(name);
  }());
  if (const int64_t experts = in.Int("expert_count", 0, 1 << 20, 0); experts > 0) {
    in.Refuse("expert_count", std::to_string(experts), "a dense model, without experts");
  }
  const auto read = [&in](const char* key, int64_t max, std::optional<int64_t> fallback) {
    return static_cast<int32_t>(in.Int(key, 1, max, fallback));
  };
  out.vocab = static_cast<int32_t>(embed->shape[0]);
  out.n_layers = read("block_count", Limits::kLayers, std::nullopt);
  // There, unlike elsewhere, they count as layers.
  out.extra_layers = static_cast<int32_t>(in.Int("nextn_predict_layers", 0, out.n_layers - 1, 0));
  out.n_layers -= out.extra_layers;
  out.d_model = read("embedding_length", Limits::kWidth, std::nullopt);
  out.ffn = read("feed_forward_length", Limits::kFfn, std::nullopt);
  out.n_heads = read("attention.head_count", Limits::kHeads, std::nullopt);
  out.n_kv_heads = read("attention.head_count_kv", Limits::kHeads, out.n_heads);
  if (!in.Has("attention.key_length") && out.d_model % out.n_heads != 0) {
    in.Refuse("embedding_length", std::to_string(out.d_model),
              fmt::format("a multiple of attention.head_count ({})", out.n_heads));
  }
  out.head_dim =
      read("attention.key_length", Limits::kHeadDim, std::max(1, out.d_model / out.n_heads));
  if (const int32_t dv = read("attention.value_length", Limits::kHeadDim, out.head_dim);
      dv != out.head_dim) {
    in.Refuse("attention.value_length", std::to_string(dv),
              fmt::format("{}, as long as a key", out.head_dim));
  }
  out.max_context = in.Int("context_length", 2, Limits::kContext);
  out.norm_eps = static_cast<float>(in.Float("attention.layer_norm_rms_epsilon", 0, 1));
  if (!in.Bool("attention.causal", true)) in.Refuse("attention.causal", "false", "true");
  out.act = arch->act;
  out.qk_norm = arch->qk_norm;
  out.pre_norm = arch->pre_norm;
  out.post_norm = arch->post_norm;
  out.tied_embeddings = file.Find("output.weight") == nullptr;
  const auto has = [&file](std::string_view name) { return file.Find(name) != nullptr; };
  out.qkv_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
  out.o_bias = has("blk.0.attn_output.bias");
  out.mlp_bias = has("blk.0.ffn_up.bias");
  out.layers.assign(static_cast<size_t>(out.n_layers), LayerConfig());
  out.ropes = {in.ReadRope(out)};
  OKV_RETURN_IF_ERROR(status);  // before a family goes by the numbers
  if (arch->from_gguf != nullptr) arch->from_gguf(in, out);
  OKV_RETURN_IF_ERROR(status);
  OKV_RETURN_IF_ERROR(ReadTokens(file, out));
  OKV_RETURN_IF_ERROR(CheckConfig(file.path(), out));
  return out;
}

}  // namespace omnikv
