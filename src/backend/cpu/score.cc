#include "backend/cpu/score.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/cpu/matvec.h"
#include "backend/kv_format.h"
#include "base/check.h"

namespace omnikv {
namespace {

constexpr int64_t kBlockBytes = 128 << 10;  // of K: what stays in a core's cache from row to row

constexpr int32_t kSummaryTokens = 256;        // worth a thread's start
constexpr int64_t kSummaryValues = 256 << 10;  // products that are
constexpr int64_t kKeyTokens = 1024;           // whose directions are added up together
constexpr int64_t kIndexTokens = 64;           // whose rows are worth a thread's start
constexpr int64_t kPoolGrain = 16 << 10;       // scores

int64_t Blocks(int64_t tokens) {
  return (tokens + kScoreBlock - 1) / kScoreBlock;
}

// Tokens that are scored at a time: whole units.
int64_t BlockTokens(const ScoreArgs& a) {
  const int64_t fit = kBlockBytes / (a.kv.n_kv_heads * KvHeadBytes(a.kv.k.dtype, a.kv.dk));
  return std::max<int64_t>(1, std::clamp<int64_t>(fit, 16, kScoreBlock) / a.unit) * a.unit;
}

}  // namespace

CpuScore::CpuScore(ThreadPool& pool, const Isa& isa)
    : pool_(pool), kernels_(GetScoreKernels(isa)) {}

int64_t CpuScore::ScratchFloats(const ScoreArgs& a) const {
  return ScoringRows(a, a.n_rows) * a.n_heads * KeyFloats(a.kv.dk) +
         pool_.size() * ScoreBlockFloats(a);
}

void CpuScore::Run(const ScoreArgs& a, float* scratch) {
  float* q = scratch + pool_.size() * ScoreBlockFloats(a);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta& seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    const ScoreJob job{.args = &a,
                       .seq = s,
                       .n_rows = ScoringRows(a, seq.q_len),
                       .q = q,
                       .q_stride = KeyFloats(a.kv.dk)};
    const int64_t first = int64_t{seq.q_begin} + seq.q_len - job.n_rows;
    for (int64_t i = 0; i < int64_t{job.n_rows} * a.n_heads; ++i) {
      kernels_.pack_query(a.kv.k.dtype, a.q + (first * a.n_heads + i) * a.kv.dk, a.kv.dk,
                          job.q_stride, q + i * job.q_stride);
    }
    const int64_t tokens = BlockTokens(a);
    pool_.ParallelFor(
        (seq.kv_len + tokens - 1) / tokens, 1, [&](int64_t begin, int64_t end, int thread) {
          for (int64_t b = begin; b < end; ++b) {
            kernels_.block(job, b * tokens, std::min<int64_t>((b + 1) * tokens, seq.kv_len),
                           scratch + thread * ScoreBlockFloats(a));
          }
        });
  }
}

void CpuScore::Run(const BlockSummaryArgs& a) {
  const int64_t grain = std::max(1, kSummaryTokens / a.unit);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const UnitRange units = CompletedUnits(a.seqs[s], a.unit);
    pool_.ParallelFor(units.end - units.begin, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t u = begin; u < end; ++u) kernels_.summary(a, s, units.begin + u);
    });
  }
}

void CpuScore::Run(const BlockScoreArgs& a) {
  const int64_t grain =
      std::max<int64_t>(1, kSummaryValues / (int64_t{SummaryArrays(a.kind)} * a.n_heads * a.dk));
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    if (a.seqs[s].q_len == 0) continue;
    pool_.ParallelFor(
        (int64_t{a.seqs[s].kv_len} + a.unit - 1) / a.unit, grain,
        [&](int64_t begin, int64_t end, int) { kernels_.block_score(a, s, begin, end); });
  }
}

int64_t CpuScore::ScratchFloats(const KeyScoreArgs& a) const {
  if (a.kind != KeyScoreKind::kUnlike) return 0;
  return (a.stride + kKeyTokens - 1) / kKeyTokens * a.kv.n_kv_heads * KeyFloats(a.kv.dk);
}

void CpuScore::Run(const KeyScoreArgs& a, float* scratch) {
  const int64_t floats = a.kv.n_kv_heads * KeyFloats(a.kv.dk);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int64_t n = a.seqs[s].kv_len;
    if (a.seqs[s].q_len == 0) continue;
    const int64_t parts = (n + kKeyTokens - 1) / kKeyTokens;
    const auto for_parts = [&](const auto& body) {
      pool_.ParallelFor(parts, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t p = begin; p < end; ++p) {
          body(p, p * kKeyTokens, std::min<int64_t>((p + 1) * kKeyTokens, n));
        }
      });
    };
    if (a.kind == KeyScoreKind::kUnlike) {
      for_parts([&](int64_t p, int64_t begin, int64_t end) {
        kernels_.key_directions(a, s, begin, end, scratch + p * floats);
      });
      for (int64_t p = 1; p < parts; ++p) {  // in order, whatever the threads
        for (int64_t i = 0; i < floats; ++i) scratch[i] += scratch[p * floats + i];
      }
      const int64_t values = KeyFloats(a.kv.dk);
      for (float* mean = scratch; mean != scratch + floats; mean += values) {
        const float norm = std::sqrt(std::inner_product(mean, mean + values, mean, 0.0f));
        for (int64_t i = 0; i < values && norm > 0; ++i) mean[i] /= norm;
      }
    }
    for_parts([&](int64_t, int64_t begin, int64_t end) {
      kernels_.key_score(a, s, begin, end, scratch);
    });
  }
}

void CpuScore::Run(const IndexKeysArgs& a) {
  OKV_CHECK(a.kv.dk <= kIndexDim, "heads of {}", a.kv.dk);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const int64_t first = int64_t{a.seqs[s].kv_len} - a.seqs[s].q_len;
    pool_.ParallelFor(a.seqs[s].q_len, kIndexTokens, [&](int64_t begin, int64_t end, int) {
      kernels_.index_keys(a, s, first + begin, first + end);
    });
  }
}

int64_t CpuScore::ScratchFloats(const IndexScoreArgs& a) const {
  return a.n_heads * (2 * HalfFloats(a.dk) + 2 * Blocks(a.stride * a.unit));
}

void CpuScore::Run(const IndexScoreArgs& a, float* scratch) {
  const int64_t padded = HalfFloats(a.dk);
  const int64_t half = a.dk / 2;
  float* const q = scratch;
  auto* const sums = reinterpret_cast<ExpSum*>(scratch + a.n_heads * 2 * padded);
  for (int32_t r = 0; r < a.n_rows; ++r) {
    std::fill_n(q, a.n_heads * 2 * padded, 0.0f);
    for (int64_t i = 0; i < 2 * int64_t{a.n_heads}; ++i) {
      std::copy_n(a.q + int64_t{r} * a.n_heads * a.dk + i * half, half, q + i * padded);
    }
    const int64_t n = SomeTokens::Of(a.only, a.rows[r], 1, 0).size();
    pool_.ParallelFor(Blocks(n), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) {
        kernels_.index_score(a, r, b * kScoreBlock, std::min((b + 1) * kScoreBlock, n), q,
                             sums + b * a.n_heads);
      }
    });
    if (a.only.index != nullptr) continue;
    for (int32_t h = 0; h < a.n_heads; ++h) {  // in order, whatever the threads
      float top = sums[h].top;
      for (int64_t b = 1; b < Blocks(n); ++b) top = std::max(top, sums[b * a.n_heads + h].top);
      float sum = 0;
      for (int64_t b = 0; b < Blocks(n); ++b) {
        const ExpSum& of = sums[b * a.n_heads + h];
        sum += of.sum * std::exp(of.top - top);
      }
      a.lse[int64_t{r} * a.n_heads + h] = top + std::log(sum);
    }
  }
}

int64_t CpuScore::ScratchFloats(const RescoreArgs& a) const {
  return a.n_heads * (KeyFloats(a.kv.dk) + 2 * (Blocks(a.stride) + 1));
}

void CpuScore::Run(const RescoreArgs& a, float* scratch) {
  const int64_t floats = KeyFloats(a.kv.dk);
  float* const q = scratch;
  auto* const sums = reinterpret_cast<ExpChange*>(scratch + a.n_heads * floats);
  const int32_t list_heads = a.n_heads / a.lists;
  for (int32_t r = 0; r < a.n_rows; ++r) {
    for (int32_t h = 0; h < a.n_heads; ++h) {
      kernels_.pack_query(a.kv.k.dtype, a.q + (int64_t{r} * a.n_heads + h) * a.kv.dk, a.kv.dk,
                          floats, q + h * floats);
    }
    for (int32_t l = 0; l < a.lists; ++l) {
      const int32_t n = SomeTokens::Of(a.tokens, a.rows[r], a.lists, l).size();
      pool_.ParallelFor(Blocks(n), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t b = begin; b < end; ++b) {
          const auto first = static_cast<int32_t>(b * kScoreBlock);
          kernels_.rescore(a, r, l, first, std::min(first + kScoreBlock, n), q,
                           sums + b * a.n_heads);
        }
      });
      for (int32_t h = l * list_heads; h < (l + 1) * list_heads; ++h) {
        ExpChange all = {0, 0};
        for (int64_t b = 0; b < Blocks(n); ++b) {
          all.before += sums[b * a.n_heads + h].before;
          all.after += sums[b * a.n_heads + h].after;
        }
        a.lse[int64_t{r} * a.n_heads + h] += std::log(std::max(0.0f, 1 - all.before) + all.after);
      }
    }
  }
}

void CpuScore::Run(const AgedScoresArgs& a) {
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    const int32_t s = list / a.lists;
    if (a.seqs[s].q_len == 0) continue;
    pool_.ParallelFor(a.seqs[s].kv_len, kPoolGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        a.out[list * a.stride + i] = AgedScore(a, s, list % a.lists, static_cast<int32_t>(i));
      }
    });
  }
}

void CpuScore::Run(const PoolArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    for (int32_t l = 0; l < a.lists; ++l) {
      pool_.ParallelFor(a.n[s], kPoolGrain, [&](int64_t begin, int64_t end, int) {
        kernels_.pool(a, s, l, begin, end);
      });
    }
  }
}

}  // namespace omnikv
