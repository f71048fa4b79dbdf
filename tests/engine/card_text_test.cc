// What the shipped model answers on a card, token by token, against the CPU: 20 prompts up to
// 30,000 tokens, every policy, K/V on the card and on the host. Where there is no card the test
// says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>

#include "engine/devices.h"
#include "omnikv/engine.h"

namespace omnikv {
namespace {

constexpr int64_t kAnswer = 24;  // tokens

std::string FileOf(const char* variable, const char* in_tree) {
  const char* given = std::getenv(variable);
  return given != nullptr ? given : in_tree;
}

// Lines [first, last] of the shipped document, as often as asked, before a question.
struct Excerpt {
  int first, last;
  int times = 1;
};
constexpr Excerpt kExcerpts[] = {
    {38, 44}, {41, 41},   {30, 50},  {1, 8},     {60, 75}, {41, 70},    {100, 130},
    {20, 80}, {200, 240}, {5, 60},   {300, 380}, {1, 100}, {41, 150},   {150, 280},
    {1, 150}, {200, 400}, {41, 260}, {1, 300},   {1, 428}, {1, 260, 2},
};

std::vector<std::string> Lines() {
  std::ifstream file(
      FileOf("OMNIKV_DOCUMENT", OMNIKV_SOURCE_DIR "/examples/quickstart/document.txt"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::string TextOf(const Excerpt& excerpt, const std::vector<std::string>& lines) {
  std::string text = "Read the text below and answer the question.\n\n";
  for (int i = 0; i < excerpt.times; ++i) {
    for (int line = excerpt.first; line <= excerpt.last; ++line) {
      text += lines.at(static_cast<size_t>(line - 1)) + "\n";
    }
  }
  return text + "\n\nWhat is the pass key?";
}

struct Kind {
  const char* policy;
  const char* place;
};
constexpr Kind kKinds[] = {{"full", "device"},
                           {"omnikv", "device"},
                           {"omnikv", "host"},
                           {"streaming", "device"},
                           {"brutal_offload", "host"}};

std::unique_ptr<Engine> Load(const std::string& device, const Kind& kind) {
  EngineOptions options{
      .model = FileOf("OMNIKV_MODEL", OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf"),
      .device = device,
      .policy = {.name = kind.policy},
      .precision = "full"};
  if (device == "cuda") options.place = kind.place;
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

using Tokens = std::vector<int32_t>;

Tokens Answer(Session& session, const Tokens& prompt) {
  const Status prompted = session.Prompt(prompt);
  EXPECT_TRUE(prompted.ok()) << prompted.message();
  const auto result = session.Generate({.max_tokens = kAnswer});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result->tokens : Tokens{};
}

// The logits after the prompt and `tokens`.
std::vector<float> LogitsAfter(Session& session, const Tokens& prompt, const Tokens& tokens,
                               int32_t vocab) {
  EXPECT_TRUE(session.Prompt(prompt).ok());
  for (const int32_t token : tokens) EXPECT_TRUE(session.Step(token).ok());
  return {session.logits(), session.logits() + vocab};
}

// A first difference is right only where the two largest logits lie within the error of the card's.
void ExpectClose(const std::string& what, Session& cpu, Session& card, const Tokens& prompt,
                 const Tokens& before, int32_t vocab) {
  const std::vector<float> expected = LogitsAfter(cpu, prompt, before, vocab);
  const std::vector<float> got = LogitsAfter(card, prompt, before, vocab);
  double error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error = std::max(error, std::abs(static_cast<double>(got[i]) - expected[i]));
  }
  std::vector<float> sorted = expected;
  std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
  const double margin = static_cast<double>(sorted[0]) - sorted[1];
  fmt::print("{}: differs at token {}, margin {:.2g}, error {:.2g}\n", what, before.size(), margin,
             error);
  EXPECT_LE(margin, 2 * error) << what;
}

TEST(CardText, IsThatOfTheCpu) {
  const auto backend = MakeBackend({.device = "cuda"});
  if (!backend.ok()) GTEST_SKIP() << backend.status().message();
  const std::vector<std::string> lines = Lines();
  ASSERT_GE(lines.size(), 428u);
  std::map<std::string, std::vector<Tokens>> of_cpu;  // by policy
  int same = 0;
  int asked = 0;
  size_t longest = 0;
  for (const Kind& kind : kKinds) {
    const auto cpu = Load("cpu", kind);
    const auto card = Load("cuda", kind);
    ASSERT_TRUE(cpu != nullptr && card != nullptr);
    const auto cpu_session = std::move(*cpu->NewSession({.name = kind.policy}));
    const auto card_session = std::move(*card->NewSession({.name = kind.policy}));
    std::vector<Tokens>& expected = of_cpu[kind.policy];
    for (size_t i = 0; i < std::size(kExcerpts); ++i) {
      const auto prompt = cpu->ChatPrompt({{"user", TextOf(kExcerpts[i], lines)}});
      ASSERT_TRUE(prompt.ok()) << prompt.status().message();
      longest = std::max(longest, prompt->size());
      if (expected.size() == i) expected.push_back(Answer(*cpu_session, *prompt));
      const Tokens got = Answer(*card_session, *prompt);
      ++asked;
      if (got == expected[i]) {
        ++same;
        continue;
      }
      const auto at = std::mismatch(got.begin(), got.end(), expected[i].begin(), expected[i].end());
      ExpectClose(
          fmt::format("{}, K/V on the {}, {} tokens", kind.policy, kind.place, prompt->size()),
          *cpu_session, *card_session, *prompt, {got.begin(), at.first}, cpu->vocab());
    }
  }
  fmt::print("{} of {} answers are the CPU's, token by token; prompts up to {} tokens\n", same,
             asked, longest);
  EXPECT_GT(same, asked * 9 / 10);
  EXPECT_GT(longest, 28000u);
}

}  // namespace
}  // namespace omnikv
