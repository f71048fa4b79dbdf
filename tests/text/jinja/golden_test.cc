// Templates rendered by transformers (scripts/make_template_goldens.py) give the same text here.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/printable.h"
#include "text/jinja/chat_template.h"

namespace omnikv::golden_test {
namespace {

using Json = nlohmann::ordered_json;

Json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file, nullptr, false);
}

ChatInput InputOf(const Json& json) {
  ChatInput input;
  input.messages = json.at("messages");
  input.tools = json.at("tools");
  input.add_generation_prompt = json.at("add_generation_prompt");
  input.bos_token = json.at("bos_token");
  input.eos_token = json.at("eos_token");
  input.extra = json.at("extra");
  return input;
}

std::tm TimeOf(const Json& now) {
  std::tm time{};
  time.tm_year = now[0].get<int>() - 1900;
  time.tm_mon = now[1].get<int>() - 1;
  time.tm_mday = now[2];
  time.tm_hour = now[3];
  time.tm_min = now[4];
  time.tm_sec = now[5];
  std::mktime(&time);  // fills in the day of the week and of the year
  return time;
}

Result<std::string> RenderCase(const std::string& source, const ChatInput& input) {
  OKV_ASSIGN_OR_RETURN(const ChatTemplate parsed, ChatTemplate::Parse(source, "golden"));
  return parsed.RenderText(input);
}

TEST(ChatTemplateGolden, RendersWhatTransformersRenders) {
  const Json golden =
      ReadJson(std::string(OMNIKV_SOURCE_DIR) + "/tests/text/jinja/data/templates.json");
  ASSERT_TRUE(golden.is_object());
  size_t n_texts = 0;
  for (const Json& one : golden.at("cases")) {
    const std::string name = one.at("name");
    const std::string source = one.at("template");
    ChatInput input = InputOf(golden.at("inputs").at(one.at("input").get<std::string>()));
    input.now = TimeOf(golden.at("now"));
    const Result<std::string> text = RenderCase(source, input);
    if (one.contains("out")) {
      ++n_texts;
      EXPECT_TRUE(text.ok()) << name << ": " << text.status().message() << "\n" << source;
      EXPECT_EQ(text.ok() ? *text : "", one.at("out").get<std::string>()) << name << "\n" << source;
      continue;
    }
    ASSERT_TRUE(one.contains("error")) << name;
    EXPECT_FALSE(text.ok()) << name << " is an error in transformers: " << one.at("error") << "\n"
                            << source << "\ngives " << (text.ok() ? *text : "");
    if (text.ok()) continue;
    const std::string& message = text.status().message();
    EXPECT_EQ(message.rfind("golden, line ", 0), 0U) << name << ": " << message;
    if (!one.contains("raised")) continue;
    const std::string marker = ": the template raised: ";
    const size_t at = message.find(marker);
    ASSERT_NE(at, std::string::npos) << name << ": " << message;
    EXPECT_EQ(message.substr(at + marker.size()), Escaped(one.at("raised").get<std::string>()))
        << name;
  }
  EXPECT_GE(n_texts, 250U);
}

}  // namespace
}  // namespace omnikv::golden_test
