// Weights as they end up in a backend's memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "io/safetensors.h"
#include "loaded.h"
#include "model_files.h"

namespace omnikv::weights_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kGoldens = OMNIKV_SOURCE_DIR "/tests/golden/models/";

// The values of a checkpoint's tensor as the file has them.
std::vector<float> FileValues(const Loaded& model, const std::string& name) {
  const TensorView* tensor = model.files.tensors->Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(tensor->NumValues());
  EXPECT_TRUE(
      model.files.tensors->ReadValues(*tensor, 0, values.size(), DType::kF32, values.data()).ok());
  return values;
}

// Rows [first, first + n) of a matrix with `n_in` values in a row.
std::vector<float> Rows(const std::vector<float>& values, int64_t n_in, int64_t first, int64_t n) {
  return {values.begin() + first * n_in, values.begin() + (first + n) * n_in};
}

TEST(Weights, AreTheFilesValues) {
  for (const char* name : {"llama", "llama_f32", "llama_linear", "llama_tied_bias", "qwen3"}) {
    SCOPED_TRACE(name);
    const Loaded m = Load(kGoldens + name);
    const ModelConfig& c = m.files.config;
    const Weights& w = m.weights;
    EXPECT_EQ(Values(w.embed), FileValues(m, "model.embed_tokens.weight"));
    EXPECT_EQ(Values(w.final_norm, c.d_model), FileValues(m, "model.norm.weight"));
    if (c.tied_embeddings) {
      EXPECT_EQ(w.head, w.embed);
    } else {
      EXPECT_EQ(Values(w.head), FileValues(m, "lm_head.weight"));
    }
    for (size_t i = 0; i < w.layers.size(); ++i) {
      const LayerWeights& l = w.layers[i];
      const auto file = [&](const char* part) {
        return FileValues(m, fmt::format("model.layers.{}.{}", i, part));
      };
      EXPECT_EQ(Values(l.wq), file("self_attn.q_proj.weight"));
      EXPECT_EQ(Values(l.wk), file("self_attn.k_proj.weight"));
      EXPECT_EQ(Values(l.wv), file("self_attn.v_proj.weight"));
      EXPECT_EQ(Values(l.wo), file("self_attn.o_proj.weight"));
      EXPECT_EQ(Values(l.gate), file("mlp.gate_proj.weight"));
      EXPECT_EQ(Values(l.up), file("mlp.up_proj.weight"));
      EXPECT_EQ(Values(l.down), file("mlp.down_proj.weight"));
      EXPECT_EQ(Values(l.attn_norm, c.d_model), file("input_layernorm.weight"));
      EXPECT_EQ(Values(l.ffn_norm, c.d_model), file("post_attention_layernorm.weight"));
      if (c.qk_norm == QkNorm::kPerHead) {
        EXPECT_EQ(Values(l.q_norm, c.head_dim), file("self_attn.q_norm.weight"));
        EXPECT_EQ(Values(l.k_norm, c.head_dim), file("self_attn.k_norm.weight"));
      }
      EXPECT_EQ(l.bq != nullptr, c.qkv_bias);
      EXPECT_EQ(l.down_bias != nullptr, c.mlp_bias);
      if (c.qkv_bias) {
        EXPECT_EQ(Values(l.bk, c.n_kv_heads * c.head_dim), file("self_attn.k_proj.bias"));
        EXPECT_EQ(Values(l.bo, c.d_model), file("self_attn.o_proj.bias"));
        EXPECT_EQ(Values(l.up_bias, c.ffn), file("mlp.up_proj.bias"));
      }
    }
    EXPECT_EQ(w.format == DType::kF32, std::string(name) == "llama_f32");
    EXPECT_EQ(FormatOfAll(m.files), w.format);
    EXPECT_TRUE(w.notes.empty());
  }
}

TEST(Weights, InternlmIsTakenApart) {
  const Loaded fused = Load(kGoldens + "internlm2");
  const ModelConfig& c = fused.files.config;
  const int64_t groups = c.n_kv_heads;
  const int64_t q_heads = c.n_heads / groups;
  const int64_t d = c.head_dim;
  for (size_t i = 0; i < fused.weights.layers.size(); ++i) {
    const LayerWeights& l = fused.weights.layers[i];
    const std::vector<float> wqkv =
        FileValues(fused, fmt::format("model.layers.{}.attention.wqkv.weight", i));
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * (q_heads + 2) * d;
      EXPECT_EQ(Rows(Values(l.wq), c.d_model, g * q_heads * d, q_heads * d),
                Rows(wqkv, c.d_model, first, q_heads * d));
      EXPECT_EQ(Rows(Values(l.wk), c.d_model, g * d, d),
                Rows(wqkv, c.d_model, first + q_heads * d, d));
      EXPECT_EQ(Rows(Values(l.wv), c.d_model, g * d, d),
                Rows(wqkv, c.d_model, first + (q_heads + 1) * d, d));
    }
    EXPECT_EQ(Values(l.gate),
              FileValues(fused, fmt::format("model.layers.{}.feed_forward.w1.weight", i)));
    EXPECT_EQ(Values(l.up),
              FileValues(fused, fmt::format("model.layers.{}.feed_forward.w3.weight", i)));
  }
}

TEST(Weights, PhiIsTakenApart) {
  const Loaded m = Load(kGoldens + "phi3");
  const ModelConfig& c = m.files.config;
  const int64_t n_q = int64_t{c.n_heads} * c.head_dim;
  const int64_t n_kv = int64_t{c.n_kv_heads} * c.head_dim;
  const LayerWeights& l = m.weights.layers[1];
  const std::vector<float> qkv = FileValues(m, "model.layers.1.self_attn.qkv_proj.weight");
  const std::vector<float> gate_up = FileValues(m, "model.layers.1.mlp.gate_up_proj.weight");
  EXPECT_EQ(Values(l.wq), Rows(qkv, c.d_model, 0, n_q));
  EXPECT_EQ(Values(l.wk), Rows(qkv, c.d_model, n_q, n_kv));
  EXPECT_EQ(Values(l.wv), Rows(qkv, c.d_model, n_q + n_kv, n_kv));
  EXPECT_EQ(Values(l.gate), Rows(gate_up, c.d_model, 0, c.ffn));
  EXPECT_EQ(Values(l.up), Rows(gate_up, c.d_model, c.ffn, c.ffn));
}

TEST(Weights, NormsOfGemmaAreFoldedAndThoseOfOlmoStandBehind) {
  const Loaded gemma = Load(kGoldens + "gemma3");
  const ModelConfig& c = gemma.files.config;
  const auto folded = [&](const std::string& name) {
    std::vector<float> values = FileValues(gemma, name);
    for (float& v : values) v += 1;
    return values;
  };
  const LayerWeights& l = gemma.weights.layers[2];
  const std::string layer = "model.layers.2.";
  EXPECT_EQ(Values(l.attn_norm, c.d_model), folded(layer + "input_layernorm.weight"));
  EXPECT_EQ(Values(l.attn_post_norm, c.d_model), folded(layer + "post_attention_layernorm.weight"));
  EXPECT_EQ(Values(l.ffn_norm, c.d_model), folded(layer + "pre_feedforward_layernorm.weight"));
  EXPECT_EQ(Values(l.ffn_post_norm, c.d_model),
            folded(layer + "post_feedforward_layernorm.weight"));
  EXPECT_EQ(Values(l.q_norm, c.head_dim), folded(layer + "self_attn.q_norm.weight"));
  EXPECT_EQ(Values(gemma.weights.final_norm, c.d_model), folded("model.norm.weight"));

  const Loaded olmo = Load(kGoldens + "olmo2");
  const LayerWeights& o = olmo.weights.layers[0];
  EXPECT_EQ(o.attn_norm, nullptr);
  EXPECT_EQ(o.ffn_norm, nullptr);
  EXPECT_EQ(Values(o.attn_post_norm, 32),
            FileValues(olmo, "model.layers.0.post_attention_layernorm.weight"));
  EXPECT_EQ(Values(o.k_norm, 16), FileValues(olmo, "model.layers.0.self_attn.k_norm.weight"));
}

// A Llama of one layer and `d` values a row. The embedding is last; without `fill` its bytes are
// promised by the file's header, and left for the test to write.
void WriteOddModel(const TempFolder& folder, StorageType type, int64_t vocab, int64_t d,
                   bool fill) {
  const nlohmann::json config = {{"model_type", "llama"},         {"hidden_size", d},
                                 {"intermediate_size", 24},       {"num_hidden_layers", 1},
                                 {"num_attention_heads", 2},      {"vocab_size", vocab},
                                 {"max_position_embeddings", 64}, {"tie_word_embeddings", true}};
  WriteFile(folder / "config.json", config.dump());
  std::vector<FileTensor> tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    tensors.push_back(MakeTensor(name, type, std::move(shape)));
  };
  add("model.norm.weight", {d});
  const std::string layer = "model.layers.0.";
  add(layer + "input_layernorm.weight", {d});
  add(layer + "post_attention_layernorm.weight", {d});
  for (const char* part : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    add(layer + "self_attn." + part + ".weight", {d, d});
  }
  add(layer + "mlp.gate_proj.weight", {24, d});
  add(layer + "mlp.up_proj.weight", {24, d});
  add(layer + "mlp.down_proj.weight", {d, 24});
  const char* const embed = "model.embed_tokens.weight";
  if (fill) {
    add(embed, {vocab, d});
  } else {
    FileTensor promised{embed, type, {vocab, d}, {}};
    promised.promised_bytes = static_cast<size_t>(vocab * d) * BlockBytes(type);
    tensors.push_back(promised);
  }
  WriteFile(folder / "model.safetensors", SafetensorsBytes(tensors));
}

TEST(Weights, RowsBeginOnCacheLines) {
  for (const StorageType type : {StorageType::kF32, StorageType::kF16, StorageType::kBF16}) {
    SCOPED_TRACE(StorageTypeName(type));
    const TempFolder folder;
    WriteOddModel(folder, type, 11, 20, true);
    const Loaded m = Load(folder.path());
    const LayerWeights& l = m.weights.layers[0];
    for (const WeightRef* w : {&m.weights.embed, &l.wq, &l.wk, &l.wv, &l.wo, &l.gate, &l.down}) {
      EXPECT_EQ(w->format, NativeDType(type));
      EXPECT_EQ(w->row_bytes % 64, 0);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(w->data) % 64, 0u);
      const auto used = static_cast<int64_t>(DTypeBytes(w->format, static_cast<size_t>(w->n_in)));
      for (int64_t row = 0; row < w->n_out; ++row) {  // kernels may read what lies between rows
        for (int64_t i = used; i < w->row_bytes; ++i) EXPECT_EQ(w->Row(row)[i], std::byte{0});
      }
    }
    EXPECT_EQ(Values(m.weights.embed), FileValues(m, "model.embed_tokens.weight"));
    EXPECT_EQ(Values(l.down), FileValues(m, "model.layers.0.mlp.down_proj.weight"));
    EXPECT_EQ(Values(l.attn_norm, 20), FileValues(m, "model.layers.0.input_layernorm.weight"));
  }
}

// Counts what reaches the device.
class CountingBackend : public HostBackend {
 public:
  std::string_view Name() const override { return "counting"; }
  std::string Describe() const override { return "counting"; }
  Support Supports(const Op&) const override { return {}; }
  bool OnDevice() const override { return on_device; }
  Result<Buffer> Allocate(size_t bytes, std::string_view what) override {
    allocated += bytes;
    if (allocated > limit) return ResourceExhausted("no room for " + std::string(what));
    return HostBackend::Allocate(bytes, what);
  }
  void Upload(void* dst, const void* src, size_t bytes) override {
    uploaded += bytes;
    HostBackend::Upload(dst, src, bytes);
  }

  bool on_device = true;
  size_t allocated = 0, uploaded = 0;
  size_t limit = SIZE_MAX;

 protected:
  void Run(const Op&) override {}
};

TEST(Weights, BytesAreThoseAnnouncedAndProgressReachesThem) {
  Result<ModelFiles> files = OpenModel(kGoldens + "llama");
  ASSERT_TRUE(files.ok());
  CountingBackend backend;
  size_t last = 0;
  const Result<Weights> weights = LoadWeights(*files, backend, [&](size_t done, size_t total) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, total);
    EXPECT_EQ(total, *WeightBytes(*files));
    last = done;
  });
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(backend.allocated, *WeightBytes(*files));
  EXPECT_EQ(weights->bytes, backend.allocated);
  EXPECT_LE(backend.uploaded, backend.allocated);
  EXPECT_EQ(last, backend.uploaded);

  CountingBackend host;  // weights are read to their places there
  host.on_device = false;
  ASSERT_TRUE(LoadWeights(*files, host, nullptr).ok());
  EXPECT_EQ(host.uploaded, 0u);

  CountingBackend small;
  small.limit = 1000;
  EXPECT_EQ(LoadWeights(*files, small, nullptr).status().code(), StatusCode::kResourceExhausted);
}

// Large enough that threads read ahead of the copy, with rows that need padding. The file is
// sparse: zeros but for a mark in some rows.
TEST(Weights, LargeModelsLoadTheSame) {
  constexpr int64_t kVocab = 1 << 18;
  constexpr int64_t kWidth = 132;  // 528 bytes a row, 576 in memory
  constexpr int64_t kMarkEvery = 1000;
  const TempFolder folder;
  WriteOddModel(folder, StorageType::kF32, kVocab, kWidth, false);
  const std::string weights = folder / "model.safetensors";
  const uintmax_t begin = std::filesystem::file_size(weights);
  std::filesystem::resize_file(weights, begin + kVocab * kWidth * sizeof(float));
  {
    std::fstream file(weights, std::ios::binary | std::ios::in | std::ios::out);
    for (int64_t row = 0; row < kVocab; row += kMarkEvery) {
      const auto mark = static_cast<float>(row + 1);
      file.seekp(static_cast<std::streamoff>(begin) + (row * kWidth + 5) * 4);
      file.write(reinterpret_cast<const char*>(&mark), sizeof mark);
    }
    ASSERT_TRUE(file.good());
  }
  for (const bool on_device : {false, true}) {
    Loaded m;
    m.files = *OpenModel(folder.path());
    auto backend = std::make_unique<CountingBackend>();
    backend->on_device = on_device;
    m.weights = *LoadWeights(m.files, *backend, nullptr);
    m.backend = std::move(backend);
    ASSERT_GE(m.weights.bytes, size_t{kVocab} * 576);
    const WeightRef& embed = m.weights.embed;
    EXPECT_EQ(embed.row_bytes, 576);
    std::vector<float> expected(kWidth);
    int64_t wrong = 0;
    for (int64_t row = 0; row < kVocab; ++row) {
      expected[5] = row % kMarkEvery == 0 ? static_cast<float>(row + 1) : 0;
      wrong += std::memcmp(embed.Row(row), expected.data(), kWidth * sizeof(float)) != 0;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(Values(m.weights.layers[0].down),
              FileValues(m, "model.layers.0.mlp.down_proj.weight"));
  }
}

// Somebody writes the file anew while it loads: a sentence, at whichever piece it happens.
TEST(Weights, AFileThatBecomesShorterIsAFailure) {
  for (const int64_t vocab : {int64_t{1} << 10, int64_t{1} << 18}) {  // on one thread, on several
    const TempFolder folder;
    WriteOddModel(folder, StorageType::kBF16, vocab, 320, false);
    const std::string path = folder / "model.safetensors";
    const uintmax_t begin = std::filesystem::file_size(path);
    const uintmax_t end = begin + static_cast<uintmax_t>(vocab) * 320 * 2;
    for (const uintmax_t size : {end - 1, end / 2, begin - 100, uintmax_t{100}, uintmax_t{0}}) {
      for (const bool on_device : {false, true}) {
        std::filesystem::resize_file(path, end);
        const Result<ModelFiles> files = OpenModel(folder.path());
        ASSERT_TRUE(files.ok()) << files.status().message();
        std::filesystem::resize_file(path, size);
        CountingBackend backend;
        backend.on_device = on_device;
        const Status status = LoadWeights(*files, backend, nullptr).status();
        EXPECT_EQ(status.code(), StatusCode::kFailed);
        EXPECT_NE(status.message().find(path + ": ends at byte "), std::string::npos)
            << status.message();
        WriteOddModel(folder, StorageType::kBF16, vocab, 320, false);
      }
    }
  }
}

TEST(Weights, ShippedModelIsTheSharedOneQuantised) {
  const std::string path = OMNIKV_SOURCE_DIR "/../shared/models/tiny";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there: it is too big to be in the repository";
  }
  const Loaded full = Load(path);
  const Loaded small = Load(OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf");
  const auto close = [](const WeightRef& a, const WeightRef& b) {
    EXPECT_EQ(a.format, DType::kBF16);
    EXPECT_EQ(b.format, DType::kQ8_0);
    const std::vector<float> x = Values(a);
    const std::vector<float> y = Values(b);
    ASSERT_EQ(x.size(), y.size());
    double worst = 0;  // error, in steps of the block
    for (size_t block = 0; block < x.size(); block += kQ8Block) {
      float largest = 0;
      for (size_t i = block; i < block + kQ8Block; ++i) largest = std::max(largest, std::abs(x[i]));
      for (size_t i = block; i < block + kQ8Block; ++i) {
        worst =
            std::max(worst, std::abs(static_cast<double>(x[i]) - y[i]) / (largest / 127 + 1e-9));
      }
    }
    EXPECT_LT(worst, 0.6);  // half a step, and the scale's own rounding to f16
  };
  close(full.weights.embed, small.weights.embed);
  for (const size_t i : {0, 7, 15}) {
    const LayerWeights& a = full.weights.layers[i];
    const LayerWeights& b = small.weights.layers[i];
    close(a.wq, b.wq);
    close(a.wk, b.wk);
    close(a.wv, b.wv);
    close(a.wo, b.wo);
    close(a.gate, b.gate);
    close(a.up, b.up);
    close(a.down, b.down);
    EXPECT_EQ(Values(a.attn_norm, 384), Values(b.attn_norm, 384));
  }
}

}  // namespace
}  // namespace omnikv::weights_test
