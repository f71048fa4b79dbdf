#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"

namespace omnikv {
namespace {

using Values = std::vector<double>;

// The value of `x` that takes part in the rotation of value i, or i itself where it is not rotated.
size_t PartnerOf(size_t i, size_t n_freq) {
  if (i >= 2 * n_freq) return i;
  return i < n_freq ? i + n_freq : i - n_freq;
}

// x turned by angles of which the cosines and sines are given: value j with value j + n_freq.
Values Turned(const Values& x, const Values& cos, const Values& sin) {
  const size_t n_freq = cos.size();
  Values out = x;
  for (size_t i = 0; i < 2 * n_freq; ++i) {
    const size_t f = i % n_freq;
    const double partner = x[PartnerOf(i, n_freq)];
    out[i] = x[i] * cos[f] + partner * (i < n_freq ? -sin[f] : sin[f]);
  }
  return out;
}

double Angle(const float* inv_freq, size_t f, int32_t position) {
  return static_cast<float>(position) * inv_freq[f];
}

// Those queries of head h of the step that count, before their rotation.
std::vector<Values> QueriesOf(const QueryMomentsArgs& a, int32_t h) {
  const SeqMeta& step = *a.steps;
  const auto n_freq = static_cast<size_t>(a.inv_freq != nullptr ? a.n_freq : 0);
  std::vector<Values> queries;
  for (int32_t r = 0; r < step.q_len; ++r) {
    const int32_t position = step.kv_len - step.q_len + r;
    if (position < a.skip) continue;
    Values cos(n_freq);
    Values sin(n_freq);
    for (size_t f = 0; f < n_freq; ++f) {
      cos[f] = std::cos(Angle(a.inv_freq, f, position));
      sin[f] = -std::sin(Angle(a.inv_freq, f, position));
    }
    const float* q = a.q + ((int64_t{step.q_begin} + r) * a.n_heads + h) * a.dk;
    queries.push_back(Turned(Values(q, q + a.dk), cos, sin));
  }
  return queries;
}

}  // namespace

void RefQueryMoments(const QueryMomentsArgs& a) {
  if (a.steps->q_len == 0) return;
  const auto dk = static_cast<size_t>(a.dk);
  const double held = a.accumulate ? *a.out.count : 0;
  double all = held;
  for (int32_t h = 0; h < a.n_heads; ++h) {
    const std::vector<Values> queries = QueriesOf(a, h);
    const auto n = static_cast<double>(queries.size());
    all = held + n;
    Values mean(dk);
    for (const Values& q : queries) {
      for (size_t i = 0; i < dk; ++i) mean[i] += q[i] / n;
    }
    float* mean_out = a.out.mean + h * a.dk;
    Values apart(dk);  // of the two means
    for (size_t i = 0; i < dk; ++i) {
      const double before = held > 0 ? mean_out[i] : 0;
      apart[i] = mean[i] - before;
      mean_out[i] = static_cast<float>(all > 0 ? before + apart[i] * n / all : 0);
    }
    if (a.out.covariance == nullptr) continue;
    float* out = a.out.covariance + int64_t{h} * a.dk * a.dk;
    for (size_t i = 0; i < dk; ++i) {
      for (size_t j = 0; j < dk; ++j) {
        double sum = held > 0 ? held * out[i * dk + j] + held * n / all * apart[i] * apart[j] : 0;
        for (const Values& q : queries) sum += (q[i] - mean[i]) * (q[j] - mean[j]);
        out[i * dk + j] = static_cast<float>(all > 0 ? sum / all : 0);
      }
    }
  }
  *a.out.count = static_cast<int32_t>(all);
}

void RefExpectedScore(const ExpectedScoreArgs& a) {
  const SeqMeta& seq = *a.seqs;
  if (seq.q_len == 0) return;
  const auto dk = static_cast<size_t>(a.kv.dk);
  const auto n_freq = static_cast<size_t>(a.inv_freq != nullptr ? a.n_freq : 0);
  Values cos(n_freq);
  Values sin(n_freq);
  for (int32_t p = a.steps->kv_len; p < a.steps->kv_len + a.future; ++p) {
    for (size_t f = 0; f < n_freq; ++f) {
      cos[f] += std::cos(Angle(a.inv_freq, f, p)) / a.future;
      sin[f] += std::sin(Angle(a.inv_freq, f, p)) / a.future;
    }
  }
  const auto values_of = [&](const KvPlane& plane, int32_t d, int32_t g, int64_t i) {
    const std::byte* head = plane.Head(a.kv.RowIndex(seq.table_off, i), g);
    Values values;
    for (int32_t j = 0; j < d; ++j) {
      values.push_back(LoadKvValue(plane, g, head, static_cast<size_t>(j)));
    }
    return values;
  };
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const int32_t sinks = std::min(a.sinks, seq.kv_len);
  for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
    Values expected(static_cast<size_t>(seq.kv_len));
    for (int32_t h = g * group; h < (g + 1) * group; ++h) {
      const float* of = a.queries.mean + h * a.kv.dk;
      const Values mean = Turned(Values(of, of + dk), cos, sin);
      std::vector<Values> covariance;
      if (a.queries.covariance != nullptr) {
        // Rows, then columns.
        const float* c = a.queries.covariance + int64_t{h} * a.kv.dk * a.kv.dk;
        for (size_t i = 0; i < dk; ++i, c += dk) {
          covariance.push_back(Turned(Values(c, c + dk), cos, sin));
        }
        for (size_t j = 0; j < dk; ++j) {
          Values column;
          for (const Values& row : covariance) column.push_back(row[j]);
          column = Turned(column, cos, sin);
          for (size_t i = 0; i < dk; ++i) covariance[i][j] = column[i];
        }
      }
      Values logits(expected.size());
      double top = -std::numeric_limits<double>::infinity();
      for (int32_t i = sinks; i < seq.kv_len; ++i) {
        const Values k = values_of(a.kv.k, a.kv.dk, g, i);
        double dot = 0;
        double square = 0;
        for (size_t j = 0; j < dk; ++j) {
          dot += mean[j] * k[j];
          for (size_t l = 0; l < covariance.size(); ++l) square += k[j] * covariance[j][l] * k[l];
        }
        const double scale = a.scale;
        const double logit = scale * dot + scale * scale / 2 * square;
        logits[static_cast<size_t>(i)] = logit;
        top = std::max(top, logit);
        a.logits[h * a.stride + i] = static_cast<float>(logit);
      }
      double sum = 0;
      for (int32_t i = sinks; i < seq.kv_len; ++i) {
        sum += std::exp(logits[static_cast<size_t>(i)] - top);
      }
      for (int32_t i = sinks; i < seq.kv_len; ++i) {
        const auto at = static_cast<size_t>(i);
        expected[at] += std::exp(logits[at] - top) / sum / group;
      }
    }
    for (int32_t i = 0; i < seq.kv_len; ++i) {
      double score = expected[static_cast<size_t>(i)];
      if (a.values) {
        double square = 0;
        for (const double v : values_of(a.kv.v, a.kv.dv, g, i)) square += v * v;
        score = (score + a.epsilon) * std::sqrt(square);
      }
      a.out[g * a.stride + i] = i < sinks ? kChosenFirst : static_cast<float>(score);
    }
  }
}

}  // namespace omnikv
