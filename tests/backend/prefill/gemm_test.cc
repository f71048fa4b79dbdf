// Prefill products against loops in double, for every weight format, instruction set and number of
// threads.
#include "backend/cpu/prefill/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "backend/cpu/prefill/bf16_kernels.h"
#include "backend/cpu/prefill/gemm_peak.h"
#include "backend/cpu/prefill/onednn.h"
#include "prefill_test_util.h"

namespace omnikv::gemm_test {
namespace {

constexpr DType kFormats[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};

// y = x wᵀ + bias in double; `rounded` rounds both factors to bf16 first.
std::vector<double> Reference(const std::vector<float>& x, int64_t m, int64_t ldx,
                              const TestWeight& w, const float* bias, bool rounded) {
  const auto value = [&](float v) { return rounded ? F32FromBf16(Bf16FromF32(v)) : v; };
  std::vector<double> y(static_cast<size_t>(m * w.ref.n_out));
  for (int64_t o = 0; o < w.ref.n_out; ++o) {
    std::vector<double> row(static_cast<size_t>(w.ref.n_in));
    for (int64_t i = 0; i < w.ref.n_in; ++i) row[static_cast<size_t>(i)] = value(w.At(o, i));
    for (int64_t r = 0; r < m; ++r) {
      double sum = bias != nullptr ? bias[o] : 0;
      for (int64_t i = 0; i < w.ref.n_in; ++i) {
        sum += row[static_cast<size_t>(i)] * value(x[static_cast<size_t>(r * ldx + i)]);
      }
      y[static_cast<size_t>(r * w.ref.n_out + o)] = sum;
    }
  }
  return y;
}

// max |y - reference| / max |reference|
double Error(const std::vector<float>& y, int64_t m, int64_t n, int64_t ldy,
             const std::vector<double>& reference) {
  double top = 0;
  double worst = 0;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t o = 0; o < n; ++o) {
      const double want = reference[static_cast<size_t>(r * n + o)];
      const double delta = std::abs(y[static_cast<size_t>(r * ldy + o)] - want);
      top = std::max(top, std::abs(want));
      worst = std::isnan(delta) ? std::numeric_limits<double>::infinity() : std::max(worst, delta);
    }
  }
  return worst / top;
}

std::vector<float> Poisoned(int64_t n) {
  return std::vector<float>(static_cast<size_t>(n), std::numeric_limits<float>::quiet_NaN());
}

bool Rounds(const PrefillGemm& gemm, DType format) {
  return gemm.Describe(format).ends_with("bf16");
}

// Runs the engines of a table of cases on this machine: our own kernels, and the library.
constexpr GemmLibrary kEngines[] = {GemmLibrary::kNever, GemmLibrary::kAlways};

void CheckLinear(ThreadPool& pool, GemmPrecision precision, DType format, int64_t m, int64_t n_out,
                 int64_t n_in, Random& random, GemmLibrary library = GemmLibrary::kNever) {
  SCOPED_TRACE(testing::Message() << DTypeName(format) << " m " << m << " n_out " << n_out
                                  << " n_in " << n_in << " threads " << pool.size());
  const TestWeight w(format, n_out, n_in, random, format == DType::kQ8_0 ? 0 : 8);
  const int64_t ldx = n_in + 3;
  const int64_t ldy = n_out + 5;
  const std::vector<float> x = random.Normals(m * ldx);
  const std::vector<float> bias = random.Normals(n_out);
  PrefillGemm gemm(pool, precision, library);
  ASSERT_TRUE(gemm.Reserve(m, w.ref).ok());
  for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
    std::vector<float> y = Poisoned(m * ldy);
    gemm.Linear(x.data(), m, ldx, w.ref, b, y.data(), ldy);
    const auto want = Reference(x, m, ldx, w, b, Rounds(gemm, format));
    EXPECT_LT(Error(y, m, n_out, ldy, want), 2e-6);
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t o = n_out; o < ldy; ++o) {
        ASSERT_TRUE(std::isnan(y[static_cast<size_t>(r * ldy + o)])) << "wrote past row " << r;
      }
    }
  }
}

TEST(PrefillGemm, MatchesDoubleOnEveryTarget) {
  ThreadPool pool(2, false);
  ForEachTarget([&] {
    SCOPED_TRACE(prefill::BestVectorKernels().name);
    Random random(1);
    for (const DType format : kFormats) {
      for (const int64_t m : {1, 15, 33, 200}) {
        CheckLinear(pool, GemmPrecision::kFull, format, m, 130, 544, random);
      }
    }
  });
}

TEST(PrefillGemm, MatchesDoubleOfRoundedFactorsInBf16) {
  if (prefill::Bf16GemmKernels() == nullptr) {
    GTEST_SKIP() << "this CPU has no AVX512-BF16";
  }
  Random random(2);
  ThreadPool pool(3, false);
  for (const DType format : kFormats) {
    for (const int64_t m : {1, 2, 16, 17, 32, 64, 129, 200}) {
      CheckLinear(pool, GemmPrecision::kFast, format, m, 97, 576, random);
    }
  }
}

TEST(PrefillGemm, MatchesDoubleThroughTheLibrary) {
  const auto opened = prefill::OneDnn::Open(1);
  if (!opened.ok() || prefill::Bf16GemmKernels() == nullptr) {
    GTEST_SKIP() << (opened.ok() ? "this CPU has no bf16 instructions" : opened.status().message());
  }
  Random random(2);
  ThreadPool pool(2, false);
  for (const DType format : kFormats) {
    for (const int64_t m : {1, 17, 64, 200, 600}) {
      CheckLinear(pool, GemmPrecision::kFast, format, m, 300, 192, random, GemmLibrary::kAlways);
    }
  }
}

TEST(PrefillGemm, AnyShape) {
  Random random(3);
  ThreadPool pool(1, false);
  for (const GemmPrecision precision : {GemmPrecision::kFast, GemmPrecision::kFull}) {
    for (const DType format : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int i = 0; i < 12; ++i) {
        CheckLinear(pool, precision, format, 1 + random.Below(90), 1 + random.Below(250),
                    1 + random.Below(1200), random);
      }
    }
  }
}

TEST(PrefillGemm, MoreRowsThanAWindow) {
  Random random(4);
  ThreadPool pool(2, false);
  CheckLinear(pool, GemmPrecision::kFast, DType::kBF16, 1100, 40, 64, random);
  CheckLinear(pool, GemmPrecision::kFull, DType::kQ8_0, 513, 40, 64, random);
}

TEST(PrefillGemm, SeveralProductsOfOneInput) {
  Random random(5);
  ThreadPool pool(2, false);
  const TestWeight q(DType::kQ8_0, 128, 64, random);
  const TestWeight k(DType::kF32, 32, 64, random);
  const TestWeight v(DType::kBF16, 48, 64, random);
  const int64_t m = 70;
  const std::vector<float> x = random.Normals(m * 64);
  PrefillGemm gemm(pool, GemmPrecision::kFull);
  std::vector<LinearOut> outs;
  std::vector<std::vector<float>> y;
  for (const TestWeight* w : {&q, &k, &v}) {
    ASSERT_TRUE(gemm.Reserve(m, w->ref).ok());
    y.push_back(Poisoned(m * w->ref.n_out));
    outs.push_back({w->ref, nullptr, y.back().data(), w->ref.n_out});
  }
  gemm.Linear(x.data(), m, 64, outs);
  size_t i = 0;
  for (const TestWeight* w : {&q, &k, &v}) {
    const int64_t n = w->ref.n_out;
    EXPECT_LT(Error(y[i++], m, n, n, Reference(x, m, 64, *w, nullptr, false)), 2e-6);
  }
}

void CheckGatedFfn(PrefillGemm& gemm, DType gate_format, DType up_format, Activation act,
                   Random& random) {
  const int64_t m = 1 + random.Below(100);
  const int64_t ffn = 1 + random.Below(200);
  const int64_t d = 96;
  SCOPED_TRACE(testing::Message() << DTypeName(gate_format) << " " << DTypeName(up_format) << " m "
                                  << m << " ffn " << ffn);
  const TestWeight gate(gate_format, ffn, d, random);
  const TestWeight up(up_format, ffn, d, random);
  const std::vector<float> x = random.Normals(m * d, 3);
  const std::vector<float> gate_bias = random.Normals(ffn);
  const std::vector<float> up_bias = random.Normals(ffn);
  ASSERT_TRUE(gemm.Reserve(m, gate.ref).ok());
  ASSERT_TRUE(gemm.Reserve(m, up.ref).ok());
  std::vector<float> out = Poisoned(m * ffn);
  gemm.GatedFfn(x.data(), m, d, gate.ref, up.ref, gate_bias.data(), up_bias.data(), act, out.data(),
                ffn);
  const bool rounded = Rounds(gemm, gate_format) && Rounds(gemm, up_format);
  std::vector<double> want = Reference(x, m, d, gate, gate_bias.data(), rounded);
  const std::vector<double> u = Reference(x, m, d, up, up_bias.data(), rounded);
  for (size_t i = 0; i < want.size(); ++i) {
    const double g = want[i];
    const double cubic = g + 0.044715 * g * g * g;
    want[i] =
        u[i] * (act == Activation::kSilu ? g / (1 + std::exp(-g))
                                         : g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * cubic)));
  }
  EXPECT_LT(Error(out, m, ffn, ffn, want), 3e-6);
}

TEST(PrefillGemm, GatedFfnMatchesDouble) {
  ThreadPool pool(2, false);
  ForEachTarget([&] {
    SCOPED_TRACE(prefill::BestVectorKernels().name);
    Random random(6);
    for (const GemmPrecision precision : {GemmPrecision::kFast, GemmPrecision::kFull}) {
      for (const GemmLibrary library : kEngines) {
        PrefillGemm gemm(pool, precision, library);
        for (const Activation act : {Activation::kSilu, Activation::kGeluTanh}) {
          for (const DType format : kFormats) CheckGatedFfn(gemm, format, format, act, random);
          CheckGatedFfn(gemm, DType::kQ8_0, DType::kBF16, act, random);
          CheckGatedFfn(gemm, DType::kBF16, DType::kF32, act, random);
        }
      }
    }
  });
}

TEST(PrefillGemm, RowsAndThreadsDoNotChangeBits) {
  Random random(7);
  for (const GemmPrecision precision : {GemmPrecision::kFast, GemmPrecision::kFull}) {
    for (const DType format : kFormats) {
      const TestWeight w(format, 200, 1056, random);
      const int64_t m = 150;
      const std::vector<float> x = random.Normals(m * 1056);
      std::vector<float> first;
      for (const int threads : {1, 2, 3}) {
        ThreadPool pool(threads, false);
        PrefillGemm gemm(pool, precision);
        ASSERT_TRUE(gemm.Reserve(m, w.ref).ok());
        std::vector<float> y = Poisoned(m * 200);
        gemm.Linear(x.data(), m, 1056, w.ref, nullptr, y.data(), 200);
        if (first.empty()) first = y;
        EXPECT_EQ(y, first) << threads << " threads";
        // oneDNN sums in an order that depends on the number of rows; our kernels do not.
        if (gemm.Describe(format).starts_with("oneDNN")) continue;
        std::vector<float> one = Poisoned(200);  // row 149 by itself
        gemm.Linear(x.data() + 149 * 1056, 1, 1056, w.ref, nullptr, one.data(), 200);
        EXPECT_TRUE(std::equal(one.begin(), one.end(), first.begin() + 149 * 200));
      }
    }
  }
}

TEST(PrefillGemm, PeakNamesWhatReachedIt) {
  ThreadPool pool(2, false);
  for (const DType type : {DType::kBF16, DType::kF32}) {
    GemmMeter meter(pool, type);
    meter.Round();
    for (const GemmRate& rate : meter.Rates()) {
      EXPECT_GT(rate.flops, 1e6) << rate.by;
      EXPECT_FALSE(rate.by.empty());
      std::printf("%s: %.0f GFLOP/s\n", rate.by.c_str(), rate.flops / 1e9);
    }
  }
}

TEST(PrefillGemm, InfinityAndNanStayInTheirRow) {
  Random random(8);
  ThreadPool pool(1, false);
  const TestWeight w(DType::kBF16, 24, 64, random);
  std::vector<float> x = random.Normals(40 * 64);
  x[5 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
  PrefillGemm gemm(pool);
  ASSERT_TRUE(gemm.Reserve(40, w.ref).ok());
  std::vector<float> y(40 * 24, 0.0f);
  gemm.Linear(x.data(), 40, 64, w.ref, nullptr, y.data(), 24);
  for (size_t r = 0; r < 40; ++r) {
    for (size_t o = 0; o < 24; ++o) EXPECT_EQ(std::isnan(y[r * 24 + o]), r == 5) << r;
  }
}

}  // namespace
}  // namespace omnikv::gemm_test
