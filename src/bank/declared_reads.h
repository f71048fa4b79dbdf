// What the layers of a model read in decode steps, as a policy declares it before any step. From
// this the bank decides where K/V lie and how they come near (bank/residency.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "backend/score_ops.h"

namespace omnikv {

// Layers that steps read whole although their K/V may live away from the device: each comes whole
// for every step. What crosses the bus grows with the context, so such steps are not recorded.
struct StreamedLayers {
  int32_t layers = 0;     // the last so many may live away
  bool always = false;    // and do, though the device had room for them
  int32_t min_ahead = 1;  // layers that are on their way before their turn:
  int32_t max_ahead = 1;  // as many of these as there is room for
};

// DeclaredReads::selection_of a layer whose steps read few rows, but by no selection that was made
// before its turn: its K/V may live away from the device, where steps read and write them in place,
// but for what DeclaredReads::max_candidates says.
inline constexpr int32_t kFewRows = -2;

// Of a layer whose attention reads the last tokens alone, in prompts too: its K/V may live away
// from the device, which keeps the rows of the last tokens (bank/last_rows.h). What else the policy
// needs of it, its own ops read in place (LayerStep::home).
inline constexpr int32_t kLastRows = -3;

// Layers that read one selection of tokens can keep what they read together.
struct DeclaredReads {
  // The selection that each layer reads, below n_selections; kFewRows; kLastRows; -1: everything,
  // or ranges of tokens.
  std::vector<int32_t> selection_of;
  int32_t n_selections = 0;
  int64_t max_tokens = 0;  // that a layer reads by a selection in one step, at most
  // Tokens whose rows come ahead of their turn with a selection, at most: of those that no slot
  // holds some that have scored high (Selection::scores). 0: none.
  int64_t max_ahead = 0;
  // Whether a selection is a list of single tokens, the same for all KV heads, which is made before
  // the layers that read it (Policy::Selected): a working set holds it.
  bool by_token = true;
  // Of other selections, which stand in the plans alone: the tokens that an index of their list
  // stands for, a power of two, where one list serves all KV heads and layers that follow each
  // other read one selection. What is listed may then be held on the device, unit by unit, beside
  // the ranges (bank/fetched_units.h). 0: no working set can hold a selection.
  int32_t unit = 0;
  // Of a layer with a selection: its plan's ranges are tokens of the last so many, 1 at least, and
  // all else is lists. So the host can attend to the lists where the K/V are, and the device to the
  // ranges (bank/away_attention.h). 0: it reads otherwise.
  // Of a layer with kLastRows: the attention of a step reads the last so many, back from its last
  // row. So do the policy's ops, but for those that read in place.
  int64_t max_recent = 0;
  // Of layers with kFewRows: a step lists so many tokens at most before their attention, and reads
  // no others but the last max_recent (LayerStep::bring). The device may keep what is listed
  // (bank/fetched_units.h). 0: steps of them read in place.
  int64_t max_candidates = 0;
  StreamedLayers streamed;  // where there are no selections
  // Whether a decode step reads K of all tokens of the layer, and then attends to one list of at
  // most max_tokens for each KV head: its V may live away from the device (bank/fetched_values.h,
  // bank/summed_values.h), where steps with other plans read in place.
  // By layer, or empty: none.
  std::vector<bool> few_values;
  // Lists of a KV head there: its query heads may have one each (KvView::EachQueryHead).
  int32_t value_lists = 1;
  // Whether these attentions have AttendArgs::logits, so that the host can sum such V.
  bool gives_logits = false;
  // Whether Plan may gather rows of a prompt in memory of the policy's own (MakeKvViewOf).
  bool gathers_prompts = false;

  // Whether the listed part of a selection is held by unit, and whether any of it is held.
  bool HeldByUnit() const { return n_selections > 0 && !by_token && unit > 0 && max_recent > 0; }
  bool CanFetch() const { return by_token || HeldByUnit(); }
  // Slots that a working set has at least.
  int64_t LeastSlots() const { return max_tokens + max_ahead; }
  // Lists of tokens that a KV head reads in decode steps of `layer`.
  int32_t ListsOf(int32_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return i < few_values.size() && few_values[i] ? value_lists : 1;
  }
};

// Scores of tokens as a step left them in the backend's memory, 0 to 1.
struct StepScores {
  const float* scores = nullptr;          // [n_seqs, window, stride]; null: none
  const int32_t* n_candidates = nullptr;  // [n_seqs]: tokens with scores, which others follow
  int64_t stride = 0;                     // tokens
  int32_t window = 1;                     // TopKArgs::window
};

// A selection as one step made it: a list of single tokens, then a range by bounds. It is the plan
// that the layers which read it get in that step.
struct Selection {
  int32_t number = 0;
  AttnPlan plan;
  StepScores scores;  // without them, no row comes ahead
};

// How many rows of each layer a policy keeps that chooses some and forgets the others. A row is
// then the n-th token of those that are held (docs/decisions/045), in all that the policy sees of a
// step.
struct Keeps {
  int64_t rows = 0;           // after a prompt, at most; 0: all, and the rest says nothing
  bool first_prompt = false;  // after the first prompt of a sequence alone, not after later ones
  bool every_step = false;    // and after each decode step
  int64_t room = 0;           // rows that come after those, of turns and answers, at most
  // Tokens: a prompt comes in chunks that end at multiples of it, each of which ends in a choice,
  // so that no more rows are held. 0: it ends in one choice.
  int64_t chunk = 0;
  int32_t lists = 1;  // 1, or n_kv_heads: which heads keep the same rows
  // What it chooses by is summed over all rows of a sequence up to the choice. So a sequence cannot
  // be cut back but to nothing, steps that nobody read apart, and no rows that other policies'
  // steps computed can be taken over.
  bool sums = false;
  // Where layers keep different numbers of rows after a prompt (docs/decisions/057): how many each
  // keeps at most, by the policy's numbers of layers, of which `rows` is the largest; and how many
  // of a sequence that has so many tokens after the prompt. Empty: as many in each.
  std::vector<int64_t> layer_rows;
  std::function<int64_t(int32_t layer, int64_t tokens)> rows_after;
  // Where the choice of a first prompt comes after passes over all of its rows (Policy::Passes),
  // and says how many of them each list of each layer keeps: `layer_rows` are then the most, and
  // `rows_after` is the mean to expect.
  bool passes = false;

  // Whether the KV heads of a layer keep different numbers of rows, too (docs/decisions/075): an
  // engine that is opened with such a policy has a table for each of them.
  bool HeadsDiffer() const { return passes && lists > 1; }
  bool LayersDiffer() const { return !layer_rows.empty(); }
  // What `layer` keeps of a sequence of `tokens` after a prompt.
  int64_t RowsAfter(int32_t layer, int64_t tokens) const {
    return std::min(tokens, LayersDiffer() ? rows_after(layer, tokens) : rows);
  }
};

// The rows that a layer keeps, as one step chose them.
struct Retained {
  // After a prompt: ascending lists of rows, then a range of rows by bounds; for the sequences from
  // SeqMeta `first_seq` on. They are no more than Keeps::rows.
  AttnPlan rows;
  int32_t first_seq = 0;
  int32_t n_seqs = 0;
  // In a decode step, of a score for each of up to Keeps::rows + 1 rows: all but that of the lowest
  // one. Rows of the last `recent` tokens stay, too. After a prompt: scores that go along with the
  // rows, to `to_scores`; sequence 0 is `first_seq`.
  ScoreRing scores;
  ScoreRing to_scores;
  int32_t recent = 0;
};

// How the rows of K/V of a bank lie, for who gathers some of them elsewhere.
struct RowLayout {
  int64_t token_bytes = 0;    // of a token in the largest layer: KvView::TokenBytes()
  int32_t block_tokens = 1;   // KvView's
  int32_t seq_blocks = 1;     // entries of a sequence in KvView::block_table
  int32_t table_entries = 0;  // of all sequences
  // Each KV head has rows and a block table of its own. So steps show what is one sequence as one
  // for each KV head, in a layer of one head: head h of sequence s is sequence s * n_kv_heads + h.
  bool heads_apart = false;

  bool operator==(const RowLayout&) const = default;
};

}  // namespace omnikv
