// The tokenizer and the chat template beside a model's weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "model/loader.h"
#include "model_files.h"

namespace omnikv::text_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kGolden = OMNIKV_SOURCE_DIR "/tests/golden/models/llama";

// A golden's files beside a tokenizer of two letters.
class TextFolder {
 public:
  TextFolder() {
    std::filesystem::copy(kGolden, folder_.path());
    Write("tokenizer.json", R"({"version": "1.0", "added_tokens": [], "normalizer": null,
      "pre_tokenizer": null, "post_processor": null, "decoder": null,
      "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
  }
  TextFolder& Write(const std::string& name, const std::string& text) {
    WriteFile(folder_ / name, text);
    return *this;
  }
  Result<ModelText> Load() {
    const Result<ModelFiles> files = OpenModel(folder_.path());
    return files.ok() ? LoadText(*files) : files.status();
  }
  // What the template makes of nothing.
  std::string Rendered() {
    const Result<ModelText> text = Load();
    EXPECT_TRUE(text.ok()) << text.status().message();
    if (!text.ok() || !text->chat_template) return "no template";
    ChatInput input;
    input.messages = nlohmann::ordered_json::array();
    input.bos_token = text->bos_token;
    input.eos_token = text->eos_token;
    return *text->chat_template->RenderText(input);
  }
  std::filesystem::path path() const { return folder_.path(); }

 private:
  TempFolder folder_;
};

TEST(LoadText, ShippedModel) {
  const Result<ModelFiles> files = OpenModel(OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf");
  ASSERT_TRUE(files.ok()) << files.status().message();
  const Result<ModelText> text = LoadText(*files);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text->tokenizer->vocab_size(), files->config.vocab);
  EXPECT_EQ(text->bos_token, "<|begin_of_text|>");
  EXPECT_EQ(text->eos_token, "<|end_of_text|>");
  ASSERT_TRUE(text->chat_template.has_value());
  ChatInput input;
  input.messages = {{{"role", "user"}, {"content", "Hello"}}};
  input.add_generation_prompt = true;
  input.bos_token = text->bos_token;
  EXPECT_EQ(*text->chat_template->RenderText(input),
            "<|begin_of_text|><|user|>Hello<|end|><|assistant|>");
  const std::vector<int32_t> ids = *text->tokenizer->Encode("The key is 42.");
  EXPECT_EQ(*text->tokenizer->Decode(ids, true), "The key is 42.");
}

TEST(LoadText, FolderWithoutATemplate) {
  const Result<ModelText> text = TextFolder().Load();
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_THAT(*text->tokenizer->Encode("abb"), ElementsAre(2, 1));
  EXPECT_FALSE(text->chat_template.has_value());
  EXPECT_TRUE(text->chat_template_status.ok());
  EXPECT_EQ(text->bos_token, "");
}

TEST(LoadText, SpecialTokensAreStringsOrObjects) {
  TextFolder folder;
  folder.Write("tokenizer_config.json", R"({"bos_token": {"content": "<s>", "lstrip": false},
      "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"})");
  EXPECT_EQ(folder.Rendered(), "<s></s>");
}

TEST(LoadText, NamedTemplates) {
  TextFolder folder;
  folder.Write("tokenizer_config.json", R"({"bos_token": null, "chat_template": [
      {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]})");
  EXPECT_EQ(folder.Rendered(), "chat");
  folder.Write("tokenizer_config.json",
               R"({"chat_template": [{"name": "rag", "template": "documents"}]})");
  EXPECT_EQ(folder.Rendered(), "documents");
  // The file of its own is newer.
  folder.Write("chat_template.jinja", "file");
  EXPECT_EQ(folder.Rendered(), "file");
}

TEST(LoadText, WhatIsWrong) {
  TextFolder folder;
  folder.Write("tokenizer_config.json", R"({"chat_template": "{% if %}"})");
  const Result<ModelText> text = folder.Load();
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_FALSE(text->chat_template.has_value());
  EXPECT_THAT(text->chat_template_status.message(),
              HasSubstr("tokenizer_config.json: chat_template"));

  folder.Write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("chat_template is 5, expected a string"));
  folder.Write("tokenizer_config.json", R"({"chat_template": [{"name": "default"}]})");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("objects with a name and a template"));
  folder.Write("tokenizer_config.json", R"({"eos_token": 2})");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("eos_token is 2, expected a string"));
  folder.Write("tokenizer_config.json", R"({"eos_token": {"lstrip": true}})");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("has no eos_token.content"));
  folder.Write("tokenizer_config.json", "{");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("tokenizer_config.json: is not JSON"));

  std::filesystem::remove(folder.path() / "tokenizer.json");
  EXPECT_EQ(folder.Load().status().code(), StatusCode::kNotFound);
  folder.Write("tokenizer.model", "x");
  EXPECT_THAT(folder.Load().status().message(), HasSubstr("tokenizer.model alone is not read"));
}

// What the template writes is not for users to type, although the tokenizer does not say so.
TEST(LoadText, ControlTokensOfTheTemplateAreHeldBack) {
  TextFolder folder;
  folder.Write("tokenizer.json", R"({"version": "1.0", "added_tokens": [
      {"id": 3, "content": "<|a|>", "special": false, "normalized": false},
      {"id": 4, "content": "<|b|>", "special": false, "normalized": true},
      {"id": 5, "content": "</s>", "special": false, "normalized": false},
      {"id": 6, "content": "<|c|>", "special": false, "normalized": false}],
      "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
      "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
  folder.Write("tokenizer_config.json", R"({"eos_token": "</s>",
      "chat_template": "<|a|>{{ '<|' '' 'b|>' + messages[0].content + eos_token }}"})");
  const Result<ModelText> text = folder.Load();
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_THAT(
      *text->tokenizer->EncodeSpans({{"<|a|><|b|></s><|c|>", true}, {"<|a|><|b|>", false}}, false),
      ElementsAre(2, 6, 3, 4));
}

}  // namespace
}  // namespace omnikv::text_test
