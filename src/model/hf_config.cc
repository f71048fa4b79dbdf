#include "model/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/printable.h"
#include "io/file.h"
#include "model/limits.h"
#include "model/loader.h"

namespace omnikv {
namespace {

using Json = nlohmann::json;
using Limits = ModelLimits;

constexpr size_t kMaxEndTokens = 1024;
constexpr size_t kMaxJsonBytes = size_t{64} << 20;  // of a file; published ones have below 5 MB

// A value as a message shows it.
std::string Show(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_string()) return Printable(value.get_ref<const std::string&>());
  return value.dump();
}

// Integers may be written as 4096.0.
std::optional<int64_t> AsInt(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto v = value.get<uint64_t>();
    if (v > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(v);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const auto v = value.get<double>();
    if (std::abs(v) <= 1e15 && v == std::trunc(v)) return static_cast<int64_t>(v);
  }
  return std::nullopt;
}

std::optional<int64_t> BoundedInt(const Json& value, int64_t min, int64_t max) {
  const std::optional<int64_t> v = AsInt(value);
  return v && *v >= min && *v <= max ? v : std::nullopt;
}

std::optional<double> BoundedFloat(const Json& value, double min, double max) {
  if (!value.is_number()) return std::nullopt;
  const auto v = value.get<double>();
  return v >= min && v <= max ? std::optional(v) : std::nullopt;  // NaN is not
}

std::string IntegerFrom(int64_t min, int64_t max) {
  return fmt::format("an integer from {} to {}", min, max);
}

std::string NumberFrom(double min, double max) {
  return fmt::format("a number from {} to {}", min, max);
}

// A default of 0 says that the field must be there.
std::optional<int64_t> OrRequired(int64_t value) {
  return value == 0 ? std::nullopt : std::optional(value);
}

}  // namespace

Result<Json> ReadJsonFile(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxJsonBytes));
  auto json = ParseJson(text);
  if (!json.ok()) return json.status().Prefixed(path);
  return json;
}

JsonFields::JsonFields(std::string file, const Json* object, Status* status, std::string prefix)
    : file_(std::move(file)), object_(object), status_(status), prefix_(std::move(prefix)) {
  if (!object_->is_object() && ok()) {
    *status_ = Corrupt(fmt::format("{}: holds {}, expected an object", file_, Show(*object_)));
  }
}

const Json* JsonFields::Find(std::string_view key) const {
  const auto it = object_->find(key);  // end() when this is no object
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::Has(std::string_view key) const {
  return Find(key) != nullptr;
}

bool JsonFields::IsNull(std::string_view key) const {
  const auto it = object_->find(key);
  return it != object_->end() && it->is_null();
}

void JsonFields::Refuse(std::string_view key, std::string_view expected, StatusCode code) const {
  if (!ok()) return;
  const Json* value = Find(key);
  *status_ = Status(code, value == nullptr ? fmt::format("{}: has no {}{}, expected {}", file_,
                                                         prefix_, key, expected)
                                           : fmt::format("{}: {}{} is {}, expected {}", file_,
                                                         prefix_, key, Show(*value), expected));
}

int64_t JsonFields::Int(std::string_view key, int64_t min, int64_t max,
                        std::optional<int64_t> fallback) const {
  const Json* value = Find(key);
  if (value == nullptr && fallback) return *fallback;
  const std::optional<int64_t> v = value ? BoundedInt(*value, min, max) : std::nullopt;
  if (!v) Refuse(key, IntegerFrom(min, max), StatusCode::kCorrupt);
  return v.value_or(min);
}

double JsonFields::Float(std::string_view key, double min, double max,
                         std::optional<double> fallback) const {
  const Json* value = Find(key);
  if (value == nullptr && fallback) return *fallback;
  const std::optional<double> v = value ? BoundedFloat(*value, min, max) : std::nullopt;
  if (!v) Refuse(key, NumberFrom(min, max), StatusCode::kCorrupt);
  return v.value_or(max);
}

bool JsonFields::Bool(std::string_view key, bool fallback) const {
  const Json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    Refuse(key, "true or false", StatusCode::kCorrupt);
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonFields::String(std::string_view key, std::optional<std::string> fallback) const {
  const Json* value = Find(key);
  if (value == nullptr && fallback) return *fallback;
  if (value == nullptr || !value->is_string()) {
    Refuse(key, "a string", StatusCode::kCorrupt);
    return "";
  }
  return value->get<std::string>();
}

template <typename T, typename Convert>
std::vector<T> JsonFields::Array(std::string_view key, const std::string& expected,
                                 Convert convert) const {
  std::vector<T> out;
  const Json* array = Find(key);
  if (array == nullptr) return out;
  if (!array->is_array()) {
    Refuse(key, "an array of " + expected, StatusCode::kCorrupt);
    return out;
  }
  out.reserve(array->size());
  for (const Json& value : *array) {
    const auto v = convert(value);
    if (!v) {
      if (ok()) {
        *status_ = Corrupt(fmt::format("{}: {}{}[{}] is {}, expected {}", file_, prefix_, key,
                                       out.size(), Show(value), expected));
      }
      return {};
    }
    out.push_back(static_cast<T>(*v));
  }
  return out;
}

std::vector<int64_t> JsonFields::Ints(std::string_view key, int64_t min, int64_t max) const {
  return Array<int64_t>(key, IntegerFrom(min, max),
                        [=](const Json& value) { return BoundedInt(value, min, max); });
}

std::vector<float> JsonFields::Floats(std::string_view key, double min, double max) const {
  return Array<float>(key, NumberFrom(min, max),
                      [=](const Json& value) { return BoundedFloat(value, min, max); });
}

std::vector<std::string> JsonFields::Strings(std::string_view key) const {
  return Array<std::string>(key, "a string", [](const Json& value) {
    return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
  });
}

std::optional<JsonFields> JsonFields::Object(std::string_view key) const {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) {
    Refuse(key, "an object", StatusCode::kCorrupt);
    return std::nullopt;
  }
  return JsonFields(file_, value, status_, fmt::format("{}{}.", prefix_, key));
}

const TensorView* HfConfig::FindEmbedding() const {
  const std::string_view body = FindPrefix(arch_, tensors_).body;
  return tensors_.Find(fmt::format("{}{}.weight", body, arch_.hf_names.embed));
}

RopeConfig HfConfig::ReadRope(const std::optional<JsonFields>& params, double default_theta,
                              const ModelConfig& config) const {
  const JsonFields& in = params ? *params : fields_;
  const Json& json = in.json();
  RopeConfig rope;
  if (params) {
    for (const auto& [key, value] : json.items()) {
      if (value.is_object()) in.Refuse(key, "a number: one set of rope parameters for all layers");
    }
    if (params->Has("mrope_section")) params->Refuse("mrope_section", "none");
  }
  rope.theta =
      params ? params->Float("rope_theta", 1.0001, Limits::kTheta, default_theta) : default_theta;
  const double partial = in.Float("partial_rotary_factor", 0.01, 1,
                                  fields_.Float("partial_rotary_factor", 0.01, 1, 1.0));
  rope.dim = static_cast<int32_t>(config.head_dim * partial);
  if (rope.dim < 2 || rope.dim % 2 != 0) {
    if (partial < 1) {
      (in.Has("partial_rotary_factor") ? in : fields_)
          .Refuse("partial_rotary_factor",
                  fmt::format("an even number of rotated values of a head of {}", config.head_dim));
    } else {
      fields_.Refuse(fields_.Has("head_dim") ? "head_dim" : "hidden_size",
                     fmt::format("heads of an even size, not {}", config.head_dim));
    }
    rope.dim = 2;
  }
  if (!params) return rope;

  const char* const key = params->Has("rope_type") ? "rope_type" : "type";
  std::string type = params->String(key, "default");
  if (type == "su") type = "longrope";                             // its name in early Phi-3
  if (type == "yarn" && in.Has("long_factor")) type = "longrope";  // so does transformers
  if (type == "default") return rope;

  // What the scalings that know their training context go by.
  const auto read_original = [&] {
    const int64_t fallback = params->Int(
        "original_max_position_embeddings", 2, Limits::kContext,
        arch_.hf.rope_original_context != 0 ? arch_.hf.rope_original_context : config.max_context);
    rope.original_context =
        fields_.Int("original_max_position_embeddings", 2, Limits::kContext, fallback);
  };
  const auto read_factor = [&](std::optional<double> fallback) {
    rope.factor = params->Float("factor", 0.01, Limits::kScale, fallback);
  };
  const auto extension = [&] {
    return static_cast<double>(config.max_context) / static_cast<double>(rope.original_context);
  };
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    read_factor(std::nullopt);
  } else if (type == "dynamic") {
    rope.scaling = RopeScaling::kDynamic;
    read_factor(std::nullopt);
    if (rope.dim < 4) params->Refuse(key, "another scaling for 2 rotated values");
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    read_original();
    read_factor(std::nullopt);
    rope.low_freq_factor = params->Float("low_freq_factor", 1e-3, Limits::kScale);
    rope.high_freq_factor = params->Float("high_freq_factor", 1e-3, Limits::kScale);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      params->Refuse("high_freq_factor",
                     fmt::format("more than low_freq_factor ({})", rope.low_freq_factor),
                     StatusCode::kCorrupt);
    }
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::kYarn;
    read_original();
    read_factor(extension());
    rope.magnitude = params->Float("attention_factor", 0, Limits::kScale, 0);
    rope.mscale = params->Float("mscale", 0, Limits::kScale, 0);
    rope.mscale_all_dim = params->Float("mscale_all_dim", 0, Limits::kScale, 0);
    rope.beta_fast = params->Float("beta_fast", 1e-3, Limits::kScale, 32);
    rope.beta_slow = params->Float("beta_slow", 1e-3, Limits::kScale, 1);
    rope.truncate = params->Bool("truncate", true);
  } else if (type == "longrope") {
    rope.scaling = RopeScaling::kLongrope;
    read_original();
    read_factor(extension());
    rope.magnitude = params->Float("attention_factor", 0, Limits::kScale, 0);
    const auto read_factors = [&](const char* name) {
      std::vector<float> factors = params->Floats(name, 1 / Limits::kScale, Limits::kScale);
      if (factors.size() != static_cast<size_t>(rope.dim / 2)) {
        params->Refuse(
            name,
            fmt::format("an array of {}, one factor for each pair of rotated values", rope.dim / 2),
            StatusCode::kCorrupt);
      }
      return factors;
    };
    rope.short_factor = read_factors("short_factor");
    rope.long_factor = read_factors("long_factor");
  } else {
    params->Refuse(key, "default, linear, dynamic, llama3, yarn or longrope");
  }
  return rope;
}

int32_t HfConfig::ReadWindow(int64_t fallback, const ModelConfig& config) const {
  if (fields_.IsNull("sliding_window")) return 0;
  const int64_t window = fields_.Int("sliding_window", 1, Limits::kContext, fallback);
  return window < config.max_context ? static_cast<int32_t>(window) : 0;
}

std::vector<bool> HfConfig::ReadSliding(std::vector<bool> fallback) const {
  if (!fields_.Has("layer_types")) return fallback;
  const std::vector<std::string> types = fields_.Strings("layer_types");
  if (types.size() != fallback.size()) {
    fields_.Refuse("layer_types", fmt::format("one entry for each of {} layers", fallback.size()),
                   StatusCode::kCorrupt);
    return fallback;
  }
  std::vector<bool> sliding(types.size());
  for (size_t i = 0; i < types.size(); ++i) {
    sliding[i] = types[i] == "sliding_attention";
    if (!sliding[i] && types[i] != "full_attention") {
      fields_.Refuse("layer_types", fmt::format("full_attention and sliding_attention only, not {}",
                                                Printable(types[i])));
    }
  }
  return sliding;
}

namespace {

// Variations that no family here computes.
void RefuseVariations(const JsonFields& in) {
  if (const auto quantization = in.Object("quantization_config")) {
    quantization->Refuse("quant_method",
                         "no quantisation: checkpoints in F32, F16 or BF16, or GGUF");
  }
  for (const char* key :
       {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}) {
    if (in.Int(key, 0, 1 << 20, 0) > 0) in.Refuse(key, "a dense model, without experts");
  }
  for (const char* key : {"is_encoder_decoder", "use_bidirectional_attention", "alibi"}) {
    if (in.Bool(key, false)) in.Refuse(key, "false");
  }
  if (in.Has("clip_qkv")) in.Refuse("clip_qkv", "none");
}

Activation ReadActivation(const JsonFields& in, Activation fallback) {
  // Gemma's exact name for it stands beside a field that is not used.
  const char* const key = in.Has("hidden_activation") ? "hidden_activation" : "hidden_act";
  if (!in.Has(key)) return fallback;
  const std::string act = in.String(key, std::nullopt);
  if (act == "gelu_pytorch_tanh" || act == "gelu_new") return Activation::kGeluTanh;
  if (act != "silu" && act != "swish") in.Refuse(key, "silu or gelu_pytorch_tanh");
  return Activation::kSilu;
}

// Adds the ids of a field that is a number or an array of numbers.
void AddIds(const JsonFields& in, std::string_view key, int32_t vocab, std::vector<int32_t>* ids) {
  if (!in.Has(key)) return;
  std::vector<int64_t> found;
  if (in.json().at(std::string(key)).is_array()) {
    found = in.Ints(key, 0, vocab - 1);
  } else {
    found = {in.Int(key, 0, vocab - 1)};
  }
  if (found.size() > kMaxEndTokens) {
    in.Refuse(key, fmt::format("at most {} tokens", kMaxEndTokens), StatusCode::kCorrupt);
    return;
  }
  for (const int64_t id : found) {
    const auto small = static_cast<int32_t>(id);
    if (std::find(ids->begin(), ids->end(), small) == ids->end()) ids->push_back(small);
  }
}

void ReadTokens(const std::vector<JsonFields>& files, const HfDefaults& defaults,
                ModelConfig& out) {
  std::vector<int32_t> bos;
  for (const JsonFields& in : files) {
    AddIds(in, "eos_token_id", out.vocab, &out.eos_ids);
    AddIds(in, "bos_token_id", out.vocab, &bos);
  }
  if (out.eos_ids.empty() && defaults.eos_id >= 0) out.eos_ids = {defaults.eos_id};
  out.bos_id = bos.empty() ? defaults.bos_id : bos.front();
}

// The fields that all families share.
void ReadShared(const Arch& arch, const HfConfig& config, ModelConfig& out) {
  const JsonFields& in = config.fields();
  const HfDefaults& defaults = arch.hf;
  const auto read = [&](const char* key, int64_t max, int64_t fallback) {
    return static_cast<int32_t>(in.Int(key, 1, max, OrRequired(fallback)));
  };
  out.n_layers = read("num_hidden_layers", Limits::kLayers, defaults.n_layers);
  out.extra_layers =
      static_cast<int32_t>(in.Int("num_nextn_predict_layers", 0, Limits::kLayers, 0));
  out.d_model = read("hidden_size", Limits::kWidth, defaults.d_model);
  out.n_heads = read("num_attention_heads", Limits::kHeads, defaults.n_heads);
  out.n_kv_heads = read("num_key_value_heads", Limits::kHeads,
                        defaults.n_kv_heads != 0 ? defaults.n_kv_heads : out.n_heads);
  out.ffn = read("intermediate_size", Limits::kFfn, defaults.ffn);
  out.vocab = read("vocab_size", Limits::kVocab, defaults.vocab);
  out.max_context =
      in.Int("max_position_embeddings", 2, Limits::kContext, OrRequired(defaults.max_context));
  if (!in.Has("head_dim") && defaults.head_dim == 0 && out.d_model % out.n_heads != 0) {
    in.Refuse("hidden_size", fmt::format("a multiple of num_attention_heads ({})", out.n_heads),
              StatusCode::kCorrupt);
  }
  out.head_dim =
      read("head_dim", Limits::kHeadDim,
           defaults.head_dim != 0 ? defaults.head_dim : std::max(1, out.d_model / out.n_heads));
  out.norm_eps = static_cast<float>(in.Float("rms_norm_eps", 0, 1, defaults.norm_eps));
  out.act = ReadActivation(in, arch.act);
  out.qk_norm = arch.qk_norm;
  out.pre_norm = arch.pre_norm;
  out.post_norm = arch.post_norm;
  out.qkv_bias = out.o_bias = in.Bool("attention_bias", false);
  out.mlp_bias = in.Bool("mlp_bias", false);
  out.layers.assign(static_cast<size_t>(out.n_layers), LayerConfig());

  std::optional<JsonFields> rope = in.Object("rope_scaling");
  if (!rope) rope = in.Object("rope_parameters");
  const double theta = in.Float("rope_theta", 1.0001, Limits::kTheta, defaults.rope_theta);
  // Families with a set for each type of layer read their own.
  if (!arch.own_ropes) out.ropes = {config.ReadRope(rope, theta, out)};
}

// What a model is called: in the Hugging Face cache ("models--org--name/snapshots/<hash>") by its
// repository, else by the one that its configuration names, else by its folder.
std::string ModelName(const std::string& folder, const std::string& name_or_path) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(folder, error);
  if (path.parent_path().filename() == "snapshots") {
    std::string name = path.parent_path().parent_path().filename().string();
    if (name.starts_with("models--")) name.erase(0, std::string_view("models--").size());
    if (const size_t dashes = name.find("--"); dashes != std::string::npos) {
      name.replace(dashes, 2, "/");
    }
    return name;
  }
  const bool is_repository = std::count(name_or_path.begin(), name_or_path.end(), '/') == 1 &&
                             !name_or_path.starts_with('/') && !name_or_path.starts_with('.');
  return is_repository ? name_or_path : path.filename().string();
}

}  // namespace

Result<ModelConfig> ReadHfConfig(const std::string& folder, const TensorSource& tensors) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  OKV_ASSIGN_OR_RETURN(const Json config_json, ReadJsonFile(path));
  Status status;
  const JsonFields top(path, &config_json, &status);
  const std::string type = top.String("model_type", std::nullopt);
  const Arch* arch = nullptr;
  for (const Arch* a : AllArchs()) {
    if (std::find(a->hf_types.begin(), a->hf_types.end(), type) != a->hf_types.end()) arch = a;
  }
  if (arch == nullptr) {
    top.Refuse("model_type",
               fmt::format("a supported family: {}", fmt::join(SupportedFamilies(), ", ")));
    return status;
  }
  RefuseVariations(top);
  // Models of text and images keep the part that reads text in an object of its own.
  const JsonFields text = top.Object("text_config").value_or(top);
  RefuseVariations(text);

  ModelConfig out;
  out.family = arch->family;
  out.name = ModelName(folder, top.String("_name_or_path", ""));
  const HfConfig config(*arch, text, tensors);
  ReadShared(*arch, config, out);
  out.tied_embeddings =
      top.Bool("tie_word_embeddings", text.Bool("tie_word_embeddings", arch->hf.tied_embeddings));

  std::vector<JsonFields> token_files = {top, text};
  Json generation_json;
  std::error_code error;
  const auto generation = (std::filesystem::path(folder) / "generation_config.json").string();
  if (MayExist(generation)) {
    OKV_ASSIGN_OR_RETURN(generation_json, ReadJsonFile(generation));
    token_files.emplace_back(generation, &generation_json, &status);
  }
  ReadTokens(token_files, arch->hf, out);
  OKV_RETURN_IF_ERROR(status);  // before a family goes by the numbers
  if (arch->from_hf != nullptr) arch->from_hf(config, out);
  OKV_RETURN_IF_ERROR(status);
  OKV_RETURN_IF_ERROR(CheckConfig(path, out));
  return out;
}

}  // namespace omnikv
