// Kascade (Deshmukh et al. 2025, arXiv 2512.16391; microsoft/kascade, src/strategies): anchor
// layers choose, anew at every step, for each KV head the tokens of the highest weight, and read
// them; the layers up to the next anchor read the lists of its heads, by a map from head to head.
// Layer 0 is an anchor that reads everything. This is its decoding (`decode_only`): prompts read
// everything.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "policy/list_choice.h"
#include "policy/number_table.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

constexpr const char* kMapName = "kascade.tsv";  // PathBesideModel

class Kascade : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  int32_t Variant(const SeqLength& at) const override { return Shortcut(at) ? 0 : 1; }
  void BeginStep(int32_t variant, const AttendArgs& step) override {
    sparse_step_ = variant == 1;
    if (sparse_step_) choice_.EnqueueRange(step.seqs, step.n_seqs);
  }
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    static_cast<void>(step);
    if (attend.score != ScoreKind::kNone) Choose(attend);
  }

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
  Status ReadAnchors(PolicySettings& settings);
  Status ReadMap(PolicySettings& settings);
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
  OKV_RETURN_IF_ERROR(ReadAnchors(settings));
  OKV_RETURN_IF_ERROR(ReadMap(settings));
  // More than what rounding may have taken, which would make a whole number one less.
  rule_ = {.share = std::min(1.0, settings.Float("share") * (1 + 1e-12)),
           .least = static_cast<int32_t>(settings.Int("least")),
           .budget = static_cast<int32_t>(context.max_context)};
  lists_ = settings.Text("lists") == "per_kv_head" ? context.n_kv_heads : 1;
  stride_ = (context.max_context + 15) / 16 * 16;
  return context.backend != nullptr ? Allocate() : Status();
}

Status Kascade::ReadAnchors(PolicySettings& settings) {
  if (context_.n_layers == 0) {
    return Unsupported(
        "policy kascade: every layer of this model attends to a sliding window, expected "
        "global-attention layers to be anchors");
  }
  if (settings.IsAuto("anchors")) {
    settings.Resolve("anchors",
                     fmt::format("{}", fmt::join(PublishedAnchors(context_.n_layers), ",")));
  }
  anchors_ = settings.IntList("anchors");
  if (anchors_.front() == 0 && anchors_.back() < context_.n_layers) return {};
  return InvalidArgument(
      fmt::format("policy kascade: anchors is {}, expected layers of the model's {} "
                  "global-attention layers, 0 among them",
                  settings.Text("anchors"), context_.n_layers));
}

Status Kascade::ReadMap(PolicySettings& settings) {
  const int32_t heads = context_.n_kv_heads;
  std::string path = settings.Text("head_map");
  if (settings.IsAuto("head_map")) {
    const auto beside = FindBesideModel(context_.model_path, kMapName, settings, "head_map");
    if (!beside) settings.Resolve("head_map", "identity");
    path = beside.value_or("identity");
  }
  head_map_.resize(static_cast<size_t>(context_.n_layers * heads));
  for (size_t i = 0; i < head_map_.size(); ++i) {
    head_map_[i] = static_cast<int32_t>(i) % heads;
  }
  if (path == "identity") return {};
  const auto read = ReadHeadNumbers(path, context_.n_layers, heads, 0, heads - 1);
  if (!read.ok()) return InvalidArgument("policy kascade: head_map: " + read.status().message());
  for (size_t i = 0; i < head_map_.size(); ++i) {
    if (IsAnchor(static_cast<int32_t>(i) / heads)) continue;
    head_map_[i] = static_cast<int32_t>((*read)[i]);
    if (head_map_[i] == (*read)[i]) continue;
    return InvalidArgument(
        fmt::format("policy kascade: head_map: {}: line {} has {}, expected "
                    "whole numbers",
                    path, static_cast<int32_t>(i) / heads + 1, (*read)[i]));
  }
  return {};
}

Status Kascade::Allocate() {
  Backend& backend = *context_.backend;
  const auto seqs = int64_t{context_.max_seqs};
  const auto room = [&](Buffer& buffer, int64_t n) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory_.Take(backend, n, "weights of tokens"));
    return {};
  };
  OKV_RETURN_IF_ERROR(room(logits_, seqs * context_.n_heads * stride_));
  OKV_RETURN_IF_ERROR(room(lse_, seqs * context_.n_heads));
  OKV_RETURN_IF_ERROR(room(scores_, seqs * lists_ * stride_));
  OKV_RETURN_IF_ERROR(room(list_of_, static_cast<int64_t>(head_map_.size())));
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
  if (step.prefill || !sparse_step_) return;
  if (step.layer == 0) return AskForWeights(attend);
  if (IsAnchor(step.layer)) {  // a pass for the weights alone, then the chosen tokens
    AttendArgs weights = attend;
    weights.o = nullptr;
    AskForWeights(weights);
    context_.backend->Enqueue(weights);
    Choose(weights);
  }
  PlanSegment list = choice_.List();
  list.list_of = list_of_.as<int32_t>() + int64_t{step.layer} * context_.n_kv_heads;
  attend.plan = AttnPlan{};
  attend.plan.Add(list);
}

}  // namespace

PolicyInfo KascadePolicy() {
  return {
      .name = "kascade",
      .summary =
          "anchor layers choose for each KV head what the layers up to the next one read "
          "(Kascade)",
      .facts = {.source = "Kascade, Deshmukh et al. 2025, its decoding",
                .chooses =
                    "at every step in anchor layers per KV head, by the weights of its query "
                    "heads, their sum",
                .keeps = "all rows, on the device",
                .reads = "layer 0 N rows, the others a share of them (0.1, 128 rows at least); "
                         "anchors K of N rows besides",
                .holds = "N rows",
                .loses = "tokens that no head of an anchor looks for (7 of 8 answers with the "
                         "published depths, 8 of 8 at a quarter of what full reads; 2 with "
                         "anchors=0,2,13; 0 of these with lists=one)"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "share", .with = {{"least", "1"}}},
      .settings = {{.key = "anchors",
                    .type = SettingType::kIntList,
                    .default_value = "auto",
                    .help = "layers that choose, 0 among them; auto: the published ones, or theirs "
                            "at the same depths",
                    .max = 100000,
                    .allow_auto = true},
                   {.key = "head_map",
                    .type = SettingType::kFile,
                    .default_value = "auto",
                    .help =
                        "for each KV head the head of its anchor whose tokens it reads, a line "
                        "per layer, between tabs; auto: MODEL.kascade.tsv beside MODEL.gguf, or "
                        "kascade.tsv in the model's folder, else identity: its own number",
                    .allow_auto = true},
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
                    .choices = {"per_kv_head", "one"}}},
      .make = [] { return std::make_unique<Kascade>(); },
      .batches = true,
      .covering =
          [](int64_t length) {
            return std::vector<SettingList>{{{"share", "1"}},
                                            {{"least", std::to_string(length)}, {"lists", "one"}}};
          },
      .exempt = "",
      .test_settings = {{{"anchors", "0,2"}, {"share", "0.2"}, {"least", "8"}},
                        {{"anchors", "0,1,4"}, {"least", "24"}, {"lists", "one"}}},
      .recommended = nullptr};
}

}  // namespace omnikv
