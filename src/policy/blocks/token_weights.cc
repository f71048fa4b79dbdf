#include <algorithm>
#include <vector>

#include "policy/blocks/host_forms.h"

namespace omnikv {
namespace {

template <typename For>
void RunTokenWeights(const TokenWeightsArgs& a, const For& for_each) {
  const SeqMeta seq = a.seqs[0];
  const int32_t n = seq.kv_len;
  const int32_t window = std::min(a.window, seq.q_len);
  const int32_t first = seq.q_begin + seq.q_len - window;
  const auto scale = std::bit_cast<float>(a.scale_bits);
  const auto softcap = std::bit_cast<float>(a.softcap_bits);
  for_each(a.n_heads, [&](int64_t h) {
    const auto head = static_cast<int32_t>(h);
    std::vector<float> key(static_cast<size_t>(a.dk));
    const auto logit = [&](int32_t r) {
      const float* q = a.q + (int64_t{first + r} * a.n_heads + h) * a.dk;
      double dot = 0;
      for (int32_t i = 0; i < a.dk; ++i) dot += double{q[i]} * key[static_cast<size_t>(i)];
      const double value = dot * scale;
      return softcap > 0 ? softcap * std::tanh(value / softcap) : value;
    };
    const auto load = [&](int32_t t) {
      LoadKey(a.k, seq.table_off, t, head / (a.n_heads / a.n_kv_heads), a.dk, key.data());
    };
    const double inf = std::numeric_limits<double>::infinity();
    std::vector<double> top(static_cast<size_t>(window), -inf), sum(top.size());
    for (int32_t t = 0; t < n; ++t) {
      load(t);
      for (size_t r = 0; r < top.size(); ++r) {
        const double value = logit(static_cast<int32_t>(r));
        if (value > top[r]) {
          sum[r] *= std::exp(top[r] - value);
          top[r] = value;
        }
        sum[r] += std::exp(value - top[r]);
      }
    }
    for (int32_t t = 0; t < n; ++t) {
      load(t);
      double weight = 0;
      for (size_t r = 0; r < top.size(); ++r) {
        weight += std::exp(logit(static_cast<int32_t>(r)) - top[r]) / sum[r];
      }
      a.out[h * a.stride + t] = static_cast<float>(weight);
    }
  });
}

OMNIKV_BLOCK_OP(kTokenWeights, "BlocksTokenWeights", TokenWeightsArgs, RunTokenWeights,
                TokenWeightsCuda, TokenWeightsCost);

}  // namespace

CustomArgs TokenWeights(const TokenWeightsArgs& args) {
  return MakeCustomArgs(kTokenWeights, args);
}

}  // namespace omnikv
