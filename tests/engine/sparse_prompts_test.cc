// Prompts that choose by chunk (omnikv, prefill=sparse) in sessions: a later turn, a cut, forks,
// files and batches. Which tokens such a chunk reads is the oracle's affair (policy_oracle_test).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "../test_data.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/prompt_chunks.h"
#include "omnikv/engine.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::sparse_prompts_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

const std::string kRandom = TestData("tests/golden/policy_model");  // vocabulary 128
constexpr int64_t kChunk = 24;

TEST(PromptChunks, KnowsWhichRowsStandWithoutLaterOnes) {
  PromptChunks chunks(10);
  chunks.Add(0, 10);
  chunks.Add(10, 20);
  chunks.Add(20, 27);
  chunks.Add(30, 35);  // after three decode steps
  EXPECT_THAT(chunks.runs(), ElementsAre(Pair(0, 27), Pair(30, 35)));
  EXPECT_EQ(chunks.WholeUpTo(0), 0);
  EXPECT_EQ(chunks.WholeUpTo(9), 0);
  EXPECT_EQ(chunks.WholeUpTo(10), 10);
  EXPECT_EQ(chunks.WholeUpTo(26), 20);
  EXPECT_EQ(chunks.WholeUpTo(27), 27);
  EXPECT_EQ(chunks.WholeUpTo(29), 29);
  EXPECT_EQ(chunks.WholeUpTo(34), 30);
  EXPECT_EQ(chunks.WholeUpTo(35), 35);
  chunks.Cut(20);
  chunks.Add(20, 30);  // goes on with the run, whose last chunk was whole
  EXPECT_THAT(chunks.runs(), ElementsAre(Pair(0, 30)));
  PromptChunks none;
  none.Add(0, 10);
  EXPECT_EQ(none.WholeUpTo(9), 9);
}

struct Case {
  const char* name;
  SettingList settings;
};

std::vector<Case> Cases() {
  return {{"one_list", {{"r", "1"}}},
          {"per_kv_head", {{"r", "2"}, {"lists", "per_kv_head"}, {"sinks", "3"}}},
          {"window", {{"r", "1"}, {"selector", "exp"}, {"window", "5"}}}};
}

PolicyOptions Sparse(const Case& c) {
  PolicyOptions policy{.name = "omnikv",
                       .settings = {{"filters", "1,4"},
                                    {"dense_after_filter", "0"},
                                    {"dense_below", "0"},
                                    {"budget", "24"},
                                    {"tail", "4"},
                                    {"prefill", "sparse"},
                                    {"chunk", std::to_string(kChunk)}}};
  policy.settings.insert(policy.settings.end(), c.settings.begin(), c.settings.end());
  return policy;
}

PolicyOptions Dense(const Case& c) {
  PolicyOptions policy = Sparse(c);
  policy.settings[5].second = "dense";
  return policy;
}

std::vector<int32_t> Joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<int32_t> First(const std::vector<int32_t>& tokens, int64_t n) {
  return {tokens.begin(), tokens.begin() + n};
}

double Difference(const Logits& a, const Logits& b) {
  double error = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    double most = 0;
    double apart = 0;
    for (size_t v = 0; v < a[i].size(); ++v) {
      most = std::max<double>(most, std::abs(b[i][v]));
      apart = std::max<double>(apart, std::abs(a[i][v] - b[i][v]));
    }
    error = std::max(error, apart / most);
  }
  return error;
}

class SparsePromptsOn : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    engine_ = Load({.model = kRandom,
                    .device = GetParam(),
                    .context = 512,
                    .prefill_chunk = 48,
                    .max_sessions = 6});
  }
  std::unique_ptr<Session> New(const PolicyOptions& policy) {
    return Take(engine_->NewSession(policy));
  }
  // Steps after a prompt that a session of its own reads at once.
  Logits Fresh(const PolicyOptions& policy, const std::vector<int32_t>& prompt) {
    const auto session = New(policy);
    EXPECT_TRUE(session->Prompt(prompt).ok());
    return Decode(*engine_, *session, 12);
  }
  Logits After(Session& session, const std::vector<int32_t>& prompt) {
    EXPECT_TRUE(session.Prompt(prompt).ok());
    return Decode(*engine_, session, 12);
  }

  std::unique_ptr<Engine> engine_;
};

// The chunks of a later turn begin at its first row. So a turn after whole chunks is part of one
// prompt, and any turn is what its chunks are as turns of their own.
TEST_P(SparsePromptsOn, ALaterTurnBeginsAChunk) {
  const std::vector<int32_t> all = Numbers(203, 1);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const PolicyOptions policy = Sparse(c);
    const Logits at_once = Fresh(policy, all);
    EXPECT_GT(Difference(Fresh(Dense(c), all), at_once), 0.01);
    const auto whole = New(policy);
    ASSERT_TRUE(whole->Prompt(First(all, 4 * kChunk)).ok());
    EXPECT_EQ(After(*whole, all), at_once);
    EXPECT_EQ(whole->stats().prefill_tokens, 203 - 4 * kChunk);
    EXPECT_EQ(whole->stats().recomputed_tokens, 0);

    const auto begun = New(policy);
    ASSERT_TRUE(begun->Prompt(First(all, 100)).ok());
    const Logits in_two = After(*begun, all);
    EXPECT_EQ(begun->stats().prefill_tokens, 103);
    EXPECT_GT(Difference(in_two, at_once), 1e-3) << "other chunks";
    const auto pieces = New(policy);
    for (int64_t n = 100; n < 203; n += kChunk) ASSERT_TRUE(pieces->Prompt(First(all, n)).ok());
    EXPECT_EQ(After(*pieces, all), in_two);
  }
}

// After an answer, whose rows read a choice of their own.
TEST_P(SparsePromptsOn, ATurnAfterAnAnswerKeepsItsRows) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const auto session = New(Sparse(c));
    ASSERT_TRUE(session->Prompt(Numbers(110, 1)).ok());
    Decode(*engine_, *session, 15);
    const auto fork = Take(session->Fork());
    const std::vector<int32_t> turn = Joined(session->tokens(), Numbers(61, 5));
    const Logits got = After(*session, turn);
    EXPECT_EQ(session->stats().prefill_tokens, 61);
    EXPECT_EQ(session->stats().recomputed_tokens, 0);
    // Its own chunks, as turns: of 24, 24 and 13 rows.
    ASSERT_TRUE(fork->Prompt(First(turn, 125 + kChunk)).ok());
    ASSERT_TRUE(fork->Prompt(First(turn, 125 + 2 * kChunk)).ok());
    EXPECT_EQ(After(*fork, turn), got);
  }
}

// Rows of a chunk were computed by a choice of all of them: what is left of a chunk that is cut is
// computed again, and so is one whose last row gives the logits.
TEST_P(SparsePromptsOn, ACutLeavesNothingOfWhatWasCut) {
  const std::vector<int32_t> all = Numbers(203, 1);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const PolicyOptions policy = Sparse(c);
    const Logits at_once = Fresh(policy, all);
    for (const int64_t kept : {48, 110, 203}) {
      SCOPED_TRACE(kept);
      const auto session = New(policy);
      ASSERT_TRUE(session->Prompt(Joined(First(all, kept), Numbers(70, 9))).ok());
      Decode(*engine_, *session, 5);
      EXPECT_EQ(After(*session, all), at_once);
      const int64_t held =
          std::min<int64_t>(kept, policy.settings.back().first == "window" ? 198 : 202);
      EXPECT_EQ(session->stats().prefill_tokens, 203 - held / kChunk * kChunk);
      EXPECT_EQ(session->stats().recomputed_tokens, held % kChunk);
    }
    const auto again = New(policy);
    ASSERT_TRUE(again->Prompt(all).ok());
    EXPECT_EQ(After(*again, all), at_once);
  }
}

// What rows of sparse prompts are, those of dense ones are not, though filters and budget agree.
TEST_P(SparsePromptsOn, SharesNoRowsWithDensePrompts) {
  const std::vector<int32_t> all = Numbers(203, 1);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const PolicyOptions full{.name = "full"};
    for (const auto& [from, to] : std::vector<std::pair<PolicyOptions, PolicyOptions>>{
             {Sparse(c), Dense(c)}, {Dense(c), Sparse(c)}, {full, Sparse(c)}, {Sparse(c), full}}) {
      const auto parent = New(from);
      ASSERT_TRUE(parent->Prompt(all).ok());
      const auto fork = Take(parent->Fork(to));
      EXPECT_EQ(fork->stats().prefill_tokens, 203);
      EXPECT_GT(fork->stats().recomputed_tokens, 190);
      EXPECT_LT(Difference(Decode(*engine_, *fork, 12), Fresh(to, all)), F32Tolerance(GetParam()));
    }
    // A fork of the same policy shares them all.
    const auto parent = New(Sparse(c));
    ASSERT_TRUE(parent->Prompt(all).ok());
    const auto fork = Take(parent->Fork());
    EXPECT_EQ(fork->stats().prefill_tokens, 0);
    EXPECT_EQ(Decode(*engine_, *fork, 12), Fresh(Sparse(c), all));
  }
}

// A context that went through a file knows its chunks.
TEST_P(SparsePromptsOn, AFileKnowsItsChunks) {
  const std::vector<int32_t> all = Numbers(203, 1);
  const std::string path =
      testing::TempDir() + "omnikv_sparse_" + std::to_string(::getpid()) + GetParam();
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const auto session = New(Sparse(c));
    ASSERT_TRUE(session->Prompt(Joined(First(all, 110), Numbers(70, 9))).ok());
    ASSERT_TRUE(session->Save(path).ok());
    const auto restored = Take(engine_->Restore(path));
    std::remove(path.c_str());
    EXPECT_EQ(After(*restored, all), Fresh(Sparse(c), all));
    EXPECT_EQ(restored->stats().recomputed_tokens, 110 % kChunk);
  }
}

// Sequences of a batch whose prompts are of several chunks, others than the first among them.
TEST_P(SparsePromptsOn, ABatchGivesWhatEachGivesAlone) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const PolicyOptions policy = Sparse(c);
    auto opened = Batch::Open(CoreOf(*engine_), policy, 3);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    Batch& batch = **opened;
    for (const size_t length : {203, 20, 119}) {
      const std::vector<int32_t> prompt = Numbers(length, static_cast<int32_t>(length));
      const auto member = batch.Join(prompt);
      ASSERT_TRUE(member.ok()) << member.status().message();
      const auto session = New(policy);
      ASSERT_TRUE(session->Prompt(prompt).ok());
      for (int32_t i = 0; i < 8; ++i) {
        const Logits got = {{batch.logits(*member), batch.logits(*member) + engine_->vocab()}};
        const Logits want = {{session->logits(), session->logits() + engine_->vocab()}};
        ASSERT_LE(Difference(got, want), F32Tolerance(GetParam())) << length << ", step " << i;
        ASSERT_TRUE(session->Step(3 + i).ok());
        const Batch::Next next{.member = *member, .token = 3 + i};
        ASSERT_TRUE(batch.Step({&next, 1}).ok());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, SparsePromptsOn, testing::Values("ref", "cpu", "cuda"), NameOf);

}  // namespace
}  // namespace omnikv::sparse_prompts_test
