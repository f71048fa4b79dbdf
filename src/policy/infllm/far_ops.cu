// The ops of far memory on a card. A block keeps the LRU of a sequence.
#include <algorithm>

#include "backend/cuda/kernels/common.cuh"
#include "backend/kv_format.h"
#include "policy/infllm/far_ops.h"
#include "policy/infllm/turned_keys.cuh"

namespace omnikv {
namespace {

using cuda::CeilDiv;
using cuda::kAllLanes;

constexpr int kThreads = 256;
constexpr int kCopyThreads = 128;
constexpr int kCopyBlocks = 64;  // of a KV head and a sequence

__global__ void __launch_bounds__(kThreads) LocateKernel(const LocateFarArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int step = static_cast<int>(gridDim.x) * kThreads;
  const int first = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  for (int s = first; s < a.n_seqs; s += step) {
    const SeqMeta seq = a.seqs[s];
    SeqMeta places{};
    SeqMeta units{};
    const int n = seq.kv_len - seq.q_len;
    const int count = max(0, seq.kv_len - a.shape.recent - a.shape.LeftOut(n));
    if (seq.q_len > 0) {
      places = {seq.q_begin, seq.q_len - a.skip, max(1, count), s * a.shape.Entries(), 0};
      units = {a.prefill != 0 ? 0 : seq.q_begin, 1, a.shape.Blocks(n), s, 0};
    }
    a.to_seqs[s] = places;
    a.units[s] = units;
    a.bounds[2 * s] = 0;
    a.bounds[2 * s + 1] = seq.q_len > 0 ? count : 0;
    a.n_candidates[s] = seq.q_len > 0 ? a.shape.Blocks(n) : 0;
    a.n_pick[s] = seq.q_len > 0 ? a.shape.Chosen(n) : 0;
  }
  for (int r = a.skip + first; r < a.n_rows; r += step) {
    const RowMeta row = a.rows[r];
    const SeqMeta seq = a.seqs[row.seq];
    const int gone = a.shape.recent + a.shape.LeftOut(seq.kv_len - seq.q_len);
    a.to_rows[r - a.skip] = {row.seq, max(0, row.pos - gone)};
  }
}

__global__ void __launch_bounds__(kThreads) MeanKernel(const MeanRowsArgs a) {
  cuda::GridTrigger();
  cuda::GridWait();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= a.width) return;
  double sum = 0;
  for (int64_t r = 0; r < a.n_rows; ++r) sum += a.in[r * a.width + i];
  a.out[i] = static_cast<float>(sum / a.n_rows);
}

// Grid: x sequences.
__global__ void __launch_bounds__(kThreads) KeepKernel(const KeepBlocksArgs a) {
  __shared__ int n_missing;
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const FarShape& shape = a.shape;
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) {
    if (thread == 0) a.n_miss[s] = a.range[2 * s] = a.range[2 * s + 1] = 0;
    return;
  }
  const int n = seq.kv_len - seq.q_len;
  const int count = min(a.count[s], shape.Chosen(n));
  int32_t* const owner = a.owner + int64_t{s} * shape.cache;
  uint32_t* const stamp = a.stamp + int64_t{s} * shape.cache;
  const int32_t* const chosen = a.index + int64_t{s} * shape.most;
  int32_t* const miss = a.miss + int64_t{2} * s * shape.most;
  int32_t* const table = a.table + int64_t{s} * shape.Entries();
  int32_t* const chosen_at = table + shape.SinkBlocks();
  const int first = s * shape.Slots();
  const uint32_t now = (n == 0 ? 0 : a.clock[s]) + 1;
  const int copied = n == 0 ? 0 : a.copied[s];
  if (n == 0) {
    for (int slot = thread; slot < shape.cache; slot += kThreads) {
      owner[slot] = -1;
      stamp[slot] = 0;
    }
  }
  if (thread == 0) n_missing = 0;
  __syncthreads();
  for (int i = thread; i < shape.SinkBlocks(); i += kThreads) table[i] = first + i;
  for (int i = thread; i < count; i += kThreads) {
    const int32_t block = chosen[i];
    int found = -1;
#pragma unroll 8
    for (int slot = 0; slot < shape.cache; ++slot) {
      if (owner[slot] == block) found = slot;
    }
    chosen_at[i] = found;
    if (found >= 0) {
      stamp[found] = now;
    } else {
      atomicAdd(&n_missing, 1);
    }
  }
  __syncthreads();
  // The i-th block that is missing gets the i-th oldest slot: of the oldest choice, then the lowest
  // block (a free slot is older than any), then slot. What was chosen now is not among them, since
  // the LRU has room for a choice.
  const int n_miss = n_missing;
  const auto key = [&](int slot) {
    return static_cast<unsigned long long>(stamp[slot]) << 32 |
           static_cast<uint32_t>(owner[slot] + 1);
  };
  for (int slot = thread; n_miss > 0 && slot < shape.cache; slot += kThreads) {
    const unsigned long long own = key(slot);
    int older = 0;
    for (int from = 0; from < shape.cache && older < n_miss; from += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int other = min(from + i, shape.cache - 1);
        const unsigned long long its = key(other);
        older += from + i < shape.cache && (its < own || (its == own && other < slot)) ? 1 : 0;
      }
    }
    if (older < n_miss) miss[2 * older + 1] = slot;
  }
  for (int i = thread; i < count; i += kThreads) {
    if (chosen_at[i] >= 0) continue;
    int before = 0;
    for (int j = 0; j < i; ++j) before += chosen_at[j] < 0 ? 1 : 0;
    miss[2 * before] = chosen[i];
    chosen_at[i] = -1 - before;  // below 0 for the other threads too
  }
  __syncthreads();
  for (int i = thread; i < count; i += kThreads) {
    int at = chosen_at[i];
    if (at < 0) {
      at = miss[2 * (-1 - at) + 1];
      owner[at] = chosen[i];
      stamp[at] = now;
    }
    chosen_at[i] = first + shape.SinkBlocks() + at;
  }
  for (int i = thread; i < shape.rest; i += kThreads) {
    chosen_at[count + i] =
        first + shape.SinkBlocks() + shape.cache + (shape.Blocks(n) + i) % shape.rest;
  }
  if (thread != 0) return;
  const int end = max(copied, seq.kv_len - shape.recent);
  a.n_miss[s] = n_miss;
  a.clock[s] = now;
  a.range[2 * s] = copied;
  a.range[2 * s + 1] = end;
  a.copied[s] = end;
}

// Grid: x shares the tokens, y KV heads, z sequences. What is copied is in the order of ForCopies.
__global__ void __launch_bounds__(kCopyThreads) CopyKernel(const __grid_constant__ CopyFarArgs a) {
  extern __shared__ float k[];  // [dk]
  cuda::GridTrigger();
  cuda::GridWait();
  const int s = static_cast<int>(blockIdx.z);
  const int head = static_cast<int>(blockIdx.y);
  const FarShape& shape = a.shape;
  const SeqMeta seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int64_t slots = int64_t{s} * shape.Slots();
  const int64_t lru = slots + shape.SinkBlocks();
  const int begin = a.range[2 * s];
  const int end = a.range[2 * s + 1];
  const int of_misses = a.n_miss[s] * shape.block;
  const int of_sinks = max(0, min(end, shape.sinks) - begin);
  const int rest = max(begin, FirstSummed(shape, seq.kv_len - seq.q_len));
  const int n = of_misses + of_sinks + max(0, end - rest);
  for (int item = static_cast<int>(blockIdx.x); item < n; item += static_cast<int>(gridDim.x)) {
    int t;
    int64_t to;
    if (item < of_misses) {
      const int32_t* const miss =
          a.miss + int64_t{2} * (int64_t{s} * shape.most + item / shape.block);
      t = shape.sinks + miss[0] * shape.block + item % shape.block;
      to = (lru + miss[1]) * shape.block + item % shape.block;
    } else if (item < of_misses + of_sinks) {
      t = begin + item - of_misses;
      to = slots * shape.block + t;
    } else {
      t = rest + item - of_misses - of_sinks;
      const int block = (t - shape.sinks) / shape.block;
      to = (lru + shape.cache + block % shape.rest) * shape.block + (t - shape.sinks) % shape.block;
    }
    const int64_t row = a.from.RowIndex(seq.table_off, t);
    const std::byte* const from_k = a.from.k.Head(row, head);
    for (int i = static_cast<int>(threadIdx.x); i < a.from.dk; i += kCopyThreads) {
      k[i] = TurnedKey(a.from, from_k, head, i, t, a.inv_freq, a.n_freq);
    }
    __syncthreads();
    std::byte* const to_k = a.to.k.Head(to, head);
    if (a.to.k.dtype == DType::kQ8_0) {
      StoreBlocks<int8_t>(k, a.from.dk, to_k, to_k + a.to.k.ToScales(head));
    } else if (a.to.k.dtype == DType::kQ4_0) {
      StoreBlocks<cuda::Q4>(k, a.from.dk, to_k, to_k + a.to.k.ToScales(head));
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < a.from.dk; i += kCopyThreads) {
        cuda::StoreValue(a.to.k.dtype, to_k, i, k[i]);
      }
    }
    const std::byte* const from_v = a.from.v.Head(row, head);
    std::byte* const to_v = a.to.v.Head(to, head);
    const auto copy = [&](int64_t from_at, int64_t to_at, int64_t bytes) {
      for (int64_t i = 2 * static_cast<int64_t>(threadIdx.x); i < bytes; i += 2 * kCopyThreads) {
        *reinterpret_cast<uint16_t*>(to_v + to_at + i) =
            *reinterpret_cast<const uint16_t*>(from_v + from_at + i);
      }
    };
    copy(0, 0, KvHeadBytes(a.from.v.dtype, a.from.dv));
    copy(a.from.v.ToScales(head), a.to.v.ToScales(head), KvScaleBytes(a.from.v.dtype, a.from.dv));
    if (head == 0 && threadIdx.x == 0) a.pos[to] = t;
    __syncthreads();
  }
}

}  // namespace

void LocateFarCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const LocateFarArgs*>(args);
  const auto blocks = static_cast<uint32_t>(CeilDiv(std::max(a.n_rows, a.n_seqs), kThreads));
  cuda::LaunchKernel(LocateKernel, launch, blocks, kThreads, 0, a);
}

void MeanRowsCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const MeanRowsArgs*>(args);
  const auto blocks = static_cast<uint32_t>(CeilDiv(a.width, kThreads));
  cuda::LaunchKernel(MeanKernel, launch, blocks, kThreads, 0, a);
}

void KeepBlocksCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const KeepBlocksArgs*>(args);
  cuda::LaunchKernel(KeepKernel, launch, static_cast<uint32_t>(a.n_seqs), kThreads, 0, a);
}

void CopyFarCuda(const void* args, const cuda::Launch& launch) {
  const CopyFarArgs& a = **static_cast<const CopyFarArgs* const*>(args);
  const dim3 grid(kCopyBlocks, static_cast<uint32_t>(a.from.n_kv_heads),
                  static_cast<uint32_t>(a.n_seqs));
  cuda::LaunchKernel(CopyKernel, launch, grid, kCopyThreads,
                     sizeof(float) * static_cast<size_t>(a.from.dk), a);
}

}  // namespace omnikv
