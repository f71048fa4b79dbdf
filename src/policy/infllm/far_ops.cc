#include "policy/infllm/far_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/kv_format.h"
#include "base/thread_pool.h"

namespace omnikv {
namespace {

uint64_t U(int64_t n) {
  return static_cast<uint64_t>(n);
}

void Locate(const void* raw) {
  const auto& a = *static_cast<const LocateFarArgs*>(raw);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = a.seqs[s];
    a.to_seqs[s] = a.units[s] = {};
    a.bounds[2 * s] = a.bounds[2 * s + 1] = a.n_candidates[s] = a.n_pick[s] = 0;
    if (seq.q_len == 0) continue;
    const int32_t n = seq.kv_len - seq.q_len;
    const int32_t places = std::max(0, seq.kv_len - a.shape.recent - a.shape.LeftOut(n));
    a.to_seqs[s] = {.q_begin = seq.q_begin,
                    .q_len = seq.q_len - a.skip,
                    .kv_len = std::max(1, places),
                    .table_off = s * a.shape.Entries(),
                    .prompt_len = 0};
    a.units[s] = {.q_begin = a.prefill != 0 ? 0 : seq.q_begin,
                  .q_len = 1,
                  .kv_len = a.shape.Blocks(n),
                  .table_off = s,
                  .prompt_len = 0};
    a.bounds[2 * s + 1] = places;
    a.n_candidates[s] = a.shape.Blocks(n);
    a.n_pick[s] = a.shape.Chosen(n);
  }
  for (int32_t r = a.skip; r < a.n_rows; ++r) {
    const RowMeta row = a.rows[r];
    const SeqMeta& seq = a.seqs[row.seq];
    const int32_t gone = a.shape.recent + a.shape.LeftOut(seq.kv_len - seq.q_len);
    a.to_rows[r - a.skip] = {.seq = row.seq, .pos = std::max(0, row.pos - gone)};
  }
}

Cost LocateCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const LocateFarArgs*>(raw);
  const uint64_t bytes = U(a.n_rows) * sizeof(RowMeta) + U(a.n_seqs) * sizeof(SeqMeta);
  return {.bytes_read = bytes, .bytes_written = bytes + U(a.n_seqs) * (sizeof(SeqMeta) + 16)};
}

void Mean(const void* raw) {
  const auto& a = *static_cast<const MeanRowsArgs*>(raw);
  std::vector<double> sum(static_cast<size_t>(a.width), 0.0);
  for (int64_t r = 0; r < a.n_rows; ++r) {
    for (int64_t i = 0; i < a.width; ++i) sum[static_cast<size_t>(i)] += a.in[r * a.width + i];
  }
  for (int64_t i = 0; i < a.width; ++i) {
    a.out[i] = static_cast<float>(sum[static_cast<size_t>(i)] / a.n_rows);
  }
}

Cost MeanCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const MeanRowsArgs*>(raw);
  const uint64_t values = U(a.n_rows) * U(a.width);
  return {.bytes_read = 4 * values, .bytes_written = 4 * U(a.width), .flops = values};
}

void Keep(const void* raw) {
  const auto& a = *static_cast<const KeepBlocksArgs*>(raw);
  const FarShape& shape = a.shape;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = a.seqs[s];
    a.n_miss[s] = a.range[2 * s] = a.range[2 * s + 1] = 0;
    if (seq.q_len == 0) continue;
    const int32_t n = seq.kv_len - seq.q_len;
    int32_t* const owner = a.owner + int64_t{s} * shape.cache;
    uint32_t* const stamp = a.stamp + int64_t{s} * shape.cache;
    const int32_t* const chosen = a.index + int64_t{s} * shape.most;
    int32_t* const miss = a.miss + int64_t{2} * s * shape.most;
    if (n == 0) {
      std::fill_n(owner, shape.cache, -1);
      std::fill_n(stamp, shape.cache, 0);
      a.clock[s] = a.copied[s] = 0;
    }
    const uint32_t now = ++a.clock[s];
    const int32_t count = std::min(a.count[s], shape.Chosen(n));
    int32_t* const table = a.table + int64_t{s} * shape.Entries();
    const int32_t first = s * shape.Slots();
    for (int32_t i = 0; i < shape.SinkBlocks(); ++i) table[i] = first + i;
    int32_t* const chosen_at = table + shape.SinkBlocks();
    for (int32_t i = 0; i < count; ++i) {
      const int32_t* const at = std::find(owner, owner + shape.cache, chosen[i]);
      chosen_at[i] = at < owner + shape.cache ? static_cast<int32_t>(at - owner) : -1;
      if (chosen_at[i] >= 0) stamp[chosen_at[i]] = now;
    }
    for (int32_t i = 0; i < count; ++i) {
      if (chosen_at[i] < 0) {
        // Free slots are older than any other.
        int32_t oldest = 0;
        for (int32_t slot = 1; slot < shape.cache; ++slot) {
          if (stamp[slot] < stamp[oldest] ||
              (stamp[slot] == stamp[oldest] && owner[slot] < owner[oldest])) {
            oldest = slot;
          }
        }
        owner[oldest] = chosen[i];
        stamp[oldest] = now;
        chosen_at[i] = oldest;
        miss[2 * a.n_miss[s]] = chosen[i];
        miss[2 * a.n_miss[s]++ + 1] = oldest;
      }
      chosen_at[i] += first + shape.SinkBlocks();
    }
    for (int32_t i = 0; i < shape.rest; ++i) {
      chosen_at[count + i] =
          first + shape.SinkBlocks() + shape.cache + (shape.Blocks(n) + i) % shape.rest;
    }
    a.range[2 * s] = a.copied[s];
    a.range[2 * s + 1] = std::max(a.copied[s], seq.kv_len - shape.recent);
    a.copied[s] = a.range[2 * s + 1];
  }
}

Cost KeepCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const KeepBlocksArgs*>(raw);
  const uint64_t slots = U(a.n_seqs) * U(a.shape.cache);
  const uint64_t entries = U(a.n_seqs) * U(a.shape.Entries());
  return {.bytes_read = 8 * slots, .bytes_written = 4 * entries};
}

// A head of K or V, of `d` values, from row `from` to row `to`. Of one format: its bytes.
void CopyHead(const KvPlane& plane, const std::byte* from, const KvPlane& to_plane, std::byte* to,
              int32_t head, int32_t d) {
  const auto copy = [&](int64_t from_at, int64_t to_at, int64_t bytes) {
    std::copy_n(from + from_at, bytes, to + to_at);
  };
  const int64_t at = head * plane.head_bytes;
  const int64_t to_at = head * to_plane.head_bytes;
  copy(at, to_at, KvHeadBytes(plane.dtype, d));
  copy(at + plane.ToScales(head), to_at + to_plane.ToScales(head), KvScaleBytes(plane.dtype, d));
}

// K of a head, turned from its token's position to 0.
void LoadTurned(const KvView& kv, const std::byte* row, int32_t head, int64_t position,
                const float* inv_freq, int32_t n_freq, float* k) {
  const std::byte* const values = row + head * kv.k.head_bytes;
  for (int32_t i = 0; i < kv.dk; ++i) {
    k[i] = LoadKvValue(kv.k, head, values, static_cast<size_t>(i));
  }
  for (int32_t i = 0; inv_freq != nullptr && i < n_freq; ++i) {
    // The angle as RopeTable makes it.
    const double angle = static_cast<double>(static_cast<float>(position) * inv_freq[i]);
    const double c = std::cos(angle);
    const double s = std::sin(angle);
    const double x = k[i];
    const double y = k[i + n_freq];
    k[i] = static_cast<float>(x * c + y * s);
    k[i + n_freq] = static_cast<float>(y * c - x * s);
  }
}

void CopyToken(const CopyFarArgs& a, int32_t s, int32_t t, int64_t to_row) {
  const int64_t row = a.from.RowIndex(a.seqs[s].table_off, t);
  thread_local std::vector<float> k;  // steps allocate nothing
  k.resize(static_cast<size_t>(a.from.dk));
  for (int32_t h = 0; h < a.from.n_kv_heads; ++h) {
    LoadTurned(a.from, a.from.k.Head(row, 0), h, t, a.inv_freq, a.n_freq, k.data());
    StoreKvHead(a.to.k, h, a.from.dk, k.data(), a.to.k.Head(to_row, 0));
    CopyHead(a.from.v, a.from.v.Head(row, 0), a.to.v, a.to.v.Head(to_row, 0), h, a.from.dv);
  }
  a.pos[to_row] = t;
}

// Calls visit(seq, token, row of far memory) for every token that is to be copied.
template <typename Visit>
void ForCopies(const CopyFarArgs& a, const Visit& visit) {
  const FarShape& shape = a.shape;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    if (a.seqs[s].q_len == 0) continue;
    const int64_t first = int64_t{s} * shape.Slots();
    const int64_t lru = first + shape.SinkBlocks();
    for (int32_t i = 0; i < a.n_miss[s]; ++i) {
      const int32_t* const miss = a.miss + int64_t{2} * (int64_t{s} * shape.most + i);
      for (int32_t j = 0; j < shape.block; ++j) {
        visit(s, shape.sinks + miss[0] * shape.block + j, (lru + miss[1]) * shape.block + j);
      }
    }
    const int32_t begin = a.range[2 * s];
    const int32_t end = a.range[2 * s + 1];
    for (int32_t t = begin; t < std::min(end, shape.sinks); ++t)
      visit(s, t, first * shape.block + t);
    const int32_t rest = FirstSummed(shape, a.seqs[s].kv_len - a.seqs[s].q_len);
    for (int32_t t = std::max(begin, rest); t < end; ++t) {
      const int32_t block = (t - shape.sinks) / shape.block;
      visit(
          s, t,
          (lru + shape.cache + block % shape.rest) * shape.block + (t - shape.sinks) % shape.block);
    }
  }
}

const CopyFarArgs& CopyArgs(const void* raw) {
  return **static_cast<const CopyFarArgs* const*>(raw);
}

void Copy(const void* raw) {
  const CopyFarArgs& a = CopyArgs(raw);
  ForCopies(a, [&](int32_t s, int32_t t, int64_t row) { CopyToken(a, s, t, row); });
}

void CopyShared(const void* raw, ThreadPool& pool) {
  const CopyFarArgs& a = CopyArgs(raw);
  struct Item {
    int32_t s, t;
    int64_t row;
  };
  thread_local std::vector<Item> of_thread;
  std::vector<Item>& items = of_thread;  // the caller's, for all threads
  items.clear();
  ForCopies(a, [&](int32_t s, int32_t t, int64_t row) { items.push_back({s, t, row}); });
  pool.ParallelFor(static_cast<int64_t>(items.size()), 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Item& item = items[static_cast<size_t>(i)];
      CopyToken(a, item.s, item.t, item.row);
    }
  });
}

// What crosses from where the rows are: no attention reads it there, so it is no kv_bytes.
Cost CopyCost(const void* raw, HostArrays& arrays) {
  CopyFarArgs a = CopyArgs(raw);
  a.seqs = arrays.Of(a.seqs, a.n_seqs);
  a.miss = arrays.Of(a.miss, int64_t{2} * a.n_seqs * a.shape.most);
  a.n_miss = arrays.Of(a.n_miss, a.n_seqs);
  a.range = arrays.Of(a.range, int64_t{2} * a.n_seqs);
  uint64_t tokens = 0;
  ForCopies(a, [&](int32_t, int32_t, int64_t) { ++tokens; });
  const uint64_t bytes =
      tokens * U(a.from.n_kv_heads) *
      (DTypeBytes(a.from.k.dtype, U(a.from.dk)) + DTypeBytes(a.from.v.dtype, U(a.from.dv)));
  return {.bytes_read = bytes, .bytes_written = bytes + 4 * tokens};
}

constexpr CustomKernels kLocate = {.name = "InfllmLocate",
                                   .ref = Locate,
                                   .cpu = [](const void* args, ThreadPool&) { Locate(args); },
#ifdef OMNIKV_HAVE_CUDA
                                   .cuda = LocateFarCuda,
#endif
                                   .cost = LocateCost};
constexpr CustomKernels kMean = {.name = "InfllmMeanQuery",
                                 .ref = Mean,
                                 .cpu = [](const void* args, ThreadPool&) { Mean(args); },
#ifdef OMNIKV_HAVE_CUDA
                                 .cuda = MeanRowsCuda,
#endif
                                 .cost = MeanCost};
constexpr CustomKernels kKeep = {.name = "InfllmKeepBlocks",
                                 .ref = Keep,
                                 .cpu = [](const void* args, ThreadPool&) { Keep(args); },
#ifdef OMNIKV_HAVE_CUDA
                                 .cuda = KeepBlocksCuda,
#endif
                                 .cost = KeepCost};
constexpr CustomKernels kCopy = {.name = "InfllmCopy",
                                 .ref = Copy,
                                 .cpu = CopyShared,
#ifdef OMNIKV_HAVE_CUDA
                                 .cuda = CopyFarCuda,
#endif
                                 .cost = CopyCost};

}  // namespace

CustomArgs LocateFar(const LocateFarArgs& args) {
  return MakeCustomArgs(kLocate, args);
}
CustomArgs MeanRows(const MeanRowsArgs& args) {
  return MakeCustomArgs(kMean, args);
}
CustomArgs KeepBlocks(const KeepBlocksArgs& args) {
  return MakeCustomArgs(kKeep, args);
}
CustomArgs CopyFar(const CopyFarArgs* args) {
  return MakeCustomArgs(kCopy, args);
}

}  // namespace omnikv
