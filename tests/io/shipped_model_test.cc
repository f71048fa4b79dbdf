// The model that the project ships, and the Hugging Face folder it was made from where that lies
// beside the project: the same tensors, seen through two formats.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/gguf.h"
#include "io/safetensors.h"

namespace omnikv::shipped_model_test {
namespace {

constexpr const char* kGguf = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";
constexpr const char* kFolder = OMNIKV_SOURCE_DIR "/../shared/models/tiny";

std::vector<float> Values(const TensorSource& source, const TensorView& tensor) {
  std::vector<float> out(tensor.NumValues());
  EXPECT_TRUE(source.ReadValues(tensor, 0, out.size(), DType::kF32, out.data()).ok());
  return out;
}

TEST(ShippedModel, OpensWithItsVocabulary) {
  if (!std::filesystem::exists(kGguf)) GTEST_SKIP() << kGguf << " is missing";
  const auto opened = GgufFile::Open(kGguf);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const GgufFile& gguf = **opened;
  EXPECT_EQ(*gguf.GetString("general.architecture"), "llama");
  const uint64_t layers = *gguf.GetUint("llama.block_count");
  EXPECT_EQ(gguf.tensors().size(), 9 * layers + 2);
  const auto tokens = gguf.StringArray("tokenizer.ggml.tokens");
  ASSERT_TRUE(tokens.ok()) << tokens.status().message();
  EXPECT_EQ(tokens->size(), *gguf.GetUint("llama.vocab_size"));
  EXPECT_EQ(gguf.IntArray("tokenizer.ggml.token_type")->size(), tokens->size());
  EXPECT_THAT((*gguf.StringArray("tokenizer.ggml.merges"))[0], testing::HasSubstr(" "));
  const TensorView* embedding = gguf.Find("token_embd.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_THAT(embedding->shape,
              testing::ElementsAre(static_cast<int64_t>(tokens->size()),
                                   static_cast<int64_t>(*gguf.GetUint("llama.embedding_length"))));
}

std::string GgufName(const std::string& name) {
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  static constexpr const char* kRoles[][2] = {
      {"input_layernorm.weight", "attn_norm.weight"},
      {"self_attn.q_proj.weight", "attn_q.weight"},
      {"self_attn.k_proj.weight", "attn_k.weight"},
      {"self_attn.v_proj.weight", "attn_v.weight"},
      {"self_attn.o_proj.weight", "attn_output.weight"},
      {"post_attention_layernorm.weight", "ffn_norm.weight"},
      {"mlp.gate_proj.weight", "ffn_gate.weight"},
      {"mlp.up_proj.weight", "ffn_up.weight"},
      {"mlp.down_proj.weight", "ffn_down.weight"}};
  const std::string layer = name.substr(13, name.find('.', 13) - 13);  // "model.layers.<layer>."
  for (const auto& [hf, gguf] : kRoles) {
    if (name.ends_with(hf)) return fmt::format("blk.{}.{}", layer, gguf);
  }
  return "";
}

// Rows of q and k lie in another order in GGUF: row 2i + j of a head is row j * dim / 2 + i of it
// in the Hugging Face file.
std::vector<float> PermuteLikeGguf(const std::vector<float>& rows, size_t columns, size_t dim) {
  std::vector<float> out(rows.size());
  for (size_t r = 0; r < rows.size() / columns; ++r) {
    const size_t in_head = r % dim;
    const size_t from = r - in_head + in_head % 2 * (dim / 2) + in_head / 2;
    std::copy_n(rows.begin() + static_cast<ptrdiff_t>(from * columns), columns,
                out.begin() + static_cast<ptrdiff_t>(r * columns));
  }
  return out;
}

TEST(ShippedModel, IsTheQuantisedFolder) {
  if (!std::filesystem::exists(kGguf)) GTEST_SKIP() << kGguf << " is missing";
  if (!std::filesystem::exists(kFolder)) GTEST_SKIP() << kFolder << " is missing";
  const auto gguf = GgufFile::Open(kGguf);
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  const auto folder = SafetensorsModel::Open(kFolder);
  ASSERT_TRUE(folder.ok()) << folder.status().message();
  EXPECT_EQ((*folder)->tensors().size(), (*gguf)->tensors().size());
  const size_t head_dim = *(*gguf)->GetUint("llama.attention.key_length");
  float worst = 0;  // largest error in steps of its block's scale
  for (const TensorView& original : (*folder)->tensors()) {
    SCOPED_TRACE(original.name);
    const TensorView* stored = (*gguf)->Find(GgufName(original.name));
    ASSERT_NE(stored, nullptr);
    ASSERT_EQ(stored->shape, original.shape);
    EXPECT_EQ(original.type, StorageType::kBF16);
    std::vector<float> expected = Values(**folder, original);
    if (stored->name.find("attn_q") != std::string::npos ||
        stored->name.find("attn_k") != std::string::npos) {
      expected = PermuteLikeGguf(expected, static_cast<size_t>(original.shape.back()), head_dim);
    }
    const std::vector<float> values = Values(**gguf, *stored);
    if (stored->type == StorageType::kF32) {
      EXPECT_EQ(values, expected);  // bf16 is exact in f32
      continue;
    }
    ASSERT_EQ(stored->type, StorageType::kQ8_0);
    for (size_t block = 0; block < values.size(); block += kQ8Block) {
      float largest = 0;
      float error = 0;
      for (size_t i = block; i < block + kQ8Block; ++i) {
        largest = std::max(largest, std::abs(expected[i]));
        error = std::max(error, std::abs(values[i] - expected[i]));
      }
      if (largest > 0) worst = std::max(worst, error / (largest / 127));
    }
  }
  // Half a step for rounding to int8, and 127 half-units of the scale's own f16 rounding: 1/16
  // step.
  EXPECT_LE(worst, 0.5f + 1.0f / 16);
  EXPECT_GT(worst, 0.25f);
}

}  // namespace
}  // namespace omnikv::shipped_model_test
