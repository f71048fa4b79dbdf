// Rows of K/V that move: those of a step to their places, chosen rows of a table that loses some to
// the front, and one row given up for another; where the rows of a step stand in such a table.
#include <algorithm>

#include "backend/cuda/kernels/pack.cuh"
#include "backend/kv_slices.h"

namespace omnikv::cuda {
namespace {

// --- StoreRows: a thread per piece of a row.

constexpr int kStoreThreads = 128;

// Slice i of row blockIdx.x, in one of the views.
template <typename Word>
__device__ __forceinline__ void StoreIn(const KvView& kv, const KvSlot& slot,
                                        const StoreRowsArgs& a, int32_t i) {
  const auto pieces = static_cast<int32_t>(HeadBytesOfSlice(kv, i) / int64_t{sizeof(Word)});
  const auto at = static_cast<int32_t>(blockIdx.y * kStoreThreads + threadIdx.x);
  if (at >= a.from.n_kv_heads * pieces) return;
  const int32_t head = at / pieces;
  const int32_t to_head = a.To(kv, head);
  if (to_head < 0) return;
  const auto row = static_cast<int32_t>(blockIdx.x);
  const KvTarget from = a.Source(row);
  const KvTarget to = TargetIn(kv, slot, a.seqs, a.RowOf(row, head));
  reinterpret_cast<Word*>(HeadOfSlice(kv, to, i, to_head))[at % pieces] =
      reinterpret_cast<const Word*>(HeadOfSlice(a.from, from, i, head))[at % pieces];
}

// Grid: (rows, parts of a slice, n_slices of each view).
template <typename Word>
__global__ void __launch_bounds__(kStoreThreads)
    StoreRowsKernel(const __grid_constant__ StoreRowsArgs a, int32_t n_slices) {
  GridTrigger();
  GridWait();
  const auto i = static_cast<int32_t>(blockIdx.z);
  if (i < n_slices) return StoreIn<Word>(a.kv, a.slot, a, i);
  StoreIn<Word>(a.rest, {}, a, i - n_slices);
}

// --- LocateRows: a thread per row and per sequence, of each head. Grid: x walks them, y layers'
// positions.

constexpr int kLocateThreads = 128;

__global__ void __launch_bounds__(kLocateThreads) LocateRowsKernel(const LocateRowsArgs a) {
  GridTrigger();
  GridWait();
  const auto i = static_cast<int32_t>(blockIdx.x * kLocateThreads + threadIdx.x);
  const int32_t h = i % a.heads;
  if (i < a.n_rows * a.heads) {
    const int32_t r = i / a.heads;
    const RowMeta row = a.Row(r, h);
    if (blockIdx.y == 0) a.to_rows[a.RowAt(r, h)] = row;
    if (a.n_pos > 0) {
      const int32_t table_off = a.seqs[a.rows[r].seq].table_off + h * a.table_stride;
      const int64_t block = a.block_table[table_off + row.pos / a.block_tokens];
      const int64_t at = block * a.block_tokens + row.pos % a.block_tokens;
      int32_t* pos = a.pos[blockIdx.y] + at * a.lists;
      for (int32_t l = 0; l < a.lists; ++l) pos[l] = a.rows[r].pos;
    }
  }
  if (blockIdx.y == 0 && i < a.n_seqs * a.heads) a.to_seqs[i] = a.Seq(i / a.heads, h);
}

// --- Compact.
//
// In place, row i may lie where row j > i is still to be read, so the order matters. A block takes
// a part of some bytes of all rows of a list: what it writes no other block reads. It goes from
// front to back, a batch of rows at a time: all of a batch are read, the block waits, all are
// written. Rows of batch [b, b + n) come from rows index[i] >= i >= b. What was written before lies
// in front of b, so they still are what they were; and within the batch nothing is written before
// all is read. No barrier is needed between writing a batch and reading the next, whose rows lie at
// or behind b
// + n; nor can a thread write that batch before all have read this one, past whose barrier they
// are.

constexpr int kThreads = 512;
constexpr int kLanes = 8;     // pieces of a part: neighbouring threads, a line of memory
constexpr int kTogether = 4;  // rows that a thread reads before it waits
constexpr int kGroups = kThreads / kLanes;
constexpr int kBatch = kGroups * kTogether;

// Grid: (parts of a slice, slices of a list: n_slices of heads that go together, all lists).
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    CompactKernel(const __grid_constant__ CompactArgs a, int32_t n_slices) {
  GridTrigger();
  GridWait();
  const auto list = static_cast<int32_t>(blockIdx.z);
  const int32_t s = list / a.lists;
  const int32_t l = list % a.lists;
  if (a.seqs[s].q_len == 0) return;
  const int32_t table_off = a.seqs[s].table_off;
  const int32_t listed = a.count[list];
  const int32_t begin = a.bounds != nullptr ? a.bounds[2 * s] : 0;
  const int32_t count = listed + (a.bounds != nullptr ? a.bounds[2 * s + 1] - begin : 0);
  const int32_t* const index = a.index + int64_t{list} * a.capacity;
  const bool in_place = a.InPlace();
  const KvView& source = a.Source();
  const auto part = static_cast<int32_t>(blockIdx.y);
  const RowSlice slice = SliceOf(a, a.kv, l, part, n_slices);
  const RowSlice from_slice = SliceOf(a, source, l, part, n_slices);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t piece = static_cast<int32_t>(blockIdx.x) * kLanes + thread % kLanes;
  const bool any = piece < slice.bytes / int64_t{sizeof(Word)};
  const bool first_piece = blockIdx.y == 0 && piece == 0;  // moves what else moves
  const bool moves_pos = a.pos != nullptr && first_piece;
  const bool moves_scores = a.scores.scores != nullptr && first_piece;
  const float* const scores =
      moves_scores ? a.scores.At(s, l, a.lists, a.steps[s].kv_len) : nullptr;
  float* const to_scores =
      moves_scores ? a.to_scores.At(s, l, a.lists, a.steps[s].kv_len) : nullptr;

  for (int32_t first = thread / kLanes; first - thread / kLanes < count; first += kBatch) {
    Word values[kTogether];
    int32_t pos[kTogether];
    float score[kTogether];
    int64_t to[kTogether];  // -1: the row is where it belongs
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int32_t i = first + u * kGroups;
      const int32_t from = i < listed ? index[i] : i < count ? begin + i - listed : i;
      to[u] = -1;
      if (moves_scores && i < count) score[u] = scores[from];
      if (i >= count || (in_place && from == i) || !any) continue;
      const int64_t row = source.RowIndex(table_off, from);
      to[u] = a.kv.RowIndex(table_off, i);
      values[u] = reinterpret_cast<const Word*>(from_slice.Of(row))[piece];
      if (moves_pos) pos[u] = in_place ? a.pos[row * a.lists + l] : from;
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int32_t i = first + u * kGroups;
      if (moves_scores && i < count) to_scores[i] = score[u];
      if (to[u] < 0) continue;
      reinterpret_cast<Word*>(slice.Of(to[u]))[piece] = values[u];
      if (moves_pos) a.pos[to[u] * a.lists + l] = pos[u];
    }
  }
}

// --- Evict: a block per list.

constexpr int kEvictThreads = 512;

__device__ __forceinline__ uint64_t WarpMin(uint64_t v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = min(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}

// The row of the lowest score of n, of equals the last.
__device__ int32_t Lowest(const EvictArgs& a, int32_t s, int32_t l, const float* scores,
                          int32_t n) {
  constexpr int kWarps = kEvictThreads / 32;
  __shared__ uint64_t of_warps[kWarps];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  uint64_t lowest = ~uint64_t{0};
#pragma unroll 4
  for (int32_t i = thread; i < n; i += kEvictThreads) {
    // Scores become keys, unsigned numbers of the same order; then the last index first.
    const uint32_t bits = __float_as_uint(scores[i] + 0.0f);  // -0 as 0
    const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    if (!IsRecent(a, s, l, i)) {
      lowest = min(lowest, uint64_t{key} << 32 | ~static_cast<uint32_t>(i));
    }
  }
  lowest = WarpMin(lowest);
  if (thread % 32 == 0) of_warps[thread / 32] = lowest;
  __syncthreads();
  return static_cast<int32_t>(~static_cast<uint32_t>(WarpMin(of_warps[thread % kWarps])));
}

// Bytes of a row that are saved and then overwritten with another's, in words, by `n_threads`.
template <typename Word>
__device__ __forceinline__ void SaveAndMove(std::byte* row, std::byte* saved, const std::byte* from,
                                            int64_t bytes, int32_t thread, int32_t n_threads) {
  for (int64_t i = thread; i < bytes / int64_t{sizeof(Word)}; i += n_threads) {
    Word* const word = reinterpret_cast<Word*>(row) + i;
    const Word old = *word;
    *word = reinterpret_cast<const Word*>(from)[i];
    reinterpret_cast<Word*>(saved)[i] = old;
  }
}

__global__ void __launch_bounds__(kEvictThreads) EvictKernel(const __grid_constant__ EvictArgs a) {
  GridTrigger();
  const auto list = static_cast<int32_t>(blockIdx.x);
  const int32_t s = list / a.lists;
  const int32_t l = list % a.lists;
  if (threadIdx.x == 0) {
    PrefetchL2(a.seqs + s);
    PrefetchL2(a.steps + s);
  }
  GridWait();
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int32_t length = a.steps[s].kv_len;
  const int64_t entry = int64_t{s} * kEvictionLog + length % kEvictionLog;
  const bool evicts = seq.kv_len > a.most;
  float* const scores = a.scores.At(s, l, a.lists, length);
  const int32_t newest = seq.kv_len - 1;
  const int64_t from = evicts ? a.kv.RowIndex(seq.table_off, newest) : 0;
  const int32_t victim = evicts ? Lowest(a, s, l, scores, seq.kv_len) : -1;
  const int64_t to = evicts ? a.kv.RowIndex(seq.table_off, victim) : 0;
  if (threadIdx.x == 0) {
    a.log.length[entry * a.lists + l] = length;
    a.log.victim[entry * a.lists + l] = victim;
    if (evicts) scores[victim] = scores[newest];
    if (evicts && a.pos != nullptr) {
      a.log.pos[entry * a.lists + l] = a.pos[to * a.lists + l];
      a.pos[to * a.lists + l] = a.pos[from * a.lists + l];
    }
  }
  if (!evicts) return;
  // A part of the threads for each slice.
  constexpr int32_t kPart = kEvictThreads / kRowSlices;
  const auto thread = static_cast<int32_t>(threadIdx.x) % kPart;
  const RowSlice slice = SliceOf(a.kv, a.lists, l, static_cast<int32_t>(threadIdx.x) / kPart);
  std::byte* const saved = a.log.rows + entry * PackedRowBytes(a.kv) + slice.packed_at;
  std::byte* const row = slice.Of(to);
  const std::byte* const last = slice.Of(from);
  const auto bits = reinterpret_cast<uintptr_t>(row) | reinterpret_cast<uintptr_t>(last) |
                    reinterpret_cast<uintptr_t>(saved) | static_cast<uintptr_t>(slice.bytes);
  if (bits % sizeof(uint4) == 0) {
    SaveAndMove<uint4>(row, saved, last, slice.bytes, thread, kPart);
  } else {
    SaveAndMove<uint16_t>(row, saved, last, slice.bytes, thread, kPart);
  }
}

// A block per list. The steps are undone from the last to the first.
__global__ void __launch_bounds__(kEvictThreads)
    UndoEvictKernel(const __grid_constant__ UndoEvictArgs a) {
  GridTrigger();
  GridWait();
  const auto l = static_cast<int32_t>(blockIdx.x);
  for (int64_t n = a.to; n > a.from; --n) {
    const int64_t entry = int64_t{a.seq} * kEvictionLog + n % kEvictionLog;
    const int32_t victim = a.log.victim[entry * a.lists + l];
    if (victim < 0 || a.log.length[entry * a.lists + l] != n) continue;
    const int64_t row = a.kv.RowIndex(a.table_off, victim);
    for (int32_t i = 0; i < kRowSlices; ++i) {
      const RowSlice slice = SliceOf(a.kv, a.lists, l, i);
      const std::byte* saved = a.log.rows + entry * PackedRowBytes(a.kv) + slice.packed_at;
      for (auto at = static_cast<int64_t>(threadIdx.x) * 2; at < slice.bytes;
           at += 2 * kEvictThreads) {
        *reinterpret_cast<uint16_t*>(slice.Of(row) + at) =
            *reinterpret_cast<const uint16_t*>(saved + at);
      }
    }
    if (threadIdx.x == 0 && a.pos != nullptr) {
      a.pos[row * a.lists + l] = a.log.pos[entry * a.lists + l];
    }
    // A thread writes the same bytes of a row in each turn.
  }
}

}  // namespace

void StoreRows(const StoreRowsArgs& args, const Launch& launch) {
  if (args.n_rows == 0) return;
  const KvView& kv = args.kv;
  const bool scales = InBlocks(kv.k.dtype);
  const auto run = [&](auto* kernel, int64_t piece_bytes) {
    const int64_t head_bytes = std::max(HeadBytesOfSlice(kv, 0), HeadBytesOfSlice(kv, 1));
    const int64_t bytes = args.from.n_kv_heads * head_bytes;
    const int32_t slices = scales ? kRowSlices : kRowSlices / 2;
    const dim3 grid(static_cast<unsigned>(args.n_rows),
                    static_cast<unsigned>(CeilDiv(bytes / piece_bytes, kStoreThreads)),
                    static_cast<unsigned>(args.HasRest() ? 2 * slices : slices));
    LaunchKernel(kernel, launch, grid, dim3(kStoreThreads), 0, args, slices);
  };
  const auto in_pieces_of = [&](int64_t bytes) {
    for (const KvView* view : {&args.from, &kv, &args.rest}) {
      for (const KvPlane* plane : {&view->k, &view->v}) {
        if (!AreMultiples(bytes, plane->base, plane->row_bytes, plane->head_bytes, plane->scales,
                          plane->scale_head_bytes)) {
          return false;
        }
      }
    }
    for (int32_t i = 0; i < kRowSlices; ++i) {
      if (HeadBytesOfSlice(kv, i) % bytes != 0) return false;
    }
    return AreMultiples(bytes, args.slot.k, args.slot.v);
  };
  if (in_pieces_of(16)) {
    run(StoreRowsKernel<uint4>, 16);
  } else if (in_pieces_of(4)) {
    run(StoreRowsKernel<uint32_t>, 4);
  } else {
    run(StoreRowsKernel<uint16_t>, 2);
  }
}

void LocateRows(const LocateRowsArgs& args, const Launch& launch) {
  const int32_t n = std::max(args.n_rows, args.n_seqs) * args.heads;
  if (n == 0) return;
  const dim3 grid(static_cast<unsigned>(CeilDiv(n, kLocateThreads)),
                  static_cast<unsigned>(std::max(args.n_pos, 1)));
  LaunchKernel(LocateRowsKernel, launch, grid, dim3(kLocateThreads), 0, args);
}

void Compact(const CompactArgs& args, const Launch& launch) {
  if (args.n_seqs == 0) return;
  const auto to = [&](int32_t i) { return SliceOf(args, args.kv, 0, i, kRowSlices); };
  const auto from = [&](int32_t i) { return SliceOf(args, args.Source(), 0, i, kRowSlices); };
  const bool scales = to(2).bytes + to(3).bytes > 0;
  const auto run = [&](auto* kernel, int64_t piece_bytes) {
    const int64_t parts = CeilDiv(CeilDiv(std::max(to(0).bytes, to(1).bytes), piece_bytes), kLanes);
    const int32_t n_slices = scales ? kRowSlices : kRowSlices / 2;
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(n_slices * args.Split()),
                    static_cast<unsigned>(args.n_seqs * args.lists));
    LaunchKernel(kernel, launch, grid, dim3(kThreads), 0, args, n_slices);
  };
  const auto in_pieces_of = [&](int64_t bytes) {
    for (int32_t i = 0; i < kRowSlices; ++i) {
      if (!AreMultiples(bytes, to(i).base, to(i).bytes, to(i).stride, from(i).base,
                        from(i).stride)) {
        return false;
      }
    }
    return true;
  };
  if (in_pieces_of(16)) {
    run(CompactKernel<uint4>, 16);
  } else if (in_pieces_of(4)) {
    run(CompactKernel<uint32_t>, 4);
  } else {
    run(CompactKernel<uint16_t>, 2);
  }
}

void Evict(const EvictArgs& args, const Launch& launch) {
  if (args.n_seqs == 0) return;
  LaunchKernel(EvictKernel, launch, static_cast<uint32_t>(args.n_seqs * args.lists), kEvictThreads,
               0, args);
}

void UndoEvict(const UndoEvictArgs& args, const Launch& launch) {
  LaunchKernel(UndoEvictKernel, launch, static_cast<uint32_t>(args.lists), kEvictThreads, 0, args);
}

}  // namespace omnikv::cuda
