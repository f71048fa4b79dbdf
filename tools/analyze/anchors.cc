// omnikv analyze anchors: whose tokens serve the heads of later layers, as anchors and head map of
// policy kascade.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "analyze/measure.h"
#include "engine/anchors.h"
#include "report.h"

namespace omnikv::tools {
namespace {

struct AnchorsFlags {
  MeasureFlags measure;
  SimilarityOptions options;  // but for the window
  int32_t anchors = 5;        // as published for models of 32 layers

  SimilarityOptions similarity() const {
    SimilarityOptions all = options;
    all.window = measure.window;
    return all;
  }
};

Status Check(const AnchorsFlags& f, const EngineCore& core,
             std::span<const std::vector<int32_t>> texts) {
  OKV_RETURN_IF_ERROR(CheckLayerSimilarity(core, texts, f.similarity()));
  const int32_t layers = GlobalLayers(core.config);
  if (f.options.tile > f.measure.window) {
    return InvalidArgument(fmt::format("--tile is {}, expected at most the {} tokens of --window",
                                       f.options.tile, f.measure.window));
  }
  if (f.anchors <= layers) return {};
  return InvalidArgument(fmt::format(
      "--anchors is {}, expected at most the {} layers of the model that attend to all tokens",
      f.anchors, layers));
}

// A line per layer.
std::string Table(const LayerSimilarity& similarity, const AnchorTable& table) {
  std::string text = "layer  importance  anchor  similarity  head map\n";
  const auto heads = static_cast<size_t>(similarity.n_kv_heads);
  int32_t anchor = 0;
  for (int32_t layer = 0; layer < similarity.n_layers; ++layer) {
    if (std::binary_search(table.anchors.begin(), table.anchors.end(), layer)) anchor = layer;
    const auto begin = table.head_map.begin() + static_cast<ptrdiff_t>(heads) * layer;
    text += fmt::format("{:5}  {:10.4f}  {:6}  {:10.4f}  {}\n", layer,
                        similarity.importance[static_cast<size_t>(layer)], anchor,
                        similarity.Of(anchor, layer),
                        fmt::join(begin, begin + static_cast<ptrdiff_t>(heads), " "));
  }
  return text + fmt::format("anchors: {}\n", fmt::join(table.anchors, ","));
}

nlohmann::ordered_json Json(const AnchorsFlags& f, const Engine& engine, size_t n_texts,
                            const LayerSimilarity& similarity, const AnchorTable& table) {
  auto layers = nlohmann::ordered_json::array();
  const auto heads = static_cast<size_t>(similarity.n_kv_heads);
  for (int32_t j = 0; j < similarity.n_layers; ++j) {
    auto to = nlohmann::ordered_json::array();
    for (int32_t i = 0; i <= j; ++i) to.push_back(similarity.Of(i, j));
    const auto begin = table.head_map.begin() + static_cast<ptrdiff_t>(heads) * j;
    layers.push_back(
        {{"importance", similarity.importance[static_cast<size_t>(j)]},
         {"similarity", to},
         {"head_map", std::vector<int32_t>(begin, begin + static_cast<ptrdiff_t>(heads))}});
  }
  return {{"device", engine.device()}, {"texts", n_texts},         {"window", f.measure.window},
          {"tile", f.options.tile},    {"share", f.options.share}, {"least", f.options.least},
          {"anchors", table.anchors},  {"layers", layers}};
}

Status Anchors(const AnchorsFlags& f) {
  LayerSimilarity similarity(0, 0);
  AnchorTable table;
  return RunMeasure(
      f.measure,
      {.activity = "measuring layers",
       .check = [&](const EngineCore& core, const auto& texts) { return Check(f, core, texts); },
       .run = [&](EngineCore& core, const auto& texts, const MeasureProgress& progress) -> Status {
         OKV_ASSIGN_OR_RETURN(similarity,
                              MeasureLayerSimilarity(core, texts, f.similarity(), progress));
         table = ChooseAnchors(similarity, f.anchors);
         return {};
       },
       .file =
           [&](const EngineCore& core) { return AnchorTableText(table, core.config.n_kv_heads); },
       .printed =
           [&](const Engine& engine, size_t n_texts) {
             return f.measure.json ? Dump(Json(f, engine, n_texts, similarity, table)) + "\n"
                                   : Table(similarity, table);
           }});
}

}  // namespace

void AddAnalyzeAnchors(CLI::App& analyze, Command& command) {
  auto f = std::make_shared<AnchorsFlags>();
  CLI::App* anchors = analyze.add_subcommand(
      "anchors",
      "how well the tokens that the heads of a layer choose serve the heads of later ones: anchors "
      "and head map for policy kascade. Without -f, on questions about facts in documents made up, "
      "with their answers");
  anchors->add_option("--anchors", f->anchors, "layers that choose, 0 among them")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  anchors
      ->add_option("--tile", f->options.tile,
                   "tokens of the window that choose together, among those before them; 1: alone, "
                   "among all, as decode steps do")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  anchors->add_option("--share", f->options.share, "of the tokens, which a head chooses")
      ->check(CLI::Range(1e-6, 1.0))
      ->capture_default_str();
  anchors
      ->add_option("--least", f->options.least,
                   "tokens that a head chooses though the share is less")
      ->check(CLI::Range(1, 1000000000))
      ->capture_default_str();
  AddMeasureFlags(*anchors, f->measure, "of a document: several times those that a head chooses",
                  "a file for anchors and head map; kascade finds MODEL.kascade.tsv beside "
                  "MODEL.gguf, and kascade.tsv in a model's folder");
  anchors->callback([&command, f] { command = [f] { return Anchors(*f); }; });
}

}  // namespace omnikv::tools
