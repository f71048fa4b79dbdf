// The arrays that an attention reads: these move elsewhere when it runs elsewhere.
#pragma once

#include "backend/ops.h"

namespace omnikv {

// Visits them, K/V and the block table apart: visit(pointer, values), where `pointer` may be set.
// Arrays that are not there (null) are left out.
template <typename Visit>
void ForInputs(AttendArgs& a, const Visit& visit) {
  const auto visit_any = [&](auto*& array, int64_t n) {
    if (array != nullptr) visit(array, n);
  };
  const int64_t heads = int64_t{a.n_rows} * a.n_heads;
  visit_any(a.rows, a.n_rows);
  visit_any(a.seqs, a.n_seqs);
  visit_any(a.q, heads * a.kv.dk);
  visit_any(a.lse_in, heads);
  for (int32_t i = 0; i < a.plan.n_segments; ++i) {
    PlanSegment& s = a.plan.segments[static_cast<size_t>(i)];
    const int64_t lists = int64_t{a.n_seqs} * s.lists;
    visit_any(s.q, heads * a.kv.dk);
    visit_any(s.bounds, 2 * int64_t{a.n_seqs});
    visit_any(s.index, lists * s.capacity);
    visit_any(s.count, lists);
    visit_any(s.list_of, a.kv.n_kv_heads);
  }
}

// The same, but for logits, which are in shared memory already.
template <typename Visit>
void ForInputs(SumValuesArgs& a, const Visit& visit) {
  const int64_t lists = int64_t{a.n_seqs} * a.lists;
  const int64_t heads = int64_t{a.n_rows} * a.n_heads;
  visit(a.rows, a.n_rows);
  visit(a.seqs, a.n_seqs);
  if (a.lse_in != nullptr) visit(a.lse_in, heads);
  visit(a.index, lists * a.capacity);
  visit(a.count, lists);
}

}  // namespace omnikv
