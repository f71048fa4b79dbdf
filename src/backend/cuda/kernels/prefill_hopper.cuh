// Attention of many rows by FlashInfer's form of FlashAttention-3: two or three warp groups
// multiply (wgmma) while one warp brings K and V by bulk tensor copies. The products, the softmax
// and their schedule are the library's. Ours is what stands around them:
// - Mainloop: brings tiles of K and V from where the block table says that they lie. A bulk copy
//   takes rows that lie together, so that a tile is one or more of them. Tokens that fill no tile
//   come from a copy that ends in zeros: what lies behind them in a block is never read.
// - Scheduler: reads the lengths of sequences on the device.
// - Epilogue: writes o as f32 or bf16 straight from the registers of the products.
//
// Mainloop and Epilogue follow FlashInfer's attention/hopper/{mainloop,epilogue}.cuh, Copyright (c)
// 2024, Jay Shah, Ganesh Bikshandi, Ying Zhang, Vijay Thakkar, Pradeep Ramani, Tri Dao, licensed
// under the BSD 3-Clause and modified by the FlashInfer team (NOTICE has the text).
#pragma once

// The library's own needs a newer CCCL than CUDA 13.0 has. Nothing here divides by it.
#define FLASHINFER_FASTDIV_CUH_
#include <cstdint>
namespace flashinfer {
struct uint_fastdiv {
  uint32_t d;
  __host__ __device__ uint_fastdiv(uint32_t divisor = 0) : d(divisor) {}
  __host__ __device__ operator unsigned int() const { return d; }
  __host__ __device__ void divmod(uint32_t n, uint32_t& q, uint32_t& r) const {
    q = n / d;
    r = n % d;
  }
};
__host__ __device__ inline uint32_t operator/(uint32_t n, const uint_fastdiv& x) {
  return n / x.d;
}
__host__ __device__ inline uint32_t operator%(uint32_t n, const uint_fastdiv& x) {
  return n % x.d;
}
}  // namespace flashinfer

#include "backend/cuda/kernels/tensor_map.h"  // before the library's headers, which hide its types

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <type_traits>

#include "backend/cuda/kernels/prefill_hopper.h"

namespace omnikv::cuda::hopper {

// Values of a row that one bulk copy takes: 128 or 64 bytes, which is the width of the swizzle by
// which the library lays out heads of that size.
constexpr int BoxValues(int head_dim) {
  return head_dim % 64 == 0 ? 64 : 32;
}

// Tokens of a block's work, in place of the library's kv_len: a sequence's from `first` on, which
// is a multiple of a tile's tokens. To the library the sequence begins there; what a query reads of
// it follows from where it ends.
struct Tokens {
  int len;  // to the end of the sequence, past those of this block's tiles
  int first;
  int n_tiles;  // of the block
  int part;     // < 0: the block's tiles are all that its queries read

  CUTLASS_DEVICE operator int() const { return len; }
};

// Work of a block: a tile of queries of one head, and a part of the tokens that they read. Grid:
// (tiles, heads, parts); the last tiles of a sequence, which read most, come first.
template <int kRows, int kTokens>
struct Scheduler {
  struct Params {
    const RowMeta* rows;
    const SeqMeta* seqs;
    int n_seqs;
    int group;       // heads that share a KV head
    HeadMask heads;  // KV heads that take part
    HeadMask held;   // those that the planes have
    int parts;       // at most
  };

  struct WorkTileInfo {
    int tile, head, place, q_begin, table_off, q_len;  // `place` of the KV head in the planes
    Tokens tokens;
    int seq;  // < 0: none

    CUTLASS_DEVICE bool is_valid(const Params&) const { return seq >= 0; }
    // In the library's order; its offset of a sequence's K/V is here that of its block table.
    CUTLASS_DEVICE auto get_block_coord(const Params&) const {
      return cute::tuple{tile, head, place, q_begin, table_off, q_len, tokens, seq};
    }
  };

  CUTLASS_DEVICE WorkTileInfo get_initial_work(const Params& p) const {
    int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int kv_head = p.heads.Head(static_cast<int>(blockIdx.y) / p.group);
    const int head = kv_head * p.group + static_cast<int>(blockIdx.y) % p.group;
    for (int seq = 0; seq < p.n_seqs; ++seq) {
      const SeqMeta meta = p.seqs[seq];
      const int tiles = (meta.q_len + kRows - 1) / kRows;
      if (tile < tiles) {
        const int past = p.rows[meta.q_begin].pos;
        const int kv_len = past + meta.q_len;
        const int parts = HopperPartsOf(past, p.parts);
        const int part = static_cast<int>(blockIdx.z);
        if (part >= parts) return None();
        const int read = min(kv_len, (tile + 1) * kRows + past);  // by some query
        const int n = (read + kTokens - 1) / kTokens;
        const int first = n * part / parts;
        const Tokens tokens{kv_len - first * kTokens, first * kTokens,
                            n * (part + 1) / parts - first, parts > 1 ? part : -1};
        return {tile,   head, p.held.Before(kv_head), meta.q_begin, meta.table_off, meta.q_len,
                tokens, seq};
      }
      tile -= tiles;
    }
    return None();
  }
  template <bool kIsProducer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(const Params&, const WorkTileInfo&) const {
    return None();
  }
  CUTLASS_DEVICE void init_consumer() const {}
  CUTLASS_DEVICE void prefetch_next_work(const Params&, WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo&) const {}

 private:
  CUTLASS_DEVICE static WorkTileInfo None() { return {0, 0, 0, 0, 0, 0, {}, -1}; }
};

template <typename Traits>
struct Mainloop {
  using T = typename Traits::DTypeKV;
  static constexpr int kRows = Traits::CTA_Q;
  static constexpr int kTokens = Traits::CTA_KV;
  static constexpr int kD = Traits::HEAD_DIM_QK;
  static constexpr int kBoxValues = BoxValues(kD);
  static_assert(kTokens == HopperTokens(kD) && kD == Traits::HEAD_DIM_VO && kD % kBoxValues == 0);

  // Names that the library's kernel looks for.
  static constexpr bool USE_TMA_LOAD_KV = true;
  using MainloopPipeline = typename Traits::MainloopPipeline;
  using PipelineState = typename MainloopPipeline::PipelineState;
  using WarpScheduler = flashinfer::WarpScheduler<Traits, true>;
  static constexpr uint32_t TmaTransactionBytesQ = kRows * kD * sizeof(T);
  static constexpr uint32_t TmaTransactionBytesK = kTokens * kD * sizeof(T);
  static constexpr uint32_t TmaTransactionBytesV = TmaTransactionBytesK;

  struct Params {
    CUtensorMap q, k, v, k_tail, v_tail;  // [rows, heads] of kD values
    const int32_t* block_table;
    int block_shift;  // block_tokens = 1 << block_shift
    int block_rows;
    int box_rows;
    int window_left;
    struct {
      float sm_scale;
    } additional_params;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& p) {
    cute::prefetch_tma_descriptor(&p.q);
    cute::prefetch_tma_descriptor(&p.k);
    cute::prefetch_tma_descriptor(&p.v);
  }

  CUTLASS_DEVICE int get_num_kv_tiles(const Params&, int, int, const Tokens& tokens) const {
    return tokens.n_tiles;
  }

  // What the producer's warp does for a block: K of the last tile, the queries, then K of each tile
  // and V of the one after it, down to the first.
  template <bool kWindow, typename BlockCoord, typename SchedulerT, typename SharedStorage>
  CUTLASS_DEVICE void load(const Params& p, MainloopPipeline pipeline_k,
                           MainloopPipeline pipeline_v, PipelineState& write_k,
                           PipelineState& write_v, SharedStorage& shared, SchedulerT&,
                           const typename SchedulerT::Params&, typename SchedulerT::WorkTileInfo&,
                           const BlockCoord& coord, int work) const {
    const auto [q_tile, head, kv_place, q_begin, table_off, q_len, tokens, seq] = coord;
    const Place place{kv_place, table_off, tokens.first, tokens.len, seq};
    int tile = tokens.n_tiles - 1;
    const auto load_k = [&](int t) {
      pipeline_k.producer_acquire(write_k);
      LoadTile(p, p.k, p.k_tail, place, t, pipeline_k.producer_get_barrier(write_k),
               shared.smem_k.data() + write_k.index() * kTokens * kD);
      ++write_k;
    };
    const auto load_v = [&](int t) {
      pipeline_v.producer_acquire(write_v);
      LoadTile(p, p.v, p.v_tail, place, t, pipeline_v.producer_get_barrier(write_v),
               shared.smem_v.data() + write_v.index() * kTokens * kD);
      ++write_v;
    };

    const bool elected = cute::elect_one_sync();
    if (elected) load_k(tile);
    // The warp groups no longer read queries.
    cutlass::arch::NamedBarrier::sync(Traits::NUM_MMA_THREADS + Traits::NUM_PRODUCER_THREADS,
                                      static_cast<int>(flashinfer::NamedBarriers::kQueryEmpty));
    if (elected) {
      shared.barrier_Q.arrive_and_expect_tx(TmaTransactionBytesQ);
      for (int d = 0; d < kD; d += kBoxValues) {
        LoadBox(p.q, reinterpret_cast<uint64_t*>(&shared.barrier_Q),
                shared.smem_q.data() + d * kRows, d, q_begin + q_tile * kRows, head);
      }
    }
    shared.barrier_O.wait((work + 1) % 2);
    if (elected) {
      for (; tile > 0; --tile) {
        load_k(tile - 1);
        load_v(tile);
      }
      load_v(0);
    }
  }

  // A block does not end while its copies are under way.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline_k, MainloopPipeline pipeline_v,
                                PipelineState& write_k, PipelineState& write_v) const {
    if (cute::elect_one_sync()) {
      pipeline_k.producer_tail(write_k);
      pipeline_v.producer_tail(write_v);
    }
  }

 private:
  // Where a block's K and V lie.
  struct Place {
    int head, table_off, first, len, seq;
  };

  CUTLASS_DEVICE static void LoadBox(const CUtensorMap& map, uint64_t* barrier, T* to, int d,
                                     int row, int head) {
    cute::SM90_TMA_LOAD_3D::copy(&map, barrier,
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to,
                                 d, row, head);
  }

  // Tokens [tile * kTokens, + kTokens) of the block's, as wgmma reads them: pieces [kTokens,
  // kBoxValues], each row swizzled by the copy.
  CUTLASS_DEVICE static void LoadTile(const Params& p, const CUtensorMap& map,
                                      const CUtensorMap& tail, const Place& at, int tile,
                                      uint64_t* barrier, T* to) {
    const int first = tile * kTokens;
    const bool in_tail = first + kTokens > at.len;
    const CUtensorMap& from = in_tail ? tail : map;
#pragma unroll 1
    for (int r = 0; r < kTokens; r += p.box_rows) {
      int row = at.seq * kTokens + r;
      if (!in_tail) {
        const int t = at.first + first + r;
        const int block = p.block_table[at.table_off + (t >> p.block_shift)];
        row = block * p.block_rows + (t & ((1 << p.block_shift) - 1));
      }
#pragma unroll
      for (int d = 0; d < kD; d += kBoxValues) {
        LoadBox(from, barrier, to + d * kTokens + r * kBoxValues, d, row, at.head);
      }
    }
  }
};

template <typename Traits>
struct Epilogue {
  static constexpr int kRows = Traits::CTA_Q;
  static constexpr int kD = Traits::HEAD_DIM_VO;

  struct Params {
    float* o;               // [n_rows, n_heads, kD]
    __nv_bfloat16* o_bf16;  // where o goes instead; null: o
    float* lse;             // [n_rows, n_heads]; null: not wanted
    float* part_o;          // [parts, n_rows, part_heads, kD]: where parts go
    float* part_lse;        // [parts, n_rows, part_heads]
    int n_rows, n_heads;
    int part_heads;  // those that take part
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params&) {}
  CUTLASS_DEVICE void store_tail() const {}

  // `o`: a thread's part of the products; `lse`: of each of its rows, to the base 2. Four threads
  // write 32 bytes of f32 that lie together.
  template <typename FragmentO, typename FragmentLse, typename SharedStorage, typename TiledMma,
            typename BlockCoord>
  CUTLASS_DEVICE void store(const Params& p, const FragmentO& o, const FragmentLse& lse,
                            SharedStorage&, TiledMma mma, int thread,
                            const BlockCoord& coord) const {
    const auto [q_tile, head, place, q_begin, table_off, q_len, tokens, seq] = coord;
    const bool whole = tokens.part < 0;
    const int64_t part_at = whole ? 0 : int64_t{tokens.part} * p.n_rows * p.part_heads;
    const int stride = whole ? p.n_heads : p.part_heads;
    const int column = whole ? head : static_cast<int>(blockIdx.y);
    float* const o_f32 = whole ? p.o : p.part_o + part_at * kD;
    float* const lse_to = whole ? p.lse : p.part_lse + part_at;
    const int rows = q_len - q_tile * kRows;  // of the tile that are queries
    const int64_t first = int64_t{q_begin} + q_tile * kRows;
    const auto at = [&](int row) { return (first + row) * stride + column; };
    const auto tile = cute::make_identity_tensor(cute::Shape<cute::Int<kRows>, cute::Int<kD>>{});
    const auto coords = mma.get_thread_slice(thread).partition_C(tile);  // ((2, 2, V), M, N)
#pragma unroll
    for (int i = 0; i < cute::size(o); i += 2) {  // a pair of values that lie together
      const int row = cute::get<0>(coords(i));
      if (row >= rows) continue;
      const int64_t to = at(row) * kD + cute::get<1>(coords(i));
      if (whole && p.o_bf16 != nullptr) {
        *reinterpret_cast<__nv_bfloat162*>(p.o_bf16 + to) = __floats2bfloat162_rn(o(i), o(i + 1));
      } else {
        *reinterpret_cast<float2*>(o_f32 + to) = {o(i), o(i + 1)};
      }
    }
    if (lse_to == nullptr) return;
    constexpr float kLn2 = 0.693147181f;
    const auto row_coords =
        coords(cute::make_coord(cute::_0{}, cute::_, cute::_0{}), cute::_, cute::_0{});  // (2, M)
    if (cute::get<1>(row_coords(cute::_0{})) != 0) return;
#pragma unroll
    for (int i = 0; i < cute::size(lse); ++i) {
      const int row = cute::get<0>(row_coords(i));
      if (row < rows) lse_to[at(row)] = lse(i) * kLn2;
    }
  }

  // For queries that read nothing: there are none, each reads its own token.
  template <typename SharedStorage, typename BlockCoord>
  CUTLASS_DEVICE void store_zero(const Params&, SharedStorage&, int, const BlockCoord&) const {}
};

// A map of `rows` x `heads` pieces of kD values: boxes of box_rows rows of one head. Rows past the
// last read as zeros.
inline cudaError_t Encode(CUtensorMap* map, CUtensorMapDataType type, const void* base, int kD,
                          int64_t rows, int64_t row_bytes, int heads, int64_t head_bytes,
                          int box_rows) {
  return EncodeTensorMap(map, type, base,
                         {.sizes = {kD, rows, heads},
                          .strides = {row_bytes, head_bytes},
                          .box = {box_rows, 1},
                          .box_values = BoxValues(kD)});
}

// T: cutlass::bfloat16_t or cutlass::half_t.
template <typename T, int kD>
cudaError_t Attend(const AttendArgs& a, const HopperInputs& in, cudaStream_t stream) {
  constexpr int kRows = HopperRows(kD);
  constexpr int kTokens = HopperTokens(kD);
  using Traits = flashinfer::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/true, kD, kD, kRows, kTokens,
                                                   /*NUM_STAGES=*/2, T, T, T, int32_t,
                                                   flashinfer::StandardAttention>;
  using MainloopT = Mainloop<Traits>;
  using EpilogueT = Epilogue<Traits>;
  using SchedulerT = Scheduler<kRows, kTokens>;
  constexpr auto kType = std::is_same_v<T, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const KvView& kv = a.kv;
  const int64_t head_bytes = kD * sizeof(T);
  const int64_t tail_half = kv.n_kv_heads * head_bytes;
  const int held = kv.heads.Count(kv.n_kv_heads);
  const int64_t bank_rows = MostBankRows(std::max(kv.k.row_bytes, kv.v.row_bytes));
  const int64_t tail_rows = int64_t{a.n_seqs} * kTokens;

  const int box_rows = std::min<int>(kv.block_tokens, kTokens);

  typename MainloopT::Params p{};
  const auto encode = [&](CUtensorMap* map, const void* base, int64_t rows, int64_t row_bytes,
                          int heads, int64_t stride, int box_rows) {
    return Encode(map, kType, base, kD, rows, row_bytes, heads, stride, box_rows);
  };
  for (const cudaError_t error :
       {encode(&p.q, in.q, a.n_rows, a.n_heads * head_bytes, a.n_heads, head_bytes, kRows),
        encode(&p.k, kv.k.base, bank_rows, kv.k.row_bytes, held, kv.k.head_bytes, box_rows),
        encode(&p.v, kv.v.base, bank_rows, kv.v.row_bytes, held, kv.v.head_bytes, box_rows),
        encode(&p.k_tail, in.tails, tail_rows, 2 * tail_half, kv.n_kv_heads, head_bytes, box_rows),
        encode(&p.v_tail, in.tails + tail_half, tail_rows, 2 * tail_half, kv.n_kv_heads, head_bytes,
               box_rows)}) {
    if (error != cudaSuccess) return error;
  }
  p.block_table = kv.block_table;
  p.block_shift = std::countr_zero(static_cast<uint32_t>(kv.block_tokens));
  p.block_rows = kv.BlockRows();
  p.box_rows = box_rows;
  p.window_left = -1;
  p.additional_params.sm_scale = a.scale;

  const typename EpilogueT::Params out{
      .o = a.o,
      .o_bf16 = static_cast<__nv_bfloat16*>(in.o_bf16),
      .lse = a.lse,
      .part_o = in.part_o,
      .part_lse = in.part_lse,
      .n_rows = a.n_rows,
      .n_heads = a.n_heads,
      .part_heads = a.Heads(),
  };
  const typename SchedulerT::Params work{.rows = a.rows,
                                         .seqs = a.seqs,
                                         .n_seqs = a.n_seqs,
                                         .group = a.Group(),
                                         .heads = a.TakePart(),
                                         .held = kv.heads,
                                         .parts = in.parts};

  auto* kernel = flashinfer::PrefillWithKVCacheKernel<MainloopT, EpilogueT, Traits,
                                                      /*LEFT_SLIDING_WINDOW=*/false,
                                                      /*CAUSAL=*/true, SchedulerT>;
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  // Sequences end anywhere in their last tile.
  const int tiles = (a.n_rows + a.BusySeqs() * (kRows - 1)) / kRows;
  kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(a.Heads()),
                static_cast<unsigned>(in.parts)),
           Traits::NUM_THREADS, kSharedBytes, stream>>>(p, out, work);
  return cudaGetLastError();
}

// Heads of other sizes have none: null.
template <typename T>
HopperKernel* KernelFor(int32_t head_dim) {
  switch (head_dim) {
    case 64:
      return Attend<T, 64>;
    case 96:
      return Attend<T, 96>;
    case 128:
      return Attend<T, 128>;
    case 256:
      return Attend<T, 256>;
    default:
      return nullptr;
  }
}

}  // namespace omnikv::cuda::hopper
