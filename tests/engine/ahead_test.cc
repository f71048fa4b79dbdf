// Steps that a device takes by itself, the choice of the token included, against a host that leads
// each of them. Where there is no card, ref and cpu stand in for one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../policy_settings.h"
#include "../test_data.h"
#include "as_device.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "engine/sampler.h"
#include "on_device.h"

namespace omnikv::ahead_test {
namespace {

const std::string kTiny = TestData("tests/golden/models/llama_f32");  // 256 tokens, no text
const std::string kRandom = TestData("tests/golden/policy_model");    // 8 layers, 128 tokens
const std::string kShipped = TestData("models/omnikv-tiny-q8_0.gguf");

struct Loaded {
  std::unique_ptr<Engine> engine;
  const TraceBackend* backend = nullptr;
};

// `eos`: tokens that end an answer.
Loaded Load(const std::string& device, const std::string& model, std::vector<int32_t> eos = {},
            const PolicyOptions& policy = {.name = "full"}, const std::string& place = "auto") {
  Loaded loaded;
  const EngineOptions options{.model = model,
                              .device = device,
                              .threads = 2,
                              .context = 256,
                              .place = place,
                              .policy = policy,
                              .precision = "full",
                              .max_sessions = 3};
  auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
    OKV_ASSIGN_OR_RETURN(auto backend, MakeBackend(options));
    auto traced = std::make_unique<AsDevice>(std::move(backend));
    loaded.backend = traced.get();
    return std::unique_ptr<Backend>(std::move(traced));
  });
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  loaded.engine = std::move(*engine);
  if (!eos.empty()) CoreOf(*loaded.engine).config.eos_ids = std::move(eos);
  return loaded;
}

std::unique_ptr<Session> Prompted(Engine& engine, size_t n = 20,
                                  const PolicyOptions& policy = {.name = "full"}) {
  auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  const size_t n_ids = static_cast<size_t>(std::min(engine.vocab(), 203)) - 3;
  std::vector<int32_t> prompt(n);
  for (size_t i = 0; i < n; ++i) prompt[i] = static_cast<int32_t>(3 + i * 37 % n_ids);
  EXPECT_TRUE((*session)->Prompt(prompt).ok());
  return std::move(*session);
}

std::vector<int32_t> Generated(Session& session, const SamplingOptions& sampling, int64_t n) {
  const auto result = session.Generate({.max_tokens = n, .sampling = sampling, .ignore_eos = true});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result->tokens;
}

// The tokens of a host that brings the logits and draws from them.
std::vector<int32_t> Led(Session& session, const SamplingOptions& sampling, int32_t vocab, int n) {
  Sampler sampler(sampling, vocab);
  for (const int32_t t : session.tokens()) sampler.See(t);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) {
    tokens.push_back(sampler.Sample(session.logits()));
    EXPECT_TRUE(session.Step(tokens.back()).ok());
  }
  return tokens;
}

const std::vector<SamplingOptions> kSettings = {
    {},
    {.repeat_penalty = 1.3},
    {.temperature = 1, .seed = 1},
    {.temperature = 0.7, .top_k = 40, .top_p = 0.95, .seed = 2},
    {.temperature = 1.5, .top_p = 0.8, .repeat_penalty = 1.1, .seed = 3},
    {.temperature = 2, .min_p = 0.05, .seed = 4},
    {.temperature = 3, .top_k = 200, .top_p = 0.99, .min_p = 1e-4, .repeat_penalty = 2, .seed = 5},
};

class AheadTest : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (!IsSkipped()) loaded_ = Load(GetParam(), kTiny);
  }
  Engine& engine() { return *loaded_.engine; }

  Loaded loaded_;
};

TEST_P(AheadTest, DrawsWhatALeadingHostWould) {
  for (const SamplingOptions& sampling : kSettings) {
    const auto led = Prompted(engine());
    const auto expected = Led(*led, sampling, engine().vocab(), 59);
    const auto session = Prompted(engine());
    auto tokens = Generated(*session, sampling, 60);
    const auto logits = [&](const Session& s) {
      return std::vector<float>(s.logits(), s.logits() + engine().vocab());
    };
    EXPECT_EQ(logits(*session), logits(*led)) << "seed " << sampling.seed;
    EXPECT_EQ(session->tokens(), led->tokens());
    tokens.pop_back();  // drawn, and not in the context
    EXPECT_EQ(tokens, expected) << "seed " << sampling.seed;
  }
}

// Whatever steps ran ahead of a stop, the draws go on as if they had not.
TEST_P(AheadTest, GoesOnAsOneDrawWould) {
  for (const SamplingOptions& sampling : kSettings) {
    const auto whole = Generated(*Prompted(engine()), sampling, 40);
    const auto session = Prompted(engine());
    std::vector<int32_t> parts;
    for (const int64_t n : {1, 2, 3, 10, 1}) {
      const auto part = Generated(*session, sampling, n);
      parts.insert(parts.end(), part.begin(), part.end());
    }
    const auto fork = session->Fork();
    ASSERT_TRUE(fork.ok());
    const auto rest = std::vector<int32_t>(whole.begin() + 17, whole.end());
    EXPECT_EQ(parts, std::vector<int32_t>(whole.begin(), whole.begin() + 17));
    EXPECT_EQ(Generated(*session, sampling, 23), rest) << "seed " << sampling.seed;
    EXPECT_EQ(Generated(**fork, sampling, 23), rest) << "seed " << sampling.seed;
  }
}

TEST_P(AheadTest, AnEndTokenLeavesNoTraceOfWhatRanAhead) {
  const SamplingOptions sampling{.temperature = 2, .repeat_penalty = 1.5, .seed = 9};
  const auto whole = Generated(*Prompted(engine()), sampling, 40);
  for (const size_t at : {4u, 5u, 20u}) {  // both rows of logits
    const size_t first =
        static_cast<size_t>(std::find(whole.begin(), whole.end(), whole[at]) - whole.begin());
    const Loaded other = Load(GetParam(), kTiny, {whole[at]});
    const auto session = Prompted(*other.engine);
    const auto head = session->Generate({.max_tokens = 40, .sampling = sampling});
    ASSERT_TRUE(head.ok()) << head.status().message();
    EXPECT_EQ(head->finish_reason, FinishReason::kStop);
    EXPECT_EQ(head->tokens, std::vector<int32_t>(
                                whole.begin(), whole.begin() + static_cast<ptrdiff_t>(first) + 1));
    EXPECT_EQ(session->tokens().size(), 20 + first);
    EXPECT_EQ(Generated(*session, sampling, static_cast<int64_t>(39 - first)),
              std::vector<int32_t>(whole.begin() + static_cast<ptrdiff_t>(first) + 1, whole.end()));
  }
}

TEST_P(AheadTest, AFullContextEndsIt) {
  const auto session = Prompted(engine(), 250);
  EXPECT_EQ(Generated(*session, {.temperature = 1}, 50).size(), 7u);  // the last stays out
  EXPECT_EQ(session->tokens().size(), 256u);
}

// Settings lie in the device's memory: one recording serves them all.
TEST_P(AheadTest, RecordsOneStepForAllSettings) {
  const auto session = Prompted(engine());
  Generated(*session, kSettings[2], 8);
  const auto& recordings = loaded_.backend->recordings();
  const size_t recorded = recordings.size();
  EXPECT_EQ(recorded, 2u);  // a row of logits each
  for (const auto& step : recordings) {
    EXPECT_EQ(OpName(step.back()), "NextToken");
  }
  for (size_t i = 1; i < kSettings.size(); ++i) Generated(*session, kSettings[i], 8);
  EXPECT_EQ(recordings.size(), recorded);
}

// --- The same of every policy, where its layers live on the device and where they can on the host.

struct Placed {
  PolicyOptions policy;
  std::string place;
};

// Every policy's settings for tests and, chosen among more tokens than it reads, its defaults.
std::vector<Placed> EveryPolicy() {
  std::vector<Placed> all;
  const auto files = OpenModel(kRandom);
  EXPECT_TRUE(files.ok()) << files.status().message();
  if (!files.ok()) return all;
  for (const PolicyInfo& info : AllPolicies()) {
    std::vector<SettingList> all_settings = info.test_settings;
    all_settings.push_back(SmallDefaults(info));
    for (const SettingList& settings : all_settings) {
      const PolicyOptions policy{
          .name = info.name, .settings = WithFiles(info, settings, 8, 2), .force_indices = true};
      all.push_back({policy, "device"});
      const auto prepared = PolicyFor(policy, files->config, 256, DType::kF16, /*fetches=*/false);
      EXPECT_TRUE(prepared.ok()) << prepared.status().message();
      if (!prepared.ok()) continue;
      const DeclaredReads reads = (*prepared)->Reads();
      const bool may_leave = reads.n_selections > 0 || reads.streamed.layers > 0;
      if (may_leave) all.push_back({policy, "host"});
    }
  }
  return all;
}

class AheadOfEveryPolicy : public OnDevice {};

TEST_P(AheadOfEveryPolicy, DrawsWhatALeadingHostWould) {
  constexpr int kTokens = 30;
  constexpr size_t kPrompt = 90;
  int on_host = 0;
  for (const auto& [policy, place] : EveryPolicy()) {
    // All of a CPU's memory is the host's: it has no ops for layers elsewhere.
    if (place == "host" && GetParam() == "cpu") continue;
    const Loaded loaded = Load(GetParam(), kRandom, {}, policy, place);
    Engine& engine = *loaded.engine;
    for (const SamplingOptions& sampling : {kSettings[0], kSettings[3]}) {
      const auto led = Prompted(engine, kPrompt, policy);
      const auto session = Prompted(engine, kPrompt, policy);
      SCOPED_TRACE(led->stats().policy + " " + led->stats().settings + ", K/V on the " + place);
      const auto expected = Led(*led, sampling, engine.vocab(), kTokens - 1);
      // In two parts, the first of which an end token stops after steps that nobody will read.
      CoreOf(engine).config.eos_ids = {expected[10]};
      const auto head = session->Generate({.max_tokens = kTokens, .sampling = sampling});
      ASSERT_TRUE(head.ok()) << head.status().message();
      auto tokens = head->tokens;
      ASSERT_LE(tokens.size(), 11u);
      const auto left = kTokens - static_cast<int64_t>(tokens.size());
      const auto rest = Generated(*session, sampling, left);
      tokens.insert(tokens.end(), rest.begin(), rest.end());
      EXPECT_EQ(std::vector<float>(session->logits(), session->logits() + engine.vocab()),
                std::vector<float>(led->logits(), led->logits() + engine.vocab()));
      EXPECT_EQ(session->tokens(), led->tokens());
      tokens.pop_back();  // drawn, and not in the context
      EXPECT_EQ(tokens, expected);
      on_host += session->stats().held_bytes.host > 0 ? 1 : 0;
    }
  }
  EXPECT_EQ(on_host > 0, GetParam() != "cpu");
}

INSTANTIATE_TEST_SUITE_P(Devices, AheadTest, testing::Values("ref", "cpu", "cuda"), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, AheadOfEveryPolicy, testing::Values("ref", "cpu", "cuda"),
                         NameOf);

// A listener, or a text, that stops it in the midst.
TEST(AheadText, StopsLeaveNoTraceOfWhatRanAhead) {
  const SamplingOptions sampling{.temperature = 1.2, .top_p = 0.9, .seed = 6};
  const Loaded loaded = Load("cpu", kShipped);
  Engine& engine = *loaded.engine;
  const GenerateOptions all{.max_tokens = 30, .sampling = sampling, .ignore_eos = true};
  const auto whole = Prompted(engine)->Generate(all);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  const auto check = [&](const GenerateOptions& options, const Session::OnText& on_text) {
    const auto session = Prompted(engine);
    const auto head = session->Generate(options, on_text);
    ASSERT_TRUE(head.ok()) << head.status().message();
    const size_t n = head->tokens.size();
    ASSERT_LT(n, whole->tokens.size());
    GenerateOptions rest = all;
    rest.max_tokens -= static_cast<int64_t>(n);
    std::vector<int32_t> tokens = head->tokens;
    const auto tail = session->Generate(rest);
    ASSERT_TRUE(tail.ok()) << tail.status().message();
    tokens.insert(tokens.end(), tail->tokens.begin(), tail->tokens.end());
    EXPECT_EQ(tokens, whole->tokens);
  };
  for (const int stop_at : {1, 2, 7}) {
    int pieces = 0;
    check(all, [&](std::string_view) { return ++pieces < stop_at; });
  }
  GenerateOptions until = all;
  until.stop = {whole->text.substr(whole->text.size() / 2, 3)};
  check(until, {});
}

// Where a policy keeps few rows and has room for so many more, an answer ends as in a full context.
TEST(AheadText, AnswersThatFillTheRoomAreCut) {
  for (const int room : {0, 7}) {
    const PolicyOptions policy{.name = "knorm",
                               .settings = {{"budget", "16"}, {"room", std::to_string(room)}}};
    const auto engine = Engine::Load(
        {.model = kShipped, .device = "cpu", .threads = 2, .context = 1024, .policy = policy});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    const auto session = Prompted(**engine, 40, policy);
    const auto answer = session->Generate({.max_tokens = 40, .ignore_eos = true});
    ASSERT_TRUE(answer.ok()) << answer.status().message();
    EXPECT_EQ(answer->finish_reason, FinishReason::kLength);
    // The last token of an answer is in no context yet.
    EXPECT_EQ(answer->tokens.size(), static_cast<size_t>(room) + 1);
    EXPECT_EQ(session->tokens().size(), 40u + static_cast<size_t>(room));
  }
}

}  // namespace
}  // namespace omnikv::ahead_test
