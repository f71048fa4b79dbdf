#include "policy/kascade/kascade_settings.h"

namespace omnikv {

PolicyFacts KascadeFacts() {
  return {
      .source =
          "Kascade, Deshmukh et al. 2025; anchors published, or measured (omnikv analyze "
          "anchors)",
      .chooses =
          "at every step in anchor layers per KV head, by the weights of its query "
          "heads, their sum; with prefill=sparse by those of 32 rows of a prompt together",
      .keeps = "all rows, on the device",
      .reads =
          "layer 0 N rows, the others a share of them (0.1, 128 rows at least); "
          "anchors K of N rows besides",
      .holds = "N rows",
      .loses =
          "nothing with measured anchors (0 of 8 answers, with prefill=sparse too); tokens that "
          "no head of an anchor looks for (7 of 8 answers with the published depths)"};
}

std::vector<SettingSpec> KascadeSettings() {
  return {{.key = "anchors",
           .type = SettingType::kIntList,
           .default_value = "auto",
           .help = "layers that choose, 0 among them; auto: those of the file of head_map, "
                   "else the published ones, or theirs at the same depths",
           .max = 100000,
           .allow_auto = true},
          {.key = "head_map",
           .type = SettingType::kFile,
           .default_value = "auto",
           .help = "a file (omnikv analyze anchors): for each KV head the head of its anchor "
                   "whose tokens it reads; auto: MODEL.kascade.tsv beside MODEL.gguf, or "
                   "kascade.tsv in the model's folder, if of these anchors, else identity: "
                   "its own number",
           .allow_auto = true,
           .beside = kTableName},
          {.key = "share",
           .type = SettingType::kFloat,
           .default_value = "0.1",
           .help = "of the tokens in context, which a layer reads",
           .min = 1e-6,
           .max = 1},
          {.key = "least",
           .default_value = "128",
           .help = "tokens that a layer reads though the share is less",
           .min = 1,
           .max = 1e9},
          {.key = "lists",
           .type = SettingType::kChoice,
           .default_value = "per_kv_head",
           .help = "whether each KV head has tokens of its own, or all heads share them, "
                   "by the sum over all",
           .choices = {"per_kv_head", "one"}},
          {.key = "prefill",
           .type = SettingType::kChoice,
           .default_value = "dense",
           .help = "whether rows of a prompt read everything, or a share too",
           .choices = {"dense", "sparse"}},
          {.key = "tile",
           .default_value = "32",
           .help = "rows of a prompt that choose together, for prefill=sparse; they read "
                   "their own tokens besides",
           .min = 1,
           .max = 65536}};
}

std::vector<SettingList> KascadeCovering(int64_t length) {
  return {{{"share", "1"}},
          {{"least", std::to_string(length)}, {"lists", "one"}},
          {{"share", "1"}, {"prefill", "sparse"}, {"tile", "8"}}};
}

std::vector<SettingList> KascadeTestSettings() {
  return {
      {{"anchors", "0,2"}, {"share", "0.2"}, {"least", "8"}},
      {{"anchors", "0,1,4"}, {"least", "24"}, {"lists", "one"}},
      {{"anchors", "0,2"}, {"share", "0.2"}, {"least", "8"}, {"prefill", "sparse"}, {"tile", "8"}},
      {{"anchors", "0,3"},
       {"least", "12"},
       {"lists", "one"},
       {"prefill", "sparse"},
       {"tile", "5"}}};
}

}  // namespace omnikv
