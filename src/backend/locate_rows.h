// LocateRows where memory is the host's: what it writes is whole numbers, so one loop serves all.
#pragma once

#include <algorithm>

#include "backend/ops.h"

namespace omnikv {

inline void LocateRowsOnHost(const LocateRowsArgs& a) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    for (int32_t h = 0; h < a.heads; ++h) {
      const RowMeta row = a.Row(r, h);
      a.to_rows[a.RowAt(r, h)] = row;
      const KvView table{.block_table = a.block_table, .block_tokens = a.block_tokens};
      const int32_t table_off = a.seqs[a.rows[r].seq].table_off + h * a.table_stride;
      for (int32_t i = 0; i < a.n_pos; ++i) {
        std::fill_n(a.pos[i] + table.RowIndex(table_off, row.pos) * a.lists, a.lists,
                    a.rows[r].pos);
      }
    }
  }
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    for (int32_t h = 0; h < a.heads; ++h) a.to_seqs[s * a.heads + h] = a.Seq(s, h);
  }
}

}  // namespace omnikv
