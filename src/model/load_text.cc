#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/gguf.h"
#include "model/hf_config.h"
#include "model/loader.h"

namespace omnikv {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTextFileBytes = size_t{1} << 30;  // tokenizer.json, chat_template.jinja

void SetTemplate(std::string source, const std::string& what, ModelText& out) {
  Result<ChatTemplate> parsed = ChatTemplate::Parse(std::move(source), what);
  if (parsed.ok()) {
    out.chat_template = std::move(*parsed);
  } else {
    out.chat_template_status = parsed.status();
  }
}

// A special token, written as a string or as an object that has it as its content.
std::string TokenText(const JsonFields& in, const char* key) {
  if (!in.Has(key)) return "";
  if (in.json().at(key).is_object()) return in.Object(key)->String("content", std::nullopt);
  return in.String(key, std::nullopt);
}

// The template of tokenizer_config.json: a string, or an array of named ones, of which that with
// the name "default" is meant for conversations.
std::string TemplateText(const JsonFields& in) {
  constexpr const char* kKey = "chat_template";
  if (!in.Has(kKey)) return "";
  const Json& value = in.json().at(kKey);
  if (!value.is_array()) return in.String(kKey, std::nullopt);
  std::string first;
  for (const Json& item : value) {
    const auto is_text = [&](const char* key) {
      return item.is_object() && item.contains(key) && item.at(key).is_string();
    };
    if (!is_text("name") || !is_text("template")) {
      in.Refuse(kKey, "a string, or objects with a name and a template", StatusCode::kCorrupt);
      return "";
    }
    if (item.at("name") == "default") return item.at("template");
    if (first.empty()) first = item.at("template");
  }
  return first;
}

Result<ModelText> LoadHfText(const std::string& folder) {
  namespace fs = std::filesystem;
  const auto path_of = [&](const char* name) { return (fs::path(folder) / name).string(); };
  const std::string tokenizer = path_of("tokenizer.json");
  if (!MayExist(tokenizer)) {
    return NotFound(fmt::format(
        "{}: no such file, expected it beside the weights{}", tokenizer,
        MayExist(path_of("tokenizer.model")) ? " (tokenizer.model alone is not read)" : ""));
  }
  ModelText out;
  OKV_ASSIGN_OR_RETURN(const std::string json_text, ReadWholeFile(tokenizer, kMaxTextFileBytes));
  OKV_ASSIGN_OR_RETURN(out.tokenizer, Tokenizer::FromJson(json_text, tokenizer));

  std::string source;
  std::string what = path_of("tokenizer_config.json");
  if (MayExist(what)) {
    OKV_ASSIGN_OR_RETURN(const Json json, ReadJsonFile(what));
    Status status;
    const JsonFields in(what, &json, &status);
    out.bos_token = TokenText(in, "bos_token");
    out.eos_token = TokenText(in, "eos_token");
    source = TemplateText(in);
    OKV_RETURN_IF_ERROR(status);
    what += ": chat_template";
  }
  // Where transformers writes it since 4.52; it goes before the other.
  if (const std::string jinja = path_of("chat_template.jinja"); MayExist(jinja)) {
    OKV_ASSIGN_OR_RETURN(source, ReadWholeFile(jinja, kMaxTextFileBytes));
    what = jinja;
  }
  if (!source.empty()) SetTemplate(std::move(source), what, out);
  return out;
}

// An absent key leaves `out` as it is.
template <typename T, typename Get>
Status Optionally(const GgufFile& file, const char* key, Get get, T* out) {
  if (!file.Has(key)) return Status();
  auto value = (file.*get)(key);
  if (!value.ok()) return value.status();
  *out = std::move(*value);
  return Status();
}

Status OptionalId(const GgufFile& file, const char* key, std::optional<int32_t>* out) {
  std::optional<int64_t> id;
  OKV_RETURN_IF_ERROR(Optionally(file, key, &GgufFile::GetInt, &id));
  if (!id || *id == -1) return Status();
  if (*id < 0 || *id > std::numeric_limits<int32_t>::max()) {
    return Corrupt(fmt::format("{}: {} is {}, expected a token", file.path(), key, *id));
  }
  *out = static_cast<int32_t>(*id);
  return Status();
}

Result<GgufVocab> ReadVocab(const GgufFile& file) {
  GgufVocab vocab;
  vocab.name = file.path();
  OKV_ASSIGN_OR_RETURN(vocab.model, [&]() -> Result<std::string> {
    OKV_ASSIGN_OR_RETURN(const std::string_view model, file.GetString("tokenizer.ggml.model"));
    return std::string(model);
  }());
  OKV_ASSIGN_OR_RETURN(vocab.tokens, file.StringArray("tokenizer.ggml.tokens"));
  std::string_view pre = "default";
  std::vector<int64_t> types;
  OKV_RETURN_IF_ERROR(Optionally(file, "tokenizer.ggml.pre", &GgufFile::GetString, &pre));
  OKV_RETURN_IF_ERROR(
      Optionally(file, "tokenizer.ggml.scores", &GgufFile::FloatArray, &vocab.scores));
  OKV_RETURN_IF_ERROR(Optionally(file, "tokenizer.ggml.token_type", &GgufFile::IntArray, &types));
  OKV_RETURN_IF_ERROR(
      Optionally(file, "tokenizer.ggml.merges", &GgufFile::StringArray, &vocab.merges));
  OKV_RETURN_IF_ERROR(OptionalId(file, "tokenizer.ggml.bos_token_id", &vocab.bos));
  OKV_RETURN_IF_ERROR(OptionalId(file, "tokenizer.ggml.eos_token_id", &vocab.eos));
  OKV_RETURN_IF_ERROR(OptionalId(file, "tokenizer.ggml.unknown_token_id", &vocab.unk));
  OKV_RETURN_IF_ERROR(
      Optionally(file, "tokenizer.ggml.add_bos_token", &GgufFile::GetBool, &vocab.add_bos));
  OKV_RETURN_IF_ERROR(
      Optionally(file, "tokenizer.ggml.add_eos_token", &GgufFile::GetBool, &vocab.add_eos));
  OKV_RETURN_IF_ERROR(Optionally(file, "tokenizer.ggml.add_space_prefix", &GgufFile::GetBool,
                                 &vocab.add_space_prefix));
  OKV_RETURN_IF_ERROR(Optionally(file, "tokenizer.ggml.remove_extra_whitespaces",
                                 &GgufFile::GetBool, &vocab.remove_extra_whitespaces));
  vocab.pre = pre;
  vocab.types.reserve(types.size());
  for (const int64_t type : types) {
    vocab.types.push_back(
        type >= 0 && type <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(type) : -1);
  }
  return vocab;
}

Result<ModelText> LoadGgufText(const GgufFile& file) {
  OKV_ASSIGN_OR_RETURN(const GgufVocab vocab, ReadVocab(file));
  ModelText out;
  OKV_ASSIGN_OR_RETURN(out.tokenizer, Tokenizer::FromGguf(vocab));
  if (vocab.bos) out.bos_token = out.tokenizer->IdToToken(*vocab.bos);
  if (vocab.eos) out.eos_token = out.tokenizer->IdToToken(*vocab.eos);
  std::string_view source;
  OKV_RETURN_IF_ERROR(Optionally(file, "tokenizer.chat_template", &GgufFile::GetString, &source));
  if (!source.empty()) {
    SetTemplate(std::string(source), file.path() + ": tokenizer.chat_template", out);
  }
  return out;
}

// What the template writes besides messages structures the conversation, whatever the tokenizer's
// file says of it: users must not be able to type it.
Result<ModelText> WithTokensHeldBack(Result<ModelText> text) {
  if (!text.ok() || !text->chat_template) return text;
  std::string written = text->chat_template->written();
  for (const std::string& token : {text->bos_token, text->eos_token}) written += '\0' + token;
  OKV_RETURN_IF_ERROR(text->tokenizer->HoldBack(written));
  return text;
}

}  // namespace

Result<ModelText> LoadText(const ModelFiles& files) {
  return WithTokensHeldBack(files.gguf ? LoadGgufText(static_cast<const GgufFile&>(*files.tensors))
                                       : LoadHfText(files.path));
}

Result<ModelText> LoadTextAlone(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const ModelKind kind, KindOfModel(path));
  if (kind == ModelKind::kFolder) return WithTokensHeldBack(LoadHfText(path));
  OKV_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(path, GgufParts::kMetadata));
  return WithTokensHeldBack(LoadGgufText(*file));
}

}  // namespace omnikv
