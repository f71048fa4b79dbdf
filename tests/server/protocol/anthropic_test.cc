#include "server/protocol/anthropic_messages.h"

#include "sse.h"

namespace omnikv::server::anthropic_test {
namespace {

Question Parse(std::string_view body) {
  auto question = ParseMessages(J(body));
  EXPECT_TRUE(question.ok()) << question.status().message();
  return question.ok() ? std::move(*question) : Question();
}

// With max_tokens and one message of a user before the given fields.
std::string With(const std::string& fields) {
  return R"({"max_tokens": 5, "messages": [{"role": "user", "content": "u"}], )" + fields + "}";
}

std::string Mistake(std::string_view body) {
  return Refusal(ParseMessages, body);
}

std::string MistakeOf(const std::string& fields) {
  return Mistake(With(fields));
}

std::string MistakeOfMessage(const std::string& message) {
  return Mistake(R"({"max_tokens": 5, "messages": [)" + message + "]}");
}

TEST(Anthropic, ConversationsBecomeThoseOfTemplates) {
  const Question q = Parse(R"({"model": "m", "max_tokens": 5,
      "system": [{"type": "text", "text": "x-anthropic-billing-header: v=1; cch=77a1"},
                 {"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}},
                 {"type": "text", "text": "s2"}],
      "messages": [
       {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
       {"role": "assistant", "content": [
         {"type": "thinking", "thinking": "t", "signature": "x"},
         {"type": "redacted_thinking", "data": "x"},
         {"type": "text", "text": "c"},
         {"type": "tool_use", "id": "t1", "name": "f", "input": {"z": 1, "a": 2}},
         {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
       {"role": "user", "content": [
         {"type": "text", "text": "and now"},
         {"type": "tool_result", "tool_use_id": "t1", "content": "r1"},
         {"type": "tool_result", "tool_use_id": "t2", "is_error": true,
          "content": [{"type": "text", "text": "r2"}, {"type": "text", "text": "r3"}]}]},
       {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
       {"role": "system", "content": "late"},
       {"role": "assistant", "content": "I"}]})");
  EXPECT_EQ(Pretty(q.messages), Pretty(J(R"([
      {"role": "system", "content": "s1\ns2"},
      {"role": "user", "content": "a\nb"},
      {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}},
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}}]},
      {"role": "tool", "content": "r1", "tool_call_id": "t1"},
      {"role": "tool", "content": "r2\nr3", "tool_call_id": "t2"},
      {"role": "user", "content": "and now"},
      {"role": "tool", "content": "", "tool_call_id": "t3"},
      {"role": "system", "content": "late"},
      {"role": "assistant", "content": "I"}])")));
  EXPECT_TRUE(q.continue_last);
}

TEST(Anthropic, TheBillingHeaderAloneIsNoSystemMessage) {
  const Question q =
      Parse(With(R"("system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}])"));
  EXPECT_EQ(Pretty(q.messages), Pretty(J(R"([{"role": "user", "content": "u"}])")));
  const Question later = Parse(With(R"("system": [{"type": "text", "text": "s"},
      {"type": "text", "text": "x-anthropic-billing-header"}])"));
  EXPECT_EQ(later.messages[0]["content"], "s\nx-anthropic-billing-header");
}

TEST(Anthropic, ReadsEveryField) {
  const Question q = Parse(With(R"("system": "s", "stop_sequences": ["x", "y"],
      "temperature": 0.25, "top_p": 0.5, "top_k": 3, "stream": true, "metadata": {"user_id": "u"},
      "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object", "z": 1, "a": 2}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "name": "g", "input_schema": {}, "cache_control": null}],
      "tool_choice": {"type": "tool", "name": "g", "disable_parallel_tool_use": true},
      "thinking": {"type": "enabled", "budget_tokens": 1024},
      "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"x": 1}}},
      "omnikv": {"policy": "full"})"));
  EXPECT_TRUE(q.limited && q.stream);
  EXPECT_EQ(q.generate.max_tokens, 5);
  EXPECT_EQ(q.generate.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(q.generate.sampling.temperature, 0.25);
  EXPECT_EQ(q.generate.sampling.top_p, 0.5);
  EXPECT_EQ(q.generate.sampling.top_k, 3);
  EXPECT_EQ(q.policy, "full");
  EXPECT_EQ(Pretty(q.tools), Pretty(J(R"([
      {"type": "function", "function": {"name": "f", "description": "d",
       "parameters": {"type": "object", "z": 1, "a": 2}}},
      {"type": "function", "function": {"name": "g", "parameters": {}}}])")));
  EXPECT_EQ(q.tool_choice.kind, ToolChoice::Kind::kNamed);
  EXPECT_EQ(q.tool_choice.name, "g");
  EXPECT_FALSE(q.parallel_tool_calls);
  EXPECT_EQ(Dump(q.template_arguments), R"({"enable_thinking":true,"reasoning_effort":"high"})");
  EXPECT_EQ(q.format.kind, AnswerFormat::Kind::kJsonSchema);
  EXPECT_EQ(Dump(q.format.schema), R"({"x":1})");
  EXPECT_FALSE(q.continue_last);
  const Question plain = Parse(With(R"("thinking": {"type": "disabled"})"));
  EXPECT_EQ(Dump(plain.template_arguments), R"({"enable_thinking":false})");
  EXPECT_TRUE(plain.tools.is_null());
  EXPECT_TRUE(plain.parallel_tool_calls);
  EXPECT_EQ(plain.generate.sampling.temperature, 1);
}

TEST(Anthropic, CountsTokensOfTheSameConversation) {
  const auto q = ParseCountTokens(J(R"({"model": "m", "system": "s",
                                        "messages": [{"role": "user", "content": "u"}]})"));
  ASSERT_TRUE(q.ok());
  EXPECT_EQ(q->messages.size(), 2U);
  EXPECT_EQ(CountTokensBody(12), R"({"input_tokens":12})");
}

TEST(Anthropic, RefusesWithOneSentence) {
  EXPECT_EQ(Mistake(R"({"messages": [{"role": "user", "content": "u"}]})"),
            "`max_tokens` is missing, expected a whole number from 1");
  EXPECT_EQ(MistakeOf(R"("max_tokens": 0)"), "`max_tokens` is 0, expected a whole number from 1");
  EXPECT_EQ(Mistake(R"({"max_tokens": 5})"),
            "`messages` is missing, expected an array of at least one message");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "tool", "content": ""})"),
            "`messages[0].role` is 'tool', expected user, assistant or system");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": 3})"),
            "`messages[0].content` is 3, expected a text or a list of blocks");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "image"}]})"),
            "`messages[0].content[0]` is not supported here: it is of type 'image', expected text "
            "or tool_result");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "assistant", "content": [{"type": "document"}]})"),
            "`messages[0].content[0]` is not supported here: it is of type 'document', expected "
            "text, thinking or tool_use");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "tool_result",
                "tool_use_id": "1", "content": [{"type": "image"}]}]})"),
            "`messages[0].content[0].content[0]` is not supported here: it is of type 'image', and "
            "models read text only");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "tool_result"}]})"),
            "`messages[0].content[0].tool_use_id` is missing, expected the id of a tool_use");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "assistant", "content": [{"type": "tool_use", "id": "1",
                "name": "f", "input": "x"}]})"),
            "`messages[0].content[0].input` is 'x', expected an object");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"text": "x"}]})"),
            "`messages[0].content[0].type` is missing, expected the type of a block");
  EXPECT_EQ(MistakeOf(R"("system": 3)"), "`system` is 3, expected a text or a list of parts");
  EXPECT_EQ(MistakeOf(R"("tools": [{"name": "f"}])"),
            "`tools[0].input_schema` is missing, expected an object");
  EXPECT_EQ(MistakeOf(R"("tools": [{"input_schema": {}}])"),
            "`tools[0].name` is missing, expected the name of a tool");
  EXPECT_EQ(MistakeOf(R"("tool_choice": "auto")"), "`tool_choice` is 'auto', expected an object");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "any"})"),
            "`tool_choice` demands a call, but there are no tools, expected some");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "tool", "name": "f"})"),
            "`tool_choice` names the tool 'f', expected one of the tools");
  EXPECT_EQ(MistakeOf(R"("stop_sequences": [3])"), "`stop_sequences[0]` is 3, expected a text");
  EXPECT_EQ(MistakeOf(R"("thinking": {})"),
            "`thinking.type` is missing, expected enabled, adaptive or disabled");
  EXPECT_EQ(MistakeOf(R"("output_config": {"format": {"type": "json_schema"}})"),
            "`output_config.format.schema` is missing, expected an object");
}

Question Asked(bool stream) {
  Question q;
  q.messages = J(R"([{"role": "user", "content": "u"}])");
  q.tools = J(R"([{"type": "function", "function": {"name": "now"}}])");
  q.stream = stream;
  return q;
}

constexpr char kSaid[] =
    "<think>hm</think>I look.\n<tool_call>{\"name\": \"now\", \"arguments\": {\"z\": 1}}"
    "</tool_call>\n<tool_call>{\"name\": \"now\", \"arguments\": {\"y\": 2}}</tool_call>";

TEST(Anthropic, WholeBody) {
  const auto answer = AnswerMessages(Asked(false), TestReply(), {});
  EXPECT_EQ(answer->Begin(), "");
  EXPECT_EQ(answer->Progress(1, 2, 0), "");
  EXPECT_EQ(answer->Add(0, {kSaid, {}}), "");
  EXPECT_EQ(answer->End(0, FinishReason::kStop), "");
  EXPECT_EQ(Pretty(J(answer->Close({9, 4, 7}, J(R"({"timings": 1})")))), Pretty(J(R"({
      "id": "msg_77", "type": "message", "role": "assistant", "model": "m", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_77_0_0", "name": "now", "input": {"z": 1}},
        {"type": "tool_use", "id": "toolu_77_0_1", "name": "now", "input": {"y": 2}}],
      "stop_reason": "tool_use", "stop_sequence": null,
      "usage": {"input_tokens": 5, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4, "output_tokens": 7},
      "timings": 1})")));
}

TEST(Anthropic, Stream) {
  const auto answer = AnswerMessages(Asked(true), TestReply(), {});
  std::string out = answer->Begin();
  out += answer->Progress(6, 9, 4);
  const std::string_view said = kSaid;
  out += answer->Add(0, {std::string(said.substr(0, 8)), {}});
  out += answer->Add(0, {std::string(said.substr(8, 11)), {}});
  out += answer->Add(0, {std::string(said.substr(19)), {}});
  out += answer->End(0, FinishReason::kStop);
  out += answer->Close({9, 4, 7}, J(R"({"timings": 1})"));
  EXPECT_EQ(Pretty(Events(out)), Pretty(J(R"([
      {"type": "message_start", "message": {"id": "msg_77", "type": "message",
        "role": "assistant", "model": "m", "content": [], "stop_reason": null,
        "stop_sequence": null, "usage": {"input_tokens": 9, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0, "output_tokens": 0}}},
      {"type": "ping"},
      {"type": "content_block_start", "index": 0,
       "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
      {"type": "content_block_delta", "index": 0,
       "delta": {"type": "thinking_delta", "thinking": "h"}},
      {"type": "content_block_delta", "index": 0,
       "delta": {"type": "thinking_delta", "thinking": "m"}},
      {"type": "content_block_stop", "index": 0},
      {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
      {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I"}},
      {"type": "content_block_delta", "index": 1,
       "delta": {"type": "text_delta", "text": " look."}},
      {"type": "content_block_stop", "index": 1},
      {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use",
        "id": "toolu_77_0_0", "name": "now", "input": {}}},
      {"type": "content_block_delta", "index": 2,
       "delta": {"type": "input_json_delta", "partial_json": "{\"z\":1}"}},
      {"type": "content_block_stop", "index": 2},
      {"type": "content_block_start", "index": 3, "content_block": {"type": "tool_use",
        "id": "toolu_77_0_1", "name": "now", "input": {}}},
      {"type": "content_block_delta", "index": 3,
       "delta": {"type": "input_json_delta", "partial_json": "{\"y\":2}"}},
      {"type": "content_block_stop", "index": 3},
      {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null},
       "usage": {"input_tokens": 5, "cache_creation_input_tokens": 0,
                 "cache_read_input_tokens": 4, "output_tokens": 7}},
      {"type": "message_stop", "timings": 1}])")));
}

TEST(Anthropic, StreamOfArguments) {
  for (const bool stream : {true, false}) {
    const auto answer = AnswerMessages(Asked(stream), TestReply(), {.stream_calls = true});
    std::string out;
    out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"z\"", {}});
    out += answer->Add(0, {": 1}}</tool_call>x", {}});
    out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"cut", {}});
    out += answer->End(0, FinishReason::kLength);
    if (!stream) {
      EXPECT_EQ(out, "");
      EXPECT_EQ(Pretty(J(answer->Close({}, Json()))["content"]), Pretty(J(R"([
          {"type": "tool_use", "id": "toolu_77_0_0", "name": "now", "input": {"z": 1}},
          {"type": "text", "text": "x"},
          {"type": "tool_use", "id": "toolu_77_0_1", "name": "now", "input": {}}])")));
      continue;
    }
    EXPECT_EQ(Pretty(Events(out)), Pretty(J(R"([
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use",
          "id": "toolu_77_0_0", "name": "now", "input": {}}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "input_json_delta", "partial_json": "{\"z\""}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "input_json_delta", "partial_json": ": 1}"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use",
          "id": "toolu_77_0_1", "name": "now", "input": {}}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": "{\"cut"}},
        {"type": "content_block_stop", "index": 2}])")));
  }
}

TEST(Anthropic, ReasonsToStop) {
  const auto reason = [](const Ending& ending) {
    const auto answer = AnswerMessages(Asked(true), TestReply(), {});
    answer->Add(0, {"a", {}});
    // text that was held back comes before the block ends
    std::string out = answer->Add(0, {" <tool", {}});
    out += answer->End(0, ending);
    EXPECT_EQ(Pretty(Events(out)), Pretty(J(R"([{"type": "content_block_delta", "index": 0,
                            "delta": {"type": "text_delta", "text": " <tool"}},
                           {"type": "content_block_stop", "index": 0}])")));
    return Dump(Events(answer->Close({}, Json()))[0]["delta"]);
  };
  EXPECT_EQ(reason(FinishReason::kStop), R"({"stop_reason":"end_turn","stop_sequence":null})");
  EXPECT_EQ(reason(FinishReason::kLength), R"({"stop_reason":"max_tokens","stop_sequence":null})");
  EXPECT_EQ(reason({FinishReason::kStop, "END"}),
            R"({"stop_reason":"stop_sequence","stop_sequence":"END"})");
}

TEST(Anthropic, AnEmptyAnswerHasNoBlocks) {
  const auto answer = AnswerMessages(Asked(true), TestReply(), {});
  EXPECT_EQ(answer->End(0, FinishReason::kStop), "");
}

TEST(Anthropic, Errors) {
  const Json error = J(R"({"type": "error", "error": {"type": "overloaded_error",
                           "message": "full"}})");
  const Status full = ResourceExhausted("full");
  EXPECT_EQ(Pretty(J(AnswerMessages(Asked(false), TestReply(), {})->Error(full))), Pretty(error));
  EXPECT_EQ(Pretty(Events(AnswerMessages(Asked(true), TestReply(), {})->Error(full))),
            Pretty(Json::array({error})));
  EXPECT_EQ(AnthropicError(InvalidArgument("x"))["error"]["type"], "invalid_request_error");
  EXPECT_EQ(AnthropicError(NotFound("x"))["error"]["type"], "not_found_error");
  EXPECT_EQ(AnthropicError(Failed("x"))["error"]["type"], "api_error");
}

}  // namespace
}  // namespace omnikv::server::anthropic_test
