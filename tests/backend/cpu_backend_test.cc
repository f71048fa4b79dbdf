// What is particular to the CPU backend: its options, custom ops, that a step allocates nothing,
// and that the number of rows in a product does not change the bits of each.
#include "backend/cpu/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "../allocation_counter.h"
#include "backend/cpu/attend.h"
#include "backend/kv_format.h"

namespace omnikv::cpu_backend_test {
namespace {

struct CountArgs {
  int32_t* sum;
};

const CustomKernels kCount = {
    .name = "Count",
    .ref = nullptr,
    .cpu =
        [](const void* args, ThreadPool& pool) {
          std::atomic<int32_t> sum{0};
          pool.ParallelFor(100, 7, [&](int64_t begin, int64_t end, int) {
            sum += static_cast<int32_t>(end - begin);
          });
          *static_cast<const CountArgs*>(args)->sum = sum;
        },
    .cost = [](const void*, HostArrays&) { return Cost{}; },
};

TEST(CpuBackendTest, NamesWhatItRunsOn) {
  CpuBackend backend({.threads = 2, .pin = false});
  EXPECT_EQ(backend.Name(), "cpu");
  EXPECT_THAT(backend.Describe(), testing::HasSubstr(CpuIsas().front()));
  EXPECT_THAT(backend.Describe(), testing::HasSubstr("2 threads"));
  EXPECT_EQ(backend.pool().size(), 2);
  EXPECT_GE(CpuBackend({}).pool().size(), 1);
}

TEST(CpuBackendTest, RunsCustomOps) {
  const auto backend = MakeCpuBackend({.threads = 2, .pin = false});
  int32_t sum = 0;
  CustomArgs args = MakeCustomArgs(kCount, CountArgs{&sum});
  EXPECT_TRUE(backend->Supports(args).ok);
  backend->Enqueue(args);
  EXPECT_EQ(sum, 100);

  CustomKernels no_cpu = kCount;
  no_cpu.cpu = nullptr;
  args.kernels = &no_cpu;
  EXPECT_EQ(backend->Supports(args).reason, "Count has no CPU kernel");
}

TEST(CpuBackendTest, SaysWhatItCannotAttend) {
  const auto backend = MakeCpuBackend({.threads = 1, .pin = false});
  AttendArgs a{.n_heads = 1, .score = ScoreKind::kLogits};
  a.plan = AttnPlan::Dense(16);
  EXPECT_FALSE(backend->Supports(a).ok);
  a.plan = AttnPlan::Dense();
  EXPECT_TRUE(backend->Supports(a).ok);
  a.kv.dk = a.kv.dv = 80;
  a.kv.k.dtype = a.kv.v.dtype = DType::kQ8_0;
  EXPECT_EQ(backend->Supports(a).reason,
            "K or V in q8_0 have heads of 80 values, no multiple of 32");
  a.kv.k.dtype = a.kv.v.dtype = DType::kQ4_0;
  EXPECT_EQ(backend->Supports(a).reason,
            "K or V in q4_0 have heads of 80 values, no multiple of 32");
  a.kv.dk = a.kv.dv = 96;
  EXPECT_TRUE(backend->Supports(a).ok);
}

TEST(CpuBackendTest, ReplayAllocatesNothing) {
  const auto backend = MakeCpuBackend({.threads = 2, .pin = false});
  constexpr int32_t kTokens = 2000;
  constexpr int32_t kDim = 64;
  std::vector<float> x(kDim, 0.5f), q(4 * 32, 0.25f), o(4 * 32), y(200), scores(kTokens);
  std::vector<float> w(200 * kDim, 0.125f);
  std::vector<uint16_t> kv(kTokens * 2 * 64, 0);
  const std::vector<int32_t> table = {0};
  const RowMeta row{0, kTokens - 1};
  const SeqMeta seq{.q_begin = 0, .q_len = 1, .kv_len = kTokens, .table_off = 0, .prompt_len = 0};
  const float weight = 1;
  const int32_t n_candidates = kTokens;
  const int32_t n_pick = 50;
  std::vector<int32_t> index(50), count(1);

  AttendArgs attend{.q = q.data(), .o = o.data()};
  attend.kv = MakeKvView(reinterpret_cast<std::byte*>(kv.data()), table.data(), kTokens,
                         DType::kBF16, 2, 32, 32);
  attend.plan = AttnPlan::Dense();
  attend.rows = &row;
  attend.seqs = &seq;
  attend.n_rows = attend.n_seqs = 1;
  attend.n_heads = 4;
  attend.score = ScoreKind::kHeadMax;
  attend.scores = scores.data();
  attend.score_stride = kTokens;
  const auto recording = backend->Record([&] {
    backend->Enqueue(LinearArgs{.x = x.data(),
                                .w = {.format = DType::kF32,
                                      .data = w.data(),
                                      .n_out = 200,
                                      .n_in = kDim,
                                      .row_bytes = kDim * 4},
                                .y = y.data(),
                                .n_rows = 1});
    backend->Enqueue(attend);
    backend->Enqueue(TopKArgs{.scores = scores.data(),
                              .weights = &weight,
                              .seqs = &seq,
                              .n_candidates = &n_candidates,
                              .n_pick = &n_pick,
                              .index = index.data(),
                              .count = count.data(),
                              .stride = kTokens,
                              .window = 1,
                              .capacity = 50,
                              .n_seqs = 1});
  });
  const int64_t before = g_allocations.load();
  backend->Replay(*recording);
  EXPECT_EQ(g_allocations.load(), before);
  EXPECT_FLOAT_EQ(y[199], 4.0f);
  EXPECT_EQ(count[0], 50);
  EXPECT_EQ(index[49], 49);
}

// Made-up weights [n_out, n_in] of a format, with both signs, and scales of both where it has any.
std::vector<std::byte> MakeWeights(DType format, int64_t n_out, int64_t n_in) {
  std::vector<std::byte> bytes(DTypeBytes(format, static_cast<size_t>(n_out * n_in)));
  uint32_t state = 1;
  const auto next = [&] { return state = state * 1664525u + 1013904223u; };
  // Tame exponents: 16 bits of an f16, a bf16 or the upper half of an f32.
  const auto half = [&](uint32_t exponent, int mantissa_bits) {
    const uint32_t bits = next() >> 16;
    return static_cast<uint16_t>((bits & 0x8000u) | exponent << mantissa_bits |
                                 (bits & ((1u << mantissa_bits) - 1)));
  };
  if (format == DType::kQ8_0) {
    for (std::byte& b : bytes) b = static_cast<std::byte>(next() >> 24);
    for (size_t at = 0; at < bytes.size(); at += kQ8BlockBytes) {
      const uint16_t scale = half(8, 10);
      std::memcpy(bytes.data() + at, &scale, sizeof(scale));
    }
    return bytes;
  }
  const size_t step = DTypeBytes(format, 1);
  for (size_t at = 0; at < bytes.size(); at += step) {
    const uint16_t value = format == DType::kF16 ? half(14, 10) : half(126, 7);
    std::memcpy(bytes.data() + at + step - sizeof(value), &value, sizeof(value));
  }
  return bytes;
}

// Products of n_rows rows from row `first` on, then the gated ones.
class Products {
 public:
  static constexpr int64_t kOut = 37;  // no multiple of a tile

  Products(const std::string& isa, DType format, int64_t n_in)
      : backend_({.threads = 1, .pin = false, .isa = isa}),
        format_(format),
        n_in_(n_in),
        weights_(MakeWeights(format, 3 * kOut, n_in)),
        norm_(static_cast<size_t>(n_in), 0.75f) {
    for (int i = 0; i < kMostRows * n_in; ++i) {
      x_.push_back(static_cast<float>(i * 37 % 101) / 32.0f - 1.5f);
    }
  }

  static constexpr int kMostRows = 15;  // more are products of another kind
  std::vector<std::vector<float>> Run(int first, int n_rows) {
    const auto matrix = [&](int64_t i) {
      const auto row_bytes = static_cast<int64_t>(DTypeBytes(format_, static_cast<size_t>(n_in_)));
      return WeightRef{.format = format_,
                       .data = weights_.data() + i * kOut * row_bytes,
                       .n_out = kOut,
                       .n_in = n_in_,
                       .row_bytes = row_bytes};
    };
    std::vector<float> x(x_.begin() + first * n_in_, x_.begin() + (first + n_rows) * n_in_);
    std::vector<float> y(static_cast<size_t>(n_rows * kOut)), gated(y.size());
    backend_.Enqueue(LinearArgs{.x = x.data(), .w = matrix(0), .y = y.data(), .n_rows = n_rows});
    backend_.Enqueue(NormGatedFfnArgs{
        .in = {.x = x.data(), .norm = norm_.data(), .eps = 1e-5f, .d = static_cast<int32_t>(n_in_)},
        .gate = matrix(1),
        .up = matrix(2),
        .out = gated.data(),
        .n_rows = n_rows});
    std::vector<std::vector<float>> rows;
    for (int r = 0; r < n_rows; ++r) {
      auto& row = rows.emplace_back(y.begin() + r * kOut, y.begin() + (r + 1) * kOut);
      row.insert(row.end(), gated.begin() + r * kOut, gated.begin() + (r + 1) * kOut);
    }
    return rows;
  }

 private:
  CpuBackend backend_;
  DType format_;
  int64_t n_in_;
  std::vector<std::byte> weights_;
  std::vector<float> norm_;
  std::vector<float> x_;
};

// A row's bits are those that it has in a pair of rows, but for one row that is left over beyond
// whole registers: it has the bits of a row alone.
TEST(CpuBackendTest, RowsOfProductsKeepTheirBitsBesideAnyNumberOfOthers) {
  for (const std::string& isa : CpuIsas()) {
    const int in_registers = isa == "avx512" || isa == "neon" ? 4 : 2;
    for (DType format : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0}) {
      for (int64_t n_in : {32, 416, 100}) {
        if (format == DType::kQ8_0 && n_in % kQ8Block != 0) continue;
        Products products(isa, format, n_in);
        for (int n = 1; n <= Products::kMostRows; ++n) {
          const auto rows = products.Run(0, n);
          for (int r = 0; r < n; ++r) {
            const bool left_over = r == n - 1 && n % in_registers == 1;
            const int first = left_over ? r : std::max(0, r - 1);
            const auto few = products.Run(first, left_over ? 1 : 2);
            EXPECT_EQ(rows[static_cast<size_t>(r)], few[static_cast<size_t>(r - first)])
                << isa << ", " << DTypeName(format) << ", " << n_in << " values, row " << r
                << " of " << n;
          }
        }
      }
    }
  }
}

// Pieces of as many lists as there are KV heads, which few numbers of threads divide.
TEST(CpuAttendPieces, ThreadsEndTogether) {
  EXPECT_EQ(EvenPieces(8, 60, 8, 15), 13);  // 104 of 105 places, not 64 of 75
  EXPECT_EQ(EvenPieces(8, 12, 8, 15), 11);  // 88 of 90
  EXPECT_EQ(EvenPieces(8, 8, 8, 15), 8);    // no smaller ones
  EXPECT_EQ(EvenPieces(8, 60, 8, 16), 8);
  EXPECT_EQ(EvenPieces(60, 60, 1, 15), 60);
  EXPECT_EQ(EvenPieces(1, 8, 8, 2), 1);
  EXPECT_EQ(EvenPieces(1, 1, 2, 3), 1);
}

}  // namespace
}  // namespace omnikv::cpu_backend_test
