// The ops that score tokens or units of tokens, and choose among them. ops.h says what all ops have
// in common.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "backend/attn_plan.h"

namespace omnikv {

// The score of what is chosen whatever the others have: the highest number there is.
inline constexpr float kChosenFirst = std::numeric_limits<float>::max();

// Some tokens of each sequence: those of a list, which are ascending, and those of a range behind
// it, as far as they are there. Without lists: all tokens.
struct SomeTokens {
  const int32_t* index = nullptr;   // [n_seqs, lists, capacity]; null: no lists
  const int32_t* count = nullptr;   // [n_seqs, lists]
  const int32_t* bounds = nullptr;  // [n_seqs, 2]; null: no range
  int32_t capacity = 0;
  bool by_place = false;  // their scores lie by their places in the list, not by token

  bool operator==(const SomeTokens&) const = default;

  // Those of list l of `lists` that a row at a position reaches.
  class Of {
   public:
    OMNIKV_HOST_DEVICE Of(const SomeTokens& some, const RowMeta& row, int32_t lists, int32_t l) {
      if (some.index == nullptr) {
        end_ = row.pos + 1;
        return;
      }
      const int64_t list = int64_t{row.seq} * lists + l;
      index_ = some.index + list * some.capacity;
      count_ = some.count[list];
      if (some.bounds == nullptr) return;
      begin_ = some.bounds[2 * row.seq];
      const int32_t end = some.bounds[2 * row.seq + 1];
      end_ = end < row.pos + 1 ? end : row.pos + 1;
    }
    OMNIKV_HOST_DEVICE int32_t size() const { return count_ + end_ - begin_; }
    OMNIKV_HOST_DEVICE int32_t At(int32_t i) const {
      return i < count_ ? index_[i] : begin_ + (i - count_);
    }

   private:
    const int32_t* index_ = nullptr;
    int32_t count_ = 0;
    int32_t begin_ = 0;
    int32_t end_ = 0;
  };
};

// Where the logit of row r, head h and token (or unit) t is, of the logits of an op: [n_rows,
// n_heads, stride] or, by token, [n_rows, stride, n_heads].
template <typename Args>
OMNIKV_HOST_DEVICE int64_t LogitAt(const Args& a, int64_t r, int32_t h, int32_t t) {
  return r * a.n_heads * a.stride +
         (a.by_token ? int64_t{t} * a.n_heads + h : int64_t{h} * a.stride + t);
}

// How the scores of the query heads of a list become one score.
enum class HeadReduce : int32_t { kMax, kMean, kSum };

// Per-token scores from per-head logits, for a row at position p, tokens 0..p:
//   out[l][slot][t] = max or sum of exp(logit - lse) over the heads of list l    (OmniKV eq. 3-4)
//                     max or sum of their logits where lse is null
//                     kChosenFirst where t < sinks
// slot = p % ring: a window of past queries keeps its last `ring` rows of reduced scores. List l is
// all heads (lists = 1), or n_heads / lists of them in a row. With a mask of KV heads, only the
// query heads of their groups take part; each list has some of these. With `only`, whose lists are
// these, the other tokens keep their scores. REQUIRES one row per sequence then, and a ring of 1
// where their scores lie by place. With a unit of
// several tokens logits and scores are of units u <= p / unit, and sinks and stride count units:
// not with `only` or a ring.
struct ScoreReduceArgs {
  const float* logits = nullptr;  // [n_rows, n_heads, stride]; by_token: [n_rows, stride, n_heads]
  const float* lse = nullptr;     // [n_rows, n_heads]
  float* out = nullptr;           // [n_seqs, lists, ring, stride]
  const RowMeta* rows = nullptr;
  int64_t stride = 0;  // tokens
  int32_t ring = 1;
  int32_t n_heads = 0;
  int32_t lists = 1;
  int32_t unit = 1;   // tokens
  int32_t sinks = 0;  // tokens
  int32_t n_rows = 0;
  HeadReduce heads = HeadReduce::kMax;  // or kSum
  HeadMask kv_heads = {};               // that take part
  int32_t n_kv_heads = 0;               // REQUIRED where these are not all
  SomeTokens only = {};
  bool by_token = false;  // REQUIRES `only`

  bool operator==(const ScoreReduceArgs&) const = default;
  OMNIKV_HOST_DEVICE bool Takes(int32_t head) const {
    return kv_heads.All() || kv_heads.Has(head / (n_heads / n_kv_heads));
  }
  // Where the score of a token goes, which is number i of `only`.
  OMNIKV_HOST_DEVICE int64_t ScoreAt(int64_t i, int64_t token) const {
    return only.by_place ? i : token;
  }
  // Row r, at a position in units.
  OMNIKV_HOST_DEVICE RowMeta Row(int32_t r) const { return {rows[r].seq, rows[r].pos / unit}; }
};

// How those of several query rows do.
enum class QueryReduce : int32_t {
  kLast,   // the last row's alone
  kSum,    // of all rows
  kMax,    // over all rows
  kDecay,  // the sum, in which a row counts `decay` times as much as the row after it
};

// Scores that grow from step to step, of which the last `size` steps are kept, so that steps which
// ran ahead may be forgotten: f32 [n_seqs, size, lists, stride]. A step that leaves a sequence with
// n tokens writes slot n % size.
struct ScoreRing {
  float* scores = nullptr;
  int64_t stride = 0;
  int32_t size = 1;

  bool operator==(const ScoreRing&) const = default;
  // Of list l of `lists`, sequence s, after the step that left n tokens.
  OMNIKV_HOST_DEVICE float* At(int32_t s, int32_t l, int32_t lists, int32_t n) const {
    return scores + ((int64_t{s} * size + n % size) * lists + l) * stride;
  }
};

// The most tokens that a unit of ScoreArgs has.
inline constexpr int32_t kMaxScoreUnit = 512;

// Scores of a sequence's tokens, or of units of them, by its last `window` rows of the step. They
// are reduced as they are made, so nothing is held per row or per head. For tokens t < kv_len and
// rows r at positions >= t:
//   w[r][h][t]   = softcap(scale * q[r][h]·k[t]), or exp(that - lse[r][h]) where lse is not null
//   g[r][l][t]   = max, mean or sum of w[r][h][t] over the query heads h of list l
//   f[l][t]      = g of the last row, or sum, max or decayed sum of g[r][l][t] over rows r
//   out[s][l][u] = max of f[l][t] over the tokens t of unit u
// List l is all heads (lists = 1), or the query heads of KV head l. With `accumulate` a unit that
// began before this step keeps what it holds:
//   out = held + new, or max(held, new) of kMax, or decay^q_len * held + new of kDecay
// With a ring of several slots, what it holds is in the slot of the step before. Sequences without
// rows keep their scores.
struct ScoreArgs {
  const float* q = nullptr;    // [n_rows, n_heads, dk]
  const float* lse = nullptr;  // [n_rows, n_heads]; null: scores are logits
  KvView kv;
  const SeqMeta* seqs = nullptr;
  const SeqMeta* steps = nullptr;  // of `ring`: kv_len counts all tokens; null: seqs
  float* out = nullptr;            // [n_seqs, ring, lists, stride]
  int64_t stride = 0;              // units
  int32_t ring = 1;                // ScoreRing::size
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  int32_t lists = 1;   // 1, or n_kv_heads
  int32_t unit = 1;    // tokens, up to kMaxScoreUnit
  int32_t window = 0;  // rows of a sequence, the last ones; 0: all
  HeadReduce heads = HeadReduce::kMax;
  QueryReduce queries = QueryReduce::kLast;
  float scale = 1;
  float softcap = 0;  // c > 0: c * tanh(logit / c)
  float decay = 1;    // of kDecay
  bool accumulate = false;

  bool operator==(const ScoreArgs&) const = default;
};

// Where the scores of list l of sequence s go, and where those are that `accumulate` adds to.
OMNIKV_HOST_DEVICE inline float* ScoresOf(const ScoreArgs& a, int32_t s, int32_t l, bool held) {
  const SeqMeta& step = (a.steps != nullptr ? a.steps : a.seqs)[s];
  return ScoreRing{a.out, a.stride, a.ring}.At(s, l, a.lists,
                                               step.kv_len - (held ? step.q_len : 0));
}

// How many of a sequence's `q_len` rows score.
OMNIKV_HOST_DEVICE inline int32_t ScoringRows(const ScoreArgs& a, int32_t q_len) {
  const int32_t most = a.queries == QueryReduce::kLast ? 1 : a.window;
  return most > 0 && most < q_len ? most : q_len;
}

// What stands for the K of a unit of tokens, value by value: one number, or two bounds.
enum class SummaryKind : int32_t {
  kMean,
  kMax,
  kMinMax,   // the minimum, then the maximum (Quest)
  kMeanStd,  // the mean less the standard deviation, then the mean plus that (UNIQUE, arXiv
             // 2605.27740). Of n tokens std² is the sum of (k - mean)² over n, so 0 where n = 1
};

// Arrays of values of a summary: the lower bounds lie before the upper ones.
OMNIKV_HOST_DEVICE inline int32_t SummaryArrays(SummaryKind kind) {
  return kind == SummaryKind::kMinMax || kind == SummaryKind::kMeanStd ? 2 : 1;
}

// The format of a summary of K: bounds of 16-bit numbers are such numbers.
OMNIKV_HOST_DEVICE inline DType SummaryFormat(SummaryKind kind, DType k) {
  return kind == SummaryKind::kMinMax && (k == DType::kF16 || k == DType::kBF16) ? k : DType::kF32;
}

// The units whose last token is a row of the step: the first, and past the last.
struct UnitRange {
  int32_t begin, end;
};
OMNIKV_HOST_DEVICE inline UnitRange CompletedUnits(const SeqMeta& seq, int32_t unit) {
  return {(seq.kv_len - seq.q_len) / unit, seq.kv_len / unit};
}

// Summaries of units over their tokens, made for the units that the step's rows complete. With
// `every` = e they are over the first of each e tokens of a unit alone.
struct BlockSummaryArgs {
  KvView kv;
  const SeqMeta* seqs = nullptr;
  StateView out;  // rows of `format` [arrays, n_kv_heads, dk]
  int32_t n_rows = 0;
  int32_t n_seqs = 0;
  int32_t unit = 1;   // tokens
  int32_t every = 1;  // tokens, up to unit
  SummaryKind kind = SummaryKind::kMean;
  DType format = DType::kF32;  // or SummaryFormat

  bool operator==(const BlockSummaryArgs&) const = default;
};

// Scores of a sequence's units u < ceil(kv_len / unit) by its last row, from summaries s of them:
//   w[h][u]      = scale * q[h]·s[u], or of bounds scale * sum over i of max(q_i * low_i,
//                  q_i * high_i): the highest logit of any key between them. kMinMax: no token of
//                  the unit can have a higher one. kMeanStd: it is q_i * mean_i + |q_i| * std_i
//   out[s][l][u] = max, mean or sum of w[h][u] over the query heads h of list l, as in ScoreArgs;
//                  kChosenFirst where u < sinks
// Sequences without rows keep their scores.
struct BlockScoreArgs {
  const float* q = nullptr;  // [n_rows, n_heads, dk]
  StateView summaries;       // rows of `format` [arrays, n_kv_heads, dk]
  const SeqMeta* seqs = nullptr;
  float* out = nullptr;  // [n_seqs, lists, stride]
  int64_t stride = 0;    // units
  int32_t n_seqs = 0;
  int32_t n_heads = 0;
  int32_t n_kv_heads = 0;
  int32_t dk = 0;
  int32_t lists = 1;  // 1, or n_kv_heads
  Divisor unit = 1;   // tokens
  int32_t sinks = 0;  // units
  SummaryKind kind = SummaryKind::kMean;
  DType format = DType::kF32;  // of kMinMax also f16 or bf16
  HeadReduce heads = HeadReduce::kMax;
  float scale = 1;

  bool operator==(const BlockScoreArgs&) const = default;
};

enum class KeyScoreKind : int32_t {
  kNorm,    // -|k|: Knorm (Devoto et al. 2024)
  kUnlike,  // -cos(k, a), a the mean of k / |k| over the sequence: KeyDiff (Park et al. 2025)
};

// Scores of a sequence's tokens t < kv_len by their keys alone, list l of KV head l, out[s][l][t].
// The cosine of what has no direction (zeros) is 0. Sequences without rows keep their scores.
struct KeyScoreArgs {
  KvView kv;
  const SeqMeta* seqs = nullptr;
  float* out = nullptr;  // [n_seqs, n_kv_heads, stride]
  int64_t stride = 0;    // tokens
  int32_t n_seqs = 0;
  KeyScoreKind kind = KeyScoreKind::kNorm;

  bool operator==(const KeyScoreArgs&) const = default;
};

// Mean and covariance of the queries of each head, as they were before their rotation.
struct QueryMoments {
  float* mean = nullptr;        // [n_heads, dk]
  float* covariance = nullptr;  // [n_heads, dk, dk]: sums over the queries, by their number; null:
                                // not wanted
  int32_t* count = nullptr;     // [1]: queries

  bool operator==(const QueryMoments&) const = default;
};

// Moments of the queries of a sequence's rows of the step, but for those at positions below `skip`;
// with `accumulate`, of these and the queries that `out` counts already. Row i is at position
// kv_len - q_len + i, and its rotation by that is undone: value j with value j + n_freq, by the
// angle position * inv_freq[j] in f32. So a query in `q` is one before its rotation times the
// magnitude of RopeTableArgs. A sequence without rows keeps its moments.
struct QueryMomentsArgs {
  const float* q = nullptr;         // [n_rows, n_heads, dk], rotated
  const SeqMeta* steps = nullptr;   // [1]: kv_len counts all tokens
  const float* inv_freq = nullptr;  // [n_freq]; null: no rotation
  QueryMoments out;
  int32_t n_rows = 0;
  int32_t n_heads = 0;
  int32_t dk = 0;
  int32_t n_freq = 0;
  int32_t skip = 0;  // tokens
  bool accumulate = false;

  bool operator==(const QueryMomentsArgs&) const = default;
};

// Scores of a sequence's rows i < seqs->kv_len by the weights that queries yet to come are expected
// to give them (Expected Attention, Devoto et al. 2025, as in kvpress). A is the mean of the
// rotations at the `future` positions from steps->kv_len on; m and C are the mean and the
// covariance of the queries of head h, g is the KV head of its group:
//   logits[h][i] = scale * (A m)·k[i] + scale² / 2 * k[i]·(A C A')k[i]   (no second term without C)
//   e[h][i]      = exp(logits[h][i]) / sum of exp(logits[h][j]) over sinks <= j < kv_len
//   out[g][i]    = kChosenFirst where i < sinks, else (the mean of e over the heads of the group +
//                  epsilon) * |v[i]| with `values`, or that mean alone without
// The logits of sinks are not written. A sequence without rows keeps its scores.
struct ExpectedScoreArgs {
  QueryMoments queries;
  KvView kv;
  const SeqMeta* seqs = nullptr;    // [1]: of the table
  const SeqMeta* steps = nullptr;   // [1]: of the step, whose kv_len counts all tokens
  const float* inv_freq = nullptr;  // [n_freq]; null: no rotation
  float* logits = nullptr;          // [n_heads, stride]
  float* out = nullptr;             // [n_kv_heads, stride]
  int64_t stride = 0;               // rows
  int32_t n_heads = 0;
  int32_t n_freq = 0;
  int32_t future = 1;  // positions
  int32_t sinks = 0;   // rows
  float scale = 1;
  float epsilon = 0;
  bool values = true;

  bool operator==(const ExpectedScoreArgs&) const = default;
};

// What age makes of a score.
enum class AgeRule : int32_t {
  kNothing,
  kPerQuery,  // its mean over the queries that saw the token
  kStrided,   // the age alone, over the largest power of two that divides the position: so tokens
              // twice as old on a grid twice as coarse score alike, though no two are equal
};

// Scores of the rows i < seqs[s].kv_len that a sequence holds, as the age of their tokens makes
// them. With n = steps[s].kv_len and p the position of row i (of list l, KvView::pos; else i):
//   out[s][l][i] = kChosenFirst where p < sinks or p >= n - recent, else
//                  in[s][l][i]                of kNothing
//                  in[s][l][i] / (n - p)      of kPerQuery
//                  -(n - p - 1/2) / gcd(p, 2^30)  of kStrided, which has no `in`
// Sequences without rows keep their scores.
struct AgedScoresArgs {
  ScoreRing in;
  KvView kv;                       // for the positions
  const SeqMeta* seqs = nullptr;   // [n_seqs]: of the table
  const SeqMeta* steps = nullptr;  // [n_seqs]: of the step, whose kv_len counts all tokens
  float* out = nullptr;            // [n_seqs, lists, stride], not `in`
  int64_t stride = 0;              // rows
  int32_t lists = 1;               // 1, or n_kv_heads
  int32_t n_seqs = 0;
  int32_t sinks = 0;   // tokens
  int32_t recent = 0;  // tokens
  AgeRule rule = AgeRule::kNothing;

  bool operator==(const AgedScoresArgs&) const = default;
};

// That of row i.
OMNIKV_HOST_DEVICE inline float AgedScore(const AgedScoresArgs& a, int32_t s, int32_t l,
                                          int32_t i) {
  const int32_t n = a.steps[s].kv_len;
  const int32_t p = a.kv.PosOf(a.seqs[s].table_off, i, l);
  if (p < a.sinks || p >= n - a.recent) return kChosenFirst;
  if (a.rule == AgeRule::kStrided) {
    const int32_t stride = p == 0 ? 1 << 30 : p & -p;
    return (static_cast<float>(p - n) + 0.5f) / static_cast<float>(stride);
  }
  const float score = a.in.At(s, l, a.lists, n)[i];
  return a.rule == AgeRule::kPerQuery ? score / static_cast<float>(n - p) : score;
}

enum class PoolKind : int32_t { kMean, kMax };

// Scores smoothed over their neighbours, for i < n[s] and an odd kernel k:
//   out[s][l][i] = the sum of in[s][l][j] over k, or the maximum, over |j - i| <= k / 2, 0 <= j < n
// So a mean takes what lies outside for zeros, as SnapKV's does.
struct PoolArgs {
  const float* in = nullptr;   // [n_seqs, lists, stride]
  float* out = nullptr;        // [n_seqs, lists, stride], not `in`
  const int32_t* n = nullptr;  // [n_seqs]: scores of a list
  int64_t stride = 0;          // scores
  int32_t lists = 1;
  int32_t n_seqs = 0;
  int32_t kernel = 1;  // scores
  PoolKind kind = PoolKind::kMean;

  bool operator==(const PoolArgs&) const = default;
};

// Tokens that a budget allows at `n` tokens of context: `budget` of them or, where `share` is not
// 0, that share of the context, from 1 to `budget`: rounded up or, with `least`, down to no fewer
// than those.
OMNIKV_HOST_DEVICE inline int32_t BudgetAt(int32_t budget, double share, int64_t n,
                                           int32_t least = 0) {
  if (share == 0) return budget;
  const double part = share * static_cast<double>(n);
  const double tokens = least > 0 ? floor(part) : ceil(part);
  const int32_t low = least > 0 ? least : 1;
  const int32_t most = tokens < budget ? static_cast<int32_t>(tokens) : budget;
  return most > low ? most : low < budget ? low : budget;
}

// Whether chosen row i of a step is a hit where hits are simulated.
OMNIKV_HOST_DEVICE inline bool IsSimulatedHit(float share, uint32_t step, int32_t i) {
  uint32_t h = (static_cast<uint32_t>(i) + step * 0x9e3779b9u) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return static_cast<float>(h >> 8) < share * 16777216.0f;
}

// WorkingSetArgs::used of a slot: the half step in which it was read last, and how often it was
// found since its token came, as far as that counts. 0: it has no token.
inline constexpr uint32_t kFoundBits = 4;
inline constexpr uint32_t kMostFound = 8;
OMNIKV_HOST_DEVICE inline uint32_t SlotCame(uint32_t half_step) {
  return half_step << kFoundBits;
}
OMNIKV_HOST_DEVICE inline uint32_t TimesFound(uint32_t used) {
  return used & ((1u << kFoundBits) - 1);
}
OMNIKV_HOST_DEVICE inline uint32_t SlotFound(uint32_t used, uint32_t step) {
  const uint32_t found = TimesFound(used) + 1;
  return SlotCame(2 * step) | (found < kMostFound ? found : kMostFound);
}

// Slots of the highest age go first. 0: read by this step; the most: it has no token. Else half
// steps since it was read, where a slot is as good as one that was read two steps later for each
// time that it was found. Slots that were not read for 511 steps are alike, so that a block of
// threads can count the slots of each age.
inline constexpr uint32_t kSlotAges = 1024;
OMNIKV_HOST_DEVICE inline uint32_t SlotAge(uint32_t used, uint32_t step) {
  if (used == 0) return kSlotAges - 1;
  const uint32_t since = (SlotCame(2 * step) - (used - TimesFound(used))) >> kFoundBits;
  if (since == 0) return 0;
  const uint32_t age = since + 4 * (kMostFound - TimesFound(used));
  return age < kSlotAges - 2 ? age : kSlotAges - 2;
}

// AverageScoresArgs::average of a token: the bits of a float above 0 grow with its logarithm, and
// so their mean is nearly that of logarithms. 0: no step has scored it yet.
inline constexpr uint32_t kBitsOfOne = 0x3f800000;  // of 1.0f
OMNIKV_HOST_DEVICE inline uint32_t AverageScore(uint32_t average, uint32_t score_bits) {
  const uint32_t bits = score_bits == 0 ? 1 : score_bits < kBitsOfOne ? score_bits : kBitsOfOne;
  if (average == 0) return bits;
  constexpr int kEighth = 3;  // the weight of the step
  const auto change = static_cast<int32_t>(bits) - static_cast<int32_t>(average);
  return static_cast<uint32_t>(static_cast<int32_t>(average) + (change >> kEighth));
}
// WorkingSetArgs::used of a slot whose token has this average, before the step: its age falls by
// one with each sixteenth of a doubling.
OMNIKV_HOST_DEVICE inline uint32_t SlotScored(uint32_t average, uint32_t step) {
  const uint32_t below_one = (kBitsOfOne - average) >> 19;
  const uint32_t age = 1 + (below_one < kSlotAges - 3 ? below_one : kSlotAges - 3);
  return (SlotCame(2 * step) - (age << kFoundBits)) | kMostFound;
}

// RangeRule::tail: every generated token.
inline constexpr int32_t kWholeAnswer = std::numeric_limits<int32_t>::max();

// How a sparse layer's reading of n tokens is split, the same for every sequence.
struct RangeRule {
  double share = 0;         // of the context, 0 to 1: BudgetAt
  int32_t least = 0;        // units of such a share
  int32_t budget = 0;       // units
  int32_t tail = 0;         // units with generated tokens, the last ones, read besides the budget
  int32_t min_recent = 0;   // last units that are always read, in the budget past the tail
  int32_t dense_below = 0;  // tokens up to which everything is read
  int32_t unit = 1;         // tokens

  bool operator==(const RangeRule&) const = default;
};

// Units that n tokens begin.
template <typename Unit>  // int32_t, or a Divisor
OMNIKV_HOST_DEVICE int32_t UnitsOf(int32_t n, Unit unit) {
  return n / unit + (n % unit != 0 ? 1 : 0);
}

// Of the units of n tokens, `recent` are read as the last ones and `n_pick` are chosen among the
// others; `besides` of the recent ones are not counted in the budget.
struct RangeSplit {
  int32_t recent, n_pick, besides;
};
OMNIKV_HOST_DEVICE inline RangeSplit SplitRange(const RangeRule& rule, int32_t n,
                                                int32_t prompt_len) {
  const int32_t units = UnitsOf(n, rule.unit);
  const int32_t n_gen = n > prompt_len ? units - prompt_len / rule.unit : 0;
  const int32_t besides = n_gen < rule.tail ? n_gen : rule.tail;
  if (n <= rule.dense_below) return {units, 0, besides};
  const int32_t budget = BudgetAt(rule.budget, rule.share, units, rule.least);
  const int32_t others = units - besides;
  const int32_t allowed = budget < others ? budget : others;
  const int32_t wanted = rule.min_recent > besides ? rule.min_recent - besides : 0;
  const int32_t forced = wanted < allowed ? wanted : allowed;
  return {besides + forced, allowed - forced, besides};
}

// That split of each sequence, on the device: its length changes from step to step.
//   n_candidates = units - recent;  bounds = tokens [min(n, n_candidates * unit), n): always read.
// A sequence without tokens gets empty bounds, no candidates.
struct PlanRangeArgs {
  const SeqMeta* seqs = nullptr;
  int32_t n_seqs = 0;
  RangeRule rule;
  int32_t* bounds = nullptr;        // [n_seqs, 2]
  int32_t* n_candidates = nullptr;  // [n_seqs]; both null: nobody chooses among the others
  int32_t* n_pick = nullptr;        // [n_seqs]

  bool operator==(const PlanRangeArgs&) const = default;
};

// That of one sequence.
OMNIKV_HOST_DEVICE inline void WriteRange(const PlanRangeArgs& a, int32_t s) {
  const int32_t n = a.seqs[s].kv_len;
  const RangeSplit split = SplitRange(a.rule, n, a.seqs[s].prompt_len);
  const int32_t others = UnitsOf(n, a.rule.unit) - split.recent;
  a.bounds[2 * s] = others < UnitsOf(n, a.rule.unit) ? others * a.rule.unit : n;
  a.bounds[2 * s + 1] = n;
  if (a.n_candidates == nullptr) return;
  a.n_candidates[s] = others;
  a.n_pick[s] = split.n_pick;
}

// The n_pick highest of each list's S[t], t < n_candidates, ascending; equal scores: the lower t
// first.
//   S[t] = sum over age a < window of weights[a] * scores[(p - a) % window][t], t <= p - a
// where p = kv_len - 1, and queries before position 0 do not exist. With a window of 1 a candidate
// may be a token or a unit of tokens. With `among`, whose lists are these and which has no range,
// its tokens are the candidates, whatever n_candidates says. REQUIRES a window of 1 and a
// capacity of at most the stride where their scores lie by place.
// With `unit`, n_candidates counts tokens, and the whole units of these are chosen among; the list
// then has the tokens of the chosen units, and the n_candidates % unit behind all whole units:
// none where n_pick is 0. REQUIRES a window of 1 and no `among`.
struct TopKArgs {
  // [n_seqs, lists, window, stride]; by_row: [n_rows, lists, stride]
  const float* scores = nullptr;
  const float* weights = nullptr;  // [window], newest first
  const SeqMeta* seqs = nullptr;
  const int32_t* n_candidates = nullptr;  // [n_seqs]
  const int32_t* n_pick = nullptr;        // [n_seqs]: of each list
  const int32_t* keep = nullptr;  // [n_seqs]: not 0 leaves index and count as they are; null: none
  int32_t* index = nullptr;       // [n_seqs, lists, capacity]
  int32_t* count = nullptr;       // [n_seqs, lists]
  int64_t stride = 0;             // candidates
  int32_t window = 1;
  int32_t lists = 1;  // of a sequence
  int32_t capacity = 0;
  int32_t n_seqs = 0;
  int32_t unit = 1;  // tokens
  SomeTokens among = {};
  bool by_row = false;  // scores are those of a sequence's first row. REQUIRES a window of 1

  bool operator==(const TopKArgs&) const = default;

  // Those that n tokens have, by a division only where units are not tokens: it is long on a card.
  OMNIKV_HOST_DEVICE int32_t WholeUnits(int32_t n) const { return unit == 1 ? n : n / unit; }
  // The sequence of list `list` of all sequences' lists.
  OMNIKV_HOST_DEVICE int32_t SeqOf(int64_t list) const {
    return lists == 1 ? static_cast<int32_t>(list) : static_cast<int32_t>(list) / lists;
  }
  // The scores of list `list`, [window, stride].
  OMNIKV_HOST_DEVICE const float* ScoresOf(int64_t list) const {
    if (by_row) list += (seqs[SeqOf(list)].q_begin - SeqOf(list)) * int64_t{lists};
    return scores + list * window * stride;
  }

  // Whether candidate i has another score than number i.
  OMNIKV_HOST_DEVICE bool Gathers() const { return among.index != nullptr && !among.by_place; }

  // Candidates of a list, at most `room()`; and candidate i.
  OMNIKV_HOST_DEVICE int32_t CandidatesOf(int64_t list) const {
    if (among.index != nullptr) return among.count[list];
    return WholeUnits(n_candidates[SeqOf(list)]);
  }
  OMNIKV_HOST_DEVICE int64_t room() const {
    return among.index != nullptr ? among.capacity : stride;
  }
  OMNIKV_HOST_DEVICE int32_t Candidate(int64_t list, int32_t i) const {
    return among.index != nullptr ? among.index[list * among.capacity + i] : i;
  }
  // How many of n candidates are chosen.
  OMNIKV_HOST_DEVICE int32_t Picks(int32_t pick, int32_t n) const {
    const int32_t room = WholeUnits(capacity);
    const int32_t most = pick < room ? pick : room;
    return most > n ? n : most > 0 ? most : 0;
  }
  // Makes candidate i number `at` of those that are chosen for a list.
  OMNIKV_HOST_DEVICE void Put(int64_t list, int32_t at, int32_t i) const {
    int32_t* const to = index + list * capacity + int64_t{at} * unit;
    if (unit == 1) {
      *to = Candidate(list, i);
      return;
    }
    OMNIKV_ROLLED
    for (int32_t j = 0; j < unit; ++j) to[j] = i * unit + j;
  }
  // What a list has besides, once `chosen` are chosen for it: a length, and the last tokens.
  OMNIKV_HOST_DEVICE void Finish(int64_t list, int32_t chosen) const {
    int32_t n = chosen * unit;
    if (unit > 1 && n_pick[SeqOf(list)] > 0) {
      const int32_t all = n_candidates[SeqOf(list)];
      OMNIKV_ROLLED
      for (int32_t t = all / unit * unit; t < all && n < capacity; ++t) {
        index[list * capacity + n++] = t;
      }
    }
    count[list] = n;
  }
};

}  // namespace omnikv
