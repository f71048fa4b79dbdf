// omnikv tokenize: text to ids and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/core.h"
#include "flags.h"
#include "model/loader.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct TokenizeFlags {
  std::string model;
  std::string text, file, system;
  bool raw = false;
  bool decode = false;
};

// Reads a JSON array of ids, event by event: whatever else the text holds ends the reading where it
// stands, so that memory follows the ids alone.
class IdReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit IdReader(int32_t vocab) : vocab_(vocab) {}

  Result<std::vector<int32_t>> Read(const std::string& text) {
    try {
      nlohmann::json::sax_parse(text, this);
    } catch (const std::exception&) {  // the library's own limits; the reader throws nothing
      Refuse("a number that cannot be read");
    }
    if (complaint_.empty()) return std::move(ids_);
    return InvalidArgument(fmt::format("--decode: {}, expected a JSON array of ids from 0 to {}",
                                       complaint_, vocab_ - 1));
  }

  bool null() override { return Refuse("null"); }
  bool boolean(bool) override { return Refuse("a boolean"); }
  bool number_integer(number_integer_t value) override { return Take(value); }
  bool number_unsigned(number_unsigned_t value) override {
    constexpr auto kMost = static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max());
    return Take(static_cast<int64_t>(std::min(value, kMost)));
  }
  bool number_float(number_float_t, const string_t&) override {
    return Refuse("a number that is fractional or beyond 64 bits");
  }
  bool string(string_t&) override { return Refuse("a string"); }
  bool binary(binary_t&) override { return Refuse("binary data"); }
  bool start_object(size_t) override { return Refuse("an object"); }
  bool key(string_t&) override { return false; }
  bool end_object() override { return false; }
  bool start_array(size_t) override {
    if (open_) return Refuse("an array");
    return open_ = true;
  }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    if (complaint_.empty()) {
      complaint_ = open_ ? fmt::format("the text is not JSON from byte {} on", position) : kNoArray;
    }
    return false;
  }

 private:
  static constexpr const char* kNoArray = "the text is no JSON array";

  bool Take(int64_t id) {
    if (!open_ || id < 0 || id >= vocab_) return Refuse(fmt::format("{}", id));
    ids_.push_back(static_cast<int32_t>(id));
    return true;
  }
  bool Refuse(const std::string& what) {
    if (complaint_.empty()) {
      complaint_ = open_ ? what + " is no id" : kNoArray;
    }
    return false;
  }

  int32_t vocab_;
  bool open_ = false;
  std::vector<int32_t> ids_;
  std::string complaint_;
};

Status Tokenize(const TokenizeFlags& f) {
  OKV_ASSIGN_OR_RETURN(const std::string path, ModelPath(f.model));
  if (f.text.empty() == f.file.empty()) {
    return InvalidArgument("give the text either with -p TEXT or with -f FILE (- is stdin)");
  }
  std::string text = f.text;
  if (!f.file.empty()) {
    OKV_ASSIGN_OR_RETURN(text, ReadText("-f", f.file));
  }
  SetActivity("reading the tokenizer");
  OKV_ASSIGN_OR_RETURN(const ModelText model, LoadTextAlone(path));
  SetActivity(f.decode ? "reading ids" : "tokenizing the text");
  if (!f.decode) {
    std::vector<int32_t> ids;
    if (f.raw) {
      OKV_ASSIGN_OR_RETURN(ids, TextTokens(model, text, {}));
    } else {
      std::vector<ChatMessage> messages;
      if (!f.system.empty()) messages.push_back({"system", f.system});
      messages.push_back({"user", text});
      OKV_ASSIGN_OR_RETURN(ids, ChatTokens(model, path, messages));
    }
    fmt::print("[{}]\n", fmt::join(ids, ", "));
    return {};
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       IdReader(model.tokenizer->vocab_size()).Read(text));
  OKV_ASSIGN_OR_RETURN(const std::string decoded,
                       model.tokenizer->Decode(ids, /*skip_special=*/false));
  fmt::print("{}\n", decoded);
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
  AddModelFlag(*sub, f->model);
  sub->callback([&command, f] { command = [f] { return Tokenize(*f); }; });
}

}  // namespace omnikv::tools
