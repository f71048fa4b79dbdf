// The text that a device writes, token by token, against a reference: of the shipped model about
// documents with facts in them, under every policy, K/V on the device and on the host; and of a
// random model in which every layer matters. A card against the CPU, the CPU against the scalar
// reference; where there is no card the test says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <ostream>

#include "../made_up_model.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "eval/document.h"
#include "model/generated.h"
#include "text_parity.h"

namespace omnikv::card_text_test {
namespace {

constexpr int kForcedSteps = 64;  // that measure the error
constexpr int64_t kAnswer = 40;   // tokens

// --- The shipped model.

struct Setting {
  PolicyOptions policy;
  const char* place = "auto";  // on a card
};

// A device, what it is held against, and what both read.
struct Pair {
  const char* name;
  EngineOptions device, reference;
  std::vector<int64_t> documents;  // tokens
  std::vector<Setting> settings;
  int64_t budget;  // of omnikv and streaming: no prompt is shorter than four times as much
};

void PrintTo(const Pair& pair, std::ostream* os) {
  *os << pair.name;
}

PolicyOptions Budgeted(const char* policy, int64_t budget) {
  return {.name = policy, .settings = {{"budget", std::to_string(budget)}}};
}

std::vector<Pair> Pairs() {
  const PolicyOptions full{.name = "full"};
  const PolicyOptions offload{.name = "brutal_offload"};
  const auto omnikv = [](int64_t budget) {
    PolicyOptions policy = Budgeted("omnikv", budget);
    policy.settings.emplace_back("tail", "8");
    policy.settings.emplace_back("dense_below", "0");  // to choose on a fast card, too
    return policy;
  };
  return {
      // The scalar reference reads some five to ten tokens a second: one policy, one short
      // document.
      {.name = "cpu_ref",
       .device = {.device = "cpu", .kv_dtype = "f32", .precision = "full"},
       .reference = {.device = "ref", .kv_dtype = "f32"},
       .documents = {280},
       .settings = {{omnikv(64)}},
       .budget = 64},
      // As it runs by default, f16 K/V and prompts that round activations, against nothing rounded.
      {.name = "cpu_exact",
       .device = {.device = "cpu"},
       .reference = {.device = "cpu", .kv_dtype = "f32", .precision = "full"},
       .documents = {1100, 2600},
       .settings = {{full}, {omnikv(256)}, {Budgeted("streaming", 256)}},
       .budget = 256},
      {.name = "cuda",
       .device = {.device = "cuda", .precision = "full"},
       .reference = {.device = "cpu", .precision = "full"},
       .documents = {4400, 12000, 29000},
       .settings = {{full, "device"},
                    {omnikv(1024), "device"},
                    {omnikv(1024), "host"},
                    {Budgeted("streaming", 1024), "device"},
                    {offload, "host"}},
       .budget = 1024},
  };
}

std::string ModelPath() {
  const char* given = std::getenv("OMNIKV_MODEL");
  return given != nullptr ? given : OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf";
}

std::unique_ptr<Engine> Load(EngineOptions options, const Setting& setting) {
  options.model = ModelPath();
  options.policy = setting.policy;
  if (options.device == "cuda") options.place = setting.place;
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

std::unique_ptr<Session> Open(Engine& engine, const PolicyOptions& policy) {
  auto session = engine.NewSession(policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(*session) : nullptr;
}

// Eight questions of the four kinds, at depths from 5 to 95 %.
Document Read(const Engine& engine, int64_t tokens) {
  const auto document =
      MakeDocument({.seed = 40 + static_cast<uint64_t>(tokens),
                    .target_tokens = tokens + 190,  // of facts
                    .count_tokens =
                        [&](std::string_view text) {
                          return static_cast<int64_t>(engine.Tokenize(text, false, false)->size());
                        },
                    .depths = {0.05, 0.18, 0.31, 0.44, 0.57, 0.7, 0.83, 0.95},
                    .kinds = NeedleKinds()});
  EXPECT_TRUE(document.ok()) << document.status().message();
  return document.ok() ? *document : Document{};
}

class ShippedText : public ::testing::TestWithParam<Pair> {};

TEST_P(ShippedText, IsThatOfTheReference) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "some hours of a sanitizer's time; other tests run the same code on less";
#endif
  const Pair& pair = GetParam();
  const auto backend = MakeBackend(pair.device);
  if (!backend.ok()) GTEST_SKIP() << backend.status().message();
  int asked = 0;
  int same = 0;
  for (const Setting& setting : pair.settings) {
    const auto reference = Load(pair.reference, setting);
    const auto device = Load(pair.device, setting);
    ASSERT_TRUE(reference != nullptr && device != nullptr);
    const int32_t vocab = reference->vocab();
    const Tokens ends = CoreOf(*reference).config.eos_ids;
    const auto want = Open(*reference, setting.policy);
    const auto got = Open(*device, setting.policy);
    ASSERT_TRUE(want != nullptr && got != nullptr);
    for (const int64_t tokens : pair.documents) {
      const Document document = Read(*reference, tokens);
      ASSERT_GE(document.needles.size(), 8u);
      const auto prompt = [&](const std::string& message) {
        const auto ids = reference->ChatPrompt({{"user", message}});
        EXPECT_TRUE(ids.ok()) << ids.status().message();
        return ids.ok() ? *ids : Tokens{};
      };
      const std::string what = fmt::format("{}, {} (K/V {}), {} tokens", pair.name,
                                           setting.policy.name, setting.place, tokens);
      // The error, on a text that is not asked about.
      const double error = TeacherForcedError(*want, *got, prompt(document.preface + document.text),
                                              kForcedSteps, vocab);
      int right = 0;
      for (size_t i = 0; i < document.needles.size(); ++i) {
        const Tokens ids = prompt(UserMessage(document, i));
        ASSERT_GT(static_cast<int64_t>(ids.size()), 4 * pair.budget);
        const std::vector<Choice> choices = GreedyChoices(*want, ids, kAnswer, vocab, ends);
        ASSERT_TRUE(got->Prompt(ids).ok());
        const auto answer = got->Generate({.max_tokens = kAnswer});
        ASSERT_TRUE(answer.ok()) << answer.status().message();
        same += ExpectSameText(what + ": " + document.needles[i].question, choices, answer->tokens,
                               error)
                    ? 1
                    : 0;
        right += IsAnswered(document.needles[i], answer->text) ? 1 : 0;
        ++asked;
      }
      fmt::print("{}: error {:.2g}, {} of {} answers right\n", what, error, right,
                 document.needles.size());
      // The texts depend on what is read: streaming has dropped most of the facts.
      const auto n = static_cast<int>(document.needles.size());
      if (setting.policy.name == "streaming") {
        EXPECT_LE(right, n / 4) << what;
      } else {
        EXPECT_GT(right, n / 4) << what;
      }
    }
  }
  fmt::print("{} of {} answers are the reference's, token by token ({})\n", same, asked, pair.name);
}

INSTANTIATE_TEST_SUITE_P(Pairs, ShippedText, ::testing::ValuesIn(Pairs()),
                         [](const auto& param) { return std::string(param.param.name); });

// --- A random model in which every layer matters.

constexpr int32_t kLayers = 6;
constexpr int64_t kBudget = 24;
constexpr size_t kPrompt = 4 * kBudget + 30;  // tokens that all prompts share

// Without the attention of layer `without`, if any.
std::unique_ptr<Engine> MakeRandom(const std::string& device, int32_t without = -1) {
  auto core = std::make_unique<EngineCore>();
  core->options = {.device = device,
                   .threads = 2,
                   .context = 320,
                   .kv_dtype = "f32",
                   .precision = "full",
                   .max_sessions = 2};
  core->config = SmallLlama({.n_layers = kLayers,
                             .d_model = 128,
                             .head_dim = 64,
                             .ffn = 128,
                             .vocab = 512,
                             .max_context = 320,
                             .attn_scale = 0.5f});
  auto backend = MakeBackend(core->options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  core->backend = std::move(*backend);
  core->weights = *GenerateWeights(*core->backend, core->config, DType::kBF16);
  if (without >= 0) {
    const WeightRef& wo = core->weights.layers[static_cast<size_t>(without)].wo;
    const std::vector<std::byte> zeros(static_cast<size_t>(wo.n_out * wo.row_bytes));
    core->backend->Upload(const_cast<void*>(static_cast<const void*>(wo.data)), zeros.data(),
                          zeros.size());
  }
  const auto plan =
      PlanMemory(core->options, core->config, core->weights.bytes, DType::kBF16, *core->backend);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  auto engine = MakeEngine(std::move(core), *plan, 0);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

// Prompt `i`: all begin alike.
Tokens Numbers(size_t i) {
  Tokens tokens(kPrompt + (i == 0 ? 0 : 8));
  for (size_t t = 0; t < tokens.size(); ++t) {
    tokens[t] = static_cast<int32_t>((t * t * 37 + t * 11 + (t < kPrompt ? 0 : i * 101)) % 509) + 3;
  }
  return tokens;
}

class RandomText : public ::testing::TestWithParam<const char*> {};

TEST_P(RandomText, IsThatOfTheReference) {
  const std::string name = GetParam();
  if (const auto backend = MakeBackend({.device = name}); !backend.ok()) {
    GTEST_SKIP() << backend.status().message();
  }
  const auto reference = MakeRandom("ref");
  const auto device = MakeRandom(name);
  const int32_t vocab = reference->vocab();
  const auto after_prompt = [&](Engine& engine, const PolicyOptions& policy) {
    const auto session = Open(engine, policy);
    EXPECT_TRUE(session->Prompt(Numbers(1)).ok());
    EXPECT_TRUE(session->Step(7).ok());
    return std::vector<float>(session->logits(), session->logits() + vocab);
  };
  const PolicyOptions full{.name = "full"};
  const std::vector<float> whole = after_prompt(*reference, full);
  const std::vector<PolicyOptions> policies = {
      full,
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"filters", "1,3"}, {"budget", "24"}, {"tail", "4"}}},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"},
                    {"filters", "0,2"},
                    {"budget", "24"},
                    {"score", "raw"},
                    {"selector", "exp"}}},
      Budgeted("streaming", kBudget)};
  int same = 0;
  double worst = 0;
  for (const PolicyOptions& policy : policies) {
    const auto want = Open(*reference, policy);
    const auto got = Open(*device, policy);
    const double error = TeacherForcedError(*want, *got, Numbers(0), kForcedSteps, vocab);
    worst = std::max(worst, error);
    if (policy.name != "full") {  // the policy acts
      EXPECT_GT(MaxDifference(after_prompt(*reference, policy).data(), whole.data(), vocab),
                100 * error)
          << policy.name;
    }
    for (size_t i = 1; i <= 8; ++i) {
      const std::vector<Choice> choices = GreedyChoices(*want, Numbers(i), kAnswer, vocab, {});
      ASSERT_TRUE(got->Prompt(Numbers(i)).ok());
      const auto text = got->Generate({.max_tokens = kAnswer, .ignore_eos = true});
      ASSERT_TRUE(text.ok()) << text.status().message();
      same += ExpectSameText(fmt::format("{}, {}, prompt {}", name, policy.name, i), choices,
                             text->tokens, error)
                  ? 1
                  : 0;
    }
  }
  fmt::print("{}: error {:.2g}, {} of {} texts are the reference's\n", name, worst, same,
             8 * policies.size());
  // No error that was let pass hides a layer: without its attention the logits are others.
  EXPECT_LT(worst, 1e-3);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto less = MakeRandom("ref", layer);
    EXPECT_GT(MaxDifference(after_prompt(*less, full).data(), whole.data(), vocab), 100 * worst)
        << "layer " << layer;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RandomText, ::testing::Values("cpu", "cuda"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace omnikv::card_text_test
