#include "policy/kvzip/chunk_scores.h"

namespace omnikv {

Status ChunkScores::Prepare(const PolicyContext& context, int32_t chunk, bool later_turns,
                            PolicyMemory& memory) {
  context_ = context;
  chunk_ = chunk;
  Backend& backend = *context.backend;
  const auto take = [&](Buffer& buffer, int64_t n, std::string_view what) -> Status {
    OKV_ASSIGN_OR_RETURN(buffer, memory.Take(backend, n, what));
    return {};
  };
  const int64_t kv_heads = context.n_kv_heads;
  const int64_t values = int64_t{context.max_rows} * context.n_heads;
  const int64_t chunks = context.max_context / chunk + 1;
  OKV_RETURN_IF_ERROR(take(scores_, context.n_layers * kv_heads * context.max_context, "scores"));
  OKV_RETURN_IF_ERROR(take(o_, values * context.dk, "attention of a pass"));
  OKV_RETURN_IF_ERROR(take(lse_, values, "sums"));
  OKV_RETURN_IF_ERROR(take(starts_, chunks * kv_heads, "chunks"));
  OKV_RETURN_IF_ERROR(take(seqs_, kv_heads * int64_t{sizeof(SeqMeta)} / 4, "chunks"));
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < chunks * kv_heads; ++i) {
    starts.push_back(static_cast<int32_t>(i / kv_heads * chunk));
  }
  backend.Upload(starts_.as(), starts.data(), starts_.size());
  if (!later_turns) return {};
  OKV_RETURN_IF_ERROR(take(by_row_, kv_heads * context.max_context, "scores"));
  return take(bounds_, 4 * context.max_seqs * kv_heads, "chunks");
}

// The weights of a pass are over the sinks, the chunk and the pass's own rows: another attention
// gives their sums. Where KV heads are apart, each is a sequence of a list of its own.
void ChunkScores::Enqueue(const LayerStep& step, const AttendArgs& attend, const SeenChunk& chunk) {
  const int32_t lists = attend.kv.n_kv_heads;
  const int32_t n_seqs = context_.n_kv_heads / lists;  // that the step's one sequence is
  AttendArgs seen = attend;
  seen.o = o_.as<float>();
  seen.lse = lse_.as<float>();
  seen.plan = PlanOf(step, chunk, n_seqs);
  context_.backend->Enqueue(seen);
  const ScoreArgs score{.q = attend.q,
                        .lse = lse_.as<float>(),
                        .kv = attend.kv,
                        .seqs = attend.seqs + step.seq * n_seqs,
                        .stride = context_.max_context,
                        .n_rows = attend.n_rows,
                        .n_seqs = n_seqs,
                        .n_heads = attend.n_heads,
                        .lists = lists,
                        .heads = HeadReduce::kMax,
                        .queries = QueryReduce::kMax,
                        .scale = attend.scale,
                        .softcap = attend.softcap,
                        .accumulate = step.first_pos > step.prompt_end};
  chunk.first.empty() ? ScoreFromChunk(step, chunk, score) : ScoreFromFirstRow(step, chunk, score);
}

AttnPlan ChunkScores::PlanOf(const LayerStep& step, const SeenChunk& chunk, int32_t n_seqs) {
  AttnPlan plan;
  if (chunk.sinks > 0) plan.Add({.begin = 0, .end = static_cast<int32_t>(chunk.sinks)});
  const auto begin = static_cast<int32_t>(chunk.begin);
  const auto end = static_cast<int32_t>(chunk.end);
  const auto own = static_cast<int32_t>(chunk.tokens);  // where the pass begins
  if (chunk.first.empty()) {
    plan.Add({.begin = begin, .end = end});
    plan.Add({.begin = own});
    return plan;
  }
  std::vector<int32_t> of_chunk, of_pass;
  for (const int32_t first : chunk.first) {
    of_chunk.insert(of_chunk.end(), {first + begin, first + end});
    of_pass.insert(of_pass.end(), {first + own, kToEnd});
  }
  int32_t* at = bounds_.as<int32_t>();
  for (const std::vector<int32_t>& bounds : {of_chunk, of_pass}) {
    context_.backend->Upload(at + int64_t{2} * step.seq * n_seqs, bounds.data(),
                             bounds.size() * sizeof(int32_t));
    plan.Add({.bounds = at});
    at += int64_t{2} * context_.max_seqs * context_.n_kv_heads;
  }
  return plan;
}

// Score sees a sequence that begins with the chunk. It goes on to the end of the pass, so it also
// leaves numbers behind the chunk, which the next pass writes over.
void ChunkScores::ScoreFromChunk(const LayerStep& step, const SeenChunk& chunk, ScoreArgs score) {
  context_.backend->Enqueue(
      LocateRowsArgs{.seqs = score.seqs,
                     .gone = starts_.as<int32_t>() + int64_t{step.pass} * context_.n_kv_heads,
                     .to_seqs = seqs_.as<SeqMeta>(),
                     .n_seqs = score.n_seqs});
  score.kv.block_table += chunk.begin / score.kv.block_tokens;
  score.seqs = seqs_.as<SeqMeta>();
  score.out = Of(step.layer) + chunk.begin;
  context_.backend->Enqueue(score);
}

// A chunk behind rows that stayed earlier begins in the middle of a block, in each head of another
// one: so all rows get numbers, and those of the chunk count. What earlier steps of the pass gave
// stands with the layer's scores: the other layers came between.
void ChunkScores::ScoreFromFirstRow(const LayerStep& step, const SeenChunk& chunk,
                                    ScoreArgs score) {
  score.out = by_row_.as<float>();
  const auto copy = [&](bool back) {
    for (int64_t head = 0; head < context_.n_kv_heads; ++head) {
      const size_t list = chunk.first.size() > 1 ? static_cast<size_t>(head) : 0;
      const int64_t at = head * context_.max_context + chunk.begin;
      float* const by_token = Of(step.layer) + at;
      float* const by_row = score.out + at + chunk.first[list];
      context_.backend->Upload(back ? by_row : by_token, back ? by_token : by_row,
                               static_cast<size_t>(chunk.end - chunk.begin) * sizeof(float));
    }
  };
  if (score.accumulate) copy(/*back=*/true);
  context_.backend->Enqueue(score);
  copy(/*back=*/false);
}

std::vector<float> ChunkScores::Read(int64_t tokens) const {
  const int64_t lists = int64_t{context_.n_layers} * context_.n_kv_heads;
  std::vector<float> scores(static_cast<size_t>(lists * tokens));
  for (int64_t list = 0; list < lists; ++list) {
    context_.backend->Download(scores.data() + list * tokens,
                               scores_.as<float>() + list * context_.max_context,
                               static_cast<size_t>(tokens) * sizeof(float));
  }
  return scores;
}

}  // namespace omnikv
