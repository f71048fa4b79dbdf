// What is particular to the CPU backend: its options, custom ops, and that a step allocates
// nothing.
#include "backend/cpu/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "../allocation_counter.h"
#include "backend/kv_format.h"

namespace omnikv {
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

}  // namespace
}  // namespace omnikv
