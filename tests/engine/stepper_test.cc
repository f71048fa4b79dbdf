// Rows of several policies, and a prompt's chunk beside rows that decode, in one step: each row
// gets what it would get in a step of its own.
#include "engine/stepper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "../made_up_model.h"
#include "as_device.h"
#include "backend/ref/ref_backend.h"
#include "engine/devices.h"
#include "model/generated.h"
#include "on_device.h"

namespace omnikv::stepper_test {
namespace {

constexpr int32_t kVocab = 160;

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 150) + 3;
  return tokens;
}

const PolicyOptions kFull = {.name = "full"};
const PolicyOptions kSelecting = {.name = "omnikv",
                                  .settings = {{"filters", "1,3"},
                                               {"dense_after_filter", "0"},
                                               {"dense_below", "0"},
                                               {"budget", "24"},
                                               {"tail", "4"}}};
const PolicyOptions kStreaming = {.name = "streaming", .settings = {{"budget", "24"}}};
const PolicyOptions kForgetting = {.name = "tova", .settings = {{"budget", "24"}}};

class StepperTest : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (!IsSkipped()) MakeEngineFor(kFull, "auto");
  }
  void MakeEngineFor(const PolicyOptions& policy, const std::string& place) {
    auto core = std::make_unique<EngineCore>();
    auto inner = MakeBackend({.device = GetParam(), .threads = 2});
    ASSERT_TRUE(inner.ok()) << inner.status().message();
    auto trace = std::make_unique<AsDevice>(std::move(*inner));
    trace_ = trace.get();
    core->backend = std::move(trace);
    core->options = {.context = 400, .kv_dtype = "f32", .prefill_chunk = 80, .max_sessions = 16};
    core->options.policy = policy;
    core->options.place = place;
    core->config = SmallLlama({.max_context = 400});
    auto weights = GenerateWeights(*core->backend, core->config, DType::kF32);
    ASSERT_TRUE(weights.ok());
    core->weights = std::move(*weights);
    const auto plan =
        PlanMemory(core->options, core->config, core->weights.bytes, DType::kF32, *core->backend);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    auto engine = MakeEngine(std::move(core), *plan, 0);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
    stepper_.emplace(CoreOf(*engine_));
  }

  std::unique_ptr<RowGroup> Open(const PolicyOptions& policy, int32_t max_seqs) {
    auto group = RowGroup::Open(CoreOf(*engine_), policy, max_seqs);
    EXPECT_TRUE(group.ok()) << group.status().message();
    return std::move(*group);
  }
  // A member of the group with a prompt, and its first token.
  DecodeRow Join(RowGroup& group, const std::vector<int32_t>& prompt) {
    const auto member = group.Join();
    EXPECT_TRUE(member.ok()) << member.status().message();
    for (size_t at = 0; at < prompt.size(); at += 80) {
      Feed(group, *member, prompt, at);
    }
    return {.group = &group, .member = *member, .token = 5 + *member};
  }
  // The chunk of a prompt that begins at `at`.
  static PromptChunk ChunkAt(RowGroup& group, int32_t member, const std::vector<int32_t>& prompt,
                             size_t at, size_t most = 80) {
    const size_t n = std::min(most, prompt.size() - at);
    return {.group = &group,
            .member = member,
            .tokens = {prompt.data() + at, n},
            .prompt_end = static_cast<int64_t>(prompt.size()),
            .n_out = at + n == prompt.size() ? 1 : 0};
  }
  void Feed(RowGroup& group, int32_t member, const std::vector<int32_t>& prompt, size_t at) {
    const Status fed = stepper_->Chunk(ChunkAt(group, member, prompt, at));
    EXPECT_TRUE(fed.ok()) << fed.message();
  }
  // The logits after a step of these rows.
  std::vector<std::vector<float>> Step(const std::vector<DecodeRow>& rows,
                                       const PromptChunk* chunk = nullptr) {
    std::vector<std::vector<float>> logits(rows.size(), std::vector<float>(kVocab));
    std::vector<float*> to;
    for (auto& row : logits) to.push_back(row.data());
    const Status status = stepper_->Step(rows, to, chunk);
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  static void ExpectSame(const std::vector<float>& got, const std::vector<float>& want) {
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(want[i]) - got[i]));
      size = std::max(size, std::abs(static_cast<double>(want[i])));
    }
    EXPECT_GT(size, 0);
    EXPECT_LE(error, (GetParam() == "ref" ? 0 : F32Tolerance(GetParam())) * size);
  }

  void ChunkBesideRows(bool shared);
  // Of the ops since ReadWeights: `n_rows` are multiplied by each weight matrix, once. Returns how
  // many ops store rows.
  void ReadWeights() {
    trace_->Clear();
    trace_->set_logging(true);
  }
  size_t ExpectReadOnce(int32_t n_rows);

  std::unique_ptr<Engine> engine_;
  std::optional<Stepper> stepper_;
  AsDevice* trace_ = nullptr;
};

// Enough steps that mixes are enqueued first, and replayed later.
TEST_P(StepperTest, PoliciesShareSteps) {
  std::vector<std::unique_ptr<RowGroup>> groups;  // each policy twice: to share steps, and alone
  std::vector<DecodeRow> together, alone;
  for (const PolicyOptions& policy : {kFull, kSelecting, kForgetting, kStreaming}) {
    for (std::vector<DecodeRow>* rows : {&together, &alone}) {
      RowGroup& group = *groups.emplace_back(Open(policy, 2));
      rows->push_back(Join(group, Numbers(120, (groups.size() + 1) / 2)));
      rows->push_back(Join(group, Numbers(47, 7)));
    }
  }
  for (int step = 0; step < 8; ++step) {
    const auto got = Step(together);
    for (size_t i = 0; i < alone.size(); i += 2) {
      const auto want = Step({alone[i], alone[i + 1]});
      ExpectSame(got[i], want[0]);
      ExpectSame(got[i + 1], want[1]);
    }
    for (size_t r = 0; r < together.size(); ++r) {
      together[r].token = alone[r].token = (together[r].token * 7 + 5) % 150;
    }
  }
}

// `shared`: products too.
void StepperTest::ChunkBesideRows(bool shared) {
  CoreOf(*engine_).options.shared_products = shared;
  const auto decoding = Open(kSelecting, 3);
  const auto other = Open(kStreaming, 1);
  const auto alone = Open(kSelecting, 3);
  const auto other_alone = Open(kStreaming, 1);
  std::vector<DecodeRow> rows = {Join(*decoding, Numbers(90, 1)), Join(*decoding, Numbers(33, 2)),
                                 Join(*other, Numbers(60, 3))};
  std::vector<DecodeRow> want_rows = {Join(*alone, Numbers(90, 1)), Join(*alone, Numbers(33, 2)),
                                      Join(*other_alone, Numbers(60, 3))};
  const std::vector<int32_t> prompt = Numbers(140, 4);
  const auto member = decoding->Join();  // of the group that decodes
  ASSERT_TRUE(member.ok());
  for (size_t at = 0; at < prompt.size(); at += 50) {
    const PromptChunk chunk = ChunkAt(*decoding, *member, prompt, at, 50);
    const auto got = Step(rows, &chunk);
    const auto first = Step({want_rows[0], want_rows[1]});
    const auto second = Step({want_rows[2]});
    ExpectSame(got[0], first[0]);
    ExpectSame(got[1], first[1]);
    ExpectSame(got[2], second[0]);
  }
  EXPECT_EQ(decoding->length(*member), 140);
  // It goes on as one that was fed alone.
  DecodeRow joined{.group = decoding.get(), .member = *member, .token = 9};
  DecodeRow fed = Join(*alone, prompt);
  fed.token = 9;
  for (int step = 0; step < 5; ++step) {
    ExpectSame(Step({joined})[0], Step({fed})[0]);
    joined.token = fed.token = 20 + step;
  }
}

TEST_P(StepperTest, AChunkBesideRowsThatDecode) {
  ChunkBesideRows(/*shared=*/false);
}

TEST_P(StepperTest, AChunkMultipliedWithRowsThatDecode) {
  ChunkBesideRows(/*shared=*/true);
}

size_t StepperTest::ExpectReadOnce(int32_t n_rows) {
  trace_->set_logging(false);
  std::multiset<const void*> read;
  size_t stores = 0;
  for (const TraceEntry& entry : trace_->entries()) {
    if (const auto* op = std::get_if<NormQkvRopeAppendArgs>(&entry.op)) {
      EXPECT_EQ(op->n_rows, n_rows);
      for (const WeightRef* w : {&op->wq, &op->wk, &op->wv}) read.insert(w->data);
    } else if (const auto* linear = std::get_if<LinearArgs>(&entry.op)) {
      EXPECT_EQ(linear->n_rows, n_rows);
      read.insert(linear->w.data);
    } else if (const auto* ffn = std::get_if<NormGatedFfnArgs>(&entry.op)) {
      read.insert(ffn->gate.data);
      read.insert(ffn->up.data);
    } else if (const auto* logits = std::get_if<NormLogitsArgs>(&entry.op)) {
      read.insert(logits->head.data);
    } else if (std::holds_alternative<StoreRowsArgs>(entry.op)) {
      ++stores;
    }
  }
  EXPECT_EQ(read.size(), 6u * 7 + 1);
  for (const void* weight : read) EXPECT_EQ(read.count(weight), 1u);
  return stores;
}

// Rows of several groups read each weight matrix once per step, wherever their K/V go: home, to
// rows that count what is kept, to slots of working sets.
TEST_P(StepperTest, WeightsAreReadOncePerStep) {
  for (const bool on_host : {false, true}) {
    if (on_host && GetParam() == "cpu") continue;  // has no tier beside its own
    SCOPED_TRACE(on_host);
    if (on_host) MakeEngineFor(kSelecting, "host");
    std::vector<std::unique_ptr<RowGroup>> groups;
    std::vector<DecodeRow> rows;
    for (const PolicyOptions& policy : {kFull, kSelecting, on_host ? kSelecting : kForgetting}) {
      RowGroup& group = *groups.emplace_back(Open(policy, 5));
      for (size_t i = 0; i < 5; ++i) rows.push_back(Join(group, Numbers(40, i)));
    }
    ReadWeights();
    Step(rows);
    EXPECT_GT(ExpectReadOnce(15), 0u);
  }
}

// And so do rows of a prompt beside them, if products are shared.
TEST_P(StepperTest, AChunkReadsTheSameWeights) {
  const auto group = Open(kSelecting, 5);
  std::vector<DecodeRow> rows;
  for (size_t i = 0; i < 4; ++i) rows.push_back(Join(*group, Numbers(40, i)));
  const auto member = group->Join();
  ASSERT_TRUE(member.ok());
  const std::vector<int32_t> prompt = Numbers(70, 9);
  const PromptChunk chunk = ChunkAt(*group, *member, prompt, 0, 30);
  CoreOf(*engine_).options.shared_products = true;
  ReadWeights();
  Step(rows, &chunk);
  ExpectReadOnce(34);
}

// Greedy and drawn rows of two policies, ahead of the host and led by it.
TEST_P(StepperTest, MixesGoAheadOfTheHost) {
  const auto a = Open(kFull, 2);
  const auto b = Open(kSelecting, 2);
  const auto a_led = Open(kFull, 2);
  const auto b_led = Open(kSelecting, 2);
  std::vector<DecodeRow> led = {Join(*a_led, Numbers(50, 1)), Join(*a_led, Numbers(70, 2)),
                                Join(*b_led, Numbers(90, 3))};
  const std::vector<DecodeRow> ahead_rows = {Join(*a, Numbers(50, 1)), Join(*a, Numbers(70, 2)),
                                             Join(*b, Numbers(90, 3))};
  const SamplingOptions drawn{.temperature = 1, .top_k = 20, .seed = 3};
  std::vector<Sampler> host, device;
  for (std::vector<Sampler>* samplers : {&host, &device}) {
    for (const SamplingOptions& options : {SamplingOptions{}, drawn, drawn}) {
      samplers->emplace_back(options, kVocab);
    }
  }
  StepsAhead ahead(*stepper_, ahead_rows, {&device[0], &device[1], &device[2]});
  std::vector<int32_t> tokens;
  for (int64_t left = 12; left > 2; --left) {  // the last two are not read
    const auto read = ahead.Read(left);
    ASSERT_TRUE(read.ok()) << read.status().message();
    for (const DecodeRow& row : *read) tokens.push_back(row.token);
  }
  ahead.End();
  EXPECT_EQ(a->length(0), 60);
  EXPECT_EQ(b->length(0), 100);
  size_t at = 0;
  for (int step = 0; step < 10; ++step) {
    const auto logits = Step(led);
    for (size_t r = 0; r < led.size(); ++r) {
      led[r].token = host[r].Sample(logits[r].data());
      EXPECT_EQ(tokens[at++], led[r].token) << "row " << r << " of step " << step;
    }
  }
}

// A row that cannot have a token leaves the others as they were.
TEST_P(StepperTest, AFailedMixChangesNothing) {
  const auto a = Open(kFull, 1);
  const auto b = Open(kStreaming, 1);
  const std::vector<DecodeRow> rows = {Join(*a, Numbers(30, 1)), Join(*b, Numbers(30, 2))};
  std::vector<DecodeRow> bad = rows;
  bad[1].token = kVocab;
  std::vector<float> logits(2 * kVocab);
  const std::vector<float*> to = {logits.data(), logits.data() + kVocab};
  EXPECT_EQ(stepper_->Step(bad, to).code(), StatusCode::kInvalidArgument);
  const auto full = Open(kFull, 1);
  Join(*full, Numbers(380, 3));
  const std::vector<int32_t> rest = Numbers(60, 4);  // of a context of 400
  const PromptChunk too_long{.group = full.get(), .tokens = rest, .prompt_end = 440};
  EXPECT_EQ(stepper_->Step(rows, to, &too_long).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(full->length(0), 380);
  EXPECT_EQ(a->length(0), 30);
  EXPECT_EQ(b->length(0), 30);
  Step(rows);
}

INSTANTIATE_TEST_SUITE_P(Devices, StepperTest, testing::Values("ref", "cpu", "cuda"), NameOf);

// --- Which mixes are recorded.

TEST(MixedSteps, AreRecordedAtTheirFourthUseAndForgottenWithAGroup) {
  const auto backend = MakeRefBackend();
  MixedSteps steps;
  const MixedSteps::Key key{.parts = {{1, 0, 2}, {2, 1, 1}}, .logits_row = 0, .end = 0};
  for (int use = 1; use < MixedSteps::kFirstRecorded; ++use) EXPECT_EQ(steps.Use(key), nullptr);
  auto* recording = steps.Use(key);
  ASSERT_NE(recording, nullptr);
  *recording = backend->Record([] {});
  for (int64_t other = 10; other < 10 + static_cast<int64_t>(MixedSteps::kMost) - 1; ++other) {
    steps.Use({.parts = {{other, 0, 1}}, .logits_row = 0, .end = 0});
  }
  EXPECT_NE(*steps.Use(key), nullptr);
  steps.Use({.parts = {{99, 0, 1}}, .logits_row = 0, .end = 0});  // one goes: the oldest
  EXPECT_EQ(steps.size(), MixedSteps::kMost);
  EXPECT_NE(*steps.Use(key), nullptr);
  steps.Forget(2);
  EXPECT_EQ(steps.Use(key), nullptr);
}

}  // namespace
}  // namespace omnikv::stepper_test
