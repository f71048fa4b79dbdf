#include "backend/cpu/expected_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/expected_kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

constexpr auto kWide = static_cast<int64_t>(kLanes);
constexpr int kTogetherRows = 4;     // of an array that share the loads of another
constexpr int64_t kRowBlock = 256;   // rows that stay in a core's cache
constexpr int64_t kSumBlock = 4096;  // numbers that are added up in f32

void TurnQuery(const float* q, int64_t dk, const float* cos, const float* sin, int64_t n_freq,
               float* out) {
  std::fill(out + 2 * n_freq, out + PaddedHead(dk), 0.0f);
  std::copy(q + 2 * n_freq, q + dk, out + 2 * n_freq);
  for (int64_t f = 0; f < n_freq; f += kWide) {
    const auto left = static_cast<size_t>(n_freq - f);
    const VF c = LoadFloats(cos + f, left);
    const VF s = LoadFloats(sin + f, left);
    const VF low = LoadFloats(q + f, left);
    const VF high = LoadFloats(q + n_freq + f, left);
    StoreFloats(hn::NegMulAdd(high, s, hn::Mul(low, c)), out + f, left);
    StoreFloats(hn::MulAdd(low, s, hn::Mul(high, c)), out + n_freq + f, left);
  }
}

void AddQueries(const float* rows, int64_t n, int64_t padded, float* sums) {
  const DF d;
  for (int64_t j = 0; j < padded; j += kWide) {
    VF sum = hn::LoadU(d, sums + j);
    for (int64_t r = 0; r < n; ++r) sum = hn::Add(sum, hn::LoadU(d, rows + r * padded + j));
    hn::StoreU(sum, d, sums + j);
  }
}

void SubtractMean(float* rows, int64_t n, int64_t padded, const float* mean) {
  const DF d;
  for (int64_t r = 0; r < n; ++r) {
    float* row = rows + r * padded;
    for (int64_t j = 0; j < padded; j += kWide) {
      hn::StoreU(hn::Sub(hn::LoadU(d, row + j), hn::LoadU(d, mean + j)), d, row + j);
    }
  }
}

void QueryProducts(const float* rows, int64_t n, int64_t dim, int64_t padded, float* out) {
  const DF d;
  for (int64_t first = 0; first < n; first += kRowBlock) {
    const int64_t last = std::min(n, first + kRowBlock);
    for (int64_t i = 0; i < dim; i += kTogetherRows) {
      for (int64_t j = i / (2 * kWide) * (2 * kWide); j < padded; j += 2 * kWide) {
        VF sum[kTogetherRows][2];
        for (auto& of : sum) of[0] = of[1] = hn::Zero(d);
        for (int64_t r = first; r < last; ++r) {
          const float* row = rows + r * padded;
          const VF a = hn::LoadU(d, row + j);
          const VF b = hn::LoadU(d, row + j + kWide);
          for (int m = 0; m < kTogetherRows; ++m) {  // padded is a multiple of kTogetherRows
            const VF x = hn::Set(d, row[i + m]);
            sum[m][0] = hn::MulAdd(x, a, sum[m][0]);
            sum[m][1] = hn::MulAdd(x, b, sum[m][1]);
          }
        }
        for (int64_t m = 0; m < std::min<int64_t>(kTogetherRows, dim - i); ++m) {
          float* to = out + (i + m) * padded + j;
          hn::StoreU(hn::Add(hn::LoadU(d, to), sum[m][0]), d, to);
          hn::StoreU(hn::Add(hn::LoadU(d, to + kWide), sum[m][1]), d, to + kWide);
        }
      }
    }
  }
}

template <DType kType>
void LoadKeysOf(const KvView& kv, int32_t table_off, int32_t head, int64_t begin, int64_t end,
                float* out) {
  const auto dk = static_cast<size_t>(kv.dk);
  const auto padded = static_cast<size_t>(PaddedHead(kv.dk));
  for (int64_t t = begin; t < end; ++t, out += padded) {
    const std::byte* key = kv.k.Head(kv.RowIndex(table_off, t), head);
    for (size_t at = 0; at < dk; at += kStep) {
      VF a;
      VF b;
      LoadHeadStep<kType>(key, kv.k.ToScales(head), at, dk, a, b);
      StoreStep<kType>(a, b, out + at, dk - at);
    }
    std::fill(out + dk, out + padded, 0.0f);
  }
}

template <DType kType>
float ValueSquare(const KvView& kv, int64_t row, int32_t head) {
  const DF d;
  const auto dv = static_cast<size_t>(kv.dv);
  VF sum[2] = {hn::Zero(d), hn::Zero(d)};
  for (size_t at = 0; at < dv; at += kStep) {
    VF v[2];
    LoadHeadStep<kType>(kv.v.Head(row, head), kv.v.ToScales(head), at, dv, v[0], v[1]);
    for (int i = 0; i < 2; ++i) sum[i] = hn::MulAdd(v[i], v[i], sum[i]);
  }
  return Sum(hn::Add(sum[0], sum[1]));
}

template <typename Run>
auto WithKvFormat(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kF32:
      return run(std::integral_constant<DType, DType::kF32>());
    case DType::kF16:
      return run(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16:
      return run(std::integral_constant<DType, DType::kBF16>());
    case DType::kQ8_0:
      return run(std::integral_constant<DType, DType::kQ8_0>());
    case DType::kQ4_0:
      break;
  }
  return run(std::integral_constant<DType, DType::kQ4_0>());
}

void LoadKeys(const KvView& kv, int32_t table_off, int32_t head, int64_t begin, int64_t end,
              float* out) {
  WithKvFormat(kv.k.dtype,
               [&](auto format) { LoadKeysOf<format()>(kv, table_off, head, begin, end, out); });
}

void ExpectedLogits(const float* keys, int64_t n, int64_t dim, int64_t padded, const float* mean,
                    const float* covariance, float* logits) {
  const DF d;
  const int64_t rows = covariance != nullptr ? dim : 0;
  for (int64_t t = 0; t < n; t += kTogetherRows) {
    const float* k[kTogetherRows];
    for (int64_t m = 0; m < kTogetherRows; ++m) k[m] = keys + std::min(t + m, n - 1) * padded;
    VF total[kTogetherRows];
    std::fill_n(total, kTogetherRows, hn::Zero(d));
    for (int64_t j = 0; j < padded; j += 2 * kWide) {
      VF sum[kTogetherRows][2];
      for (auto& of : sum) {
        of[0] = hn::LoadU(d, mean + j);
        of[1] = hn::LoadU(d, mean + j + kWide);
      }
      const float* c = covariance + j;
      for (int64_t i = 0; i < rows; ++i, c += padded) {
        const VF a = hn::LoadU(d, c);
        const VF b = hn::LoadU(d, c + kWide);
        for (int m = 0; m < kTogetherRows; ++m) {
          const VF x = hn::Set(d, k[m][i]);
          sum[m][0] = hn::MulAdd(x, a, sum[m][0]);
          sum[m][1] = hn::MulAdd(x, b, sum[m][1]);
        }
      }
      for (int m = 0; m < kTogetherRows; ++m) {
        total[m] = hn::MulAdd(sum[m][0], hn::LoadU(d, k[m] + j), total[m]);
        total[m] = hn::MulAdd(sum[m][1], hn::LoadU(d, k[m] + j + kWide), total[m]);
      }
    }
    float sums[kTogetherRows];
    Sum4(total[0], total[1], total[2], total[3], sums);
    std::copy_n(sums, std::min<int64_t>(kTogetherRows, n - t), logits + t);
  }
}

void LogitSums(const float* logits, int64_t n, float* highest, double* sum) {
  const DF d;
  const float top = *std::max_element(logits, logits + n);
  *highest = top;
  *sum = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = std::min(n, begin + kSumBlock);
    VF part = hn::Zero(d);
    for (int64_t i = begin; i < end; i += kWide) {
      const auto left = static_cast<size_t>(end - i);
      const VF e = Exp(hn::Sub(LoadFloats(logits + i, left), hn::Set(d, top)));
      part = hn::Add(part, left >= kLanes ? e : hn::IfThenElseZero(hn::FirstN(d, left), e));
    }
    *sum += Sum(part);
  }
}

void WeighRows(const ExpectedScoreArgs& a, const float* lse, int32_t g, int64_t begin,
               int64_t end) {
  const DF d;
  const int32_t group = a.n_heads / a.kv.n_kv_heads;
  const VF share = hn::Set(d, 1.0f / static_cast<float>(group));
  float* out = a.out + g * a.stride;
  for (int64_t i = begin; i < end; i += kWide) {
    const auto left = static_cast<size_t>(end - i);
    VF sum = hn::Zero(d);
    for (int32_t h = g * group; h < (g + 1) * group; ++h) {
      const VF logit = LoadFloats(a.logits + h * a.stride + i, left);
      sum = hn::Add(sum, Exp(hn::Sub(logit, hn::Set(d, lse[h]))));
    }
    StoreFloats(hn::Mul(sum, share), out + i, left);
  }
  if (!a.values) return;
  WithKvFormat(a.kv.v.dtype, [&](auto format) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = a.kv.RowIndex(a.seqs->table_off, i);
      out[i] = (out[i] + a.epsilon) * std::sqrt(ValueSquare<format()>(a.kv, row, g));
    }
  });
}

const ExpectedKernels* ExpectedTable() {
  static constexpr ExpectedKernels kTable = {TurnQuery, AddQueries,     SubtractMean, QueryProducts,
                                             LoadKeys,  ExpectedLogits, LogitSums,    WeighRows};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(ExpectedTable);
const ExpectedKernels& GetExpectedKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(ExpectedTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
