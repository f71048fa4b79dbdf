// KVzip (Kim et al. 2025): what a model needs to repeat its context is what it needs of it. Once
// after the first prompt, the model reads a request to repeat the context and then the context
// itself, chunk by chunk; a token's score in a KV head is the highest weight that any of these rows
// gives it. The best share of all layers and KV heads together stays. No question is known then, so
// any of them may follow.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "policy/kvzip/chunk_scores.h"
#include "policy/kvzip/head_rows.h"
#include "policy/kvzip/repeat_text.h"
#include "policy/kvzip/share.h"
#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {
namespace {

class KvZip : public Policy {
 public:
  Status Prepare(const PolicyContext& context, PolicySettings& settings) override;
  void Plan(const LayerStep& step, AttendArgs& attend) override;
  void Observe(const LayerStep& step, const AttendArgs& attend) override;

  Result<std::vector<std::vector<int32_t>>> Passes(int32_t seq,
                                                   std::span<const int32_t> prompt) const override;
  std::vector<int64_t> ChooseAfterPasses(int32_t seq, int64_t tokens) override;
  void StartOver(int32_t seq) override { heads_.Set(seq, {}, 0); }
  Keeps Kept() const override;
  std::optional<Retained> Retains(const LayerStep& step) const override;

  int64_t TokensRead(int32_t layer, const SeqLength& at) const override { return at.Held(layer); }
  bool ReadsByScore() const override { return true; }
  int64_t HeadTokensReadLast(int32_t layer, int32_t seq, const SeqLength& at,
                             int32_t) const override {
    return heads_.Read(seq, layer, at.Held(layer));
  }
  bool Budgeted(int32_t) const override { return true; }
  int64_t Budget(int64_t length) const override { return share_.Mean(length); }
  int64_t Besides(const SeqLength& at) const override { return at.tokens - at.prompt; }
  int64_t LayerAllows(int32_t layer, const SeqLength& at) const override { return at.Held(layer); }
  size_t Bytes() const override { return memory_.bytes(); }

  void CopyState(const Policy& from) override {
    heads_.Copy(static_cast<const KvZip&>(from).heads_);
  }
  std::string SaveState(int32_t seq, int64_t) const override { return heads_.Save(seq); }
  bool LoadState(int32_t seq, int64_t length, std::string_view state) override {
    return heads_.Load(seq, length, state);
  }

 private:
  PolicyContext context_;
  Share share_;
  int32_t chunk_ = 0;  // tokens
  int64_t room_ = 0;   // Keeps::room
  bool recompress_ = false;
  RepeatText text_;
  PolicyMemory memory_;
  ChunkScores scores_;  // after the choice the rows that stay, int32
  int64_t scored_ = 0;  // tokens of the prompt up to the last that has scores
  HeadRows heads_;
  Buffer none_;  // int32 [n_kv_heads, 2]: empty ranges
};

Status KvZip::Prepare(const PolicyContext& context, PolicySettings& settings) {
  context_ = context;
  share_ = {.ratio = settings.Float("ratio"),
            .sinks = settings.Int("sinks"),
            .lists = int64_t{context.n_layers} * context.n_kv_heads};
  chunk_ = static_cast<int32_t>(settings.Int("chunk"));
  room_ = settings.Int("room");
  recompress_ = settings.Text("turn") == "recompress";
  const int32_t block = context.row_layout.block_tokens;
  if (chunk_ % block != 0) {
    return InvalidArgument(fmt::format(
        "policy kvzip: chunk is {}, expected a multiple of {} (tokens of a block of K/V)", chunk_,
        block));
  }
  OKV_ASSIGN_OR_RETURN(text_, RepeatText::Of(context));
  if (context.backend == nullptr) return {};
  Backend& backend = *context.backend;
  OKV_RETURN_IF_ERROR(scores_.Prepare(context, chunk_, recompress_, memory_));
  const int64_t kv_heads = context.n_kv_heads;
  OKV_ASSIGN_OR_RETURN(none_, memory_.Take(backend, 2 * kv_heads, "kept tokens"));
  const std::vector<int32_t> none(static_cast<size_t>(2 * kv_heads), kToEnd);
  backend.Upload(none_.as(), none.data(), none_.size());
  return heads_.Prepare(context, memory_);
}

void KvZip::Plan(const LayerStep& step, AttendArgs& attend) {
  if (context_.row_layout.heads_apart) return;  // all that a head holds
  if (!step.prefill || heads_.Chosen(step.seq)) attend.plan = heads_.Plan(step.layer);
}

void KvZip::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (step.pass < 0) return;
  const int64_t before = heads_.Tokens(step.seq);
  SeenChunk chunk{.begin = int64_t{step.pass} * chunk_,
                  .tokens = step.prompt_end - before,
                  .first = heads_.First(step.seq, step.layer)};
  chunk.end = std::min(chunk.begin + chunk_, chunk.tokens);
  chunk.sinks = std::min(share_.sinks, before > 0 ? before : chunk.begin);
  scored_ = before + chunk.end;
  scores_.Enqueue(step, attend, chunk);
}

Result<std::vector<std::vector<int32_t>>> KvZip::Passes(int32_t seq,
                                                        std::span<const int32_t> prompt) const {
  std::vector<std::vector<int32_t>> passes;
  const auto chunk = static_cast<size_t>(chunk_);
  for (auto begin = static_cast<size_t>(heads_.Tokens(seq)); begin < prompt.size();
       begin += chunk) {
    passes.push_back(text_.Before(prompt.first(begin)));
    const auto tokens = prompt.subspan(begin, std::min(chunk, prompt.size() - begin));
    passes.back().insert(passes.back().end(), tokens.begin(), tokens.end());
  }
  return passes;
}

// Of a later turn, the share of what came since the last choice stays, beside all that has stayed.
std::vector<int64_t> KvZip::ChooseAfterPasses(int32_t seq, int64_t tokens) {
  const int64_t before = heads_.Tokens(seq);
  Share share = share_;
  if (before > 0) share.sinks = 0;
  std::vector<int32_t> counts = heads_.Counts(seq);
  std::vector<std::vector<int32_t>> best;
  if (scored_ == tokens) best = share.Best(scores_.Read(tokens - before), tokens - before);
  for (size_t list = 0; list < counts.size(); ++list) {
    if (best.empty()) {
      counts[list] += static_cast<int32_t>(share.Mean(tokens - before));
      continue;
    }
    const auto layer = static_cast<int32_t>(list) / context_.n_kv_heads;
    const auto head = static_cast<int32_t>(list) % context_.n_kv_heads;
    std::vector<int32_t> rows(static_cast<size_t>(counts[list]));
    std::iota(rows.begin(), rows.end(), 0);
    for (const int32_t token : best[list]) rows.push_back(heads_.First(seq, layer, head) + token);
    counts[list] = static_cast<int32_t>(rows.size());
    context_.backend->Upload(scores_.Of(layer) + head * context_.max_context, rows.data(),
                             rows.size() * sizeof(int32_t));
  }
  scored_ = 0;
  heads_.Set(seq, counts, tokens);
  return {counts.begin(), counts.end()};
}

Keeps KvZip::Kept() const {
  return {.rows = context_.max_context,
          .first_prompt = !recompress_,
          .room = room_,
          .lists = context_.n_kv_heads,
          .layer_rows =
              std::vector<int64_t>(static_cast<size_t>(context_.n_layers), context_.max_context),
          .rows_after = [share = share_](int32_t, int64_t tokens) { return share.Mean(tokens); },
          .passes = true};
}

std::optional<Retained> KvZip::Retains(const LayerStep& step) const {
  if (!step.chooses) return std::nullopt;
  Retained kept{.first_seq = step.seq, .n_seqs = 1};
  kept.rows.Add({.kind = SegmentKind::kList,
                 .lists = context_.n_kv_heads,
                 .capacity = static_cast<int32_t>(context_.max_context),
                 .index = reinterpret_cast<const int32_t*>(scores_.Of(step.layer)),
                 .count = heads_.Counts(step.layer, step.seq)});
  kept.rows.Add({.bounds = none_.as<int32_t>()});
  return kept;
}

}  // namespace

PolicyInfo KvzipPolicy() {
  return {
      .name = "kvzip",
      .summary = "what the model needs to repeat the prompt, over all layers and KV heads (KVzip)",
      .facts = {.source = "KVzip, Kim et al. 2025",
                .chooses = "once after the first prompt, by the highest weights in passes that "
                           "repeat it",
                .keeps = "a share r of all rows of all layers and KV heads, and all later ones, "
                         "on the device",
                .reads = "the rows that each KV head keeps and the later ones",
                .holds = "r * N rows in the mean of all KV heads and the later ones; in an engine "
                         "of another policy as many as the layer's largest KV head keeps",
                .loses = "few single facts (1 of 8 answers; 2 of 8 with ratio=0.125)"},
      .kind = PolicyKind::kForgets,
      .knob = {.key = "ratio"},
      .settings = {{.key = "ratio",
                    .type = SettingType::kFloat,
                    .default_value = "0.3",
                    .help = "share of the prompt's rows that stays, of all layers together",
                    .min = 0.0001,
                    .max = 1},
                   {.key = "sinks",
                    .type = SettingType::kInt,
                    .default_value = "4",
                    .help = "first tokens, which stay besides and which every pass sees",
                    .min = 0,
                    .max = 1e6},
                   {.key = "chunk",
                    .type = SettingType::kInt,
                    .default_value = "2048",
                    .help = "tokens that a pass repeats, a multiple of 64",
                    .min = 64,
                    .max = 1e6},
                   TurnSetting(),
                   RoomSetting()},
      .make = [] { return std::make_unique<KvZip>(); },
      .batches = true,
      .covering =
          [](int64_t) {
            return std::vector<SettingList>{{{"ratio", "1"}}};
          },
      .exempt = "",
      .test_settings = {{{"ratio", "0.3"}, {"chunk", "64"}},
                        {{"ratio", "0.125"}, {"chunk", "128"}, {"sinks", "0"}},
                        {{"ratio", "0.2"}, {"chunk", "64"}, {"sinks", "12"}}},
      .recommended = nullptr};
}

}  // namespace omnikv
