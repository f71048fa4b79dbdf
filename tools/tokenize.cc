// omnikv tokenize: text to ids and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "engine/core.h"
#include "flags.h"
#include "model/loader.h"

namespace omnikv::tools {
namespace {

struct TokenizeFlags {
  EngineFlags engine;
  std::string text, file, system;
  bool raw = false;
  bool decode = false;
};

Status Tokenize(const TokenizeFlags& f) {
  OKV_ASSIGN_OR_RETURN(const EngineOptions options, ToEngineOptions(f.engine));
  if (f.text.empty() == f.file.empty()) {
    return InvalidArgument("give the text either with -p TEXT or with -f FILE (- is stdin)");
  }
  std::string text = f.text;
  if (!f.file.empty()) {
    OKV_ASSIGN_OR_RETURN(text, ReadText("-f", f.file));
  }
  OKV_ASSIGN_OR_RETURN(const ModelFiles files, OpenModel(options.model));
  OKV_ASSIGN_OR_RETURN(const ModelText model, LoadText(files));
  if (!f.decode) {
    std::vector<int32_t> ids;
    if (f.raw) {
      OKV_ASSIGN_OR_RETURN(ids, TextTokens(model, text, {}));
    } else {
      std::vector<ChatMessage> messages;
      if (!f.system.empty()) messages.push_back({"system", f.system});
      messages.push_back({"user", text});
      OKV_ASSIGN_OR_RETURN(ids, ChatTokens(model, files.path, messages));
    }
    fmt::print("[{}]\n", fmt::join(ids, ", "));
    return {};
  }
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const std::string expected =
      fmt::format("expected a JSON array of ids from 0 to {}", model.tokenizer->vocab_size() - 1);
  if (!json.is_array()) return InvalidArgument("--decode: the text is no JSON array, " + expected);
  std::vector<int32_t> ids;
  for (const auto& id : json) {
    if (!id.is_number_integer() || id < 0 || id >= model.tokenizer->vocab_size()) {
      return InvalidArgument(fmt::format("--decode: {} is no id, {}", id.dump(), expected));
    }
    ids.push_back(id.get<int32_t>());
  }
  OKV_ASSIGN_OR_RETURN(const std::string decoded,
                       model.tokenizer->Decode(ids, /*skip_special=*/false));
  std::fwrite(decoded.data(), 1, decoded.size(), stdout);
  return {};
}

}  // namespace

void AddTokenize(CLI::App& app, Command& command) {
  auto f = std::make_shared<TokenizeFlags>();
  CLI::App* sub = app.add_subcommand(
      "tokenize", "the ids that run reads for a prompt, chat template included, as a JSON array");
  sub->add_option("-p,--prompt", f->text, "the text");
  sub->add_option("-f,--file", f->file, "a file that holds it; - is stdin");
  sub->add_option("--system", f->system, "a system message before it");
  sub->add_flag(
      "--raw", f->raw,
      "as run --raw: no chat template (a model may have none); special tokens are parsed");
  sub->add_flag("--decode", f->decode, "the text is a JSON array of ids: print what they say");
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Tokenize(*f); }; });
}

}  // namespace omnikv::tools
