// Quest (Tang et al., ICML 2024): for each page of tokens the minimum and the maximum of each value
// of K are kept, which bound what a query's logits in the page can be. A KV head reads the pages
// with the highest bounds, anew at every step, and the last page; the first layers read everything.
// The paper has a list for each query head: here the heads of a group share one.
//
// score=mean_std (UNIQUE, arXiv 2605.27740; kekzl/imp): the values are taken to lie within one
// standard deviation of their mean, and all heads share one list. An outlier among the keys then
// widens a page's bounds by less than its distance.
#include "policy/block_choice.h"
#include "policy/first_layers.h"

namespace omnikv {
namespace {

class Quest : public BlockChoice {
 protected:
  Result<Rule> ReadRule(const PolicyContext& context, PolicySettings& settings) override {
    const auto page = static_cast<int32_t>(settings.Int("page"));
    OKV_ASSIGN_OR_RETURN(const int32_t pages, WholeBlocks("quest", "page", page, settings));
    const auto dense = static_cast<int32_t>(settings.Int("dense_layers"));
    OKV_RETURN_IF_ERROR(CheckFirstLayers("quest", "dense_layers", dense, context));
    const bool mean_std = settings.Text("score") == "mean_std";
    const std::string heads = settings.Text("heads");
    return Rule{.blocks =
                    {
                        .block = page,
                        .budget = pages,
                        .recent = 1,
                    },
                .dense_layers = dense,
                .kind = mean_std ? SummaryKind::kMeanStd : SummaryKind::kMinMax,
                .heads = heads == "sum"    ? HeadReduce::kSum
                         : heads == "mean" ? HeadReduce::kMean
                                           : HeadReduce::kMax,
                .per_kv_head = !mean_std};
  }
};

// Budgets in whole pages.
std::vector<SettingList> Covering(int64_t length) {
  const auto all = [&](int64_t page) { return std::to_string((length / page + 1) * page); };
  return {{{"budget", all(16)}, {"dense_layers", "0"}},
          {{"budget", all(128)}, {"page", "128"}},
          {{"budget", all(4)}, {"page", "4"}, {"heads", "sum"}},
          {{"budget", all(16)}, {"score", "mean_std"}}};
}

}  // namespace

PolicyInfo QuestPolicy() {
  const std::string budget = "tokens a layer reads, in whole pages, the last one included";
  const std::string dense = "first layers that read everything";
  return {
      .name = "quest",
      .summary = "each KV head reads the pages whose bounds of K promise most (Quest)",
      .facts = {.source = "Quest, Tang et al. 2024; score=mean_std: UNIQUE, arXiv 2605.27740",
                .chooses = "at every step per KV head, by bounds of K of pages of 16 tokens; "
                           "score=mean_std: once for all KV heads, by mean and deviation of K",
                .keeps = "all rows, on the host where the engine may place them there; the "
                         "bounds of each page, on the device",
                .reads = "b rows and N / 16 bounds; the first layers N rows",
                .holds = "N rows and N / 16 bounds",
                .loses =
                    "nothing (0 of 8 answers, by either score; at a quarter of what full reads "
                    "0 of 8 at 4K, 0 of 16 at 16K, and 3 of 8 at 4K by score=mean_std)"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "budget"},
      .settings = {{.key = "budget", .default_value = "1024", .help = budget, .min = 1, .max = 1e9},
                   {.key = "page", .default_value = "16", .help = "tokens", .min = 1, .max = 512},
                   {.key = "dense_layers", .default_value = "2", .help = dense, .max = 1e6},
                   {.key = "heads",
                    .type = SettingType::kChoice,
                    .default_value = "max",
                    .help = "how the bounds of a list's query heads become one",
                    .choices = {"max", "sum", "mean"}},
                   {.key = "score",
                    .type = SettingType::kChoice,
                    .default_value = "min_max",
                    .help =
                        "what bounds the keys of a page: minimum and maximum, with a list per KV "
                        "head; or mean and deviation, with one list for all heads",
                    .choices = {"min_max", "mean_std"}}},
      .make = [] { return std::make_unique<Quest>(); },
      .batches = true,
      .covering = Covering,
      .test_settings = {{{"budget", "24"}, {"page", "4"}, {"dense_layers", "0"}},
                        {{"budget", "50"}, {"heads", "sum"}},
                        {{"budget", "33"}, {"page", "8"}, {"heads", "mean"}, {"dense_layers", "1"}},
                        {{"budget", "64"}, {"page", "64"}},
                        {{"budget", "40"}, {"page", "8"}, {"score", "mean_std"}},
                        {{"budget", "48"}, {"heads", "sum"}, {"score", "mean_std"}}}};
}

}  // namespace omnikv
