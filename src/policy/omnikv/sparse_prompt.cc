#include "policy/omnikv/sparse_prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "backend/kv_format.h"
#include "base/check.h"

namespace omnikv {
namespace {

// Rows of a chunk by default, where steps have as many: enough to fill the products of a card.
constexpr int32_t kChunk = 2048;

// What SparsePrompt::numbers_ has of a chunk.
enum : int32_t { kCandidates, kPick, kOwnBegin, kOwnEnd, kNumbers };

}  // namespace

Status SparsePrompt::Prepare(const PolicyContext& context, PolicySettings& settings,
                             PolicyMemory& memory) {
  context_ = context;
  if (settings.Text("prefill") != "sparse") return {};
  if (settings.Bool("select_every_layer")) {
    return InvalidArgument(
        "policy omnikv: prefill is sparse and select_every_layer is 1, expected only one of them: "
        "layers that score everything leave nothing to save");
  }
  softmax_ = settings.Text("score") == "softmax";
  lists_ = settings.Text("lists") == "per_kv_head" ? context.n_kv_heads : 1;
  sinks_ = static_cast<int32_t>(settings.Int("sinks"));
  all_ = settings.Text("r") == "all";
  ratio_ = all_ ? context.max_context : settings.Int("r");
  // Tests gather even what is everything.
  on_ = !all_ || context.force_indices;
  if (context.backend == nullptr) return {};
  if (settings.IsAuto("chunk")) {
    settings.Resolve("chunk", std::to_string(std::min(kChunk, context.max_rows)));
  }
  if (settings.Int("chunk") > context.max_rows) {
    return InvalidArgument(fmt::format(
        "policy omnikv: chunk is {}, expected at most the {} rows of a step (`prefill_chunk`)",
        settings.Int("chunk"), context.max_rows));
  }
  chunk_ = static_cast<int32_t>(settings.Int("chunk"));
  return on_ ? Allocate(memory) : Status();
}

Status SparsePrompt::Allocate(PolicyMemory& memory) {
  Backend& backend = *context_.backend;
  const RowLayout& layout = context_.row_layout;
  capacity_ =
      static_cast<int32_t>(std::min<int64_t>(ratio_ * context_.max_rows, context_.max_context));
  stride_ = (context_.max_context + 15) / 16 * 16;
  const int64_t tokens =
      std::min<int64_t>(int64_t{capacity_} + context_.max_rows, context_.max_context);
  const int64_t blocks = (tokens + layout.block_tokens - 1) / layout.block_tokens;
  const auto words = [](int64_t bytes) { return (bytes + 3) / 4; };
  const auto room = [&](Buffer& buffer, int64_t n, const char* what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory.Take(backend, n, what));
    return {};
  };
  OKV_RETURN_IF_ERROR(room(lse_, int64_t{context_.max_rows} * context_.n_heads, "weights"));
  OKV_RETURN_IF_ERROR(room(scores_, lists_ * stride_, "scores of a prompt"));
  if (sinks_ > 0) OKV_RETURN_IF_ERROR(room(aged_, lists_ * stride_, "scores of a prompt"));
  OKV_RETURN_IF_ERROR(room(index_, int64_t{lists_} * capacity_, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(count_, lists_, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(weight_, 1, "weights"));
  OKV_RETURN_IF_ERROR(room(numbers_, kNumbers, "chosen tokens"));
  OKV_RETURN_IF_ERROR(room(gone_, context_.max_seqs, "chosen tokens"));
  OKV_RETURN_IF_ERROR(
      room(rows_, words(int64_t{context_.max_rows} * sizeof(RowMeta)), "rows of a chunk"));
  OKV_RETURN_IF_ERROR(
      room(seqs_, words(int64_t{context_.max_seqs} * sizeof(SeqMeta)), "rows of a chunk"));
  OKV_RETURN_IF_ERROR(room(stage_, words(blocks * layout.block_tokens * layout.token_bytes),
                           "the K/V that a chunk reads"));
  OKV_RETURN_IF_ERROR(room(blocks_, layout.table_entries, "block tables"));
  // Whichever sequence it is, its blocks are 0, 1, 2, ... of the stage.
  std::vector<int32_t> entries(static_cast<size_t>(layout.table_entries));
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i] = static_cast<int32_t>(i) % layout.seq_blocks;
  }
  backend.Upload(blocks_.as(), entries.data(), entries.size() * sizeof(int32_t));
  const float one = 1;
  backend.Upload(weight_.as(), &one, sizeof(one));
  return {};
}

int32_t SparsePrompt::Picks(const LayerStep& step, int32_t n_rows) const {
  return static_cast<int32_t>(std::min<int64_t>(ratio_ * n_rows, step.first_pos));
}

bool SparsePrompt::Chooses(const LayerStep& step, int32_t n_rows) const {
  if (!on_ || !step.prefill || step.first_pos == 0) return false;
  return context_.force_indices || Picks(step, n_rows) < step.first_pos;
}

void SparsePrompt::Choose(const LayerStep& step, const AttendArgs& attend) const {
  Backend& backend = *context_.backend;
  const auto first = static_cast<int32_t>(step.first_pos);
  const int32_t n_pick = Picks(step, attend.n_rows);
  const std::array<int32_t, kNumbers> numbers = {first, n_pick, first, first + attend.n_rows};
  backend.Upload(numbers_.as(), numbers.data(), sizeof(numbers));
  const SeqMeta* const seq = attend.seqs + step.seq;
  backend.Enqueue(ScoreArgs{.q = attend.q,
                            .lse = softmax_ ? attend.lse : nullptr,
                            .kv = attend.kv,
                            .seqs = seq,
                            .out = scores_.as<float>(),
                            .stride = stride_,
                            .n_rows = attend.n_rows,
                            .n_seqs = 1,
                            .n_heads = attend.n_heads,
                            .lists = lists_,
                            .heads = lists_ > 1 ? HeadReduce::kSum : HeadReduce::kMax,
                            .queries = QueryReduce::kSum,
                            .scale = attend.scale,
                            .softcap = attend.softcap});
  if (sinks_ > 0) {
    backend.Enqueue(AgedScoresArgs{.in = {scores_.as<float>(), stride_},
                                   .kv = attend.kv,
                                   .seqs = seq,
                                   .steps = seq,
                                   .out = aged_.as<float>(),
                                   .stride = stride_,
                                   .lists = lists_,
                                   .n_seqs = 1,
                                   .sinks = sinks_});
  }
  backend.Enqueue(TopKArgs{.scores = (sinks_ > 0 ? aged_ : scores_).as<float>(),
                           .weights = weight_.as<float>(),
                           .seqs = seq,
                           .n_candidates = Number(kCandidates),
                           .n_pick = Number(kPick),
                           .index = index_.as<int32_t>(),
                           .count = count_.as<int32_t>(),
                           .stride = stride_,
                           .lists = lists_,
                           .capacity = capacity_,
                           .n_seqs = 1});
  const std::vector<int32_t> gone(static_cast<size_t>(context_.max_seqs), first - n_pick);
  backend.Upload(gone_.as(), gone.data(), gone.size() * sizeof(int32_t));
  backend.Enqueue(LocateRowsArgs{.rows = attend.rows,
                                 .seqs = attend.seqs,
                                 .gone = gone_.as<int32_t>(),
                                 .to_rows = rows_.as<RowMeta>(),
                                 .to_seqs = seqs_.as<SeqMeta>(),
                                 .n_rows = attend.n_rows,
                                 .n_seqs = attend.n_seqs});
}

void SparsePrompt::Gather(const LayerStep& step, AttendArgs& attend) const {
  OKV_CHECK(attend.kv.Together(), "K and V of a token lie apart");
  const KvView stage = MakeKvViewOf(attend.kv, stage_.as<std::byte>(), blocks_.as<int32_t>());
  context_.backend->Enqueue(CompactArgs{.kv = stage,
                                        .from = attend.kv,
                                        .seqs = attend.seqs + step.seq,
                                        .index = index_.as<int32_t>(),
                                        .count = count_.as<int32_t>(),
                                        .bounds = Number(kOwnBegin),
                                        .capacity = capacity_,
                                        .lists = lists_,
                                        .n_seqs = 1});
  attend.kv = stage;
  attend.rows = rows_.as<RowMeta>();
  attend.seqs = seqs_.as<SeqMeta>();
}

}  // namespace omnikv
