// Configurations of Hugging Face folders: the published goldens, both spellings, and what is wrong
// said in one sentence.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "model/hf_config.h"
#include "model/loader.h"
#include "model_files.h"

namespace omnikv::config_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string kGoldens = OMNIKV_SOURCE_DIR "/tests/golden/models/";

// A Llama of one layer whose config.json a test changes.
class SmallModel {
 public:
  SmallModel()
      : config_(Json::parse(R"({
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2})")) {
    const auto add = [this](const char* name, std::vector<int64_t> shape) {
      tensors_.push_back(MakeTensor(name, StorageType::kBF16, std::move(shape)));
    };
    add("model.embed_tokens.weight", {16, 32});
    add("model.norm.weight", {32});
    add("model.layers.0.input_layernorm.weight", {32});
    add("model.layers.0.post_attention_layernorm.weight", {32});
    add("model.layers.0.self_attn.q_proj.weight", {32, 32});
    add("model.layers.0.self_attn.k_proj.weight", {16, 32});
    add("model.layers.0.self_attn.v_proj.weight", {16, 32});
    add("model.layers.0.self_attn.o_proj.weight", {32, 32});
    add("model.layers.0.mlp.gate_proj.weight", {48, 32});
    add("model.layers.0.mlp.up_proj.weight", {48, 32});
    add("model.layers.0.mlp.down_proj.weight", {32, 48});
  }

  // Fields to set; null removes one.
  SmallModel& Patch(const char* patch) {
    config_.merge_patch(Json::parse(patch));
    return *this;
  }
  SmallModel& Add(FileTensor tensor) {
    tensors_.push_back(std::move(tensor));
    return *this;
  }
  SmallModel& Remove(const std::string& name) {
    std::erase_if(tensors_, [&](const FileTensor& t) { return t.name == name; });
    return *this;
  }
  Json& config() { return config_; }

  Result<ModelFiles> Open() {
    Write();
    return OpenModel(folder_.path());
  }
  ModelConfig Config() {
    Result<ModelFiles> files = Open();
    EXPECT_TRUE(files.ok()) << files.status().message();
    return files.ok() ? files->config : ModelConfig();
  }
  // What is said when it does not open.
  Status Refusal() {
    const Result<ModelFiles> files = Open();
    EXPECT_FALSE(files.ok()) << config_.dump();
    return files.status();
  }
  const TempFolder& folder() const { return folder_; }
  void Write() {
    WriteFile(folder_ / "config.json", config_.dump());
    WriteFile(folder_ / "model.safetensors", SafetensorsBytes(tensors_));
  }

 private:
  TempFolder folder_;
  Json config_;
  std::vector<FileTensor> tensors_;
};

ModelConfig GoldenConfig(const std::string& name) {
  Result<ModelFiles> files = OpenModel(kGoldens + name);
  EXPECT_TRUE(files.ok()) << files.status().message();
  return files.ok() ? std::move(files->config) : ModelConfig();
}

std::vector<int32_t> Windows(const ModelConfig& config) {
  std::vector<int32_t> windows;
  for (const LayerConfig& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

std::vector<int32_t> RopeOfLayers(const ModelConfig& config) {
  std::vector<int32_t> ropes;
  for (const LayerConfig& layer : config.layers) ropes.push_back(layer.rope);
  return ropes;
}

// Presets of policies are found by it.
TEST(ModelName, IsTheRepositoryWhereOneIsKnown) {
  SmallModel model;
  const std::string folder = std::filesystem::path(model.folder().path()).filename();
  const auto patched = [&](const char* patch) { return model.Patch(patch).Config().name; };
  EXPECT_EQ(patched("{}"), folder);
  EXPECT_EQ(patched(R"({"_name_or_path": "meta-llama/Llama-3.1-8B"})"), "meta-llama/Llama-3.1-8B");
  for (const char* path : {R"({"_name_or_path": "/data/llama/checkpoint-500"})",
                           R"({"_name_or_path": "./output"})", R"({"_name_or_path": ""})"}) {
    EXPECT_EQ(patched(path), folder) << path;
  }
  const TempFolder cache;
  for (const auto& [repository, name] : std::vector<std::pair<std::string, std::string>>{
           {"models--01-ai--Yi-9B-200K", "01-ai/Yi-9B-200K"}, {"models--gpt2", "gpt2"}}) {
    const std::string snapshot = cache / (repository + "/snapshots/0e1f2a3b");
    std::filesystem::create_directories(snapshot);
    patched(R"({"_name_or_path": "someone/else"})");
    std::filesystem::copy(model.folder().path(), snapshot);
    const Result<ModelFiles> files = OpenModel(snapshot + "/");
    ASSERT_TRUE(files.ok()) << files.status().message();
    EXPECT_EQ(files->config.name, name);
  }
}

TEST(GoldenConfigs, AllOpen) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kGoldens)) {
    const ModelConfig c = GoldenConfig(entry.path().filename().string());
    EXPECT_EQ(c.d_model, 32);
    EXPECT_EQ(c.vocab, 256);
    EXPECT_EQ(c.n_heads, 4);
    EXPECT_EQ(c.n_kv_heads, 2);
    EXPECT_EQ(c.ffn, 64);
    EXPECT_EQ(c.bos_id, 1);
    EXPECT_THAT(c.eos_ids, ElementsAre(2));
    EXPECT_EQ(c.layers.size(), static_cast<size_t>(c.n_layers));
    ++n;
  }
  EXPECT_GE(n, 20);
}

TEST(GoldenConfigs, Llama) {
  const ModelConfig c = GoldenConfig("llama");
  EXPECT_EQ(c.family, "llama");
  EXPECT_EQ(c.name, "llama");
  EXPECT_EQ(c.head_dim, 16);  // not d_model / n_heads
  EXPECT_EQ(c.attn_scale, 0.25f);
  EXPECT_FALSE(c.tied_embeddings);
  EXPECT_FALSE(c.qkv_bias || c.o_bias || c.mlp_bias);
  ASSERT_EQ(c.ropes.size(), 1u);
  EXPECT_EQ(c.ropes[0], (RopeConfig{.theta = 500000, .dim = 16}));

  const ModelConfig biased = GoldenConfig("llama_tied_bias");
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && biased.mlp_bias && biased.tied_embeddings);
  EXPECT_EQ(biased.norm_eps, 0.1f);
}

TEST(GoldenConfigs, RopeScalings) {
  const RopeConfig linear = GoldenConfig("llama_linear").ropes[0];
  EXPECT_EQ(linear.scaling, RopeScaling::kLinear);
  EXPECT_EQ(linear.factor, 2);
  const ModelConfig dynamic = GoldenConfig("llama_dynamic");
  EXPECT_EQ(dynamic.ropes[0].scaling, RopeScaling::kDynamic);
  EXPECT_EQ(dynamic.ropes[0].factor, 4);
  EXPECT_EQ(dynamic.max_context, 32);
  const RopeConfig llama3 = GoldenConfig("llama_llama3").ropes[0];
  EXPECT_EQ(llama3.scaling, RopeScaling::kLlama3);
  EXPECT_EQ(llama3.original_context, 64);
  EXPECT_EQ(llama3.factor, 8);
  EXPECT_EQ(llama3.low_freq_factor, 1);
  EXPECT_EQ(llama3.high_freq_factor, 4);
  const RopeConfig yarn = GoldenConfig("llama_yarn").ropes[0];
  EXPECT_EQ(yarn.scaling, RopeScaling::kYarn);
  EXPECT_EQ(yarn.original_context, 32);
  EXPECT_EQ(yarn.beta_fast, 1);
  EXPECT_EQ(yarn.beta_slow, 0.125);
  EXPECT_EQ(yarn.magnitude, 0);
  // Its config.json says 16, the length before scaling by 4.
  EXPECT_EQ(GoldenConfig("qwen2_yarn").max_context, 64);
  const RopeConfig longrope = GoldenConfig("llama_longrope").ropes[0];
  EXPECT_EQ(longrope.scaling, RopeScaling::kLongrope);
  EXPECT_EQ(longrope.original_context, 16);
  EXPECT_EQ(longrope.factor, 32);
  EXPECT_EQ(longrope.long_factor.size(), 8u);
}

TEST(GoldenConfigs, OtherFamilies) {
  EXPECT_THAT(Windows(GoldenConfig("mistral")), ElementsAre(8, 8, 8));
  const ModelConfig qwen2 = GoldenConfig("qwen2");
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.o_bias && qwen2.tied_embeddings);
  EXPECT_THAT(Windows(qwen2), ElementsAre(0, 0, 0));
  EXPECT_EQ(GoldenConfig("qwen3").qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(GoldenConfig("internlm2").head_dim, 8);

  const ModelConfig phi3 = GoldenConfig("phi3");
  EXPECT_EQ(phi3.ropes[0].scaling, RopeScaling::kLongrope);
  EXPECT_EQ(phi3.ropes[0].original_context, 16);
  EXPECT_EQ(phi3.ropes[0].factor, 32);  // 512 / 16
  const ModelConfig phi3_short = GoldenConfig("phi3_short");
  EXPECT_EQ(phi3_short.ropes[0].dim, 6);  // three quarters of 8
  EXPECT_EQ(phi3_short.ropes[0].original_context, 128);

  const ModelConfig granite = GoldenConfig("granite");
  EXPECT_EQ(granite.embed_scale, 2);
  EXPECT_EQ(granite.residual_scale, 0.7f);
  EXPECT_EQ(granite.attn_scale, 0.2f);
  EXPECT_EQ(granite.logits_scale, 0.5f);  // logits_scaling divides
  EXPECT_THAT(RopeOfLayers(GoldenConfig("smollm3")), ElementsAre(0, 0, -1, 0));

  const ModelConfig olmo2 = GoldenConfig("olmo2");
  EXPECT_EQ(olmo2.qk_norm, QkNorm::kFull);
  EXPECT_TRUE(!olmo2.pre_norm && olmo2.post_norm);

  const ModelConfig gemma3 = GoldenConfig("gemma3");
  EXPECT_TRUE(gemma3.pre_norm && gemma3.post_norm);
  EXPECT_EQ(gemma3.act, Activation::kGeluTanh);
  EXPECT_THAT(Windows(gemma3), ElementsAre(8, 8, 0, 8));
  EXPECT_THAT(RopeOfLayers(gemma3), ElementsAre(1, 1, 0, 1));
  ASSERT_EQ(gemma3.ropes.size(), 2u);
  EXPECT_EQ(gemma3.ropes[0].theta, 1e6);
  EXPECT_EQ(gemma3.ropes[0].scaling, RopeScaling::kLinear);
  EXPECT_EQ(gemma3.ropes[0].factor, 8);
  EXPECT_EQ(gemma3.ropes[1], (RopeConfig{.theta = 10000, .dim = 16}));
  EXPECT_EQ(gemma3.embed_scale, 5.65625f);  // the root of 32 in bf16
  EXPECT_EQ(gemma3.attn_scale, static_cast<float>(1 / std::sqrt(8.0)));
}

TEST(HfConfig, BothSpellingsAreOne) {
  const ModelConfig old_keys =
      SmallModel()
          .Patch(R"({"rope_theta": 5e5, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn",
                     "factor": 4.0, "original_max_position_embeddings": 32}})")
          .Config();
  ModelConfig new_keys =
      SmallModel()
          .Patch(R"({"rope_theta": null, "dtype": "bfloat16", "rope_parameters": {
                     "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                     "original_max_position_embeddings": 32}})")
          .Config();
  new_keys.name = old_keys.name;
  new_keys.path = old_keys.path;
  EXPECT_EQ(old_keys, new_keys);
  EXPECT_EQ(old_keys.ropes[0].theta, 5e5);
  EXPECT_EQ(old_keys.max_context, 128);
}

TEST(HfConfig, WhatIsLeftOutIsAsInTransformers) {
  SmallModel model;
  model.Patch(R"({"rms_norm_eps": null, "rope_theta": null, "eos_token_id": null,
                  "bos_token_id": null, "hidden_act": null})");
  const ModelConfig c = model.Config();
  EXPECT_EQ(c.norm_eps, 1e-6f);
  EXPECT_EQ(c.ropes[0].theta, 10000);
  EXPECT_EQ(c.head_dim, 8);
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_TRUE(c.eos_ids.empty());
}

TEST(HfConfig, EveryEndTokenCounts) {
  SmallModel model;
  model.Patch(R"({"eos_token_id": [5, 3]})");
  WriteFile(model.folder() / "generation_config.json",
            R"({"eos_token_id": [3, 7], "bos_token_id": 4})");
  const ModelConfig c = model.Config();
  EXPECT_THAT(c.eos_ids, ElementsAre(5, 3, 7));
  EXPECT_EQ(c.bos_id, 1);  // config.json's
}

TEST(HfConfig, MistralWindow) {
  SmallModel model;
  model.Patch(R"({"model_type": "mistral", "max_position_embeddings": 32768})");
  EXPECT_THAT(Windows(model.Config()), ElementsAre(4096));  // absent: the default of the family
  EXPECT_THAT(Windows(model.Patch(R"({"sliding_window": 100})").Config()), ElementsAre(100));
  EXPECT_THAT(Windows(model.Patch(R"({"sliding_window": 32768})").Config()), ElementsAre(0));
  model.config()["sliding_window"] = nullptr;
  EXPECT_THAT(Windows(model.Config()), ElementsAre(0));
}

TEST(HfConfig, GemmaTextPartOfAMultimodalModel) {
  const std::string golden = kGoldens + "gemma3";
  Result<Json> config = ReadJsonFile(golden + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status().message();
  Json text = *config;
  text.erase("eos_token_id");
  text.erase("num_key_value_heads");  // 4, which this model has not
  const Json top = {{"model_type", "gemma3"}, {"text_config", text}, {"eos_token_id", {1, 106}}};
  const TempFolder folder;
  WriteFile(folder / "config.json", top.dump());
  std::filesystem::copy_file(golden + "/model.safetensors", folder / "model.safetensors");
  const Result<ModelFiles> refused = OpenModel(folder.path());
  EXPECT_THAT(refused.status().message(), HasSubstr("expected one of shape [64, 32]"));

  Json right = top;
  right["text_config"]["num_key_value_heads"] = 2;
  WriteFile(folder / "config.json", right.dump());
  const Result<ModelFiles> files = OpenModel(folder.path());
  ASSERT_TRUE(files.ok()) << files.status().message();
  ModelConfig expected = GoldenConfig("gemma3");
  expected.name = files->config.name;
  expected.path = folder.path();
  expected.eos_ids = {1, 106};
  EXPECT_EQ(files->config, expected);
}

TEST(HfConfig, SharedTinyModel) {
  const std::string path = OMNIKV_SOURCE_DIR "/../shared/models/tiny";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there: it is too big to be in the repository";
  }
  const Result<ModelFiles> hf = OpenModel(path);
  const Result<ModelFiles> gguf = OpenModel(OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf");
  ASSERT_TRUE(hf.ok() && gguf.ok()) << hf.status().message() << gguf.status().message();
  ModelConfig named = hf->config;
  named.name = gguf->config.name;
  named.path = gguf->config.path;
  EXPECT_EQ(named, gguf->config);
}

struct Wrong {
  const char* patch;
  StatusCode code;
  std::vector<const char*> says;
};

constexpr StatusCode kCorrupt = StatusCode::kCorrupt;
constexpr StatusCode kUnsupported = StatusCode::kUnsupported;

TEST(HfConfig, WhatIsWrongIsSaidInOneSentence) {
  const std::vector<Wrong> table = {
      {R"({"model_type": null})", kCorrupt, {"has no model_type", "expected a string"}},
      {R"({"model_type": 5})", kCorrupt, {"model_type is 5"}},
      {R"({"model_type": "mamba2"})",
       kUnsupported,
       {"model_type is 'mamba2'",
        "supported family: gemma3, granite, internlm2, llama, mistral, "
        "olmo2, phi3, qwen2, qwen3, smollm3"}},
      {R"({"hidden_size": null})", kCorrupt, {"has no hidden_size", "an integer from 1 to 262144"}},
      {R"({"hidden_size": -32})", kCorrupt, {"hidden_size is -32"}},
      {R"({"hidden_size": "32"})", kCorrupt, {"hidden_size is '32'"}},
      {R"({"hidden_size": 32.5})", kCorrupt, {"hidden_size is 32.5"}},
      {R"({"hidden_size": 4611686018427387904})", kCorrupt, {"hidden_size is 4611686018427387904"}},
      {R"({"hidden_size": 18446744073709551615})", kCorrupt, {"18446744073709551615"}},
      {R"({"hidden_size": 1e300})", kCorrupt, {"hidden_size is 1e+300"}},
      {R"({"hidden_size": 30})",
       kCorrupt,
       {"hidden_size is 30", "multiple of num_attention_heads"}},
      {R"({"num_hidden_layers": 1000000000})",
       kCorrupt,
       {"num_hidden_layers is 1000000000", "1024"}},
      {R"({"num_attention_heads": 0})", kCorrupt, {"num_attention_heads is 0"}},
      {R"({"num_key_value_heads": 3})",
       kCorrupt,
       {"4 attention heads", "a multiple of its 3 KV heads"}},
      {R"({"num_key_value_heads": 8})",
       kCorrupt,
       {"4 attention heads", "a multiple of its 8 KV heads"}},
      {R"({"num_attention_heads": 4096, "num_key_value_heads": 1, "head_dim": 1024})",
       kCorrupt,
       {"4096 attention heads of 1024 values", "at most 262144"}},
      {R"({"head_dim": true})", kCorrupt, {"head_dim is true"}},
      {R"({"head_dim": 7})", kUnsupported, {"head_dim is 7", "heads of an even size"}},
      {R"({"vocab_size": 2147483648})", kCorrupt, {"vocab_size is 2147483648"}},
      {R"({"max_position_embeddings": 0})", kCorrupt, {"max_position_embeddings is 0"}},
      {R"({"rms_norm_eps": -1e-5})", kCorrupt, {"rms_norm_eps is -1e-05", "from 0 to 1"}},
      {R"({"rms_norm_eps": "small"})", kCorrupt, {"rms_norm_eps is 'small'"}},
      {R"({"rope_theta": 0})", kCorrupt, {"rope_theta is 0"}},
      {R"({"hidden_act": "relu"})", kUnsupported, {"hidden_act is 'relu'", "silu or gelu"}},
      {R"({"attention_bias": "yes"})", kCorrupt, {"attention_bias is 'yes'", "true or false"}},
      {R"({"attention_bias": true})",
       kCorrupt,
       {"has no tensor 'model.layers.0.self_attn.q_proj.bias'"}},
      {R"({"partial_rotary_factor": 1.5})", kCorrupt, {"partial_rotary_factor is 1.5"}},
      {R"({"partial_rotary_factor": 0.1})",
       kUnsupported,
       {"partial_rotary_factor is 0.1", "a head of 8"}},
      {R"({"eos_token_id": 16})", kCorrupt, {"eos_token_id is 16", "0 to 15"}},
      {R"({"eos_token_id": [1, "2"]})", kCorrupt, {"eos_token_id[1] is '2'"}},
      {R"({"eos_token_id": -1})", kCorrupt, {"eos_token_id is -1"}},
      {R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})",
       kUnsupported,
       {"quantization_config.quant_method is 'gptq'", "no quantisation"}},
      {R"({"num_local_experts": 8})", kUnsupported, {"num_local_experts is 8", "dense model"}},
      {R"({"is_encoder_decoder": true})", kUnsupported, {"is_encoder_decoder is true"}},
      {R"({"rope_scaling": {"type": "ntk", "factor": 2}})",
       kUnsupported,
       {"rope_scaling.type is 'ntk'", "default, linear, dynamic, llama3, yarn or longrope"}},
      {R"({"rope_scaling": "linear"})", kCorrupt, {"rope_scaling is 'linear'", "an object"}},
      {R"({"rope_scaling": {"type": "linear"}})", kCorrupt, {"has no rope_scaling.factor"}},
      {R"({"rope_scaling": {"type": "linear", "factor": 1e9}})",
       kCorrupt,
       {"rope_scaling.factor is 1000000000"}},
      {R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
           "high_freq_factor": 4}})",
       kCorrupt,
       {"high_freq_factor is 4", "more than low_freq_factor (4)"}},
      {R"({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1],
           "long_factor": [1, 1, 1, 1]}})",
       kCorrupt,
       {"short_factor is an array of 3", "an array of 4"}},
      {R"({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 0],
           "long_factor": [1, 1, 1, 1]}})",
       kCorrupt,
       {"short_factor[3] is 0"}},
      {R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})",
       kUnsupported,
       {"rope_parameters.full_attention is an object", "one set of rope parameters"}},
      {R"({"model_type": "qwen2", "use_sliding_window": true, "layer_types": ["sliding_attention",
           "full_attention"]})",
       kCorrupt,
       {"layer_types is an array of 2", "each of 1 layers"}},
      {R"({"model_type": "qwen3", "head_dim": 8, "use_sliding_window": true,
           "layer_types": ["linear_attention"]})",
       kUnsupported,
       {"layer_types", "not 'linear_attention'"}},
      {R"({"model_type": "smollm3", "no_rope_layers": []})",
       kCorrupt,
       {"no_rope_layers is an array of 0"}},
      {R"({"model_type": "granite", "logits_scaling": 0})", kCorrupt, {"logits_scaling is 0"}},
      {R"({"model_type": "mistral", "sliding_window": 0})", kCorrupt, {"sliding_window is 0"}},
      {R"({"model_type": "gemma3", "rope_parameters": {"rope_theta": 10000}})",
       kCorrupt,
       {"has no rope_parameters.full_attention"}},
      {R"({"num_hidden_layers": 2})",
       kCorrupt,
       {"has no tensor 'model.layers.1.input_layernorm.weight'", "shape [32]"}},
      {R"({"tie_word_embeddings": false})",
       kCorrupt,
       {"has no tensor 'lm_head.weight'", "[16, 32]"}},
      {R"({"intermediate_size": 49})",
       kCorrupt,
       {"'model.layers.0.mlp.gate_proj.weight' has shape [48, 32]",
        "expected one of shape [49, 32]"}},
  };
  for (const Wrong& wrong : table) {
    SCOPED_TRACE(wrong.patch);
    const Status status = SmallModel().Patch(wrong.patch).Refusal();
    EXPECT_EQ(status.code(), wrong.code) << status.message();
    for (const char* part : wrong.says) EXPECT_THAT(status.message(), HasSubstr(part));
    EXPECT_THAT(status.message(), HasSubstr("omnikv_model_"));  // the file's path
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  }
}

TEST(HfConfig, FilesThatAreNotWhatTheyShouldBe) {
  const auto open_with = [](const std::string& config) {
    SmallModel model;
    model.Write();
    WriteFile(model.folder() / "config.json", config);
    return OpenModel(model.folder().path()).status().message();
  };
  EXPECT_THAT(open_with("{\"a\": 1,"),
              HasSubstr("config.json: is not JSON: its 8 bytes end in the middle"));
  EXPECT_THAT(open_with("[1, 2]"),
              HasSubstr("config.json: holds an array of 2, expected an object"));
  EXPECT_THAT(open_with("{\"rope_theta\": 1e999}"), HasSubstr("config.json: is not JSON"));
  EXPECT_THAT(open_with(std::string(100000, '[')), HasSubstr("nests deeper than 64 levels"));
  EXPECT_THAT(open_with(""), HasSubstr("config.json: is empty"));
  EXPECT_THAT(open_with("{\"model_type\": \"\\u001b[31mllama\"}"), HasSubstr("'\\x1b[31mllama'"));

  SmallModel model;
  model.Write();
  WriteFile(model.folder() / "generation_config.json", "{\"eos_token_id\": \"<eos>\"}");
  EXPECT_THAT(OpenModel(model.folder().path()).status().message(),
              HasSubstr("generation_config.json: eos_token_id is '<eos>'"));

  EXPECT_EQ(OpenModel("/nowhere/model").status().code(), StatusCode::kNotFound);
  const TempFolder empty;
  EXPECT_THAT(OpenModel(empty.path()).status().message(), HasSubstr("has no config.json"));
  EXPECT_THAT(OpenModel(model.folder() / "model.safetensors").status().message(),
              HasSubstr("expected the folder"));
}

TEST(HfConfig, TensorsThatShowAnotherModelAreRefused) {
  const auto open_with = [](const char* name, StorageType type = StorageType::kF32) {
    return SmallModel().Add(MakeTensor(name, type, {32})).Refusal();
  };
  const std::string q = "model.layers.0.self_attn.q_proj.";
  EXPECT_EQ(open_with((q + "weight_scale").c_str()).code(), StatusCode::kUnsupported);
  EXPECT_THAT(
      open_with((q + "bias").c_str()).message(),
      HasSubstr("has tensor '" + q + "bias', expected only those of an unquantised llama model"));
  EXPECT_THAT(open_with("model.embed_tokens.absmax").message(), HasSubstr("absmax"));
  EXPECT_THAT(open_with("model.layers.0.self_attn.q_norm.weight").message(), HasSubstr("q_norm"));

  // Layers that the configuration does not tell of: another depth, or another model.
  const Status deeper = open_with("model.layers.1.eh_proj.weight");
  EXPECT_EQ(deeper.code(), StatusCode::kCorrupt);
  EXPECT_THAT(
      deeper.message(),
      HasSubstr("has tensor 'model.layers.1.eh_proj.weight', but its configuration tells of "
                "1 layers"));

  // Tables that old files keep, layers for multi-token prediction, other towers, and a copy of tied
  // weights.
  SmallModel model;
  for (const char* name :
       {"model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.patch.weight",
        "model.layers.1.eh_proj.weight", "lm_head.weight"}) {
    model.Add(MakeTensor(name, StorageType::kF32, {32}));
  }
  model.Patch(R"({"num_nextn_predict_layers": 1})").Config();

  const std::string k = "model.layers.0.self_attn.k_proj.weight";
  EXPECT_THAT(SmallModel()
                  .Remove(k)
                  .Add({k, StorageType::kI8, {16, 32}, std::string(512, '\0')})
                  .Refusal()
                  .message(),
              HasSubstr("tensor '" + k + "' is stored as I8, expected F32"));
}

}  // namespace
}  // namespace omnikv::config_test
