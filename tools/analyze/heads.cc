// omnikv analyze heads: how much each KV head attends to far tokens, as gates of policy duo.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "analyze/analyze.h"
#include "analyze/texts.h"
#include "base/log.h"
#include "engine/head_gates.h"
#include "flags.h"
#include "output_file.h"
#include "policy/number_table.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct HeadsFlags {
  EngineFlags engine;
  HeadGatesOptions measure;
  TextFlags texts;
  std::string out;
  bool json = false;
};

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
  OKV_ASSIGN_OR_RETURN(const std::vector<std::string> given, ReadTexts(f.texts));
  std::optional<OutputFile> file;
  if (!f.out.empty()) {
    file.emplace("-o", f.out);
    OKV_RETURN_IF_ERROR(file->Open());
  }
  Texts texts;
  options.check = [&](const Engine& engine) -> Status {
    OKV_ASSIGN_OR_RETURN(texts, TextsOf(f.texts, given, engine));
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

void AddHeads(CLI::App& analyze, Command& command) {
  auto f = std::make_shared<HeadsFlags>();
  CLI::App* heads = analyze.add_subcommand(
      "heads",
      "how much each KV head attends to far tokens: gates for policy duo, a line per layer, a "
      "column per KV head. Without -f, on questions about facts in documents made up, with their "
      "answers");
  AddTextFlags(*heads, f->texts);
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
  heads->add_option("-o,--out", f->out,
                    "a file for the gates; duo finds MODEL.duo.tsv beside MODEL.gguf, and duo.tsv "
                    "in a model's folder");
  heads->add_flag("--json", f->json, "print one JSON object");
  AddEngineFlags(*heads, f->engine);
  heads->callback([&command, f] { command = [f] { return Heads(*f); }; });
}

void AddAnalyze(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("analyze", "what the attention of a model does");
  sub->require_subcommand(1);
  AddHeads(*sub, command);
  AddIndex(*sub, command);
}

}  // namespace omnikv::tools
