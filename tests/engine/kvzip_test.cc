// A choice over all layers and KV heads after passes over the prompt (docs/decisions/068, 075):
// what it holds, and that turns, cuts, forks, files and batches go on with it. Which rows stay, the
// oracle says (policy_oracle_test.cc).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "../made_up_model.h"
#include "../test_data.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/row_group.h"
#include "golden_data.h"
#include "model/generated.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::kvzip_test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kRandom = TestData("tests/golden/policy_model");  // 8 layers of 2 KV heads
constexpr int64_t kLists = 16;
constexpr int64_t kBlock = 64;

PolicyOptions Kvzip(SettingList more = {}) {
  more.insert(more.begin(), {"chunk", "64"});
  return {.name = "kvzip", .settings = more};
}

class KvzipTest : public OnDevice {
 protected:
  std::unique_ptr<Engine> Open(const PolicyOptions& policy, int32_t chunk = 48,
                               int64_t context = 1024) const {
    return Load({.model = kRandom,
                 .device = GetParam(),
                 .context = context,
                 .policy = policy,
                 .precision = "full",
                 .prefill_chunk = chunk,
                 .max_sessions = 3});
  }
  static void ExpectNear(const Logits& got, const Logits& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << i;
    }
  }
};

// By layer: the rows that its largest KV head holds, and those that the heads read, together.
struct Held {
  std::vector<int64_t> rows, read;
  bool operator==(const Held&) const = default;
};
Held HeldBy(const Engine& engine, const Session& session) {
  const RowGroup& group = GroupOf(session);
  Held held;
  for (int32_t layer = 0; layer < 8; ++layer) {
    held.rows.push_back(CoreOf(engine).bank->LayerRows(group.seq(0), layer));
    held.read.push_back(group.policy().HeadTokensReadLast(layer, 0, group.lengths(0), 2));
  }
  return held;
}

// The rows that each KV head of each layer holds, in an engine where they are apart.
std::vector<int64_t> RowsByHead(const Engine& engine, const Session& session) {
  const Bank& bank = *CoreOf(engine).bank;
  std::vector<int64_t> rows;
  for (int32_t layer = 0; layer < bank.n_layers(); ++layer) {
    for (int32_t head = 0; head < bank.HeadClasses(layer); ++head) {
      const int32_t table = bank.config().layers[static_cast<size_t>(layer)].table() + head;
      rows.push_back(bank.Rows(GroupOf(session).seq(0), table));
    }
  }
  return rows;
}

int64_t Sum(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

TEST_P(KvzipTest, KeepsTheShareOfAllLayersTogether) {
  const auto own = Open(Kvzip());
  const auto shared = Open({.name = "full"});
  const auto other_steps = Open(Kvzip(), /*chunk=*/130);
  const auto session = Take(own->NewSession(Kvzip()));
  const auto in_one_table = Take(shared->NewSession(Kvzip()));
  const auto in_other_steps = Take(other_steps->NewSession(Kvzip()));
  const auto whole = Take(shared->NewSession({.name = "full"}));
  for (Session* s : {session.get(), in_one_table.get(), in_other_steps.get(), whole.get()}) {
    ASSERT_TRUE(s->Prompt(Numbers(300, 1)).ok());
  }
  const Held held = HeldBy(*own, *session);
  EXPECT_EQ(Sum(held.read), 4 * kLists + static_cast<int64_t>(0.3 * (296 * kLists)));
  EXPECT_NE(std::ranges::min(held.rows), std::ranges::max(held.rows));
  for (size_t layer = 0; layer < 8; ++layer) {
    EXPECT_LT(held.rows[layer], 300);
    EXPECT_GE(2 * held.rows[layer], held.read[layer]);
  }
  // Each head holds the blocks of what it reads, and no others.
  const std::vector<int64_t> by_head = RowsByHead(*own, *session);
  EXPECT_EQ(Sum(by_head), Sum(held.read));
  EXPECT_EQ(by_head.size(), static_cast<size_t>(kLists));
  const auto bytes = [&](int64_t later) {
    size_t blocks = 0;
    for (const int64_t n : by_head)
      blocks += static_cast<size_t>((n + later + kBlock - 1) / kBlock);
    return blocks * static_cast<size_t>(kBlock) * CoreOf(*own).bank->config().RowBytes(0) / 2;
  };
  const Bank& bank = *CoreOf(*own).bank;
  EXPECT_EQ(bank.DeviceBytes(GroupOf(*session).seq(0)), bytes(0));
  EXPECT_EQ(HeldBy(*shared, *in_one_table), held);
  EXPECT_EQ(HeldBy(*other_steps, *in_other_steps), held);
  // The prompt's own logits are those of full attention.
  Logits expected = Decode(*own, *session, 0);
  ExpectNear(Decode(*shared, *whole, 0), expected);
  expected = Decode(*own, *session, 30);
  ExpectNear(Decode(*shared, *in_one_table, 30), expected);
  ExpectNear(Decode(*other_steps, *in_other_steps, 30), expected);
  EXPECT_EQ(Sum(HeldBy(*own, *session).read), Sum(held.read) + 30 * kLists);
  EXPECT_EQ(bank.DeviceBytes(GroupOf(*session).seq(0)), bytes(30));
  EXPECT_EQ(session->stats().attended_tokens, static_cast<double>(Sum(held.read)) / kLists + 30);
}

// Another question on the same context is read alone, and what the first one left changes nothing.
TEST_P(KvzipTest, AnotherQuestionNeedsNoPrefill) {
  const auto engine = Open(Kvzip());
  const auto ask = [&](Session& session, int32_t seed) {
    std::vector<int32_t> text = Numbers(300, 1);
    const auto question = Numbers(70, seed);
    text.insert(text.end(), question.begin(), question.end());
    EXPECT_TRUE(session.Prompt(text).ok());
    EXPECT_EQ(session.stats().prefill_tokens, 70);
    EXPECT_EQ(session.stats().recomputed_tokens, 0);
    return Decode(*engine, session, 10);
  };
  const auto session = Take(engine->NewSession(Kvzip()));
  ASSERT_TRUE(session->Prompt(Numbers(300, 1)).ok());
  const Held held = HeldBy(*engine, *session);
  const Logits first = ask(*session, 7);
  const Logits second = ask(*session, 8);
  for (size_t layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(HeldBy(*engine, *session).rows[layer], held.rows[layer] + 80);
  }
  const auto straight = Take(engine->NewSession(Kvzip()));
  ASSERT_TRUE(straight->Prompt(Numbers(300, 1)).ok());
  EXPECT_EQ(ask(*straight, 8), second);
  EXPECT_NE(first, second);
  // Below what was chosen of, the sequence starts over.
  ASSERT_TRUE(session->Prompt(Numbers(299, 1)).ok());
  EXPECT_EQ(session->stats().prefill_tokens, 299);
  EXPECT_EQ(Sum(HeldBy(*engine, *session).read),
            4 * kLists + static_cast<int64_t>(0.3 * (295 * kLists)));
}

TEST_P(KvzipTest, ForksAndFilesGoOn) {
  const std::string file =
      fs::path(testing::TempDir()) / ("omnikv_kvzip_" + std::to_string(::getpid()) + GetParam());
  for (const PolicyOptions& of_engine : {Kvzip(), PolicyOptions{.name = "full"}}) {
    const auto engine = Open(of_engine);
    const auto session = Take(engine->NewSession(Kvzip()));
    ASSERT_TRUE(session->Prompt(Numbers(300, 1)).ok());
    ASSERT_TRUE(session->Save(file).ok());
    const Held held = HeldBy(*engine, *session);
    const auto fork = Take(session->Fork());
    EXPECT_EQ(HeldBy(*engine, *fork), held);
    const Logits other = Decode(*engine, *fork, 20, 5);
    const Logits expected = Decode(*engine, *session, 20);
    EXPECT_NE(other, expected);
    const auto restored = Take(engine->Restore(file));
    EXPECT_EQ(HeldBy(*engine, *restored), held);
    EXPECT_EQ(Decode(*engine, *restored, 20), expected);
    const auto elsewhere = Open(of_engine.name == "full" ? Kvzip() : PolicyOptions{.name = "full"});
    const Status refused = elsewhere->Restore(file).status();
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr("in other streams than those here"));
  }
  // Under another policy's prompt: its rows are taken over, and passed over.
  const auto engine = Open({.name = "full"});
  const auto full = Take(engine->NewSession({.name = "full"}));
  ASSERT_TRUE(full->Prompt(Numbers(300, 1)).ok());
  const Logits unmoved = Decode(*engine, *full, 0);
  const auto fork = Take(full->Fork(Kvzip()));
  const auto alone = Take(engine->NewSession(Kvzip()));
  ASSERT_TRUE(alone->Prompt(Numbers(300, 1)).ok());
  EXPECT_EQ(HeldBy(*engine, *fork), HeldBy(*engine, *alone));
  ExpectNear(Decode(*engine, *fork, 20), Decode(*engine, *alone, 20));
  ASSERT_TRUE(full->Prompt(Numbers(300, 1)).ok());  // whose rows the fork's choice left alone
  ExpectNear(Decode(*engine, *full, 0), unmoved);
  fs::remove(file);
}

TEST_P(KvzipTest, SequencesOfABatchKeepTheirOwn) {
  const auto engine = Open(Kvzip());
  const auto batch = *Batch::Open(CoreOf(*engine), Kvzip(), 2);
  const std::vector<size_t> lengths = {130, 400};
  std::vector<Batch::Next> next;
  for (const size_t length : lengths) {
    next.push_back({.member = *batch->Join(Numbers(length, 1)), .token = 0});
  }
  std::vector<Logits> got(2);
  for (int32_t i = 0; i < 10; ++i) {
    for (Batch::Next& row : next) row.token = 3 + i * 7 % 120;
    ASSERT_TRUE(batch->Step(next).ok());
    for (size_t s = 0; s < 2; ++s) {
      const float* logits = batch->logits(next[s].member);
      got[s].emplace_back(logits, logits + engine->vocab());
    }
  }
  for (size_t s = 0; s < 2; ++s) {
    const auto alone = Take(engine->NewSession(Kvzip()));
    ASSERT_TRUE(alone->Prompt(Numbers(lengths[s], 1)).ok());
    Logits expected = Decode(*engine, *alone, 10);
    expected.erase(expected.begin());
    ExpectNear(got[s], expected);
    EXPECT_EQ(batch->attended_tokens(next[s].member), alone->stats().attended_tokens);
  }
}

// Of several sequences, one at a time has room for all rows of a prompt, and each for what it keeps
// and for what comes later.
TEST_P(KvzipTest, SequencesShareTheRoomOfAPrompt) {
  const PolicyOptions policy = Kvzip({{"room", "32"}});
  const auto engine = Open(policy, /*chunk=*/130, /*context=*/640);
  const BankConfig& config = CoreOf(*engine).bank->config();
  const int64_t held = 4 + static_cast<int64_t>(0.3 * 636) + 1 + 32;
  EXPECT_EQ(config.PoolBlocks(0), kLists * (2 * ((held + kBlock - 1) / kBlock + 2) + 640 / kBlock));
  EXPECT_EQ(Bank::ReservedBytes(config, TierKind::kDevice),
            static_cast<size_t>(config.PoolBlocks(0) * kBlock) * config.RowBytes(0) / 2);
  EXPECT_LT(config.PoolBlocks(0), kLists * config.BlocksFor(config.PoolTokens()));
  std::vector<std::unique_ptr<Session>> sessions;
  for (int32_t seed = 1; seed <= 3; ++seed) {
    sessions.push_back(Take(engine->NewSession(policy)));
    ASSERT_TRUE(sessions.back()->Prompt(Numbers(560, seed)).ok()) << seed;
  }
  const auto alone = Open(Kvzip());
  for (int32_t seed = 1; seed <= 3; ++seed) {
    const auto session = Take(alone->NewSession(Kvzip()));
    ASSERT_TRUE(session->Prompt(Numbers(560, seed)).ok());
    ExpectNear(Decode(*engine, *sessions[static_cast<size_t>(seed) - 1], 32),
               Decode(*alone, *session, 32));
  }
  const Status long_turn = sessions[0]->Prompt([&] {
    std::vector<int32_t> text = Numbers(560, 1);
    const auto question = Numbers(70, 9);
    text.insert(text.end(), question.begin(), question.end());
    return text;
  }());
  EXPECT_EQ(long_turn.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(long_turn.message(),
            "70 more tokens do not fit beside the 170 that a layer holds, expected at most 227 in "
            "all: the policy's setting room is for later turns and answers");
}

// With turn=recompress the share of what a later turn brings stays, with what stayed before. Where
// the first prompt is sinks alone, a second turn with the rest of a text is chosen of as that text
// in one prompt is.
TEST_P(KvzipTest, LaterTurnsAreChosenOfToo) {
  const PolicyOptions policy = Kvzip({{"turn", "recompress"}, {"sinks", "128"}});
  const std::string file =
      fs::path(testing::TempDir()) / ("omnikv_anew_" + std::to_string(::getpid()) + GetParam());
  const std::vector<int32_t> text = Numbers(400, 1);
  Logits said;
  for (const PolicyOptions& of_engine : {policy, PolicyOptions{.name = "full"}}) {
    const auto engine = Open(of_engine);
    auto whole = Take(engine->NewSession(policy));
    ASSERT_TRUE(whole->Prompt(text).ok());
    const auto session = Take(engine->NewSession(policy));
    ASSERT_TRUE(session->Prompt({text.begin(), text.begin() + 128}).ok());
    EXPECT_EQ(HeldBy(*engine, *session).rows, std::vector<int64_t>(8, 128));
    ASSERT_TRUE(session->Prompt(text).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 272);
    EXPECT_EQ(HeldBy(*engine, *session), HeldBy(*engine, *whole));
    Logits logits = Decode(*engine, *session, 10);
    ExpectNear(Decode(*engine, *whole, 10), logits);
    whole.reset();

    // Heads hold different numbers of rows by now. The answer is chosen of with the question.
    const int64_t before = Sum(HeldBy(*engine, *session).read) - 10 * kLists;
    ASSERT_TRUE(session->Save(file).ok());
    const auto restored = Take(engine->Restore(file));
    const auto fork = Take(session->Fork());
    std::vector<int32_t> turn = session->tokens();
    const auto question = Numbers(90, 7);
    turn.insert(turn.end(), question.begin(), question.end());
    for (Session* s : {session.get(), restored.get(), fork.get()}) {
      ASSERT_TRUE(s->Prompt(turn).ok());
      EXPECT_EQ(s->stats().prefill_tokens, 90);
      EXPECT_EQ(Sum(HeldBy(*engine, *s).read), before + static_cast<int64_t>(0.3 * 100 * kLists));
      EXPECT_EQ(HeldBy(*engine, *s), HeldBy(*engine, *session));
    }
    const Logits after = Decode(*engine, *session, 10, 3);
    EXPECT_EQ(Decode(*engine, *restored, 10, 3), after);
    EXPECT_EQ(Decode(*engine, *fork, 10, 3), after);
    logits.insert(logits.end(), after.begin(), after.end());
    if (said.empty()) said = logits;
    ExpectNear(logits, said);
    // A cut into what was chosen of starts over.
    turn.resize(480);
    ASSERT_TRUE(session->Prompt(turn).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 480);
  }
  fs::remove(file);
}

// Turns of which everything stays are those of full attention.
TEST_P(KvzipTest, TurnsThatKeepEverythingAreFull) {
  const PolicyOptions policy = Kvzip({{"turn", "recompress"}, {"ratio", "1"}, {"sinks", "0"}});
  const auto engine = Open(policy);
  const auto reference = Open({.name = "full"});
  const auto session = Take(engine->NewSession(policy));
  const auto full = Take(reference->NewSession({.name = "full"}));
  std::vector<int32_t> text = Numbers(100, 1);
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(session->Prompt(text).ok());
    ASSERT_TRUE(full->Prompt(text).ok());
    ExpectNear(Decode(*engine, *session, 7, i), Decode(*reference, *full, 7, i));
    EXPECT_EQ(Sum(HeldBy(*engine, *session).read), full->tokens().size() * kLists);
    text = full->tokens();
    ASSERT_EQ(session->tokens(), text);
    const auto more = Numbers(60, i + 2);
    text.insert(text.end(), more.begin(), more.end());
  }
}

// A prompt that ends within its passes has all its tokens, and none of theirs; the passes begin
// anew with what comes next.
TEST_P(KvzipTest, PassesMayBeCutShort) {
  const auto engine = Open(Kvzip());
  const auto expected = Take(engine->NewSession(Kvzip()));
  ASSERT_TRUE(expected->Prompt(Numbers(300, 1)).ok());
  const auto session = Take(engine->NewSession(Kvzip()));
  int calls = 0;
  const Status cut = session->Prompt(Numbers(300, 1), [&](int64_t, int64_t) {
    if (++calls == 300 / 48 + 1 + 5) session->Cancel();
  });
  EXPECT_EQ(cut.code(), StatusCode::kCancelled);
  EXPECT_EQ(session->tokens().size(), 300u);
  EXPECT_EQ(GroupOf(*session).length(0), 300);
  EXPECT_EQ(HeldBy(*engine, *session).rows, std::vector<int64_t>(8, 300));
  Logits logits = Decode(*engine, *session, 10);
  EXPECT_EQ(HeldBy(*engine, *session).rows, [&] {
    std::vector<int64_t> rows = HeldBy(*engine, *expected).rows;
    for (int64_t& n : rows) n += 10;
    return rows;
  }());
  Logits want = Decode(*engine, *expected, 10);
  logits.erase(logits.begin());
  want.erase(want.begin());
  ExpectNear(logits, want);
}

TEST_P(KvzipTest, SaysWhatItCannotDo) {
  const auto engine = Open(Kvzip());
  const auto session = Take(engine->NewSession(Kvzip({{"chunk", "512"}})));
  const Status full = session->Prompt(Numbers(600, 1));
  EXPECT_EQ(full.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(full.message(),
            "policy kvzip runs passes of up to 512 tokens behind a prompt of 600, which exceed the "
            "context of 1024: raise `context`");
  const Status odd = engine->NewSession(Kvzip({{"chunk", "100"}})).status();
  EXPECT_EQ(odd.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(odd.message(),
            "policy kvzip: chunk is 100, expected a multiple of 64 (tokens of a block of K/V)");
}

// What a session holds of two lengths differs by the share of the difference, and by no more where
// the heads keep very different numbers.
class KvzipHolds : public OnDevice {};
TEST_P(KvzipHolds, TheShareOfAnyLength) {
  const auto engine = Load({.model = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf",
                            .device = GetParam(),
                            .context = 4600,
                            .policy = Kvzip({{"ratio", "0.3"}}),
                            .kv_dtype = "f16",
                            .prefill_chunk = 512});
  const Bank& bank = *CoreOf(*engine).bank;
  const double a_token = static_cast<double>(Bank::BytesPerToken(bank.config()));
  const auto held = [&](size_t tokens) {
    const auto session = Take(engine->NewSession(Kvzip({{"ratio", "0.3"}})));
    EXPECT_TRUE(session->Prompt(Numbers(tokens, 1)).ok());
    const std::vector<int64_t> rows = RowsByHead(*engine, *session);
    EXPECT_GT(std::ranges::max(rows), 2 * std::ranges::min(rows));
    EXPECT_NEAR(static_cast<double>(Sum(rows)) / static_cast<double>(rows.size()),
                0.3 * static_cast<double>(tokens - 4) + 4, 1);
    const TierBytes all = session->stats().held_bytes;
    return std::pair{static_cast<double>(bank.DeviceBytes(GroupOf(*session).seq(0))),
                     static_cast<double>(GetParam() == "cuda" ? all.device : all.host)};
  };
  const auto [low, low_all] = held(1000);
  const auto [high, high_all] = held(4500);
  const double expected = 0.3 * 3500 * a_token;
  EXPECT_NEAR(high - low, expected, 0.03 * expected);
  EXPECT_NEAR(high_all - low_all, expected, 0.03 * expected);
}

// A pass asks for a part of the context in the model's own format, and from the second one on says
// where the part begins.
TEST(KvzipText, IsARequestAndThePart) {
  const auto engine = Load({.model = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf",
                            .context = 512,
                            .prefill_chunk = 48});
  const auto session = Take(engine->NewSession(Kvzip()));
  std::vector<int32_t> prompt(150);
  std::iota(prompt.begin(), prompt.end(), 20);
  const auto passes = GroupOf(*session).policy().Passes(0, prompt);
  ASSERT_TRUE(passes.ok());
  ASSERT_EQ(passes->size(), 3u);
  const auto tokens = [&](const char* text, bool special) {
    return *engine->Tokenize(text, /*add_special=*/false, special);
  };
  const std::vector<int32_t> end = tokens("<|end|><|assistant|>", true);
  ASSERT_EQ(end.size(), 2u);
  for (size_t pass = 0; pass < 3; ++pass) {
    std::vector<int32_t> expected =
        pass == 0
            ? tokens("\n\nRepeat the previous context exactly.", false)
            : tokens("\n\nRepeat the part of the previous context exactly, starting with ", false);
    const auto begin = prompt.begin() + static_cast<ptrdiff_t>(64 * pass);
    if (pass > 0) expected.insert(expected.end(), begin - 8, begin);
    expected.insert(expected.end(), end.begin(), end.end());
    expected.insert(expected.end(), begin, pass < 2 ? begin + 64 : prompt.end());
    EXPECT_EQ((*passes)[pass], expected) << pass;
  }
  ASSERT_TRUE(session->Prompt(prompt).ok());
  EXPECT_EQ(GroupOf(*session).length(0), 150);
  EXPECT_LT(session->stats().attended_tokens, 150 * 0.3 + 5);
}

INSTANTIATE_TEST_SUITE_P(Devices, KvzipTest, testing::Values("ref", "cpu", "cuda"), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, KvzipHolds, testing::Values("cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::kvzip_test
