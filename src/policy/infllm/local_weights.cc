// The sums of local weights, and the keys of blocks that are made from them.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "backend/kv_format.h"
#include "base/thread_pool.h"
#include "policy/infllm/far_ops.h"

namespace omnikv {
namespace {

uint64_t U(int64_t n) {
  return static_cast<uint64_t>(n);
}

// Tokens that are weighed together.
constexpr int32_t kTile = 64;

const WeighLocalArgs& WeighArgs(const void* raw) {
  return **static_cast<const WeighLocalArgs* const*>(raw);
}

// Tiles of a sequence: from the first token whose sum is needed, or in the window of the step.
struct Tiles {
  int32_t first = 0;  // token
  int32_t n = 0;
};
Tiles TilesOf(const WeighLocalArgs& a, const SeqMeta& seq) {
  if (seq.q_len == 0) return {};
  const int32_t first = FirstWritten(a.shape, seq.kv_len - seq.q_len);
  return {first, (seq.kv_len - first + kTile - 1) / kTile};
}

// The query heads of KV head `g` weigh the tokens [begin, end) of sequence s. Sums are of the type
// Real.
template <typename Real>
void WeighTile(const WeighLocalArgs& a, int32_t s, int32_t g, int32_t begin, int32_t end) {
  const SeqMeta& seq = a.seqs[s];
  const int32_t p0 = seq.kv_len - seq.q_len;
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const int32_t dk = a.kv.dk;
  // K of the tile, token after token in each value.
  thread_local std::vector<Real> k;  // steps allocate nothing
  k.assign(static_cast<size_t>(dk) * kTile, 0);
  for (int32_t t = std::max(begin, p0 - a.shape.recent + 1); t < end; ++t) {
    const std::byte* values = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), g);
    for (int32_t i = 0; i < dk; ++i) {
      k[static_cast<size_t>(i * kTile + t - begin)] =
          LoadKvValue(a.kv.k, g, values, static_cast<size_t>(i));
    }
  }
  for (int32_t h = g * group; h < (g + 1) * group; ++h) {
    Real sums[kTile];
    const float* const held = LocalSums(a.sums, s, p0, h, a.n_heads, a.stride);
    for (int32_t t = begin; t < end; ++t) sums[t - begin] = t < p0 ? held[t % a.stride] : Real{0};
    const int32_t last = std::min(seq.kv_len, end - 1 + a.shape.recent);
    for (int32_t p = std::max(p0, begin); p < last; ++p) {
      const int64_t row = seq.q_begin + p - p0;
      const float* const q = a.q + (row * a.n_heads + h) * dk;
      const Real lse = a.lse[row * a.n_heads + h];
      Real logits[kTile] = {};
      for (int32_t i = 0; i < dk; ++i) {
        const Real value = q[i];
        const Real* const of_tile = k.data() + static_cast<size_t>(i) * kTile;
        for (int32_t j = 0; j < kTile; ++j) logits[j] += value * of_tile[j];
      }
      const int32_t low = std::max(begin, p - a.shape.recent + 1);
      for (int32_t t = low; t < std::min(end, p + 1); ++t) {
        Real logit = logits[t - begin] * a.scale;
        if (a.softcap > 0) logit = a.softcap * std::tanh(logit / a.softcap);
        sums[t - begin] += std::exp(logit - lse);
      }
    }
    float* const out = LocalSums(a.sums, s, seq.kv_len, h, a.n_heads, a.stride);
    for (int32_t t = begin; t < end; ++t) {
      out[t % a.stride] = static_cast<float>(sums[t - begin]);
    }
  }
}

template <typename Real>
void WeighItem(const WeighLocalArgs& a, int32_t s, int64_t item) {
  const Tiles tiles = TilesOf(a, a.seqs[s]);
  const int32_t begin = tiles.first + static_cast<int32_t>(item % tiles.n) * kTile;
  WeighTile<Real>(a, s, static_cast<int32_t>(item / tiles.n), begin,
                  std::min(begin + kTile, a.seqs[s].kv_len));
}

void Weigh(const void* raw) {
  const WeighLocalArgs& a = WeighArgs(raw);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int64_t items = int64_t{TilesOf(a, a.seqs[s]).n} * a.kv.n_kv_heads;
    for (int64_t i = 0; i < items; ++i) WeighItem<double>(a, s, i);
  }
}

void WeighShared(const void* raw, ThreadPool& pool) {
  const WeighLocalArgs& a = WeighArgs(raw);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int64_t items = int64_t{TilesOf(a, a.seqs[s]).n} * a.kv.n_kv_heads;
    pool.ParallelFor(items, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) WeighItem<float>(a, s, i);
    });
  }
}

Cost WeighCost(const void* raw, HostArrays& arrays) {
  const WeighLocalArgs& a = WeighArgs(raw);
  const SeqMeta* seqs = arrays.Of(a.seqs, a.n_seqs);
  Cost c;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = seqs[s];
    if (seq.q_len == 0) continue;
    const int32_t first = TilesOf(a, seq).first;
    const int64_t tokens =
        seq.kv_len - std::max(first, seq.kv_len - seq.q_len - a.shape.recent + 1);
    const uint64_t row_heads = U(seq.q_len) * U(a.n_heads);
    const uint64_t sums = 4 * U(a.n_heads) * U(seq.kv_len - first);
    c.kv_bytes += KvBytes(a.kv, tokens * a.kv.n_kv_heads, /*values=*/false);
    c.bytes_read += 4 * row_heads * U(a.kv.dk + 1) + sums;
    c.bytes_written += sums;
    c.flops += 2 * row_heads * U(std::min<int64_t>(tokens, a.shape.recent)) * U(a.kv.dk);
  }
  c.bytes_read += c.kv_bytes;
  return c;
}

template <typename Real>
void AddHead(const AddWeightsArgs& a, int32_t s, int32_t h) {
  const SeqMeta& seq = a.seqs[s];
  if (seq.q_len == 0) return;
  const int32_t n = seq.kv_len;
  const int64_t row_head = int64_t{seq.q_begin} * a.n_heads + h;
  const float* const logits = a.logits + row_head * a.logit_stride;
  const Real lse = a.lse[row_head];
  const float* const held = LocalSums(a.sums, s, n - 1, h, a.n_heads, a.stride);
  float* const out = LocalSums(a.sums, s, n, h, a.n_heads, a.stride);
  for (int32_t t = FirstWritten(a.shape, n - 1); t < n;) {
    const int32_t at = t % a.stride;
    const int32_t run = std::min(n - t, a.stride - at);
    for (int32_t i = 0; i < run; ++i, ++t) {
      Real sum = t < n - 1 ? held[at + i] : Real{0};
      if (t >= n - a.shape.recent) sum += std::exp(Real{logits[t]} - lse);
      out[at + i] = static_cast<float>(sum);
    }
  }
}

void Add(const void* raw) {
  const auto& a = *static_cast<const AddWeightsArgs*>(raw);
  for (int32_t i = 0; i < a.n_seqs * a.n_heads; ++i)
    AddHead<double>(a, i / a.n_heads, i % a.n_heads);
}

void AddShared(const void* raw, ThreadPool& pool) {
  const auto& a = *static_cast<const AddWeightsArgs*>(raw);
  pool.ParallelFor(int64_t{a.n_seqs} * a.n_heads, 1, [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<int32_t>(begin); i < end; ++i) {
      AddHead<float>(a, i / a.n_heads, i % a.n_heads);
    }
  });
}

Cost AddCost(const void* raw, HostArrays& arrays) {
  const auto& a = *static_cast<const AddWeightsArgs*>(raw);
  const SeqMeta* seqs = arrays.Of(a.seqs, a.n_seqs);
  Cost c;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int32_t n = seqs[s].kv_len;
    if (seqs[s].q_len == 0) continue;
    const uint64_t sums = 4 * U(a.n_heads) * U(n - FirstWritten(a.shape, n - 1));
    c.bytes_read += 4 * U(a.n_heads) * U(std::min(n, a.shape.recent) + 1) + sums;
    c.bytes_written += sums;
  }
  return c;
}

const RepresentArgs& RepresentArgsOf(const void* raw) {
  return **static_cast<const RepresentArgs* const*>(raw);
}

void RepresentBlock(const RepresentArgs& a, int32_t s, int32_t b, int32_t h) {
  const SeqMeta& seq = a.seqs[s];
  const int32_t first = a.shape.sinks + b * a.shape.block;
  const float* const sums = LocalSums(a.sums, s, seq.kv_len, h, a.n_heads, a.stride);
  thread_local std::vector<int32_t> tokens;  // steps allocate nothing
  tokens.resize(static_cast<size_t>(a.shape.block));
  std::iota(tokens.begin(), tokens.end(), first);
  std::sort(tokens.begin(), tokens.end(), [&](int32_t x, int32_t y) {
    // Sums are not below 0; NaN, which no order has, comes last.
    const float of_x = std::max(-1.0f, sums[x % a.stride]);
    const float of_y = std::max(-1.0f, sums[y % a.stride]);
    return of_x != of_y ? of_x > of_y : x < y;
  });
  tokens.resize(static_cast<size_t>(a.representatives));
  std::sort(tokens.begin(), tokens.end());
  const int32_t dk = a.kv.dk;
  const int32_t kv_head = h / (a.n_heads / a.kv.n_kv_heads);
  thread_local std::vector<double> mean;
  mean.assign(static_cast<size_t>(dk), 0.0);
  for (const int32_t t : tokens) {
    const std::byte* values = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
    const auto load = [&](int32_t i) {
      return static_cast<double>(LoadKvValue(a.kv.k, kv_head, values, static_cast<size_t>(i)));
    };
    const int32_t n_freq = a.inv_freq != nullptr ? a.n_freq : 0;
    for (int32_t i = 0; i < n_freq; ++i) {
      const double angle = static_cast<double>(static_cast<float>(t) * a.inv_freq[i]);
      const double c = std::cos(angle);
      const double si = std::sin(angle);
      mean[static_cast<size_t>(i)] += load(i) * c + load(i + n_freq) * si;
      mean[static_cast<size_t>(i + n_freq)] += load(i + n_freq) * c - load(i) * si;
    }
    for (int32_t i = 2 * n_freq; i < dk; ++i) mean[static_cast<size_t>(i)] += load(i);
  }
  float* const out = a.keys + ((int64_t{s} * a.max_blocks + b) * a.n_heads + h) * dk;
  for (int32_t i = 0; i < dk; ++i) {
    out[i] = static_cast<float>(mean[static_cast<size_t>(i)] / a.representatives);
  }
}

void RepresentNew(const void* raw) {
  const RepresentArgs& a = RepresentArgsOf(raw);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    const int32_t end = a.shape.Blocks(seq.kv_len);
    for (int32_t b = a.shape.Blocks(seq.kv_len - seq.q_len); b < end; ++b) {
      for (int32_t h = 0; h < a.n_heads; ++h) RepresentBlock(a, s, b, h);
    }
  }
}

Cost RepresentCost(const void* raw, HostArrays& arrays) {
  const RepresentArgs& a = RepresentArgsOf(raw);
  const SeqMeta* seqs = arrays.Of(a.seqs, a.n_seqs);
  Cost c;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = seqs[s];
    if (seq.q_len == 0) continue;
    const uint64_t blocks = U(a.shape.Blocks(seq.kv_len) - a.shape.Blocks(seq.kv_len - seq.q_len));
    const uint64_t heads = blocks * U(a.n_heads);
    c.bytes_read += heads * (4 * U(a.shape.block) +
                             U(a.representatives) * DTypeBytes(a.kv.k.dtype, U(a.kv.dk)));
    c.bytes_written += heads * 4 * U(a.kv.dk);
  }
  return c;
}

constexpr CustomKernels kWeigh = {.name = "InfllmWeigh",
                                  .ref = Weigh,
                                  .cpu = WeighShared,
#ifdef OMNIKV_HAVE_CUDA
                                  .cuda = WeighLocalCuda,
#endif
                                  .cost = WeighCost};
constexpr CustomKernels kAdd = {.name = "InfllmAddWeights",
                                .ref = Add,
                                .cpu = AddShared,
#ifdef OMNIKV_HAVE_CUDA
                                .cuda = AddWeightsCuda,
#endif
                                .cost = AddCost};
constexpr CustomKernels kRepresent = {
    .name = "InfllmRepresent",
    .ref = RepresentNew,
    .cpu = [](const void* args, ThreadPool&) { RepresentNew(args); },
#ifdef OMNIKV_HAVE_CUDA
    .cuda = RepresentCuda,
#endif
    .cost = RepresentCost};

}  // namespace

CustomArgs WeighLocal(const WeighLocalArgs* args) {
  return MakeCustomArgs(kWeigh, args);
}
CustomArgs AddWeights(const AddWeightsArgs& args) {
  return MakeCustomArgs(kAdd, args);
}
CustomArgs Represent(const RepresentArgs* args) {
  return MakeCustomArgs(kRepresent, args);
}

}  // namespace omnikv
