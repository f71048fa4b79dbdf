// Text without an end: streaming over 200,000 tokens, in a bank that holds a budget and a chunk of
// rows, against an implementation in NumPy (scripts/oracle/streaming.py, FarText).
#include <gtest/gtest.h>

#include "../test_data.h"
#include "engine/core.h"
#include "engine/placement.h"
#include "golden_data.h"
#include "on_device.h"

namespace omnikv::endless_text_test {
namespace {

constexpr int64_t kTokens = 200'000;
constexpr int64_t kRows = 4;  // at the end, whose logits are compared
constexpr int64_t kBudget = 32;
constexpr int32_t kChunk = 512;

// That of the oracle, for a vocabulary of 128.
std::vector<int32_t> Text() {
  std::vector<int32_t> tokens;
  int64_t state = 1;
  for (int64_t i = 0; i < kTokens; ++i) {
    state = (state * 1103515245 + 12345) % (int64_t{1} << 31);
    tokens.push_back(static_cast<int32_t>(3 + (state >> 16) % 125));
  }
  return tokens;
}

class EndlessText : public OnDevice {};

TEST_P(EndlessText, LogitsAtItsEndAreThoseOfTheOracle) {
  const auto golden = SafetensorsModel::Open(TestData("tests/golden/far_text.safetensors"));
  ASSERT_TRUE(golden.ok()) << golden.status().message();
  const std::vector<int32_t> text = Text();
  for (const char* positions : {"original", "cache"}) {
    SCOPED_TRACE(positions);
    const PolicyOptions policy{
        .name = "streaming",
        .settings = {
            {"sinks", "4"}, {"budget", std::to_string(kBudget)}, {"positions", positions}}};
    auto engine = Engine::Load({.model = TestData("tests/golden/policy_model"),
                                .device = GetParam(),
                                .threads = 2,
                                .context = kTokens,
                                .policy = policy,
                                .precision = "full",
                                .prefill_chunk = kChunk,
                                .max_sessions = 1});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    // Rows of the budget and of a chunk, in whole blocks; the sinks and the window end in the
    // midst of one.
    const int64_t blocks = CoreOf(**engine).bank->TotalBlocks(0);
    EXPECT_LE(blocks * kBlockTokens, kBudget + kChunk + 3 * kBlockTokens);
    const auto session = (*engine)->NewSession(policy);
    ASSERT_TRUE(session.ok()) << session.status().message();
    ASSERT_TRUE((*session)->Prompt({text.begin(), text.end() - kRows}).ok());
    const auto expected = Rows(**golden, positions);
    ASSERT_EQ(expected.size(), static_cast<size_t>(kRows));
    for (size_t row = 0; row < expected.size(); ++row) {
      ASSERT_TRUE((*session)->Step(text[text.size() - kRows + row]).ok());
      EXPECT_LE(ErrorOfOracle((*session)->logits(), expected[row]), FullTolerance(GetParam()))
          << "row " << row;
    }
    EXPECT_EQ(std::ssize((*session)->tokens()), kTokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, EndlessText, ::testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::endless_text_test
