#include "server/protocol/conversation.h"

#include "server/protocol/tool_calls.h"
#include "sse.h"

namespace omnikv::server::conversation_test {
namespace {

const char kTools[] = R"([{"type": "function", "function": {"name": "f"}},
                          {"type": "function", "function": {"name": "g"}}])";

TEST(Conversation, GenericFormOfCallsAndResults) {
  Question q;
  q.messages = J(R"([
      {"role": "system", "content": "s"},
      {"role": "user", "content": "u"},
      {"role": "assistant", "content": "I look.", "reasoning_content": "r", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}}]},
      {"role": "tool", "content": "r1", "tool_call_id": "1"},
      {"role": "tool", "content": "r\"2", "tool_call_id": "2", "name": "g"},
      {"role": "user", "content": "and?"},
      {"role": "assistant", "content": "", "tool_calls": [
        {"id": "3", "type": "function", "function": {"name": "g", "arguments": {}}}]},
      {"role": "tool", "content": "r3"}])");
  q.tools = J(kTools);
  UseGenericForm(&q);
  Json expected = J(R"([
      {"role": "system", "content": ""},
      {"role": "user", "content": "u"},
      {"role": "assistant", "reasoning_content": "r", "content": ""},
      {"role": "user", "content": ""},
      {"role": "assistant", "content": "{\"tool_calls\":[{\"name\":\"g\",\"arguments\":{}}]}"},
      {"role": "user", "content": "{\"result\":\"r3\"}"}])");
  expected[0]["content"] = GenericInstruction(q.tools) + "\n\ns";
  expected[2] = Json{{"role", "assistant"},
                     {"content",
                      "I look.\n{\"tool_calls\":[{\"name\":\"f\",\"arguments\":"
                      "{\"z\":1,\"a\":2}},{\"name\":\"g\",\"arguments\":{}}]}"},
                     {"reasoning_content", "r"}};
  expected[3]["content"] =
      "{\"tool_call_id\":\"1\",\"result\":\"r1\"}\n"
      "{\"tool_call_id\":\"2\",\"name\":\"g\",\"result\":\"r\\\"2\"}\nand?";
  EXPECT_EQ(Pretty(q.messages), Pretty(expected));
  EXPECT_EQ(q.format.kind, AnswerFormat::Kind::kJsonSchema);
  EXPECT_EQ(q.format.schema, GenericSchema(q.tools, false, true));
}

TEST(Conversation, GenericFormFollowsTheChoice) {
  const auto schema = [](ToolChoice choice) {
    Question q;
    q.messages = J(R"([{"role": "user", "content": "u"}])");
    q.tools = J(kTools);
    q.tool_choice = std::move(choice);
    q.parallel_tool_calls = false;
    UseGenericForm(&q);
    EXPECT_EQ(q.messages.size(), q.format.kind == AnswerFormat::Kind::kText ? 1U : 2U);
    return q.format.schema;
  };
  EXPECT_EQ(schema({ToolChoice::Kind::kRequired, ""}), GenericSchema(J(kTools), true, false));
  EXPECT_EQ(schema({ToolChoice::Kind::kNamed, "g"}),
            GenericSchema(Json::array({J(kTools)[1]}), true, false));
  EXPECT_TRUE(schema({ToolChoice::Kind::kNone, ""}).is_null());
  Question plain;
  plain.messages = J(R"([{"role": "user", "content": "u"}])");
  const Json before = plain.messages;
  UseGenericForm(&plain);
  EXPECT_EQ(plain.messages, before);
  EXPECT_EQ(plain.format.kind, AnswerFormat::Kind::kText);
  Question prompt;
  prompt.prompts = {"p"};
  UseGenericForm(&prompt);
  EXPECT_TRUE(prompt.messages.is_null());
  // the client's own form stays
  plain.tools = J(kTools);
  SetSchema(&plain, J(R"({"x": 1})"));
  UseGenericForm(&plain);
  EXPECT_EQ(Dump(plain.format.schema), R"({"x":1})");
}

TEST(Conversation, LeadingSystemMessagesBecomeOne) {
  Json messages = J(R"([{"role": "system", "content": "a"}, {"role": "system", "content": ""},
      {"role": "system", "content": "b"}, {"role": "user", "content": "u"},
      {"role": "system", "content": "c"}])");
  MergeLeadingSystem(&messages);
  EXPECT_EQ(Pretty(messages), Pretty(J(R"([{"role": "system", "content": "a\n\nb"},
      {"role": "user", "content": "u"}, {"role": "system", "content": "c"}])")));
}

}  // namespace
}  // namespace omnikv::server::conversation_test
