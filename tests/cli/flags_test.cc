// Flags and subcommands: what is mistyped is named, with what was probably meant; numbers are read
// as people write them; help explains everything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "../test_data.h"
#include "program.h"

namespace omnikv::cli::flags_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Flags : public ProgramTest {
 protected:
  // Expects that it is refused with this sentence alone, before anything is loaded.
  void Refused(const std::string& arguments, const std::string& sentence,
               const std::string& input = "") {
    const Outcome o = Run(arguments, input);
    EXPECT_EQ(o.exit_code, 2) << arguments;
    EXPECT_EQ(o.out, "") << arguments;
    EXPECT_EQ(o.err, "omnikv: " + sentence + "\n") << arguments;
  }
  int64_t Context(const std::string& ctx) {
    const Outcome o = Run("info --json --device cpu --ctx " + ctx);
    EXPECT_EQ(o.exit_code, 0) << ctx << "\n" << o.err;
    return o.exit_code == 0 ? json::parse(o.out).at("context").get<int64_t>() : -1;
  }
};

TEST_F(Flags, AnUnknownSubcommandIsNamed) {
  const std::string all =
      "run, chat, serve, tokenize, logits, info, policies, bench, eval, analyze";
  Refused("train", "there is no subcommand 'train'; there are: " + all);
  Refused("tokenise -p x",
          "there is no subcommand 'tokenise': did you mean tokenize? There are: " + all);
  Refused("help train", "there is no subcommand 'train'; there are: " + all);
  Refused("train --help", "there is no subcommand 'train'; there are: " + all);
  Refused("", "omnikv needs a subcommand: " + all + " (omnikv --help says what they do)");
  Refused("eval needle",
          "there is no subcommand 'needle': did you mean needles? There are: quickstart, needles, "
          "document");
  Refused("eval",
          "omnikv eval needs a subcommand: quickstart, needles, document (omnikv eval --help says "
          "what they do)");
}

TEST_F(Flags, AnUnknownFlagIsNamed) {
  Refused("run -p x --top_k 5",
          "omnikv run has no flag --top_k: did you mean --top-k? (omnikv run --help lists the "
          "flags)");
  Refused("run -p x --tempp=0.5",
          "omnikv run has no flag --tempp: did you mean --temp? (omnikv run --help lists the "
          "flags)");
  Refused("eval needles --frobnicate",
          "omnikv eval needles has no flag --frobnicate (omnikv eval needles --help lists the "
          "flags)");
  Refused("logits --tokenz 1",  // rather than that --out is missing
          "omnikv logits has no flag --tokenz: did you mean --tokens? (omnikv logits --help lists "
          "the flags)");
  Refused("-m x run -p y",
          "omnikv has no flag -m (omnikv --help lists the flags; others follow the subcommand)");
  Refused("run hi",
          "'hi' belongs to no flag: give a text with -p, in quotes where it has spaces (omnikv run "
          "--help lists the flags)");
  Refused("run -p hello world",
          "'world' belongs to no flag: give a text with -p, in quotes where it has spaces (omnikv "
          "run --help lists the flags)");
  Refused("info tiny.gguf", "'tiny.gguf' belongs to no flag (omnikv info --help lists the flags)");
  EXPECT_THAT(Run("run -p x -q -v").err, HasSubstr("--quiet"));
}

TEST_F(Flags, AnalyzeHeadsRefusesWhatItCannotMeasure) {
  Refused(
      "analyze",
      "omnikv analyze needs a subcommand: anchors, heads, index (omnikv analyze --help says what "
      "they do)");
  Refused("analyze head",
          "there is no subcommand 'head': did you mean heads? There are: anchors, heads, index");
  Refused("analyze heads --file x --docs 2", "--file excludes --docs");
  Refused("analyze heads -o ''", "-o is empty, expected a text");
  Refused("analyze heads -f " + (dir_ / "none.txt").string(),
          "-f is '" + (dir_ / "none.txt").string() +
              "', which cannot be read (No such file or directory)");
  Refused("analyze heads -f -", "-f - is empty, expected a text");
  Refused("analyze heads -o " + (dir_ / "none/gates.tsv").string(),
          "-o is '" + (dir_ / "none/gates.tsv").string() +
              "', which cannot be written (no file can be made beside it: No such file or "
              "directory)");
  for (const char* flag : {"--window 0", "--sinks -1", "--recent 0", "--docs 0", "--tokens 0"}) {
    const Outcome o = Run("analyze heads " + std::string(flag));
    EXPECT_EQ(o.exit_code, 2) << flag;
    EXPECT_THAT(o.err, HasSubstr(std::string(flag).substr(0, std::string(flag).find(' '))));
  }
  Refused("analyze heads --quiet --window 600",
          "the last 600 rows of a text are to be measured, expected at most the 512 rows of a step "
          "(--chunk)");
  Refused("analyze heads --quiet -f -",
          "text 1: has 5 tokens, expected more than the 320 that a streaming head reads",
          "a b c d e");
  Refused("analyze heads --quiet --docs 1 --tokens 300",
          "a document of 300 tokens is asked for, expected at least 327: 256 of prose and 71 of "
          "facts");
}

TEST_F(Flags, AnalyzeAnchorsRefusesWhatItCannotMeasure) {
  for (const char* flag : {"--anchors 0", "--tile 0", "--share 0", "--share 1.5", "--least 0"}) {
    const Outcome o = Run("analyze anchors " + std::string(flag));
    EXPECT_EQ(o.exit_code, 2) << flag;
    EXPECT_THAT(o.err, HasSubstr(std::string(flag).substr(0, std::string(flag).find(' '))));
  }
  Refused("analyze anchors --quiet --docs 1 --tokens 1k --anchors 17",
          "--anchors is 17, expected at most the 16 layers of the model that attend to all tokens");
  Refused("analyze anchors --quiet --docs 1 --tokens 1k --tile 33",
          "--tile is 33, expected at most the 32 tokens of --window");
  Refused("analyze anchors --quiet -f -",
          "text 1: has 5 tokens, expected more than the 32 rows that are measured", "a b c d e");
}

TEST_F(Flags, EmptyValuesAreRefused) {
  for (const char* flag : {"-m", "-p", "-f", "--system", "--stop", "--policy", "--set"}) {
    Refused("run " + std::string(flag) + " ''", std::string(flag) + " is empty, expected a text");
  }
  for (const char* flag : {"-n", "--ctx", "--temp", "--seed", "--top-k", "--threads"}) {
    Refused("run -p x " + std::string(flag) + " ''",
            std::string(flag) + " is empty, expected a number");
  }
  Refused("eval document --out ''", "--out is empty, expected a text");
  Refused("bench --context ''", "--context is empty, expected a number");
  Refused("run -f -", "-f - is empty, expected a text");
  Spill(dir_ / "empty.txt", "");
  const std::string empty = dir_ / "empty.txt";
  Refused("run -f " + empty, "-f " + empty + " is empty, expected a text");
}

TEST_F(Flags, NumbersAreReadAsPeopleWriteThem) {
  EXPECT_EQ(Context("32k"), 32768);
  EXPECT_EQ(Context("1.5K"), 1536);
  EXPECT_EQ(Context("010"), 10);
  const auto available = [&](const std::string& size) {
    const Outcome o = Run("info --json --device cpu --host-memory " + size);
    EXPECT_EQ(o.exit_code, 0) << size << "\n" << o.err;
    return o.exit_code == 0 ? json::parse(o.out).at("available_bytes").get<int64_t>() : -1;
  };
  for (const char* size : {"8g", "8gb", "8gib", "8GB", "8GiB", "8192m", "8589934592"}) {
    EXPECT_EQ(available(size), int64_t{8} << 30) << size;
  }
}

TEST_F(Flags, WhatIsNoNumberIsRefused) {
  const std::string whole = ", expected a whole number such as 4096 or 32k";
  for (const char* value : {"many", "0x10", "4.5", "1e3", "32q", "99999999999999999999"}) {
    Refused("run -p x --ctx " + std::string(value),
            "--ctx is '" + std::string(value) + "'" + whole);
  }
  Refused("run -p x -n 99999999999999999999", "-n is '99999999999999999999'" + whole);
  for (const char* value : {"-1", "18446744073709551616", "x"}) {
    Refused("run -p x --seed " + std::string(value),
            "--seed is '" + std::string(value) + "', expected a whole number from 0 to 2^64 - 1");
  }
  for (const char* value : {"hot", "nan", "inf", "0.5x"}) {
    Refused("run -p x --temp " + std::string(value),
            "--temp is '" + std::string(value) + "', expected a number such as 0.7");
  }
  Refused("bench --context 16,x", "--context is 'x'" + whole);
  Refused("run -p x --threads 99999999999", "--threads = 99999999999 is out of range");
  Refused("run -p x --top-k -99999999999", "--top-k = -99999999999 is out of range");
  Refused("run -p", "--prompt needs a value");
  Refused("run -p x -p y", "--prompt is given more than once");
}

TEST_F(Flags, HelpIsOfTheSubcommand) {
  const std::string run = Run("run --help").out;
  EXPECT_EQ(Run("help run").out, run);
  EXPECT_EQ(Run("help eval needles").out, Run("eval needles --help").out);
  EXPECT_EQ(Run("help").out, Run("--help").out);
  EXPECT_THAT(run, HasSubstr("Usage: omnikv run [OPTIONS]"));
  EXPECT_THAT(run, HasSubstr("\nExamples:\n  omnikv run -p "));
  EXPECT_THAT(run, HasSubstr("omnikv policies"));
  const std::string help = Run("--help").out;
  for (const char* code : {"0 for success", "1 for a failure", "2 for a", "130 after Ctrl-C"}) {
    EXPECT_THAT(help, HasSubstr(code));
  }
  EXPECT_EQ(Run("help analyze heads").out, Run("analyze heads --help").out);
  EXPECT_THAT(Run("analyze heads --help").out, HasSubstr("duo finds MODEL.duo.tsv"));
  EXPECT_THAT(Run("analyze anchors --help").out, HasSubstr("kascade finds MODEL.kascade.tsv"));
  EXPECT_THAT(Run("bench --help").out, HasSubstr("a prompt of 512, decode at 16 and 16384"));
}

// Other policies come from OMNIKV_POLICY_DIRS.
bool ComesWithOmnikv(const std::string& policy) {
  return std::filesystem::exists(TestData("src/policy/" + policy));
}

TEST_F(Flags, PoliciesAndTheirSettingsAreExplained) {
  const Outcome o = Run("policies");
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_THAT(o.out, HasSubstr("--policy full: "));
  EXPECT_THAT(o.out, HasSubstr("  --set selector=last\n"));
  EXPECT_THAT(o.out, HasSubstr("(last, uniform, exp)"));
  const json all = json::parse(Run("policies --json").out).at("policies");
  ASSERT_GE(all.size(), 4u);
  for (const json& policy : all) {
    EXPECT_FALSE(policy.at("summary").get<std::string>().empty()) << policy;
    for (const char* fact : {"source", "chooses", "keeps", "reads", "holds", "loses"}) {
      EXPECT_TRUE(policy.contains(fact) || !ComesWithOmnikv(policy.at("name"))) << fact << policy;
    }
    const Outcome one = Run("policies --policy " + policy.at("name").get<std::string>());
    EXPECT_THAT(one.out, StartsWith("--policy " + policy.at("name").get<std::string>() + ": "));
    EXPECT_THAT(o.out, HasSubstr(one.out));
    for (const json& setting : policy.at("settings")) {
      for (const char* part : {"key", "values", "help"}) {
        EXPECT_FALSE(setting.at(part).get<std::string>().empty()) << setting;
        EXPECT_THAT(one.out, HasSubstr(setting.at(part).get<std::string>()));
      }
      const std::string given = setting.value("default", "(must be given)");
      EXPECT_THAT(one.out, HasSubstr(setting.at("key").get<std::string>() + "=" + given));
    }
  }
  Refused("policies --policy lru",
          Run("info --policy lru").err.substr(8, Run("info --policy lru").err.size() - 9));
}

TEST_F(Flags, TheTableOfPoliciesIsTheReadmes) {
  std::ifstream file(TestData("src/policy/README.md"));
  const std::string readme((std::istreambuf_iterator<char>(file)), {});
  std::istringstream table(Run("policies --markdown").out);
  std::string rows;
  for (std::string row; std::getline(table, row);) {
    const std::string name = row.starts_with("| `") ? row.substr(3, row.find('`', 3) - 3) : "";
    if (name.empty() || ComesWithOmnikv(name)) rows += row + "\n";
  }
  EXPECT_THAT(rows, StartsWith("| policy | source |"));
  EXPECT_THAT(readme, HasSubstr(rows));
}

}  // namespace
}  // namespace omnikv::cli::flags_test
