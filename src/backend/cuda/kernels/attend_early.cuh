// What a block of attention over few rows does before it waits for the kernels ahead of it. It
// often stands beside them for microseconds, in which the bus is idle. What it reads may still be
// written, or be of an earlier step: nothing follows from it that is not confirmed after the wait.
#pragma once

#include "backend/cuda/kernels/attend_plan.cuh"

namespace omnikv::cuda {
namespace {

// Brings into the second-level cache what tells a step's tokens: between two attentions a layer's
// weights have passed through it. One warp of a block does so, the last, since the first has ranges
// to look at, and few blocks look at a sequence for its table: a block which starts late is hardly
// delayed.
__device__ __forceinline__ void PrefetchPlan(const AttendArgs& args) {
  const uint32_t ahead = blockDim.x - 32;
  if (threadIdx.x < ahead) return;
  const uint32_t lane = threadIdx.x - ahead;
  const auto prefetch = [](const void* data, int64_t bytes, uint32_t line, uint32_t lines) {
    if (data == nullptr) return;
    for (int64_t at = int64_t{128} * line; at < bytes; at += int64_t{128} * lines) {
      PrefetchL2(static_cast<const std::byte*>(data) + at);
    }
  };
  const auto by_all = [&](const void* data, int64_t bytes) {
    prefetch(data, bytes, blockIdx.x + gridDim.x * lane, 32 * gridDim.x);
  };
  by_all(args.rows, int64_t{sizeof(RowMeta)} * args.n_rows);
  by_all(args.seqs, int64_t{sizeof(SeqMeta)} * args.n_seqs);
  for (int i = 0; i < args.plan.n_segments; ++i) {
    const PlanSegment& s = args.plan.segments[static_cast<size_t>(i)];
    const int64_t lists = int64_t{args.n_seqs} * s.lists;
    by_all(s.bounds, int64_t{8} * args.n_seqs);
    by_all(s.count, 4 * lists);
    by_all(s.index, 4 * lists * s.capacity);
  }
  for (uint32_t i = blockIdx.x; i < static_cast<uint32_t>(args.n_seqs); i += gridDim.x) {
    const SeqMeta seq = LoadEarly(args.seqs + i);
    prefetch(args.kv.block_table + seq.table_off, 4 * CeilDiv(seq.kv_len, args.kv.block_tokens),
             lane, 32);
  }
}

// Brings rows of a long range into the second-level cache, where other tokens are still being
// chosen: all but the newest row are there since earlier steps. All threads of a block look at the
// sequence, though few have a row: where the other warps go ahead and wait, nothing is gained
// (measured).
__device__ __forceinline__ void PrefetchRanges(const AttendArgs& args) {
  constexpr int32_t kLong = 512;            // tokens: fewer are not worth a look at the table
  constexpr int64_t kMostBytes = 24 << 20;  // of all sequences: half of what a card's cache holds
  const KvView& kv = args.kv;
  for (int i = 0; i < args.plan.n_segments; ++i) {
    if (args.plan.segments[static_cast<size_t>(i)].expected < kLong || kv.ByHead()) continue;
    const auto n_seqs = static_cast<uint32_t>(args.n_seqs);
    const uint32_t blocks = max(gridDim.x / n_seqs, 1);  // of a sequence
    const uint32_t s = blockIdx.x / blocks;
    if (s >= n_seqs) continue;
    const SeqMeta seq = LoadEarly(args.seqs + s);
    const RowMeta newest{static_cast<int32_t>(s), seq.kv_len - 1};
    const SegmentTokens range =
        SegmentTokensOf(args, i, LoadEnds<true>(args, i, newest.seq, 0), newest, 0);
    const auto most = static_cast<int32_t>(kMostBytes / n_seqs / kv.k.row_bytes);
    for (auto t = static_cast<int32_t>(blockIdx.x % blocks + blocks * threadIdx.x);
         t < min(range.n, most); t += static_cast<int32_t>(blocks * blockDim.x)) {
      const int32_t token = range.begin + t;
      const int32_t block = __ldcg(kv.block_table + seq.table_off + token / kv.block_tokens);
      const int64_t row = int64_t{block} * kv.BlockRows() + token % kv.block_tokens;
      PrefetchL2(kv.k.Head(row, 0), static_cast<int32_t>(kv.k.row_bytes));
      const int64_t to_v = kv.v.base - kv.k.base;
      if (to_v < 0 || to_v >= kv.k.row_bytes) {  // V has rows of its own
        PrefetchL2(kv.v.Head(row, 0), static_cast<int32_t>(kv.v.row_bytes));
      }
    }
  }
}

// The rows of a launch and their strands. A warp works them out before it waits, from what it finds
// in memory then, and anew where it finds something else after the wait. So those 400 instructions,
// which take a microsecond, stand beside the kernels ahead. Everything above is asked for
// meanwhile.
__device__ __forceinline__ void FindEarly(const AttendArgs& args, int32_t kv_head,
                                          int32_t most_strands, RowTiles& rows, Strands& strands) {
  RowFacts facts = RowFacts::Load<true>(args, kv_head);
  PrefetchPlan(args);
  PrefetchRanges(args);
#pragma unroll 1
  for (bool waited = false;; waited = true) {
    rows = RowTiles(args, facts, kv_head);
    strands = Strands(rows.total, most_strands);
    if (waited) return;
    GridWait();
    const RowFacts now = RowFacts::Load(args, kv_head);
    if (facts == now) return;
    facts = now;
  }
}

}  // namespace
}  // namespace omnikv::cuda
