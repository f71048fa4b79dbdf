// Sequences that decode together give what each gives alone, whoever joins and leaves in between.
#include "engine/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "../policy_settings.h"
#include "../test_data.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/trace/trace_backend.h"
#include "model/generated.h"
#include "on_device.h"

namespace omnikv::batch_test {
namespace {

using ::testing::HasSubstr;

const std::string kGoldens = TestData("tests/golden/");
const std::string kRandom = kGoldens + "policy_model";  // 8 layers, vocabulary 128

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

int32_t Best(const float* logits, int32_t vocab) {
  return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
}

// One sequence alone, and where it sits in the batch.
struct Alone {
  std::unique_ptr<Session> session;
  int32_t member = -1;
  int32_t token = 3;  // that comes next
};

class BatchTest : public OnDevice {
 protected:
  static std::unique_ptr<Engine> Load(EngineOptions options) {
    options.device = GetParam();
    options.threads = 2;
    options.precision = "full";
    options.kv_dtype = "f32";
    auto engine = Engine::Load(options);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  // Of the largest logit: bits on `ref`, sums of f32 in another order elsewhere.
  static double Tolerance() { return GetParam() == "ref" ? 0 : F32Tolerance(GetParam()); }
  void ExpectSame(const float* want, const float* got, int32_t vocab) const {
    double error = 0;
    double size = 0;
    for (int32_t i = 0; i < vocab; ++i) {
      error = std::max(error, std::abs(static_cast<double>(want[i]) - got[i]));
      size = std::max(size, std::abs(static_cast<double>(want[i])));
    }
    EXPECT_GT(size, 0);
    EXPECT_LE(error, Tolerance() * size);
  }

  // Runs prompts of these lengths in a batch of `max_seqs`, coming and going, against sessions.
  void ComeAndGo(Engine& engine, const PolicyOptions& policy) {
    const int32_t vocab = engine.vocab();
    auto opened = Batch::Open(CoreOf(engine), policy, 4);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    Batch& batch = **opened;
    SCOPED_TRACE(batch.policy() + " " + batch.settings());
    size_t seed = 0;
    const auto join = [&](size_t length) {
      const std::vector<int32_t> prompt = Numbers(length, ++seed);
      Alone one{.session = *engine.NewSession(policy)};
      EXPECT_TRUE(one.session->Prompt(prompt).ok());
      const auto member = batch.Join(prompt);
      EXPECT_TRUE(member.ok()) << member.status().message();
      one.member = *member;
      ExpectSame(one.session->logits(), batch.logits(*member), vocab);
      return one;
    };
    const auto step = [&](std::vector<Alone*> rows, int n) {
      for (int i = 0; i < n; ++i) {
        std::vector<Batch::Next> next;
        for (Alone* row : rows) {
          next.push_back({row->member, row->token});
          ASSERT_TRUE(row->session->Step(row->token).ok());
          row->token = (row->token * 7 + 11) % vocab;  // no choice by these is close to a tie
        }
        const Status status = batch.Step(next);
        ASSERT_TRUE(status.ok()) << status.message();
        for (Alone* row : rows) {
          SCOPED_TRACE(batch.length(row->member));
          EXPECT_EQ(batch.length(row->member), static_cast<int64_t>(row->session->tokens().size()));
          ExpectSame(row->session->logits(), batch.logits(row->member), vocab);
        }
      }
    };
    Alone a = join(120);
    Alone b = join(1);
    Alone c = join(47);
    step({&a, &b, &c}, 4);
    batch.Leave(b.member);
    step({&c, &a}, 3);  // in another order
    Alone d = join(90);
    EXPECT_EQ(d.member, b.member);
    Alone e = join(5);
    step({&e, &a, &d}, 3);  // c waits
    step({&a, &c, &d, &e}, 25);
    batch.Leave(a.member);
    batch.Leave(e.member);
    step({&d, &c}, 2);
    step({&d}, 2);
  }
};

// Every policy that takes batches, as the house tests run it, and omnikv where sequences of a batch
// take different variants: shorter than the budget, below `dense_below`.
std::vector<PolicyOptions> Policies() {
  std::vector<PolicyOptions> all = {
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}},
      {.name = "omnikv",
       .settings = {{"filters", "1,4"}, {"budget", "24"}, {"score", "raw"}, {"dense_below", "60"}}},
      {.name = "omnikv",
       .settings = {{"filters", "1,4"}, {"budget", "24"}, {"dense_below", "60"}},
       .force_indices = true},
      {.name = "streaming", .settings = {{"budget", "24"}}},
      {.name = "full"},
  };
  for (const PolicyInfo& info : AllPolicies()) {
    if (!info.batches) continue;
    for (const SettingList& settings : info.test_settings) {
      all.push_back({.name = info.name, .settings = WithFiles(info, settings, 8, 2)});
    }
  }
  return all;
}

TEST_P(BatchTest, GivesWhatEachSequenceGivesAlone) {
  const auto engine = Load({.model = kRandom, .context = 256, .max_sessions = 16});
  for (const PolicyOptions& policy : Policies()) ComeAndGo(*engine, policy);
}

// Prompts of several chunks, and blocks that others have left.
TEST_P(BatchTest, PromptsOfSeveralChunks) {
  const auto engine =
      Load({.model = kRandom, .context = 256, .prefill_chunk = 20, .max_sessions = 16});
  const std::vector<PolicyOptions> policies = Policies();
  for (size_t i = 0; i < policies.size(); i += 4) ComeAndGo(*engine, policies[i]);
}

// Sliding-window layers and their own rotations; norms of heads; attention with a cap.
TEST_P(BatchTest, OtherFamilies) {
  for (const char* family : {"gemma3", "mistral", "qwen3_f32", "olmo2"}) {
    SCOPED_TRACE(family);
    const auto engine =
        Load({.model = kGoldens + "models/" + family, .context = 192, .max_sessions = 16});
    ComeAndGo(*engine, {.name = "full"});
  }
}

TEST_P(BatchTest, GreedyTokensAreThoseOfSessions) {
  const auto engine = Load({.model = kRandom, .context = 256, .max_sessions = 16});
  constexpr size_t kTokens = 30;
  const std::vector<PolicyOptions> policies = Policies();
  for (size_t i = 0; i < policies.size(); i += 2) {
    const PolicyOptions& policy = policies[i];
    auto opened = Batch::Open(CoreOf(*engine), policy, 4);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    Batch& batch = **opened;
    SCOPED_TRACE(batch.policy() + " " + batch.settings());
    std::vector<Batch::Next> next;
    std::vector<std::vector<int32_t>> want;
    std::vector<std::vector<int32_t>> got;
    for (const size_t length : {70, 3, 31, 22}) {
      const std::vector<int32_t> prompt = Numbers(length, length);
      const auto session = engine->NewSession(policy);
      ASSERT_TRUE(session.ok());
      ASSERT_TRUE((*session)->Prompt(prompt).ok());
      const auto answer = (*session)->Generate({.max_tokens = kTokens, .ignore_eos = true});
      ASSERT_TRUE(answer.ok());
      want.push_back(answer->tokens);
      const auto member = batch.Join(prompt);
      ASSERT_TRUE(member.ok());
      const int32_t first = Best(batch.logits(*member), engine->vocab());
      got.push_back({first});
      next.push_back({*member, first});
    }
    for (const int64_t n : {1, 2, 9, 17}) {  // in pieces
      const auto more = batch.Generate(next, n);
      ASSERT_TRUE(more.ok()) << more.status().message();
      for (size_t r = 0; r < next.size(); ++r) {
        ASSERT_EQ((*more)[r].size(), static_cast<size_t>(n));
        got[r].insert(got[r].end(), (*more)[r].begin(), (*more)[r].end());
        next[r].token = got[r].back();
        EXPECT_EQ(Best(batch.logits(next[r].member), engine->vocab()), got[r].back());
      }
    }
    EXPECT_EQ(got, want);
  }
}

// Rows of one batch draw each by its own settings, what a session of its own would.
TEST_P(BatchTest, DrawsWhatSessionsDraw) {
  const auto engine = Load({.model = kRandom, .context = 256, .max_sessions = 16});
  const std::vector<SamplingOptions> settings = {
      {.temperature = 1, .seed = 1},
      {},
      {.temperature = 0.7, .top_k = 40, .top_p = 0.95, .seed = 2},
      {.repeat_penalty = 1.3},
      {.temperature = 2, .min_p = 0.05, .repeat_penalty = 1.1, .seed = 3}};
  auto opened = Batch::Open(CoreOf(*engine), {.name = "full"}, 5);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  Batch& batch = **opened;
  std::vector<Batch::Next> next;
  std::vector<Sampler> samplers;
  std::vector<std::vector<int32_t>> want;
  std::vector<std::vector<int32_t>> got;
  samplers.reserve(settings.size());
  for (size_t i = 0; i < settings.size(); ++i) {
    const std::vector<int32_t> prompt = Numbers(20 + 9 * i, i);
    const auto session = engine->NewSession({.name = "full"});
    ASSERT_TRUE(session.ok());
    ASSERT_TRUE((*session)->Prompt(prompt).ok());
    const auto answer =
        (*session)->Generate({.max_tokens = 30, .sampling = settings[i], .ignore_eos = true});
    ASSERT_TRUE(answer.ok());
    want.push_back(answer->tokens);
    const auto member = batch.Join(prompt);
    ASSERT_TRUE(member.ok());
    Sampler& sampler = samplers.emplace_back(settings[i], engine->vocab());
    for (const int32_t t : prompt) sampler.See(t);
    got.push_back({sampler.Sample(batch.logits(*member))});
    next.push_back({*member, got.back().front(), &sampler});
  }
  for (const int64_t n : {1, 10, 18}) {  // in pieces
    const auto more = batch.Generate(next, n);
    ASSERT_TRUE(more.ok()) << more.status().message();
    for (size_t r = 0; r < next.size(); ++r) {
      got[r].insert(got[r].end(), (*more)[r].begin(), (*more)[r].end());
      next[r].token = got[r].back();
    }
  }
  EXPECT_EQ(got, want);
}

// More rows than the kernels of a few rows take, more than a block of a card has warps, and all.
TEST_P(BatchTest, ManySequences) {
  const auto engine = Load({.model = kRandom, .context = 128, .max_sessions = 65});
  for (const size_t i : {0, 3, 4}) {
    const PolicyOptions policy = Policies()[i];
    const auto batch = *Batch::Open(CoreOf(*engine), policy, 64);
    SCOPED_TRACE(batch->policy() + " " + batch->settings());
    std::vector<Batch::Next> next;
    std::vector<std::vector<int32_t>> texts;
    for (size_t s = 0; s < 64; ++s) {
      texts.push_back(Numbers(5 + s % 70, s));
      const auto member = batch->Join(texts.back());
      ASSERT_TRUE(member.ok()) << member.status().message();
      next.push_back({*member, static_cast<int32_t>(s)});
    }
    for (const size_t rows : {64, 33, 17, 64}) {
      const std::span<Batch::Next> some(next.data() + (64 - rows) / 2, rows);
      ASSERT_TRUE(batch->Step(some).ok());
      for (Batch::Next& row : some) {
        std::vector<int32_t>& text = texts[static_cast<size_t>(row.member)];
        text.push_back(row.token);
        row.token = Best(batch->logits(row.member), engine->vocab());
      }
    }
    const auto ahead = batch->Generate(next, 3);
    ASSERT_TRUE(ahead.ok()) << ahead.status().message();
    for (size_t r = 0; r < next.size(); r += 7) {
      const std::vector<int32_t>& text = texts[static_cast<size_t>(next[r].member)];
      const auto session = *engine->NewSession(policy);
      const size_t prompt = 5 + static_cast<size_t>(next[r].member) % 70;
      ASSERT_TRUE(
          session->Prompt({text.begin(), text.begin() + static_cast<ptrdiff_t>(prompt)}).ok());
      for (size_t t = prompt; t < text.size(); ++t) ASSERT_TRUE(session->Step(text[t]).ok());
      std::vector<int32_t> tokens = {next[r].token};
      tokens.insert(tokens.end(), (*ahead)[r].begin(), (*ahead)[r].end());
      for (size_t t = 0; t + 1 < tokens.size(); ++t) {
        ASSERT_TRUE(session->Step(tokens[t]).ok());
        EXPECT_EQ(Best(session->logits(), engine->vocab()), tokens[t + 1]) << "row " << r;
      }
      ExpectSame(session->logits(), batch->logits(next[r].member), engine->vocab());
    }
  }
}

TEST_P(BatchTest, RefusesWhatItCannotDoAndGoesOn) {
  const auto engine = Load({.model = kRandom, .context = 64, .max_sessions = 3});
  EngineCore& core = CoreOf(*engine);
  const auto message = [](const auto& result) {
    return result.ok() ? std::string() : result.status().message();
  };
  EXPECT_THAT(message(Batch::Open(core, {.name = "full"}, 0)), HasSubstr("expected 1 to 64"));
  EXPECT_THAT(message(Batch::Open(core, {.name = "full"}, 65)), HasSubstr("65 sequences"));
  EXPECT_THAT(message(Batch::Open(core, {.name = "fill"}, 2)), HasSubstr("fill"));
  const auto opened = Batch::Open(core, {.name = "full"}, 2);
  ASSERT_TRUE(opened.ok());
  Batch& batch = **opened;
  EXPECT_THAT(message(batch.Join({})), HasSubstr("empty"));
  EXPECT_THAT(message(batch.Join(Numbers(65, 1))), HasSubstr("65 tokens"));
  const auto a = batch.Join(Numbers(10, 1));
  const auto b = batch.Join(Numbers(60, 2));
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_THAT(message(batch.Join({5})), HasSubstr("all 2 sequences of the batch"));
  // The second is full after four more: nothing happens to the first either.
  const std::vector<Batch::Next> next = {{*a, 5}, {*b, 6}};
  EXPECT_FALSE(batch.Generate(next, 5).ok());
  EXPECT_EQ(batch.length(*a), 10);
  EXPECT_FALSE(batch.Step(std::vector<Batch::Next>{{*a, 128}}).ok());
  EXPECT_FALSE(batch.Step({}).ok());
  EXPECT_TRUE(batch.Generate(next, 4).ok());
  EXPECT_EQ(batch.length(*a), 14);
  EXPECT_FALSE(batch.Step(next).ok());
  batch.Leave(*b);
  EXPECT_TRUE(batch.Join({5}).ok());
}

TEST_P(BatchTest, RefusesRotationsThatDependOnThePrompt) {
  for (const char* family : {"llama_longrope", "llama_dynamic"}) {
    const auto engine = Load({.model = kGoldens + "models/" + family, .max_sessions = 2});
    const auto batch = Batch::Open(CoreOf(*engine), {.name = "full"}, 2);
    ASSERT_FALSE(batch.ok());
    EXPECT_EQ(batch.status().code(), StatusCode::kUnsupported);
    EXPECT_THAT(batch.status().message(), HasSubstr("rotates its keys"));
  }
}

TEST(Batch, AChunkMustHoldARowOfEach) {
  const auto engine =
      Engine::Load({.model = kRandom, .device = "ref", .prefill_chunk = 3, .max_sessions = 4});
  ASSERT_TRUE(engine.ok());
  EXPECT_TRUE(Batch::Open(CoreOf(**engine), {.name = "full"}, 3).ok());
  const auto batch = Batch::Open(CoreOf(**engine), {.name = "full"}, 4);
  ASSERT_FALSE(batch.ok());
  EXPECT_THAT(batch.status().message(), HasSubstr("`prefill_chunk`"));
}

TEST(Batch, PoliciesMemoryIsGivenBack) {
  const auto engine = Engine::Load({.model = kRandom, .device = "ref", .max_sessions = 4});
  ASSERT_TRUE(engine.ok());
  EngineCore& core = CoreOf(**engine);
  const size_t before = core.policy_bytes;
  const PolicyOptions omnikv{.name = "omnikv",
                             .settings = {{"dense_below", "0"}, {"filters", "1"}, {"budget", "8"}}};
  size_t one = 0;
  {
    const auto batch = Batch::Open(core, omnikv, 1);
    one = core.policy_bytes - before;
  }
  EXPECT_GT(one, 0u);
  {
    const auto batch = Batch::Open(core, omnikv, 4);
    EXPECT_EQ(core.policy_bytes - before, 4 * (one - 4) + 4);  // but for the selector's weights
  }
  EXPECT_EQ(core.policy_bytes, before);
}

// An engine over made-up weights.
std::unique_ptr<Engine> MakeTiny(std::unique_ptr<Backend> backend) {
  auto core = std::make_unique<EngineCore>();
  core->options = {.context = 600, .max_sessions = 9};
  core->config = *GeometryConfig("tiny");
  core->weights = *GenerateWeights(*backend, core->config, DType::kBF16);
  auto plan = PlanMemory(core->options, core->config, core->weights.bytes, DType::kBF16, *backend);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  core->backend = std::move(backend);
  auto engine = MakeEngine(std::move(core), *plan, 0);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

// One launch of each op for all sequences; K/V of each counted, weights once; the same recorded
// step for every token.
TEST(Batch, AStepIsOneForAll) {
  const auto cpu = MakeCpuBackend({.threads = 2});
  auto owned = std::make_unique<TraceBackend>(*cpu);
  TraceBackend& trace = *owned;
  trace.set_logging(false);
  const auto engine = MakeTiny(std::move(owned));
  const int32_t n_layers = CoreOf(*engine).config.n_layers;
  const PolicyOptions policy{
      .name = "omnikv", .settings = {{"dense_below", "0"}, {"filters", "2,8"}, {"budget", "128"}}};

  struct Run {
    int64_t attends = 0, choices = 0;
    Cost attend, linear, all;
    size_t recordings = 0;
  };
  const auto run = [&](int32_t n) {
    Run r;
    const auto batch = Batch::Open(CoreOf(*engine), policy, 8);
    EXPECT_TRUE(batch.ok()) << batch.status().message();
    std::vector<Batch::Next> next;
    for (int32_t i = 0; i < n; ++i) next.push_back({*(*batch)->JoinMadeUp(500), 40 + i});
    const size_t before = trace.recordings().size();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE((*batch)->Step(next).ok());
    r.recordings = trace.recordings().size() - before;
    trace.Clear();
    trace.set_logging(true);
    EXPECT_TRUE((*batch)->Step(next).ok());
    trace.set_logging(false);
    for (const TraceEntry& e : trace.entries()) {
      r.attends += std::holds_alternative<AttendArgs>(e.op) ? 1 : 0;
      r.choices += std::holds_alternative<TopKArgs>(e.op) ? 1 : 0;
    }
    r.attend = trace.TotalOf("Attend");
    r.linear = trace.TotalOf("Linear");
    r.all = trace.Total();
    return r;
  };
  const Run one = run(1);
  const Run eight = run(8);
  EXPECT_EQ(one.recordings, 1u);
  EXPECT_EQ(eight.recordings, 1u);
  EXPECT_EQ(one.attends, n_layers);
  EXPECT_EQ(eight.attends, n_layers);
  EXPECT_EQ(one.choices, 2);
  EXPECT_EQ(eight.choices, 2);
  EXPECT_EQ(eight.attend.bytes_read, 8 * one.attend.bytes_read);
  EXPECT_EQ(eight.attend.flops, 8 * one.attend.flops);
  EXPECT_EQ(eight.linear.flops, 8 * one.linear.flops);
  EXPECT_LT(eight.linear.bytes_read, one.linear.bytes_read * 11 / 10);
  EXPECT_LT(eight.all.bytes_read, 4 * one.all.bytes_read);
}

INSTANTIATE_TEST_SUITE_P(Devices, BatchTest, ::testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::batch_test
