#include "policy/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "policy/number_table.h"
#include "policy/policy.h"

namespace omnikv::settings_test {
namespace {

using ::testing::HasSubstr;

const std::vector<SettingSpec> kSpecs = {
    {.key = "n", .type = SettingType::kInt, .default_value = "3", .min = 1, .max = 10},
    {.key = "f", .type = SettingType::kFloat, .default_value = "0.5", .min = 0, .max = 1},
    {.key = "on", .type = SettingType::kBool, .default_value = "0", .allow_auto = true},
    {.key = "mode", .type = SettingType::kChoice, .default_value = "a", .choices = {"a", "b"}},
    {.key = "list", .type = SettingType::kIntList, .default_value = "1,2", .min = 0, .max = 9},
};

TEST(PolicySettings, DefaultsAndGivenValues) {
  const auto s =
      PolicySettings::Parse("p", kSpecs, {{"n", "7"}, {"list", "0,4,9"}, {"on", "auto"}});
  ASSERT_TRUE(s.ok()) << s.status().message();
  EXPECT_EQ(s->Int("n"), 7);
  EXPECT_EQ(s->Float("f"), 0.5);
  EXPECT_TRUE(s->IsAuto("on"));
  EXPECT_EQ(s->Text("mode"), "a");
  EXPECT_EQ(s->IntList("list"), (std::vector<int32_t>{0, 4, 9}));
  EXPECT_EQ(s->ToString(), "f=0.5 list=0,4,9 mode=a n=7 on=auto");
}

TEST(PolicySettings, CountsMayHaveAUnit) {
  const std::vector<SettingSpec> specs = {
      {.key = "n", .type = SettingType::kInt, .default_value = "3", .min = 1, .max = 4096}};
  const auto s = PolicySettings::Parse("p", specs, {{"n", "2k"}});
  ASSERT_TRUE(s.ok()) << s.status().message();
  EXPECT_EQ(s->Int("n"), 2048);
  EXPECT_FALSE(PolicySettings::Parse("p", specs, {{"n", "8k"}}).ok());
}

TEST(HeadNumbers, AreReadAsTheyAreWritten) {
  const std::vector<double> numbers = {0, 1, 0.25, 0.123456, 1e-6, 0.999999};
  const std::string text = HeadNumbersText(numbers, 2);
  EXPECT_EQ(text, "0.000000\t1.000000\n0.250000\t0.123456\n0.000001\t0.999999\n");
  const std::string path = testing::TempDir() + "omnikv_numbers_" + std::to_string(::getpid());
  std::ofstream(path, std::ios::binary) << text;
  const auto read = ReadHeadNumbers(path, 3, 2, 0, 1);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(*read, numbers);
  std::remove(path.c_str());
}

TEST(HeadNumbers, StandBesideTheModel) {
  EXPECT_EQ(PathBesideModel("models/a-q8_0.gguf", "duo.tsv"), "models/a-q8_0.duo.tsv");
  EXPECT_EQ(PathBesideModel("/models/llama", "duo.tsv"), "/models/llama/duo.tsv");
}

TEST(PolicySettings, WrongValuesAreNamed) {
  const struct {
    SettingList given;
    std::string sentence;
  } kCases[] = {
      {{{"x", "1"}}, "policy p has no setting 'x'; it has n, f, on, mode, list"},
      {{{"n", "0"}}, "policy p: n is '0', expected a whole number from 1 to 10"},
      {{{"n", "2.5"}}, "n is '2.5'"},
      {{{"n", "2x"}}, "n is '2x'"},
      {{{"n", ""}}, "n is ''"},
      {{{"n", "nan"}}, "n is 'nan'"},
      {{{"n", "auto"}}, "n is 'auto'"},
      {{{"f", "1.01"}}, "f is '1.01', expected a number from 0 to 1"},
      {{{"on", "yes"}}, "on is 'yes', expected 0 or 1, or auto"},
      {{{"mode", "c"}}, "mode is 'c', expected one of a, b"},
      {{{"list", "2,1"}}, "list is '2,1', expected ascending whole numbers from 0 to 9"},
      {{{"list", "1,,2"}}, "list is '1,,2'"},
      {{{"list", "1,1"}}, "list is '1,1'"},
  };
  for (const auto& c : kCases) {
    const auto s = PolicySettings::Parse("p", kSpecs, c.given);
    ASSERT_FALSE(s.ok()) << c.sentence;
    EXPECT_EQ(s.status().ExitCode(), 2);
    EXPECT_THAT(s.status().message(), HasSubstr(c.sentence));
  }
}

TEST(PolicyRegistry, FindsByNameAndListsTheOthers) {
  for (const char* name : {"full", "streaming", "omnikv"}) {
    const auto info = FindPolicy(name);
    ASSERT_TRUE(info.ok());
    EXPECT_EQ((*info)->name, name);
  }
  const auto missing = FindPolicy("lru");
  ASSERT_FALSE(missing.ok());
  EXPECT_THAT(missing.status().message(), HasSubstr("there is no policy 'lru'"));
  EXPECT_THAT(missing.status().message(), HasSubstr("omnikv"));
}

TEST(PolicyRegistry, RecommendsWhatWasMeasured) {
  EXPECT_EQ(RecommendedPolicy("omnikv-tiny", 16).name, "omnikv");
  EXPECT_EQ(RecommendedPolicy("Meta Llama 3.1 8B Instruct", 32).name, "omnikv");
  EXPECT_EQ(RecommendedPolicy("Mistral-7B-Instruct-v0.3", 32).name, "full");
  EXPECT_EQ(RecommendedPolicy("Mistral-7B-v0.1", 0).name, "full");
}

TEST(Streaming, SinksMayBeAShareOfTheBudget) {
  const PolicyInfo& info = **FindPolicy("streaming");
  const auto sinks = [&](const char* share, const char* budget) {
    auto settings = *PolicySettings::Parse(info.name, info.settings,
                                           {{"sink_share", share}, {"budget", budget}});
    const auto policy = info.make();
    const Status prepared = policy->Prepare({.n_layers = 2, .max_context = 4096}, settings);
    return prepared.ok() ? settings.Text("sinks") : prepared.message();
  };
  EXPECT_EQ(sinks("0.01", "1024"), "10");
  EXPECT_EQ(sinks("0.01", "24"), "1");
  EXPECT_EQ(sinks("0", "24"), "4");
  EXPECT_THAT(sinks("1", "24"), HasSubstr("expected fewer than the budget of 24"));
}

// What registers must be usable: defaults parse, and covering settings are given or excused.
TEST(PolicyRegistry, EveryPolicyIsWellFormed) {
  for (const PolicyInfo& info : AllPolicies()) {
    EXPECT_FALSE(info.summary.empty()) << info.name;
    EXPECT_TRUE(PolicySettings::Parse(info.name, info.settings, {}).ok()) << info.name;
    EXPECT_NE(info.covering(100).empty(), info.exempt.empty()) << info.name;
    for (const SettingList& covering : info.covering(100)) {
      EXPECT_TRUE(PolicySettings::Parse(info.name, info.settings, covering).ok()) << info.name;
    }
    for (const SettingList& settings : info.test_settings) {
      EXPECT_TRUE(PolicySettings::Parse(info.name, info.settings, settings).ok()) << info.name;
    }
  }
}

}  // namespace
}  // namespace omnikv::settings_test
