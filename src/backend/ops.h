// The operations of a step: plain arguments, fused for decode, the same for every backend. Pointers
// are to the backend's memory. Activations are f32; arrays are dense and row-major. Shapes stand in
// the comments: n_rows tokens of n_seqs sequences, d = d_model.
//
// The residual belongs to the reader: a projection returns a raw y, and the op that reads the
// residual next adds it (Residual, below). Each pending y is added exactly once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>
#include <variant>

#include "backend/attn_plan.h"
#include "backend/index_ops.h"
#include "backend/sampling.h"
#include "backend/score_ops.h"
#include "backend/value_ops.h"
#include "base/dtype.h"

namespace omnikv {

class ThreadPool;
namespace cuda {
struct Launch;
}

// A weight matrix [n_out, n_in], row-major, as it is stored: y = W x. Rows lie row_bytes apart.
struct WeightRef {
  DType format = DType::kF32;
  const void* data = nullptr;  // null: absent
  int64_t n_out = 0;
  int64_t n_in = 0;
  int64_t row_bytes = 0;

  bool operator==(const WeightRef&) const = default;
  const std::byte* Row(int64_t i) const {
    return static_cast<const std::byte*>(data) + i * row_bytes;
  }
};

// The prologue of an op that reads the residual stream:
//   x += scale * post_norm(y)   (skipped when y is null; post_norm null: y itself)
//   h  = norm(x)                (norm null: x itself)
// with RMS norms, w * v / sqrt(mean(v²) + eps). x is updated in place.
struct Residual {
  float* x = nullptr;                // [n_rows, d]
  const float* y = nullptr;          // [n_rows, d]
  const float* post_norm = nullptr;  // [d]
  const float* norm = nullptr;       // [d]
  float scale = 1;
  float eps = 0;
  int32_t d = 0;

  bool operator==(const Residual&) const = default;
};

// x[r] = scale * table[tokens[r]].
struct EmbedArgs {
  const int32_t* tokens = nullptr;  // [n_rows]
  WeightRef table;                  // [vocab, d]
  float scale = 1;
  float* x = nullptr;  // [n_rows, d]
  int32_t n_rows = 0;

  bool operator==(const EmbedArgs&) const = default;
};

// cos_sin[r][i] = (cos, sin)(pos[r] * inv_freq[i]) * magnitude, the product in f32 as published
// implementations compute it. Once a step for each set of frequencies.
struct RopeTableArgs {
  const RowMeta* rows = nullptr;    // [n_rows]
  const float* inv_freq = nullptr;  // [n_freq]
  float magnitude = 1;              // yarn's and longrope's attention factor
  float* cos_sin = nullptr;         // [n_rows, n_freq, 2]
  int32_t n_freq = 0;
  int32_t n_rows = 0;

  bool operator==(const RopeTableArgs&) const = default;
};

enum class QkNorm : int32_t {
  kNone,
  kPerHead,  // over each head's dk values, one weight [dk] for all heads (Qwen3, Gemma 3)
  kFull,     // over all heads together, weight [n_heads * dk] (OLMo 2)
};

// Where a decode step's row of sequence s goes instead of its home: row row[s] of planes that begin
// at `k` and `v` and else are those of the view.
struct KvSlot {
  std::byte *k = nullptr, *v = nullptr;  // null: home
  const int32_t* row = nullptr;          // [n_seqs]; -1: home

  bool operator==(const KvSlot&) const = default;
};

// h = prologue; q, k, v = W h + b; q and k normed, then rotated (value i with value i + n_freq, the
// "half" pairing; values past 2 * n_freq pass); k and v appended to the bank, rounded to its dtype.
// For who needs the new rows' K and would not look for them in the bank: k_out has it as it was
// appended, k_raw_out as it was before it was rotated and rounded.
struct NormQkvRopeAppendArgs {
  Residual in;
  WeightRef wq, wk, wv;  // [n_heads * dk | n_kv_heads * dk | * dv, d]
  const float *bq = nullptr, *bk = nullptr, *bv = nullptr;  // null: none
  QkNorm qk_norm = QkNorm::kNone;
  const float *q_norm = nullptr, *k_norm = nullptr;
  float qk_norm_eps = 0;
  const float* cos_sin = nullptr;  // [n_rows, n_freq, 2]; null: no rotation (NoPE layers)
  int32_t n_freq = 0;
  float* q = nullptr;          // [n_rows, n_heads, dk]
  float* k_out = nullptr;      // [n_rows, n_kv_heads, dk]; null: not wanted
  float* k_raw_out = nullptr;  // [n_rows, n_kv_heads, dk]; null: not wanted
  int32_t n_heads = 0;
  KvView kv;
  KvSlot slot;
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  int32_t n_rows = 0;

  bool operator==(const NormQkvRopeAppendArgs&) const = default;
};

// K and V of the planes' head 0 in the row that is appended.
struct KvTarget {
  std::byte *k, *v;
};
OMNIKV_HOST_DEVICE inline KvTarget TargetIn(const KvView& kv, const KvSlot& slot,
                                            const SeqMeta* seqs, const RowMeta& row) {
  const int32_t at = slot.k != nullptr ? slot.row[row.seq] : -1;
  if (at >= 0) return {slot.k + at * kv.k.row_bytes, slot.v + at * kv.v.row_bytes};
  const int64_t home = kv.RowIndex(seqs[row.seq].table_off, row.pos);
  return {kv.k.Head(home, 0), kv.v.Head(home, 0)};
}
template <typename Args>
OMNIKV_HOST_DEVICE KvTarget TargetOf(const Args& a, const RowMeta& row) {
  return TargetIn(a.kv, a.slot, a.seqs, row);
}

// Rows of a step that were appended elsewhere go to their places: row r is row r of `from`, without
// a block table, or with `by_table` the row that `from` has at its position. Bytes are copied, so
// no bit changes. Each view gets the heads that it has (KvView::heads). With `head_step`, `kv` has
// one head, and each head of `from` has a row of its own there, as LocateRowsArgs with several
// heads numbers them. REQUIRES planes of the same formats and head sizes.
struct StoreRowsArgs {
  KvView from;  // of all heads
  KvView kv;
  KvView rest = {};  // a second view; without a base: none. REQUIRES neither `slot` nor head_step
  KvSlot slot;
  const RowMeta* rows = nullptr;  // [n_rows]; with `head_step` those of RowOf
  const SeqMeta* seqs = nullptr;
  int32_t n_rows = 0;
  int32_t row_step = 1;
  int32_t head_step = 0;  // 0: all heads of a row go to one
  bool by_table = false;  // REQUIRES no head_step

  bool operator==(const StoreRowsArgs&) const = default;
  OMNIKV_HOST_DEVICE const RowMeta& RowOf(int32_t r, int32_t h) const {
    return rows[int64_t{r} * row_step + int64_t{h} * head_step];
  }
  // K and V of head 0 in `from` of row r of the step.
  OMNIKV_HOST_DEVICE KvTarget Source(int32_t r) const {
    int64_t at = r;
    if (by_table) at = from.RowIndex(seqs[rows[r].seq].table_off, rows[r].pos);
    return {from.k.Head(at, 0), from.v.Head(at, 0)};
  }
  OMNIKV_HOST_DEVICE bool HasRest() const { return rest.k.base != nullptr; }
  // The head of the planes of `to` that gets head h of `from`; -1: none.
  OMNIKV_HOST_DEVICE int32_t To(const KvView& to, int32_t h) const {
    if (head_step != 0) return 0;
    return to.heads.Has(h) ? to.Place(h) : -1;
  }
};

// What a mask of KV heads names of each row, `width` values a head, side by side; or `back` from
// there. With n heads of the mask before head h:
//   to[r][n] = from[r][h], or to[r][h] = from[r][n]
// Of what the mask does not name, `to` keeps what it holds. On a device, `from` may also lie in
// shared memory (Backend::AllocateShared).
struct PickHeadsArgs {
  const float* from = nullptr;  // [n_rows, n_heads, width], or `back` [n_rows, heads named, width]
  float* to = nullptr;          // the other
  HeadMask heads = {};          // below n_heads
  int32_t n_heads = 0;
  int32_t width = 0;
  int32_t n_rows = 0;
  bool back = false;

  bool operator==(const PickHeadsArgs&) const = default;
  OMNIKV_HOST_DEVICE int32_t Named() const { return heads.Count(n_heads); }
  // Where the n-th of them begins in row r of `from`, and of `to`.
  OMNIKV_HOST_DEVICE int64_t From(int32_t r, int32_t n, int32_t named) const {
    return (back ? int64_t{r} * named + n : int64_t{r} * n_heads + heads.Head(n)) * width;
  }
  OMNIKV_HOST_DEVICE int64_t To(int32_t r, int32_t n, int32_t named) const {
    return (back ? int64_t{r} * n_heads + heads.Head(n) : int64_t{r} * named + n) * width;
  }
};

enum class ScoreKind : int32_t {
  kNone,
  kLogits,   // scores [n_rows, n_heads, score_stride]: scaled (and capped) logits, per head
  kHeadMax,  // scores [n_rows, score_stride]: their maximum over heads
};

// Grouped-query attention of each row over its plan, one softmax over all segments:
//   logit = softcap(scale * q·k),  o = sum softmax(logit) v,  lse = log sum exp(logit).
// Scores are written at index = token position, and need a plan of one range without window.
// A row that reads no token gives o = 0 and lse = -inf.
// With lse_in, the sum is that of more tokens than the plan's: o = sum exp(logit - lse_in) v.
// Some KV heads may take part, with the query heads of their groups: those that `kv` has, or fewer.
// Scores are theirs, and outputs of the others stay as they are.
struct AttendArgs {
  const float* q = nullptr;       // [n_rows, n_heads, dk]
  float* o = nullptr;             // [n_rows, n_heads, dv]; null: scores only
  float* lse = nullptr;           // [n_rows, n_heads]; null: not wanted
  const float* lse_in = nullptr;  // [n_rows, n_heads]; null: the plan's own
  KvView kv;
  AttnPlan plan;
  const RowMeta* rows = nullptr;
  const SeqMeta* seqs = nullptr;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  float scale = 1;
  float softcap = 0;  // c > 0: c * tanh(logit / c)
  ScoreKind score = ScoreKind::kNone;
  float* scores = nullptr;
  int64_t score_stride = 0;  // tokens of room in a row of scores
  HeadMask heads = {};       // KV heads that take part, of those that `kv` has; all: all of these
  int32_t busy_seqs = 0;     // that have rows, at most; 0: all n_seqs may. Only speed depends on it
  // The logits of all tokens that the plan may name, where a score op has made them of the same
  // queries and K; null: unknown. Attention computes its own; who attends in its place may take
  // these (bank/summed_values.h).
  const float* logits = nullptr;  // [n_rows, n_heads, logits_stride]
  int64_t logits_stride = 0;      // tokens

  bool operator==(const AttendArgs&) const = default;
  OMNIKV_HOST_DEVICE int32_t BusySeqs() const { return busy_seqs > 0 ? busy_seqs : n_seqs; }
  OMNIKV_HOST_DEVICE int32_t Group() const { return n_heads / kv.n_kv_heads; }
  // KV heads that take part, how many they are, and their query heads.
  OMNIKV_HOST_DEVICE const HeadMask& TakePart() const { return heads.All() ? kv.heads : heads; }
  OMNIKV_HOST_DEVICE int32_t KvHeads() const { return TakePart().Count(kv.n_kv_heads); }
  OMNIKV_HOST_DEVICE int32_t Heads() const { return KvHeads() * Group(); }
  // The i-th of each.
  OMNIKV_HOST_DEVICE int32_t KvHead(int32_t i) const { return TakePart().Head(i); }
  OMNIKV_HOST_DEVICE int32_t Head(int32_t i) const {
    return KvHead(i / Group()) * Group() + i % Group();
  }
  // The other way round, of a query head that takes part.
  OMNIKV_HOST_DEVICE int32_t Number(int32_t head) const {
    return TakePart().Before(head / Group()) * Group() + head % Group();
  }
};

inline constexpr int32_t kMaxStates = 8;

// What an attention over some of the tokens gave.
struct AttendState {
  const float* o = nullptr;    // [n_rows, n_heads, dv]
  const float* lse = nullptr;  // [n_rows, n_heads]

  bool operator==(const AttendState&) const = default;
};

// Attentions of the same queries over different tokens, as one over all of them:
//   lse = log sum exp(lse_i),  o = sum exp(lse_i - lse) o_i,  summed in the order of the parts.
// A part with lse_i = -inf read no token: its o is not looked at. Where all are such, o = 0 and
// lse = -inf. o and lse may be those of a part. On a device, parts may also lie in shared memory
// (Backend::AllocateShared), and are read once.
struct MergeStatesArgs {
  std::array<AttendState, kMaxStates> parts{};
  int32_t n_parts = 0;
  float* o = nullptr;    // [n_rows, n_heads, dv]
  float* lse = nullptr;  // [n_rows, n_heads]; null: not wanted
  int32_t n_rows = 0;
  int32_t n_heads = 0;
  int32_t dv = 0;

  bool operator==(const MergeStatesArgs&) const = default;
};

// y = W x + b.
struct LinearArgs {
  const float* x = nullptr;  // [n_rows, n_in]
  WeightRef w;               // [n_out, n_in]
  const float* bias = nullptr;
  float* y = nullptr;  // [n_rows, n_out]
  int32_t n_rows = 0;

  bool operator==(const LinearArgs&) const = default;
};

enum class Activation : int32_t { kSilu, kGeluTanh };

// h = prologue; out = act(gate h + b) * (up h + b).
struct NormGatedFfnArgs {
  Residual in;
  WeightRef gate, up;  // [ffn, d]
  const float *gate_bias = nullptr, *up_bias = nullptr;
  Activation act = Activation::kSilu;
  float* out = nullptr;  // [n_rows, ffn]
  int32_t n_rows = 0;

  bool operator==(const NormGatedFfnArgs&) const = default;
};

// h = prologue; logits of chosen rows = softcap(scale * (head h + b)).
struct NormLogitsArgs {
  Residual in;
  WeightRef head;  // [vocab, d]
  const float* bias = nullptr;
  float scale = 1;
  float softcap = 0;
  const int32_t* out_rows = nullptr;  // [n_out]: rows that need logits; null: all
  float* logits = nullptr;            // [n_out, vocab]
  int32_t n_rows = 0;
  int32_t n_out = 0;

  bool operator==(const NormLogitsArgs&) const = default;
};

// Working sets: slots that stand in for rows of K/V that live further away, n_slots of them for
// each sequence. The tokens that a sequence selected, its list and then the range of its last
// tokens, each get a slot: the one they have (a hit), or that of a token that was not selected (a
// miss). The slots of no token are given first, and then those that were read longest ago, where
// what was often found stays longer, or by what AverageScoresArgs said just before; that op also
// names tokens that are not selected and have no slot, whose rows come ahead, for later steps. In
// `ref`'s words (score_ops.h says what used[s] is), for each sequence that has rows in the step,
// with its own part of every array:
//   step = ++*clock
//   for i: t = token i of the selection;  s = slot_of[t];
//     if s >= 0: used[s] = SlotFound(used[s], step)
//   given = of the slots with SlotAge(used[s], step) > 0 as many as tokens i have no slot and
//   tokens come ahead: those of the highest age, and among equals of the lowest number;  ascending
//   for i without a slot, in order, and then for each t of `ahead` but -1: s = the next of `given`
//     slot_of[owner[s]] = -1;  owner[s] = t;  slot_of[t] = s;  used[s] = SlotCame(2 * step);
//     a miss, unless t is the step's own token, whose row is yet to be made, or comes ahead
//   slots[i] = slot of token i
//   the step's own token t, where it was not selected: s = slot_of[t];  slot_of[t] = owner[s] = -1,
//   used[s] = 0
// since its row is about to be made anew at its home. The numbers of slots in `slots`, miss_slot,
// ahead_slot and own count through all sequences: slot s of sequence q is q * n_slots + s. A
// sequence without rows misses nothing, and what it had stays. REQUIRES as many slots as tokens can
// be selected and come ahead.
struct WorkingSetArgs {
  const SeqMeta* seqs = nullptr;         // [n_seqs]
  const int32_t* index = nullptr;        // [n_seqs, index_stride], [count]: ascending tokens
  const int32_t* count = nullptr;        // [n_seqs]
  const int32_t* bounds = nullptr;       // [n_seqs, 2]: the range, after the listed tokens
  const int32_t* block_table = nullptr;  // as KvView's
  int32_t block_tokens = 0;
  int32_t index_stride = 0;
  int32_t capacity = 0;    // tokens that a sequence selects, at most
  int32_t n_slots = 0;     // of a sequence
  int32_t max_tokens = 0;  // of a sequence
  int32_t n_seqs = 1;
  // Benchmarks, whose made-up text has no habits: below 0, as said; else token i takes slot i and
  // is a miss or not by lot, so that this share of them are hits. What is then read is meaningless.
  // `omnikv bench` alone sets it, on its way to the backend. An op of its own for it would be
  // another step than the one that is measured.
  float simulated_hits = -1;
  const int32_t* ahead = nullptr;  // [n_seqs, max_ahead]; null: none
  int32_t max_ahead = 0;

  int32_t* slot_of = nullptr;  // [n_seqs, max_tokens]: below n_slots; -1: none
  int32_t* owner = nullptr;    // [n_seqs, n_slots]: token; -1: none
  uint32_t* used = nullptr;    // [n_seqs, n_slots]: when, and how often; 0: by no token
  uint32_t* clock = nullptr;   // [n_seqs]: steps

  int32_t* slots = nullptr;       // [n_seqs, capacity]: of the selected tokens, in logical order
  int32_t* miss_row = nullptr;    // [n_seqs, capacity]: physical rows
  int32_t* miss_slot = nullptr;   // [n_seqs, capacity]
  int32_t* n_miss = nullptr;      // [n_seqs]
  int32_t* own = nullptr;         // [n_seqs]: slot of the step's own token; -1: not selected
  int32_t* own_row = nullptr;     // [n_seqs]: its physical row
  int32_t* n_own = nullptr;       // [n_seqs]: 1 if it was selected, else 0
  int32_t* span = nullptr;        // [n_seqs, 2]: 0 and the number of selected tokens
  SeqMeta* slot_seqs = nullptr;   // [n_seqs]: sequences whose tokens are `slots`
  int32_t* ahead_row = nullptr;   // [n_seqs, max_ahead], [n_ahead]: physical rows
  int32_t* ahead_slot = nullptr;  // [n_seqs, max_ahead]
  int32_t* n_ahead = nullptr;     // [n_seqs]
  uint64_t* counters = nullptr;   // [n_seqs, 3]: tokens selected, tokens missed, the own token in
                                  // neither, and rows ahead, added to

  bool operator==(const WorkingSetArgs&) const = default;

  // The same of sequence q alone: all its arrays begin with its part.
  OMNIKV_HOST_DEVICE WorkingSetArgs Of(int32_t q) const {
    WorkingSetArgs a = *this;
    const int64_t i = q;
    a.n_seqs = 1;
    a.seqs += i, a.index += i * index_stride, a.count += i, a.bounds += 2 * i;
    a.slot_of += i * max_tokens, a.owner += i * n_slots, a.used += i * n_slots, a.clock += i;
    if (ahead != nullptr) a.ahead += i * max_ahead, a.n_ahead += i;
    a.ahead_row += i * max_ahead, a.ahead_slot += i * max_ahead;
    a.slots += i * capacity, a.miss_row += i * capacity, a.miss_slot += i * capacity;
    a.n_miss += i, a.own += i, a.own_row += i, a.n_own += i, a.span += 2 * i, a.slot_seqs += i;
    a.counters += 3 * i;
    return a;
  }
};

// How much each token of a sequence is worth a slot: an average of its scores over the steps, and
// by it the age of its slot, or whether its row comes ahead. After a selection and before its
// WorkingSetArgs, for each sequence s that has rows in the step, with its own part of every array:
//   for t < kv_len: x = scores[(kv_len - 1) % window][t] where t < n_candidates[s], else 1
//     average[t] = AverageScore(average[t], bits of x)
//     where slot_of[t] >= 0: used[slot_of[t]] = SlotScored(average[t], *clock + 1)
//   for j < max_ahead: ahead[j] = of the tokens t < n_candidates[s] with t / kAheadTile % max_ahead
//     = j that have no slot, are not in index and are not the step's own: that of the highest
//     average, and of equals the first; -1: none
// REQUIRES max_ahead > 0.
struct AverageScoresArgs {
  const SeqMeta* seqs = nullptr;          // [n_seqs]
  const float* scores = nullptr;          // [n_seqs, window, stride]: of the step, 0 to 1
  const int32_t* n_candidates = nullptr;  // [n_seqs]: that have scores; later tokens are the last
  const int32_t* index = nullptr;         // [n_seqs, index_stride], [count]: the selected of them
  const int32_t* count = nullptr;         // [n_seqs]
  int64_t stride = 0;                     // tokens
  int32_t window = 1;
  int32_t index_stride = 0;
  int32_t max_ahead = 0;
  int32_t n_slots = 0;     // of a sequence
  int32_t max_tokens = 0;  // of a sequence
  int32_t n_seqs = 1;
  const int32_t* slot_of = nullptr;  // [n_seqs, max_tokens]
  const uint32_t* clock = nullptr;   // [n_seqs]
  uint32_t* average = nullptr;       // [n_seqs, max_tokens]
  uint32_t* used = nullptr;          // [n_seqs, n_slots]
  int32_t* ahead = nullptr;          // [n_seqs, max_ahead]

  bool operator==(const AverageScoresArgs&) const = default;

  // The same of sequence s alone, whose scores are those of this step.
  OMNIKV_HOST_DEVICE AverageScoresArgs Of(int32_t s) const {
    AverageScoresArgs a = *this;
    const int64_t i = s;
    a.n_seqs = 1;
    a.scores += (i * window + (seqs[s].kv_len - 1) % window) * stride;
    a.seqs += i, a.n_candidates += i, a.index += i * index_stride, a.count += i;
    a.slot_of += i * max_tokens, a.clock += i, a.average += i * max_tokens;
    a.used += i * n_slots, a.ahead += i * max_ahead;
    return a;
  }
};
inline constexpr int32_t kAheadTile = 32;  // tokens

// Row to_row[l][i] of `to` = row from_row[l][i] of `from`, for each list l and i < n[l], but for
// the gap_bytes from `gap` on, which stay as they are.
struct FetchRowsArgs {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t row_bytes = 0;
  const int32_t* from_row = nullptr;  // [lists, capacity]
  const int32_t* to_row = nullptr;    // [lists, capacity]
  const int32_t* n = nullptr;         // [lists]
  int32_t capacity = 0;               // of a list
  int32_t lists = 1;
  int64_t gap = 0, gap_bytes = 0;  // REQUIRES none where rows lie on a disk

  bool operator==(const FetchRowsArgs&) const = default;
  OMNIKV_HOST_DEVICE int64_t CopiedBytes() const { return row_bytes - gap_bytes; }
};

// Selections of units, for slots that each hold a piece of them: a unit, or a block of K/V where
// units are larger. For each sequence s that has rows in the step, with i < count[s], j < per_unit:
//   to_index[s][i * per_unit + j] = index[s][i] * per_unit + j;  to_count[s] = count[s] * per_unit
// Others list nothing. And every sequence as the ops know it that take pieces for tokens, and as a
// PieceTable numbers it:
//   by_piece[s] = seqs[s], but kv_len = the pieces that its tokens begin
//   by_table[s] = seqs[s], but table_off = s * table_stride
struct ListPiecesArgs {
  const SeqMeta* seqs = nullptr;   // [n_seqs]
  const int32_t* index = nullptr;  // [n_seqs, capacity], [count]: ascending units, all of them full
  const int32_t* count = nullptr;  // [n_seqs]
  int32_t* to_index = nullptr;     // [n_seqs, to_capacity]
  int32_t* to_count = nullptr;     // [n_seqs]
  SeqMeta* by_piece = nullptr;     // [n_seqs]
  SeqMeta* by_table = nullptr;     // [n_seqs]
  int32_t capacity = 0;
  int32_t to_capacity = 0;
  int32_t per_unit = 1;
  int32_t piece_tokens = 1;
  int32_t table_stride = 0;
  int32_t n_seqs = 1;

  bool operator==(const ListPiecesArgs&) const = default;
};

// A block table of pieces, of all that a plan reads: listed pieces are in slots, and those of the
// plan's range of last tokens in rows of their own, whose block table is `last`. For each sequence
// s that has rows in the step, with i < count[s], and for each piece p that begins in bounds[s]:
//   table[s][index[s][i]] = slots[s][i]
//   table[s][p] = first_last + last[seqs[s].table_off + p / per_block] * per_block + p % per_block
// Other entries stay. REQUIRES a range that begins where a piece does.
struct PieceTableArgs {
  const SeqMeta* seqs = nullptr;    // [n_seqs]
  const int32_t* index = nullptr;   // [n_seqs, capacity], [count]: pieces before the range
  const int32_t* count = nullptr;   // [n_seqs]
  const int32_t* slots = nullptr;   // [n_seqs, capacity]
  const int32_t* bounds = nullptr;  // [n_seqs, 2]: tokens
  const int32_t* last = nullptr;    // as KvView's
  int32_t* table = nullptr;         // [n_seqs, table_stride]
  int32_t capacity = 0;
  int32_t table_stride = 0;
  int32_t first_last = 0;  // pieces before those rows
  int32_t piece_tokens = 1;
  int32_t per_block = 1;  // pieces of a block of `last`
  int32_t n_seqs = 1;

  bool operator==(const PieceTableArgs&) const = default;
  OMNIKV_HOST_DEVICE int32_t OfLast(int32_t s, int32_t p) const {
    return first_last + last[seqs[s].table_off + p / per_block] * per_block + p % per_block;
  }
};

// Where the rows of a step stand in a table whose sequences have lost tokens: row i of a sequence
// there is the i-th of those that it holds. With place(p) = min(p - gone[s], most):
//   to_rows[r] = {rows[r].seq, place(rows[r].pos)}
//   to_seqs[s] = seqs[s], but kv_len = place(kv_len - 1) + 1 and prompt_len less by gone[s], or 0
//   pos[i][row of to_rows[r]][l] = rows[r].pos, for all i and l
// Sequences without rows in the step have kv_len = 0. Ops that are given these instead of the
// step's own read and write such a table as they do any other.
//
// With n heads > 1, each KV head has a table of its own, `table_stride` entries after that of the
// head before, and has lost tokens of its own. It then is a sequence of its own: head h of sequence
// s is s * n + h, and its row r is
//   by_head  h * n_rows + r, so that the rows of a head follow one another
//   else     r * n + h, as [n_rows, n] lie. REQUIRES sequences of one row
// What is said of row r and sequence s above then holds of each of them.
struct LocateRowsArgs {
  const RowMeta* rows = nullptr;  // [n_rows]
  const SeqMeta* seqs = nullptr;  // [n_seqs]
  const int32_t* gone = nullptr;  // [n_seqs, heads]: tokens
  int32_t most = kToEnd;          // the last place: of each row that would come after it too
  RowMeta* to_rows = nullptr;     // [n_rows, heads], or [heads, n_rows]
  SeqMeta* to_seqs = nullptr;     // [n_seqs, heads]
  // Positions of the tokens, [n_pos] layers: [rows of the table, lists].
  int32_t* const* pos = nullptr;
  const int32_t* block_table = nullptr;  // as KvView's
  int32_t block_tokens = 1;
  int32_t n_pos = 0;
  int32_t lists = 1;
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t heads = 1;
  int32_t table_stride = 0;  // entries
  bool by_head = false;

  bool operator==(const LocateRowsArgs&) const = default;
  // Of head h: where row r is in to_rows, and what stands there; sequence s in to_seqs.
  OMNIKV_HOST_DEVICE int32_t RowAt(int32_t r, int32_t h) const {
    return by_head ? h * n_rows + r : r * heads + h;
  }
  OMNIKV_HOST_DEVICE int32_t Place(int32_t seq, int32_t at) const {
    const int32_t place = at - gone[seq];
    return place < most ? place : most;
  }
  OMNIKV_HOST_DEVICE RowMeta Row(int32_t r, int32_t h) const {
    const int32_t seq = rows[r].seq * heads + h;
    return {seq, Place(seq, rows[r].pos)};
  }
  OMNIKV_HOST_DEVICE SeqMeta Seq(int32_t s, int32_t h) const {
    SeqMeta seq = seqs[s];
    const int32_t of_head = s * heads + h;
    const int32_t prompt = seq.prompt_len - gone[of_head];
    seq.q_begin = RowAt(seq.q_begin, h);
    seq.kv_len = seq.q_len == 0 ? 0 : Place(of_head, seq.kv_len - 1) + 1;
    seq.table_off += h * table_stride;
    seq.prompt_len = prompt > 0 ? prompt : 0;
    return seq;
  }
};

// Chosen rows move to the front of their sequence, K and V, as if all were read before any is
// written: for i < count[s][l], and then for those in bounds[s],
//   row i = row index[s][l][i],
// the heads of list l alone: all KV heads (lists = 1), or KV head l. Sequences without rows in the
// step keep theirs. Where `from` has a base, row index[i] is one of it, at position index[i].
// Scores of the rows go along, from and to the slot of the step.
// REQUIRES that each list ascends strictly and ends before its bounds, hence index[i] >= i, and
// rows that no other sequence reads; scores that lie apart, or in the same ring.
struct CompactArgs {
  KvView kv;
  KvView from;                      // in other memory; without a base: kv itself
  const SeqMeta* seqs = nullptr;    // [n_seqs]
  const SeqMeta* steps = nullptr;   // [n_seqs], with `scores`: of the step, whose kv_len counts all
                                    // tokens
  const int32_t* index = nullptr;   // [n_seqs, lists, capacity]
  const int32_t* count = nullptr;   // [n_seqs, lists]
  const int32_t* bounds = nullptr;  // [n_seqs, 2]; null: none
  int32_t* pos = nullptr;           // [rows of kv, lists]: what else moves; null: nothing
  ScoreRing scores;                 // the same: no scores
  ScoreRing to_scores;
  int32_t capacity = 0;
  int32_t lists = 1;  // 1, or n_kv_heads
  int32_t n_seqs = 0;

  bool operator==(const CompactArgs&) const = default;
  OMNIKV_HOST_DEVICE bool InPlace() const { return from.k.base == nullptr; }
  OMNIKV_HOST_DEVICE const KvView& Source() const { return InPlace() ? kv : from; }
  // KV heads of a list that move one by one, since they lie apart; 1: those of a list together.
  OMNIKV_HOST_DEVICE int32_t Split() const {
    return lists == 1 && (kv.ByHead() || Source().ByHead()) ? kv.n_kv_heads : 1;
  }
};

// The last so many evictions of a sequence can be undone: more than the steps that run ahead of the
// host.
inline constexpr int32_t kEvictionLog = 4;

// What evictions have overwritten, by the length n of the context after the step that did: entry
// n % kEvictionLog.
struct EvictionLog {
  std::byte* rows = nullptr;  // [n_seqs, kEvictionLog, row bytes]
  int32_t* length = nullptr;  // [n_seqs, kEvictionLog, lists]: n
  int32_t* victim = nullptr;  // [n_seqs, kEvictionLog, lists]: row; -1: none
  int32_t* pos = nullptr;     // [n_seqs, kEvictionLog, lists]

  bool operator==(const EvictionLog&) const = default;
};

// Each sequence that has a row in the step and more than `most` rows gives one up, for each list
// that of the lowest score (of equals the last) but for the rows of the last `recent` tokens: the
// step's own row, which is the last, moves into its place, with its score. Lists are those of
// CompactArgs.
// REQUIRES one row per sequence, and rows that no other sequence reads.
struct EvictArgs {
  KvView kv;
  const SeqMeta* seqs = nullptr;   // [n_seqs]: of the table
  const SeqMeta* steps = nullptr;  // [n_seqs]: of the step, whose kv_len counts all tokens
  ScoreRing scores;                // of rows, the slot of the step
  int32_t* pos = nullptr;          // [rows of kv, lists]; null: nothing, and no `recent`
  EvictionLog log;
  int32_t most = 0;    // rows
  int32_t recent = 0;  // tokens, below `most`
  int32_t lists = 1;   // 1, or n_kv_heads
  int32_t n_seqs = 0;

  bool operator==(const EvictArgs&) const = default;
};

// Whether row i of a sequence is of its last `recent` tokens.
OMNIKV_HOST_DEVICE inline bool IsRecent(const EvictArgs& a, int32_t s, int32_t l, int32_t i) {
  if (a.recent == 0) return false;
  const int64_t row = a.kv.RowIndex(a.seqs[s].table_off, i);
  return a.pos[row * a.lists + l] >= a.steps[s].kv_len - a.recent;
}

// Undoes the evictions of sequence `seq` in steps after which its context had more than `from`
// tokens, and at most `to`, as far as they ran. REQUIRES to - from <= kEvictionLog, and that they
// were the last.
struct UndoEvictArgs {
  KvView kv;
  int32_t* pos = nullptr;  // [rows of kv, lists]; null: nothing
  EvictionLog log;
  int32_t seq = 0;
  int32_t table_off = 0;  // SeqMeta's, of the sequence
  int32_t lists = 1;
  int64_t from = 0;
  int64_t to = 0;

  bool operator==(const UndoEvictArgs&) const = default;
};

// The choice of a token, and on to the next step: for row r, the only one of its sequence,
//   token = argmax logits[r], of equals the first, or what sample[r] and seen[r] give (sampling.h);
//   out[(*step % ring) * n_rows + r] = token;  TakeSample(token, sample[r], seen[r]);
// (where not all of logits[r] are finite, token = 0 and out[...] = -1),
//   tokens[r] = token;  ++rows[r].pos;  ++group_rows[r].pos;  ++seqs[rows[r].seq].kv_len;
// then ++*step. A step that ends in it can be replayed again without a word from the host.
// REQUIRES vocab <= kMaxSampleVocab with `sample`.
struct NextTokenArgs {
  const float* logits = nullptr;  // [n_rows, vocab]
  int32_t* tokens = nullptr;      // [n_rows]
  RowMeta* rows = nullptr;        // [n_rows]
  RowMeta* group_rows = nullptr;  // [n_rows]; null: none
  SeqMeta* seqs = nullptr;
  SampleMeta* sample = nullptr;  // [n_rows]; null: greedy
  uint32_t* seen = nullptr;      // [n_rows, SeenWords(vocab)], with `sample`
  int32_t* out = nullptr;        // [ring, n_rows]
  uint32_t* step = nullptr;      // [1]
  int64_t vocab = 0;
  int32_t ring = 1;
  int32_t n_rows = 0;

  bool operator==(const NextTokenArgs&) const = default;
};

// Bytes through memory and floating-point operations (a multiply-add is two), the least that an op
// can do: each input read once, each output written once.
struct Cost {
  uint64_t bytes_read = 0;
  uint64_t kv_bytes = 0;  // of those, K/V that an attention reads, and what chooses of them
  uint64_t bytes_written = 0;
  uint64_t flops = 0;

  Cost& operator+=(const Cost& o) {
    bytes_read += o.bytes_read;
    kv_bytes += o.kv_bytes;
    bytes_written += o.bytes_written;
    flops += o.flops;
    return *this;
  }
};

// Bytes of K, and of V where `values`, of one layer's rows for `head_tokens` tokens times KV heads.
uint64_t KvBytes(const KvView& kv, int64_t head_tokens, bool values);

// Arrays that a cost depends on, as the host reads them: in place here. What `Of` returns lives as
// long as this.
class HostArrays {
 public:
  virtual ~HostArrays() = default;
  template <typename T>
  const T* Of(const T* values, int64_t n) {
    return static_cast<const T*>(Bytes(values, static_cast<size_t>(n) * sizeof(T)));
  }

 private:
  virtual const void* Bytes(const void* values, size_t bytes) {
    static_cast<void>(bytes);
    return values;
  }
};

// A policy's own op: a table of implementations with static storage, and its argument struct (plain
// data, at most kCustomBytes) by value.
struct CustomKernels {
  const char* name;
  void (*ref)(const void* args);
  void (*cpu)(const void* args, ThreadPool& pool);
  // Enqueues it as our kernels are enqueued (cuda/launch.h), with no scratch; null in builds
  // without CUDA.
  void (*cuda)(const void* args, const cuda::Launch& launch);
  // Reads arrays of the backend's memory through `arrays` alone.
  Cost (*cost)(const void* args, HostArrays& arrays);
};

inline constexpr size_t kCustomBytes = 128;

struct CustomArgs {
  const CustomKernels* kernels = nullptr;
  alignas(8) std::array<std::byte, kCustomBytes> args{};

  bool operator==(const CustomArgs&) const = default;
};

// A policy's op with its arguments, which must have no padding: ops are compared byte by byte.
template <typename Args>
CustomArgs MakeCustomArgs(const CustomKernels& kernels, const Args& args) {
  static_assert(sizeof(Args) <= kCustomBytes && std::has_unique_object_representations_v<Args>);
  CustomArgs op{.kernels = &kernels};
  std::memcpy(op.args.data(), &args, sizeof(Args));
  return op;
}

using Op =
    std::variant<EmbedArgs, RopeTableArgs, NormQkvRopeAppendArgs, StoreRowsArgs, AttendArgs,
                 LinearArgs, NormGatedFfnArgs, NormLogitsArgs, ScoreReduceArgs, ScoreArgs,
                 BlockSummaryArgs, BlockScoreArgs, KeyScoreArgs, IndexKeysArgs, IndexScoreArgs,
                 RescoreArgs, QueryMomentsArgs, ExpectedScoreArgs, AgedScoresArgs, PoolArgs,
                 PlanRangeArgs, TopKArgs, AverageScoresArgs, WorkingSetArgs, FetchRowsArgs,
                 ListPiecesArgs, PieceTableArgs, NextTokenArgs, MergeStatesArgs, PickLogitsArgs,
                 SumValuesArgs, PickHeadsArgs, LocateRowsArgs, CompactArgs, EvictArgs,
                 UndoEvictArgs, CustomArgs>;

std::string_view OpName(const Op& op);

// The cost of running `op` now. Attention and selection depend on lengths and counts that lie in
// the backend's memory: REQUIRES the host to be able to read it, or for a policy's own op `arrays`.
Cost CostOf(const Op& op);
Cost CostOf(const CustomArgs& op, HostArrays& arrays);

}  // namespace omnikv
