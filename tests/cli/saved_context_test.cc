// Contexts that run saves and loads: an answer goes on as if the program had not ended, and a file
// that is none, or of something else, is refused with a sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "program.h"

namespace omnikv::cli::saved_context_test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

const fs::path kRoot = OMNIKV_SOURCE_DIR;
const std::string kStory = "'Once upon a time'";

class SavedContextTest : public ProgramTest {
 protected:
  json Answer(const std::string& arguments) {
    const Outcome o = Run("run --json -q " + arguments);
    EXPECT_EQ(o.exit_code, 0) << arguments << "\n" << o.err;
    json answer = json::parse(o.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(answer.is_object()) << o.out;
    return answer;
  }
  std::vector<int32_t> Tokens(const std::string& arguments) {
    return Answer(arguments).value("tokens", std::vector<int32_t>());
  }
  void Refused(const std::string& arguments, int exit_code, const std::vector<std::string>& parts) {
    const Outcome o = Run("run -q " + arguments);
    EXPECT_EQ(o.exit_code, exit_code) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
    for (const std::string& part : parts) EXPECT_THAT(o.err, HasSubstr(part)) << arguments;
  }
  std::string File(const std::string& name = "saved") const { return dir_ / name; }
};

std::vector<int32_t> operator+(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_F(SavedContextTest, AnAnswerGoesOnAsIfItHadNotBeenCut) {
  for (const std::string& how : std::vector<std::string>{
           "--policy full", "--policy omnikv --set budget=8", "--policy full --temp 1 --seed 7"}) {
    const std::string draws = how.find("--temp") == std::string::npos ? "" : " --temp 1 --seed 7";
    const auto whole = Tokens("--raw -n 40 -p " + kStory + " " + how);
    auto parts = Tokens("--raw -n 13 -p " + kStory + " " + how + " --save " + File());
    ASSERT_EQ(parts.size(), 13u);
    // Twice: what was loaded is saved again, over the file that it came from.
    parts = parts + Tokens("-n 11 --load " + File() + " --save " + File() + draws);
    const json last = Answer("-n 16 --load " + File() + draws);
    EXPECT_EQ(parts + last.at("tokens").get<std::vector<int32_t>>(), whole) << how;
    EXPECT_EQ(last.at("stats").at("policy"),
              how.find("omnikv") != std::string::npos ? "omnikv" : "full");
  }
}

TEST_F(SavedContextTest, TheNextTurnIsThatOfAConversation) {
  const std::string told = "The pass key is 48213.";
  const std::string asked = "What is the pass key?";
  const Outcome chat = Run("chat -q --json -n 24", told + "\n" + asked + "\n");
  ASSERT_EQ(chat.exit_code, 0) << chat.err;
  const size_t line = chat.out.find('\n');
  const json first = json::parse(chat.out.substr(0, line));
  const json second = json::parse(chat.out.substr(line + 1));

  EXPECT_EQ(Answer("-n 24 -p '" + told + "' --save " + File()).at("tokens"), first.at("tokens"));
  const json next = Answer("-n 24 -p '" + asked + "' --load " + File());
  EXPECT_EQ(next.at("tokens"), second.at("tokens"));
  EXPECT_EQ(next.at("prompt_tokens"), second.at("prompt_tokens"));
  // The last rows of a prompt are computed; those before it came from the file.
  EXPECT_THAT(Run("run -n 24 -p '" + asked + "' --load " + File()).err,
              Not(HasSubstr("(" + next.at("prompt_tokens").dump() + " tokens read")));
  // An answer that was cut is closed as the template closes one.
  ASSERT_EQ(Answer("-n 2 -p '" + told + "' --save " + File()).at("finish_reason"), "length");
  EXPECT_GT(Answer("-n 24 -p '" + asked + "' --load " + File()).at("tokens").size(), 0u);
}

TEST_F(SavedContextTest, RawTextFollowsAsItIs) {
  const json whole = Answer("--raw -n 8 --policy full -p 'Once upon a time and then'");
  Answer("--raw -n 0 --policy full -p " + kStory + " --save " + File());
  const json next = Answer("--raw -n 8 -p ' and then' --load " + File());
  EXPECT_EQ(next.at("tokens"), whole.at("tokens"));
  EXPECT_EQ(next.at("prompt_tokens"), whole.at("prompt_tokens"));
  // Behind all of an answer that was cut, its last token too.
  Answer("--raw -n 5 --policy full -p " + kStory + " --save " + File());
  EXPECT_EQ(Answer("--raw -n 1 -p ' and then' --load " + File()).at("prompt_tokens"),
            whole.at("prompt_tokens").get<int>() + 5);
}

TEST_F(SavedContextTest, ThePolicyIsTheFiles) {
  Answer("-n 4 -p Hello --policy omnikv --set budget=64 --save " + File());
  const std::string load = "-n 4 -p Hello --load " + File();
  EXPECT_THAT(Answer(load).at("stats").at("settings").get<std::string>(), HasSubstr("budget=64"));
  Answer(load + " --policy omnikv --set budget=64");
  Refused(load + " --policy full", 2,
          {"--policy is 'full', but the context of --load '" + File() + "' has policy 'omnikv'"});
  Refused(load + " --set budget=65", 2, {"--set is 'budget=65'", "has budget=64", "leave it out"});
  Refused(load + " --system x", 2, {"--system is 'x', but --load goes on"});
  Refused(load + " --set budget=x", 2, {"budget"});
}

TEST_F(SavedContextTest, WhatCannotBeLoadedOrSavedIsNamed) {
  Refused("--load " + File("none"), 2, {"omnikv: --load: " + File("none") + ": no such file\n"});
  Refused("-p x --save /nonexistent/x", 2, {"--save: /nonexistent/x", "cannot be written there"});
  Refused("-p x --save " + dir_.string(), 2, {"--save: " + dir_.string()});
  Answer("-n 30 -p 'The pass key is 48213. What is the pass key?' --save " + File());
  // Its answer came to its end.
  Refused("--load " + File(), 2, {"whose answer has come to its end: give what is said next"});
  Refused("-p x --ctx 16 --load " + File(), 2, {"--load is '", "but the context holds 16"});
  const std::string bytes = Slurp(File());
  Spill(File("torn"), bytes.substr(0, bytes.size() / 2));
  Refused("-p x --load " + File("torn"), 1, {"--load: " + File("torn"), "its header tells of"});
  std::string damaged = bytes;
  damaged[damaged.size() - 99] ^= 1;
  Spill(File("damaged"), damaged);
  Refused("-p x --load " + File("damaged"), 1, {File("damaged"), "is damaged"});
  Spill(File("text"), "Hello");
  Refused("-p x --load " + File("text"), 1, {"is not a saved context"});
  Answer("-n 2 --raw -p Hello --kv-dtype f16 --save " + File("f16"));
  Refused("-m " + (kRoot / "tests/golden/policy_model").string() + " --load " + File("f16"), 2,
          {"is the context of another model"});
  Refused("--kv-dtype f32 --load " + File("f16"), 2, {"is the context of another model"});
}

}  // namespace
}  // namespace omnikv::cli::saved_context_test
