// Products of up to 8 rows of activations with bf16 weights, on cards with clusters of blocks: the
// activations stay in registers, so that the kernel reads little but weights.
//
// That takes many warps to a row of weights: the blocks of a cluster and the warps of each split k
// into slices. Where k is too long for their registers, a batch of tiles takes one chunk of k after
// the other. A warp streams its slice of one tile of 16 rows after the other through a ring of its
// own, filled before GridWait as in StreamKernel (matvec.cu). At the end of a batch the warps' sums
// are added in shared memory, and sent to the block of the cluster that finishes them. The barrier
// behind that is waited for a tile later, so that no block stands still for it.
//
// What else is read stands behind a ring of weights in memory's queue, some 4 us, and is therefore
// asked for long before: the next chunk's activations when a chunk begins, what finishing a batch
// needs when the batch begins.
//
// Weights go to mma.m16n8k16 as they lie. Activations are the sum of three bf16 values, which hold
// all 24 bits of a float. (The sums of tensor cores are cut off, not rounded: those of a tile begin
// at zero, and the two lower parts have their own.) Which k a column of a fragment stands for is
// free as long as both sides agree: of 32 values, lane (g, t) = (lane / 4, lane % 4) holds values
// 8 t to 8 t + 7 of weight rows g and g + 8 and of activation row g.
#include <algorithm>

#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/matvec.cuh"
#include "backend/cuda/kernels/mma.cuh"

namespace omnikv::cuda {
namespace {

// Of a cluster: two, for which every multiprocessor finds another. Larger ones leave some over.
constexpr int kBlocks = 2;
constexpr int kWarps = 16;  // of a block, which has a multiprocessor to itself
constexpr int kThreads = 32 * kWarps;
constexpr int kSlices = kBlocks * kWarps;
// Of a lane: four warps leave a quarter of a multiprocessor's registers room for a warp of a fetch
// (working_set.cu), which would else keep a block from starting until the fetch has ended.
constexpr int kRegisters = 112;
constexpr int kRows = 8;                    // of activations
constexpr int kBatch = 4;                   // tiles whose sums are exchanged together
constexpr int kSums = kBatch * 16 * kRows;  // of a batch
constexpr int kShare = kSums / kBlocks;     // of them: those that a block finishes
constexpr int kTables = 3;                  // batches whose rows' addresses are at hand
constexpr int kLine = 128;                  // bytes of a row in a piece, 64 values: a line of cache
constexpr int kPieceBytes = 16 * kLine;     // of a tile's rows: what is copied at a time
constexpr int kMaxSteps = 5;                // more would spill many registers
// Pieces of a ring that are asked for before the activations, which stand behind them in memory's
// queue: as much as memory brings until GridWait returns.
constexpr int kEarlyPieces = 2;

// A warp holds 32 * kSteps values of k: its slice of a chunk.
template <int kSteps>
struct Shape {
  static constexpr int kPieces = (kSteps + 1) / 2;  // the last may be half of one
  static constexpr int kAhead = 4 / kPieces;        // tiles in a ring; no more than a batch
  static constexpr int kTileBytes = kPieces * kPieceBytes;
  static constexpr int kRingPieces = kAhead * kPieces;
  static constexpr int kRingBytes = kAhead * kTileBytes;    // of a warp
  static constexpr int kStageFloats = kRows * 32 * kSteps;  // of a warp
  static constexpr bool kHasStage = kSteps != 4;            // else it does not fit beside the ring
};

// Shared memory behind the rings.
struct Exchange {
  float partial[kWarps][kSums];
  float received[2][kBlocks][kShare];  // of two batches, in turn
  float squares[kSlices][kRows];
  const std::byte* table[kTables][kBatch * 16];
  float4 operands[kShare];  // of the threads that finish a batch: two biases, two values
  KvTarget kv_rows[kRows];
};

// What is streamed at a time: a chunk of a tile, of the batch that begins with turn `first`.
struct Unit {
  int32_t first;
  int32_t chunk;
  int32_t tile;
};

// A lane's share of the activations, of 32 values of k: three parts whose sum they are.
struct Activations {
  uint32_t part[3][4];

  __device__ __forceinline__ void Set(const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = v[2 * i];
      float high = v[2 * i + 1];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        part[p][i] = TopHalves(low, high);
        low = WithoutTop(low);
        high = WithoutTop(high);
      }
    }
  }
};

// Adds the products of weight rows g (`top`) and g + 8 with activations, of words i and i + 1.
__device__ __forceinline__ void Mma(float (&sum)[4], const uint32_t (&top)[4],
                                    const uint32_t (&bottom)[4], const uint32_t (&x)[4], int i) {
  MultiplyAdd<__nv_bfloat16>(sum, {top[i], bottom[i], top[i + 1], bottom[i + 1]}, {x[i], x[i + 1]});
}

__device__ __forceinline__ void LoadWords(const std::byte* from, uint32_t (&to)[4]) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Grid: clusters. Rows of weights are up to n_chunks times what a cluster holds of the activations;
// not kChunked: REQUIRES n_chunks == 1.
template <int kSteps, bool kChunked>
__global__ void __maxnreg__(kRegisters)
    StationaryKernel(const __grid_constant__ Work work, int32_t n_tiles, int32_t n_chunks) {
  using S = Shape<kSteps>;
  constexpr bool kStaged = kChunked && S::kHasStage;
  if (!kChunked) n_chunks = 1;  // for the compiler
  const Product& p = work.product;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const auto cluster = static_cast<int32_t>(blockIdx.x / kBlocks);
  const auto n_clusters = static_cast<int32_t>(gridDim.x / kBlocks);
  const auto rank = static_cast<int32_t>(blockIdx.x % kBlocks);
  const int slice = warp * kBlocks + rank;  // where k is short, both blocks have warps without one
  ClusterArrive();

  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* ring = shared + warp * S::kRingBytes;
  auto& exchange = *reinterpret_cast<Exchange*>(shared + kWarps * S::kRingBytes);
  float* const stage = reinterpret_cast<float*>(&exchange + 1) + warp * S::kStageFloats;

  // The clusters take turns over the tiles, so that together they read one stretch of memory.
  const int32_t tile_items = work.rows_per_item == 2 ? 8 : 16;
  const int32_t n_turns = (n_tiles - cluster + n_clusters - 1) / n_clusters;
  const auto tile_of = [&](int32_t turn) { return turn * n_clusters + cluster; };
  const auto is_last_tile = [&](const Unit& u) {
    return u.tile + 1 == min(int32_t{kBatch}, n_turns - u.first);
  };
  const auto advance = [&](Unit& u) {
    if (!is_last_tile(u)) {
      ++u.tile;
      return;
    }
    u.tile = 0;
    if (++u.chunk < n_chunks) return;
    u.chunk = 0;
    u.first += kBatch;
  };

  // Row i of a batch.
  const auto fill_table = [&](int32_t batch, int i) {
    const int32_t item = tile_of(batch * kBatch + i / 16) * tile_items + (i & (tile_items - 1));
    // Past the end any row will do.
    exchange.table[batch % kTables][i] =
        FindWeights(work, min(item, work.n_items - 1), i % 16 >= tile_items);
  };
  if (threadIdx.x < (kTables - 1) * kBatch * 16) {
    const auto i = static_cast<int>(threadIdx.x);
    fill_table(i / (kBatch * 16), i % (kBatch * 16));
  }
  __syncthreads();

  // Where piece i of a chunk of the slice begins in a row, in bytes. Halves of lines, where slices
  // have an odd one, lie behind the chunk's whole lines.
  const auto piece_begin = [&](int32_t chunk, int i) {
    constexpr int kWhole = kSteps / 2;
    const int32_t begin = chunk * (kSlices * kSteps * kLine / 2);
    return begin + (i < kWhole ? (slice * kWhole + i) * kLine
                               : kSlices * kWhole * kLine + slice * (kLine / 2));
  };

  // Where step i of a chunk of the slice begins.
  const auto step_begin = [&](int32_t chunk, int i) {
    return piece_begin(chunk, i / 2) / 2 + i % 2 * 32;
  };

  // Where the slice is one chunk, the norm's weights of it come first, to where the first sums will
  // lie: behind the weights in memory's queue each would be waited for.
  const bool stages_norm = p.norm != nullptr && !kChunked;
  float* const norms = exchange.partial[warp];
  if (stages_norm) {
    for (int i = lane / 8; i < kSteps; i += 4) {
      const int32_t k = step_begin(0, i) + lane % 8 * 4;
      CopyAsync16(norms + 32 * i + lane % 8 * 4, p.norm + k, k < work.n_in);
    }
  }
  CopyAsyncCommit();

  // What is copied next. A lane copies 16 bytes of every fourth row; halves of odd rows change
  // places, against bank conflicts.
  Unit feed{};
  int feed_slot = 0;
  const int copy_row = lane / 8;
  const int copy_at = lane % 8;
  std::byte* const copy_to = ring + copy_row * kLine + (copy_at ^ copy_row % 2 * 4) * 16;
  const auto copy = [&](int i) {
    if (feed.first < n_turns) {
      const std::byte* const* rows =
          exchange.table[feed.first / kBatch % kTables] + feed.tile * 16 + copy_row;
      const int32_t begin = piece_begin(feed.chunk, i) + copy_at * 16;
      const bool valid = begin < work.data_bytes && (i < kSteps / 2 || copy_at < 4);
      std::byte* to = copy_to + feed_slot * S::kTileBytes + i * kPieceBytes;
#pragma unroll
      for (int j = 0; j < 16; j += 4) CopyAsync16(to + j * kLine, rows[j] + begin, valid);
      if (i + 1 == S::kPieces) {
        advance(feed);
        feed_slot = feed_slot + 1 == S::kAhead ? 0 : feed_slot + 1;
      }
    }
    CopyAsyncCommit();
  };
  const auto fill = [&](int from, int to) {  // pieces of the ring
#pragma unroll
    for (int i = from; i < to; ++i) copy(i % S::kPieces);
  };
  fill(0, kEarlyPieces);
  GridTrigger();
  GridWait();

  // Activations of the first chunk come straight to registers, those of the others through a stage
  // in shared memory, where there is room for one.
  Activations x[kSteps];
  float square = 0;  // a sum that counts in the first batch
  const auto load_x = [&](int32_t chunk, float(&v)[kSteps][8]) {
    const float* row = g < p.n_rows ? FindInput(work, g) : nullptr;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int32_t k = step_begin(chunk, i) + 8 * t;
      if (row != nullptr && k < work.n_in) LoadEight(row + k, v[i]);
    }
  };
  // A stage holds the rows of one step after the other. In odd rows every two 16 bytes change
  // places, against bank conflicts.
  const auto ask_x = [&](int32_t chunk) {
#pragma unroll
    for (int r = copy_row; r < kRows; r += 4) {
      const float* row = r < p.n_rows ? FindInput(work, r) : nullptr;
      float* to = stage + r * 32 + (copy_at ^ r % 2) * 4;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int32_t k = step_begin(chunk, i) + copy_at * 4;
        CopyAsync16(to + i * kRows * 32, row + k, row != nullptr && k < work.n_in);
      }
    }
  };
  const auto read_stage = [&](float(&v)[kSteps][8]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float* row = stage + (i * kRows + g) * 32;
      LoadFour(row + (2 * t ^ g % 2) * 4, v[i]);
      LoadFour(row + ((2 * t + 1) ^ g % 2) * 4, v[i] + 4);
    }
  };
  const auto set_x = [&](int32_t chunk, float(&v)[kSteps][8]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int32_t k = step_begin(chunk, i) + 8 * t;
      float norm[8] = {};
      if (stages_norm) {
        LoadEight(norms + 32 * i + 8 * t, norm);
      } else if (p.norm != nullptr && k < work.n_in) {
        LoadEight(p.norm + k, norm);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square += v[i][j] * v[i][j];
        if (p.norm != nullptr) v[i][j] *= norm[j];
      }
      x[i].Set(v[i]);
    }
  };
  {
    float v[kSteps][8] = {};
    load_x(0, v);
    fill(kEarlyPieces, S::kRingPieces);
    if (p.finish == Finish::kRope && warp == kWarps - 1 && lane < p.n_rows) {
      exchange.kv_rows[lane] = FindKvRow(work, lane);
    }
    if (kStaged) ask_x(1);  // it comes with the next piece
    CopyAsyncWait<S::kRingPieces>();
    __syncwarp();
    set_x(0, v);
  }

  // What this thread finishes: the item of sum `sum_at` of the block's share of a batch, and of the
  // sum beside it where items have two rows. A lane's sums of a tile are those of weight row g and
  // activation row 2 t, of g + 8 and 2 t, then of 2 t + 1.
  const int sum_at = static_cast<int>(threadIdx.x) * work.rows_per_item;
  const int place = rank * kShare + sum_at;
  const int32_t r = place / 4 % 4 * 2 + place / 2 % 2;
  const auto own_item = [&](int32_t first) {  // of a batch; none: negative
    const int32_t turn = first + place / (16 * kRows);
    const int32_t item = tile_of(turn) * tile_items + place / 16 % 8 + place % 2 * 8;
    const bool is_own = sum_at < kShare && r < p.n_rows && turn < n_turns && item < work.n_items;
    return is_own ? item : -1;
  };
  const auto received_of = [&](int32_t first) { return exchange.received[first / kBatch % 2]; };
  // Operands of a batch come with the next piece.
  const auto ask_operands = [&](int32_t first) {
    const int32_t item = own_item(first);
    if (item < 0) return;
    const OperandRefs refs = FindOperands(work, item, r);
    auto* to = reinterpret_cast<float*>(&exchange.operands[threadIdx.x]);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      CopyAsync4(to + side, refs.bias[side], refs.bias[side] != nullptr);
      CopyAsync4(to + 2 + side, refs.value[side], refs.value[side] != nullptr);
    }
  };
  float scale = 1;
  ask_operands(0);

  const std::byte* const from = ring + g * kLine + (t ^ g % 2 * 4) * 16;
  const int other_half = g % 2 == 0 ? 64 : -64;
  int slot = 0;
#pragma unroll 1
  for (Unit u{};; advance(u)) {
    float large[4] = {};
    float small[4] = {};
    if (u.first < n_turns) {
      if (kChunked && u.tile == 0 && u.chunk + u.first > 0) {
        float v[kSteps][8] = {};
        if constexpr (kStaged) {
          CopyAsyncWait<S::kPieces - 1>();  // it came at least a tile ago
          __syncwarp();
          read_stage(v);
          __syncwarp();
          const bool ends = u.chunk + 1 == n_chunks;
          if (!ends || u.first + kBatch < n_turns) ask_x(ends ? 0 : u.chunk + 1);
        } else {
          load_x(u.chunk, v);
        }
        set_x(u.chunk, v);
      }
#pragma unroll
      for (int i = 0; i < S::kPieces; ++i) {
        CopyAsyncWait<S::kRingPieces - 1>();
        __syncwarp();
        const std::byte* piece = from + slot * S::kTileBytes + i * kPieceBytes;
#pragma unroll
        for (int step = 2 * i; step < 2 * i + 2 && step < kSteps; ++step) {
          const std::byte* words = step % 2 == 0 ? piece : piece + other_half;
          uint32_t top[4];
          uint32_t bottom[4];
          LoadWords(words, top);
          LoadWords(words + 8 * kLine, bottom);
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            Mma(large, top, bottom, x[step].part[0], j);
            Mma(small, top, bottom, x[step].part[1], j);
            Mma(small, top, bottom, x[step].part[2], j);
          }
        }
        __syncwarp();
        copy(i);
      }
      slot = slot + 1 == S::kAhead ? 0 : slot + 1;
    }

    if (u.tile + u.chunk == 0 && u.first > 0) {  // finish the batch before
      const int32_t first = u.first - kBatch;
      ClusterWait();
      if (first == 0 && p.norm != nullptr) {
        float mean = 0;
#pragma unroll 8
        for (int i = 0; i < kSlices; ++i) mean += exchange.squares[i][r];
        mean /= static_cast<float>(work.n_in);
        scale = 1.0f / sqrtf(mean + p.eps);
      }
      const int32_t item = own_item(first);
      if (item >= 0) {
        if (u.first < n_turns) {
          CopyAsyncWait<(kBatch - 1) * S::kPieces>();  // asked for before the second tile
        } else {
          CopyAsyncCommit();
          CopyAsyncWait<0>();
        }
        const float4 asked = exchange.operands[threadIdx.x];
        const Operands operands{{asked.x, asked.y}, {asked.z, asked.w}};
        float a = 0;
        float b = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          a += received_of(first)[i][sum_at];
          if (work.rows_per_item == 2) b += received_of(first)[i][sum_at + 1];
        }
        FinishItem(work, item, r, exchange.kv_rows[r], operands, scale * a, scale * b);
      }
      if (u.first < n_turns) ask_operands(u.first);
    }
    if (u.first >= n_turns) return;

    float4& to = reinterpret_cast<float4*>(exchange.partial[warp])[u.tile * 32 + lane];
    float4 sum = make_float4(large[0] + small[0], large[2] + small[2], large[1] + small[1],
                             large[3] + small[3]);
    if (u.chunk > 0) sum = make_float4(to.x + sum.x, to.y + sum.y, to.z + sum.z, to.w + sum.w);
    to = sum;
    if (!is_last_tile(u) || u.chunk + 1 < n_chunks) continue;

    // The end of a batch. Copies of the next one have begun.
    if (threadIdx.x < kBatch * 16 && u.first + (kTables - 1) * kBatch < n_turns) {
      fill_table(u.first / kBatch + kTables - 1, static_cast<int>(threadIdx.x));
    }
    if (u.first == 0) {
      ClusterWait();  // the other block runs: its memory can be written to
      square += __shfl_xor_sync(kAllLanes, square, 1);
      square += __shfl_xor_sync(kAllLanes, square, 2);
      if (t < kBlocks) *InBlock(&exchange.squares[slice][g], t) = square;
    }
    __syncthreads();
    {
      static_assert(kThreads == kSums, "a sum a thread");
      const auto i = static_cast<int>(threadIdx.x);
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += exchange.partial[w][i];
      *InBlock(&received_of(u.first)[rank][i % kShare], i / kShare) = total;
    }
    ClusterArrive();
  }
}

template <int kSteps, bool kChunked>
constexpr size_t SharedBytes() {
  using S = Shape<kSteps>;
  constexpr size_t kStage = kChunked && S::kHasStage ? S::kStageFloats * sizeof(float) : 0;
  return kWarps * (S::kRingBytes + kStage) + sizeof(Exchange);
}
// Of the largest shape. Blocks of all shapes take as much: beside a smaller one more blocks of a
// fetch would come in, and keep the largest from starting until the fetch has ended (some 60 us).
constexpr size_t kMostShared = std::max({SharedBytes<2, false>(), SharedBytes<3, true>(),
                                         SharedBytes<4, true>(), SharedBytes<5, true>()});

// False where the card lacks the shared memory.
template <int kSteps, bool kChunked>
bool LaunchStationary(const Work& work, int32_t n_chunks, const Launch& launch) {
  constexpr auto kKernel = StationaryKernel<kSteps, kChunked>;
  const bool fits_most = kMostShared <= launch.device->shared_per_block;
  const size_t bytes = fits_most ? kMostShared : SharedBytes<kSteps, kChunked>();
  if (bytes > launch.device->shared_per_block) return false;
  AllowShared(kKernel, bytes);
  const auto n_tiles = static_cast<int32_t>(CeilDiv(work.n_items, 16 / work.rows_per_item));
  const int32_t n_clusters = std::min(n_tiles, launch.device->sm_count / kBlocks);
  KernelLaunch(launch, dim3(static_cast<unsigned>(n_clusters * kBlocks)), dim3(kThreads), bytes,
               kBlocks)
      .Run(kKernel, work, n_tiles, n_chunks);
  return true;
}

template <int kSteps>
bool LaunchStationary(const Work& work, int32_t n_chunks, const Launch& launch) {
  return n_chunks > 1 ? LaunchStationary<kSteps, true>(work, n_chunks, launch)
                      : LaunchStationary<kSteps, false>(work, n_chunks, launch);
}

}  // namespace

bool MultiplyStationary(const Work& work, const Launch& launch) {
  const Product& p = work.product;
  if (launch.device->arch < 90 || p.parts[0].w.format != DType::kBF16 || p.n_rows > kRows) {
    return false;
  }
  const int64_t steps = CeilDiv(work.n_in, 32 * kSlices);
  const int64_t n_chunks = CeilDiv(steps, kMaxSteps);
  const auto chunks = static_cast<int32_t>(n_chunks);
  switch (CeilDiv(steps, n_chunks)) {
    case 1:
    case 2:
      return LaunchStationary<2, false>(work, chunks, launch);
    case 3:
      return LaunchStationary<3>(work, chunks, launch);
    case 4:
      return LaunchStationary<4>(work, chunks, launch);
    default:
      return LaunchStationary<5>(work, chunks, launch);
  }
}

}  // namespace omnikv::cuda
