// prefill=sparse of policy kascade: tiles of a prompt's rows choose as decode steps do. In an
// anchor the weights that a tile's queries give choose, for each KV head, tokens before the tile; a
// layer that reads choices gathers those of some tiles at a time, each with the tile's own rows, in
// a stage where every tile is a sequence, and attends to the stage with the kernel of dense
// prompts.
#pragma once

#include <cstdint>

#include "policy/policy.h"
#include "policy/policy_memory.h"

namespace omnikv {

// Enqueues at record time. Thread-compatible.
class TilePrompt {
 public:
  // From prefill and tile. A tile chooses what `rule` allows of the tokens before it, in `lists`
  // lists, one or one per KV head. With a backend, takes `memory`.
  Status Prepare(const PolicyContext& context, PolicySettings& settings, const RangeRule& rule,
                 int32_t lists, PolicyMemory& memory);

  // Whether prompts may read less than everything.
  bool on() const { return on_; }
  // Rows of a step: whole tiles, so that it does not matter where a step ends; 0 where it is off.
  int32_t step_rows() const { return on_ ? tiles_ * tile_ : 0; }
  // Whether the rows of this step read choices: not those whose choices would be all tokens.
  bool Chooses(const LayerStep& step, int32_t n_rows) const;

  // Around the attention of an anchor, to all tokens.
  void AskForWeights(AttendArgs& attend) const { attend.lse = lse_.as<float>(); }
  void Choose(const LayerStep& step, const AttendArgs& attend) const;
  // For the attention of a layer that reads what the last anchor chose, KV head h of it list
  // list_of[h] (null: its own, or the only one): enqueues all tiles but the last ones that fit the
  // stage, and points it at those.
  void Gather(const AttendArgs& all, const int32_t* list_of, AttendArgs& last) const;

 private:
  Status Allocate(PolicyMemory& memory);
  int64_t Chosen(int64_t n) const {
    return std::min<int64_t>(BudgetAt(rule_.budget, rule_.share, n, rule_.least), n);
  }
  int32_t TilesOf(int32_t n_rows) const { return (n_rows + tile_ - 1) / tile_; }
  void UploadTiles(const LayerStep& step, const AttendArgs& attend) const;
  // The rows that `kv` has, by block tables of the tiles in the stage.
  KvView Source(const KvView& kv) const;
  // Calls visit(first, n) for tiles that are in the stage together.
  template <typename Visit>
  void ForGroups(int32_t n_rows, const Visit& visit) const;

  PolicyContext context_;
  RangeRule rule_;
  bool on_ = false;
  int32_t tile_ = 1;         // rows
  int32_t tiles_ = 1;        // of a step
  int32_t together_ = 1;     // tiles in the stage
  int32_t lists_ = 1;        // 1, or n_kv_heads
  int32_t capacity_ = 0;     // tokens that a list has room for
  int32_t slot_blocks_ = 0;  // blocks of a tile in the stage
  int64_t stride_ = 0;       // tokens

  Buffer lse_;                    // f32 [max_rows, n_heads]
  Buffer weights_;                // f32 [together, lists, stride]
  Buffer index_, count_;          // int32 [tiles, lists, capacity], [tiles, lists]
  Buffer mapped_;                 // int32 [together, lists, capacity]: index_ by list_of
  Buffer one_;                    // f32 [1]: 1
  Buffer n_candidates_, n_pick_;  // int32 [tiles]
  Buffer bounds_;                 // int32 [tiles, 2]: the tile's own tokens
  Buffer seqs_;                   // SeqMeta [tiles]: the tiles as sequences of the prompt's rows
  Buffer stage_seqs_;             // SeqMeta [tiles]: as sequences in the stage, by group
  Buffer stage_rows_;             // RowMeta [max_rows]
  Buffer source_blocks_;          // int32 [together, seq_blocks]: the sequence's block table
  Buffer stage_blocks_;           // int32 [together, seq_blocks]: the stage's
  Buffer stage_;                  // rows of a layer
};

}  // namespace omnikv
