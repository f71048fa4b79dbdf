// omnikv analyze index: how many of the tokens of the highest scores an index of K finds.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "analyze/analyze.h"
#include "analyze/texts.h"
#include "base/log.h"
#include "engine/index_recall.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct IndexFlags {
  EngineFlags engine;
  IndexRecallOptions measure;
  TextFlags texts;
  bool json = false;
};

std::string Table(const IndexFlags& f, const std::vector<double>& recalls) {
  const std::vector<RecallOf>& wanted = f.measure.wanted;
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

nlohmann::ordered_json Json(const IndexFlags& f, const Engine& engine, const Texts& texts,
                            const std::vector<double>& recalls) {
  auto of = nlohmann::ordered_json::array();
  for (size_t i = 0; i < f.measure.wanted.size(); ++i) {
    auto by_layer = nlohmann::ordered_json::array();
    for (size_t at = i; at < recalls.size(); at += f.measure.wanted.size()) {
      by_layer.push_back(recalls[at]);
    }
    of.push_back({{"best", f.measure.wanted[i].best},
                  {"rescored", f.measure.wanted[i].rescored},
                  {"recall", by_layer}});
  }
  size_t longest = 0;
  for (const auto& text : texts) longest = std::max(longest, text.size());
  return {{"device", engine.device()}, {"texts", texts.size()},  {"longest", longest},
          {"rows", f.measure.rows},    {"step", f.measure.step}, {"recalls", of}};
}

Status Index(IndexFlags& f) {
  OKV_ASSIGN_OR_RETURN(EngineOptions options, ToEngineOptions(f.engine));
  options.policy.name = "full";
  OKV_ASSIGN_OR_RETURN(const std::vector<std::string> given, ReadTexts(f.texts));
  Texts texts;
  options.check = [&](const Engine& engine) -> Status {
    OKV_ASSIGN_OR_RETURN(texts, TextsOf(f.texts, given, engine));
    return CheckIndexRecall(CoreOf(engine), texts, f.measure);
  };
  OKV_ASSIGN_OR_RETURN(const auto engine, LoadWithProgress(std::move(options), f.json));
  SetActivity("measuring an index");
  std::vector<double> recalls;
  {
    ProgressBar bar("measuring an index");
    OKV_ASSIGN_OR_RETURN(recalls, MeasureIndexRecall(CoreOf(*engine), texts, f.measure,
                                                     [&](double done) { bar.Update(done, 1); }));
  }
  fmt::print("{}", f.json ? Dump(Json(f, *engine, texts, recalls)) + "\n" : Table(f, recalls));
  return {};
}

}  // namespace

void AddIndex(CLI::App& analyze, Command& command) {
  auto f = std::make_shared<IndexFlags>();
  CLI::App* sub = analyze.add_subcommand(
      "index",
      "how many of the tokens of the highest scores the int4 index of omnikv dense=indexed finds, "
      "by layer: of the best 64 with exact scores for 256 tokens, and of the best 256 with 1024. "
      "Without -f, on questions about facts in documents made up, with their answers");
  AddTextFlags(*sub, f->texts);
  sub->add_option("--rows", f->measure.rows, "of the last tokens of a text, those that score")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_option("--step", f->measure.step, "tokens from one of those to the next")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_flag("--json", f->json, "print one JSON object");
  AddEngineFlags(*sub, f->engine);
  sub->callback([&command, f] { command = [f] { return Index(*f); }; });
}

}  // namespace omnikv::tools
