// Prompts that pass layer by layer (docs/decisions/046): the same answers as chunk by chunk, in the
// memory of one layer.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "../made_up_model.h"
#include "counting_backend.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "engine/stepper.h"
#include "model/generated.h"
#include "on_device.h"
#include "refusing_backend.h"

namespace omnikv::prompts_by_layer_test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kVocab = 160;
constexpr size_t kNoCap = std::numeric_limits<size_t>::max();
const PolicyOptions kTova = {.name = "tova", .settings = {{"budget", "24"}, {"room", "40"}}};
const PolicyOptions kSnapKv = {.name = "snapkv",
                               .settings = {{"budget", "24"}, {"window", "8"}, {"room", "40"}}};
const PolicyOptions kSnapKvAnew = {
    .name = "snapkv",
    .settings = {{"budget", "24"}, {"window", "8"}, {"turn", "recompress"}, {"room", "40"}}};
const PolicyOptions kExpected = {.name = "expected_attention",
                                 .settings = {{"budget", "24"}, {"room", "40"}}};
const PolicyOptions kExpectedAnew = {
    .name = "expected_attention",
    .settings = {{"budget", "24"}, {"turn", "recompress"}, {"room", "40"}}};

const PolicyOptions kPyramid = {.name = "pyramidkv",
                                .settings = {{"budget", "24"}, {"window", "8"}, {"room", "40"}}};
const PolicyOptions kPyramidAnew = {
    .name = "pyramidkv",
    .settings = {{"budget", "24"}, {"window", "8"}, {"turn", "recompress"}, {"room", "40"}}};
const PolicyOptions kH2o = {.name = "h2o",
                            .settings = {{"budget", "24"}, {"recent", "8"}, {"room", "40"}}};
// Chooses after passes over the prompt; a host backend alone would not let it pass by layer.
const PolicyOptions kKvzip = {.name = "kvzip",
                              .settings = {{"ratio", "0.06"}, {"chunk", "64"}, {"room", "40"}}};
// Heads that keep different numbers of blocks.
const PolicyOptions kKvzipMore = {.name = "kvzip",
                                  .settings = {{"ratio", "0.4"}, {"chunk", "64"}, {"room", "40"}}};
const PolicyOptions kKvzipAnew = {
    .name = "kvzip",
    .settings = {{"ratio", "0.4"}, {"chunk", "64"}, {"turn", "recompress"}, {"room", "40"}}};
// A pass is longer than what a layer with a window keeps.
const PolicyOptions kKvzipLong = {.name = "kvzip",
                                  .settings = {{"ratio", "0.4"}, {"chunk", "448"}, {"room", "40"}}};
const PolicyOptions kObserved = {
    .name = "h2o", .settings = {{"budget", "24"}, {"mode", "observed"}, {"room", "40"}}};

std::vector<int32_t> Tokens(int64_t n, int64_t seed = 1) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < n; ++i) {
    tokens.push_back(static_cast<int32_t>((i * 37 + i / 50 * seed * 11) % kVocab));
  }
  return tokens;
}

// How an engine is made.
struct Made {
  PolicyOptions policy;
  int64_t context = 640;
  int32_t n_layers = 6;
  bool windows = false;  // of two sizes, and a norm behind each half of a layer
  bool by_layer = true;  // else the plan is that of chunks
  int32_t sessions = 1;
  size_t cap = kNoCap;  // of CountingBackend
  size_t own_work = 0;  // the same
  bool card = false;    // the same
};

ModelConfig Config(const Made& setup) {
  ModelConfig config = SmallLlama({.n_layers = setup.n_layers, .max_context = setup.context});
  config.residual_scale = 0.75f;
  if (!setup.windows) return config;
  config.post_norm = true;
  for (const size_t layer : {0, 3, 5}) config.layers[layer].window = 100;
  config.layers[1].window = 30;
  return config;
}

using Wrap = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)>;

Result<std::unique_ptr<Engine>> Make(const std::string& device, const Made& setup,
                                     const Wrap& wrap) {
  auto core = std::make_unique<EngineCore>();
  core->options = {.device = device,
                   .threads = 2,
                   .context = setup.context,
                   .place = setup.card && !setup.by_layer ? "device" : "auto",
                   .policy = setup.policy,
                   .kv_dtype = "f32",
                   .precision = "full",
                   .prefill_chunk = 48,
                   .max_sessions = setup.sessions};
  core->config = Config(setup);
  OKV_ASSIGN_OR_RETURN(auto backend, MakeBackend(core->options));
  core->backend = wrap(std::move(backend));
  OKV_ASSIGN_OR_RETURN(core->weights, GenerateWeights(*core->backend, core->config, DType::kF32));
  // The weights are there already.
  OKV_ASSIGN_OR_RETURN(MemoryPlan plan,
                       PlanMemory(core->options, core->config, 0, DType::kF32, *core->backend));
  const bool keeps = setup.policy.name != "full";
  const bool passes = setup.policy.name == "kvzip";
  if (passes && plan.by_layer) {
    EXPECT_LT(setup.cap, kNoCap) << "there is room for all rows of a prompt";
  } else if (passes && setup.by_layer) {
    const auto policy =
        PolicyFor(setup.policy, core->config, plan.context, plan.kv_dtype, /*fetches=*/false);
    PassByLayer(core->config, **policy, setup.sessions, plan);
  } else {
    EXPECT_EQ(plan.by_layer, keeps && !passes) << "the context is small enough for chunks";
  }
  if (!passes && !setup.by_layer) {
    plan.by_layer = false;
    plan.max_held = 0;
    std::fill(plan.layer_held.begin(), plan.layer_held.end(), 0);
  }
  core->all_by_layer = setup.by_layer && !keeps;
  return MakeEngine(std::move(core), plan, 0);
}

class PromptsByLayer : public OnDevice {
 protected:
  std::unique_ptr<Engine> Make(const Made& setup) {
    auto engine =
        prompts_by_layer_test::Make(GetParam(), setup, [&](std::unique_ptr<Backend> inner) {
          auto counting = std::make_unique<CountingBackend>(std::move(inner), setup.cap,
                                                            setup.own_work, setup.card);
          backend_ = counting.get();
          return counting;
        });
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  static std::vector<float> Logits(const Session& session) {
    return {session.logits(), session.logits() + kVocab};
  }
  // The same bits on ref, whose sums do not depend on where rows lie.
  static void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    if (GetParam() == "ref") {
      EXPECT_EQ(got, expected);
      return;
    }
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error = std::max(error, std::abs(static_cast<double>(got[i]) - expected[i]));
      size = std::max(size, std::abs(static_cast<double>(expected[i])));
    }
    EXPECT_LE(error, F32Tolerance(GetParam()) * size);
  }

  CountingBackend* backend_ = nullptr;  // of the last engine
};

// Prompts of several chunks, the logits of all rows, answers, a later turn and a fork.
std::vector<std::vector<float>> Talk(Engine& engine, const PolicyOptions& policy) {
  std::vector<std::vector<float>> said;
  const auto session = *engine.NewSession(policy);
  const auto add = [&](const Session& from) {
    said.emplace_back(from.logits(), from.logits() + kVocab);
  };
  const auto ok = [](const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); };
  ok(session->PrefillLogits(
      Tokens(130), [&](int64_t, const float* row) { said.emplace_back(row, row + kVocab); }));
  std::vector<int32_t> tokens = Tokens(500, 2);
  for (const int64_t length : {20, 48, 500}) {
    tokens[0] = static_cast<int32_t>(length % kVocab);  // all anew
    ok(session->Prompt({tokens.begin(), tokens.begin() + length}));
    add(*session);
  }
  const auto step = [&](Session& to, int32_t token) {
    ok(to.Step(token));
    add(to);
  };
  for (int32_t i = 0; i < 10; ++i) {
    step(*session, i);
    tokens.push_back(i);
  }
  const auto fork = *session->Fork();
  const std::vector<int32_t> turn = Tokens(20, 3);
  tokens.insert(tokens.end(), turn.begin(), turn.end());
  ok(session->Prompt(tokens));
  EXPECT_EQ(session->stats().prefill_tokens, 20);
  add(*session);
  for (int32_t i = 0; i < 5; ++i) step(*session, 2 * i);
  for (int32_t i = 0; i < 5; ++i) step(*fork, 3 * i);
  return said;
}

TEST_P(PromptsByLayer, AnswerAsChunkByChunk) {
  for (const PolicyOptions& policy :
       {PolicyOptions{.name = "full"}, kTova, kSnapKv, kSnapKvAnew, kPyramid, kPyramidAnew, kH2o,
        kObserved, kExpected, kExpectedAnew, kKvzipMore, kKvzipAnew}) {
    for (const bool windows : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, windows {}", policy.name, windows));
      Made setup{.policy = policy, .windows = windows, .sessions = 2};
      const auto by_layer = Talk(*Make(setup), policy);
      setup.by_layer = false;
      const auto by_chunk = Talk(*Make(setup), policy);
      ASSERT_EQ(by_layer.size(), by_chunk.size());
      for (size_t i = 0; i < by_layer.size(); ++i) {
        SCOPED_TRACE(i);
        ExpectSame(by_layer[i], by_chunk[i]);
        if (HasFailure()) return;
      }
    }
  }
}

// Layers with a window have the prompt's last rows still when a pass is over, and no room for all
// rows of a pass.
TEST_P(PromptsByLayer, PassesMayBeLongerThanWindows) {
  std::vector<std::vector<float>> first;
  for (const bool by_layer : {true, false}) {
    const auto engine =
        Make({.policy = kKvzipLong, .context = 1024, .windows = true, .by_layer = by_layer});
    const BankConfig& bank = CoreOf(*engine).bank->config();
    for (const TableSpec& table : bank.tables) {
      if (table.window == 0) continue;
      EXPECT_LT(bank.TableBlocks(table), bank.BlocksFor(500 + 448));
    }
    const auto session = *engine->NewSession(kKvzipLong);
    ASSERT_TRUE(session->Prompt(Tokens(500)).ok());
    std::vector<std::vector<float>> said = {Logits(*session)};
    for (int32_t i = 0; i < 5; ++i) {
      ASSERT_TRUE(session->Step(i).ok());
      said.push_back(Logits(*session));
    }
    if (by_layer) first = said;
    for (size_t i = 0; i < said.size(); ++i) ExpectSame(said[i], first[i]);
  }
}

// What holds 512 tokens whole reads a prompt of 2000 and keeps few of it, and the memory of its
// prompt is free again. Chunk by chunk it cannot.
TEST_P(PromptsByLayer, FourTimesTheContextThatFitsWhole) {
  if (GetParam() == "ref") GTEST_SKIP() << "too slow";
  Made setup{.policy = {.name = "full"}, .context = 512, .n_layers = 24};
  {
    setup.by_layer = false;
    const auto engine = Make(setup);
    const auto session = *engine->NewSession(setup.policy);
    ASSERT_TRUE(session->Prompt(Tokens(500)).ok());
    setup.cap = backend_->most();
    const EngineCore& core = CoreOf(*engine);
    setup.own_work = core.plan.activations -
                     Workspace::BytesFor(core.config, core.work.max_rows, core.work.max_out);
  }
  setup.context = 2048;
  const auto none = [&](std::unique_ptr<Backend> inner) -> std::unique_ptr<Backend> {
    return std::make_unique<CountingBackend>(std::move(inner), setup.cap, setup.own_work,
                                             setup.card);
  };
  const auto full = prompts_by_layer_test::Make(GetParam(), setup, none);
  ASSERT_FALSE(full.ok());
  EXPECT_THAT(full.status().message(), HasSubstr("a context of 2048 tokens does not fit"));
  for (const PolicyOptions& policy :
       {kTova, kSnapKv, kPyramid, kH2o, kObserved, kExpected, kExpectedAnew, kKvzip}) {
    SCOPED_TRACE(policy.name);
    const bool passes = policy.name == "kvzip";  // of which a card alone has the rows on the host
    setup.policy = policy;
    setup.card = passes;
    setup.by_layer = false;
    const auto by_chunk = prompts_by_layer_test::Make(GetParam(), setup, none);
    ASSERT_FALSE(by_chunk.ok());
    EXPECT_THAT(by_chunk.status().message(),
                HasSubstr(passes ? "does not fit" : "K/V cannot be had"));
    setup.by_layer = true;
    const auto engine = Make(setup);
    const auto session = *engine->NewSession(policy);
    const size_t before = backend_->held();
    ASSERT_TRUE(session->Prompt(Tokens(passes ? 1850 : 2000)).ok());
    EXPECT_EQ(backend_->held(), before);
    EXPECT_LE(backend_->most(), before + CoreOf(*engine).plan.prompt);
    for (int32_t i = 0; i < 10; ++i) ASSERT_TRUE(session->Step(i).ok());
    EXPECT_LE(session->stats().held_fraction, passes ? 0.2 : 0.1);
  }
}

TEST_P(PromptsByLayer, ACancelReturnsToTheBeginning) {
  const Made setup{.policy = kTova};
  const auto engine = Make(setup);
  auto fresh = *engine->NewSession(kTova);
  ASSERT_TRUE(fresh->Prompt(Tokens(300)).ok());
  const std::vector<float> expected = Logits(*fresh);
  fresh.reset();
  const auto session = *engine->NewSession(kTova);
  const size_t held = backend_->held();
  const size_t in_use = CoreOf(*engine).bank->DeviceBytes();
  int64_t count = 0;
  int64_t before = 0;
  const Status status = session->Prompt(Tokens(300), [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 300);
    EXPECT_GT(done, before);
    before = done;
    if (++count == 23) session->Cancel();  // of 6 layers and 7 chunks
  });
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
  EXPECT_THAT(status.message(), HasSubstr("0 of 300"));
  EXPECT_EQ(count, 23);
  EXPECT_TRUE(session->tokens().empty());
  EXPECT_FALSE(session->Generate({}).ok());
  EXPECT_EQ(backend_->held(), held);
  EXPECT_EQ(CoreOf(*engine).bank->DeviceBytes(), in_use);
  ASSERT_TRUE(session->Prompt(Tokens(300)).ok());
  EXPECT_EQ(Logits(*session), expected);
}

// Memory and ops refused at each place of a prompt in turn. Chunk by chunk, the chunks before stay.
TEST_P(PromptsByLayer, AFailureLeavesNothingBehind) {
  struct Setup {
    PolicyOptions policy;
    bool windows, by_layer;
  };
  for (const auto& [policy, windows, by_layer] : {Setup{kSnapKv, false, true},
                                                  {kSnapKv, true, true},
                                                  {kSnapKv, false, false},
                                                  {kPyramid, true, true},
                                                  {kKvzip, true, true},
                                                  {kH2o, false, false}}) {
    SCOPED_TRACE(policy.name);
    Fault fault;
    auto engine = prompts_by_layer_test::Make(
        GetParam(), {.policy = policy, .windows = windows, .by_layer = by_layer, .sessions = 2},
        [&](std::unique_ptr<Backend> inner) {
          auto counting = std::make_unique<CountingBackend>(std::move(inner), kNoCap);
          backend_ = counting.get();
          return std::make_unique<RefusingBackend>(std::move(counting), fault, /*card=*/false);
        });
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    const auto session = *(*engine)->NewSession(policy);
    const size_t held = backend_->held();
    const size_t in_use = CoreOf(**engine).bank->DeviceBytes();
    fault = {};
    ASSERT_TRUE(session->Prompt(Tokens(130)).ok());
    const std::vector<float> expected = Logits(*session);
    const int64_t places = fault.seen;
    for (int64_t at = 0; at < places; at += at < 20 ? 1 : 17) {
      SCOPED_TRACE(fmt::format("place {} of {}", at, places));
      fault = {.at = at};
      const Status failed = session->Prompt(Tokens(130));
      ASSERT_EQ(failed.code(), StatusCode::kResourceExhausted) << failed.message();
      EXPECT_EQ(backend_->held(), held);
      if (by_layer) {
        EXPECT_TRUE(session->tokens().empty());
        EXPECT_EQ(CoreOf(**engine).bank->DeviceBytes(), in_use);
      }
      ASSERT_TRUE(session->Prompt(Tokens(130)).ok());
      EXPECT_EQ(Logits(*session), expected);
    }
  }
}

// Steps of one sequence between those of another's prompt.
TEST_P(PromptsByLayer, OtherSequencesDecodeMeanwhile) {
  for (const Made& setup : {Made{.policy = kTova, .windows = true, .sessions = 2},
                            Made{.policy = kKvzip, .windows = true, .sessions = 2}}) {
    const auto engine = Make(setup);
    const auto run = [&](bool meanwhile) {
      Stepper stepper(CoreOf(*engine));
      const auto group = *RowGroup::Open(CoreOf(*engine), setup.policy, 2);
      std::vector<std::vector<float>> said(2, std::vector<float>(kVocab));
      const auto prompt = [&](const std::vector<int32_t>& tokens, const auto& between) {
        const int32_t member = *group->Join();
        auto steps = PromptSteps::Begin(stepper, *group, member, tokens, false);
        EXPECT_TRUE(steps.ok()) << steps.status().message();
        int32_t count = 0;
        while (!steps->done()) {
          EXPECT_TRUE(steps->Advance().ok());
          if (!steps->done()) between(count++);
        }
        EXPECT_TRUE(stepper.Logits(0, group->length(member), said[1].data()).ok());
        return member;
      };
      const int32_t first = prompt(Tokens(200), [](int32_t) {});
      const auto step = [&](int32_t member, int32_t token, std::vector<float>& to) {
        const DecodeRow row{.group = group.get(), .member = member, .token = token};
        float* logits = to.data();
        EXPECT_TRUE(stepper.Step({&row, 1}, {&logits, 1}).ok());
      };
      const std::vector<int32_t> tokens = Tokens(150, 5);
      int32_t count = 0;
      const int32_t second = prompt(tokens, [&](int32_t i) {
        if (meanwhile) step(first, i, said[0]);
        count = i + 1;
      });
      if (!meanwhile) {
        for (int32_t i = 0; i < count; ++i) step(first, i, said[0]);
      }
      step(first, 7, said[0]);
      step(second, 9, said[1]);
      return said;
    };
    EXPECT_EQ(run(true), run(false));
  }
}

TEST_P(PromptsByLayer, TurnsAndAnswersHaveTheirRoom) {
  for (const auto& [policy, evicts] : {std::pair{kTova, true},
                                       {kSnapKv, false},
                                       {kPyramid, false},
                                       {kH2o, true},
                                       {kObserved, false}}) {
    SCOPED_TRACE(policy.name);
    const auto engine = Make({.policy = policy});
    const auto session = *engine->NewSession(policy);
    std::vector<int32_t> tokens = Tokens(300);
    ASSERT_TRUE(session->Prompt(tokens).ok());
    tokens.resize(341, 3);
    const Status refused = session->Prompt(tokens);
    EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(refused.message(), HasSubstr("setting room"));
    EXPECT_EQ(session->tokens(), Tokens(300));
    tokens.resize(340);
    ASSERT_TRUE(session->Prompt(tokens).ok());
    const Status answer = session->Step(1);
    EXPECT_EQ(answer.ok(), evicts) << answer.message();
    if (!answer.ok()) {
      EXPECT_THAT(answer.message(), HasSubstr("setting room"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, PromptsByLayer, testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::prompts_by_layer_test
