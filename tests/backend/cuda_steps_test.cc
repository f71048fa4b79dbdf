// Steps on the CUDA backend: that recorded ones give what eager ones do, that ops which wait for
// the next give the same, and that what fails or ends leaves nothing behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "backend/kv_format.h"
#include "base/log.h"
#include "cuda_fixture.h"

namespace omnikv::cuda_steps_test {
namespace {

using testing::HasSubstr;

// The memory of a small model on one backend, and a step of it: every op that omnikv's policy
// needs.
class TinyModel {
 public:
  static constexpr int32_t kDim = 128, kHeads = 4, kKvHeads = 2, kHead = 64, kFfn = 256;
  static constexpr int32_t kVocab = 500, kCapacity = 320, kPick = 24;
  static constexpr int32_t kRing = 64;

  explicit TinyModel(Backend& backend) : backend_(backend) {
    std::mt19937 random(7);  // the same for each
    std::normal_distribution<float> normal(0.0f, 0.05f);
    const auto weights = [&](int64_t n_out, int64_t n_in) {
      std::vector<Bf16> values(static_cast<size_t>(n_out * n_in));
      for (Bf16& v : values) v = Bf16FromF32(normal(random));
      void* data = Room(values.size() * sizeof(Bf16));
      backend_.Upload(data, values.data(), values.size() * sizeof(Bf16));
      return WeightRef{.format = DType::kBF16,
                       .data = data,
                       .n_out = n_out,
                       .n_in = n_in,
                       .row_bytes = n_in * 2};
    };
    embedding_ = weights(kVocab, kDim);
    wq_ = weights(kHeads * kHead, kDim);
    wk_ = weights(kKvHeads * kHead, kDim);
    wv_ = weights(kKvHeads * kHead, kDim);
    wo_ = weights(kDim, kHeads * kHead);
    gate_ = weights(kFfn, kDim);
    up_ = weights(kFfn, kDim);
    down_ = weights(kDim, kFfn);
    norm_ = Send(std::vector<float>(kDim, 1.0f));
    std::vector<float> inv_freq;
    for (int i = 0; i < kHead / 2; ++i) inv_freq.push_back(std::pow(1e4f, -2.0f * i / kHead));
    inv_freq_ = Send(inv_freq);
    std::vector<int32_t> table;
    for (int32_t b = 0; b < kCapacity / 16; ++b) table.push_back((b * 7 + 3) % (kCapacity / 16));
    table_ = Send(table);
    weight_ = Send(std::vector<float>{1.0f});
    kv_ = MakeKvView(static_cast<std::byte*>(Room(
                         static_cast<size_t>(kCapacity) *
                         static_cast<size_t>(KvRowBytes(DType::kF16, kKvHeads, kHead, kHead)))),
                     table_, 16, DType::kF16, kKvHeads, kHead, kHead);
    x_ = Floats(kDim);
    y_ = Floats(kDim);
    z_ = Floats(kDim);
    q_ = Floats(kHeads * kHead);
    o_ = Floats(kHeads * kHead);
    f_ = Floats(kFfn);
    cos_sin_ = Floats(kHead);
    scores_ = Floats(kCapacity);
    reduced_ = Floats(kCapacity);
    logits_ = Floats(kVocab);
    index_ = Ints(kPick);
    ints_ = Ints(8);  // token, count, candidates, pick, bounds
    out_ = Ints(kRing);
    step_ = reinterpret_cast<uint32_t*>(Ints(1));
    row_ = static_cast<RowMeta*>(Room(sizeof(RowMeta)));
    seq_ = static_cast<SeqMeta*>(Room(sizeof(SeqMeta)));
    sample_ = static_cast<SampleMeta*>(Room(sizeof(SampleMeta)));
    seen_ = reinterpret_cast<uint32_t*>(Ints(static_cast<size_t>(SeenWords(kVocab))));
  }

  // One token through a layer that looks at everything, and one that reads what it chose.
  // `chooses`: and on to the next token, as `draws` says by the settings of SetSampling.
  void EnqueueStep(bool chooses = false, bool draws = false) {
    const AttnPlan dense = AttnPlan::Dense();
    AttnPlan sparse;
    sparse.Add(
        {.kind = SegmentKind::kList, .capacity = kPick, .index = index_, .count = ints_ + 1});
    sparse.Add({.bounds = ints_ + 4});
    Run(EmbedArgs{.tokens = ints_, .table = embedding_, .x = x_, .n_rows = 1});
    Run(RopeTableArgs{.rows = row_,
                      .inv_freq = inv_freq_,
                      .cos_sin = cos_sin_,
                      .n_freq = kHead / 2,
                      .n_rows = 1});
    Run(PlanRangeArgs{.seqs = seq_,
                      .n_seqs = 1,
                      .rule = {.budget = kPick, .tail = 8, .min_recent = 1},
                      .bounds = ints_ + 4,
                      .n_candidates = ints_ + 2,
                      .n_pick = ints_ + 3});
    EnqueueAttention(nullptr, dense, ScoreKind::kHeadMax);
    Run(ScoreReduceArgs{.logits = scores_,
                        .out = reduced_,
                        .rows = row_,
                        .stride = kCapacity,
                        .ring = 1,
                        .n_heads = 1,
                        .n_rows = 1});
    Run(TopKArgs{.scores = reduced_,
                 .weights = weight_,
                 .seqs = seq_,
                 .n_candidates = ints_ + 2,
                 .n_pick = ints_ + 3,
                 .index = index_,
                 .count = ints_ + 1,
                 .stride = kCapacity,
                 .window = 1,
                 .capacity = kPick,
                 .n_seqs = 1});
    EnqueueFfn();
    EnqueueAttention(z_, sparse, ScoreKind::kNone);
    EnqueueFfn();
    Run(NormLogitsArgs{
        .in = In(z_), .head = embedding_, .logits = logits_, .n_rows = 1, .n_out = 1});
    if (!chooses) return;
    Run(NextTokenArgs{.logits = logits_,
                      .tokens = ints_,
                      .rows = row_,
                      .seqs = seq_,
                      .sample = draws ? sample_ : nullptr,
                      .seen = draws ? seen_ : nullptr,
                      .out = out_,
                      .step = step_,
                      .vocab = kVocab,
                      .ring = kRing,
                      .n_rows = 1});
  }

  // What changes from token to token.
  void SetToken(int32_t token, int32_t pos) {
    const RowMeta row{0, pos};
    const SeqMeta seq{
        .q_begin = 0, .q_len = 1, .kv_len = pos + 1, .table_off = 0, .prompt_len = 10};
    backend_.Upload(ints_, &token, sizeof(token));
    backend_.Upload(row_, &row, sizeof(row));
    backend_.Upload(seq_, &seq, sizeof(seq));
  }

  void SetStep(uint32_t step) { backend_.Upload(step_, &step, sizeof(step)); }
  void SetSampling(const SampleMeta& meta) {
    const std::vector<uint32_t> none(static_cast<size_t>(SeenWords(kVocab)), 0);
    backend_.Upload(sample_, &meta, sizeof(meta));
    backend_.Upload(seen_, none.data(), none.size() * 4);
  }

  // Logits and chosen tokens, bit by bit.
  std::vector<uint32_t> Output() const {
    std::vector<uint32_t> out(kVocab + kPick + 8);
    backend_.Download(out.data(), logits_, kVocab * 4);
    backend_.Download(out.data() + kVocab, index_, kPick * 4);
    backend_.Download(out.data() + kVocab + kPick, ints_, 8 * 4);
    return out;
  }

  // Tokens that NextToken chose, from the first step on.
  std::vector<int32_t> Chosen(size_t n) const {
    std::vector<int32_t> out(n);
    backend_.Download(out.data(), out_, n * 4);
    return out;
  }

 private:
  void* Room(size_t bytes) {
    auto buffer = backend_.Allocate(bytes, "test");
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    buffers_.push_back(std::move(*buffer));
    return buffers_.back().as<void>();
  }
  float* Floats(size_t n) { return static_cast<float*>(Room(4 * n)); }
  int32_t* Ints(size_t n) { return static_cast<int32_t*>(Room(4 * n)); }
  template <typename T>
  T* Send(const std::vector<T>& values) {
    auto* data = static_cast<T*>(Room(values.size() * sizeof(T)));
    backend_.Upload(data, values.data(), values.size() * sizeof(T));
    return data;
  }
  void Run(const Op& op) { backend_.Enqueue(op); }
  Residual In(const float* y) const {
    return {.x = x_, .y = y, .norm = norm_, .eps = 1e-5f, .d = kDim};
  }

  void EnqueueAttention(const float* pending, const AttnPlan& plan, ScoreKind score) {
    Run(NormQkvRopeAppendArgs{.in = In(pending),
                              .wq = wq_,
                              .wk = wk_,
                              .wv = wv_,
                              .cos_sin = cos_sin_,
                              .n_freq = kHead / 2,
                              .q = q_,
                              .n_heads = kHeads,
                              .kv = kv_,
                              .rows = row_,
                              .seqs = seq_,
                              .n_rows = 1});
    Run(AttendArgs{.q = q_,
                   .o = o_,
                   .kv = kv_,
                   .plan = plan,
                   .rows = row_,
                   .seqs = seq_,
                   .n_rows = 1,
                   .n_seqs = 1,
                   .n_heads = kHeads,
                   .scale = 0.125f,
                   .score = score,
                   .scores = score == ScoreKind::kNone ? nullptr : scores_,
                   .score_stride = kCapacity});
    Run(LinearArgs{.x = o_, .w = wo_, .y = y_, .n_rows = 1});
  }
  void EnqueueFfn() {
    Run(NormGatedFfnArgs{.in = In(y_), .gate = gate_, .up = up_, .out = f_, .n_rows = 1});
    Run(LinearArgs{.x = f_, .w = down_, .y = z_, .n_rows = 1});
  }

  Backend& backend_;
  std::vector<Buffer> buffers_;
  WeightRef embedding_, wq_, wk_, wv_, wo_, gate_, up_, down_;
  KvView kv_;
  float *norm_, *inv_freq_, *weight_, *x_, *y_, *z_, *q_, *o_, *f_, *cos_sin_;
  float *scores_, *reduced_, *logits_;
  int32_t *table_, *index_, *ints_, *out_;
  uint32_t* step_;
  RowMeta* row_;
  SeqMeta* seq_;
  SampleMeta* sample_;
  uint32_t* seen_;
};

// 50 tokens by replay and by eager steps, from an empty bank on.
TEST_F(CudaBackendTest, FiftyReplaysGiveWhatEagerStepsDo) {
  const auto a = Make();
  const auto b = Make();
  TinyModel eager(*a);
  TinyModel replayed(*b);
  const auto untouched = replayed.Output();
  const auto recording = b->Record([&] { replayed.EnqueueStep(); });
  EXPECT_TRUE(replayed.Output() == untouched) << "recording ran something";
  for (int32_t t = 0; t < 50; ++t) {
    const int32_t token = t * 131 % TinyModel::kVocab;
    eager.SetToken(token, t);
    eager.EnqueueStep();
    replayed.SetToken(token, t);
    b->Replay(*recording);
    ASSERT_TRUE(eager.Output() == replayed.Output()) << "token " << t;
  }
  // Recordings and eager steps mix.
  for (int32_t t = 50; t < 60; ++t) {
    eager.SetToken(t, t);
    eager.EnqueueStep();
    replayed.SetToken(t, t);
    if (t % 2 == 0) {
      replayed.EnqueueStep();
    } else {
      b->Replay(*recording);
    }
    ASSERT_TRUE(eager.Output() == replayed.Output()) << "token " << t;
  }
}

// Replays that go on by themselves against steps that the host leads.
TEST_F(CudaBackendTest, StepsThatChooseNeedNoHost) {
  const auto a = Make();
  const auto b = Make();
  TinyModel led(*a);
  TinyModel free(*b);
  const auto recording = b->Record([&] { free.EnqueueStep(/*chooses=*/true); });
  constexpr int32_t kSteps = 60;
  free.SetToken(17, 0);
  for (int32_t t = 0; t < kSteps; ++t) b->Replay(*recording);
  std::vector<int32_t> tokens;
  for (int32_t t = 0; t < kSteps; ++t) {
    led.SetToken(t == 0 ? 17 : tokens.back(), t);
    led.EnqueueStep();
    const auto bits = led.Output();
    std::vector<float> logits(TinyModel::kVocab);
    std::memcpy(logits.data(), bits.data(), logits.size() * 4);
    tokens.push_back(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  EXPECT_EQ(free.Chosen(kSteps), tokens);
}

// What a prompt's projections read is made as bf16 where they follow at once, and as f32 where
// something comes between: the products are the same to the bit.
TEST_F(CudaBackendTest, PromptsAreTheSameWhereOpsWaitForTheNext) {
  constexpr int32_t kRows = 128, kHeads = 72, kKvHeads = 8, kHead = 128, kDim = 256, kFfn = 512;
  const auto backend = Make();
  std::vector<Buffer> buffers;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto send = [&](const auto& values) {
    auto buffer = backend->Allocate(values.size() * sizeof(values[0]), "test");
    EXPECT_TRUE(buffer.ok());
    backend->Upload(buffer->template as<void>(), values.data(), values.size() * sizeof(values[0]));
    buffers.push_back(std::move(*buffer));
    return buffers.back().as<void>();
  };
  const auto floats = [&](int32_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = normal(random);
    return static_cast<float*>(send(values));
  };
  const auto halves = [&](int32_t n) {
    std::vector<Bf16> values(static_cast<size_t>(n));
    for (Bf16& v : values) v = Bf16FromF32(normal(random));
    return send(values);
  };
  const auto weights = [&](int32_t n_out, int32_t n_in) {
    return WeightRef{.format = DType::kBF16,
                     .data = halves(n_out * n_in),
                     .n_out = n_out,
                     .n_in = n_in,
                     .row_bytes = n_in * 2};
  };
  std::vector<RowMeta> rows;
  for (int32_t r = 0; r < kRows; ++r) rows.push_back({0, r});
  const std::vector<SeqMeta> seqs = {{.q_begin = 0, .q_len = kRows, .kv_len = kRows}};
  auto* bank = static_cast<std::byte*>(halves(kRows * 2 * kKvHeads * kHead));
  auto* table = static_cast<int32_t*>(send(std::vector<int32_t>{1, 0}));
  float* const o = floats(kRows * kHeads * kHead);
  float* const f = floats(kRows * kFfn);
  float* const y = floats(kRows * kDim);
  float* const z = floats(kRows * kDim);
  const Op ops[] = {
      AttendArgs{.q = floats(kRows * kHeads * kHead),
                 .o = o,
                 .kv = MakeKvView(bank, table, kRows / 2, DType::kBF16, kKvHeads, kHead, kHead),
                 .plan = AttnPlan::Dense(),
                 .rows = static_cast<RowMeta*>(send(rows)),
                 .seqs = static_cast<SeqMeta*>(send(seqs)),
                 .n_rows = kRows,
                 .n_seqs = 1,
                 .n_heads = kHeads,
                 .scale = 0.1f},
      LinearArgs{.x = o, .w = weights(kDim, kHeads * kHead), .y = y, .n_rows = kRows},
      NormGatedFfnArgs{
          .in = {.x = floats(kRows * kDim), .norm = floats(kDim), .eps = 1e-5f, .d = kDim},
          .gate = weights(kFfn, kDim),
          .up = weights(kFfn, kDim),
          .out = f,
          .n_rows = kRows},
      LinearArgs{.x = f, .w = weights(kDim, kFfn), .y = z, .n_rows = kRows}};
  const auto run = [&](bool apart) {
    for (const Op& op : ops) {
      backend->Enqueue(op);
      if (apart) backend->Synchronize();
    }
    std::vector<uint32_t> bits(2 * kRows * kDim);
    backend->Download(bits.data(), y, bits.size() * 2);
    backend->Download(bits.data() + bits.size() / 2, z, bits.size() * 2);
    return bits;
  };
  const auto together = run(false);
  EXPECT_TRUE(together == run(true));
  EXPECT_GT(std::count_if(together.begin(), together.end(), [](uint32_t b) { return b != 0; }),
            static_cast<ptrdiff_t>(together.size() / 2));
}

TEST_F(CudaBackendTest, StepsThatDrawNeedNoHost) {
  const auto a = Make();
  const auto b = Make();
  TinyModel led(*a);
  TinyModel free(*b);
  const auto recording = b->Record([&] { free.EnqueueStep(/*chooses=*/true, /*draws=*/true); });
  constexpr int32_t kSteps = 60;
  std::vector<SampleCandidate> scratch(TinyModel::kVocab);
  for (SampleMeta meta : {SampleMeta{.temperature = 0.5, .random = 1},
                          SampleMeta{.temperature = 1, .top_p = 0.9, .top_k = 40, .random = 2},
                          SampleMeta{.temperature = 2, .repeat_penalty = 1.5f, .random = 3}}) {
    free.SetSampling(meta);
    free.SetStep(0);
    free.SetToken(17, 0);
    for (int32_t t = 0; t < kSteps; ++t) b->Replay(*recording);
    std::vector<uint32_t> seen(static_cast<size_t>(SeenWords(TinyModel::kVocab)), 0);
    std::vector<int32_t> tokens;
    for (int32_t t = 0; t < kSteps; ++t) {
      led.SetToken(t == 0 ? 17 : tokens.back(), t);
      led.EnqueueStep();
      const auto bits = led.Output();
      std::vector<float> logits(TinyModel::kVocab);
      std::memcpy(logits.data(), bits.data(), logits.size() * 4);
      tokens.push_back(SampleToken(logits.data(), TinyModel::kVocab, meta, seen.data(), scratch));
      TakeSample(tokens.back(), meta, seen.data());
    }
    EXPECT_EQ(free.Chosen(kSteps), tokens) << "temperature " << meta.temperature;
  }
}

// Memory that runs out under ops: said once, and the backend goes on.
TEST_F(CudaBackendTest, StepsThatFindNoMemoryFailCleanly) {
  const auto sound = Make();
  TinyModel expected(*sound);
  expected.SetToken(3, 0);
  expected.EnqueueStep();
  bool refuse = false;
  const auto backend = Make({.refuse = [&] { return refuse; }});
  TinyModel model(*backend);
  const CopyOp copy(*backend, kMiB);
  const auto device = backend->Allocate(2 * kMiB, "test");
  ASSERT_TRUE(device.ok());
  const auto step = [&] {  // with a lane that waits for the main one, and is joined by the end
    backend->Join(Lane::kIn, Lane::kMain);
    backend->Enqueue(copy(device->as<std::byte>(), device->as<std::byte>() + kMiB), Lane::kIn);
    model.EnqueueStep();
    backend->Join(Lane::kMain, Lane::kIn);
  };
  refuse = true;
  model.SetToken(3, 0);
  step();
  const Status eager = backend->TakeFailure();
  EXPECT_EQ(eager.code(), StatusCode::kResourceExhausted) << eager.message();
  EXPECT_TRUE(backend->TakeFailure().ok());
  EXPECT_EQ(backend->Record(step), nullptr);
  EXPECT_EQ(backend->TakeFailure().code(), StatusCode::kResourceExhausted);
  refuse = false;
  const auto recording = backend->Record(step);
  ASSERT_NE(recording, nullptr);
  model.SetToken(3, 0);
  backend->Replay(*recording);
  EXPECT_TRUE(backend->TakeFailure().ok());
  EXPECT_TRUE(model.Output() == expected.Output());
}

TEST_F(CudaBackendTest, ReplaysTakeNoDeviceMemory) {
  const auto backend = Make();
  TinyModel model(*backend);
  const auto recording = backend->Record([&] { model.EnqueueStep(); });
  model.SetToken(1, 0);
  backend->Replay(*recording);
  backend->Synchronize();
  const size_t free = FreeMemory();
  for (int i = 0; i < 200; ++i) backend->Replay(*recording);
  backend->Synchronize();
  EXPECT_GE(FreeMemory() + 8 * kMiB, free);  // other processes come and go
}

TEST_F(CudaBackendTest, FiftyBackendsLeakNothing) {
  const auto use = [] {
    const auto backend = Make();
    TinyModel model(*backend);
    model.SetToken(3, 0);
    const auto recording = backend->Record([&] { model.EnqueueStep(); });
    backend->Replay(*recording);
    model.EnqueueStep();
    backend->Synchronize();
  };
  use();  // what the runtime itself keeps
  use();
  const size_t before = FreeMemory();
  for (int i = 0; i < 50; ++i) use();
  const size_t after = FreeMemory();
  // One allocation of the driver's is 2 MiB; another process may come or go.
  EXPECT_LE(before, after + 8 * kMiB) << (before - after) / kMiB << " MiB were not given back";
}

TEST_F(CudaBackendTest, SaysWhatItCannotRun) {
  const auto backend = Make();
  static const CustomKernels kNoCuda = {
      .name = "Count", .ref = nullptr, .cpu = nullptr, .cuda = nullptr, .cost = nullptr};
  const Support support = backend->Supports(CustomArgs{.kernels = &kNoCuda});
  EXPECT_FALSE(support.ok);
  EXPECT_THAT(support.reason, HasSubstr("Count"));
}

}  // namespace
}  // namespace omnikv::cuda_steps_test
