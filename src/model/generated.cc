#include "model/generated.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "io/file.h"
#include "model/hf_config.h"
#include "model/limits.h"

namespace omnikv {
namespace {

ModelConfig Llama(const std::string& name, int32_t layers, int32_t d_model, int32_t heads,
                  int32_t kv_heads, int32_t head_dim, int32_t ffn, int32_t vocab,
                  int64_t max_context) {
  ModelConfig c;
  c.family = "llama";
  c.name = name;
  c.n_layers = layers;
  c.d_model = d_model;
  c.n_heads = heads;
  c.n_kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.ffn = ffn;
  c.vocab = vocab;
  c.max_context = max_context;
  c.attn_scale = 1 / std::sqrt(static_cast<float>(head_dim));
  c.ropes.push_back({.theta = 500000, .dim = head_dim});
  c.layers.assign(static_cast<size_t>(layers), LayerConfig{});
  return c;
}

// A pattern of values, long enough that no two rows of a matrix are alike, repeated over it.
std::vector<std::byte> Pattern(DType format, double deviation) {
  constexpr size_t kValues = (size_t{1} << 20) + 32;  // a whole number of blocks, no power of two
  std::vector<std::byte> bytes(DTypeBytes(format, kValues));
  uint64_t state = 88172645463325252u;
  const auto uniform = [&] {  // in (-1, 1)
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int64_t>(state) >> 40) * 0x1p-23f;
  };
  const auto amplitude = static_cast<float>(deviation * std::sqrt(3.0));
  if (format == DType::kQ8_0) {
    const F16 scale = F16FromF32(amplitude / 127);
    for (size_t at = 0; at < bytes.size(); at += kQ8BlockBytes) {
      std::memcpy(bytes.data() + at, &scale, 2);
      for (size_t i = 0; i < kQ8Block; ++i) {
        bytes[at + 2 + i] = static_cast<std::byte>(static_cast<int8_t>(127 * uniform()));
      }
    }
    return bytes;
  }
  for (size_t i = 0; i < kValues; ++i) StoreFromF32(format, bytes.data(), i, amplitude * uniform());
  return bytes;
}

}  // namespace

Result<ModelConfig> GeometryConfig(const std::string& geometry) {
  if (geometry == "tiny") {
    ModelConfig tiny = Llama("omnikv-tiny", 16, 384, 6, 2, 64, 1024, 8192, 32768);
    tiny.tied_embeddings = true;
    return tiny;
  }
  if (geometry == "llama-1b") return Llama("llama-1b", 16, 2048, 32, 8, 64, 8192, 32000, 131072);
  if (geometry == "llama3-8b") {
    return Llama("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 1048576);
  }
  if (!MayExist(geometry)) {
    return NotFound(fmt::format(
        "`geometry` is '{}', expected tiny, llama-1b, llama3-8b or a JSON file", geometry));
  }
  OKV_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(geometry));
  using Limits = ModelLimits;
  Status status;
  const JsonFields in(geometry, &json, &status);
  const auto size = [&](const char* key, int64_t most) {
    return static_cast<int32_t>(in.Int(key, 1, most));
  };
  // One after another: the first that is wrong is told.
  const int32_t layers = size("layers", Limits::kLayers);
  const int32_t d_model = size("d_model", Limits::kWidth);
  const int32_t heads = size("heads", Limits::kHeads);
  const int32_t kv_heads = size("kv_heads", Limits::kHeads);
  const int32_t head_dim = size("head_dim", Limits::kHeadDim);
  const int32_t ffn = size("ffn", Limits::kFfn);
  const int32_t vocab = size("vocab", Limits::kVocab);
  ModelConfig c = Llama(geometry, layers, d_model, heads, kv_heads, head_dim, ffn, vocab,
                        in.Int("max_context", 1, Limits::kContext, 131072));
  for (const auto& [key, value, multiple] :
       {std::tuple{"d_model", c.d_model, 32}, {"head_dim", c.head_dim, 8}, {"ffn", c.ffn, 32}}) {
    if (value % multiple != 0) {
      in.Refuse(key, fmt::format("a multiple of {}", multiple), StatusCode::kCorrupt);
    }
  }
  OKV_RETURN_IF_ERROR(status);
  OKV_RETURN_IF_ERROR(CheckConfig(geometry, c));
  return c;
}

// Within ModelLimits no product here comes near 63 bits.
size_t GeneratedWeightBytes(const ModelConfig& c, DType format) {
  const int64_t heads = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv = int64_t{c.n_kv_heads} * c.head_dim;
  const int64_t layer = (2 * heads + 2 * kv + 3 * int64_t{c.ffn}) * c.d_model;
  const int64_t table = int64_t{c.vocab} * c.d_model;
  const int64_t values = layer * c.n_layers + (c.tied_embeddings ? 1 : 2) * table;
  return DTypeBytes(format, static_cast<size_t>(values));
}

Result<Weights> GenerateWeights(Backend& backend, const ModelConfig& c, DType format) {
  Weights w;
  const int64_t heads = int64_t{c.n_heads} * c.head_dim;
  const int64_t kv = int64_t{c.n_kv_heads} * c.head_dim;
  const std::vector<std::byte> pattern =
      Pattern(format, 1 / std::sqrt(static_cast<double>(c.d_model)));
  size_t at = 0;  // where in the pattern the next matrix starts
  const auto matrix = [&](int64_t n_out, int64_t n_in) -> Result<WeightRef> {
    WeightRef ref{.format = format,
                  .n_out = n_out,
                  .n_in = n_in,
                  .row_bytes = static_cast<int64_t>(DTypeBytes(format, static_cast<size_t>(n_in)))};
    const auto bytes = static_cast<size_t>(n_out * ref.row_bytes);
    OKV_ASSIGN_OR_RETURN(Buffer buffer, backend.Allocate(bytes, "weights"));
    for (size_t done = 0; done < bytes;) {
      const size_t n = std::min(bytes - done, pattern.size() - at);
      backend.Upload(buffer.as<std::byte>() + done, pattern.data() + at, n);
      done += n;
      at = (at + n) % pattern.size();
    }
    ref.data = buffer.as<void>();
    w.bytes += bytes;
    w.memory.push_back(std::move(buffer));
    return ref;
  };
  OKV_ASSIGN_OR_RETURN(Buffer ones,
                       backend.Allocate(static_cast<size_t>(c.d_model) * 4, "weights"));
  const std::vector<float> one(static_cast<size_t>(c.d_model), 1.0f);
  backend.Upload(ones.as<void>(), one.data(), one.size() * 4);
  const float* norm = ones.as<float>();
  w.memory.push_back(std::move(ones));

  OKV_ASSIGN_OR_RETURN(w.embed, matrix(c.vocab, c.d_model));
  w.head = w.embed;
  if (!c.tied_embeddings) {
    OKV_ASSIGN_OR_RETURN(w.head, matrix(c.vocab, c.d_model));
  }
  w.final_norm = norm;
  w.layers.resize(static_cast<size_t>(c.n_layers));
  for (LayerWeights& layer : w.layers) {
    layer.attn_norm = layer.ffn_norm = norm;
    OKV_ASSIGN_OR_RETURN(layer.wq, matrix(heads, c.d_model));
    OKV_ASSIGN_OR_RETURN(layer.wk, matrix(kv, c.d_model));
    OKV_ASSIGN_OR_RETURN(layer.wv, matrix(kv, c.d_model));
    OKV_ASSIGN_OR_RETURN(layer.wo, matrix(c.d_model, heads));
    OKV_ASSIGN_OR_RETURN(layer.gate, matrix(c.ffn, c.d_model));
    OKV_ASSIGN_OR_RETURN(layer.up, matrix(c.ffn, c.d_model));
    OKV_ASSIGN_OR_RETURN(layer.down, matrix(c.d_model, c.ffn));
  }
  w.format = format;
  return w;
}

}  // namespace omnikv
