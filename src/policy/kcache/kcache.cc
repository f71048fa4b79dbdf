// KCache (He and Wu 2024, arXiv 2404.18057): a layer weighs all tokens by its K, and each query
// head chooses the `budget` heaviest, of which alone V are read. Heads that share a KV head read
// the union of what they chose (docs/decisions/094), or each what it chose itself. The first layers
// read everything. V of the others may live away from the device.
#include <algorithm>
#include <numeric>
#include <vector>

#include "policy/first_layers.h"
#include "policy/kcache/union.h"
#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

class KCache : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    budget_ = static_cast<int32_t>(std::min(settings.Int("budget"), context.max_context));
    first_layers_ = static_cast<int32_t>(settings.Int("first_layers"));
    per_head_ = settings.Text("lists") == "per_head";
    renormalise_ = settings.Text("renormalise") == "on";
    OKV_RETURN_IF_ERROR(CheckFirstLayers("kcache", "first_layers", first_layers_, context));
    return context.backend != nullptr ? Allocate() : Status();
  }

  void BeginStep(int32_t, const AttendArgs& step) override {
    choice_.EnqueueRange(step.seqs, step.n_seqs);
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (step.prefill || !Budgeted(step.layer)) return;
    Backend& backend = *context_.backend;
    AttendArgs weigh = attend;  // reads no V
    weigh.o = nullptr;
    weigh.lse = lse_.as<float>();
    weigh.score = ScoreKind::kLogits;
    weigh.scores = logits_.as<float>();
    weigh.score_stride = stride_;
    backend.Enqueue(weigh);
    // The probabilities of a head have the order of its logits.
    choice_.EnqueueBest(weigh.scores, stride_, attend.seqs, attend.n_seqs, 0, nullptr,
                        /*by_row=*/true);
    attend.plan = AttnPlan{};
    attend.plan.Add(Unites() ? Union(step.layer, attend) : choice_.List());
    if (per_head_) attend.kv = attend.kv.EachQueryHead(Group());
    if (!renormalise_) attend.lse_in = weigh.lse;
    attend.logits = weigh.scores;
    attend.logits_stride = stride_;
  }

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override {
    return Budgeted(layer) ? std::min(Room(), at.tokens) : at.tokens;
  }
  int64_t HeadTokensRead(int32_t layer, const SeqLength& at, int32_t n_kv_heads) const override {
    return TokensRead(layer, at) * n_kv_heads * (Budgeted(layer) ? ListsOfKvHead() : 1);
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return Budgeted(layer) ? at.tokens : 0;
  }
  bool ReadsByScore() const override { return Unites(); }
  int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                             int32_t n_kv_heads) const override {
    if (!Unites() || !Budgeted(layer) || at.tokens <= at.prompt) {
      return HeadTokensRead(layer, at, n_kv_heads);
    }
    std::vector<int32_t> counts(static_cast<size_t>(n_kv_heads));
    context_.backend->Download(counts.data(), UnionCounts(layer) + int64_t{seq} * n_kv_heads,
                               counts.size() * sizeof(int32_t));
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  DeclaredReads Reads() const override {
    DeclaredReads reads;
    for (int32_t i = 0; i < context_.n_layers; ++i) reads.few_values.push_back(Budgeted(i));
    reads.max_tokens = Room();
    reads.value_lists = ListsOfKvHead();
    reads.gives_logits = true;
    return reads;
  }
  bool Budgeted(int32_t layer) const override { return layer >= first_layers_; }
  int64_t Budget(int64_t) const override { return Room(); }
  size_t Bytes() const override { return memory_.bytes(); }

 private:
  // Whether query heads share a KV head, and read the union of what they chose.
  bool Unites() const { return !per_head_ && Group() > 1; }
  int32_t Group() const { return context_.n_heads / context_.n_kv_heads; }
  int32_t ListsOfKvHead() const { return per_head_ ? Group() : 1; }
  // Tokens of a list, at most.
  int64_t Room() const {
    return std::min(int64_t{budget_} * (Unites() ? Group() : 1), context_.max_context);
  }
  int32_t* UnionCounts(int32_t layer) const {
    return union_count_.as<int32_t>() + int64_t{layer} * context_.max_seqs * context_.n_kv_heads;
  }

  PlanSegment Union(int32_t layer, const AttendArgs& attend) const {
    context_.backend->Enqueue(MakeCustomArgs(kUnion, UnionArgs{.seqs = attend.seqs,
                                                               .index = choice_.index(),
                                                               .count = choice_.count(),
                                                               .work = work_.as<int32_t>(),
                                                               .to_index = union_.as<int32_t>(),
                                                               .to_count = UnionCounts(layer),
                                                               .to_capacity = Room(),
                                                               .n_seqs = attend.n_seqs,
                                                               .n_kv_heads = context_.n_kv_heads,
                                                               .group = Group(),
                                                               .capacity = choice_.capacity()}));
    return {.kind = SegmentKind::kList,
            .lists = context_.n_kv_heads,
            .capacity = static_cast<int32_t>(Room()),
            .index = union_.as<int32_t>(),
            .count = UnionCounts(layer)};
  }

  Status Allocate() {
    Backend& backend = *context_.backend;
    stride_ = (context_.max_context + 15) / 16 * 16;
    const int64_t lists = int64_t{context_.max_seqs} * context_.n_kv_heads;
    const int64_t heads = int64_t{context_.max_seqs} * context_.n_heads;
    OKV_ASSIGN_OR_RETURN(lse_, memory_.Take(backend, heads, "sums"));
    OKV_ASSIGN_OR_RETURN(logits_, memory_.Take(backend, heads * stride_, "scores"));
    if (Unites()) {
      OKV_RETURN_IF_ERROR(memory_.Take(backend, "chosen tokens",
                                       {{work_, heads * budget_},
                                        {union_, lists * Room()},
                                        {union_count_, context_.n_layers * lists}}));
    }
    return choice_.Prepare(backend, memory_, {.budget = budget_}, context_.max_seqs,
                           context_.n_heads, budget_, "chosen tokens");
  }

  PolicyContext context_;
  int32_t budget_ = 0;  // tokens that a query head chooses
  int32_t first_layers_ = 0;
  bool per_head_ = false;
  bool renormalise_ = false;
  int64_t stride_ = 0;  // tokens of a row of scores
  PolicyMemory memory_;
  // S = max_seqs. What a layer chooses stands here until the next one chooses.
  Buffer lse_;         // f32 [S, n_heads]: of all tokens
  Buffer logits_;      // f32 [S, n_heads, stride]
  ListChoice choice_;  // a list per query head
  // Where lists are united: int32 [S, n_heads, budget], [S, n_kv_heads, Room()], and of each layer
  // [S, n_kv_heads].
  Buffer work_, union_, union_count_;
};

}  // namespace

PolicyInfo KcachePolicy() {
  return {
      .name = "kcache",
      .summary = "K of all tokens, V of those of the highest probability (KCache)",
      .facts =
          {.source = "KCache, He et al. 2024",
           .chooses = "at every step per query head, by its weights",
           .keeps =
               "K of all tokens on the device, V on the host where the engine may place them there",
           .reads = "K of N tokens, K and V of the union of b per query head of a group, or of b "
                    "per query head; the first layers N rows",
           .holds =
               "K of N tokens on the device, V of N tokens on the host but for the first layers",
           .loses = "nothing (0 of 8 answers); a step reads more than half of the bytes that it "
                    "reads under full"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "budget"},
      .settings = {{.key = "budget",
                    .type = SettingType::kInt,
                    .default_value = "128",
                    .help = "tokens whose V a query head chooses",
                    .min = 1,
                    .max = 1e9},
                   {.key = "first_layers",
                    .type = SettingType::kInt,
                    .default_value = "1",
                    .help = "layers that read V of everything",
                    .min = 0,
                    .max = 1e4},
                   {.key = "lists",
                    .type = SettingType::kChoice,
                    .default_value = "union",
                    .help = "what heads that share a KV head read: all that one of them chose, or "
                            "each what it chose itself",
                    .choices = {"union", "per_head"}},
                   {.key = "renormalise",
                    .type = SettingType::kChoice,
                    .default_value = "off",
                    .help = "whether the probabilities of what is read sum to 1",
                    .choices = {"off", "on"}}},
      .make = [] { return std::make_unique<KCache>(); },
      .batches = true,
      .covering =
          [](int64_t length) {  // not to the bit without `renormalise`: a sum is rounded then
            return std::vector<SettingList>{
                {{"budget", std::to_string(length)}, {"renormalise", "on"}}};
          },
      .exempt = "",
      .test_settings = {{{"budget", "32"}, {"renormalise", "on"}},
                        {{"budget", "5"}, {"first_layers", "0"}},
                        {{"budget", "9"}, {"lists", "per_head"}}},
      .recommended = nullptr};
}

}  // namespace omnikv
