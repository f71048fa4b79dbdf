// Opens a model: a Hugging Face folder (config.json, *.safetensors with or without an index,
// tokenizer.json, tokenizer_config.json, generation_config.json) or one GGUF file.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor.h"
#include "model/config.h"
#include "model/weights.h"
#include "omnikv/status.h"
#include "text/jinja/chat_template.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv {

// What a model's files say, before any weight is read.
struct ModelFiles {
  std::string path;
  ModelConfig config;
  std::unique_ptr<TensorSource> tensors;
  bool gguf = false;
};

// What a model's path names; kNotFound and kInvalidArgument when it cannot be a model.
enum class ModelKind { kFolder, kGguf };
Result<ModelKind> KindOfModel(const std::string& path);

// Reads and checks configuration and the directory of tensors; cheap (no weight is touched).
// kUnsupported names the family and lists those that run; kCorrupt / kNotFound name file and field.
Result<ModelFiles> OpenModel(const std::string& path);

// Names of the supported families, for messages.
std::vector<std::string> SupportedFamilies();

// Copies the weights into `backend`'s memory, in parallel where that helps. `progress` (may be
// null) is called from this thread with the bytes done and in all.
Result<Weights> LoadWeights(const ModelFiles& files, Backend& backend,
                            const std::function<void(size_t done, size_t total)>& progress);

// The format that all matrices will have; none where they differ.
std::optional<DType> FormatOfAll(const ModelFiles& files);

// What LoadWeights will not keep as it is stored, a sentence each: Weights::notes.
std::vector<std::string> WeightNotes(const ModelFiles& files);

// Bytes that LoadWeights will take, exactly.
Result<size_t> WeightBytes(const ModelFiles& files);

// The tokenizer, and the chat template where the files have one.
struct ModelText {
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  // Not ok: the files have a template that cannot be parsed. The model runs without it.
  Status chat_template_status;
  std::string bos_token, eos_token;  // as the template wants them
};
Result<ModelText> LoadText(const ModelFiles& files);

// The same of the model at `path`, of which nothing else is read: its family may be unknown, its
// weights of any format, or not there.
Result<ModelText> LoadTextAlone(const std::string& path);

}  // namespace omnikv
