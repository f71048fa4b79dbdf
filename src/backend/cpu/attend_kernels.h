// Flash-decoding over pieces of a plan: what a thread does with its piece, and how pieces merge.
// The split into pieces is attend.cc's.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/ops.h"
#include "base/round.h"

namespace omnikv {

// The tokens that a group of rows may read of one KV head's lists: its segments one after another,
// ranges clipped to what the rows can see. Lists are clipped token by token, when they are walked.
struct AttendAxis {
  int64_t tokens[kMaxSegments] = {};  // of each segment
  int64_t first[kMaxSegments] = {};   // kRange: its first token
  int64_t total = 0;
};

// Rows [row, row + n_rows) of a step: consecutive positions of one sequence.
struct AttendGroup {
  int32_t seq = 0;
  int32_t row = 0;
  int32_t n_rows = 0;
  int32_t pieces = 0;
  float* state = nullptr;  // [pieces, n_rows, n_heads, state_stride]
};

AttendAxis MakeAttendAxis(const AttendArgs& a, const AttendGroup& group, int32_t kv_head);

struct AttendItem {
  const AttendGroup* group = nullptr;
  int32_t piece = 0;
  int32_t first = 0;  // of the KV heads that take part
  int32_t n_kv_heads = 0;
};

// A state is {max logit in units of log 2, sum of exponentials relative to it, weighted values in
// packed order}.
inline constexpr int64_t kAttendStateHead = 16;  // floats before the values: a cache line

struct AttendJob {
  const AttendArgs* args = nullptr;
  // Packed: [n_rows, n_heads, PackedQueryFloats], from row `first_row`.
  const float* q[kMaxSegments] = {};
  int32_t first_row = 0;
  int64_t state_stride = 0;

  float* State(const AttendGroup& g, int32_t piece, int32_t row, int32_t head) const {
    const int64_t row_head = (int64_t{piece} * g.n_rows + row) * args->n_heads + head;
    return g.state + row_head * state_stride;
  }
};

// Floats of a packed query of dk values. Targets have it differently: at most four floats for each
// value, which are padded to whole vectors (64 of int8).
inline int64_t PackedQueryFloats(int64_t dk) {
  return 4 * RoundUp(dk, 64);
}

struct AttendKernels {
  // The queries [heads, dk] of one KV head, in the order that `piece` reads for these K and V:
  // PackedQueryFloats for each.
  void (*pack_queries)(const KvView& kv, const float* q, int32_t heads, float* out);
  // Computes `item`, and fetches the first tokens of `after`, which the thread is likely to compute
  // next (null: none), while it works on the last ones.
  void (*piece)(const AttendJob& job, const AttendItem& item, const AttendItem* after);
  // o and lse of heads [begin, end) of row `row` of the group.
  void (*merge)(const AttendJob& job, const AttendGroup& group, int32_t row, int32_t begin,
                int32_t end);
};

const AttendKernels& GetAttendKernels(const Isa& isa);

}  // namespace omnikv
