#include "backend/ops.h"

#include <algorithm>

#include "backend/kv_slices.h"

namespace omnikv {
namespace {

uint64_t U(int64_t v) {
  return static_cast<uint64_t>(std::max<int64_t>(v, 0));
}

// Tokens that a row at `pos` of sequence `seq` reads of segment `s` for list `list`.
int64_t SegmentTokens(const PlanSegment& s, int32_t seq, int32_t pos, int32_t kv_head) {
  const int64_t low = s.window > 0 ? std::max(0, pos + 1 - s.window) : 0;
  const int64_t high = static_cast<int64_t>(pos) + 1;
  if (s.kind == SegmentKind::kRange) {
    const int64_t begin = s.bounds != nullptr ? s.bounds[2 * seq] : s.begin;
    const int64_t end = s.bounds != nullptr ? s.bounds[2 * seq + 1] : s.end;
    return std::max<int64_t>(0, std::min(end, high) - std::max(begin, low));
  }
  const int64_t list = s.ListOf(seq, kv_head);
  const int32_t* index = s.index + list * s.capacity;
  int64_t tokens = 0;
  for (int32_t i = 0; i < s.count[list]; ++i) {
    const int64_t begin = static_cast<int64_t>(index[i]) * s.unit;
    tokens += std::max<int64_t>(0, std::min(begin + s.unit, high) - std::max(begin, low));
  }
  return tokens;
}

Cost WeightCost(const WeightRef& w, int32_t n_rows) {
  if (w.data == nullptr) return {};
  return {.bytes_read = U(w.n_out) * DTypeBytes(w.format, static_cast<size_t>(w.n_in)),
          .flops = 2 * U(w.n_out) * U(w.n_in) * U(n_rows)};
}

Cost ResidualCost(const Residual& r, int32_t n_rows) {
  const uint64_t row = 4 * U(r.d) * U(n_rows);
  return {.bytes_read = r.y != nullptr ? 2 * row : row, .bytes_written = r.y != nullptr ? row : 0};
}

struct CostVisitor {
  Cost operator()(const EmbedArgs& a) const {
    const uint64_t row = DTypeBytes(a.table.format, static_cast<size_t>(a.table.n_in));
    return {.bytes_read = U(a.n_rows) * row, .bytes_written = 4 * U(a.n_rows) * U(a.table.n_in)};
  }
  Cost operator()(const RopeTableArgs& a) const {
    return {.bytes_read = 4 * U(a.n_freq), .bytes_written = 8 * U(a.n_freq) * U(a.n_rows)};
  }
  Cost operator()(const NormQkvRopeAppendArgs& a) const {
    Cost c = ResidualCost(a.in, a.n_rows);
    for (const WeightRef* w : {&a.wq, &a.wk, &a.wv}) c += WeightCost(*w, a.n_rows);
    const int64_t copies = (a.k_out != nullptr ? 1 : 0) + (a.k_raw_out != nullptr ? 1 : 0);
    c.bytes_written +=
        4 * U(a.n_rows) * U(a.wq.n_out + copies * a.wk.n_out) + U(a.n_rows) * U(a.kv.TokenBytes());
    return c;
  }
  Cost operator()(const StoreRowsArgs& a) const {
    int32_t heads = a.from.n_kv_heads;  // of a row, in both views
    if (a.head_step == 0) heads = a.kv.heads.Count(heads);
    if (a.HasRest()) heads += a.rest.heads.Count(a.from.n_kv_heads);
    const uint64_t bytes = U(a.n_rows) * U(heads) * U(PackedRowBytes(a.from) / a.from.n_kv_heads);
    return {.bytes_read = bytes, .bytes_written = bytes};
  }
  Cost operator()(const AttendArgs& a) const {
    // Rows of one sequence in one op share what they read: a token's K and V count once, at the
    // reach of the row that reads most of it (the last, whose prefix holds the others').
    Cost c;
    const uint64_t n_heads = U(a.Heads());
    for (int32_t r = 0; r < a.n_rows; ++r) {
      const RowMeta row = a.rows[r];
      const bool last = r + 1 == a.n_rows || a.rows[r + 1].seq != row.seq;
      int64_t tokens_all_heads = 0;
      for (int32_t i = 0; i < a.KvHeads(); ++i) {
        for (int32_t s = 0; s < a.plan.n_segments; ++s) {
          tokens_all_heads +=
              SegmentTokens(a.plan.segments[static_cast<size_t>(s)], row.seq, row.pos, a.KvHead(i));
        }
      }
      if (last) c.kv_bytes += KvBytes(a.kv, tokens_all_heads, a.o != nullptr);
      c.flops +=
          2 * U(tokens_all_heads) * U(a.Group()) * U(a.kv.dk + (a.o != nullptr ? a.kv.dv : 0));
      if (a.score != ScoreKind::kNone) {
        const uint64_t heads = a.score == ScoreKind::kLogits ? n_heads : 1;
        c.bytes_written += 4 * heads * (U(row.pos) + 1);
      }
    }
    c.bytes_read = c.kv_bytes + 4 * U(a.n_rows) * n_heads * U(a.kv.dk);
    if (a.o != nullptr) c.bytes_written += 4 * U(a.n_rows) * n_heads * U(a.kv.dv);
    return c;
  }
  Cost operator()(const LinearArgs& a) const {
    Cost c = WeightCost(a.w, a.n_rows);
    c.bytes_read += 4 * U(a.n_rows) * U(a.w.n_in);
    c.bytes_written += 4 * U(a.n_rows) * U(a.w.n_out);
    return c;
  }
  Cost operator()(const NormGatedFfnArgs& a) const {
    Cost c = ResidualCost(a.in, a.n_rows);
    c += WeightCost(a.gate, a.n_rows);
    c += WeightCost(a.up, a.n_rows);
    c.bytes_written += 4 * U(a.n_rows) * U(a.gate.n_out);
    return c;
  }
  Cost operator()(const NormLogitsArgs& a) const {
    Cost c = ResidualCost(a.in, a.n_rows);
    c += WeightCost(a.head, a.n_out);
    c.bytes_written += 4 * U(a.n_out) * U(a.head.n_out);
    return c;
  }
  Cost operator()(const ScoreReduceArgs& a) const {
    Cost c;
    uint64_t heads = 0;
    for (int32_t h = 0; h < a.n_heads; ++h) heads += a.Takes(h) ? 1 : 0;
    for (int32_t r = 0; r < a.n_rows; ++r) {
      uint64_t n = 0;  // of all lists
      for (int32_t l = 0; l < a.lists; ++l) {
        n += U(SomeTokens::Of(a.only, a.Row(r), a.lists, l).size());
      }
      c.bytes_read += 4 * n * heads / U(a.lists);
      c.bytes_written += 4 * n;
      c.flops += 2 * n * heads / U(a.lists);
    }
    return c;
  }
  Cost operator()(const ScoreArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      const SeqMeta seq = a.seqs[s];
      if (seq.q_len == 0) continue;
      const uint64_t row_heads = U(ScoringRows(a, seq.q_len)) * U(a.n_heads);
      const uint64_t units = U(a.lists) * ((U(seq.kv_len) + U(a.unit) - 1) / U(a.unit));
      c.kv_bytes += KvBytes(a.kv, int64_t{seq.kv_len} * a.kv.n_kv_heads, /*values=*/false);
      c.bytes_read += 4 * row_heads * U(a.kv.dk + (a.lse != nullptr ? 1 : 0));
      c.bytes_read += a.accumulate ? 4 * units : 0;
      c.bytes_written += 4 * units;
      c.flops += 2 * row_heads * U(seq.kv_len) * U(a.kv.dk);
    }
    c.bytes_read += c.kv_bytes;
    return c;
  }
  Cost operator()(const BlockSummaryArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      const auto [begin, end] = CompletedUnits(a.seqs[s], a.unit);
      const uint64_t values = U(a.kv.n_kv_heads) * U(a.kv.dk);
      const int64_t tokens = int64_t{end - begin} * UnitsOf(a.unit, a.every);
      c.kv_bytes += KvBytes(a.kv, tokens * a.kv.n_kv_heads, /*values=*/false);
      c.bytes_written +=
          DTypeBytes(a.format, 1) * U(SummaryArrays(a.kind)) * U(end - begin) * values;
      c.flops += U(SummaryArrays(a.kind)) * U(tokens) * values;
    }
    c.bytes_read = c.kv_bytes;
    return c;
  }
  Cost operator()(const BlockScoreArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      const uint64_t arrays = U(SummaryArrays(a.kind));
      const uint64_t units = U(UnitsOf(a.seqs[s].kv_len, a.unit));
      c.kv_bytes += DTypeBytes(a.format, 1) * U(a.dk) * units * arrays * U(a.n_kv_heads);
      c.bytes_read += 4 * U(a.dk) * U(a.n_heads);
      c.bytes_written += 4 * U(a.lists) * units;
      c.flops += 2 * units * arrays * U(a.n_heads) * U(a.dk);
    }
    c.bytes_read += c.kv_bytes;
    return c;
  }
  Cost operator()(const KeyScoreArgs& a) const {
    Cost c;
    const bool twice = a.kind == KeyScoreKind::kUnlike;  // the mean must be there before a score
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      const uint64_t keys = U(a.seqs[s].kv_len) * U(a.kv.n_kv_heads);
      c.kv_bytes += KvBytes(a.kv, static_cast<int64_t>(keys), /*values=*/false) * (twice ? 2 : 1);
      c.bytes_written += 4 * keys;
      c.flops += 2 * keys * U(a.kv.dk) * (twice ? 4 : 1);
    }
    c.bytes_read = c.kv_bytes;
    return c;
  }
  Cost operator()(const IndexKeysArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      const int64_t keys = int64_t{a.seqs[s].q_len} * a.kv.n_kv_heads;
      c.kv_bytes += KvBytes(a.kv, keys, /*values=*/false);
      c.bytes_written += U(a.seqs[s].q_len) * U(a.out.row_bytes);
      c.flops += 2 * U(keys) * U(a.kv.dk);
    }
    c.bytes_read = c.kv_bytes;
    return c;
  }
  Cost operator()(const IndexScoreArgs& a) const {
    Cost c;
    for (int32_t r = 0; r < a.n_rows; ++r) {
      const int32_t n = SomeTokens::Of(a.only, a.rows[r], 1, 0).size();
      c.kv_bytes += U(n) * U(a.index.row_bytes);
      c.bytes_written +=
          4 * U(UnitsOf(n, a.unit) + (a.only.index == nullptr ? 1 : 0)) * U(a.n_heads);
      c.flops += 2 * U(n) * U(a.n_heads) * U(a.dk);
    }
    c.bytes_read = c.kv_bytes + 4 * U(a.n_rows) * U(a.n_heads) * U(a.dk);
    return c;
  }
  Cost operator()(const RescoreArgs& a) const {
    Cost c;
    const uint64_t list_heads = U(a.n_heads / a.lists);
    for (int32_t r = 0; r < a.n_rows; ++r) {
      for (int32_t l = 0; l < a.lists; ++l) {
        const int64_t n = SomeTokens::Of(a.tokens, a.rows[r], a.lists, l).size();
        c.kv_bytes += KvBytes(a.kv, n * (a.kv.n_kv_heads / a.lists), /*values=*/false);
        c.bytes_read += 4 * U(n) * list_heads;
        c.bytes_written += 4 * (U(n) + 1) * list_heads;
        c.flops += 2 * U(n) * list_heads * U(a.kv.dk);
      }
    }
    c.bytes_read += c.kv_bytes + 4 * U(a.n_rows) * U(a.n_heads) * (U(a.kv.dk) + 1);
    return c;
  }
  Cost operator()(const QueryMomentsArgs& a) const {
    Cost c;
    if (a.steps->q_len == 0) return c;
    const uint64_t order = a.out.covariance != nullptr ? U(a.dk) : 0;
    const uint64_t moments = 4 * U(a.n_heads) * U(a.dk) * (1 + order);
    c.bytes_read = 4 * U(a.steps->q_len) * U(a.n_heads) * U(a.dk);
    c.bytes_read += a.accumulate ? moments : 0;
    c.bytes_written = moments;
    c.flops = U(a.steps->q_len) * U(a.n_heads) * U(a.dk) * (8 + 2 * order);
    return c;
  }
  Cost operator()(const ExpectedScoreArgs& a) const {
    Cost c;
    if (a.seqs->q_len == 0) return c;
    const uint64_t order = a.queries.covariance != nullptr ? U(a.kv.dk) : 0;
    const uint64_t rows = U(a.seqs->kv_len);
    const int64_t head_rows = int64_t{a.seqs->kv_len} * a.kv.n_kv_heads;
    c.kv_bytes = KvBytes(a.kv, head_rows, a.values);
    c.bytes_read = c.kv_bytes + 4 * U(a.n_heads) * U(a.kv.dk) * (1 + order);
    c.bytes_written = 4 * rows * (U(a.n_heads) + U(a.kv.n_kv_heads));
    c.flops = 2 * rows * U(a.n_heads) * U(a.kv.dk) * (1 + order);
    if (a.values) c.flops += 2 * rows * U(a.kv.n_kv_heads) * U(a.kv.dv);
    return c;
  }
  Cost operator()(const AgedScoresArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      const uint64_t values = a.rule == AgeRule::kStrided ? 1 : 2;  // a position, a score
      c.bytes_read += 4 * values * U(a.lists) * U(a.seqs[s].kv_len);
      c.bytes_written += 4 * U(a.lists) * U(a.seqs[s].kv_len);
    }
    return c;
  }
  Cost operator()(const PoolArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      const uint64_t n = U(a.n[s]) * U(a.lists);
      c += {.bytes_read = 4 * n, .bytes_written = 4 * n, .flops = n * U(a.kernel)};
    }
    return c;
  }
  Cost operator()(const PlanRangeArgs& a) const {
    return {.bytes_read = sizeof(SeqMeta) * U(a.n_seqs),
            .bytes_written = (a.n_pick != nullptr ? 16 : 8) * U(a.n_seqs)};
  }
  Cost operator()(const TopKArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.keep != nullptr && a.keep[s] != 0) continue;
      uint64_t candidates = 0;
      for (int32_t list = s * a.lists; list < (s + 1) * a.lists; ++list) {
        const int32_t n = a.CandidatesOf(list);
        candidates += U(n);
        c.bytes_written += 4 * U(std::min(a.n_pick[s], n)) * U(a.unit);
      }
      c.bytes_read += 4 * candidates * (U(a.window) + (a.Gathers() ? 1 : 0));
      c.flops += 2 * candidates * U(a.window - 1);
    }
    return c;
  }
  Cost operator()(const AverageScoresArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      const uint64_t n = U(a.seqs[s].kv_len);
      c.bytes_read += 8 * n + 4 * (U(a.n_candidates[s]) + U(a.count[s]));
      c.bytes_written += 4 * (n + std::min(n, U(a.n_slots)) + U(a.max_ahead));
    }
    return c;
  }
  Cost operator()(const WorkingSetArgs& a) const {
    Cost c;
    for (int32_t q = 0; q < a.n_seqs; ++q) {
      const WorkingSetArgs of = a.Of(q);
      const uint64_t n = of.seqs->q_len == 0 ? 0 : U(*of.count) + U(of.bounds[1] - of.bounds[0]);
      c.bytes_read += 12 * n + (*of.n_miss > 0 ? 4 * U(a.n_slots) : 0);
      c.bytes_written += 8 * n + 20 * (U(*of.n_miss) + (a.ahead != nullptr ? U(*of.n_ahead) : 0));
    }
    return c;
  }
  Cost operator()(const FetchRowsArgs& a) const {
    uint64_t n = 0;
    for (int32_t l = 0; l < a.lists; ++l) n += U(a.n[l]);
    return {.bytes_read = n * U(a.CopiedBytes()) + 8 * n, .bytes_written = n * U(a.CopiedBytes())};
  }
  Cost operator()(const ListPiecesArgs& a) const {
    Cost c{.bytes_read = (sizeof(SeqMeta) + 4) * U(a.n_seqs),
           .bytes_written = (2 * sizeof(SeqMeta) + 4) * U(a.n_seqs)};
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      c.bytes_read += 4 * U(a.count[s]);
      c.bytes_written += 4 * U(a.count[s]) * U(a.per_unit);
    }
    return c;
  }
  Cost operator()(const PieceTableArgs& a) const {
    Cost c{.bytes_read = (sizeof(SeqMeta) + 12) * U(a.n_seqs)};
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0) continue;
      const uint64_t last = U(UnitsOf(a.bounds[2 * s + 1] - a.bounds[2 * s], a.piece_tokens));
      c.bytes_read += 8 * U(a.count[s]) + 4 * last;
      c.bytes_written += 4 * (U(a.count[s]) + last);
    }
    return c;
  }
  Cost operator()(const NextTokenArgs& a) const {
    const uint64_t seen = a.sample != nullptr ? 4 * U(SeenWords(a.vocab)) : 0;
    return {.bytes_read = (4 * U(a.vocab) + seen) * U(a.n_rows), .bytes_written = 12 * U(a.n_rows)};
  }
  Cost operator()(const MergeStatesArgs& a) const {
    const uint64_t row_heads = U(a.n_rows) * U(a.n_heads);
    const uint64_t bytes = 4 * row_heads * (U(a.dv) + 1);
    return {.bytes_read = U(a.n_parts) * bytes,
            .bytes_written = a.lse != nullptr ? bytes : 4 * row_heads * U(a.dv),
            .flops = 2 * U(a.n_parts) * row_heads * U(a.dv)};
  }
  Cost operator()(const PickLogitsArgs& a) const {
    uint64_t n = 0;
    for (int32_t r = 0; r < a.n_rows; ++r) {
      for (int32_t h = 0; h < a.n_heads; ++h) n += U(a.count[a.ListOf(a.rows[r].seq, h)]);
    }
    return {.bytes_read = 8 * n, .bytes_written = 4 * n};
  }
  Cost operator()(const SumValuesArgs& a) const {
    Cost c;
    for (int32_t r = 0; r < a.n_rows; ++r) {
      for (int32_t h = 0; h < a.kv.n_kv_heads; ++h) {
        const int64_t n = a.count[a.ListOf(a.rows[r].seq, h)];
        c.kv_bytes += U(n) * (DTypeBytes(a.kv.v.dtype, static_cast<size_t>(a.kv.dv)));
        c.bytes_read += 4 * U(n) * (1 + U(a.Group()));
        c.flops += 2 * U(n) * U(a.Group()) * U(a.kv.dv);
      }
    }
    c.bytes_read += c.kv_bytes;
    c.bytes_written = 4 * U(a.n_rows) * U(a.n_heads) * (U(a.kv.dv) + (a.lse != nullptr ? 1 : 0));
    return c;
  }
  Cost operator()(const PickHeadsArgs& a) const {
    const uint64_t bytes = 4 * U(a.n_rows) * U(a.Named()) * U(a.width);
    return {.bytes_read = bytes, .bytes_written = bytes};
  }
  Cost operator()(const LocateRowsArgs& a) const {
    const uint64_t bytes = U(a.n_rows) * sizeof(RowMeta) + U(a.n_seqs) * sizeof(SeqMeta);
    return {.bytes_read = bytes + 4 * U(a.n_seqs) * U(a.heads),
            .bytes_written = U(a.heads) * (bytes + 4 * U(a.n_rows) * U(a.n_pos) * U(a.lists))};
  }
  Cost operator()(const CompactArgs& a) const {
    Cost c;
    const uint64_t row_bytes =  // of a list
        U(a.kv.TokenBytes()) / U(a.lists) + (a.pos != nullptr ? 4 : 0) +
        (a.scores.scores != nullptr ? 4 : 0);
    for (int32_t l = 0; l < a.n_seqs * a.lists; ++l) {
      const int32_t s = l / a.lists;
      if (a.seqs[s].q_len == 0) continue;
      const int32_t count = a.count[l];
      int64_t moved = 0;  // others are where they belong
      for (int32_t i = 0; i < count; ++i) {
        moved += !a.InPlace() || a.index[l * int64_t{a.capacity} + i] != i;
      }
      if (a.bounds != nullptr && (!a.InPlace() || a.bounds[2 * s] != count)) {
        moved += a.bounds[2 * s + 1] - a.bounds[2 * s];
      }
      c.bytes_read += U(moved) * row_bytes + 4 * U(count);
      c.bytes_written += U(moved) * row_bytes;
    }
    return c;
  }
  Cost operator()(const EvictArgs& a) const {
    Cost c;
    for (int32_t s = 0; s < a.n_seqs; ++s) {
      if (a.seqs[s].q_len == 0 || a.seqs[s].kv_len <= a.most) continue;
      c.bytes_read += 4 * U(a.seqs[s].kv_len) * U(a.lists) + 2 * U(a.kv.TokenBytes());
      c.bytes_written += 2 * U(a.kv.TokenBytes());
    }
    return c;
  }
  Cost operator()(const UndoEvictArgs& a) const {
    const uint64_t bytes = U(a.to - a.from) * U(a.kv.TokenBytes());
    return {.bytes_read = bytes, .bytes_written = bytes};
  }
  Cost operator()(const CustomArgs& a) const {
    HostArrays in_place;
    return CostOf(a, in_place);
  }
};

struct NameVisitor {
  std::string_view operator()(const EmbedArgs&) const { return "Embed"; }
  std::string_view operator()(const RopeTableArgs&) const { return "RopeTable"; }
  std::string_view operator()(const NormQkvRopeAppendArgs&) const { return "NormQkvRopeAppend"; }
  std::string_view operator()(const StoreRowsArgs&) const { return "StoreRows"; }
  std::string_view operator()(const AttendArgs&) const { return "Attend"; }
  std::string_view operator()(const LinearArgs&) const { return "Linear"; }
  std::string_view operator()(const NormGatedFfnArgs&) const { return "NormGatedFfn"; }
  std::string_view operator()(const NormLogitsArgs&) const { return "NormLogits"; }
  std::string_view operator()(const ScoreReduceArgs&) const { return "ScoreReduce"; }
  std::string_view operator()(const ScoreArgs&) const { return "Score"; }
  std::string_view operator()(const BlockSummaryArgs&) const { return "BlockSummary"; }
  std::string_view operator()(const BlockScoreArgs&) const { return "BlockScore"; }
  std::string_view operator()(const KeyScoreArgs&) const { return "KeyScore"; }
  std::string_view operator()(const IndexKeysArgs&) const { return "IndexKeys"; }
  std::string_view operator()(const IndexScoreArgs&) const { return "IndexScore"; }
  std::string_view operator()(const RescoreArgs&) const { return "Rescore"; }
  std::string_view operator()(const QueryMomentsArgs&) const { return "QueryMoments"; }
  std::string_view operator()(const ExpectedScoreArgs&) const { return "ExpectedScore"; }
  std::string_view operator()(const AgedScoresArgs&) const { return "AgedScores"; }
  std::string_view operator()(const PoolArgs&) const { return "Pool"; }
  std::string_view operator()(const PlanRangeArgs&) const { return "PlanRange"; }
  std::string_view operator()(const TopKArgs&) const { return "TopK"; }
  std::string_view operator()(const WorkingSetArgs&) const { return "WorkingSet"; }
  std::string_view operator()(const AverageScoresArgs&) const { return "AverageScores"; }
  std::string_view operator()(const FetchRowsArgs&) const { return "FetchRows"; }
  std::string_view operator()(const ListPiecesArgs&) const { return "ListPieces"; }
  std::string_view operator()(const PieceTableArgs&) const { return "PieceTable"; }
  std::string_view operator()(const NextTokenArgs&) const { return "NextToken"; }
  std::string_view operator()(const MergeStatesArgs&) const { return "MergeStates"; }
  std::string_view operator()(const PickLogitsArgs&) const { return "PickLogits"; }
  std::string_view operator()(const SumValuesArgs&) const { return "SumValues"; }
  std::string_view operator()(const PickHeadsArgs&) const { return "PickHeads"; }
  std::string_view operator()(const LocateRowsArgs&) const { return "LocateRows"; }
  std::string_view operator()(const CompactArgs&) const { return "Compact"; }
  std::string_view operator()(const EvictArgs&) const { return "Evict"; }
  std::string_view operator()(const UndoEvictArgs&) const { return "UndoEvict"; }
  std::string_view operator()(const CustomArgs& a) const { return a.kernels->name; }
};

}  // namespace

uint64_t KvBytes(const KvView& kv, int64_t head_tokens, bool values) {
  const auto head = [](const KvPlane& plane, int32_t n) {
    return DTypeBytes(plane.dtype, static_cast<size_t>(n));
  };
  return U(head_tokens) * (head(kv.k, kv.dk) + (values ? head(kv.v, kv.dv) : 0));
}

std::string_view OpName(const Op& op) {
  return std::visit(NameVisitor{}, op);
}

Cost CostOf(const Op& op) {
  return std::visit(CostVisitor{}, op);
}

Cost CostOf(const CustomArgs& op, HostArrays& arrays) {
  return op.kernels->cost(op.args.data(), arrays);
}

}  // namespace omnikv
