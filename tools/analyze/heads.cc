// omnikv analyze heads: how much each KV head attends to far tokens, as gates of policy duo.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "analyze/measure.h"
#include "engine/head_gates.h"
#include "policy/number_table.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct HeadsFlags {
  MeasureFlags measure;
  SinksAndRecent near;

  HeadGatesOptions options() const { return {.near = near, .window = measure.window}; }
};

nlohmann::ordered_json Json(const HeadsFlags& f, const Engine& engine, size_t n_texts,
                            const std::vector<double>& gates) {
  const auto n_kv_heads = static_cast<size_t>(CoreOf(engine).config.n_kv_heads);
  auto layers = nlohmann::ordered_json::array();
  for (size_t i = 0; i < gates.size(); ++i) {
    if (i % n_kv_heads == 0) layers.push_back(nlohmann::ordered_json::array());
    layers.back().push_back(gates[i]);
  }
  return {{"device", engine.device()}, {"texts", n_texts},           {"sinks", f.near.sinks},
          {"recent", f.near.recent},   {"window", f.measure.window}, {"gates", layers}};
}

Status Heads(const HeadsFlags& f) {
  std::vector<double> gates;
  const auto table = [&](const EngineCore& core) {
    return HeadNumbersText(gates, core.config.n_kv_heads);
  };
  return RunMeasure(
      f.measure,
      {.activity = "measuring heads",
       .check = [&](const EngineCore& core,
                    const auto& texts) { return CheckHeadGates(core, texts, f.options()); },
       .run = [&](EngineCore& core, const auto& texts, const MeasureProgress& progress) -> Status {
         OKV_ASSIGN_OR_RETURN(gates, MeasureHeadGates(core, texts, f.options(), progress));
         return {};
       },
       .file = table,
       .printed =
           [&](const Engine& engine, size_t n_texts) {
             return f.measure.json ? Dump(Json(f, engine, n_texts, gates)) + "\n"
                                   : table(CoreOf(engine));
           }});
}

}  // namespace

void AddAnalyzeHeads(CLI::App& analyze, Command& command) {
  auto f = std::make_shared<HeadsFlags>();
  CLI::App* heads = analyze.add_subcommand(
      "heads",
      "how much each KV head attends to far tokens: gates for policy duo, a line per layer, a "
      "column per KV head. Without -f, on questions about facts in documents made up, with their "
      "answers");
  heads->add_option("--sinks", f->near.sinks, "first tokens that are not far")
      ->check(CLI::Range(int64_t{0}, int64_t{1000000}))
      ->capture_default_str();
  heads
      ->add_option("--recent", f->near.recent,
                   "last tokens that are not far, from each token on back")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000000}))
      ->capture_default_str();
  AddMeasureFlags(*heads, f->measure, "of a document: several times those that are not far",
                  "a file for the gates; duo finds MODEL.duo.tsv beside MODEL.gguf, and duo.tsv "
                  "in a model's folder");
  heads->callback([&command, f] { command = [f] { return Heads(*f); }; });
}

}  // namespace omnikv::tools
