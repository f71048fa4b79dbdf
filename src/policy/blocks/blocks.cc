// Block-wise selection as in KTransformers' long-context framework (v0.1.3; its document
// "long_context_introduction"): a layer reads the first blocks, the last ones, and those between
// whose representatives have the highest similarity with the query, anew at every step. The
// similarity is equation 2 of InfLLM (Xiao et al. 2024): the sum of q·r over a block's
// representatives r and over query heads. Two differences from the published code: blocks of
// generated tokens have representatives, and a maximum of negative keys is negative.
#include <fmt/format.h>

#include "policy/block_choice.h"

namespace omnikv {
namespace {

class BlocksOfKeys : public BlockChoice {
 protected:
  Result<Rule> ReadRule(const PolicySettings& settings) const override {
    const auto block = static_cast<int32_t>(settings.Int("block"));
    OKV_ASSIGN_OR_RETURN(const int32_t budget, WholeBlocks("blocks", "block", block, settings));
    Rule rule{.block = block,
              .budget = budget,
              .sinks = static_cast<int32_t>((settings.Int("sinks") + block - 1) / block),
              .recent = static_cast<int32_t>(settings.Int("recent") / block + 1),
              .dense_layers = static_cast<int32_t>(settings.Int("dense_layers")),
              .layer_step = static_cast<int32_t>(settings.Int("layer_step")),
              .per_kv_head = settings.Text("lists") == "per_kv_head"};
    if (rule.sinks + rule.recent >= budget) {
      return InvalidArgument(fmt::format(
          "policy blocks: budget is {}, or {} blocks, of which sinks take {} and recent takes {} "
          "with the block in the making, expected at least one more",
          settings.Int("budget"), budget, rule.sinks, rule.recent));
    }
    const std::string kind = settings.Text("representative");
    const auto representatives = static_cast<int32_t>(settings.Int("representatives"));
    if (kind == "max") rule.kind = SummaryKind::kMax;
    if (kind == "quest") rule.kind = SummaryKind::kMinMax;
    // The mean of a block's representatives chooses as their sum does: each block has as many.
    if (kind == "fixed" && block % representatives == 0) rule.every = block / representatives;
    const int32_t expected = kind == "fixed" ? block / rule.every : 1;
    if (representatives == expected) return rule;
    return InvalidArgument(
        fmt::format("policy blocks: representatives is {}, expected {}", representatives,
                    kind == "fixed" ? fmt::format("a divisor of block, which is {}", block)
                                    : fmt::format("1 with representative={}", kind)));
  }
};

std::vector<SettingList> Covering(int64_t length) {
  const auto all = [&](int64_t block) { return std::to_string((length / block + 2) * block); };
  return {{{"block", "16"}, {"budget", all(16)}, {"sinks", "0"}, {"recent", "0"}},
          {{"block", "4"},
           {"budget", all(4)},
           {"sinks", "4"},
           {"recent", "0"},
           {"representative", "quest"},
           {"lists", "per_kv_head"},
           {"layer_step", "3"}}};
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
                   "(quest), or tokens at fixed distances",
           .choices = {"mean", "max", "quest", "fixed"}},
          {.key = "representatives",
           .default_value = "1",
           .help = "tokens that stand for a block with representative=fixed",
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
           .max = 1e6}};
}

}  // namespace

PolicyInfo BlocksPolicy() {
  return {
      .name = "blocks",
      .summary = "reads the blocks whose representatives are most like the query (KTransformers)",
      .facts = {.source = "KTransformers v0.1.3; similarity as in InfLLM, Xiao et al. 2024",
                .chooses = "at every step for all heads, or per KV head, by keys that stand for "
                           "blocks of 128 tokens",
                .keeps = "all rows and what stands for each block, on the device",
                .reads = "b rows and N / 128 representatives; the first layers N rows",
                .holds = "N rows and N / 128 representatives",
                .loses = "tokens whose block hides them in its mean (8 of 8 answers in blocks of "
                         "16, and in blocks of 128 at a quarter of what full reads; 0 with "
                         "representative=quest and lists=per_kv_head)"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "budget", .parts = {{"sinks", 0.05}, {"recent", 0.25}}},
      .settings = Settings(),
      .make = [] { return std::make_unique<BlocksOfKeys>(); },
      .batches = true,
      .covering = Covering,
      .test_settings = {{{"budget", "40"}, {"block", "8"}, {"sinks", "8"}, {"recent", "8"}},
                        {{"budget", "32"},
                         {"block", "4"},
                         {"sinks", "3"},
                         {"recent", "5"},
                         {"representative", "max"},
                         {"lists", "per_kv_head"},
                         {"dense_layers", "0"},
                         {"layer_step", "2"}},
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
                         {"layer_step", "9"}}}};
}

}  // namespace omnikv
