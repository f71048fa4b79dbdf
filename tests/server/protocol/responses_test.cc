#include "server/protocol/openai_responses.h"

#include "sse.h"

namespace omnikv::server::responses_test {
namespace {

Question Parse(std::string_view body) {
  auto question = ParseResponses(J(body));
  EXPECT_TRUE(question.ok()) << question.status().message();
  return question.ok() ? std::move(*question) : Question();
}

std::string Mistake(std::string_view body) {
  return Refusal(ParseResponses, body);
}

std::string MistakeOf(const std::string& fields) {
  return Mistake(R"({"input": "u", )" + fields + "}");
}

std::string MistakeOfItem(const std::string& item) {
  return Mistake(R"({"input": [)" + item + "]}");
}

TEST(Responses, ItemsBecomeMessagesOfTemplates) {
  const Question q = Parse(R"({"model": "m", "instructions": "i", "input": [
      {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
      {"role": "user", "content": "u"},
      {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
       "content": [{"type": "reasoning_text", "text": "r"}]},
      {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "a", "annotations": []},
        {"type": "output_text", "text": "b"}]},
      {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f",
       "arguments": "{\"z\":1,\"a\":2}"},
      {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
      {"type": "web_search_call", "id": "w"},
      {"type": "function_call_output", "call_id": "c1", "output": "o1"},
      {"type": "function_call_output", "call_id": "c2",
       "output": [{"type": "input_text", "text": "o2"}]},
      {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
      {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c3", "output": ""},
      {"type": "reasoning", "summary": [], "encrypted_content": "x"},
      {"role": "assistant", "content": "one"},
      {"role": "assistant", "content": "two"},
      {"role": "developer", "content": "late"}]})");
  EXPECT_EQ(Pretty(q.messages), Pretty(J(R"([
      {"role": "system", "content": "i\n\nd"},
      {"role": "user", "content": "u"},
      {"role": "assistant", "content": "a\nb", "reasoning_content": "r", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 2}}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}}]},
      {"role": "tool", "content": "o1", "tool_call_id": "c1"},
      {"role": "tool", "content": "o2", "tool_call_id": "c2"},
      {"role": "assistant", "content": "", "reasoning_content": "s", "tool_calls": [
        {"id": "c3", "type": "function", "function": {"name": "f", "arguments": {}}}]},
      {"role": "tool", "content": "", "tool_call_id": "c3"},
      {"role": "assistant", "content": "one"},
      {"role": "assistant", "content": "two"},
      {"role": "system", "content": "late"}])")));
}

TEST(Responses, ReadsWhatCodexSends) {
  const Question q = Parse(R"({"model": "m@full", "instructions": "", "input": "hi",
      "client_metadata": {}, "include": ["reasoning.encrypted_content"],
      "parallel_tool_calls": false, "prompt_cache_key": "k", "store": false, "stream": true,
      "reasoning": {"effort": "high", "summary": "auto"}, "tool_choice": "auto",
      "max_output_tokens": 8, "temperature": 0.5,
      "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "strict": true,
               "schema": {"z": 1, "a": 2}}},
      "tools": [{"type": "function", "name": "f", "description": "d", "strict": false,
                 "parameters": {"type": "object", "z": 1, "a": 2}},
                {"type": "local_shell"}, {"type": "custom", "name": "apply_patch", "format": {}},
                {"type": "web_search"}, {"type": "function", "name": "g"}]})");
  EXPECT_EQ(Pretty(q.messages), Pretty(J(R"([{"role": "user", "content": "hi"}])")));
  EXPECT_EQ(Pretty(q.tools), Pretty(J(R"([
      {"type": "function", "function": {"name": "f", "description": "d",
       "parameters": {"type": "object", "z": 1, "a": 2}}},
      {"type": "function", "function": {"name": "g"}}])")));
  EXPECT_TRUE(q.stream && q.limited);
  EXPECT_FALSE(q.parallel_tool_calls);
  EXPECT_EQ(q.generate.max_tokens, 8);
  EXPECT_EQ(q.policy, "full");
  EXPECT_EQ(q.format.kind, AnswerFormat::Kind::kJsonSchema);
  EXPECT_EQ(Dump(q.format.schema), R"({"z":1,"a":2})");
  EXPECT_EQ(Dump(q.template_arguments), R"({"reasoning_effort":"high"})");
}

TEST(Responses, RefusesWithOneSentence) {
  EXPECT_EQ(Mistake("{}"), "`input` is missing, expected a text or an array of at least one item");
  EXPECT_EQ(Mistake(R"({"input": []})"),
            "`input` is an array of 0, expected a text or an array of at least one item");
  EXPECT_EQ(MistakeOf(R"("previous_response_id": "resp_1")"),
            "`previous_response_id` is not supported here: answers are not kept, so send the whole "
            "conversation as input");
  EXPECT_EQ(MistakeOf(R"("conversation": {"id": "c"})"),
            "`conversation` is not supported here: conversations are not kept, so send all of it "
            "as input");
  EXPECT_EQ(MistakeOf(R"("background": true)"),
            "`background` is not supported here: answers are not kept, so they cannot be fetched "
            "later");
  EXPECT_EQ(MistakeOf(R"("prompt": {"id": "p"})"),
            "`prompt` is not supported here: prompts are not kept, so send the text as input");
  EXPECT_EQ(MistakeOfItem(R"({"type": "item_reference", "id": "x"})"),
            "`input[0]` is not supported here: items are not kept, so send the item");
  EXPECT_EQ(MistakeOfItem(R"({"type": "web_search_call"})"),
            "`input` is an array of 1, expected at least one message or call");
  EXPECT_EQ(MistakeOfItem("3"), "`input[0]` is 3, expected an object");
  EXPECT_EQ(MistakeOfItem(R"({"role": "tool", "content": ""})"),
            "`input[0].role` is 'tool', expected user, assistant, system or developer");
  EXPECT_EQ(MistakeOfItem(R"({"role": "user"})"),
            "`input[0].content` is missing, expected a text or a list of parts");
  EXPECT_EQ(MistakeOfItem(R"({"role": "user", "content": [{"type": "input_image"}]})"),
            "`input[0].content[0]` is not supported here: it is of type 'input_image', and models "
            "read text only");
  EXPECT_EQ(MistakeOfItem(R"({"type": "function_call", "name": "f"})"),
            "`input[0].call_id` is missing, expected a text");
  EXPECT_EQ(MistakeOfItem(R"({"type": "function_call_output", "call_id": "c"})"),
            "`input[0].output` is missing, expected a text or a list of parts");
  EXPECT_EQ(MistakeOf(R"("instructions": 3)"), "`instructions` is 3, expected a text");
  EXPECT_EQ(MistakeOf(R"("tools": [{"type": "function"}])"),
            "`tools[0].name` is missing, expected the name of a function");
  EXPECT_EQ(MistakeOf(R"("tool_choice": "any")"),
            "`tool_choice` is 'any', expected none, auto, required or an object that names a "
            "function");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "web_search"})"),
            "`tool_choice.type` is 'web_search', expected function");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "function", "name": "f"})"),
            "`tool_choice` names the tool 'f', expected one of the tools");
  EXPECT_EQ(MistakeOf(R"("text": {"format": {"type": "json_schema"}})"),
            "`text.format.schema` is missing, expected an object");
  EXPECT_EQ(MistakeOf(R"("max_output_tokens": "x")"),
            "`max_output_tokens` is 'x', expected a whole number from 0, or -1 for no limit");
  EXPECT_EQ(MistakeOf(R"("reasoning": {"effort": 3})"),
            "`reasoning.effort` is 3, expected none, minimal, low, medium, high, xhigh or max");
}

Question Asked(bool stream) {
  Question q;
  q.messages = J(R"([{"role": "user", "content": "u"}])");
  q.tools = J(R"([{"type": "function", "function": {"name": "now", "description": "d",
                   "parameters": {"type": "object"}}}])");
  q.limited = true;
  q.generate.max_tokens = 8;
  q.generate.sampling.temperature = 0.5;
  q.stream = stream;
  return q;
}

// The response of Asked() but for what changes.
Json Response(const std::string& status, Json output, Json usage) {
  Json response = J(R"({"id": "resp_77", "object": "response", "created_at": 5, "status": "",
      "error": null, "incomplete_details": null, "model": "m", "output": [], "instructions": null,
      "max_output_tokens": 8, "parallel_tool_calls": true, "previous_response_id": null,
      "reasoning": {"effort": null, "summary": null}, "store": false, "temperature": 0.5,
      "text": {"format": {"type": "text"}}, "tool_choice": "auto",
      "tools": [{"type": "function", "name": "now", "description": "d",
                 "parameters": {"type": "object"}, "strict": false}],
      "top_p": 1.0, "truncation": "disabled", "background": false, "metadata": {},
      "usage": null})");
  response["status"] = status;
  response["output"] = std::move(output);
  response["usage"] = std::move(usage);
  return response;
}

Json Counts() {
  return J(R"({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4,
               "cache_write_tokens": 0}, "output_tokens": 7,
               "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 16})");
}

const char kReasoningItem[] = R"({"type": "reasoning", "id": "rs_77_0", "status": "completed",
    "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]})";
const char kMessageItem[] = R"({"type": "message", "id": "msg_77_1", "status": "completed",
    "role": "assistant", "content": [{"type": "output_text", "text": "I look.",
    "annotations": [], "logprobs": []}]})";
const char kCallItem[] = R"({"type": "function_call", "id": "fc_77_2", "status": "completed",
    "call_id": "call_77_0_0", "name": "now", "arguments": "{\"z\":1}"})";

Json AllItems() {
  return Json::array({J(kReasoningItem), J(kMessageItem), J(kCallItem)});
}

constexpr char kCall[] = "\n<tool_call>{\"name\": \"now\", \"arguments\": {\"z\": 1}}</tool_call>";

TEST(Responses, WholeBody) {
  const auto answer = AnswerResponses(Asked(false), TestReply(), {});
  EXPECT_EQ(answer->Begin(), "");
  EXPECT_EQ(answer->Progress(1, 2, 0), "");
  EXPECT_EQ(answer->Add(0, {std::string("<think>hm</think>I look.") + kCall, {}}), "");
  EXPECT_EQ(answer->End(0, FinishReason::kStop), "");
  Json expected = Response("completed", AllItems(), Counts());
  expected["timings"] = 1;
  EXPECT_EQ(Pretty(J(answer->Close({9, 4, 7}, J(R"({"timings": 1})")))), Pretty(expected));
}

TEST(Responses, Stream) {
  const auto answer = AnswerResponses(Asked(true), TestReply(), {});
  std::string out = answer->Begin();
  out += answer->Progress(1, 2, 0);
  out += answer->Add(0, {"<think>hm", {}});
  out += answer->Add(0, {"</think>I", {}});
  out += answer->Add(0, {" look.", {}});
  out += answer->Add(0, {kCall, {}});
  out += answer->End(0, FinishReason::kStop);
  out += answer->Close({9, 4, 7}, Json());
  Json expected = J(R"([
      {"type": "response.created"}, {"type": "response.in_progress"},
      {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning",
        "id": "rs_77_0", "status": "in_progress", "summary": [], "content": []}},
      {"type": "response.content_part.added", "item_id": "rs_77_0", "output_index": 0,
       "content_index": 0, "part": {"type": "reasoning_text", "text": ""}},
      {"type": "response.reasoning_text.delta", "item_id": "rs_77_0", "output_index": 0,
       "content_index": 0, "delta": "hm"},
      {"type": "response.reasoning_text.done", "item_id": "rs_77_0", "output_index": 0,
       "content_index": 0, "text": "hm"},
      {"type": "response.content_part.done", "item_id": "rs_77_0", "output_index": 0,
       "content_index": 0, "part": {"type": "reasoning_text", "text": "hm"}},
      {"type": "response.output_item.done", "output_index": 0},
      {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message",
        "id": "msg_77_1", "status": "in_progress", "role": "assistant", "content": []}},
      {"type": "response.content_part.added", "item_id": "msg_77_1", "output_index": 1,
       "content_index": 0, "part": {"type": "output_text", "text": "", "annotations": [],
       "logprobs": []}},
      {"type": "response.output_text.delta", "item_id": "msg_77_1", "output_index": 1,
       "content_index": 0, "delta": "I", "logprobs": []},
      {"type": "response.output_text.delta", "item_id": "msg_77_1", "output_index": 1,
       "content_index": 0, "delta": " look.", "logprobs": []},
      {"type": "response.output_text.done", "item_id": "msg_77_1", "output_index": 1,
       "content_index": 0, "text": "I look.", "logprobs": []},
      {"type": "response.content_part.done", "item_id": "msg_77_1", "output_index": 1,
       "content_index": 0, "part": {"type": "output_text", "text": "I look.", "annotations": [],
       "logprobs": []}},
      {"type": "response.output_item.done", "output_index": 1},
      {"type": "response.output_item.added", "output_index": 2, "item": {"type": "function_call",
        "id": "fc_77_2", "status": "in_progress", "call_id": "call_77_0_0", "name": "now",
        "arguments": ""}},
      {"type": "response.function_call_arguments.delta", "item_id": "fc_77_2", "output_index": 2,
       "delta": "{\"z\":1}"},
      {"type": "response.function_call_arguments.done", "item_id": "fc_77_2", "output_index": 2,
       "arguments": "{\"z\":1}"},
      {"type": "response.output_item.done", "output_index": 2},
      {"type": "response.completed"}])");
  expected[0]["response"] = Response("in_progress", Json::array(), Json());
  expected[1]["response"] = expected[0]["response"];
  expected[7]["item"] = J(kReasoningItem);
  expected[14]["item"] = J(kMessageItem);
  expected[18]["item"] = J(kCallItem);
  expected[19]["response"] = Response("completed", AllItems(), Counts());
  Json numbered = Json::array();
  for (size_t i = 0; i < expected.size(); ++i) {
    Json event = {{"type", expected[i]["type"]}, {"sequence_number", i}};
    event.update(expected[i]);
    numbered.push_back(event);
  }
  EXPECT_EQ(Pretty(Events(out)), Pretty(numbered));
}

TEST(Responses, StreamOfArguments) {
  const auto answer = AnswerResponses(Asked(true), TestReply(), {.stream_calls = true});
  answer->Begin();
  std::string out;
  out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"z\"", {}});
  out += answer->Add(0, {": 1}}</tool_call>", {}});
  out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"cut", {}});
  out += answer->End(0, FinishReason::kLength);
  EXPECT_EQ(Pretty(Events(out)), Pretty(J(R"([
      {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0,
       "item": {"type": "function_call", "id": "fc_77_0", "status": "in_progress",
        "call_id": "call_77_0_0", "name": "now", "arguments": ""}},
      {"type": "response.function_call_arguments.delta", "sequence_number": 3,
       "item_id": "fc_77_0", "output_index": 0, "delta": "{\"z\""},
      {"type": "response.function_call_arguments.delta", "sequence_number": 4,
       "item_id": "fc_77_0", "output_index": 0, "delta": ": 1}"},
      {"type": "response.function_call_arguments.done", "sequence_number": 5,
       "item_id": "fc_77_0", "output_index": 0, "arguments": "{\"z\": 1}"},
      {"type": "response.output_item.done", "sequence_number": 6, "output_index": 0,
       "item": {"type": "function_call", "id": "fc_77_0", "status": "completed",
        "call_id": "call_77_0_0", "name": "now", "arguments": "{\"z\": 1}"}},
      {"type": "response.output_item.added", "sequence_number": 7, "output_index": 1,
       "item": {"type": "function_call", "id": "fc_77_1", "status": "in_progress",
        "call_id": "call_77_0_1", "name": "now", "arguments": ""}},
      {"type": "response.function_call_arguments.delta", "sequence_number": 8,
       "item_id": "fc_77_1", "output_index": 1, "delta": "{\"cut"},
      {"type": "response.function_call_arguments.done", "sequence_number": 9,
       "item_id": "fc_77_1", "output_index": 1, "arguments": "{\"cut"},
      {"type": "response.output_item.done", "sequence_number": 10, "output_index": 1,
       "item": {"type": "function_call", "id": "fc_77_1", "status": "incomplete",
        "call_id": "call_77_0_1", "name": "now", "arguments": "{\"cut"}}])")));
  const Json last = Events(answer->Close({}, Json()))[0];
  EXPECT_EQ(last["response"]["output"].size(), 2U);
}

TEST(Responses, AnswersThatAreCutShortAreIncomplete) {
  const auto answer = AnswerResponses(Asked(true), TestReply(), {});
  answer->Begin();
  answer->Add(0, {"a", {}});
  Json end = Events(answer->End(0, FinishReason::kLength));
  EXPECT_EQ(end.back()["item"]["status"], "incomplete");
  Json last = Events(answer->Close({9, 4, 7}, Json()));
  ASSERT_EQ(last.size(), 1U);
  Json expected = Response("incomplete", Json::array({end.back()["item"]}), Counts());
  expected["incomplete_details"] = {{"reason", "max_output_tokens"}};
  EXPECT_EQ(last[0]["type"], "response.incomplete");
  EXPECT_EQ(Pretty(last[0]["response"]), Pretty(expected));
}

TEST(Responses, Errors) {
  EXPECT_EQ(Pretty(J(AnswerResponses(Asked(false), TestReply(), {})->Error(Failed("x")))),
            Pretty(OpenAiError(Failed("x"))));
  const auto answer = AnswerResponses(Asked(true), TestReply(), {});
  answer->Begin();
  Json failed = Response("failed", Json::array(), Json());
  failed["error"] = J(R"({"code": "server_error", "message": "the card is gone"})");
  Json event = J(R"({"type": "response.failed", "sequence_number": 2})");
  event["response"] = failed;
  EXPECT_EQ(Pretty(Events(answer->Error(Failed("the card is gone")))),
            Pretty(Json::array({event})));
}

TEST(Responses, SaysWhatWasAsked) {
  Question q = Asked(false);
  q.tool_choice = {ToolChoice::Kind::kNamed, "now"};
  q.format.kind = AnswerFormat::Kind::kJsonSchema;
  q.format.schema = J(R"({"x": 1})");
  q.template_arguments = J(R"({"reasoning_effort": "low"})");
  q.limited = false;
  const auto answer = AnswerResponses(q, TestReply(), {});
  const Json response = J(answer->Close({}, Json()));
  EXPECT_EQ(Dump(response["tool_choice"]), R"({"type":"function","name":"now"})");
  EXPECT_EQ(Dump(response["text"]),
            R"({"format":{"type":"json_schema","name":"answer","schema":{"x":1}}})");
  EXPECT_EQ(Dump(response["reasoning"]), R"({"effort":"low","summary":null})");
  EXPECT_TRUE(response["max_output_tokens"].is_null());
}

}  // namespace
}  // namespace omnikv::server::responses_test
