// omnikv analyze index: how many of the tokens of the highest scores an index of K finds.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "analyze/measure.h"
#include "engine/index_recall.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct IndexFlags {
  MeasureFlags measure;
  IndexRecallOptions options;
};

std::string Table(const IndexFlags& f, const std::vector<double>& recalls) {
  const std::vector<RecallOf>& wanted = f.options.wanted;
  std::string table = "layer";
  for (const RecallOf& of : wanted) {
    table += fmt::format("  best {:4} of {:5}", of.best, of.rescored);
  }
  std::vector<double> sums(wanted.size(), 0.0);
  const size_t layers = recalls.size() / wanted.size();
  const auto line = [&](const std::string& name, const double* row) {
    table += fmt::format("\n{:>5}", name);
    for (size_t i = 0; i < wanted.size(); ++i) table += fmt::format("  {:18.4f}", row[i]);
  };
  for (size_t layer = 0; layer < layers; ++layer) {
    line(std::to_string(layer), &recalls[layer * wanted.size()]);
    for (size_t i = 0; i < wanted.size(); ++i) sums[i] += recalls[layer * wanted.size() + i];
  }
  for (double& sum : sums) sum /= static_cast<double>(layers);
  line("mean", sums.data());
  return table + "\n";
}

nlohmann::ordered_json Json(const IndexFlags& f, const Engine& engine, size_t n_texts,
                            size_t longest, const std::vector<double>& recalls) {
  auto of = nlohmann::ordered_json::array();
  for (size_t i = 0; i < f.options.wanted.size(); ++i) {
    auto by_layer = nlohmann::ordered_json::array();
    for (size_t at = i; at < recalls.size(); at += f.options.wanted.size()) {
      by_layer.push_back(recalls[at]);
    }
    of.push_back({{"best", f.options.wanted[i].best},
                  {"rescored", f.options.wanted[i].rescored},
                  {"recall", by_layer}});
  }
  return {{"device", engine.device()}, {"texts", n_texts},       {"longest", longest},
          {"rows", f.options.rows},    {"step", f.options.step}, {"recalls", of}};
}

Status Index(const IndexFlags& f) {
  std::vector<double> recalls;
  size_t longest = 0;  // tokens
  return RunMeasure(
      f.measure,
      {.activity = "measuring an index",
       .check = [&](const EngineCore& core,
                    const auto& texts) { return CheckIndexRecall(core, texts, f.options); },
       .run = [&](EngineCore& core, const auto& texts, const MeasureProgress& progress) -> Status {
         for (const auto& text : texts) longest = std::max(longest, text.size());
         OKV_ASSIGN_OR_RETURN(recalls, MeasureIndexRecall(core, texts, f.options, progress));
         return {};
       },
       .file = nullptr,  // it has no --out
       .printed =
           [&](const Engine& engine, size_t n_texts) {
             return f.measure.json ? Dump(Json(f, engine, n_texts, longest, recalls)) + "\n"
                                   : Table(f, recalls);
           }});
}

}  // namespace

void AddAnalyzeIndex(CLI::App& analyze, Command& command) {
  auto f = std::make_shared<IndexFlags>();
  CLI::App* sub = analyze.add_subcommand(
      "index",
      "how many of the tokens of the highest scores the int4 index of omnikv dense=indexed finds, "
      "by layer: of the best 64 with exact scores for 256 tokens, and of the best 256 with 1024. "
      "Without -f, on questions about facts in documents made up, with their answers");
  AddTextFlags(*sub, f->measure, "of a document");
  sub->add_option("--rows", f->options.rows, "of the last tokens of a text, those that score")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_option("--step", f->options.step, "tokens from one of those to the next")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_flag("--json", f->measure.json, "print one JSON object");
  AddEngineFlags(*sub, f->measure.engine);
  sub->callback([&command, f] { command = [f] { return Index(*f); }; });
}

}  // namespace omnikv::tools
