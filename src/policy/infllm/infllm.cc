// InfLLM (Xiao et al. 2024, equations 1-3; its published context_manager.py): each row attends to
// the last `recent` tokens where they stand, and to far ones, all as if `recent` tokens away: the
// first tokens, the blocks whose keys are most like the query, and those of no whole block yet. A
// prompt comes in chunks, which choose once by the mean of their queries; decode steps choose anew.
// Four differences from the published code: its far distance is one token less than the paper's; in
// prompts its far part also sees tokens that are still in the window; the last token of a prompt
// passes alone there; and equal scores may fall either way.
#include "policy/infllm/infllm.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

namespace omnikv {
namespace {

constexpr int64_t kChunk = 512;  // rows of a chunk by default, where steps have as many

class Infllm : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override {
    context_ = context;
    const int64_t block = settings.Int("block");
    const int64_t budget = settings.Int("budget");
    const int64_t sinks = settings.Int("sinks");
    const int64_t most = budget / block;
    if (most < 1) {
      return InvalidArgument(fmt::format(
          "policy infllm: budget is {}, expected a block of {} tokens at least", budget, block));
    }
    if (sinks % block != 0) {
      return InvalidArgument(fmt::format(
          "policy infllm: sinks is {}, expected whole blocks of {} tokens", sinks, block));
    }
    for (const auto& [key, low, high, of] :
         {std::tuple("cache", most, int64_t{1} << 30, "the blocks of the budget"),
          std::tuple("representatives", int64_t{1}, block, "the tokens of a block")}) {
      if (const int64_t n = settings.Int(key); n < low || n > high) {
        return InvalidArgument(fmt::format("policy infllm: {} is {}, expected {} {}, {}", key, n,
                                           n < low ? "at least" : "at most", n < low ? low : high,
                                           of));
      }
    }
    const int64_t recent = settings.Int("recent");
    if (context.backend != nullptr && settings.IsAuto("chunk")) {
      settings.Resolve("chunk",
                       std::to_string(std::min<int64_t>({kChunk, context.max_rows, recent})));
    }
    if (!settings.IsAuto("chunk")) {
      chunk_ = static_cast<int32_t>(settings.Int("chunk"));
      if (chunk_ > recent) {
        return InvalidArgument(fmt::format(
            "policy infllm: chunk is {}, expected at most the {} of recent", chunk_, recent));
      }
      if (context.backend != nullptr && chunk_ > context.max_rows) {
        return InvalidArgument(fmt::format(
            "policy infllm: chunk is {}, expected at most the {} rows of a step (`prefill_chunk`)",
            chunk_, context.max_rows));
      }
    }
    // More than a context has is as good as a context.
    const auto fit = [&](int64_t n) {
      return static_cast<int32_t>(std::min(n, (context.max_context / block + 1) * block));
    };
    shape_.block = static_cast<int32_t>(block);
    shape_.sinks = fit(sinks);
    shape_.recent = static_cast<int32_t>(std::min(recent, context.max_context));
    const int64_t blocks = std::max(1, shape_.Blocks(context.max_context));
    shape_.most = static_cast<int32_t>(std::min(most, blocks));
    shape_.cache = static_cast<int32_t>(std::min(settings.Int("cache"), blocks));
    shape_.rest = (2 * (shape_.block - 1) + std::max(chunk_, 1)) / shape_.block;
    PolicyContext steps = context;  // as large as this policy's are
    steps.max_rows = std::min(context.max_rows, std::max(chunk_, context.max_seqs));
    OKV_RETURN_IF_ERROR(
        far_.Prepare(steps, shape_, static_cast<int32_t>(settings.Int("representatives")), chunk_));
    if (context.backend == nullptr) return {};
    OKV_ASSIGN_OR_RETURN(
        lse_, memory_.Take(*context.backend, int64_t{steps.max_rows} * context.n_heads, "weights"));
    OKV_ASSIGN_OR_RETURN(window_,
                         memory_.Take(*context.backend, 2 * int64_t{context.max_seqs}, "windows"));
    if (!far_.HasBlocks()) return {};
    logit_stride_ = (context.max_context + 15) / 16 * 16;
    const int64_t heads = int64_t{context.max_seqs} * context.n_heads;
    OKV_ASSIGN_OR_RETURN(logits_, memory_.Take(*context.backend, heads * logit_stride_, "weights"));
    return {};
  }

  // 0: nothing is far.
  int32_t Variant(const SeqLength& at) const override {
    if (context_.max_context <= shape_.recent) return 0;
    return context_.force_indices || at.tokens > shape_.recent ? 1 : 0;
  }
  void BeginStep(int32_t variant, const AttendArgs& step) override {
    far_step_ = variant == 1;
    if (far_step_) far_.Locate(step, /*skip=*/0, /*prefill=*/false);
    if (!far_.HasBlocks()) return;
    // The window as a range of tokens: scores need one.
    context_.backend->Enqueue(
        PlanRangeArgs{.seqs = step.seqs,
                      .n_seqs = step.n_seqs,
                      .rule = {.budget = shape_.recent, .min_recent = shape_.recent},
                      .bounds = window_.as<int32_t>()});
  }
  void Plan(const LayerStep& step, AttendArgs& attend) override {
    attend.plan = AttnPlan::Dense(shape_.recent);
    attend.lse = lse_.as<float>();
    if (!step.prefill && far_.HasBlocks()) {
      attend.plan.segments[0] = {.bounds = window_.as<int32_t>()};
      attend.score = ScoreKind::kLogits;
      attend.scores = logits_.as<float>();
      attend.score_stride = logit_stride_;
    }
    if (!HasFar(step, attend)) {
      if (!step.prefill || step.first_pos == 0) far_.Keep(step, attend);
      return;
    }
    if (step.prefill) far_.Locate(attend, Skip(step), /*prefill=*/true);
    far_.Attend(step, attend, Skip(step));
  }
  void Observe(const LayerStep& step, const AttendArgs& attend) override {
    if (HasFar(step, attend)) {
      const int64_t skip = Skip(step);
      float* const o = attend.o + skip * attend.n_heads * attend.kv.dv;
      float* const lse = attend.lse + skip * attend.n_heads;
      context_.backend->Enqueue(MergeStatesArgs{.parts = {AttendState{o, lse}, far_.state()},
                                                .n_parts = 2,
                                                .o = o,
                                                .lse = lse,
                                                .n_rows = attend.n_rows - Skip(step),
                                                .n_heads = attend.n_heads,
                                                .dv = attend.kv.dv});
    }
    far_.Weigh(step, attend);
  }

  // The window. What is copied of a layer, and the keys of its blocks, come from home.
  DeclaredReads Reads() const override {
    if (context_.max_context <= shape_.recent) return {};
    const int64_t rows = chunk_ > 0 ? chunk_ : std::min<int64_t>(kChunk, shape_.recent);
    return {.selection_of = std::vector<int32_t>(static_cast<size_t>(context_.n_layers), kLastRows),
            .max_recent = shape_.recent + rows - 1};
  }
  int64_t TokensRead(int32_t, const SeqLength& at) const override {
    return at.tokens - shape_.LeftOut(at.tokens - 1);
  }
  int64_t StateBytesRead(int32_t, const SeqLength& at) const override {
    const int64_t values = int64_t{context_.n_heads} * context_.dk;
    return shape_.Blocks(at.tokens - 1) * values * static_cast<int64_t>(sizeof(float));
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t) const override { return int64_t{shape_.most} * shape_.block; }
  int64_t Besides(const SeqLength& at) const override {
    return TokensRead(0, at) - int64_t{shape_.Chosen(at.tokens - 1)} * shape_.block;
  }
  bool DensePrompts() const override { return false; }
  int32_t PromptStepRows() const override { return chunk_; }
  bool CutsBack() const override { return false; }
  size_t Bytes() const override { return memory_.bytes() + far_.Bytes(); }
  void CopyState(const Policy& from) override {
    far_.CopyFrom(static_cast<const Infllm&>(from).far_);
  }
  std::string SaveState(int32_t seq, int64_t length) const override {
    return far_.Save(seq, length);
  }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    return far_.Load(seq, length, state);
  }

 private:
  // Whether any row of the step has left a token behind its window.
  bool HasFar(const LayerStep& step, const AttendArgs& attend) const {
    return step.prefill ? step.first_pos + attend.n_rows > shape_.recent : far_step_;
  }
  // Rows of a prompt that have none.
  int32_t Skip(const LayerStep& step) const {
    return step.prefill ? static_cast<int32_t>(std::max<int64_t>(0, shape_.recent - step.first_pos))
                        : 0;
  }

  PolicyContext context_;
  FarShape shape_;
  int32_t chunk_ = 0;      // rows of a chunk; 0: not known yet
  bool far_step_ = false;  // what is being recorded
  PolicyMemory memory_;
  Buffer lse_;                // f32 [rows of a step, n_heads]
  Buffer window_;             // int32 [max_seqs, 2]
  Buffer logits_;             // f32 [max_seqs, n_heads, logit_stride]
  int64_t logit_stride_ = 0;  // tokens
  FarMemory far_;
};

std::vector<SettingSpec> Settings() {
  return {{.key = "budget",
           .default_value = "2048",
           .help = "tokens of the blocks that a layer chooses, in whole blocks",
           .min = 1,
           .max = 1e9},
          {.key = "block", .default_value = "128", .help = "tokens", .min = 1, .max = 4096},
          {.key = "sinks",
           .default_value = "128",
           .help = "first tokens that are read besides, in whole blocks",
           .max = 1e9},
          {.key = "recent",
           .default_value = "4096",
           .help = "last tokens that are read besides, where they stand; the others stand so far "
                   "away",
           .min = 1,
           .max = 1e9},
          {.key = "representatives",
           .default_value = "4",
           .help = "tokens of a block whose mean is its key, for each query head those of the most "
                   "weight",
           .min = 1,
           .max = 4096},
          {.key = "chunk",
           .default_value = "auto",
           .help = "rows of a prompt that choose together; auto: 512, or what a step and recent "
                   "allow",
           .min = 1,
           .max = 65536,
           .allow_auto = true},
          {.key = "cache",
           .default_value = "32",
           .help = "blocks of a layer whose copies, with K at position 0, are kept: those that "
                   "were chosen last",
           .min = 1,
           .max = 1e6}};
}

}  // namespace

PolicyInfo InfllmPolicy() {
  return {
      .name = "infllm",
      .summary =
          "a local window, and blocks that are most like the query, all equally far "
          "(InfLLM)",
      .facts = {.source = "InfLLM, Xiao et al. 2024",
                .chooses = "at every step, and every chunk of a prompt, for all heads, by the "
                           "tokens of each block that had the most weight in the window",
                .keeps = "all rows, which may live on the host but for the last ones; copies of "
                         "the first rows and of the blocks chosen last, and a key of each block "
                         "for each query head, on the device",
                .reads = "b rows, the first and the last ones, and N / 128 keys",
                .holds = "N rows, the copies (4,864 rows), N / 128 keys; of a layer on the host "
                         "4,736 rows on the device in place of N",
                .loses =
                    "single facts far back, whose blocks no chunk of the prompt chooses (8 of 8 "
                    "answers)"},
      .kind = PolicyKind::kSelects,
      .knob = {.key = "budget", .parts = {{"recent", 2}, {"cache", 1.0 / 64}}},  // as published
      .settings = Settings(),
      .make = [] { return std::make_unique<Infllm>(); },
      .batches = true,
      .covering =
          [](int64_t length) {
            const std::string all = std::to_string(length);
            return std::vector<SettingList>{
                {{"recent", all}},
                {{"recent", all}, {"budget", "8"}, {"block", "8"}, {"sinks", "0"}}};
          },
      .exempt = "",
      .test_settings = {{{"budget", "16"},
                         {"block", "8"},
                         {"sinks", "8"},
                         {"recent", "24"},
                         {"representatives", "2"},
                         {"chunk", "16"},
                         {"cache", "3"}},
                        {{"budget", "12"},
                         {"block", "4"},
                         {"sinks", "0"},
                         {"recent", "40"},
                         {"chunk", "40"},
                         {"cache", "40"}},
                        {{"budget", "6"},
                         {"block", "6"},
                         {"sinks", "12"},
                         {"recent", "7"},
                         {"representatives", "1"},
                         {"chunk", "7"},
                         {"cache", "1"}}},
      .recommended = nullptr};
}

}  // namespace omnikv
