#include "backend/resolve_plan.h"

#include <algorithm>

namespace omnikv {
namespace {

template <typename T>
std::vector<T> Fetched(Backend& backend, const T* from, int64_t n) {
  std::vector<T> values(from != nullptr ? static_cast<size_t>(n) : 0);
  if (!values.empty()) backend.Download(values.data(), from, values.size() * sizeof(T));
  return values;
}

// Appends the tokens [begin, end) that a row at `pos` may read of segment `s`.
void AddTokens(const PlanSegment& s, int32_t pos, int64_t begin, int64_t end,
               std::vector<int32_t>& tokens) {
  begin = std::max<int64_t>(begin, s.window > 0 ? pos + 1 - s.window : 0);
  end = std::min<int64_t>(end, int64_t{pos} + 1);
  for (int64_t t = begin; t < end; ++t) tokens.push_back(static_cast<int32_t>(t));
}

// Turns rows of sequences, by row of the step and KV head, into the positions of their tokens.
void ToPositions(Backend& backend, const AttendArgs& attend, const std::vector<RowMeta>& rows,
                 std::vector<std::vector<int32_t>>& resolved) {
  const KvView& kv = attend.kv;
  const auto kv_heads = static_cast<size_t>(kv.n_kv_heads);
  const std::vector<SeqMeta> seqs = Fetched(backend, attend.seqs, attend.n_seqs);
  for (size_t at = 0; at < resolved.size(); ++at) {
    const auto seq = static_cast<size_t>(rows[at / kv_heads].seq);
    const auto list = static_cast<int64_t>(kv.pos_lists > 1 ? at % kv_heads : 0);
    for (int32_t& token : resolved[at]) {
      const int32_t* entry = kv.block_table + seqs[seq].table_off + token / kv.block_tokens;
      const int64_t row =
          int64_t{Fetched(backend, entry, 1)[0]} * kv.BlockRows() + token % kv.block_tokens;
      token = Fetched(backend, kv.pos + row * kv.pos_lists + list, 1)[0];
    }
  }
}

}  // namespace

std::vector<std::vector<int32_t>> ResolvePlan(Backend& backend, const AttendArgs& attend) {
  const auto kv_heads = static_cast<size_t>(attend.kv.n_kv_heads);
  const std::vector<RowMeta> rows = Fetched(backend, attend.rows, attend.n_rows);
  std::vector<std::vector<int32_t>> resolved(rows.size() * kv_heads);
  for (int32_t i = 0; i < attend.plan.n_segments; ++i) {
    PlanSegment s = attend.plan.segments[static_cast<size_t>(i)];
    const int64_t n_lists = int64_t{attend.n_seqs} * s.lists;
    const std::vector<int32_t> bounds = Fetched(backend, s.bounds, 2 * int64_t{attend.n_seqs});
    const std::vector<int32_t> count = Fetched(backend, s.count, n_lists);
    const std::vector<int32_t> index = Fetched(backend, s.index, n_lists * s.capacity);
    const std::vector<int32_t> list_of = Fetched(backend, s.list_of, attend.kv.n_kv_heads);
    s.list_of = list_of.empty() ? nullptr : list_of.data();
    for (size_t at = 0; at < resolved.size(); ++at) {
      const RowMeta row = rows[at / kv_heads];
      const auto seq = static_cast<size_t>(row.seq);
      const auto kv_head = static_cast<int32_t>(at % kv_heads);
      if (!attend.TakePart().Has(kv_head)) continue;
      if (s.kind == SegmentKind::kRange) {
        AddTokens(s, row.pos, bounds.empty() ? s.begin : bounds[2 * seq],
                  bounds.empty() ? s.end : bounds[2 * seq + 1], resolved[at]);
        continue;
      }
      const auto list = static_cast<size_t>(s.ListOf(row.seq, kv_head));
      for (size_t k = 0; k < static_cast<size_t>(count[list]); ++k) {
        const int64_t unit = index[list * static_cast<size_t>(s.capacity) + k];
        AddTokens(s, row.pos, unit * s.unit, (unit + 1) * s.unit, resolved[at]);
      }
    }
  }
  if (attend.kv.pos != nullptr) ToPositions(backend, attend, rows, resolved);
  for (std::vector<int32_t>& tokens : resolved) std::sort(tokens.begin(), tokens.end());
  return resolved;
}

}  // namespace omnikv
