#include "policy/omnikv/omnikv_settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

#include "policy/omnikv/presets.h"

namespace omnikv {

PolicyFacts OmnikvFacts() {
  return {.source = "OmniKV, Hao et al. 2025",
          .chooses =
              "at every step in filter layers, by the weights of the last query, highest of "
              "all heads; dense=indexed: in dense layers too, by an int4 copy of K and then by K",
          .keeps =
              "all rows; those of layers that read a choice may live on the host, with a "
              "working set on the device",
          .reads =
              "filter and dense layers N rows, the others b and the last generated ones; "
              "dense=indexed: all layers those, filter and dense layers besides the int4 K of N "
              "tokens and K of 4 b",
          .holds = "N rows; dense=indexed: and the int4 K of N tokens in filter and dense layers",
          .loses =
              "nothing (0 of 8 answers; its dense layers alone read a quarter of what full "
              "reads); tokens far back where no filter layer looks for them"};
}

std::vector<SettingSpec> OmnikvSettings() {
  return {
      {.key = "filters",
       .type = SettingType::kIntList,
       .default_value = "auto",
       .help = "layers that attend to everything and choose, from 0; auto: the model's preset",
       .min = 0,
       .max = 100000,
       .allow_auto = true},
      {.key = "budget",
       .type = SettingType::kInt,
       .default_value = "auto",
       .help = "tokens selected for a sparse layer to read; auto: what mem says, else the preset",
       .min = 1,
       .max = 1e9,
       .allow_auto = true},
      {.key = "mem",
       .type = SettingType::kFloat,
       .default_value = "0",
       .help = "instead of a budget, the fraction of all K/V that dense layers and selected "
               "tokens are; 0: none",
       .min = 0,
       .max = 1},
      {.key = "tail",
       .type = SettingType::kInt,
       .default_value = "256",
       .help = "generated tokens, the last ones, that are read besides the budget; all: the whole "
               "answer, as the published code does",
       .min = 1,
       .max = 1e9,
       .choices = {"all"}},
      {.key = "selector",
       .type = SettingType::kChoice,
       .default_value = "last",
       .help = "queries whose scores choose: the last one, or a window, weighted",
       .choices = {"last", "uniform", "exp"}},
      {.key = "window",
       .type = SettingType::kInt,
       .default_value = "16",
       .help = "queries in the window of selector uniform and exp",
       .min = 1,
       .max = 4096},
      {.key = "score",
       .type = SettingType::kChoice,
       .default_value = "softmax",
       .help = "softmax: the paper's equations 3-4; raw: its published code's logits",
       .choices = {"softmax", "raw"}},
      {.key = "lists",
       .type = SettingType::kChoice,
       .default_value = "one",
       .help = "whether all heads read the same tokens, by the highest score of any, or each KV "
               "head its own, by the sum of its query heads' scores (as Kascade)",
       .choices = {"one", "per_kv_head"}},
      {.key = "sinks",
       .type = SettingType::kInt,
       .default_value = "0",
       .help = "first tokens that are selected whatever their scores, in the budget",
       .min = 0,
       .max = 1e9},
      {.key = "top_p",
       .type = SettingType::kFloat,
       .default_value = "1",
       .help = "share of the weight of all candidates that the selected tokens hold together: the "
               "fewest that do, at most budget; 1: as many as budget says",
       .min = 0.01,
       .max = 1},
      {.key = "dense_after_filter",
       .type = SettingType::kBool,
       .default_value = "auto",
       .help = "the layer after a filter attends to everything; auto: the model's preset",
       .allow_auto = true},
      {.key = "dense_below",
       .type = SettingType::kInt,
       .default_value = "auto",
       .help = "tokens of context up to which every layer attends to everything; auto: as long as "
               "that is faster than to choose, by measurement",
       .min = 0,
       .max = 1e9,
       .allow_auto = true},
      {.key = "fetch",
       .type = SettingType::kChoice,
       .default_value = "misses",
       .help = "rows of layers on the host that come to working sets in a step: misses: those it "
               "reads and lacks; ahead: behind these also a few that scored high in past steps, by "
               "which sets then keep rows, too",
       .choices = {"misses", "ahead"}},
      {.key = "select_every_layer",
       .type = SettingType::kBool,
       .default_value = "0",
       .help = "every layer from the first filter on chooses for itself (the paper's ablation)"},
      {.key = "dense",
       .type = SettingType::kChoice,
       .default_value = "exact",
       .help = "how filters, and the other layers that read everything, score tokens in a decode "
               "step: exact: they attend to all; indexed: by an int4 copy of their K on the "
               "device, and then they read a choice of their own too",
       .choices = {"exact", "indexed"}},
      {.key = "rescore",
       .type = SettingType::kInt,
       .default_value = "4",
       .help = "for dense=indexed: tokens that get exact scores, per token of the budget",
       .min = 1,
       .max = 1e6},
      {.key = "prefill",
       .type = SettingType::kChoice,
       .default_value = "dense",
       .help = "what a prompt's rows read in layers that read a choice: dense: everything; sparse: "
               "their own chunk, and of the tokens before it those of the most weight from its "
               "queries (the paper's appendix D.10)",
       .choices = {"dense", "sparse"}},
      {.key = "r",
       .type = SettingType::kInt,
       .default_value = "2",
       .help = "tokens chosen per token of a chunk, for prefill=sparse",
       .min = 1,
       .max = 1e9,
       .choices = {"all"}},
      {.key = "chunk",
       .type = SettingType::kInt,
       .default_value = "auto",
       .help = "tokens of a chunk, for prefill=sparse; auto: 2048, or the rows of a prefill step "
               "where these are fewer",
       .min = 1,
       .max = 65536,
       .allow_auto = true},
  };
}

std::vector<SettingList> OmnikvCovering(int64_t length) {
  const std::string budget = std::to_string(length);
  return {{{"budget", budget}},
          {{"budget", budget}, {"dense", "indexed"}},
          {{"mem", "1"}, {"dense", "indexed"}, {"score", "raw"}, {"dense_after_filter", "0"}},
          {{"mem", "1"}},
          {{"budget", budget}, {"dense_after_filter", "0"}, {"score", "raw"}},
          {{"budget", budget}, {"selector", "exp"}},
          {{"mem", "1"}, {"selector", "uniform"}, {"dense_after_filter", "0"}},
          {{"budget", budget}, {"select_every_layer", "1"}},
          {{"budget", budget}, {"lists", "per_kv_head"}, {"sinks", "2"}},
          {{"budget", budget}, {"prefill", "sparse"}, {"r", "all"}},
          {{"budget", budget}, {"prefill", "sparse"}, {"r", "100"}, {"lists", "per_kv_head"}}};
}

std::vector<SettingList> OmnikvTestSettings() {
  std::vector<SettingList> all = {
      // First, for forks: what they make of K is an index.
      {{"budget", "24"}, {"tail", "4"}, {"dense", "indexed"}},
      {{"filters", "1,3"}, {"dense_after_filter", "0"}, {"mem", "0.6"}},
      {{"filters", "1,3"}, {"dense_after_filter", "1"}, {"budget", "24"}, {"tail", "3"}},
      {{"budget", "24"}, {"tail", "4"}, {"score", "raw"}},
      {{"budget", "24"}, {"tail", "4"}, {"fetch", "ahead"}},
      {{"budget", "24"},
       {"tail", "2"},
       {"selector", "uniform"},
       {"window", "5"},
       {"fetch", "ahead"}},
      {{"budget", "24"}, {"selector", "exp"}, {"score", "raw"}},
      {{"budget", "24"}, {"select_every_layer", "1"}, {"selector", "uniform"}},
      {{"mem", "0.4"}, {"filters", "1"}, {"select_every_layer", "1"}},
      {{"budget", "24"}, {"tail", "4"}, {"lists", "per_kv_head"}},
      {{"budget", "24"},
       {"lists", "per_kv_head"},
       {"selector", "exp"},
       {"score", "raw"},
       {"sinks", "3"}},
      {{"budget", "24"}, {"sinks", "4"}, {"score", "raw"}},
      {{"budget", "12"}, {"dense", "indexed"}, {"rescore", "1"}, {"lists", "per_kv_head"}},
      {{"budget", "24"},
       {"filters", "1,3"},
       {"dense_after_filter", "1"},
       {"dense", "indexed"},
       {"score", "raw"},
       {"sinks", "3"}},
      {{"mem", "0.3"}, {"dense", "indexed"}},
      {{"budget", "24"}, {"dense", "indexed"}, {"selector", "exp"}, {"window", "5"}},
      {{"budget", "16"}, {"dense", "indexed"}, {"select_every_layer", "1"}, {"rescore", "2"}},
      {{"budget", "40"}, {"dense", "indexed"}, {"top_p", "0.5"}, {"tail", "3"}},
      {{"budget", "40"}, {"tail", "3"}, {"top_p", "0.6"}, {"selector", "uniform"}, {"window", "5"}},
      {{"budget", "40"},
       {"tail", "2"},
       {"top_p", "0.4"},
       {"lists", "per_kv_head"},
       {"selector", "exp"},
       {"window", "4"},
       {"sinks", "3"}},
      {{"budget", "24"}, {"prefill", "sparse"}, {"r", "1"}},
      {{"budget", "24"},
       {"filters", "1,3"},
       {"prefill", "sparse"},
       {"r", "1"},
       {"lists", "per_kv_head"},
       {"sinks", "3"}}};
  for (SettingList& settings : all) settings.push_back({"dense_below", "0"});
  return all;
}

void ResolveOmnikvAuto(std::string_view model_name, int32_t n_layers, PolicySettings& settings) {
  const OmnikvPreset preset = OmnikvPresetFor(model_name, n_layers);
  if (settings.IsAuto("filters")) {
    settings.Resolve("filters", fmt::format("{}", fmt::join(preset.filters, ",")));
  }
  if (settings.IsAuto("dense_after_filter")) {
    settings.Resolve("dense_after_filter", preset.dense_after_filter ? "1" : "0");
  }
  if (settings.IsAuto("budget") && settings.Float("mem") == 0) {
    settings.Resolve("budget", std::to_string(preset.budget));
  }
}

}  // namespace omnikv
