// Products of one row of activations with weights of any size, at the speed of memory.
//
// A block takes every n-th of the items and reads their rows whole, one after the other;
// its warps split each row between them, and keep their part of the activations in registers for
// all rows. Weights come through a ring of shared memory that runs over row ends without a pause
// and is filled before the kernel may touch activations (GridWait). Partial sums of a batch of rows
// meet in shared memory at a barrier, while the ring stays full.
#include <algorithm>

#include "backend/cuda/kernels/matvec.cuh"
#include "backend/cuda/kernels/pack.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarpsPerSm = 16;  // about: 128 KB of weights on their way to each
constexpr int kBatch = 32;       // items finished together, one a lane of the first warp
constexpr int kMaxBatchRows = 2 * kBatch;
constexpr int kTableRows = 4 * kMaxBatchRows;

// A piece of a row: what a warp copies into one slot of its ring.
template <DType kFormat>
struct RowTile {
  static constexpr bool kQ8 = kFormat == DType::kQ8_0;
  static constexpr int kLaneValues = kFormat == DType::kF32 ? 16 : 32;
  static constexpr int kValues = 32 * kLaneValues;
  static constexpr int kBytes = kQ8 ? 32 * static_cast<int>(kQ8BlockBytes) : 2048;
  static constexpr int kCopies = (kBytes + 511) / 512;  // of 16 bytes, a lane
  static constexpr int kSlots = kQ8 ? 8 : 4;
  static constexpr int kRingBytes = kSlots * kBytes;  // of a warp
  static constexpr int kStageBytes = kQ8 ? 2048 : 0;  // of a warp, for Input
  static constexpr int kWords = kQ8 ? 9 : 16;
  static constexpr int kRun = kFormat == DType::kF32 || kQ8 ? 4 : 8;

  // Where value i of those that a lane loads stands in the piece: for all formats but Q8_0 in the
  // order in which it copies and then reads weights, so that no lane needs what another copied.
  static __device__ __forceinline__ int Index(int i, int lane) {
    return i / kRun * (32 * kRun) + lane * kRun + i % kRun;
  }

  // A lane's weights. Q8_0: block `lane` of the piece, eight words of int8 and the scale.
  static __device__ __forceinline__ void Load(const std::byte* slot, int lane,
                                              uint32_t (&words)[kWords]) {
    if constexpr (kQ8) {
      const std::byte* block = slot + lane * static_cast<int>(kQ8BlockBytes);
      const bool even = lane % 2 == 0;  // two bytes past a multiple of four
      const auto* from = reinterpret_cast<const uint32_t*>(block + (even ? 0 : 2));
      uint32_t raw[9];
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[i] = from[i];
      raw[8] = from[even ? 8 : 7];
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i] = __funnelshift_r(raw[i], raw[i + 1], even ? 16 : 0);
      words[8] = *reinterpret_cast<const uint16_t*>(block);
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(slot + (lane + 32 * i) * 16);
        words[4 * i] = v.x;
        words[4 * i + 1] = v.y;
        words[4 * i + 2] = v.z;
        words[4 * i + 3] = v.w;
      }
    }
  }
};

// A lane's activations for one piece.
template <DType kFormat>
struct Input {
  using P = RowTile<kFormat>;
  float x[P::kLaneValues];

  // v in the order of RowTile::Index.
  __device__ __forceinline__ void Set(const float* v, std::byte*, int) {
#pragma unroll
    for (int i = 0; i < P::kLaneValues; ++i) x[i] = v[i];
  }

  __device__ __forceinline__ void Dot(const uint32_t (&words)[P::kWords], float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) {
      if constexpr (kFormat == DType::kF32) {
        sum[i % 2] += __uint_as_float(words[i]) * x[i];
      } else {
        const float2 w = UnpackPair<kFormat>(words[i]);
        sum[0] += w.x * x[2 * i];
        sum[1] += w.y * x[2 * i + 1];
      }
    }
  }
};

// For Q8_0: the 32 of block `lane`.
template <>
struct Input<DType::kQ8_0> {
  using P = RowTile<DType::kQ8_0>;
  uint32_t digits[3][8];
  float scale;

  __device__ __forceinline__ void Set(float* v, std::byte* stage, int lane) {
    Transpose(v, stage, lane);
    float top = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) top = MaxMagnitude(top, v[i]);
    const DigitScale to(top);
    scale = to.scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      ToDigits(v + 4 * i, to.inverse, digits[0][i], digits[1][i], digits[2][i]);
    }
  }

  // From values 128 i + 4 lane + (0 to 3) of the piece, i < 8, to those of block `lane`.
  static __device__ __forceinline__ void Transpose(float* v, std::byte* stage, int lane) {
    const auto at = [&](int block, int quad) {  // swizzled, against bank conflicts
      return reinterpret_cast<float4*>(stage + block % 16 * 128 + (quad ^ block % 8) * 16);
    };
    float4 mine[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 4 * half; i < 4 * half + 4; ++i) {
        *at(4 * i + lane / 8, lane % 8) =
            make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (lane / 16 == half) mine[i] = *at(lane, i);
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[4 * i] = mine[i].x;
      v[4 * i + 1] = mine[i].y;
      v[4 * i + 2] = mine[i].z;
      v[4 * i + 3] = mine[i].w;
    }
  }

  __device__ __forceinline__ void Dot(const uint32_t (&words)[P::kWords], float (&sum)[2]) const {
    int d[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      d[k] = kDigitSum;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        d[k] = __dp4a(static_cast<int>(words[i]), static_cast<int>(digits[k][i]), d[k]);
      }
    }
    const float w = __half2float(__ushort_as_half(static_cast<uint16_t>(words[8])));
    sum[0] += JoinDigits(d[0], d[1], d[2]) * (w * scale);
  }
};

// The sum of `even` over the warp in its lower half, of `odd` in its upper half.
__device__ __forceinline__ float SumTwo(float even, float odd, int lane) {
  const bool upper = lane >= 16;
  float keep = upper ? odd : even;
  keep += __shfl_xor_sync(kAllLanes, upper ? even : odd, 16);
#pragma unroll
  for (int d = 8; d > 0; d /= 2) keep += __shfl_xor_sync(kAllLanes, keep, d);
  return keep;
}

// Row r of the product. Warp w of a block's n_warps takes pieces w, w + n_warps, ... of a row,
// kPieces of them: REQUIRES the row to have no more than kPieces * n_warps, and n_warps <=
// kMaxWarps.
template <DType kFormat, int kPieces, int kMaxWarps>
__global__ void __launch_bounds__(32 * kMaxWarps,
                                  kMaxWarps < kWarpsPerSm ? kWarpsPerSm / kMaxWarps : 1)
    StreamKernel(const __grid_constant__ Work work, int32_t r) {
  using P = RowTile<kFormat>;
  constexpr int kAhead = P::kSlots / kPieces;  // rows in the ring
  const Product& p = work.product;
  const int n_warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* ring = shared + warp * (P::kRingBytes + P::kStageBytes);
  // Where rows of weights lie, of four batches.
  auto* table =
      reinterpret_cast<const std::byte**>(shared + n_warps * (P::kRingBytes + P::kStageBytes));
  auto* partial = reinterpret_cast<float*>(table + kTableRows);  // [2][n_warps][kMaxBatchRows]
  __shared__ float squares[kMaxWarps];
  __shared__ KvTarget kv_row;

  // The blocks take turns, so that together they read one stretch of memory after the other (a
  // stretch of its own for each block is as fast).
  const auto item_of = [&](int32_t turn) {
    return static_cast<int32_t>(blockIdx.x + static_cast<uint32_t>(turn) * gridDim.x);
  };
  const auto n_turns = static_cast<int32_t>(
      (static_cast<uint32_t>(work.n_items) - blockIdx.x + gridDim.x - 1) / gridDim.x);
  const int32_t n_rows = n_turns * work.rows_per_item;
  const int32_t batch_rows = kBatch * work.rows_per_item;
  // Rows [from, from + n) of the block's, by n_threads threads.
  const auto fill_table = [&](int32_t from, int32_t n, int32_t n_threads) {
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n; i += n_threads) {
      const int32_t row = from + i;
      const int32_t item = row / work.rows_per_item;
      if (row >= n_rows) break;
      table[row & (kTableRows - 1)] =
          FindWeights(work, item_of(item), row - item * work.rows_per_item);
    }
  };
  fill_table(0, 2 * batch_rows, static_cast<int32_t>(blockDim.x));
  __syncthreads();

  // Copies piece i of a row, if there is one, into its slot.
  const auto slot_of = [&](int32_t row, int i) {
    return ring + ((row & (kAhead - 1)) * kPieces + i) * P::kBytes;
  };
  const auto copy = [&](int32_t row, int i) {
    const int32_t piece = (i * n_warps + warp) * P::kBytes;
    const std::byte* from = table[row & (kTableRows - 1)] + piece;
#pragma unroll
    for (int j = 0; j < P::kCopies; ++j) {
      const int32_t offset = (lane + 32 * j) * 16;
      if (j * 512 + 512 > P::kBytes && offset >= P::kBytes) continue;
      CopyAsync16(slot_of(row, i) + offset, from + offset,
                  row < n_rows && piece + offset < work.data_bytes);
    }
    CopyAsyncCommit();
  };
#pragma unroll 1
  for (int32_t row = 0; row < kAhead; ++row) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) copy(row, i);
  }
  // Not earlier: what the next kernel then asks of memory fills the gap between the two.
  GridTrigger();
  // What a lane multiplies, four values at a time. Those of the norm are weights: asked for before
  // GridWait, where there are registers for them.
  const auto each_four = [&](auto&& use) {
#pragma unroll
    for (int i = 0; i < kPieces * P::kLaneValues; i += 4) {
      const int32_t piece = i / P::kLaneValues * n_warps + warp;
      use(i, piece * P::kValues + P::Index(i % P::kLaneValues, lane));
    }
  };
  constexpr bool kNormFirst = kPieces == 1;
  float norm[kPieces * P::kLaneValues] = {};
  const auto load_norm = [&](int i, int32_t k) {
    if (k < work.n_in) LoadFour(p.norm + k, norm + i);
  };
  if (kNormFirst && p.norm != nullptr) each_four(load_norm);

  GridWait();
  // The row behind those in the ring, into the second-level cache: the ring is full until
  // activations are there. More would stand before them in memory's queue.
  if (threadIdx.x == 0 && kAhead < n_rows) PrefetchL2(table[kAhead], work.data_bytes);
  Input<kFormat> input[kPieces];
  float square = 0;
  {
    const float* x = FindInput(work, r);
    float v[kPieces * P::kLaneValues] = {};
    each_four([&](int i, int32_t k) {
      if (k < work.n_in) LoadFour(x + k, v + i);
    });
    if (p.norm != nullptr) {
      each_four([&](int i, int32_t k) {
        if (!kNormFirst) load_norm(i, k);
#pragma unroll
        for (int j = i; j < i + 4; ++j) {
          square += v[j] * v[j];
          v[j] *= norm[j];
        }
      });
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      input[i].Set(v + i * P::kLaneValues, ring + P::kRingBytes, lane);
    }
  }
  if (threadIdx.x == 0 && p.finish == Finish::kRope) kv_row = FindKvRow(work, r);

  const auto dot = [&](int32_t row) {
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      CopyAsyncWait<P::kSlots - 1>();
      if constexpr (P::kQ8) __syncwarp();
      uint32_t words[P::kWords];
      P::Load(slot_of(row, i), lane, words);
      if constexpr (P::kQ8) __syncwarp();
      copy(row + kAhead, i);
      input[i].Dot(words, sum);
    }
    return sum[0] + sum[1];
  };
  for (int32_t first = 0; first < n_rows; first += batch_rows) {
    const int32_t turn = first / work.rows_per_item + static_cast<int32_t>(threadIdx.x);
    const int32_t item = item_of(turn);
    const bool finishes = threadIdx.x < kBatch && turn < n_turns;
    Operands operands;
    if (finishes) operands = LoadOperands(work, item, r);
    // This batch and the next are in the table already, and the last one may still be read.
    if (warp == 0) fill_table(first + 2 * batch_rows, batch_rows, 32);

    const int32_t last = min(first + batch_rows, n_rows);
#pragma unroll 1
    for (int32_t row = first; row < last; row += 2) {
      const float even = dot(row);
      const float odd = dot(row + 1);  // past the last row: of nothing, and not looked at
      const float two = SumTwo(even, odd, lane);
      if (lane % 16 == 0) partial[warp * kMaxBatchRows + row - first + lane / 16] = two;
    }

    if (first == 0) {
      square = WarpSum(square);
      if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    if (finishes) {
      const float* sums = partial + static_cast<int32_t>(threadIdx.x) * work.rows_per_item;
      float a = 0;
      float b = 0;
      float mean = 0;
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        if (w >= n_warps) continue;
        a += sums[w * kMaxBatchRows];
        b += sums[w * kMaxBatchRows + 1];  // where items have one row: of another, not looked at
        mean += squares[w];
      }
      mean /= static_cast<float>(work.n_in);
      const float scale = p.norm != nullptr ? 1.0f / sqrtf(mean + p.eps) : 1.0f;
      FinishItem(work, item, r, kv_row, operands, scale * a, scale * b);
    }
    // The next batch's sums go elsewhere: after its barrier these have been read.
    partial += (first / batch_rows % 2 == 0 ? n_warps : -n_warps) * kMaxBatchRows;
  }
}

// Any shape and alignment: a warp an item.
__global__ void __launch_bounds__(256) AnyKernel(const __grid_constant__ Work work) {
  GridTrigger();
  GridWait();
  const Product& p = work.product;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t item = static_cast<int32_t>(blockIdx.x * 8 + threadIdx.x / 32);
  const auto r = static_cast<int32_t>(blockIdx.y);
  if (item >= work.n_items) return;
  const DType format = p.parts[0].w.format;
  const float* x = FindInput(work, r);
  const std::byte* rows[2] = {FindWeights(work, item, 0),
                              FindWeights(work, item, work.rows_per_item - 1)};
  float sum[2] = {0, 0};
  float square = 0;
  for (int32_t i = lane; i < work.n_in; i += 32) {
    float v = x[i];
    square += v * v;
    if (p.norm != nullptr) v *= p.norm[i];
    sum[0] += LoadValue(format, rows[0], i) * v;
    if (work.rows_per_item == 2) sum[1] += LoadValue(format, rows[1], i) * v;
  }
  const float mean = WarpSum(square) / static_cast<float>(work.n_in);
  const float scale = p.norm != nullptr ? 1.0f / sqrtf(mean + p.eps) : 1.0f;
  const float a = WarpSum(sum[0]) * scale;
  const float b = WarpSum(sum[1]) * scale;
  if (lane != 0) return;
  const KvTarget kv_row = p.finish == Finish::kRope ? FindKvRow(work, r) : KvTarget{};
  FinishItem(work, item, r, kv_row, LoadOperands(work, item, r), a, b);
}

template <DType kFormat>
size_t StreamShared(int64_t n_warps) {
  using P = RowTile<kFormat>;
  return kTableRows * sizeof(void*) +
         static_cast<size_t>(n_warps) *
             (P::kRingBytes + P::kStageBytes + 2 * kMaxBatchRows * sizeof(float));
}

template <DType kFormat, int kPieces, int kMaxWarps>
void LaunchStream(const Work& work, const Launch& launch) {
  using P = RowTile<kFormat>;
  constexpr auto kKernel = StreamKernel<kFormat, kPieces, kMaxWarps>;
  const int64_t n_warps = CeilDiv(CeilDiv(work.n_in, P::kValues), kPieces);
  // About kWarpsPerSm; no more where lanes take 128 registers, as one block too many runs alone.
  const int64_t spare = kPieces == 1 ? n_warps / 2 : 0;
  const int64_t per_sm = std::max<int64_t>(1, (kWarpsPerSm + spare) / n_warps);
  const auto grid =
      static_cast<unsigned>(std::min(int64_t{work.n_items}, per_sm * launch.device->sm_count));
  // At least four fifths of a multiprocessor's in all: a block of the next kernel that found room
  // beside these would leave multiprocessors with unequal numbers of its blocks (a step over 4K
  // tokens 3.92 -> 4.12 ms), or a fetch without registers.
  const size_t bytes = std::max(StreamShared<kFormat>(n_warps),
                                4 * QuarterShared(*launch.device) / static_cast<size_t>(per_sm));
  AllowShared(kKernel, bytes);
  for (int32_t r = 0; r < work.product.n_rows; ++r) {
    LaunchKernel(kKernel, launch, dim3(grid), dim3(static_cast<unsigned>(32 * n_warps)), bytes,
                 work, r);
  }
}

// Values of the longest row: what 16 warps of two pieces hold in registers.
constexpr int32_t kMaxStreamed = 32 * 1024;

// A piece of a row for each warp, where two such blocks or more fit a multiprocessor, or one fills
// it alone: warps with two pieces take 128 registers a lane, and four of them a quarter of the
// registers, so that one warp of a fetch keeps their block from starting until another has ended.
// (26 layers with a product of 9,216 inputs: 1.926 -> 1.793 ms a step.)
template <DType kFormat>
void MultiplyStream(const Work& work, const Launch& launch) {
  constexpr int64_t kMost = 20;  // warps of 96 registers a lane, of a multiprocessor
  const int64_t n_pieces = CeilDiv(work.n_in, RowTile<kFormat>::kValues);
  const bool fits = StreamShared<kFormat>(n_pieces) <= launch.device->shared_per_block;
  const bool fills_sm = 4 * n_pieces > 3 * kWarpsPerSm && n_pieces <= kMost && fits;
  if (n_pieces <= kMost / 2 || (fills_sm && n_pieces <= kWarpsPerSm)) {
    LaunchStream<kFormat, 1, kWarpsPerSm>(work, launch);
  } else if (fills_sm) {
    LaunchStream<kFormat, 1, kMost>(work, launch);
  } else if (n_pieces <= kWarpsPerSm) {
    LaunchStream<kFormat, 2, kWarpsPerSm / 2>(work, launch);
  } else {
    LaunchStream<kFormat, 2, kWarpsPerSm>(work, launch);
  }
}

// Whether rows of weights and activations can be copied 16 bytes at a time.
bool IsEven(const Work& work) {
  const Product& p = work.product;
  bool even = AreMultiples(16, p.x, p.norm, work.data_bytes);
  for (int32_t i = 0; i < p.n_parts; ++i) {
    even = even && AreMultiples(16, p.parts[i].w.data, p.parts[i].w.row_bytes);
  }
  return even;
}

}  // namespace

bool CanMultiplyRope(const NormQkvRopeAppendArgs& args) {
  for (const WeightRef* w : {&args.wk, &args.wv}) {
    if (w->format != args.wq.format || w->n_in != args.wq.n_in) return false;
  }
  // A scale of a block follows from more values than the two that a thread has.
  return !InBlocks(args.kv.k.dtype) && args.qk_norm == QkNorm::kNone && args.k_raw_out == nullptr &&
         args.kv.dk % 2 == 0 && args.kv.dv % 2 == 0 &&
         (args.cos_sin == nullptr || 2 * args.n_freq == args.kv.dk);
}

void Multiply(const Product& product, const Launch& launch) {
  const WeightRef& first = product.parts[0].w;
  Work work;
  work.product = product;
  work.n_in = static_cast<int32_t>(first.n_in);
  work.data_bytes = static_cast<int32_t>(DTypeBytes(first.format, static_cast<size_t>(first.n_in)));
  if (product.finish == Finish::kRope) work.qkv = *product.qkv;
  if (product.finish == Finish::kGated || product.finish == Finish::kRope) work.rows_per_item = 2;
  for (int32_t i = 0; i < product.n_parts; ++i) {
    work.n_items += static_cast<int32_t>(product.parts[i].w.n_out / work.rows_per_item);
    work.item_end[i] = work.n_items;
  }
  if (product.finish == Finish::kGated) work.n_items = static_cast<int32_t>(first.n_out);
  if (work.n_items == 0 || product.n_rows == 0) return;

  const bool is_f32 = first.format == DType::kF32;
  const bool is_long = work.n_in > (is_f32 ? kMaxStreamed / 2 : kMaxStreamed);
  if (!IsEven(work) || (is_f32 && is_long)) {
    LaunchKernel(AnyKernel, launch,
                 dim3(static_cast<unsigned>(CeilDiv(work.n_items, 8)),
                      static_cast<unsigned>(product.n_rows)),
                 dim3(256), 0, work);
  } else if (is_f32) {
    LaunchStream<DType::kF32, 4, kWarpsPerSm / 2>(work, launch);
  } else if (product.n_rows > 1 || is_long) {
    if (MultiplyStationary(work, launch) || MultiplyHopper(work, launch)) return;
    MultiplyTiles(work, launch);
  } else if (first.format == DType::kBF16) {
    MultiplyStream<DType::kBF16>(work, launch);
  } else if (first.format == DType::kF16) {
    MultiplyStream<DType::kF16>(work, launch);
  } else {
    MultiplyStream<DType::kQ8_0>(work, launch);
  }
}

}  // namespace omnikv::cuda
