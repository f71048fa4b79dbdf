#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"

namespace omnikv {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// w[r][h][t] of ops.h.
double TokenScore(const ScoreArgs& a, const SeqMeta& seq, int64_t row, int32_t head, int64_t t) {
  const float* q = a.q + (row * a.n_heads + head) * a.kv.dk;
  const int32_t kv_head = head / (a.n_heads / a.kv.n_kv_heads);
  const std::byte* k = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
  double dot = 0;
  for (int32_t d = 0; d < a.kv.dk; ++d) {
    dot += static_cast<double>(q[d]) * LoadKvValue(a.kv.k, kv_head, k, static_cast<size_t>(d));
  }
  double logit = dot * a.scale;
  if (a.softcap > 0) logit = a.softcap * std::tanh(logit / a.softcap);
  return a.lse != nullptr ? std::exp(logit - a.lse[row * a.n_heads + head]) : logit;
}

// One score of those of n heads.
double Reduced(HeadReduce reduce, const std::vector<double>& heads) {
  if (reduce == HeadReduce::kMax) return *std::max_element(heads.begin(), heads.end());
  double sum = 0;
  for (const double v : heads) sum += v;
  return reduce == HeadReduce::kMean ? sum / static_cast<double>(heads.size()) : sum;
}

double Norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}

}  // namespace

void RefScore(const ScoreArgs& a) {
  const int32_t list_heads = a.n_heads / a.lists;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    const int32_t first_age = ScoringRows(a, seq.q_len) - 1;
    for (int32_t l = 0; l < a.lists; ++l) {
      float* out = ScoresOf(a, s, l, /*held=*/false);
      const float* before = ScoresOf(a, s, l, /*held=*/true);
      for (int64_t u = 0; u * a.unit < seq.kv_len; ++u) {
        double best = kNegInf;
        for (int64_t t = u * a.unit; t < std::min<int64_t>((u + 1) * a.unit, seq.kv_len); ++t) {
          double f = a.queries == QueryReduce::kMax ? kNegInf : 0;
          for (int32_t age = first_age; age >= 0; --age) {
            if (t > seq.kv_len - 1 - age) continue;
            std::vector<double> w;
            for (int32_t h = 0; h < list_heads; ++h) {
              w.push_back(TokenScore(a, seq, int64_t{seq.q_begin} + seq.q_len - 1 - age,
                                     l * list_heads + h, t));
            }
            const double g = Reduced(a.heads, w);
            if (a.queries == QueryReduce::kMax) f = std::max(f, g);
            if (a.queries == QueryReduce::kDecay) f += std::pow(double{a.decay}, age) * g;
            if (a.queries == QueryReduce::kSum || a.queries == QueryReduce::kLast) f += g;
          }
          best = std::max(best, f);
        }
        if (a.accumulate && u * a.unit < seq.kv_len - seq.q_len) {
          const double held = before[u];
          if (a.queries == QueryReduce::kMax) {
            best = std::max(best, held);
          } else {
            best += a.queries == QueryReduce::kDecay ? std::pow(double{a.decay}, seq.q_len) * held
                                                     : held;
          }
        }
        out[u] = static_cast<float>(best);
      }
    }
  }
}

void RefBlockSummary(const BlockSummaryArgs& a) {
  const int64_t width = int64_t{a.kv.n_kv_heads} * a.kv.dk;
  const int32_t arrays = SummaryArrays(a.kind);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    const auto [begin, end] = CompletedUnits(seq, a.unit);
    for (int64_t u = begin; u < end; ++u) {
      auto* out = a.out.Row<std::byte>(seq.table_off, static_cast<int32_t>(u));
      const auto store = [&](int64_t i, double v) {
        StoreFromF32(a.format, out, static_cast<size_t>(i), static_cast<float>(v));
      };
      for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        double low = -kNegInf;
        double high = kNegInf;
        std::vector<double> values;
        for (int64_t t = u * a.unit; t < (u + 1) * a.unit; t += a.every) {
          const auto kv_head = static_cast<int32_t>(i / a.kv.dk);
          const std::byte* k = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), kv_head);
          const double v = LoadKvValue(a.kv.k, kv_head, k, static_cast<size_t>(i % a.kv.dk));
          values.push_back(v);
          sum += v;
          low = std::min(low, v);
          high = std::max(high, v);
        }
        const auto n = static_cast<double>(values.size());
        const double mean = sum / n;
        if (a.kind == SummaryKind::kMeanStd) {
          for (double& v : values) v -= mean;
          const double deviation = Norm(values) / std::sqrt(n);
          low = mean - deviation;
          high = mean + deviation;
        }
        store(i, a.kind == SummaryKind::kMean ? mean : a.kind == SummaryKind::kMax ? high : low);
        if (arrays == 2) store(width + i, high);
      }
    }
  }
}

void RefBlockScore(const BlockScoreArgs& a) {
  const int64_t width = int64_t{a.n_kv_heads} * a.dk;
  const int32_t arrays = SummaryArrays(a.kind);
  const int32_t group = a.n_heads / a.n_kv_heads;
  const int32_t list_heads = a.n_heads / a.lists;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    const float* q = a.q + (int64_t{seq.q_begin} + seq.q_len - 1) * a.n_heads * a.dk;
    for (int32_t u = 0; u < UnitsOf(seq.kv_len, a.unit); ++u) {
      const auto* row = a.summaries.Row<const std::byte>(seq.table_off, u);
      const auto load = [&](int64_t i) { return LoadAsF32(a.format, row, static_cast<size_t>(i)); };
      for (int32_t l = 0; l < a.lists; ++l) {
        std::vector<double> w;
        for (int32_t h = l * list_heads; h < (l + 1) * list_heads; ++h) {
          const int64_t of = int64_t{h / group} * a.dk;
          double sum = 0;
          for (int32_t i = 0; i < a.dk; ++i) {
            const double v = q[int64_t{h} * a.dk + i];
            sum += arrays == 1 ? v * load(of + i)
                               : std::max(v * load(of + i), v * load(of + width + i));
          }
          w.push_back(sum * a.scale);
        }
        a.out[(int64_t{s} * a.lists + l) * a.stride + u] =
            u < a.sinks ? kChosenFirst : static_cast<float>(Reduced(a.heads, w));
      }
    }
  }
}

void RefKeyScore(const KeyScoreArgs& a) {
  const auto dk = static_cast<size_t>(a.kv.dk);
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    if (seq.q_len == 0) continue;
    for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
      const auto key = [&](int64_t t) {
        const std::byte* k = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), g);
        std::vector<double> values;
        for (size_t i = 0; i < dk; ++i) values.push_back(LoadKvValue(a.kv.k, g, k, i));
        return values;
      };
      std::vector<double> mean(dk);
      for (int64_t t = 0; a.kind == KeyScoreKind::kUnlike && t < seq.kv_len; ++t) {
        const std::vector<double> k = key(t);
        const double norm = Norm(k);
        for (size_t i = 0; i < dk && norm > 0; ++i) mean[i] += k[i] / norm / seq.kv_len;
      }
      const double mean_norm = Norm(mean);
      float* out = a.out + (int64_t{s} * a.kv.n_kv_heads + g) * a.stride;
      for (int64_t t = 0; t < seq.kv_len; ++t) {
        const std::vector<double> k = key(t);
        double score = Norm(k);
        if (a.kind == KeyScoreKind::kUnlike) {
          const double norms = score * mean_norm;
          double dot = 0;
          for (size_t i = 0; i < dk; ++i) dot += k[i] * mean[i];
          score = norms > 0 ? dot / norms : 0;
        }
        out[t] = static_cast<float>(-score);
      }
    }
  }
}

void RefAgedScores(const AgedScoresArgs& a) {
  for (int32_t list = 0; list < a.n_seqs * a.lists; ++list) {
    const int32_t s = list / a.lists;
    if (a.seqs[s].q_len == 0) continue;
    for (int32_t i = 0; i < a.seqs[s].kv_len; ++i) {
      a.out[list * a.stride + i] = AgedScore(a, s, list % a.lists, i);
    }
  }
}

void RefPool(const PoolArgs& a) {
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    for (int32_t l = 0; l < a.lists; ++l) {
      const int64_t list = (int64_t{s} * a.lists + l) * a.stride;
      for (int32_t i = 0; i < a.n[s]; ++i) {
        double sum = 0;
        double best = kNegInf;
        for (int32_t j = i - a.kernel / 2; j <= i + a.kernel / 2; ++j) {
          if (j < 0 || j >= a.n[s]) continue;
          sum += a.in[list + j];
          best = std::max<double>(best, a.in[list + j]);
        }
        a.out[list + i] = static_cast<float>(a.kind == PoolKind::kMax ? best : sum / a.kernel);
      }
    }
  }
}

}  // namespace omnikv
