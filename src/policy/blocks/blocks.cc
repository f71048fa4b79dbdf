// Block-wise selection as in KTransformers' long-context framework (v0.1.3; its document
// "long_context_introduction"): a layer reads the first blocks, the last ones, and those between
// whose representatives have the highest similarity with the query, anew every `token_step` steps.
// The similarity is equation 2 of InfLLM (Xiao et al. 2024): the sum of q·r over a block's
// representatives r and over query heads. A preselection may keep blocks of a prompt from ever
// being read. Differences from the published code, which compat=kt takes back: blocks of generated
// tokens have representatives, several representatives are summed and not put together value by
// value, a maximum of negative keys is negative, and weights are causal.
#include "policy/blocks/key_blocks.h"

namespace omnikv {
namespace {

std::vector<SettingList> Covering(int64_t length) {
  const auto all = [&](int64_t block) { return std::to_string((length / block + 2) * block); };
  const auto plain = [&](int64_t block, SettingList more) {
    SettingList settings = {
        {"block", std::to_string(block)}, {"budget", all(block)}, {"sinks", "0"}, {"recent", "0"}};
    settings.insert(settings.end(), more.begin(), more.end());
    return settings;
  };
  return {plain(16, {{"token_step", "3"}}),
          {{"block", "4"},
           {"budget", all(4)},
           {"sinks", "4"},
           {"recent", "0"},
           {"representative", "quest"},
           {"lists", "per_kv_head"},
           {"layer_step", "3"}},
          plain(8, {{"representative", "dynamic"},
                    {"queries", "4"},
                    {"preselect", std::to_string(length)}}),
          plain(8, {{"compat", "kt"}})};
}

std::vector<SettingSpec> Settings() {
  return {{.key = "budget",
           .default_value = "16640",
           .help = "tokens a layer reads, in whole blocks, with sinks, recent and the last block",
           .min = 1,
           .max = 1e9},
          {.key = "block", .default_value = "128", .help = "tokens", .min = 1, .max = 512},
          {.key = "sinks",
           .default_value = "128",
           .help = "first tokens that are read whatever their scores, in whole blocks",
           .max = 1e9},
          {.key = "recent",
           .default_value = "4096",
           .help = "last tokens that are, in whole blocks, beside the block in the making",
           .max = 1e9},
          {.key = "representative",
           .type = SettingType::kChoice,
           .default_value = "mean",
           .help = "what stands for a block: mean or maximum of its keys, minimum and maximum "
                   "(quest), tokens at fixed distances, or those that the prompt's last queries "
                   "weigh most (dynamic)",
           .choices = {"mean", "max", "quest", "fixed", "dynamic"}},
          {.key = "representatives",
           .default_value = "1",
           .help = "tokens that stand for a block with representative=fixed or dynamic",
           .min = 1,
           .max = 512},
          {.key = "lists",
           .type = SettingType::kChoice,
           .default_value = "one",
           .help = "whether all heads read the same blocks, or each KV head its own",
           .choices = {"one", "per_kv_head"}},
          {.key = "dense_layers",
           .default_value = "2",
           .help = "first layers that read everything",
           .max = 1e6},
          {.key = "layer_step",
           .default_value = "1",
           .help = "layers that read the choice of the first of them",
           .min = 1,
           .max = 1e6},
          {.key = "token_step",
           .default_value = "1",
           .help = "steps that read one choice, from the first step after a prompt on",
           .min = 1,
           .max = 1e6},
          {.key = "preselect",
           .default_value = "off",
           .help = "blocks of a prompt, beside its first and last ones, that later steps choose "
                   "among, by the weights of its last queries; off: all",
           .max = 1e6,
           .choices = {"off"}},
          {.key = "widen",
           .default_value = "auto",
           .help = "tokens before and after a block whose weights count as the block's in a "
                   "preselection; auto: 0, and a quarter of a block with compat=kt",
           .max = 4096,
           .allow_auto = true},
          {.key = "queries",
           .default_value = "128",
           .help = "last tokens of a prompt whose queries weigh (preselect, dynamic)",
           .min = 1,
           .max = 4096},
          {.key = "compat",
           .type = SettingType::kChoice,
           .default_value = "none",
           .help = "kt: as the published code, where it differs from its document",
           .choices = {"none", "kt"}}};
}

std::vector<SettingList> TestSettings() {
  const auto small = [](SettingList more) {
    SettingList settings = {{"budget", "40"}, {"block", "8"}, {"sinks", "8"}, {"recent", "8"}};
    settings.insert(settings.end(), more.begin(), more.end());
    return settings;
  };
  return {small({}),
          {{"budget", "32"},
           {"block", "4"},
           {"sinks", "3"},
           {"recent", "5"},
           {"representative", "max"},
           {"lists", "per_kv_head"},
           {"dense_layers", "0"},
           {"layer_step", "2"},
           {"token_step", "3"}},
          {{"budget", "48"},
           {"block", "16"},
           {"sinks", "0"},
           {"recent", "0"},
           {"representative", "fixed"},
           {"representatives", "4"},
           {"dense_layers", "1"}},
          {{"budget", "50"},
           {"block", "8"},
           {"sinks", "16"},
           {"recent", "8"},
           {"representative", "quest"},
           {"layer_step", "9"}},
          small({{"token_step", "2"}}),
          small({{"representative", "dynamic"}, {"representatives", "2"}, {"queries", "16"}}),
          {{"budget", "24"},
           {"block", "2"},
           {"sinks", "2"},
           {"recent", "4"},
           {"representative", "dynamic"},
           {"queries", "3"},
           {"preselect", "14"},
           {"widen", "3"},
           {"token_step", "5"}},
          {{"budget", "40"},
           {"block", "1"},
           {"sinks", "0"},
           {"recent", "8"},
           {"lists", "per_kv_head"},
           {"preselect", "12"},
           {"queries", "8"}},
          small({{"compat", "kt"},
                 {"representative", "dynamic"},
                 {"representatives", "2"},
                 {"queries", "4"},
                 {"preselect", "5"},
                 {"token_step", "3"}}),
          small({{"compat", "kt"}, {"representative", "quest"}, {"lists", "per_kv_head"}})};
}

}  // namespace

PolicyInfo BlocksPolicy() {
  return {
      .name = "blocks",
      .summary = "reads the blocks whose representatives are most like the query (KTransformers)",
      .facts = {.source = "KTransformers v0.1.3, its document, or its code with compat=kt; "
                          "similarity as in InfLLM, Xiao et al. 2024",
                .chooses = "every token_step steps for all heads, or per KV head, by keys that "
                           "stand for blocks of 128 tokens",
                .keeps = "all rows, on the host where the engine may place them there; what "
                         "stands for each block, on the device",
                .reads = "b rows and N / 128 representatives; the first layers N rows",
                .holds =
                    "N rows and N / 128 representatives; of a layer on the host at most b rows "
                    "on the device in place of N",
                .loses = "tokens whose block hides them in its mean (8 of 8 answers in blocks of "
                         "16, and in blocks of 128 at a quarter of what full reads; 0 with "
                         "representative=quest and lists=per_kv_head)"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "budget", .parts = {{"sinks", 0.05}, {"recent", 0.25}}},
      .settings = Settings(),
      .make = [] { return std::make_unique<KeyBlocks>(); },
      .batches = true,
      .covering = Covering,
      .test_settings = TestSettings()};
}

}  // namespace omnikv
