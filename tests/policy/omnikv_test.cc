// What is omnikv's own: budgets and tails, the dense shortcut, presets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "backend/ref/ref_backend.h"
#include "bank/set_simulation.h"
#include "policy/omnikv/presets.h"
#include "step_fixture.h"

namespace omnikv::omnikv_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kLayers = 6;

class OmnikvTest : public ::testing::Test {
 protected:
  StepFixture Make(const SettingList& settings, bool force_indices = true) {
    return StepFixture(*backend_, "omnikv", settings, force_indices);
  }
  Status Prepare(const SettingList& given, int32_t n_layers = kLayers) {
    const PolicyInfo& info = **FindPolicy("omnikv");
    auto settings = PolicySettings::Parse(info.name, info.settings, given);
    EXPECT_TRUE(settings.ok()) << settings.status().message();
    return info.make()->Prepare({.backend = backend_.get(),
                                 .model_name = "test",
                                 .n_layers = n_layers,
                                 .n_heads = 4,
                                 .dk = 16,
                                 .max_rows = 1,
                                 .max_context = 256},
                                *settings);
  }

  std::unique_ptr<Backend> backend_ = MakeRefBackend();
};

// dense_below=auto: where the choices of a step take as long as the reading that they save.
TEST_F(OmnikvTest, DenseWhileChoicesSaveLessThanTheyTake) {
  const PolicyInfo& info = **FindPolicy("omnikv");
  const auto dense_below = [&](SettingList given, int64_t selection_tokens, bool fetches = false) {
    given.insert(given.end(), {{"filters", "1,3"}, {"dense_after_filter", "0"}});
    auto settings = PolicySettings::Parse(info.name, info.settings, given);
    EXPECT_TRUE(settings.ok()) << settings.status().message();
    const Status status = info.make()->Prepare({.model_name = "test",
                                                .n_layers = kLayers,
                                                .n_heads = 4,
                                                .dk = 16,
                                                .max_context = 4096,
                                                .fetches = fetches,
                                                .selection_tokens = selection_tokens},
                                               *settings);
    EXPECT_TRUE(status.ok()) << status.message();
    return settings->Int("dense_below");
  };
  // Two choices, three sparse layers: 2 * 300 tokens' reading is saved at 200 tokens past the
  // budget.
  EXPECT_EQ(dense_below({{"budget", "64"}}, 300), 264);
  EXPECT_EQ(dense_below({{"mem", "0.75"}}, 300), 400);  // half of the tokens are saved
  EXPECT_EQ(dense_below({{"mem", "1"}}, 300), 0);       // nothing ever is
  EXPECT_EQ(dense_below({{"budget", "64"}}, 300000), 4096);
  EXPECT_EQ(dense_below({{"budget", "64"}}, 0), 0);
  EXPECT_EQ(dense_below({{"budget", "64"}}, 300, /*fetches=*/true), 0);
  EXPECT_EQ(dense_below({{"budget", "64"}, {"select_every_layer", "1"}}, 300), 0);
  EXPECT_EQ(dense_below({{"budget", "64"}, {"dense_below", "7"}}, 300), 7);
}

// mem = (dense * n + sparse * budget) / (layers * n) at every length, and no less.
TEST_F(OmnikvTest, MemIsTheFractionOfAllKvThatIsRead) {
  for (const char* mem : {"0.55", "0.7", "0.95", "1"}) {
    const StepFixture fixture =
        Make({{"filters", "1,3"}, {"dense_after_filter", "0"}, {"mem", mem}});
    for (const int64_t length : {1, 2, 5, 17, 100, 256}) {
      int64_t read = 0;
      int32_t dense = 0;
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        read += fixture.policy->TokensRead(layer, {.tokens = length, .prompt = length});
        dense += fixture.policy->Budgeted(layer) ? 0 : 1;
      }
      EXPECT_EQ(dense, 3);  // below the first filter, and the filters
      const double exact = std::stod(mem) * kLayers * static_cast<double>(length);
      EXPECT_GE(static_cast<double>(read), exact - 1e-9) << mem << " of " << length;
      EXPECT_LE(static_cast<double>(read), exact + (kLayers - dense)) << mem << " of " << length;
    }
  }
}

// The budget grows with the answer, in one recording: a short prompt does not pin it down.
TEST_F(OmnikvTest, MemFollowsTheContext) {
  StepFixture fixture =
      Make({{"filters", "1,3"}, {"dense_after_filter", "0"}, {"mem", "0.75"}, {"tail", "2"}});
  fixture.Prompt(5);
  for (int64_t length = 6; length <= 40; ++length) {
    fixture.Decode();
    const int64_t read = (length + 1) / 2 + std::min<int64_t>(2, length - 5);
    EXPECT_THAT(fixture.TokensAttended(), ElementsAre(length, length, read, length, read, read));
  }
  EXPECT_EQ(fixture.policy->Variant({6, 5}), fixture.policy->Variant({40, 5}));
}

// However long the answer, `budget` tokens are selected at every step, and its last `tail` ones are
// read besides. What the answer had before those can be selected like the prompt.
TEST_F(OmnikvTest, AnAnswerLongerThanTheBudgetSelectsAsMuchAsAShortOne) {
  for (const auto& [tail, besides] : std::vector<std::pair<const char*, int64_t>>{
           {"1", 1}, {"8", 8}, {"256", 256}, {"all", 999}}) {
    StepFixture fixture =
        Make({{"filters", "1,3"}, {"dense_after_filter", "0"}, {"budget", "16"}, {"tail", tail}});
    fixture.Prompt(60);
    bool selects_answer = false;
    for (int64_t step = 1; step <= 60; ++step) {
      fixture.Decode();
      const int64_t length = 60 + step;
      const int64_t read = 16 + std::min(besides, step);
      EXPECT_THAT(fixture.TokensAttended(), ElementsAre(length, length, read, length, read, read));
      for (const TraceEntry& entry : fixture.trace.entries()) {
        const auto* attend = std::get_if<AttendArgs>(&entry.op);
        if (attend == nullptr || attend->plan.n_segments != 2) continue;
        const PlanSegment& selected = attend->plan.segments[0];
        const PlanSegment& last = attend->plan.segments[1];
        ASSERT_EQ(selected.count[0], 16) << "tail " << tail << ", step " << step;
        EXPECT_EQ(last.bounds[0], length - std::min(besides, step));
        EXPECT_EQ(last.bounds[1], length);
        if (selected.index[15] >= 60) selects_answer = true;
      }
    }
    EXPECT_EQ(selects_answer, besides < 60) << tail;
  }
}

// Of the rows that the first step chose, exactly those that the prompt's last query did not choose
// come from the host.
TEST_F(OmnikvTest, APromptPrimesTheWorkingSets) {
  for (const char* selector : {"last", "uniform"}) {
    StepFixture fixture(*backend_, "omnikv",
                        {{"filters", "1,3"},
                         {"dense_after_filter", "0"},
                         {"budget", "24"},
                         {"selector", selector},
                         {"window", "5"}},
                        true, /*more_slots=*/100);
    // The tokens of each choice made since the last Clear, its range included.
    const auto chosen = [&] {
      std::vector<std::set<int32_t>> all;
      for (const TraceEntry& entry : fixture.trace.entries()) {
        const auto* a = std::get_if<WorkingSetArgs>(&entry.op);
        if (a == nullptr) continue;
        std::set<int32_t>& tokens = all.emplace_back(a->index, a->index + *a->count);
        for (int32_t t = a->bounds[0]; t < a->bounds[1]; ++t) tokens.insert(t);
      }
      return all;
    };
    fixture.Prompt(130);  // in three chunks
    const auto primed = chosen();
    ASSERT_EQ(primed.size(), 2u);
    EXPECT_EQ(fixture.residency->Count()->selected, 0u);
    // Layer 3 is a filter; 4 and 5, on the host, read what it chose.
    EXPECT_THAT(primed[1], testing::SizeIs(24));
    EXPECT_EQ(fixture.residency->Count()->primed, 2 * (24 - primed[1].count(129)));
    fixture.Decode();
    auto wanted = chosen()[1];
    EXPECT_EQ(wanted.erase(130), 1u);  // its own
    const SlotCounters rows = *fixture.residency->Count();
    EXPECT_EQ(rows.selected, 2 * wanted.size());
    const auto missing = std::count_if(wanted.begin(), wanted.end(),
                                       [&](int32_t t) { return primed[1].count(t) == 0; });
    EXPECT_EQ(rows.missed, 2 * static_cast<uint64_t>(missing));
    EXPECT_LT(rows.missed, rows.selected);
  }
}

// Rows that come ahead change no bit, and steps then miss others.
TEST_F(OmnikvTest, RowsThatComeAheadChangeNoBit) {
  SettingList settings = {{"filters", "1,3"},
                          {"dense_after_filter", "0"},
                          {"dense_below", "0"},
                          {"budget", "12"},
                          {"tail", "1"}};
  constexpr int32_t kMoreSlots = 20;
  StepFixture without(*backend_, "omnikv", settings, true, kMoreSlots + 1);
  settings.push_back({"fetch", "ahead"});
  StepFixture with(*backend_, "omnikv", settings, true, kMoreSlots);  // as many
  without.Prompt(100);
  with.Prompt(100);
  for (int step = 0; step < 60; ++step) ASSERT_EQ(with.Decode(), without.Decode()) << step;
  const SlotCounters fetched = *with.residency->Count();
  const SlotCounters missing = *without.residency->Count();
  EXPECT_EQ(fetched.selected, missing.selected);
  EXPECT_NE(fetched.missed, missing.missed);
  EXPECT_GT(fetched.ahead, 0u);
  EXPECT_EQ(missing.ahead, 0u);
}

TEST_F(OmnikvTest, RefusesToFetchAheadWithoutWorkingSetsOrWeights) {
  for (const auto& [setting, message] :
       {std::pair<SettingList::value_type, const char*>{{"lists", "per_kv_head"},
                                                        "fetch is ahead, expected lists=one"},
        {{"select_every_layer", "1"}, "fetch is ahead, expected lists=one"},
        {{"score", "raw"}, "fetch is ahead and score is raw, expected score=softmax"}}) {
    const Status refused = Prepare({{"fetch", "ahead"}, setting});
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr(message));
  }
}

// A row that is made anew, by a step that does not choose it itself, is not read as it was. Steps
// choose their own, but not here, where no token counts as generated.
TEST_F(OmnikvTest, SlotsForgetARowThatIsMadeAnew) {
  const SettingList settings = {{"filters", "1,3"}, {"dense_after_filter", "0"}, {"budget", "24"}};
  StepFixture own(*backend_, "omnikv", settings);
  StepFixture tiered(*backend_, "omnikv", settings, true, /*more_slots=*/100);
  own.Prompt(60);
  tiered.Prompt(60);
  own.prompt_len = tiered.prompt_len = StepFixture::kContext;
  for (int32_t round = 0; round < 60; ++round) {
    for (StepFixture* fixture : {&own, &tiered}) {
      fixture->token_shift = 5 * round;
      fixture->Decode();
      fixture->bank->Truncate(fixture->seq, fixture->bank->Length(fixture->seq) - 1);
      fixture->token_shift = 3 * round + 1;
      fixture->Decode();
    }
    ASSERT_EQ(tiered.Decode(), own.Decode()) << "round " << round;
  }
}

// Steps that choose nothing make rows too, here in a block that a fork kept and gave back.
TEST_F(OmnikvTest, SlotsForgetARowThatADenseStepMakes) {
  const SettingList settings = {{"filters", "1,3"},
                                {"dense_after_filter", "0"},
                                {"budget", "24"},
                                {"tail", "2"},
                                {"dense_below", "60"}};
  StepFixture own(*backend_, "omnikv", settings, false);
  StepFixture tiered(*backend_, "omnikv", settings, false, /*more_slots=*/200);
  for (StepFixture* fixture : {&own, &tiered}) {
    fixture->Prompt(20);
    const int32_t fork = *fixture->bank->Fork(fixture->seq);
    fixture->Decode();  // in a copy of the block that holds the tokens 16 to 19
    fixture->bank->Free(fork);
  }
  EXPECT_EQ(tiered.policy->Variant({22, 20}), 1);
  EXPECT_EQ(tiered.policy->Variant({30, 20}), 0);
  for (int64_t length = 22; length < 140; ++length) {
    ASSERT_EQ(tiered.Decode(), own.Decode()) << length << " tokens";
  }
}

TEST_F(OmnikvTest, SettingsSayWhatIsInForce) {
  EXPECT_EQ(Make({{"mem", "0.9"}}).settings.Text("budget"), "auto");
  EXPECT_EQ(Make({}).settings.Text("budget"), "2048");
  EXPECT_EQ(Make({{"budget", "77"}}).settings.Text("budget"), "77");
}

TEST_F(OmnikvTest, RefusesWhatCannotBe) {
  const Status both = Prepare({{"mem", "0.9"}, {"budget", "1024"}});
  EXPECT_EQ(both.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(both.message(), HasSubstr("mem is 0.9 and budget is 1024, expected only one"));
  const Status too_little = Prepare({{"mem", "0.5"}, {"filters", "1,3"}});
  EXPECT_EQ(too_little.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(too_little.message(), HasSubstr("the 5 dense layers of 6 alone take 0.833"));
  EXPECT_TRUE(Prepare({{"mem", "1"}, {"filters", "5"}}).ok());  // all layers are dense
  const Status no_layers = Prepare({}, 0);
  EXPECT_EQ(no_layers.code(), StatusCode::kUnsupported);
  EXPECT_THAT(no_layers.message(), HasSubstr("sliding window"));
}

TEST_F(OmnikvTest, RefusesAShareOfLogits) {
  const Status raw = Prepare({{"top_p", "0.85"}, {"score", "raw"}});
  EXPECT_EQ(raw.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(raw.message(),
            "policy omnikv: top_p is 0.85 and score is raw, expected score=softmax: logits have no "
            "sum to take a share of");
  EXPECT_TRUE(Prepare({{"top_p", "1"}, {"score", "raw"}}).ok());
  const auto parsed =
      PolicySettings::Parse("omnikv", (*FindPolicy("omnikv"))->settings, {{"top_p", "0"}});
  EXPECT_THAT(parsed.status().message(), HasSubstr("top_p is '0', expected"));
}

// The weight says how much is read, at most the budget; also of a context that fits in it.
TEST_F(OmnikvTest, AShareOfTheWeightIsEnough) {
  const auto settings = [](const char* budget, const char* top_p) {
    return SettingList{{"filters", "1,3"}, {"dense_after_filter", "0"}, {"budget", budget},
                       {"tail", "2"},      {"dense_below", "0"},        {"top_p", top_p}};
  };
  std::vector<int64_t> last;  // of a smaller share, at every step
  for (const char* top_p : {"0.3", "0.6", "0.9"}) {
    StepFixture fixture = Make(settings("200", top_p), /*force_indices=*/false);
    fixture.Prompt(60);
    std::vector<int64_t> read;
    for (int64_t step = 1; step <= 20; ++step) {
      EXPECT_EQ(fixture.policy->Variant({60 + step, 60}), 1);
      fixture.Decode();
      read.push_back(fixture.TokensAttended()[2]);
      EXPECT_LT(read.back(), 60 + step);
      EXPECT_GT(read.back(), std::min<int64_t>(2, step));
    }
    EXPECT_GE(std::set<int64_t>(read.begin(), read.end()).size(), 3u) << "as many at every step";
    // The first filter's scores come from layers that read everything: the same for every share.
    for (size_t i = 0; i < last.size(); ++i) EXPECT_GT(read[i], last[i]) << top_p << ", " << i;
    last = std::move(read);
  }
  StepFixture capped = Make(settings("5", "0.9"), /*force_indices=*/false);
  capped.Prompt(60);
  for (int64_t step = 1; step <= 20; ++step) {
    capped.Decode();
    EXPECT_EQ(capped.TokensAttended()[2], 5 + std::min<int64_t>(2, step));
  }
}

// Settings that would leave nothing to select: at once where no prompt can change that, else when a
// prompt shows it.
TEST_F(OmnikvTest, RefusesWhatSelectsNothing) {
  const auto parsed =
      PolicySettings::Parse("omnikv", (*FindPolicy("omnikv"))->settings, {{"budget", "0"}});
  EXPECT_THAT(parsed.status().message(), HasSubstr("budget is '0', expected a whole number"));
  const Status share = Prepare({{"filters", "1,3"}, {"dense_after_filter", "0"}, {"mem", "0.501"}});
  EXPECT_EQ(share.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      share.message(),
      "policy omnikv: mem is 0.501, which leaves a sparse layer less than one token to select "
      "of a context of 256, expected more than that");
  const Status window = Prepare({{"budget", "16"}, {"selector", "uniform"}});
  EXPECT_EQ(window.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(window.message(),
              HasSubstr("is 16, all of which a window of 16 queries takes, expected more"));
  EXPECT_TRUE(Prepare({{"budget", "17"}, {"selector", "uniform"}}).ok());

  // A tenth of the context: of a short prompt, less than the window.
  const SettingList tenth = {
      {"filters", "1,3"}, {"dense_after_filter", "0"}, {"mem", "0.55"}, {"selector", "exp"}};
  const auto of = [&](int64_t prompt) { return Make(tenth).policy->AfterPrefill(prompt); };
  EXPECT_TRUE(of(200).ok());
  EXPECT_EQ(of(100).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(of(100).message(),
              HasSubstr("the budget at 101 tokens of context is 11, all of which a window of 16"));
}

// Where layers live on the host an answer of any length has no room on the device.
TEST_F(OmnikvTest, TheWholeAnswerIsNotReadFromTheHost) {
  const PolicyInfo& info = **FindPolicy("omnikv");
  auto settings = PolicySettings::Parse(info.name, info.settings, {{"tail", "all"}});
  ASSERT_TRUE(settings.ok());
  const Status refused =
      info.make()->Prepare({.n_layers = 6, .max_context = 256, .fetches = true}, *settings);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("tail is all, expected a number of tokens where"));
}

// Up to that many tokens every layer attends to everything, then the budget holds.
TEST_F(OmnikvTest, DenseBelow) {
  const auto full_backend = MakeRefBackend();
  StepFixture full(*full_backend, "full", {});
  StepFixture fixture = Make(
      {{"filters", "1"}, {"dense_after_filter", "0"}, {"budget", "24"}, {"dense_below", "105"}},
      /*force_indices=*/false);
  EXPECT_EQ(fixture.Prompt(100), full.Prompt(100));
  for (int64_t length = 101; length <= 110; ++length) {
    const auto logits = fixture.Decode();
    const auto expected = full.Decode();
    const auto read = fixture.TokensAttended();
    if (length <= 105) {
      EXPECT_EQ(logits, expected) << length;
      EXPECT_THAT(read, ::testing::Each(length));
    } else {
      EXPECT_NE(logits, expected) << length;
      const int64_t chosen = 24 + length - 100;
      EXPECT_THAT(read, ElementsAre(length, length, chosen, chosen, chosen, chosen));
    }
  }
}

// Names as Hugging Face folders, the Hugging Face cache and GGUF files spell them.
TEST(OmnikvPresets, AreFoundByTheWordsOfAName) {
  const std::vector<int32_t> llama8 = {2, 8, 18};
  const std::vector<int32_t> llama70 = {4, 19, 41};
  const std::vector<int32_t> yi = {6, 11, 30};
  const struct {
    const char* name;
    int32_t n_layers;
    std::vector<int32_t> filters;  // empty: no preset
  } kCases[] = {
      {"Meta-Llama-3-8B-Instruct", 32, llama8},
      {"Meta Llama 3.1 8B Instruct", 32, llama8},
      {"meta-llama/Llama-3.1-8B", 32, llama8},
      {"Meta_Llama_3.1_8B_Instruct", 32, llama8},
      {"Llama3 8B", 32, llama8},
      {"Llama3.1-8B-Instruct", 32, llama8},
      {"gradientai/Llama-3-8B-Instruct-262k", 32, llama8},
      {"Hermes 3 Llama 3.1 8B", 32, llama8},
      {"Llama-3.3-70B-Instruct", 80, llama70},
      {"Meta Llama 3.1 70B Instruct", 80, llama70},
      {"Yi-9B-200K", 48, yi},
      {"01-ai/Yi-9B-200K", 48, yi},
      {"Yi 1.5 9B Chat 16K", 48, yi},
      {"omnikv-tiny", 16, {2, 13}},
      {"Omnikv Tiny", 16, {2, 13}},
      {"Llama-3.2-3B", 28, {}},
      {"llama-30b", 32, {}},
      {"Llama-2-7b-chat-hf", 32, {}},
      {"Mistral-7B-Instruct-v0.3", 32, {}},
      {"Qwen2.5-14B-Instruct", 48, {}},
      {"Surveying-9B", 48, {}},
      {"kayiran", 48, {}},
      {"yinlong/base", 48, {}},
      {"", 48, {}},
  };
  for (const auto& c : kCases) {
    const OmnikvPreset preset = OmnikvPresetFor(c.name, c.n_layers);
    EXPECT_EQ(preset.measured, !c.filters.empty()) << c.name << ", " << c.n_layers << " layers";
    if (!c.filters.empty()) {
      EXPECT_EQ(preset.filters, c.filters) << c.name;
    }
  }
}

// A guess is ascending layers of the model, whatever its depth.
TEST(OmnikvPresets, GuessesAreLayersOfTheModel) {
  for (int32_t n_layers = 1; n_layers < 130; ++n_layers) {
    const OmnikvPreset preset = OmnikvPresetFor("test", n_layers);
    ASSERT_FALSE(preset.filters.empty());
    for (size_t i = 1; i < preset.filters.size(); ++i) {
      EXPECT_LT(preset.filters[i - 1], preset.filters[i]) << n_layers;
    }
    EXPECT_LT(preset.filters.back(), n_layers);
  }
  EXPECT_THAT(OmnikvPresetFor("test", 32).filters, ElementsAre(2, 8, 18));
}

}  // namespace
}  // namespace omnikv::omnikv_test
