// Products of a few rows of activations with weights, on tensor cores: weights are read once for
// all rows. (matvec_stationary.cu is faster where it applies.)
//
// As in StreamKernel (matvec.cu), the warps of a block split k, each with a ring of weights of its
// own, filled before GridWait. A block takes up to kMTiles tiles of 16 rows of weights at a time,
// over all of k; then the warps' sums meet in shared memory.
//
// 32 values of k at a time are multiplied, and added in f32: by mma.m16n8k8 in tf32, which holds
// 16-bit weights exactly and activations as the sum of two, some 22 bits; for Q8_0 by mma.m16n8k32
// in int8 (matvec.cuh). (The sums of tensor cores are cut off, not rounded: they are kept short.)
// Which k a column of a fragment stands for is free as long as both sides agree: lane (g, t) =
// (lane / 4, lane % 4) holds values 8 t to 8 t + 7 of the 32, of weight rows g and g + 8 and of
// activation row g.
#include <algorithm>

#include "backend/cuda/kernels/matvec.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kWarps = 8;

// A step: what a warp takes at a time, of every tile. A slot of its ring holds one of one tile.
template <DType kFormat, int kMTiles>
struct Step {
  static constexpr bool kQ8 = kFormat == DType::kQ8_0;
  static constexpr int kBlocks = kQ8 ? 4 : 1;  // of 32 values
  static constexpr int kBytes = kQ8 ? kBlocks * static_cast<int>(kQ8BlockBytes) : 64;  // of a row
  static constexpr int kPitch = 144;  // of Q8_0's rows in a slot, against bank conflicts
  static constexpr int kSlotBytes = kQ8 ? 16 * kPitch : 16 * kBytes;
  static constexpr int kAhead = kQ8 ? 2 : 8 / kMTiles;  // steps in the ring
  static constexpr int kRingBytes = kAhead * kMTiles * kSlotBytes;
  static constexpr int kRun = kQ8 ? 1 : 2;  // neighbouring steps of a warp: whole lines of cache
};

struct Tiles {
  int32_t first;
  int32_t n;
};

// A lane's share of 16 rows of weights and 32 values of k.
template <DType kFormat>
struct Weights {
  float top[8];     // of row g
  float bottom[8];  // of row g + 8

  // From a lane's 16 bytes of row g; 512 bytes on are those of row g + 8.
  __device__ __forceinline__ void Load(const std::byte* from) {
    LoadRow(from, top);
    LoadRow(from + 512, bottom);
  }

  static __device__ __forceinline__ void LoadRow(const std::byte* from, float (&out)[8]) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = UnpackPair<kFormat>(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
};

template <>
struct Weights<DType::kQ8_0> {
  uint32_t words[4];  // rows g and g + 8: four values each; then the other four
  float scale[2];     // of rows g and g + 8

  // Block `i` of rows that lie `pitch` bytes apart, a multiple of four; row g is the first.
  __device__ __forceinline__ void Load(const std::byte* rows, int pitch, int i, int t) {
    const int block = i * static_cast<int>(kQ8BlockBytes);
    LoadRow(rows, block, t, 0);
    LoadRow(rows + 8 * pitch, block, t, 1);
  }

  __device__ __forceinline__ void LoadRow(const std::byte* row, int block, int t, int which) {
    const int begin = block + 2 + 8 * t;  // two bytes past a multiple of four, or none
    const auto* from = reinterpret_cast<const uint32_t*>(row + (begin & ~3));
    const uint32_t middle = from[1];
    words[which] = __funnelshift_r(from[0], middle, begin % 4 * 8);
    words[2 + which] = __funnelshift_r(middle, from[2], begin % 4 * 8);
    scale[which] = __half2float(*reinterpret_cast<const __half*>(row + block));
  }
};

// A lane's share of 8 rows of activations and 32 values of k, and of what they give: rows g and g +
// 8 of weights, and rows 2 t and 2 t + 1 of activations for each.
template <DType kFormat>
struct Activations {
  uint32_t hi[8];
  uint32_t lo[8];

  __device__ __forceinline__ void Set(const float (&v)[8]) {
    constexpr uint32_t kTf32 = 0xffffe000u;  // the bits that count
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      hi[i] = (__float_as_uint(v[i]) + 0x1000u) & kTf32;
      lo[i] = __float_as_uint(v[i] - __uint_as_float(hi[i])) & kTf32;
    }
  }

  __device__ __forceinline__ void MultiplyAdd(const Weights<kFormat>& w, float (&sum)[4]) const {
    float large[4] = {};
    float small[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      Mma(large, w, i, hi);
      Mma(small, w, i, lo);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += large[i] + small[i];
  }

  // Values i of each lane are columns t of the fragment, values i + 1 columns t + 4.
  static __device__ __forceinline__ void Mma(float (&sum)[4], const Weights<kFormat>& w, int i,
                                             const uint32_t (&x)[8]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(w.top[i])), "r"(__float_as_uint(w.bottom[i])),
          "r"(__float_as_uint(w.top[i + 1])), "r"(__float_as_uint(w.bottom[i + 1])), "r"(x[i]),
          "r"(x[i + 1]));
  }
};

template <>
struct Activations<DType::kQ8_0> {
  uint32_t digits[3][2];
  float scale[2];  // of rows 2 t and 2 t + 1

  __device__ __forceinline__ void Set(const float (&v)[8]) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = MaxMagnitude(top, v[i]);
    top = MaxMagnitude(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = MaxMagnitude(top, __shfl_xor_sync(kAllLanes, top, 2));
    const DigitScale own(top);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ToDigits(v + 4 * i, own.inverse, digits[0][i], digits[1][i], digits[2][i]);
      scale[i] = __shfl_sync(kAllLanes, own.scale, static_cast<int>(threadIdx.x) % 4 * 8 + 4 * i);
    }
  }

  __device__ __forceinline__ void MultiplyAdd(const Weights<DType::kQ8_0>& w,
                                              float (&sum)[4]) const {
    int d[3][4];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
          : "=r"(d[k][0]), "=r"(d[k][1]), "=r"(d[k][2]), "=r"(d[k][3])
          : "r"(w.words[0]), "r"(w.words[1]), "r"(w.words[2]), "r"(w.words[3]), "r"(digits[k][0]),
            "r"(digits[k][1]), "r"(kDigitSum));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] += JoinDigits(d[0][i], d[1][i], d[2][i]) * (w.scale[i / 2] * scale[i % 2]);
    }
  }
};

__device__ __forceinline__ void CopyAsync8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(SharedAddress(shared)), "l"(global)
               : "memory");
}

// Up to 8 * kNTiles rows of activations.
template <DType kFormat, int kNTiles, int kMTiles>
__global__ void __launch_bounds__(32 * kWarps, kNTiles* kMTiles <= 4 ? 2 : 1)
    TileKernel(const __grid_constant__ Work work) {
  using S = Step<kFormat, kMTiles>;
  constexpr int kCols = 8 * kNTiles;
  const Product& p = work.product;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* ring = shared + warp * S::kRingBytes;
  // Where the rows of the pass that is being copied lie, for each warp.
  auto* tables = reinterpret_cast<const std::byte**>(shared + kWarps * S::kRingBytes);
  const std::byte** table = tables + warp * kMTiles * 16;
  // [kWarps][kMTiles][16][kCols]
  auto* partial = reinterpret_cast<float*>(tables + kWarps * kMTiles * 16);
  __shared__ float squares[kWarps][kCols];
  __shared__ KvTarget kv_rows[kMaxDecodeRows];

  const int32_t tile_items = 16 / work.rows_per_item;
  const auto n_tiles = static_cast<int32_t>(CeilDiv(work.n_items, tile_items));
  // A pass of all blocks together takes one stretch of the weights, as in StreamKernel.
  const auto pass_tiles = static_cast<int32_t>(gridDim.x) * kMTiles;
  const auto n_passes = static_cast<int32_t>(CeilDiv(n_tiles, pass_tiles));
  const auto tiles_of = [&](int32_t pass) {  // of this block
    const int32_t begin = n_tiles * int64_t{pass} / n_passes;
    const int64_t n = n_tiles * int64_t{pass + 1} / n_passes - begin;
    const auto share = [&](uint32_t block) {
      return begin + static_cast<int32_t>(n * block / gridDim.x);
    };
    // Blocks take turns, so that the shares that are a tile longer are not always the same block's.
    const uint32_t turn = (blockIdx.x + static_cast<uint32_t>(pass)) % gridDim.x;
    const int32_t first = share(turn);
    return Tiles{first, share(turn + 1) - first};
  };

  // Steps are dealt to the warps kRun at a time.
  const auto n_steps = static_cast<int32_t>(CeilDiv(work.n_in, 32 * S::kBlocks));
  const int32_t left = n_steps % (kWarps * S::kRun) - S::kRun * warp;
  const int32_t own_steps =
      n_steps / (kWarps * S::kRun) * S::kRun + min(max(left, 0), static_cast<int32_t>(S::kRun));
  const auto step_of = [&](int32_t i) {
    return i / S::kRun * (kWarps * S::kRun) + S::kRun * warp + i % S::kRun;
  };

  // What is copied next: step feed_step of pass feed_pass.
  int32_t feed_pass = 0;
  int32_t feed_step = 0;
  Tiles feed{};
  const auto open_pass = [&] {
    feed = tiles_of(feed_pass);
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < 16 * kMTiles; i += 32) {
      const int32_t tile = feed.first + i / 16;
      const int32_t item = tile * tile_items + i % tile_items;
      // Past the end any row will do.
      table[i] = FindWeights(work, min(item, work.n_items - 1), i % 16 / tile_items);
    }
    __syncwarp();
  };
  const auto advance = [&] {
    if (feed_pass == n_passes || ++feed_step < own_steps) return;
    feed_step = 0;
    ++feed_pass;
    if (feed_pass < n_passes) open_pass();
  };
  const auto copy = [&](std::byte* slot, int m) {
    if (feed_pass < n_passes && m < feed.n) {
      const int32_t begin_byte = step_of(feed_step) * S::kBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::byte* from = table[m * 16 + half * 8 + g] + begin_byte;
        if constexpr (S::kQ8) {  // 17 times 8 bytes
          std::byte* to = slot + (half * 8 + g) * S::kPitch;
#pragma unroll
          for (int i = 0; i < 4; ++i) CopyAsync8(to + t * 8 + i * 32, from + t * 8 + i * 32);
          if (t == 0) CopyAsync8(to + 128, from + 128);
        } else {
          CopyAsync16(slot + half * 512 + lane * 16, from + t * 16,
                      begin_byte + t * 16 < work.data_bytes);
        }
      }
    }
    CopyAsyncCommit();
  };
  if (own_steps > 0) {
    open_pass();
  } else {
    feed_pass = n_passes;
  }
#pragma unroll 1
  for (int i = 0; i < S::kAhead; ++i) {
    for (int m = 0; m < kMTiles; ++m) copy(ring + (i * kMTiles + m) * S::kSlotBytes, m);
    advance();
  }

  GridTrigger();
  GridWait();
  if (p.finish == Finish::kRope && static_cast<int32_t>(threadIdx.x) < p.n_rows) {
    kv_rows[threadIdx.x] = FindKvRow(work, static_cast<int32_t>(threadIdx.x));
  }
  const float* rows[kNTiles];
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {  // past the last row: that row again, of no consequence
    rows[n] = FindInput(work, min(8 * n + g, p.n_rows - 1)) + 8 * t;
  }
  // The next 32 values of k: eight a lane, of each row.
  float x[kNTiles][8];
  float norm[8];
  const auto load_x = [&](int32_t step, int block) {
    const int32_t k = (step * S::kBlocks + block) * 32;
    const bool valid = S::kQ8 || k + 8 * t < work.n_in;
    if (valid && p.norm != nullptr) LoadEight(p.norm + k + 8 * t, norm);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[n][i] = 0;
      if (valid) LoadEight(rows[n] + k, x[n]);
    }
  };
  if (own_steps > 0) load_x(step_of(0), 0);

  float square[kNTiles] = {};  // sums that count in the first pass
  int32_t steps = 0;           // of all passes
  for (int32_t pass = 0; pass < n_passes; ++pass) {
    const Tiles tiles = tiles_of(pass);
    float sum[kMTiles][kNTiles][4] = {};
#pragma unroll 1
    for (int32_t i = 0; i < own_steps; ++i, ++steps) {
      std::byte* slots = ring + (steps & (S::kAhead - 1)) * kMTiles * S::kSlotBytes;
      if constexpr (S::kQ8) {
        CopyAsyncWait<(S::kAhead - 1) * kMTiles>();
        __syncwarp();
      }
      // Not unrolled: else the compiler has the next block's activations waited for in this one.
#pragma unroll 1
      for (int block = 0; block < S::kBlocks; ++block) {
        Activations<kFormat> b[kNTiles];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            square[n] += x[n][j] * x[n][j];
            if (p.norm != nullptr) x[n][j] *= norm[j];
          }
          b[n].Set(x[n]);
        }
        const bool same_step = block + 1 < S::kBlocks;
        load_x(step_of(same_step ? i : i + 1 < own_steps ? i + 1 : 0), same_step ? block + 1 : 0);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          std::byte* slot = slots + m * S::kSlotBytes;
          Weights<kFormat> w;
          if constexpr (S::kQ8) {
            w.Load(slot + g * S::kPitch, S::kPitch, block, t);
          } else {
            CopyAsyncWait<S::kAhead * kMTiles - 1>();
            w.Load(slot + lane * 16);
            copy(slot, m);
          }
          if (m >= tiles.n) continue;
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) b[n].MultiplyAdd(w, sum[m][n]);
        }
      }
      if constexpr (S::kQ8) {
        __syncwarp();
        for (int m = 0; m < kMTiles; ++m) copy(slots + m * S::kSlotBytes, m);
      }
      advance();
    }

    // Element j of a fragment: row g (j < 2) or g + 8, column 2 t + j % 2.
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        float* to = partial + ((warp * kMTiles + m) * 16 + g) * kCols + 8 * n + 2 * t;
        *reinterpret_cast<float2*>(to) = make_float2(sum[m][n][0], sum[m][n][1]);
        *reinterpret_cast<float2*>(to + 8 * kCols) = make_float2(sum[m][n][2], sum[m][n][3]);
      }
    }
    if (pass == 0) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        square[n] += __shfl_xor_sync(kAllLanes, square[n], 1);
        square[n] += __shfl_xor_sync(kAllLanes, square[n], 2);
        if (t == 0) squares[warp][8 * n + g] = square[n];
      }
    }
    __syncthreads();
    const int32_t n_items = tiles.n * tile_items;
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n_items * p.n_rows; i += 32 * kWarps) {
      const int32_t r = i / n_items;
      const int32_t item = tiles.first * tile_items + i % n_items;
      if (item >= work.n_items) continue;
      const Operands operands = LoadOperands(work, item, r);
      const int32_t row = i % n_items / tile_items * 16 + i % tile_items;
      float a = 0;
      float b = 0;
      float mean = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float* from = partial + (w * kMTiles * 16 + row) * kCols + r;
        a += from[0];
        if (work.rows_per_item == 2) b += from[8 * kCols];
        mean += squares[w][r];
      }
      mean /= static_cast<float>(work.n_in);
      const float scale = p.norm != nullptr ? 1.0f / sqrtf(mean + p.eps) : 1.0f;
      FinishItem(work, item, r, kv_rows[r], operands, scale * a, scale * b);
    }
    if (pass + 1 < n_passes) __syncthreads();
  }
}

template <DType kFormat, int kNTiles, int kMTiles>
constexpr size_t SharedBytes() {
  return kWarps * (Step<kFormat, kMTiles>::kRingBytes + kMTiles * 16 * sizeof(void*) +
                   kMTiles * 16 * 8 * kNTiles * sizeof(float));
}

template <DType kFormat, int kNTiles, int kMTiles>
void LaunchTiles(const Work& work, const Launch& launch) {
  constexpr size_t kBytes = SharedBytes<kFormat, kNTiles, kMTiles>();
  const int64_t n_tiles = CeilDiv(work.n_items, 16 / work.rows_per_item);
  AllowShared(TileKernel<kFormat, kNTiles, kMTiles>, kBytes);
  LaunchKernel(TileKernel<kFormat, kNTiles, kMTiles>, launch,
               dim3(static_cast<unsigned>(std::min<int64_t>(n_tiles, launch.device->sm_count))),
               dim3(32 * kWarps), kBytes, work);
}

template <DType kFormat, int kNTiles>
void Launch16(const Work& work, const Launch& launch) {
  // Large passes read activations less often. A card may lack the shared memory for them.
  constexpr size_t kReserved = 2048;  // static, and the system's
  const int64_t n_tiles = CeilDiv(work.n_items, 16 / work.rows_per_item);
  if (n_tiles > 2 * launch.device->sm_count &&
      SharedBytes<kFormat, kNTiles, 4>() + kReserved <= launch.device->shared_per_block) {
    LaunchTiles<kFormat, kNTiles, 4>(work, launch);
  } else {
    LaunchTiles<kFormat, kNTiles, 2>(work, launch);
  }
}

template <int kNTiles>
void LaunchRows(const Work& work, const Launch& launch) {
  switch (work.product.parts[0].w.format) {
    case DType::kBF16:
      return Launch16<DType::kBF16, kNTiles>(work, launch);
    case DType::kF16:
      return Launch16<DType::kF16, kNTiles>(work, launch);
    case DType::kQ8_0:
      return LaunchTiles<DType::kQ8_0, kNTiles, 2>(work, launch);
    case DType::kQ4_0:  // a format of K/V alone
    case DType::kF32:
      return;
  }
}

}  // namespace

void MultiplyTiles(const Work& work, const Launch& launch) {
  if (work.product.n_rows <= 8) {
    LaunchRows<1>(work, launch);
  } else {
    LaunchRows<2>(work, launch);
  }
}

}  // namespace omnikv::cuda
