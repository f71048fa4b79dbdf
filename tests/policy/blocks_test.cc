// What is of policy blocks alone: the policies that it comes to, steps that are forgotten in the
// midst of a choice, a preselection, settings that contradict each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "backend/resolve_plan.h"
#include "policy/kv_bytes_read.h"
#include "step_fixture.h"

namespace omnikv::blocks_test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kPrompt = 100;
constexpr int32_t kSteps = 20;

using Logits = std::vector<std::vector<float>>;

Logits RunPolicy(Backend& backend, const std::string& policy, const SettingList& settings) {
  StepFixture fixture(backend, policy, settings);
  Logits logits = {fixture.Prompt(kPrompt)};
  for (int32_t i = 0; i < kSteps; ++i) logits.push_back(fixture.Decode());
  return logits;
}

// Tokens that KV head `head` of the last layer read in the last step.
std::vector<int32_t> Read(StepFixture& fixture, size_t head = 0) {
  const AttendArgs* last = nullptr;
  for (const TraceEntry& entry : fixture.trace.entries()) {
    const auto* attend = std::get_if<AttendArgs>(&entry.op);
    if (attend != nullptr && attend->o != nullptr) last = attend;
  }
  return ResolvePlan(fixture.trace, *last)[head];
}

const SettingList kSmall = {{"budget", "40"}, {"block", "8"}, {"sinks", "8"}, {"recent", "8"}};

SettingList With(SettingList settings, const SettingList& more) {
  for (const auto& [key, value] : more) {
    const auto same = [&key = key](const auto& setting) { return setting.first == key; };
    std::erase_if(settings, same);
    settings.emplace_back(key, value);
  }
  return settings;
}

TEST(BlocksIdentity, QuestBitForBit) {
  for (const char* page : {"4", "16"}) {
    for (const bool fast : {false, true}) {
      const auto make = [&]() -> std::unique_ptr<Backend> {
        if (!fast) return MakeRefBackend();
        return MakeCpuBackend({.threads = 2, .precision = GemmPrecision::kFull});
      };
      const auto one = make();
      const auto other = make();
      EXPECT_EQ(RunPolicy(*one, "blocks",
                          {{"budget", "48"},
                           {"block", page},
                           {"sinks", "0"},
                           {"recent", "0"},
                           {"representative", "quest"},
                           {"lists", "per_kv_head"}}),
                RunPolicy(*other, "quest", {{"budget", "48"}, {"page", page}, {"heads", "sum"}}));
    }
  }
}

// Blocks of one token, of which a prompt leaves some, are SnapKV: `widen` tokens on either side are
// its pooling, none is none.
TEST(BlocksIdentity, SnapKvOfOneToken) {
  for (const auto& [kernel, widen] : {std::pair{"1", "0"}, {"5", "2"}}) {
    const auto one = MakeRefBackend();
    const auto other = MakeRefBackend();
    const Logits blocks = RunPolicy(*one, "blocks",
                                    {{"budget", "90"},  // more than what is left
                                     {"block", "1"},
                                     {"sinks", "0"},
                                     {"recent", "3"},  // with the last token the window of 4
                                     {"lists", "per_kv_head"},
                                     {"dense_layers", "0"},
                                     {"preselect", "20"},
                                     {"widen", widen},
                                     {"queries", "4"}});
    const Logits snapkv =
        RunPolicy(*other, "snapkv", {{"budget", "24"}, {"window", "4"}, {"kernel", kernel}});
    EXPECT_EQ(blocks, snapkv) << "kernel " << kernel;
  }
}

// Steps that ran ahead and are forgotten, at every place of a phase, leave no trace: also where
// they chose.
TEST(BlocksTokenStep, ForgottenStepsLeaveNoTrace) {
  for (const SettingList& more : std::vector<SettingList>{
           {},
           {{"lists", "per_kv_head"}, {"layer_step", "2"}},
           {{"representative", "dynamic"}, {"queries", "4"}},
           {{"preselect", "5"}, {"queries", "4"}},
           {{"compat", "kt"}, {"representative", "dynamic"}, {"queries", "4"}},
           {{"budget", "112"}}}) {  // everything until n = 112, in the midst of a phase
    for (const char* token_step : {"2", "3", "5"}) {
      const SettingList settings = With(With(kSmall, {{"token_step", token_step}}), more);
      const auto led_backend = MakeRefBackend();
      const Logits led = RunPolicy(*led_backend, "blocks", settings);
      const auto backend = MakeRefBackend();
      StepFixture fixture(*backend, "blocks", settings);
      SCOPED_TRACE(fixture.settings.ToString());
      fixture.Prompt(kPrompt);
      for (int32_t i = 0; i < kSteps; ++i) {
        const int64_t length = fixture.bank->Length(fixture.seq);
        fixture.token_shift = 5;
        for (int32_t ahead = 0; ahead <= i % 3; ++ahead) fixture.Decode();
        fixture.token_shift = 0;
        fixture.residency->Truncate(0, fixture.seq, length);
        ASSERT_EQ(fixture.Decode(), led[static_cast<size_t>(i) + 1]) << "step " << i;
      }
    }
  }
}

// A choice stands for token_step steps, the last blocks move on.
TEST(BlocksTokenStep, AChoiceStandsForItsPhase) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "blocks", With(kSmall, {{"token_step", "4"}}));
  fixture.Prompt(kPrompt);
  std::set<std::vector<int32_t>> choices;
  std::vector<int32_t> last;
  for (int32_t i = 0; i < kSteps; ++i) {
    fixture.Decode();
    std::vector<int32_t> read = Read(fixture);
    const int32_t window = ((kPrompt + i) / 8 - 1) * 8;  // of the first one that is always read
    EXPECT_TRUE(std::binary_search(read.begin(), read.end(), window));
    read.erase(std::lower_bound(read.begin(), read.end(), window), read.end());
    if (i % 4 != 0) {
      EXPECT_EQ(read, last) << "step " << i;
    }
    last = read;
    choices.insert(read);
  }
  EXPECT_GT(choices.size(), 2u);
  EXPECT_LE(choices.size(), size_t{kSteps} / 4);
}

// A step that keeps its choice scores nothing.
TEST(BlocksTokenStep, StepsThatKeepScoreNothing) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "blocks", With(kSmall, {{"token_step", "4"}}),
                      /*force_indices=*/false);
  const auto led_backend = MakeRefBackend();
  StepFixture led(*led_backend, "blocks", With(kSmall, {{"token_step", "4"}}));
  EXPECT_EQ(fixture.Prompt(kPrompt), led.Prompt(kPrompt));
  for (int32_t i = 0; i < kSteps; ++i) {
    EXPECT_EQ(fixture.Decode(), led.Decode()) << "step " << i;
    const auto& entries = fixture.trace.entries();
    const auto scores = std::count_if(entries.begin(), entries.end(), [](const TraceEntry& entry) {
      return std::holds_alternative<BlockScoreArgs>(entry.op);
    });
    EXPECT_EQ(scores, i % 4 == 0 ? 4 : 0) << "step " << i;  // two layers are dense
    const auto bytes = fixture.KvBytesByLayer();
    EXPECT_EQ(bytes[4], KvBytesRead(*fixture.policy, 4, fixture.Lengths(), fixture.bank->View(4)));
  }
}

// Of the prompt's 13 blocks 1 is first and 2 are last; 3 of the others are ever read.
TEST(BlocksPreselect, OthersAreNeverRead) {
  const auto backend = MakeRefBackend();
  StepFixture fixture(*backend, "blocks",
                      With(kSmall, {{"budget", "64"}, {"preselect", "3"}, {"queries", "4"}}));
  fixture.Prompt(kPrompt);
  std::set<int32_t> blocks;  // of the prompt
  for (int32_t i = 0; i < kSteps; ++i) {
    fixture.Decode();
    for (const int32_t t : Read(fixture)) blocks.insert(t / 8);
  }
  EXPECT_EQ(std::count_if(blocks.begin(), blocks.end(), [](int32_t u) { return u < 13; }), 6);
  EXPECT_EQ(std::count_if(blocks.begin(), blocks.end(), [](int32_t u) { return u >= 13; }), 2);
}

// As long as a step reads all that the prompt left, it does so at once, in the midst of a phase
// too.
TEST(BlocksPreselect, AllTheRestIsReadWithoutWaiting) {
  const auto backend = MakeRefBackend();
  const SettingList settings =
      With(kSmall, {{"budget", "64"}, {"preselect", "3"}, {"queries", "4"}});
  const Logits expected = RunPolicy(*backend, "blocks", settings);
  StepFixture fixture(*backend, "blocks", With(settings, {{"token_step", "7"}}),
                      /*force_indices=*/false);
  EXPECT_EQ(fixture.Prompt(kPrompt), expected[0]);
  for (size_t i = 0; i < kSteps; ++i) EXPECT_EQ(fixture.Decode(), expected[i + 1]) << "step " << i;
}

// A sequence that comes back to a place where another one excluded later blocks excludes its own
// alone.
TEST(BlocksPreselect, AResumedSequenceKnowsNoneOfAnother) {
  const auto backend = MakeRefBackend();
  const auto make = [&] {
    return std::make_unique<StepFixture>(
        *backend, "blocks", With(kSmall, {{"budget", "64"}, {"preselect", "3"}, {"queries", "4"}}));
  };
  const auto resumed = make();
  const auto other = make();
  const auto fresh = make();
  resumed->Prompt(40);
  other->Prompt(kPrompt);
  const std::string state = resumed->policy->SaveState(0, 40);
  ASSERT_NE(other->policy->SaveState(0, kPrompt), fresh->policy->SaveState(0, kPrompt));
  for (const auto& place : {&other, &fresh}) {
    ASSERT_TRUE((*place)->policy->LoadState(0, 40, state));
  }
  EXPECT_EQ(other->policy->SaveState(0, kPrompt), fresh->policy->SaveState(0, kPrompt));
}

Status Prepare(const SettingList& given, int32_t max_rows = 512) {
  const PolicyInfo& info = **FindPolicy("blocks");
  auto settings = PolicySettings::Parse(info.name, info.settings, given);
  if (!settings.ok()) return settings.status();
  const auto backend = MakeRefBackend();
  return info.make()->Prepare({.backend = backend.get(),
                               .n_layers = 6,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .dk = 16,
                               .max_rows = max_rows,
                               .max_context = 256},
                              *settings);
}

TEST(BlocksSettings, ContradictionsAreNamed) {
  const auto expect = [](const SettingList& more, const std::string& message) {
    const Status status = Prepare(With(kSmall, more));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(message));
  };
  expect({{"representative", "dynamic"}, {"representatives", "9"}},
         "representatives is 9, expected at most block, which is 8");
  expect({{"representatives", "2"}}, "representatives is 2, expected 1 with representative=mean");
  expect({{"representative", "fixed"}, {"representatives", "3"}},
         "representatives is 3, expected a divisor of block, which is 8");
  expect({{"representative", "dynamic"}, {"queries", "513"}},
         "queries is 513, expected at most the 512 rows of a step (`prefill_chunk`)");
  expect({{"preselect", "some"}}, "preselect");
  expect({{"token_step", "0"}}, "token_step");
  EXPECT_TRUE(Prepare(With(kSmall, {{"queries", "513"}})).ok());  // nothing looks back
}

// Bytes that cannot be a state of a sequence are refused, whatever they say.
TEST(BlocksState, OtherBytesAreRefused) {
  const auto backend = MakeRefBackend();
  const SettingList settings = With(
      kSmall,
      {{"token_step", "4"}, {"representative", "dynamic"}, {"queries", "4"}, {"preselect", "5"}});
  StepFixture fixture(*backend, "blocks", settings);
  fixture.Prompt(kPrompt);
  for (int32_t i = 0; i < 6; ++i) fixture.Decode();
  const int64_t length = fixture.bank->Length(fixture.seq);
  const std::string state = fixture.policy->SaveState(0, length);
  const auto other_backend = MakeRefBackend();
  StepFixture other(*other_backend, "blocks", settings);
  const auto load = [&](const std::string& bytes) {
    return other.policy->LoadState(0, length, bytes);
  };
  EXPECT_TRUE(load(state));
  for (size_t n = 0; n < state.size(); n += 5) EXPECT_FALSE(load(state.substr(0, n)));
  EXPECT_FALSE(load(state + std::string(4, '\0')));
  int accepted = 0;
  // When the choice was made, and a list of three blocks for each of four layers.
  for (size_t at = state.size() - 68; at < state.size(); at += 4) {
    for (const char byte : {'\x7f', '\xff'}) {  // a number far too large, and a negative one
      std::string wrong = state;
      wrong[at + 3] = byte;
      accepted += load(wrong) ? 1 : 0;
    }
  }
  EXPECT_EQ(accepted, 0);
}

}  // namespace
}  // namespace omnikv::blocks_test
