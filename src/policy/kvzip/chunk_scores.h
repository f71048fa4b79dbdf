// The scores that passes over a prompt give its tokens, chunk by chunk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// A chunk as its pass sees it: tokens [begin, end) of the `tokens` that a choice is made of.
struct SeenChunk {
  int64_t begin = 0, end = 0;
  int64_t tokens = 0;
  int64_t sinks = 0;  // rows in front that it sees besides
  // Rows before the first of those tokens: of each KV head, where these are apart, or of all
  // together. Empty: none.
  std::span<const int32_t> first = {};
};

// Of one prompt at a time. Thread-compatible.
class ChunkScores {
 public:
  // `chunk`: tokens. `later_turns`: rows may come before the tokens that a choice is made of.
  Status Prepare(const PolicyContext& context, int32_t chunk, bool later_turns,
                 PolicyMemory& memory);

  // Of a layer, f32 [n_kv_heads, max_context]: by the tokens that a choice is made of. What else
  // lies there is of no meaning.
  float* Of(int32_t layer) const {
    return scores_.as<float>() + int64_t{layer} * context_.n_kv_heads * context_.max_context;
  }
  // Enqueues the scores of a chunk: in each KV head the highest weight of any row of the pass so
  // far, of which the step's are the last ones.
  void Enqueue(const LayerStep& step, const AttendArgs& attend, const SeenChunk& chunk);
  // [n_layers, n_kv_heads, tokens]. Waits for the backend.
  std::vector<float> Read(int64_t tokens) const;

 private:
  AttnPlan PlanOf(const LayerStep& step, const SeenChunk& chunk, int32_t n_seqs);
  // The rows that Score reads, from the chunk's first one on.
  void ScoreFromChunk(const LayerStep& step, const SeenChunk& chunk, ScoreArgs score);
  // From the sequence's first one on.
  void ScoreFromFirstRow(const LayerStep& step, const SeenChunk& chunk, ScoreArgs score);

  PolicyContext context_;
  int32_t chunk_ = 0;
  Buffer scores_;   // f32 [n_layers, n_kv_heads, max_context]
  Buffer by_row_;   // f32 [n_kv_heads, max_context]: of one layer; with later turns alone
  Buffer o_, lse_;  // f32 [max_rows, n_heads, dk], [max_rows, n_heads]: of a pass
  Buffer starts_;   // int32 [chunks, n_kv_heads]: their first tokens
  Buffer seqs_;     // SeqMeta [n_kv_heads]: a pass as the chunk that it repeats sees it
  Buffer bounds_;   // int32 [2, max_seqs, n_kv_heads, 2]: chunk and pass; with later turns alone
};

}  // namespace omnikv
