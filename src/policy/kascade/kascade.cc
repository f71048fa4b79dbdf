// Kascade (Deshmukh et al. 2025, arXiv 2512.16391; microsoft/kascade, src/strategies): anchor
// layers choose, anew at every step, for each KV head the tokens of the highest weight, and read
// them; the layers up to the next anchor read the lists of its heads, by a map from head to head.
// Layer 0 is an anchor that reads everything. Prompts read everything too, or choose by tiles of
// their rows (tile_prompt.h).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "policy/anchor_table.h"
#include "policy/kascade/kascade_settings.h"
#include "policy/kascade/tile_prompt.h"
#include "policy/list_choice.h"
#include "policy/number_table.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class Kascade : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  int32_t Variant(const SeqLength& at) const override { return Shortcut(at) ? 0 : 1; }
  DeclaredReads Reads() const override { return {.gathers_prompts = prompt_.on()}; }
  void BeginStep(int32_t variant, const AttendArgs& step) override {
    sparse_step_ = variant == 1;
    if (sparse_step_) choice_.EnqueueRange(step.seqs, step.n_seqs);
  }
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (attend.score != ScoreKind::kNone) Choose(attend);
    if (step.layer == 0 && prompt_.Chooses(step, attend.n_rows)) prompt_.Choose(step, attend);
  }
  bool DensePrompts() const override { return !prompt_.on(); }
  int32_t PromptStepRows() const override { return prompt_.step_rows(); }

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return layer == 0 || Shortcut(at) ? at.tokens : Chosen(at.tokens);
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return layer > 0 && IsAnchor(layer) && !Shortcut(at) ? at.tokens : 0;
  }
  bool Budgeted(int32_t layer) const override { return layer > 0; }
  int64_t Budget(int64_t length) const override { return Chosen(length); }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  Status ReadTable(PolicySettings& settings);
  Status SetAnchors(PolicySettings& settings, const AnchorTable& table);
  Status Allocate();
  int64_t Chosen(int64_t tokens) const {
    return std::min<int64_t>(BudgetAt(rule_.budget, rule_.share, tokens, rule_.least), tokens);
  }
  // Attention to everything is as good as choosing all of it, and cheaper.
  bool Shortcut(const SeqLength& at) const {
    return !context_.force_indices && Chosen(at.tokens) == at.tokens;
  }
  bool IsAnchor(int32_t layer) const {
    return std::binary_search(anchors_.begin(), anchors_.end(), layer);
  }
  // Asks an attention to everything for the weights that Choose reads after it.
  void AskForWeights(AttendArgs& attend) const {
    attend.score = ScoreKind::kLogits;
    attend.scores = logits_.as<float>();
    attend.score_stride = stride_;
    attend.lse = lse_.as<float>();
  }
  void Choose(const AttendArgs& attend) const;
  void PlanPrompt(const LayerStep& step, AttendArgs& attend) const;
  const int32_t* ListOf(int32_t layer) const {
    return list_of_.as<int32_t>() + int64_t{layer} * context_.n_kv_heads;
  }

  PolicyContext context_;
  std::vector<int32_t> anchors_;   // ascending, from 0
  std::vector<int32_t> head_map_;  // [layers, KV heads]: whose list of its anchor a head reads
  RangeRule rule_;
  int32_t lists_ = 1;         // one, or one per KV head
  int64_t stride_ = 0;        // tokens that a row of scores has room for
  bool sparse_step_ = false;  // what is being recorded
  // What an anchor chooses stands here until the next one chooses.
  PolicyMemory memory_;
  Buffer logits_;   // f32 [max_seqs, n_heads, stride]
  Buffer lse_;      // f32 [max_seqs, n_heads]
  Buffer scores_;   // f32 [max_seqs, lists, stride]
  Buffer list_of_;  // int32 [layers, KV heads]: head_map_
  ListChoice choice_;
  TilePrompt prompt_;
};

// The published anchors of models of 32 and 36 layers, else those of the former at the same depths.
std::vector<int32_t> PublishedAnchors(int32_t n_layers) {
  if (n_layers == 36) return {0, 2, 7, 14, 23};
  std::vector<int32_t> anchors;
  for (const int32_t depth : {0, 2, 8, 13, 14}) {
    const int32_t layer = std::min((depth * n_layers + 16) / 32, n_layers - 1);
    if (anchors.empty() || layer > anchors.back()) anchors.push_back(layer);
  }
  return anchors;
}

Status Kascade::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  if (context_.n_layers == 0) {
    return Unsupported(
        "policy kascade: every layer of this model attends to a sliding window, expected "
        "global-attention layers to be anchors");
  }
  OKV_RETURN_IF_ERROR(ReadTable(settings));
  // More than what rounding may have taken, which would make a whole number one less.
  rule_ = {.share = std::min(1.0, settings.Float("share") * (1 + 1e-12)),
           .least = static_cast<int32_t>(settings.Int("least")),
           .budget = static_cast<int32_t>(context.max_context)};
  lists_ = settings.Text("lists") == "per_kv_head" ? context.n_kv_heads : 1;
  stride_ = (context.max_context + 15) / 16 * 16;
  OKV_RETURN_IF_ERROR(prompt_.Prepare(context, settings, rule_, lists_, memory_));
  return context.backend != nullptr ? Allocate() : Status();
}

// Anchors and map as they are set, else of the file beside the model, or of the file that is named.
Status Kascade::ReadTable(PolicySettings& settings) {
  const std::string map = settings.Text("head_map");
  const bool finds = settings.IsAuto("head_map");
  const bool names = !finds && map != "identity";
  std::optional<std::string> path;
  if (names) path = map;
  if (finds || (!names && settings.IsAuto("anchors"))) {
    path = FindBesideModel(context_.model_path, kTableName, settings, "head_map");
  }
  const int32_t heads = context_.n_kv_heads;
  AnchorTable table;
  if (path) {
    auto read = ReadAnchorTable(*path, context_.n_layers, heads);
    if (!read.ok()) return InvalidArgument("policy kascade: head_map: " + read.status().message());
    table = std::move(*read);
  }
  OKV_RETURN_IF_ERROR(SetAnchors(settings, table));
  const bool fits = table.anchors.empty() || table.anchors == anchors_;
  if (names && !fits) {
    return InvalidArgument(
        fmt::format("policy kascade: anchors is {}, expected those of head_map, {} of {}",
                    settings.Text("anchors"), fmt::join(table.anchors, ","), *path));
  }
  const bool mapped = path && fits && (finds || names);
  if (!mapped) settings.Resolve("head_map", "identity");
  head_map_.clear();
  for (int32_t i = 0; i < context_.n_layers * heads; ++i) {
    const bool own = !mapped || IsAnchor(i / heads);
    head_map_.push_back(own ? i % heads : table.head_map[static_cast<size_t>(i)]);
  }
  return {};
}

Status Kascade::SetAnchors(PolicySettings& settings, const AnchorTable& table) {
  if (settings.IsAuto("anchors")) {
    const std::vector<int32_t> found =
        table.anchors.empty() ? PublishedAnchors(context_.n_layers) : table.anchors;
    settings.Resolve("anchors", fmt::format("{}", fmt::join(found, ",")));
  }
  anchors_ = settings.IntList("anchors");
  if (anchors_.front() == 0 && anchors_.back() < context_.n_layers) return {};
  return InvalidArgument(
      fmt::format("policy kascade: anchors is {}, expected layers of the model's {} "
                  "global-attention layers, 0 among them",
                  settings.Text("anchors"), context_.n_layers));
}

Status Kascade::Allocate() {
  Backend& backend = *context_.backend;
  const auto seqs = int64_t{context_.max_seqs};
  OKV_RETURN_IF_ERROR(memory_.Take(backend, "weights of tokens",
                                   {{logits_, seqs * context_.n_heads * stride_},
                                    {lse_, seqs * context_.n_heads},
                                    {scores_, seqs * lists_ * stride_},
                                    {list_of_, static_cast<int64_t>(head_map_.size())}}));
  backend.Upload(list_of_.as(), head_map_.data(), head_map_.size() * sizeof(int32_t));
  return choice_.Prepare(backend, memory_, rule_, context_.max_seqs, lists_,
                         static_cast<int32_t>(Chosen(context_.max_context)), "chosen tokens");
}

void Kascade::Choose(const AttendArgs& attend) const {
  context_.backend->Enqueue(ScoreReduceArgs{.logits = attend.scores,
                                            .lse = attend.lse,
                                            .out = scores_.as<float>(),
                                            .rows = attend.rows,
                                            .stride = stride_,
                                            .n_heads = attend.n_heads,
                                            .lists = lists_,
                                            .n_rows = attend.n_rows,
                                            .heads = HeadReduce::kSum});
  choice_.EnqueueBest(scores_.as<float>(), stride_, attend.seqs, attend.n_seqs);
}

void Kascade::Plan(const LayerStep& step, AttendArgs& attend) {
  if (step.prefill) return PlanPrompt(step, attend);
  if (!sparse_step_) return;
  if (step.layer == 0) return AskForWeights(attend);
  if (IsAnchor(step.layer)) {  // a pass for the weights alone, then the chosen tokens
    AttendArgs weights = attend;
    weights.o = nullptr;
    AskForWeights(weights);
    context_.backend->Enqueue(weights);
    Choose(weights);
  }
  PlanSegment list = choice_.List();
  list.list_of = ListOf(step.layer);
  attend.plan = AttnPlan{};
  attend.plan.Add(list);
}

void Kascade::PlanPrompt(const LayerStep& step, AttendArgs& attend) const {
  if (!prompt_.Chooses(step, attend.n_rows)) return;
  if (step.layer == 0) return prompt_.AskForWeights(attend);
  const AttendArgs own = attend;
  const bool anchor = IsAnchor(step.layer);
  if (anchor) {  // an attention for the sums of the weights alone, then to the chosen tokens
    AttendArgs everything = attend;
    prompt_.AskForWeights(everything);
    context_.backend->Enqueue(everything);
    prompt_.Choose(step, everything);
  }
  prompt_.Gather(own, anchor || lists_ == 1 ? nullptr : ListOf(step.layer), attend);
}

}  // namespace

PolicyInfo KascadePolicy() {
  return {.name = "kascade",
          .summary =
              "anchor layers choose for each KV head what the layers up to the next one read "
              "(Kascade)",
          .facts = KascadeFacts(),
          .kind = PolicyKind::kSelects,
          .knob = {.key = "share", .with = {{"least", "1"}}},
          .settings = KascadeSettings(),
          .make = [] { return std::make_unique<Kascade>(); },
          .batches = true,
          .covering = KascadeCovering,
          .exempt = "",
          .test_settings = KascadeTestSettings(),
          .recommended = nullptr};
}

}  // namespace omnikv
