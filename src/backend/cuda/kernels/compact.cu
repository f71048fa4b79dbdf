// Chosen rows of K/V move to the front of their sequence, in place.
//
// Row i may lie where row j > i is still to be read, so the order matters. A block takes a slice of
// some bytes of all rows of a sequence: what it writes no other block reads. It goes from front to
// back, a batch of rows at a time: all of a batch are read, the block waits, all are written. Rows
// of batch [b, b + n) come from rows index[i] >= i >= b. What was written before lies in front of
// b, so they still are what they were; and within the batch nothing is written before all is read.
// No barrier is needed between writing a batch and reading the next, whose rows lie at or behind b
// + n; nor can a thread write that batch before all have read this one, past whose barrier they
// are.
#include <algorithm>

#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLanes = 8;     // pieces of a slice: neighbouring threads, a line of memory
constexpr int kTogether = 4;  // rows that a thread reads before it waits
constexpr int kGroups = kThreads / kLanes;
constexpr int kBatch = kGroups * kTogether;

// Rows of one plane. Grid: (slices of a row and, where there are positions, one more block for
// them; sequences).
template <typename Piece>
__global__ void __launch_bounds__(kThreads)
    CompactKernel(const __grid_constant__ CompactArgs a, const __grid_constant__ KvPlane plane) {
  GridTrigger();
  GridWait();
  const int64_t seq = blockIdx.y;
  const int32_t count = a.count[seq];
  const int32_t* index = a.index + seq * a.capacity;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto pieces = static_cast<int32_t>(plane.row_bytes / int64_t{sizeof(Piece)});
  const int32_t piece = static_cast<int32_t>(blockIdx.x) * kLanes + thread % kLanes;

  if (static_cast<int32_t>(blockIdx.x) * kLanes >= pieces) {  // positions
    int32_t* pos = a.pos + seq * a.pos_stride;
    for (int32_t first = 0; first < count; first += kThreads) {
      const int32_t i = first + thread;
      const int32_t value = i < count ? pos[index[i]] : 0;
      __syncthreads();
      if (i < count) pos[i] = value;
    }
    return;
  }

  const int32_t table_off = a.seqs[seq].table_off;
  const auto at = [&](int32_t token) {
    return reinterpret_cast<Piece*>(plane.Head(a.kv.RowIndex(table_off, token), 0)) + piece;
  };
  for (int32_t first = thread / kLanes; first - thread / kLanes < count; first += kBatch) {
    Piece values[kTogether];
    bool moves[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int32_t i = first + u * kGroups;
      const int32_t from = i < count ? index[i] : i;
      moves[u] = from != i && piece < pieces;
      if (moves[u]) values[u] = *at(from);
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (moves[u]) *at(first + u * kGroups) = values[u];
    }
  }
}

void CompactPlane(const CompactArgs& args, const KvPlane& plane, const Launch& launch) {
  const auto run = [&](auto* kernel, int64_t piece_bytes) {
    const int64_t slices = CeilDiv(plane.row_bytes / piece_bytes, kLanes);
    const dim3 grid(static_cast<unsigned>(slices + (args.pos != nullptr ? 1 : 0)),
                    static_cast<unsigned>(args.n_seqs));
    LaunchKernel(kernel, launch, grid, dim3(kThreads), 0, args, plane);
  };
  if (AreMultiples(16, plane.base, plane.row_bytes)) {
    run(CompactKernel<uint4>, 16);
  } else if (AreMultiples(4, plane.base, plane.row_bytes)) {
    run(CompactKernel<uint32_t>, 4);
  } else {
    run(CompactKernel<uint16_t>, 2);
  }
}

}  // namespace

void Compact(const CompactArgs& args, const Launch& launch) {
  if (args.n_seqs == 0) return;
  CompactPlane(args, args.kv.k, launch);
  if (args.kv.Interleaved()) return;
  CompactArgs values = args;
  values.pos = nullptr;
  CompactPlane(values, args.kv.v, launch);
}

}  // namespace omnikv::cuda
