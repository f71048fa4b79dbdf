// Kernels that begin before the ones ahead of them have ended: what they read is what those leave.
// Each case is enqueued at once, and with a wait behind every op; both give the same bits.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "backend/kv_format.h"
#include "cuda_fixture.h"

namespace omnikv::cuda_early_test {
namespace {

class CudaEarlyTest : public CudaBackendTest {
 protected:
  static constexpr int kRounds = 60;

  void SetUp() override {
    CudaBackendTest::SetUp();
    if (!IsSkipped()) backend_ = Make();
  }

  template <typename T>
  T* Room(size_t n) {
    auto buffer = backend_->Allocate(n * sizeof(T), "test");
    EXPECT_TRUE(buffer.ok());
    buffers_.push_back(std::move(*buffer));
    return buffers_.back().as<T>();
  }
  template <typename T>
  T* Send(const std::vector<T>& values) {
    T* const room = Room<T>(values.size());
    Put(room, values);
    return room;
  }
  template <typename T>
  void Put(T* to, const std::vector<T>& values) {
    backend_->Upload(to, values.data(), values.size() * sizeof(T));
  }
  std::vector<float> Numbers(size_t n, float deviation = 1) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> numbers(n);
    for (float& v : numbers) v = normal(random_);
    return numbers;
  }
  std::vector<Bf16> Rounded(const std::vector<float>& numbers) {
    std::vector<Bf16> rounded;
    for (const float v : numbers) rounded.push_back(Bf16FromF32(v));
    return rounded;
  }

  // The end of a step, which moves a sequence and its row on by a token.
  NextTokenArgs MoveOn(RowMeta* rows, SeqMeta* seqs) {
    constexpr int32_t kVocab = 64;
    auto* const tokens = Room<int32_t>(8);
    return {.logits = Send(Numbers(kVocab)),
            .tokens = tokens,
            .rows = rows,
            .seqs = seqs,
            .out = tokens + 4,
            .step = Room<uint32_t>(1),
            .vocab = kVocab,
            .ring = 2,
            .n_rows = 1};
  }

  // What `ops` leave in `out` [n], round after round; prepare(round) begins each way of a round,
  // with the same random numbers.
  void CheckRounds(const std::function<void(int)>& prepare, const std::vector<Op>& ops,
                   const float* out, size_t n) {
    std::vector<float> apart(n);
    std::vector<float> together(n);
    const std::vector<uint32_t> poison(n, 0x7fc00000u);
    int differ = 0;
    for (int round = 0; round < kRounds; ++round) {
      for (const bool wait : {false, true}) {
        random_.seed(static_cast<uint32_t>(round));
        prepare(round);
        backend_->Upload(const_cast<float*>(out), poison.data(), n * sizeof(float));
        backend_->Synchronize();
        for (const Op& op : ops) {
          backend_->Enqueue(op);
          if (wait) backend_->Synchronize();
        }
        backend_->Download((wait ? apart : together).data(), out, n * sizeof(float));
      }
      differ += std::memcmp(apart.data(), together.data(), n * sizeof(float)) == 0 ? 0 : 1;
    }
    EXPECT_EQ(differ, 0) << "of " << kRounds << " rounds";
  }

  std::unique_ptr<Backend> backend_;
  std::vector<Buffer> buffers_;
  std::mt19937 random_{7};
};

// Attention by a list of units that is chosen just before, of other lengths than the round before
// left, and with the queries that a product left before that.
TEST_F(CudaEarlyTest, AttentionBehindAChoice) {
  constexpr int32_t kHeads = 8, kKvHeads = 2, kDim = 128, kTokens = 12000, kUnit = 128;
  constexpr int32_t kUnits = (kTokens + kUnit - 1) / kUnit, kCapacity = 48, kWidth = 64;
  constexpr int32_t kQuery = kHeads * kDim;
  for (const int32_t recent : {1, 8, 40}) {  // units
    SCOPED_TRACE(recent);
    std::vector<int32_t> table;
    for (int32_t b = 0; b < kTokens / 16; ++b) table.push_back(kTokens / 16 - 1 - b);
    auto* const rows = Send(Rounded(Numbers(size_t{kTokens} * 2 * kKvHeads * kDim)));
    const KvView kv = MakeKvView(reinterpret_cast<std::byte*>(rows), Send(table), 16, DType::kBF16,
                                 kKvHeads, kDim, kDim);
    auto* const seqs = Room<SeqMeta>(1);
    auto* const meta = Room<RowMeta>(1);
    auto* const x = Room<float>(kWidth);
    auto* const scores = Room<float>(kUnits);
    auto* const q = Room<float>(kQuery);
    auto* const o = Room<float>(kQuery);
    auto* const index = Room<int32_t>(kCapacity);
    auto* const numbers = Room<int32_t>(5);  // count, candidates, pick, bounds
    const WeightRef w = {.format = DType::kBF16,
                         .data = Send(Rounded(Numbers(size_t{kQuery} * kWidth, 0.3f))),
                         .n_out = kQuery,
                         .n_in = kWidth,
                         .row_bytes = 2 * kWidth};
    AttendArgs attend{.q = q,
                      .o = o,
                      .kv = kv,
                      .rows = meta,
                      .seqs = seqs,
                      .n_rows = 1,
                      .n_seqs = 1,
                      .n_heads = kHeads,
                      .scale = 0.1f};
    attend.plan.Add({.kind = SegmentKind::kList,
                     .unit = kUnit,
                     .capacity = kCapacity,
                     .index = index,
                     .count = numbers});
    attend.plan.Add({.bounds = numbers + 3});
    const std::vector<Op> ops = {
        PlanRangeArgs{.seqs = seqs,
                      .n_seqs = 1,
                      .rule = {.budget = kCapacity, .min_recent = recent, .unit = kUnit},
                      .bounds = numbers + 3,
                      .n_candidates = numbers + 1,
                      .n_pick = numbers + 2},
        LinearArgs{.x = x, .w = w, .y = q, .n_rows = 1},
        TopKArgs{.scores = scores,
                 .weights = Send(std::vector<float>{1}),
                 .seqs = seqs,
                 .n_candidates = numbers + 1,
                 .n_pick = numbers + 2,
                 .index = index,
                 .count = numbers,
                 .stride = kUnits,
                 .capacity = kCapacity,
                 .n_seqs = 1},
        attend};
    CheckRounds(
        [&](int round) {
          const int32_t n = kTokens - round % 4 * 2900;  // the last is too short for a full choice
          Put(seqs, std::vector<SeqMeta>{{.q_len = 1, .kv_len = n, .prompt_len = n - 1}});
          Put(meta, std::vector<RowMeta>{{0, n - 1}});
          Put(x, Numbers(kWidth));
          Put(scores, Numbers(kUnits));
        },
        ops, o, kQuery);
  }
}

// Scores of units begin with a sequence as it was before the op ahead, which here moves it on.
TEST_F(CudaEarlyTest, ScoresOfASequenceThatMovesOn) {
  constexpr int32_t kHeads = 8, kKvHeads = 2, kDim = 128, kUnits = 600;
  std::vector<int32_t> table;
  for (int32_t b = 0; b < 2 * kUnits; ++b) table.push_back(b % kUnits * 7 % kUnits);
  const StateView summaries = {
      .base = reinterpret_cast<std::byte*>(Send(Numbers(size_t{kUnits} * kKvHeads * kDim))),
      .block_table = Send(table),
      .row_bytes = 4 * kKvHeads * kDim};
  auto* const seqs = Room<SeqMeta>(1);
  auto* const rows = Room<RowMeta>(1);
  auto* const q = Send(Numbers(kHeads * kDim));
  auto* const out = Room<float>(kUnits);
  const auto prepare = [&](int round) {
    const int32_t units = 300 + 3 * round;
    // Where it was before is another part of the table.
    Put(seqs, std::vector<SeqMeta>{{.q_len = 1, .kv_len = 16 * units, .table_off = units}});
    Put(rows, std::vector<RowMeta>{{0, 16 * units - 1}});
  };
  // A token further another unit begins.
  const std::vector<Op> ops = {MoveOn(rows, seqs), BlockScoreArgs{.q = q,
                                                                  .summaries = summaries,
                                                                  .seqs = seqs,
                                                                  .out = out,
                                                                  .stride = kUnits,
                                                                  .n_seqs = 1,
                                                                  .n_heads = kHeads,
                                                                  .n_kv_heads = kKvHeads,
                                                                  .dk = kDim,
                                                                  .unit = 16,
                                                                  .scale = 0.1f}};
  CheckRounds(prepare, ops, out, kUnits);
}

// So does attention, whose rows the op ahead moves on here.
TEST_F(CudaEarlyTest, AttentionOfASequenceThatMovesOn) {
  constexpr int32_t kHeads = 8, kKvHeads = 2, kDim = 128, kTokens = 3000;
  std::vector<int32_t> table;
  for (int32_t b = 0; b < kTokens / 16; ++b) table.push_back(kTokens / 16 - 1 - b);
  auto* const seqs = Room<SeqMeta>(1);
  auto* const rows = Room<RowMeta>(1);
  auto* const o = Room<float>(kHeads * kDim);
  AttendArgs attend{.q = Send(Numbers(kHeads * kDim)),
                    .o = o,
                    .kv = MakeKvView(reinterpret_cast<std::byte*>(Send(
                                         Rounded(Numbers(size_t{kTokens} * 2 * kKvHeads * kDim)))),
                                     Send(table), 16, DType::kBF16, kKvHeads, kDim, kDim),
                    .rows = rows,
                    .seqs = seqs,
                    .n_rows = 1,
                    .n_seqs = 1,
                    .n_heads = kHeads,
                    .scale = 0.1f};
  attend.plan = AttnPlan::Dense();
  const auto prepare = [&](int round) {
    const int32_t n = 1 + 40 * round;
    Put(seqs, std::vector<SeqMeta>{{.q_len = 1, .kv_len = n}});
    Put(rows, std::vector<RowMeta>{{0, n - 1}});
  };
  const std::vector<Op> ops = {MoveOn(rows, seqs), attend};
  CheckRounds(prepare, ops, o, kHeads * kDim);
}

}  // namespace
}  // namespace omnikv::cuda_early_test
