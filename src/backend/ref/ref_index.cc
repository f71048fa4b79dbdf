#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"

namespace omnikv {
namespace {

double Softcapped(double logit, float softcap) {
  return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit;
}

}  // namespace

void RefIndexKeys(const IndexKeysArgs& a) {
  const int32_t half = a.kv.dk / 2;
  for (int32_t s = 0; s < a.n_seqs; ++s) {
    const SeqMeta seq = a.seqs[s];
    for (int32_t t = seq.kv_len - seq.q_len; t < seq.kv_len; ++t) {
      auto* row = a.out.Row<uint8_t>(seq.table_off, t);
      for (int32_t g = 0; g < a.kv.n_kv_heads; ++g) {
        const std::byte* k = a.kv.k.Head(a.kv.RowIndex(seq.table_off, t), g);
        std::vector<float> values;
        for (int32_t i = 0; i < a.kv.dk; ++i) {
          values.push_back(LoadKvValue(a.kv.k, g, k, static_cast<size_t>(i)));
        }
        const auto ends = std::minmax_element(values.begin(), values.end());
        const float low = *ends.first;
        const float high = *ends.second;
        const IndexRange range = RangeOf(low, high);
        const float zero = range.zero();
        const float codes = range.CodesAUnit();
        const auto code = [&](int32_t i) {
          const float c = std::nearbyint((values[static_cast<size_t>(i)] - zero) * codes);
          return static_cast<uint8_t>(c > 0 ? std::min<float>(c, kIndexTop) : 0.0f);
        };
        for (int32_t i = 0; i < half; ++i) {
          row[g * half + i] = static_cast<uint8_t>(code(i) | code(i + half) << 4);
        }
        std::memcpy(row + IndexRangesAt(a.kv.n_kv_heads, a.kv.dk) + g * int64_t{sizeof(range)},
                    &range, sizeof(range));
      }
    }
  }
}

void RefIndexScore(const IndexScoreArgs& a) {
  const int32_t half = a.dk / 2;
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const RowMeta row = a.rows[r];
    for (int32_t h = 0; h < a.n_heads; ++h) {
      const int32_t g = h / (a.n_heads / a.n_kv_heads);
      const int64_t row_head = int64_t{r} * a.n_heads + h;
      const float* q = a.q + row_head * a.dk;
      double top = -INFINITY;
      std::vector<double> all;
      const SomeTokens::Of tokens(a.only, row, 1, 0);
      for (int32_t item = 0; item < tokens.size(); ++item) {
        const int32_t t = tokens.At(item);
        const auto* from = a.index.Row<const uint8_t>(a.seqs[row.seq].table_off, t);
        IndexRange range;
        std::memcpy(&range, from + IndexRangesAt(a.n_kv_heads, a.dk) + g * int64_t{sizeof(range)},
                    sizeof(range));
        double dot = 0;
        for (int32_t i = 0; i < a.dk; ++i) {
          const uint8_t both = from[g * half + i % half];
          const int code = i < half ? both & 15 : both >> 4;
          dot += q[i] * (double{range.zero()} + double{range.scale()} * code);
        }
        all.push_back(Softcapped(dot * a.scale, a.softcap));
        const auto logit = static_cast<float>(all.back());
        float& out = a.logits[LogitAt(a, r, h, t / a.unit)];
        out = t % a.unit == 0 ? logit : std::max(out, logit);
        top = std::max(top, all.back());
      }
      if (a.only.index != nullptr) continue;
      double sum = 0;
      for (const double logit : all) sum += std::exp(logit - top);
      a.lse[row_head] = static_cast<float>(top + std::log(sum));
    }
  }
}

void RefRescore(const RescoreArgs& a) {
  const int32_t list_heads = a.n_heads / a.lists;
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const RowMeta row = a.rows[r];
    for (int32_t h = 0; h < a.n_heads; ++h) {
      const int32_t g = h / (a.n_heads / a.kv.n_kv_heads);
      const int64_t row_head = int64_t{r} * a.n_heads + h;
      const float* q = a.q + row_head * a.kv.dk;
      const SomeTokens::Of tokens(a.tokens, row, a.lists, h / list_heads);
      const double lse = a.lse[row_head];
      double before = 0;
      double after = 0;
      for (int32_t i = 0; i < tokens.size(); ++i) {
        const int32_t t = tokens.At(i);
        const std::byte* k = a.kv.k.Head(a.kv.RowIndex(a.seqs[row.seq].table_off, t), g);
        double dot = 0;
        for (int32_t d = 0; d < a.kv.dk; ++d) {
          dot += static_cast<double>(q[d]) * LoadKvValue(a.kv.k, g, k, static_cast<size_t>(d));
        }
        const double w = Softcapped(dot * a.scale, a.softcap);
        float& logit = a.logits[LogitAt(a, r, h, t)];
        before += std::exp(logit - lse);
        after += std::exp(w - lse);
        logit = static_cast<float>(w);
      }
      a.lse[row_head] = static_cast<float>(lse + std::log(std::max(0.0, 1 - before) + after));
    }
  }
}

}  // namespace omnikv
