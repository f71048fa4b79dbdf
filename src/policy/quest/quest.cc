// Quest (Tang et al., ICML 2024): for each page of tokens the minimum and the maximum of each value
// of K are kept, which bound what a query's logits in the page can be. A KV head reads the pages
// with the highest bounds, anew at every step, and the last page; the first layers read everything.
// The paper has a list for each query head: here the heads of a group share one.
//
// score=mean_std (UNIQUE, arXiv 2605.27740; kekzl/imp): the values are taken to lie within one
// standard deviation of their mean, and all heads share one list. An outlier among the keys then
// widens a page's bounds by less than its distance.
#include <fmt/format.h>

#include <algorithm>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class Quest : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  std::vector<StateSpec> States() const override;
  void MakeStates(int32_t layer, const AttendArgs& attend) override;
  void SetStates(const std::vector<StateView>& states) override { states_ = states; }
  int32_t Variant(const SeqLength& at) const override { return Shortcut(at) ? 0 : 1; }
  void BeginStep(int32_t variant, const AttendArgs& step) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    if (!Budgeted(layer) || Shortcut(at)) return at.tokens;
    return (std::min<int64_t>(Pages(at.tokens), rule_.budget) - 1) * page_ + InLastPage(at);
  }
  // Of the page that the step's token is in, whose bounds are made anew.
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return Budgeted(layer) ? InLastPage(at) : 0;
  }
  int64_t StateBytesRead(int32_t layer, const SeqLength& at) const override {
    return Budgeted(layer) && !Shortcut(at) ? Pages(at.tokens) * PageBytes() : 0;
  }
  bool Budgeted(int32_t layer) const override { return layer >= dense_layers_; }
  int64_t Budget(int64_t) const override { return int64_t{rule_.budget} * page_; }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  int64_t Pages(int64_t tokens) const { return (tokens + page_ - 1) / page_; }
  int64_t InLastPage(const SeqLength& at) const { return (at.tokens - 1) % page_ + 1; }
  int64_t PageBytes() const {  // of bounds
    return int64_t{4} * SummaryArrays(kind_) * context_.n_kv_heads * context_.dk;
  }
  // While everything fits, attention to everything is as good as choosing, and cheaper.
  bool Shortcut(const SeqLength& at) const {
    return !context_.force_indices && Pages(at.tokens) <= rule_.budget;
  }
  const StateView& Bounds(int32_t layer) const {
    return states_[static_cast<size_t>(layer - dense_layers_)];
  }
  void Choose(const StateView& bounds, const AttendArgs& attend) const;

  PolicyContext context_;
  int32_t page_ = 0;  // tokens
  int32_t dense_layers_ = 0;
  HeadReduce heads_ = HeadReduce::kMax;
  SummaryKind kind_ = SummaryKind::kMinMax;
  int32_t lists_ = 1;              // of a layer: one, or one per KV head
  RangeRule rule_;                 // in pages
  int32_t capacity_ = 0;           // pages that a list has room for
  int64_t stride_ = 0;             // pages that a row of scores has room for
  bool sparse_step_ = false;       // what is being recorded
  std::vector<StateView> states_;  // bounds of the layers from dense_layers_ on
  // What a layer chooses stands here until the next one chooses.
  PolicyMemory memory_;
  Buffer scores_;      // f32 [max_seqs, lists, stride]
  ListChoice choice_;  // lists of pages; and the last page
};

Status Quest::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  page_ = static_cast<int32_t>(settings.Int("page"));
  const int64_t budget = settings.Int("budget");
  // Powers of two, so that blocks of the bank are whole pages, or pages whole blocks.
  if ((page_ & (page_ - 1)) != 0 || budget < page_) {
    return InvalidArgument(fmt::format(
        "policy quest: page is {} and budget {}, expected a power of two, and a page at least",
        page_, budget));
  }
  dense_layers_ = static_cast<int32_t>(settings.Int("dense_layers"));
  if (settings.Text("heads") == "sum") heads_ = HeadReduce::kSum;
  if (settings.Text("heads") == "mean") heads_ = HeadReduce::kMean;
  const bool mean_std = settings.Text("score") == "mean_std";
  kind_ = mean_std ? SummaryKind::kMeanStd : SummaryKind::kMinMax;
  lists_ = mean_std ? 1 : context.n_kv_heads;
  rule_ = {.budget = static_cast<int32_t>(budget / page_), .min_recent = 1, .unit = page_};
  const int64_t most = Pages(context.max_context);
  capacity_ = static_cast<int32_t>(std::clamp<int64_t>(rule_.budget - 1, 1, most));
  if (context.backend == nullptr) return {};
  stride_ = (most + 15) / 16 * 16;
  const int64_t lists = int64_t{context.max_seqs} * lists_;
  OKV_ASSIGN_OR_RETURN(scores_, memory_.Take(*context.backend, lists * stride_, "chosen pages"));
  return choice_.Prepare(*context.backend, memory_, rule_, context.max_seqs, lists_, capacity_,
                         "chosen pages");
}

std::vector<StateSpec> Quest::States() const {
  // Names that differ: sessions with other scores must not share the memory.
  const char* name = kind_ == SummaryKind::kMeanStd ? "mean and deviation of K" : "bounds of K";
  std::vector<StateSpec> states;
  for (int32_t layer = dense_layers_; layer < context_.n_layers; ++layer)
    states.push_back({layer, page_, PageBytes(), name});
  return states;
}

void Quest::BeginStep(int32_t variant, const AttendArgs& step) {
  sparse_step_ = variant == 1;
  if (sparse_step_) choice_.EnqueueRange(step.seqs, step.n_seqs);
}

void Quest::MakeStates(int32_t layer, const AttendArgs& attend) {
  if (!Budgeted(layer)) return;
  context_.backend->Enqueue(BlockSummaryArgs{.kv = attend.kv,
                                             .seqs = attend.seqs,
                                             .out = Bounds(layer),
                                             .n_rows = attend.n_rows,
                                             .n_seqs = attend.n_seqs,
                                             .unit = page_,
                                             .kind = kind_});
}

void Quest::Plan(const LayerStep& step, AttendArgs& attend) {
  MakeStates(step.layer, attend);
  if (!Budgeted(step.layer) || step.prefill || !sparse_step_) return;
  Choose(Bounds(step.layer), attend);
  attend.plan = AttnPlan{};
  attend.plan.Add(choice_.List());
  attend.plan.Add(choice_.Range());
}

void Quest::Choose(const StateView& bounds, const AttendArgs& attend) const {
  context_.backend->Enqueue(BlockScoreArgs{.q = attend.q,
                                           .summaries = bounds,
                                           .seqs = attend.seqs,
                                           .out = scores_.as<float>(),
                                           .stride = stride_,
                                           .n_seqs = attend.n_seqs,
                                           .n_heads = attend.n_heads,
                                           .n_kv_heads = context_.n_kv_heads,
                                           .dk = context_.dk,
                                           .lists = lists_,
                                           .unit = page_,
                                           .kind = kind_,
                                           .heads = heads_});
  choice_.EnqueueBest(scores_.as<float>(), stride_, attend.seqs, attend.n_seqs);
}

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
                .keeps = "all rows and the bounds of each page, on the device",
                .reads = "b rows and N / 16 bounds; the first layers N rows",
                .holds = "N rows and N / 16 bounds",
                .loses = "nothing (0 of 8 answers, by either score)"},
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
