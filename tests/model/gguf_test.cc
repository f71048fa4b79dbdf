// GGUF files against the Hugging Face folders that they could have been made from: the same
// configuration, the same weights, whatever llama.cpp's converters did to them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "loaded.h"
#include "model/rope.h"
#include "model_files.h"

namespace omnikv::gguf_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string kGoldens = OMNIKV_SOURCE_DIR "/tests/golden/models/";

std::vector<float> ToFloats(const TensorSource& source, const TensorView& tensor) {
  std::vector<float> values(tensor.NumValues());
  EXPECT_TRUE(source.ReadValues(tensor, 0, values.size(), DType::kF32, values.data()).ok());
  return values;
}

std::vector<float> Rows(const std::vector<float>& values, int64_t width, int64_t first, int64_t n) {
  return {values.begin() + first * width, values.begin() + (first + n) * width};
}

// What the converters do to the rows of q and k of models that llama.cpp rotates by neighbours:
// [heads, 2, half] becomes [heads, half, 2].
std::vector<float> PairUp(const std::vector<float>& values, int64_t width, int64_t n_heads) {
  const auto rows = static_cast<int64_t>(values.size()) / width;
  const int64_t half = rows / n_heads / 2;
  std::vector<float> out;
  for (int64_t head = 0; head < n_heads; ++head) {
    for (int64_t i = 0; i < half; ++i) {
      for (int64_t side = 0; side < 2; ++side) {
        const std::vector<float> row = Rows(values, width, (head * 2 + side) * half + i, 1);
        out.insert(out.end(), row.begin(), row.end());
      }
    }
  }
  return out;
}

const std::map<std::string, std::string> kParts = {
    {"input_layernorm.weight", "attn_norm.weight"},
    {"attention_norm.weight", "attn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.qkv_proj.weight", "attn_qkv.weight"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"attention.wo.weight", "attn_output.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"pre_feedforward_layernorm.weight", "ffn_norm.weight"},
    {"post_feedforward_layernorm.weight", "post_ffw_norm.weight"},
    {"ffn_norm.weight", "ffn_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
    {"mlp.gate_proj.bias", "ffn_gate.bias"},
    {"mlp.up_proj.bias", "ffn_up.bias"},
    {"mlp.down_proj.bias", "ffn_down.bias"},
    {"mlp.gate_up_proj.weight", "ffn_up.weight"},
    {"feed_forward.w1.weight", "ffn_gate.weight"},
    {"feed_forward.w3.weight", "ffn_up.weight"},
    {"feed_forward.w2.weight", "ffn_down.weight"},
};

const std::map<std::string, std::string> kOutside = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.tok_embeddings.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
    {"output.weight", "output.weight"},
};

// The tensors of a checkpoint as the converters write them.
std::vector<FileTensor> Converted(const ModelFiles& hf) {
  const ModelConfig& c = hf.config;
  const bool paired = c.family == "llama" || c.family == "mistral" || c.family == "granite" ||
                      c.family == "smollm3" || c.family == "internlm2";
  std::vector<FileTensor> out;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape,
                       const std::vector<float>& values) {
    const bool matrix = shape.size() == 2;
    out.push_back(MakeTensor(name, matrix ? StorageType::kBF16 : StorageType::kF32, shape, values));
  };
  for (const TensorView& tensor : hf.tensors->tensors()) {
    std::vector<float> values = ToFloats(*hf.tensors, tensor);
    if (c.family == "gemma3" && tensor.name.ends_with("norm.weight")) {
      for (float& v : values) v += 1;
    }
    if (const auto it = kOutside.find(tensor.name); it != kOutside.end()) {
      add(it->second, tensor.shape, values);
      continue;
    }
    const size_t dot = tensor.name.find('.', std::string("model.layers.").size());
    const std::string layer = tensor.name.substr(13, dot - 13);
    const std::string part = tensor.name.substr(dot + 1);
    const int64_t width = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
    const std::string block = "blk." + layer + ".";
    if (part == "attention.wqkv.weight") {
      const int64_t q_heads = c.n_heads / c.n_kv_heads;
      std::vector<float> q, k, v;
      const auto append = [&](std::vector<float>& to, int64_t head, int64_t n) {
        const std::vector<float> rows = Rows(values, width, head * c.head_dim, n * c.head_dim);
        to.insert(to.end(), rows.begin(), rows.end());
      };
      for (int64_t group = 0; group < c.n_kv_heads; ++group) {
        append(q, group * (q_heads + 2), q_heads);
        append(k, group * (q_heads + 2) + q_heads, 1);
        append(v, group * (q_heads + 2) + q_heads + 1, 1);
      }
      add(block + "attn_q.weight", {c.n_heads * c.head_dim, width}, PairUp(q, width, c.n_heads));
      add(block + "attn_k.weight", {c.n_kv_heads * c.head_dim, width},
          PairUp(k, width, c.n_kv_heads));
      add(block + "attn_v.weight", {c.n_kv_heads * c.head_dim, width}, v);
      continue;
    }
    std::string name = kParts.at(part);
    const bool behind = part == "post_attention_layernorm.weight" && c.post_norm;
    if (behind) name = "post_attention_norm.weight";
    if (paired && part.starts_with("self_attn.q_proj")) values = PairUp(values, width, c.n_heads);
    if (paired && part.starts_with("self_attn.k_proj"))
      values = PairUp(values, width, c.n_kv_heads);
    add(block + name, tensor.shape, values);
  }
  return out;
}

GgufMetadata MetadataOf(const ModelConfig& c, const std::string& architecture) {
  const auto key = [&](const char* name) { return architecture + "." + name; };
  return {{"general.architecture", architecture},
          {"general.name", c.name},
          {key("block_count"), c.n_layers},
          {key("context_length"), c.max_context},
          {key("embedding_length"), c.d_model},
          {key("feed_forward_length"), c.ffn},
          {key("attention.head_count"), c.n_heads},
          {key("attention.head_count_kv"), c.n_kv_heads},
          {key("attention.key_length"), c.head_dim},
          {key("attention.value_length"), c.head_dim},
          {key("attention.layer_norm_rms_epsilon"), c.norm_eps},
          {key("rope.freq_base"), c.ropes[0].theta},
          {key("rope.dimension_count"), c.ropes[0].dim},
          {"tokenizer.ggml.bos_token_id", c.bos_id},
          {"tokenizer.ggml.eos_token_id", c.eos_ids[0]}};
}

struct Conversion {
  std::string golden;
  std::string architecture;
  GgufMetadata more;
  // What a GGUF file cannot say of this golden.
  std::function<void(ModelConfig&)> unsaid = [](ModelConfig&) {};
};

void ExpectSameRope(const ModelConfig& a, const ModelConfig& b) {
  ASSERT_EQ(a.ropes.size(), b.ropes.size());
  for (size_t i = 0; i < a.ropes.size(); ++i) {
    for (const int64_t length : {int64_t{10}, int64_t{400}}) {
      const RopeFrequencies x = ComputeRope(a.ropes[i], a.max_context, length);
      const RopeFrequencies y = ComputeRope(b.ropes[i], b.max_context, length);
      ASSERT_EQ(x.inv_freq.size(), y.inv_freq.size());
      EXPECT_FLOAT_EQ(x.magnitude, y.magnitude);
      for (size_t j = 0; j < x.inv_freq.size(); ++j) {
        EXPECT_FLOAT_EQ(x.inv_freq[j], y.inv_freq[j]) << j;
      }
    }
  }
}

TEST(Gguf, IsTheCheckpointItWasMadeFrom) {
  const std::vector<float> llama3_factors = [] {
    Result<ModelFiles> files = OpenModel(kGoldens + "llama_llama3");
    RopeConfig plain = files->config.ropes[0];
    plain.scaling = RopeScaling::kNone;
    const std::vector<float> from = ComputeRope(plain, 512, 1).inv_freq;
    const std::vector<float> to = ComputeRope(files->config.ropes[0], 512, 1).inv_freq;
    std::vector<float> factors;
    for (size_t i = 0; i < from.size(); ++i) factors.push_back(from[i] / to[i]);
    return factors;
  }();
  const std::vector<Conversion> conversions = {
      {"llama", "llama", {}},
      {"llama_tied_bias", "llama", {}},
      {"llama_linear",
       "llama",
       {{"llama.rope.scaling.type", "linear"}, {"llama.rope.scaling.factor", 2.0}}},
      {"llama_llama3", "llama", {}},
      {"llama_yarn",
       "llama",
       {{"llama.rope.scaling.type", "yarn"},
        {"llama.rope.scaling.factor", 4.0},
        {"llama.rope.scaling.original_context_length", 32},
        {"llama.rope.scaling.yarn_beta_fast", 1.0},
        {"llama.rope.scaling.yarn_beta_slow", 0.125}}},
      {"mistral",
       "llama",
       {{"llama.attention.sliding_window", 8}},
       [](ModelConfig& c) { c.family = "llama"; }},
      {"qwen2", "qwen2", {}},
      {"qwen3", "qwen3", {}},
      {"internlm2",
       "internlm2",
       {},
       [](ModelConfig& c) { c.ropes[0] = {.theta = 1e6, .dim = c.head_dim}; }},
      {"phi3",
       "phi3",
       {{"phi3.rope.scaling.original_context_length", 16},
        {"phi3.rope.scaling.attn_factor", std::sqrt(1 + std::log(32.0) / std::log(16.0))}}},
      {"phi3_short",
       "phi3",
       {{"phi3.rope.scaling.original_context_length", 128},
        {"phi3.rope.scaling.attn_factor", std::sqrt(1 + std::log(4.0) / std::log(128.0))}}},
      {"granite",
       "granite",
       {{"granite.embedding_scale", 2.0},
        {"granite.residual_scale", 0.7},
        {"granite.attention.scale", 0.2},
        {"granite.logit_scale", 2.0}}},
      {"smollm3",
       "smollm3",
       {},
       [](ModelConfig& c) {
         c.layers[2].rope = 0;
         c.layers[3].rope = -1;
       }},
      {"olmo2", "olmo2", {}},
      {"gemma3",
       "gemma3",
       {{"gemma3.attention.sliding_window", 8},
        {"gemma3.attention.sliding_window_pattern", 3},
        {"gemma3.rope.freq_base_swa", 10000.0},
        {"gemma3.rope.scaling.type", "linear"},
        {"gemma3.rope.scaling.factor", 8.0}},
       [](ModelConfig& c) { c.attn_scale = 0.25f; }},
  };
  const TempFolder folder;
  for (const Conversion& conversion : conversions) {
    SCOPED_TRACE(conversion.golden);
    const Loaded hf = Load(kGoldens + conversion.golden);
    const RopeConfig& rope = hf.files.config.ropes[0];
    GgufMetadata metadata = MetadataOf(hf.files.config, conversion.architecture);
    metadata.insert(metadata.end(), conversion.more.begin(), conversion.more.end());
    std::vector<FileTensor> tensors = Converted(hf.files);
    const auto add_factors = [&](const char* name, const std::vector<float>& factors) {
      tensors.push_back(
          MakeTensor(name, StorageType::kF32, {static_cast<int64_t>(factors.size())}, factors));
    };
    if (rope.scaling == RopeScaling::kLlama3) add_factors("rope_freqs.weight", llama3_factors);
    if (rope.scaling == RopeScaling::kLongrope) {
      add_factors("rope_factors_long.weight", rope.long_factor);
      add_factors("rope_factors_short.weight", rope.short_factor);
    }
    const std::string path = folder / (conversion.golden + ".gguf");
    WriteFile(path, GgufBytes(metadata, tensors));
    const Loaded gguf = Load(path);
    ExpectSameWeights(hf, gguf);

    ModelConfig expected = hf.files.config;
    conversion.unsaid(expected);
    ExpectSameRope(expected, gguf.files.config);
    expected.ropes = gguf.files.config.ropes;
    expected.path = path;
    EXPECT_EQ(expected, gguf.files.config);
  }
}

// A GGUF file of one layer whose metadata a test changes.
class SmallGguf {
 public:
  SmallGguf() {
    metadata_ = {
        {"general.architecture", "llama"},    {"llama.block_count", 1},
        {"llama.context_length", 64},         {"llama.embedding_length", 32},
        {"llama.feed_forward_length", 64},    {"llama.attention.head_count", 4},
        {"llama.attention.head_count_kv", 2}, {"llama.attention.layer_norm_rms_epsilon", 1e-5},
        {"tokenizer.ggml.eos_token_id", 2}};
    const auto add = [this](const char* name, std::vector<int64_t> shape) {
      const StorageType type = shape.size() == 2 ? StorageType::kF16 : StorageType::kF32;
      tensors_.push_back(MakeTensor(name, type, std::move(shape)));
    };
    add("token_embd.weight", {16, 32});
    add("output_norm.weight", {32});
    add("blk.0.attn_norm.weight", {32});
    add("blk.0.ffn_norm.weight", {32});
    add("blk.0.attn_q.weight", {32, 32});
    add("blk.0.attn_k.weight", {16, 32});
    add("blk.0.attn_v.weight", {16, 32});
    add("blk.0.attn_output.weight", {32, 32});
    add("blk.0.ffn_gate.weight", {64, 32});
    add("blk.0.ffn_up.weight", {64, 32});
    add("blk.0.ffn_down.weight", {32, 64});
  }

  // Null removes the key.
  SmallGguf& Set(const std::string& key, const Json& value) {
    std::erase_if(metadata_, [&](const auto& entry) { return entry.first == key; });
    if (!value.is_null()) metadata_.emplace_back(key, value);
    return *this;
  }
  SmallGguf& Replace(const std::string& name, FileTensor tensor) {
    std::erase_if(tensors_, [&](const FileTensor& t) { return t.name == name; });
    if (!tensor.name.empty()) tensors_.push_back(std::move(tensor));
    return *this;
  }
  std::string Write() {
    std::string path = folder_ / "model.gguf";
    WriteFile(path, GgufBytes(metadata_, tensors_));
    return path;
  }
  ModelConfig Config() {
    Result<ModelFiles> files = OpenModel(Write());
    EXPECT_TRUE(files.ok()) << files.status().message();
    return files.ok() ? std::move(files->config) : ModelConfig();
  }

 private:
  TempFolder folder_;
  GgufMetadata metadata_;
  std::vector<FileTensor> tensors_;
};

TEST(Gguf, WhatIsLeftOut) {
  const ModelConfig c = SmallGguf().Config();
  EXPECT_EQ(c.head_dim, 8);
  EXPECT_EQ(c.vocab, 16);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(c.ropes[0], (RopeConfig{.theta = 10000, .dim = 8}));
  EXPECT_EQ(SmallGguf().Set("llama.attention.head_count_kv", Json::array({2})).Config().n_kv_heads,
            2);
}

TEST(Gguf, EndTokens) {
  SmallGguf gguf;
  gguf.Set("tokenizer.ggml.eot_token_id", 5).Set("tokenizer.ggml.eom_token_id", 2);
  EXPECT_THAT(gguf.Config().eos_ids, ElementsAre(2, 5));
  // Control tokens that end an answer are known by their text too; plain text is not.
  gguf.Set("tokenizer.ggml.tokens", {"a", "<|eom_id|>", "</s>", "<|end|>", "<|im_end|>", "b"})
      .Set("tokenizer.ggml.token_type", {1, 4, 3, 1, 3, 3});
  EXPECT_THAT(gguf.Config().eos_ids, ElementsAre(2, 5, 1, 4));
}

// Published models end their answers at more than the token that their GGUF files name:
// generation_config.json of the folders they were made from lists these.
TEST(Gguf, EndTokensAreThoseOfGenerationConfigs) {
  struct Published {
    const char* name;
    std::vector<const char*> tokens;  // control tokens
    int eos;                          // tokenizer.ggml.eos_token_id
    std::vector<int32_t> expected;    // sorted
  };
  const std::vector<Published> table = {
      {"Llama 3.1 Instruct",
       {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eom_id|>", "<|eot_id|>"},
       4,
       {1, 3, 4}},
      {"Qwen2.5 Instruct", {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}, 2, {0, 2}},
      {"Phi-3", {"<s>", "</s>", "<|endoftext|>", "<|system|>", "<|end|>"}, 2, {2, 4}},
      {"Gemma 3", {"<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"}, 1, {1, 4}},
      {"SmolLM3", {"<|end_of_text|>", "<|im_start|>", "<|im_end|>"}, 2, {0, 2}},
      {"Mistral Instruct", {"<unk>", "<s>", "</s>", "[INST]", "[/INST]"}, 2, {2}},
  };
  for (const Published& model : table) {
    SmallGguf gguf;
    gguf.Set("tokenizer.ggml.eos_token_id", model.eos)
        .Set("tokenizer.ggml.tokens", model.tokens)
        .Set("tokenizer.ggml.token_type", std::vector<int>(model.tokens.size(), 3));
    std::vector<int32_t> ids = gguf.Config().eos_ids;
    EXPECT_EQ(ids.front(), model.eos) << model.name;
    std::sort(ids.begin(), ids.end());
    EXPECT_EQ(ids, model.expected) << model.name;
  }
}

TEST(Gguf, FusedQkvAndBiases) {
  const Loaded apart = Load(SmallGguf().Write());
  const auto rows_of = [&](const char* name) {
    return ToFloats(*apart.files.tensors, *apart.files.tensors->Find(name));
  };
  std::vector<float> qkv;
  for (const char* name : {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"}) {
    const std::vector<float> rows = rows_of(name);
    qkv.insert(qkv.end(), rows.begin(), rows.end());
  }
  SmallGguf fused;
  fused.Replace("blk.0.attn_q.weight", {}).Replace("blk.0.attn_k.weight", {});
  fused.Replace("blk.0.attn_v.weight",
                MakeTensor("blk.0.attn_qkv.weight", StorageType::kF16, {64, 32}, qkv));
  ExpectSameWeights(apart, Load(fused.Write()));

  fused.Replace("", MakeTensor("blk.0.attn_qkv.bias", StorageType::kF32, {64}));
  const Loaded biased = Load(fused.Write());
  const std::vector<float> bias =
      ToFloats(*biased.files.tensors, *biased.files.tensors->Find("blk.0.attn_qkv.bias"));
  const LayerWeights& l = biased.weights.layers[0];
  EXPECT_EQ(PairUp(Values(l.bq, 32), 1, 4), Rows(bias, 1, 0, 32));
  EXPECT_EQ(PairUp(Values(l.bk, 16), 1, 2), Rows(bias, 1, 32, 16));
  EXPECT_EQ(Values(l.bv, 16), Rows(bias, 1, 48, 16));
}

TEST(Gguf, BlockFormats) {
  // 64 rows of one block each: a scale, then 16 bytes of two values of 4 bits, less 8.
  std::string q4;
  for (int row = 0; row < 64; ++row) {
    const F16 scale = F16FromF32(0.25f);
    q4.append(reinterpret_cast<const char*>(&scale), 2);
    for (int i = 0; i < 16; ++i) q4 += static_cast<char>((row + i) % 256);
  }
  std::string q8;
  for (int row = 0; row < 32; ++row) {
    const F16 scale = F16FromF32(0.5f);
    q8.append(reinterpret_cast<const char*>(&scale), 2);
    for (int i = 0; i < 32; ++i) q8 += static_cast<char>(row - i);
  }
  SmallGguf gguf;
  gguf.Replace("blk.0.ffn_gate.weight",
               {"blk.0.ffn_gate.weight", StorageType::kQ4_0, {64, 32}, q4});
  gguf.Replace("blk.0.ffn_up.weight", {"blk.0.ffn_up.weight", StorageType::kQ4_0, {64, 32}, q4});
  gguf.Replace("blk.0.attn_q.weight", {"blk.0.attn_q.weight", StorageType::kQ8_0, {32, 32}, q8});
  const Loaded m = Load(gguf.Write());
  EXPECT_THAT(m.weights.notes, ElementsAre("Q4_0 (2 tensors) is dequantised to bf16"));
  EXPECT_EQ(WeightNotes(m.files), m.weights.notes);
  const LayerWeights& l = m.weights.layers[0];
  EXPECT_EQ(l.gate.format, DType::kBF16);
  EXPECT_EQ(Values(l.gate)[33], 0.25f * (2 - 8));  // row 1, value 1: the low half of byte 2
  EXPECT_EQ(Values(l.gate)[32 + 16], 0.25f * (0 - 8));
  EXPECT_EQ(l.wq.format, DType::kQ8_0);
  EXPECT_EQ(l.wq.row_bytes, 34);
  // Whole rows of a quantised q move: row 1 of a head of 8 is row 2 of the file's.
  EXPECT_EQ(Values(l.wq)[32], 0.5f * 2);
  EXPECT_NE(m.weights.format, DType::kF32);
}

struct Wrong {
  std::string key;
  Json value;
  StatusCode code;
  std::vector<const char*> says;
};

TEST(Gguf, WhatIsWrongIsSaidInOneSentence) {
  constexpr StatusCode kCorrupt = StatusCode::kCorrupt;
  constexpr StatusCode kUnsupported = StatusCode::kUnsupported;
  const std::vector<Wrong> table = {
      {"general.architecture",
       "bert",
       kUnsupported,
       {"general.architecture is 'bert'", "gemma3, "}},
      {"general.architecture", nullptr, StatusCode::kNotFound, {"general.architecture"}},
      {"general.architecture", 7, kCorrupt, {"general.architecture"}},
      {"general.type", "adapter", kUnsupported, {"general.type is 'adapter'", "expected model"}},
      {"llama.block_count", nullptr, StatusCode::kNotFound, {"llama.block_count"}},
      {"llama.block_count", 100000, kCorrupt, {"llama.block_count is 100000", "1 to 1024"}},
      {"llama.block_count", "one", kCorrupt, {"llama.block_count"}},
      {"llama.block_count", 2, kCorrupt, {"has no tensor 'blk.1.attn_norm.weight'"}},
      {"llama.embedding_length", 0, kCorrupt, {"llama.embedding_length is 0"}},
      {"llama.embedding_length", 30, kUnsupported, {"embedding_length is 30", "head_count (4)"}},
      {"llama.embedding_length",
       64,
       kCorrupt,
       {"'token_embd.weight' has shape [16, 32]", "[16, 64]"}},
      {"llama.attention.head_count", 4294967295, kCorrupt, {"head_count is 4294967295"}},
      {"llama.attention.head_count_kv",
       Json::array({2, 1}),
       kUnsupported,
       {"head_count_kv is an array of 2 that differ", "the same number for every layer"}},
      {"llama.attention.head_count_kv", 3, kCorrupt, {"4 attention heads", "3 KV heads"}},
      {"llama.attention.value_length", 16, kUnsupported, {"value_length is 16", "expected 8"}},
      {"llama.attention.causal", false, kUnsupported, {"attention.causal is false"}},
      {"llama.attention.layer_norm_rms_epsilon", nullptr, StatusCode::kNotFound, {"epsilon"}},
      {"llama.attention.layer_norm_rms_epsilon", -1.0, kCorrupt, {"epsilon is -1", "0 to 1"}},
      {"llama.context_length", 1, kCorrupt, {"llama.context_length is 1"}},
      {"llama.expert_count", 8, kUnsupported, {"llama.expert_count is 8", "dense model"}},
      {"llama.rope.freq_base", 0.5, kCorrupt, {"rope.freq_base is 0.5"}},
      {"llama.rope.dimension_count",
       4,
       kUnsupported,
       {"dimension_count is 4", "8, the whole head"}},
      {"llama.rope.scaling.type",
       "ntk",
       kUnsupported,
       {"scaling.type is 'ntk'", "yarn or longrope"}},
      {"llama.rope.scaling.type", "yarn", kUnsupported, {"scaling.factor is 0 or absent"}},
      {"llama.rope.scaling.type", "longrope", kCorrupt, {"rope_factors_short.weight"}},
      {"llama.rope.scaling.attn_factor", 2.0, kUnsupported, {"attn_factor is 2"}},
      {"tokenizer.ggml.eos_token_id", 16, kCorrupt, {"eos_token_id is 16", "below 16"}},
      {"tokenizer.ggml.bos_token_id", "two", kCorrupt, {"bos_token_id"}},
  };
  for (const Wrong& wrong : table) {
    SCOPED_TRACE(wrong.key + " " + wrong.value.dump());
    SmallGguf gguf;
    const Result<ModelFiles> files = OpenModel(gguf.Set(wrong.key, wrong.value).Write());
    ASSERT_FALSE(files.ok());
    const Status& status = files.status();
    EXPECT_EQ(status.code(), wrong.code) << status.message();
    for (const char* part : wrong.says) EXPECT_THAT(status.message(), HasSubstr(part));
    EXPECT_THAT(status.message(), HasSubstr("model.gguf: "));
  }
}

TEST(Gguf, WrongTensors) {
  const auto message = [](const std::string& name, FileTensor tensor) {
    SmallGguf gguf;
    return OpenModel(gguf.Replace(name, std::move(tensor)).Write()).status().message();
  };
  EXPECT_THAT(message("token_embd.weight", {}), HasSubstr("has no tensor 'token_embd.weight'"));
  EXPECT_THAT(message("blk.0.attn_v.weight", {}), HasSubstr("has no tensor 'blk.0.attn_v.weight'"));
  EXPECT_THAT(message("blk.0.ffn_gate.weight", {}),
              HasSubstr("has no tensor 'blk.0.ffn_gate.weight'"));
  EXPECT_THAT(
      message("", MakeTensor("blk.0.attn_sinks.weight", StorageType::kF32, {4})),
      HasSubstr(
          "has tensor 'blk.0.attn_sinks.weight', expected only those of an unquantised llama"));
  EXPECT_THAT(message("", MakeTensor("rope_freqs.weight", StorageType::kF32, {3})),
              HasSubstr("'rope_freqs.weight' is F32 [3], expected F32 [4]"));
  EXPECT_THAT(message("", MakeTensor("rope_freqs.weight", StorageType::kF32, {4}, {1, 1, NAN, 1})),
              HasSubstr("'rope_freqs.weight' holds nan"));
}

TEST(Gguf, LongContextsOfQwenByYarn) {
  SmallGguf gguf;
  gguf.Set("llama.rope.scaling.type", "yarn")
      .Set("llama.rope.scaling.factor", 4.0)
      .Set("llama.rope.scaling.original_context_length", 64);
  EXPECT_EQ(gguf.Config().max_context, 256);
}

}  // namespace
}  // namespace omnikv::gguf_test
