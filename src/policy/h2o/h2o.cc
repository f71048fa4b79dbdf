// H2O (Zhang et al. 2023, the published h2o_hf/utils_real_drop): each KV head keeps the last
// `recent` tokens and, of those before them, the ones with the highest sums of weights that all
// queries so far gave them. mode=full: after a prompt, then every step gives up the token of the
// lowest sum. mode=chunked: after each chunk of a prompt too, so that no more is ever held (H2O+ of
// OmniKV's comparison). mode=observed (kvpress, ObservedAttentionPress): once after the prompt, by
// the mean weight from the queries that saw a token.
#include <fmt/format.h>

#include <algorithm>

#include "policy/list_choice.h"
#include "policy/policy.h"

namespace omnikv {
namespace {

// The sums of so many steps are kept: those of the steps that can be undone, and of the one before.
constexpr int32_t kRing = kEvictionLog + 1;

class H2o : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    observed_ = settings.Text("mode") == "observed";
    const int64_t budget = settings.Int("budget");
    if (settings.IsAuto("recent")) {
      settings.Resolve("recent", std::to_string(observed_ ? 0 : budget / 2));
    }
    const int64_t recent = settings.Int("recent");
    if (recent >= budget) {
      return InvalidArgument(fmt::format(
          "policy h2o: recent is {}, expected fewer than the budget of {}", recent, budget));
    }
    budget_ = static_cast<int32_t>(std::min(budget, context.max_context));
    recent_ = static_cast<int32_t>(std::min(recent, context.max_context));
    room_ = settings.Int("room");
    chunk_ = settings.Text("mode") == "chunked" ? settings.Int("chunk") : 0;
    return context.backend != nullptr ? Allocate() : Status();
  }

  void Plan(const LayerStep& step, AttendArgs& attend) override {
    if (Weighs(step)) attend.lse = lse_.as<float>();
  }

  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (!Weighs(step)) return;
    const ScoreRing sums = Sums(step);
    ScoreArgs score{.q = attend.q,
                    .lse = attend.lse,
                    .kv = attend.kv,
                    .seqs = attend.seqs,
                    .steps = step.steps,
                    .out = sums.scores,
                    .stride = sums.stride,
                    .ring = sums.size,
                    .n_rows = attend.n_rows,
                    .n_seqs = attend.n_seqs,
                    .n_heads = attend.n_heads,
                    .lists = context_.n_kv_heads,
                    .heads = HeadReduce::kMean,
                    .queries = QueryReduce::kSum,
                    .scale = attend.scale,
                    .softcap = attend.softcap,
                    .accumulate = true};
    if (step.prefill) {
      score.seqs += step.seq;
      score.steps += step.seq;
      score.n_seqs = 1;
    }
    context_.backend->Enqueue(score);
    if (!step.chooses) return;
    context_.backend->Enqueue(
        AgedScoresArgs{.in = sums,
                       .kv = attend.kv,
                       .seqs = score.seqs,
                       .steps = score.steps,
                       .out = aged_.as<float>(),
                       .stride = AgedStride(),
                       .lists = context_.n_kv_heads,
                       .n_seqs = 1,
                       .recent = recent_,
                       .rule = observed_ ? AgeRule::kPerQuery : AgeRule::kNothing});
    choice_.EnqueueRange(score.seqs, 1);
    choice_.EnqueueBest(aged_.as<float>(), AgedStride(), score.seqs, 1);
  }

  Keeps Kept() const override {
    return {.rows = budget_,
            .first_prompt = observed_,
            .every_step = !observed_,
            .room = room_,
            .chunk = chunk_,
            .lists = context_.n_kv_heads,
            .sums = true};
  }
  std::optional<Retained> Retains(const LayerStep& step) const override {
    if (!step.prefill && !observed_) return Retained{.scores = Sums(step), .recent = recent_};
    if (!step.chooses) return std::nullopt;
    Retained kept = choice_.Kept(step.seq);
    if (observed_) return kept;
    kept.scores = Sums(step);
    kept.to_scores = Ring(step.layer, step.seq);
    return kept;
  }

  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    const int64_t held = at.tokens - at.gone;
    return observed_ ? held : std::min<int64_t>(held, budget_ + 1);
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return budget_; }
  // The step's own token; or what came after the prompt.
  int64_t Besides(const SeqLength& at) const override {
    return observed_ ? std::max<int64_t>(0, at.tokens - at.gone - budget_) : 1;
  }
  int64_t TokensScored(int32_t layer, const SeqLength& at) const override {
    return observed_ ? 0 : TokensRead(layer, at);
  }
  size_t Bytes() const override { return memory_.bytes(); }

  void CopyState(const Policy& from) override {
    if (ring_.size() == 0) return;
    context_.backend->Upload(ring_.as(), static_cast<const H2o&>(from).ring_.as(), ring_.size());
  }
  // The sums of the last step, of as many rows as a sequence of that length can hold.
  std::string SaveState(int32_t seq, int64_t length) const override {
    std::string state;
    ForSums(seq, length, [&](const float* sums) {
      std::string of(static_cast<size_t>(std::min(length, stride_)) * sizeof(float), '\0');
      context_.backend->Download(of.data(), sums, of.size());
      state += of;
    });
    return state;
  }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    const size_t n_lists = ring_.size() == 0 ? 0 : Lists() * static_cast<size_t>(context_.n_layers);
    if (n_lists == 0) return state.empty();
    const size_t bytes = state.size() / n_lists;
    if (bytes * n_lists != state.size() || bytes % sizeof(float) != 0) return false;
    if (bytes > static_cast<size_t>(length) * sizeof(float)) return false;
    // Rows that this instance has no room for are none that a sequence holds.
    const size_t room = static_cast<size_t>(stride_) * sizeof(float);
    ForSums(seq, length, [&](float* sums) {
      context_.backend->Upload(sums, state.data(), std::min(bytes, room));
      state.remove_prefix(bytes);
    });
    return true;
  }

 private:
  size_t Lists() const { return static_cast<size_t>(context_.n_kv_heads); }
  int64_t AgedStride() const {
    return chunk_ > 0 ? stride_ : std::max(stride_, context_.max_context);
  }
  // Whether the rows of this step count in the sums.
  bool Weighs(const LayerStep& step) const {
    return step.prefill ? step.chooses_after : !observed_;
  }
  // Those of a layer, from sequence `seq` on.
  ScoreRing Ring(int32_t layer, int32_t seq) const {
    const int64_t of_seq = kRing * context_.n_kv_heads * stride_;
    return {ring_.as<float>() + (int64_t{layer} * context_.max_seqs + seq) * of_seq, stride_,
            kRing};
  }
  // Those that a step adds to, of a prompt from its sequence on.
  ScoreRing Sums(const LayerStep& step) const {
    const bool whole = step.prefill && step.by_layer && whole_.size() > 0;
    return whole ? ScoreRing{whole_.as<float>(), context_.max_context}
                 : Ring(step.layer, step.prefill ? step.seq : 0);
  }
  // Calls visit(sums) for each list of a sequence after the step that left `length` tokens.
  template <typename Visit>
  void ForSums(int32_t seq, int64_t length, const Visit& visit) const {
    for (int32_t layer = 0; layer < context_.n_layers && ring_.size() > 0; ++layer) {
      for (int32_t l = 0; l < context_.n_kv_heads; ++l) {
        visit(Ring(layer, seq).At(0, l, context_.n_kv_heads, static_cast<int32_t>(length)));
      }
    }
  }

  Status Allocate() {
    Backend& backend = *context_.backend;
    const int64_t lists = context_.n_kv_heads;
    // Prompts that do not pass layer by layer need the sums of all tokens that they hold in all
    // layers.
    stride_ = context_.max_context;
    if (chunk_ > 0) stride_ = std::min(stride_, budget_ + std::max(room_, chunk_) + 1);
    if (context_.by_layer) {
      stride_ = observed_ ? 0 : std::min(stride_, budget_ + room_ + 1);
      OKV_ASSIGN_OR_RETURN(whole_, memory_.Take(backend, lists * context_.max_context, "sums"));
    }
    if (stride_ > 0) {
      const int64_t rings = int64_t{context_.n_layers} * context_.max_seqs * kRing;
      OKV_ASSIGN_OR_RETURN(ring_, memory_.Take(backend, rings * lists * stride_, "sums"));
    }
    OKV_ASSIGN_OR_RETURN(aged_, memory_.Take(backend, lists * AgedStride(), "scores"));
    OKV_ASSIGN_OR_RETURN(
        lse_, memory_.Take(backend, int64_t{context_.max_rows} * context_.n_heads, "weights"));
    return choice_.Prepare(backend, memory_, {.budget = budget_}, /*n_seqs=*/1, context_.n_kv_heads,
                           budget_, "kept tokens");
  }

  PolicyContext context_;
  bool observed_ = false;
  int32_t budget_ = 0;  // tokens, the recent ones included
  int32_t recent_ = 0;  // tokens
  int64_t room_ = 0;    // tokens
  int64_t chunk_ = 0;   // tokens of a prompt after which it chooses; 0: all
  int64_t stride_ = 0;  // rows that a ring has room for
  PolicyMemory memory_;
  Buffer ring_;  // f32 [n_layers, max_seqs, kRing, n_kv_heads, stride]
  // Of one prompt at a time:
  Buffer whole_;  // f32 [n_kv_heads, max_context]: the sums of a layer, where it passes by layer
  Buffer aged_;   // f32 [n_kv_heads, AgedStride()]: by what rows are chosen
  Buffer lse_;    // f32 [max_rows, n_heads]
  ListChoice choice_;
};

}  // namespace

PolicyInfo H2oPolicy() {
  return {.name = "h2o",
          .summary = "the last tokens and those of the most weight from all queries (H2O)",
          .facts = {.source = "H2O, Zhang et al. 2023; mode=observed as in kvpress",
                    .chooses = "after the prompt and at every step per KV head, by the weights of "
                               "all queries so far",
                    .keeps = "b rows of each KV head, on the device",
                    .reads = "b + 1 rows, and their K once more",
                    .holds = "b rows, and their sums for five steps; of a prompt one layer, or "
                             "a chunk",
                    .loses = "most of the prompt (8 of 8 answers; 2 of 2 at a quarter of what "
                             "full reads)"},
          .kind = PolicyKind::kForgets,
          .knob = {.key = "budget"},
          .settings = {{.key = "budget",
                        .default_value = "1024",
                        .help = "tokens that each KV head keeps, the recent ones included",
                        .min = 1,
                        .max = 1e9},
                       {.key = "recent",
                        .default_value = "auto",
                        .help = "last tokens that stay; auto: half of the budget, none of observed",
                        .max = 1e9,
                        .allow_auto = true},
                       {.key = "mode",
                        .type = SettingType::kChoice,
                        .default_value = "full",
                        .help = "full: after the prompt and anew at every step; chunked: after "
                                "each chunk of the prompt too; observed: once, by the mean over "
                                "the queries that saw a token, and later tokens stay",
                        .choices = {"full", "chunked", "observed"}},
                       {.key = "chunk",
                        .default_value = "2048",
                        .help = "tokens of a chunk, for mode=chunked",
                        .min = 1,
                        .max = 1e9},
                       RoomSetting()},
          .make = [] { return std::make_unique<H2o>(); },
          .batches = true,
          .covering =
              [](int64_t length) {
                return std::vector<SettingList>{{{"budget", std::to_string(length)}}};
              },
          .exempt = "",
          .test_settings = {{{"budget", "24"}, {"recent", "8"}},
                            {{"budget", "1"}, {"recent", "0"}},
                            {{"budget", "30"}, {"mode", "observed"}},
                            {{"budget", "24"}, {"mode", "chunked"}, {"chunk", "40"}}},
          .recommended = nullptr};
}

}  // namespace omnikv
