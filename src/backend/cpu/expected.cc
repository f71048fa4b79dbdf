#include "backend/cpu/expected.h"

#include <algorithm>
#include <cmath>

namespace omnikv {
namespace {

constexpr int64_t kTileTokens = 64;   // whose keys are made f32 at a time
constexpr int64_t kAddTogether = 64;  // queries

int64_t Freqs(const float* inv_freq, int32_t n_freq) {
  return inv_freq != nullptr ? n_freq : 0;
}

// Values i < n of `x` in steps of `step`, turned in place: value j with value j + n_freq.
void TurnInPlace(float* x, int64_t step, const double* cos, const double* sin, int64_t n_freq) {
  for (int64_t f = 0; f < n_freq; ++f) {
    const double low = x[f * step];
    const double high = x[(f + n_freq) * step];
    x[f * step] = static_cast<float>(low * cos[f] - high * sin[f]);
    x[(f + n_freq) * step] = static_cast<float>(high * cos[f] + low * sin[f]);
  }
}

// What the moments of a head take: its queries, their sum, a part of it, and sums of products.
int64_t HeadFloats(const QueryMomentsArgs& a) {
  const int64_t products = a.out.covariance != nullptr ? a.dk : 0;
  return (a.n_rows + 2 + products) * PaddedHead(a.dk);
}

}  // namespace

CpuExpected::CpuExpected(ThreadPool& pool, const Isa& isa)
    : pool_(pool), kernels_(GetExpectedKernels(isa)) {}

int64_t CpuExpected::ScratchFloats(const QueryMomentsArgs& a) const {
  return 2 * int64_t{a.n_rows} * Freqs(a.inv_freq, a.n_freq) + pool_.size() * HeadFloats(a);
}

void CpuExpected::Run(const QueryMomentsArgs& a, float* scratch) {
  const SeqMeta& step = *a.steps;
  if (step.q_len == 0) return;
  const int64_t n_freq = Freqs(a.inv_freq, a.n_freq);
  const int64_t padded = PaddedHead(a.dk);
  const int32_t first_pos = step.kv_len - step.q_len;
  const int32_t first = std::clamp(a.skip - first_pos, 0, step.q_len);  // row that counts
  const int32_t n = step.q_len - first;
  float* const cos = scratch;
  float* const sin = cos + n * n_freq;
  float* const of_threads = scratch + 2 * int64_t{a.n_rows} * n_freq;
  pool_.ParallelFor(n, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t f = 0; f < n_freq; ++f) {
        const double angle = static_cast<float>(first_pos + first + r) * a.inv_freq[f];
        cos[r * n_freq + f] = static_cast<float>(std::cos(angle));
        sin[r * n_freq + f] = static_cast<float>(-std::sin(angle));
      }
    }
  });
  const float held = a.accumulate ? static_cast<float>(*a.out.count) : 0;
  const float all = held + static_cast<float>(n);
  const float share = all > 0 ? static_cast<float>(n) / all : 0;  // of the step's queries
  pool_.ParallelFor(a.n_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    float* const rows = of_threads + thread * HeadFloats(a);
    float* const mean = rows + n * padded;
    float* const part = mean + padded;
    float* const products = part + padded;
    for (int64_t h = begin; h < end; ++h) {
      std::fill(mean, part, 0.0f);
      for (int64_t r = 0; r < n; ++r) {
        kernels_.turn(a.q + ((step.q_begin + first + r) * a.n_heads + h) * a.dk, a.dk,
                      cos + r * n_freq, sin + r * n_freq, n_freq, rows + r * padded);
      }
      for (int64_t r = 0; r < n; r += kAddTogether) {
        std::fill_n(part, padded, 0.0f);
        kernels_.add_rows(rows + r * padded, std::min<int64_t>(kAddTogether, n - r), padded, part);
        for (int64_t i = 0; i < padded; ++i) mean[i] += part[i];
      }
      for (int64_t i = 0; i < padded && n > 0; ++i) mean[i] /= static_cast<float>(n);
      if (a.out.covariance != nullptr) {
        kernels_.subtract(rows, n, padded, mean);
        std::fill_n(products, a.dk * padded, 0.0f);
        kernels_.products(rows, n, a.dk, padded, products);
      }
      float* const out = a.out.mean + h * a.dk;
      for (int64_t i = 0; i < a.dk; ++i) {
        const float before = held > 0 ? out[i] : 0;
        mean[i] -= before;
        out[i] = before + mean[i] * share;
      }
      if (a.out.covariance == nullptr) continue;
      float* const to = a.out.covariance + h * a.dk * a.dk;
      for (int64_t i = 0; i < a.dk; ++i) {
        for (int64_t j = i; j < a.dk; ++j) {
          float v = all > 0 ? products[i * padded + j] / all : 0;
          if (held > 0) v += (1 - share) * (to[i * a.dk + j] + share * mean[i] * mean[j]);
          to[i * a.dk + j] = to[j * a.dk + i] = v;
        }
      }
    }
  });
  *a.out.count = static_cast<int32_t>(a.accumulate ? *a.out.count : 0) + n;
}

int64_t CpuExpected::ScratchFloats(const ExpectedScoreArgs& a) const {
  const int64_t padded = PaddedHead(a.kv.dk);
  const int64_t order = a.queries.covariance != nullptr ? a.kv.dk : 0;
  // cos and sin in double, moments that were turned, log-sum-exp, keys.
  return 4 * Freqs(a.inv_freq, a.n_freq) + a.n_heads * (padded * (1 + order) + 1) + 64 +
         pool_.size() * kTileTokens * padded;
}

void CpuExpected::Run(const ExpectedScoreArgs& a, float* scratch) {
  const SeqMeta& seq = *a.seqs;
  if (seq.q_len == 0) return;
  const int64_t dk = a.kv.dk;
  const int64_t padded = PaddedHead(dk);
  const int64_t order = a.queries.covariance != nullptr ? dk : 0;
  const int64_t n_freq = Freqs(a.inv_freq, a.n_freq);
  auto* const cos = reinterpret_cast<double*>(scratch);
  double* const sin = cos + n_freq;
  float* const means = reinterpret_cast<float*>(sin + n_freq);
  float* const covariances = means + a.n_heads * padded;
  float* const keys = covariances + a.n_heads * order * padded;
  float* const lse = keys + pool_.size() * kTileTokens * padded;
  pool_.ParallelFor(n_freq, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t f = begin; f < end; ++f) {
      cos[f] = sin[f] = 0;
      for (int32_t p = a.steps->kv_len; p < a.steps->kv_len + a.future; ++p) {
        const double angle = static_cast<float>(p) * a.inv_freq[f];
        cos[f] += std::cos(angle) / a.future;
        sin[f] += std::sin(angle) / a.future;
      }
    }
  });
  const float square = a.scale * a.scale / 2;
  pool_.ParallelFor(a.n_heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      float* const mean = means + h * padded;
      std::copy_n(a.queries.mean + h * dk, dk, mean);
      std::fill(mean + dk, mean + padded, 0.0f);
      TurnInPlace(mean, 1, cos, sin, n_freq);
      for (int64_t i = 0; i < dk; ++i) mean[i] *= a.scale;
      float* const rows = covariances + h * order * padded;
      for (int64_t i = 0; i < order; ++i) {
        float* const row = rows + i * padded;
        std::copy_n(a.queries.covariance + (h * dk + i) * dk, dk, row);
        std::fill(row + dk, row + padded, 0.0f);
        TurnInPlace(row, 1, cos, sin, n_freq);
        for (int64_t j = 0; j < dk; ++j) row[j] *= square;
      }
      for (int64_t j = 0; j < order; ++j) TurnInPlace(rows + j, padded, cos, sin, n_freq);
    }
  });
  const int32_t sinks = std::min(a.sinks, seq.kv_len);
  const int64_t n = seq.kv_len - sinks;
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const auto for_tiles = [&](const auto& body) {
    pool_.ParallelFor((n + kTileTokens - 1) / kTileTokens, 1,
                      [&](int64_t begin, int64_t end, int thread) {
                        for (int64_t tile = begin; tile < end; ++tile) {
                          const int64_t first = sinks + tile * kTileTokens;
                          body(first, std::min<int64_t>(first + kTileTokens, seq.kv_len), thread);
                        }
                      });
  };
  for_tiles([&](int64_t begin, int64_t end, int thread) {
    float* const of_tile = keys + thread * kTileTokens * padded;
    for (int32_t h = 0; h < a.n_heads; ++h) {
      if (h % group == 0) kernels_.keys(a.kv, seq.table_off, h / group, begin, end, of_tile);
      kernels_.logits(of_tile, end - begin, dk, padded, means + h * padded,
                      order > 0 ? covariances + h * order * padded : nullptr,
                      a.logits + h * a.stride + begin);
    }
  });
  pool_.ParallelFor(n > 0 ? a.n_heads : 0, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      float highest = 0;
      double sum = 0;
      kernels_.exp_sum(a.logits + h * a.stride + sinks, n, &highest, &sum);
      lse[h] = static_cast<float>(highest + std::log(sum));
    }
  });
  for_tiles([&](int64_t begin, int64_t end, int) {
    for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) kernels_.weigh(a, lse, g, begin, end);
  });
  for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
    std::fill_n(a.out + g * a.stride, sinks, kChosenFirst);
  }
}

}  // namespace omnikv
