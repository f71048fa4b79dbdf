// Kernels of the moments of queries, and of the scores by them.
#pragma once

#include <cstdint>

#include "backend/cpu/isa.h"
#include "backend/cpu/matvec.h"
#include "backend/ops.h"
#include "base/round.h"

namespace omnikv {

// Floats of a head's values in the arrays of these kernels, zeros behind them.
inline constexpr int64_t PaddedHead(int64_t d) {
  return RoundUp(d, kPackMultiple);
}

struct ExpectedKernels {
  // out[0, padded) = q turned by angles with the cosines `cos` and the sines `sin`, [n_freq] each:
  // value j with value j + n_freq; then zeros.
  void (*turn)(const float* q, int64_t dk, const float* cos, const float* sin, int64_t n_freq,
               float* out);
  // sums[0, padded) += rows [n, padded].
  void (*add_rows)(const float* rows, int64_t n, int64_t padded, float* sums);
  // rows [n, padded] -= mean [padded].
  void (*subtract)(float* rows, int64_t n, int64_t padded, const float* mean);
  // out[i][j] += sum over rows r of rows[r][i] * rows[r][j], for i < d and at least all j >= i; of
  // rows [n, padded], out [d, padded].
  void (*products)(const float* rows, int64_t n, int64_t d, int64_t padded, float* out);
  // out [end - begin, padded]: head `head` of the keys of rows [begin, end) in f32, zeros behind.
  void (*keys)(const KvView& kv, int32_t table_off, int32_t head, int64_t begin, int64_t end,
               float* out);
  // logits[i] = mean·k + k·Ck of key i, keys [n, padded], mean [padded], C [d, padded] or null.
  void (*logits)(const float* keys, int64_t n, int64_t d, int64_t padded, const float* mean,
                 const float* covariance, float* logits);
  // The highest of n numbers, and the sum of exp(number - highest). REQUIRES n > 0.
  void (*exp_sum)(const float* logits, int64_t n, float* highest, double* sum);
  // Scores of rows [begin, end) of KV head g, none of them a sink; lse [n_heads].
  void (*weigh)(const ExpectedScoreArgs& a, const float* lse, int32_t g, int64_t begin,
                int64_t end);
};

const ExpectedKernels& GetExpectedKernels(const Isa& isa);

}  // namespace omnikv
