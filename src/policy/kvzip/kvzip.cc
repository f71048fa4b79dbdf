// KVzip (Kim et al. 2025): what a model needs to repeat its context is what it needs of it. Once
// after the first prompt, the model reads a request to repeat the context and then the context
// itself, chunk by chunk; a token's score in a KV head is the highest weight that any of these rows
// gives it. The best share of all layers and KV heads together stays. No question is known then, so
// any of them may follow.
#include <fmt/format.h>

#include <algorithm>

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

  Result<std::vector<std::vector<int32_t>>> Passes(std::span<const int32_t> prompt) const override;
  std::vector<int64_t> ChooseAfterPasses(int32_t seq, int64_t tokens) override;
  void StartOver(int32_t seq) override { heads_.Set(seq, {}); }
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
  std::string SaveState(int64_t) const override { return heads_.Save(); }
  bool LoadState(int64_t length, std::string_view state) override {
    return heads_.Load(length, state);
  }

 private:
  // Of a layer, [n_kv_heads, max_context]: scores, and after the choice the rows that stay.
  float* Scores(int32_t layer) const {
    return scores_.as<float>() + layer * context_.n_kv_heads * context_.max_context;
  }
  // Those of the prompt, [n_layers, n_kv_heads, tokens].
  std::vector<float> ReadScores(int64_t tokens) const;

  PolicyContext context_;
  Share share_;
  int32_t chunk_ = 0;  // tokens
  int64_t room_ = 0;   // Keeps::room
  RepeatText text_;
  PolicyMemory memory_;
  Buffer scores_;       // f32 [n_layers, n_kv_heads, max_context], of one prompt at a time
  int64_t scored_ = 0;  // tokens of the prompt whose scores these are
  Buffer o_, lse_;      // f32 [max_rows, n_heads, dk], [max_rows, n_heads]: of a pass
  Buffer starts_;       // int32 [chunks, n_kv_heads]: their first tokens
  Buffer seqs_;         // SeqMeta [n_kv_heads]: a pass as the chunk that it repeats sees it
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
  const int32_t block = context.row_layout.block_tokens;
  if (chunk_ % block != 0) {
    return InvalidArgument(fmt::format(
        "policy kvzip: chunk is {}, expected a multiple of {} (tokens of a block of K/V)", chunk_,
        block));
  }
  OKV_ASSIGN_OR_RETURN(text_, RepeatText::Of(context));
  if (context.backend == nullptr) return {};
  Backend& backend = *context.backend;
  const auto take = [&](Buffer& buffer, int64_t n, std::string_view what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory_.Take(backend, n, what));
    return {};
  };
  const int64_t values = int64_t{context.max_rows} * context.n_heads;
  const int64_t chunks = context.max_context / chunk_ + 1;
  OKV_RETURN_IF_ERROR(take(scores_, share_.lists * context.max_context, "scores"));
  OKV_RETURN_IF_ERROR(take(o_, values * context.dk, "attention of a pass"));
  OKV_RETURN_IF_ERROR(take(lse_, values, "sums"));
  const int64_t kv_heads = context.n_kv_heads;
  OKV_RETURN_IF_ERROR(take(starts_, chunks * kv_heads, "chunks"));
  OKV_RETURN_IF_ERROR(take(seqs_, kv_heads * int64_t{sizeof(SeqMeta)} / 4, "chunks"));
  OKV_RETURN_IF_ERROR(take(none_, 2 * kv_heads, "kept tokens"));
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < chunks * kv_heads; ++i) {
    starts.push_back(static_cast<int32_t>(i / kv_heads * chunk_));
  }
  backend.Upload(starts_.as(), starts.data(), starts_.size());
  const std::vector<int32_t> none(static_cast<size_t>(2 * kv_heads), kToEnd);
  backend.Upload(none_.as(), none.data(), none_.size());
  return heads_.Prepare(context, memory_);
}

void KvZip::Plan(const LayerStep& step, AttendArgs& attend) {
  if (context_.row_layout.heads_apart) return;  // all that a head holds
  if (!step.prefill || heads_.Chosen(step.seq)) attend.plan = heads_.Plan(step.layer);
}

// The weights of a pass are over the sinks, the chunk and the pass's own rows: another attention
// gives their sums. Score then sees a sequence that begins with the chunk. It goes on to the end of
// the pass, so it also leaves numbers behind the chunk, which the next pass writes over. Where KV
// heads are apart, each is a sequence of a list of its own.
void KvZip::Observe(const LayerStep& step, const AttendArgs& attend) {
  if (step.pass < 0) return;
  Backend& backend = *context_.backend;
  const auto prompt = static_cast<int32_t>(step.prompt_end);
  const int32_t begin = step.pass * chunk_;
  const int32_t end = std::min(begin + chunk_, prompt);
  const auto sinks = static_cast<int32_t>(std::min<int64_t>(share_.sinks, begin));
  scored_ = end;
  const int32_t lists = attend.kv.n_kv_heads;
  const int32_t n_seqs = context_.n_kv_heads / lists;  // that the step's one sequence is
  AttendArgs seen = attend;
  seen.o = o_.as<float>();
  seen.lse = lse_.as<float>();
  seen.plan = AttnPlan{};
  if (sinks > 0) seen.plan.Add({.begin = 0, .end = sinks});
  seen.plan.Add({.begin = begin, .end = end});
  seen.plan.Add({.begin = prompt});
  backend.Enqueue(seen);
  backend.Enqueue(
      LocateRowsArgs{.seqs = attend.seqs + step.seq * n_seqs,
                     .gone = starts_.as<int32_t>() + int64_t{step.pass} * context_.n_kv_heads,
                     .to_seqs = seqs_.as<SeqMeta>(),
                     .n_seqs = n_seqs});
  KvView from = attend.kv;
  from.block_table += begin / from.block_tokens;
  backend.Enqueue(ScoreArgs{.q = attend.q,
                            .lse = lse_.as<float>(),
                            .kv = from,
                            .seqs = seqs_.as<SeqMeta>(),
                            .out = Scores(step.layer) + begin,
                            .stride = context_.max_context,
                            .n_rows = attend.n_rows,
                            .n_seqs = n_seqs,
                            .n_heads = attend.n_heads,
                            .lists = lists,
                            .heads = HeadReduce::kMax,
                            .queries = QueryReduce::kMax,
                            .scale = attend.scale,
                            .softcap = attend.softcap,
                            .accumulate = step.first_pos > step.prompt_end});
}

Result<std::vector<std::vector<int32_t>>> KvZip::Passes(std::span<const int32_t> prompt) const {
  std::vector<std::vector<int32_t>> passes;
  const auto chunk = static_cast<size_t>(chunk_);
  for (size_t begin = 0; begin < prompt.size(); begin += chunk) {
    passes.push_back(text_.Before(prompt.first(begin)));
    const auto tokens = prompt.subspan(begin, std::min(chunk, prompt.size() - begin));
    passes.back().insert(passes.back().end(), tokens.begin(), tokens.end());
  }
  return passes;
}

std::vector<float> KvZip::ReadScores(int64_t tokens) const {
  std::vector<float> scores(static_cast<size_t>(share_.lists * tokens));
  for (int64_t list = 0; list < share_.lists; ++list) {
    context_.backend->Download(scores.data() + list * tokens,
                               scores_.as<float>() + list * context_.max_context,
                               static_cast<size_t>(tokens) * sizeof(float));
  }
  return scores;
}

std::vector<int64_t> KvZip::ChooseAfterPasses(int32_t seq, int64_t tokens) {
  std::vector<int32_t> counts(static_cast<size_t>(share_.lists),
                              static_cast<int32_t>(share_.Mean(tokens)));
  if (scored_ == tokens) {
    const auto best = share_.Best(ReadScores(tokens), tokens);
    for (size_t list = 0; list < best.size(); ++list) {
      counts[list] = static_cast<int32_t>(best[list].size());
      context_.backend->Upload(
          scores_.as<int32_t>() + static_cast<int64_t>(list) * context_.max_context,
          best[list].data(), best[list].size() * sizeof(int32_t));
    }
  }
  scored_ = 0;
  heads_.Set(seq, counts);
  return {counts.begin(), counts.end()};
}

Keeps KvZip::Kept() const {
  return {.rows = context_.max_context,
          .first_prompt = true,
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
                 .index = reinterpret_cast<const int32_t*>(Scores(step.layer)),
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
                    .min = 8,
                    .max = 1e6},
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
