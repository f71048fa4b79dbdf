// omnikv analyze heads: how much each KV head attends to far tokens, as gates of policy duo.
#include <fmt/format.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/log.h"
#include "engine/head_gates.h"
#include "eval/needles.h"
#include "flags.h"
#include "output_file.h"
#include "policy/number_table.h"
#include "report.h"

namespace omnikv::tools {
namespace {

using Texts = std::vector<std::vector<int32_t>>;

struct HeadsFlags {
  EngineFlags engine;
  HeadGatesOptions measure;
  std::vector<std::string> files;
  int64_t tokens = 4096;  // of a document made up
  int docs = 2;
  uint64_t seed = 1000;  // other documents than those that `eval` makes by default
  std::string out;
  bool json = false;
};

// Documents with facts of several kinds, from far to near.
Result<Texts> MadeUpTexts(const HeadsFlags& f, const Engine& engine) {
  Texts texts;
  for (int d = 0; d < f.docs; ++d) {
    OKV_ASSIGN_OR_RETURN(
        const Document document,
        MakeDocumentFor(engine, {.seed = f.seed + static_cast<uint64_t>(d),
                                 .target_tokens = f.tokens,
                                 .count_tokens = nullptr,
                                 .depths = {0.1, 0.35, 0.6, 0.9},
                                 .kinds = {"passkey", "magic", "best", "person"}}));
    OKV_ASSIGN_OR_RETURN(Texts asked, AnsweredQuestions(engine, document));
    std::move(asked.begin(), asked.end(), std::back_inserter(texts));
  }
  return texts;
}

Result<Texts> TextsOf(const HeadsFlags& f, const std::vector<std::string>& given,
                      const Engine& engine) {
  if (given.empty()) return MadeUpTexts(f, engine);
  Texts texts;
  for (const std::string& text : given) {
    OKV_ASSIGN_OR_RETURN(texts.emplace_back(),
                         engine.Tokenize(text, /*add_special=*/true, /*parse_special=*/true));
  }
  return texts;
}

nlohmann::ordered_json Json(const HeadsFlags& f, const Engine& engine, const Texts& texts,
                            const std::vector<double>& gates) {
  const auto n_kv_heads = static_cast<size_t>(CoreOf(engine).config.n_kv_heads);
  auto layers = nlohmann::ordered_json::array();
  for (size_t i = 0; i < gates.size(); ++i) {
    if (i % n_kv_heads == 0) layers.push_back(nlohmann::ordered_json::array());
    layers.back().push_back(gates[i]);
  }
  return {{"device", engine.device()},     {"texts", texts.size()},
          {"sinks", f.measure.near.sinks}, {"recent", f.measure.near.recent},
          {"window", f.measure.window},    {"gates", layers}};
}

Status Heads(const HeadsFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  options.policy.name = "full";
  std::vector<std::string> given;
  for (const std::string& file : f.files) {
    OKV_ASSIGN_OR_RETURN(given.emplace_back(), ReadText("-f", file));
    if (given.back().empty()) {
      return InvalidArgument(fmt::format("-f {} is empty, expected a text", file));
    }
  }
  std::optional<OutputFile> file;
  if (!f.out.empty()) {
    file.emplace("-o", f.out);
    OKV_RETURN_IF_ERROR(file->Open());
  }
  Texts texts;
  options.check = [&](const Engine& engine) -> Status {
    OKV_ASSIGN_OR_RETURN(texts, TextsOf(f, given, engine));
    return CheckHeadGates(CoreOf(engine), texts, f.measure);
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  EngineCore& core = CoreOf(*engine);
  SetActivity("measuring heads");
  std::vector<double> gates;
  {
    ProgressBar bar("measuring heads");
    OKV_ASSIGN_OR_RETURN(
        gates, MeasureHeadGates(core, texts, f.measure, [&](double done) { bar.Update(done, 1); }));
  }
  const std::string table = HeadNumbersText(gates, core.config.n_kv_heads);
  if (file) {
    file->Write(table.data(), table.size());
    OKV_RETURN_IF_ERROR(file->Commit());
  }
  fmt::print("{}", f.json ? Dump(Json(f, *engine, texts, gates)) + "\n" : table);
  return {};
}

}  // namespace

void AddAnalyze(CLI::App& app, Command& command) {
  auto f = std::make_shared<HeadsFlags>();
  CLI::App* sub = app.add_subcommand("analyze", "what the attention of a model does");
  sub->require_subcommand(1);
  CLI::App* heads = sub->add_subcommand(
      "heads",
      "how much each KV head attends to far tokens: gates for policy duo, a line per layer, a "
      "column per KV head. Without -f, on questions about facts in documents made up, with their "
      "answers");
  AddRepeatable(*heads, "-f,--file", f->files,
                "a text to measure on, as it is, without a chat template; - is stdin; may be "
                "repeated");
  CLI::Option* files = heads->get_option("--file");
  heads
      ->add_option("--window", f->measure.window,
                   "the last tokens of a text, whose attention counts")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  heads->add_option("--sinks", f->measure.near.sinks, "first tokens that are not far")
      ->check(CLI::Range(int64_t{0}, int64_t{1000000}))
      ->capture_default_str();
  heads
      ->add_option("--recent", f->measure.near.recent,
                   "last tokens that are not far, from each token on back")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000000}))
      ->capture_default_str();
  heads->add_option("--docs", f->docs, "documents made up, four questions each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->excludes(files);
  heads->add_option("--tokens", f->tokens, "of a document: several times those that are not far")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str()
      ->excludes(files);
  heads->add_option("--seed", f->seed, "of the first document")
      ->capture_default_str()
      ->excludes(files);
  heads->add_option("-o,--out", f->out,
                    "a file for the gates; duo finds MODEL.duo.tsv beside MODEL.gguf, and duo.tsv "
                    "in a model's folder");
  heads->add_flag("--json", f->json, "print one JSON object");
  AddEngineFlags(*heads, f->engine);
  heads->callback([&command, f] { command = [f] { return Heads(*f); }; });
}

}  // namespace omnikv::tools
