#include "server/protocol/openai_chat.h"

#include "sse.h"

namespace omnikv::server::chat_test {
namespace {

Question Parse(std::string_view body) {
  auto question = ParseChat(J(body));
  EXPECT_TRUE(question.ok()) << question.status().message();
  return question.ok() ? std::move(*question) : Question();
}

std::string Mistake(std::string_view body) {
  return Refusal(ParseChat, body);
}

// With one message of a user before the given fields.
std::string With(const std::string& fields) {
  return R"({"messages": [{"role": "user", "content": "u"}], )" + fields + "}";
}

std::string MistakeOf(const std::string& fields) {
  return Mistake(With(fields));
}

std::string MistakeOfMessage(const std::string& message) {
  return Mistake(R"({"messages": [)" + message + "]}");
}

const char kTools[] = R"([{"type": "function", "function": {"name": "now", "description": "d",
    "strict": true, "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}])";

TEST(Chat, MessagesBecomeThoseOfTemplates) {
  const Question q = Parse(R"({"model": "m", "messages": [
      {"role": "system", "content": "s"},
      {"role": "developer", "content": [{"type": "text", "text": "d1"},
                                        {"type": "text", "text": "d2"}]},
      {"role": "user", "name": "n", "content": "u"},
      {"role": "assistant", "content": null, "refusal": null, "reasoning": "r", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f",
         "arguments": "{\"b\": 1, \"a\": [2]}"}},
        {"id": "c2", "function": {"name": "g", "arguments": ""}},
        {"id": "c3", "function": {"name": "h", "arguments": "not JSON"}},
        {"id": "c4", "function": {"name": "i", "arguments": {"k": 1}}}]},
      {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "t"}]},
      {"role": "function", "name": "g", "content": ""},
      {"role": "assistant", "content": "x", "reasoning_content": "rc", "tool_calls": []}]})");
  EXPECT_EQ(Pretty(q.messages), Pretty(J(R"([
      {"role": "system", "content": "s"},
      {"role": "system", "content": "d1\nd2"},
      {"role": "user", "content": "u", "name": "n"},
      {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f",
         "arguments": {"b": 1, "a": [2]}}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
        {"id": "c3", "type": "function", "function": {"name": "h", "arguments": "not JSON"}},
        {"id": "c4", "type": "function", "function": {"name": "i", "arguments": {"k": 1}}}]},
      {"role": "tool", "content": "t", "tool_call_id": "c1"},
      {"role": "tool", "content": "", "name": "g"},
      {"role": "assistant", "content": "x", "reasoning_content": "rc"}])")));
  EXPECT_TRUE(q.prompts.empty());
  EXPECT_TRUE(q.tools.is_null());
  EXPECT_TRUE(q.template_arguments.is_null());
  EXPECT_FALSE(q.continue_last);
  EXPECT_EQ(q.generate.sampling.temperature, 1);
}

TEST(Chat, ReadsEveryField) {
  const Question q = Parse(With(R"("n": 2, "max_tokens": 7, "max_completion_tokens": 9,
      "temperature": 0, "stop": "x", "stream": true, "stream_options": {"include_usage": true},
      "logprobs": true, "top_logprobs": 3, "parallel_tool_calls": false,
      "tool_choice": {"type": "function", "function": {"name": "now"}},
      "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true,
         "schema": {"type": "object", "properties": {"z": {}, "a": {}}}}},
      "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false},
      "return_progress": true, "priority": 2, "store": true, "metadata": {}, "tools": )" +
                                std::string(kTools)));
  EXPECT_EQ(q.n, 2);
  EXPECT_TRUE(q.limited && q.stream && q.stream_usage && q.stream_progress);
  EXPECT_EQ(q.generate.max_tokens, 9);
  EXPECT_EQ(q.generate.sampling.temperature, 0);
  EXPECT_EQ(q.top_logprobs, 3);
  EXPECT_FALSE(q.parallel_tool_calls);
  EXPECT_EQ(q.tool_choice.kind, ToolChoice::Kind::kNamed);
  EXPECT_EQ(q.tool_choice.name, "now");
  EXPECT_EQ(q.format.kind, AnswerFormat::Kind::kJsonSchema);
  EXPECT_EQ(Dump(q.format.schema), R"({"type":"object","properties":{"z":{},"a":{}}})");
  EXPECT_EQ(Dump(q.template_arguments), R"({"enable_thinking":false,"reasoning_effort":"low"})");
  EXPECT_EQ(Pretty(q.tools), Pretty(J(kTools)));
}

TEST(Chat, ChoicesOfToolsAndForms) {
  const std::string tools = "\"tools\": " + std::string(kTools) + ", ";
  const auto kind = [&](const std::string& choice) {
    return Parse(With(tools + "\"tool_choice\": " + choice)).tool_choice.kind;
  };
  EXPECT_EQ(kind("null"), ToolChoice::Kind::kAuto);
  EXPECT_EQ(kind("\"auto\""), ToolChoice::Kind::kAuto);
  EXPECT_EQ(kind("\"none\""), ToolChoice::Kind::kNone);
  EXPECT_EQ(kind("\"required\""), ToolChoice::Kind::kRequired);
  EXPECT_EQ(Parse(With(R"("response_format": {"type": "text"})")).format.kind,
            AnswerFormat::Kind::kText);
  EXPECT_EQ(Parse(With(R"("response_format": {"type": "json_object"})")).format.kind,
            AnswerFormat::Kind::kJsonObject);
  EXPECT_EQ(Parse(With("\"logprobs\": true")).top_logprobs, 0);
  EXPECT_EQ(Parse(With("\"logprobs\": false, \"top_logprobs\": 0")).top_logprobs, -1);
  EXPECT_EQ(Dump(Parse(With(R"("reasoning": {"effort": "none"})")).template_arguments),
            R"({"reasoning_effort":"none","enable_thinking":false})");
  EXPECT_EQ(Dump(Parse(With(R"("reasoning_effort": "none",
                                "chat_template_kwargs": {"reasoning_effort": "x"})"))
                     .template_arguments),
            R"({"reasoning_effort":"x","enable_thinking":false})");
  EXPECT_TRUE(Parse(R"({"continue_final_message": true, "messages": [
                        {"role": "assistant", "content": "a"}]})")
                  .continue_last);
}

TEST(Chat, RefusesWithOneSentence) {
  EXPECT_EQ(Mistake("[]"), "the body is an array of 0, expected an object");
  EXPECT_EQ(Mistake("{}"), "`messages` is missing, expected an array of at least one message");
  EXPECT_EQ(Mistake(R"({"messages": []})"),
            "`messages` is an array of 0, expected an array of at least one message");
  EXPECT_EQ(Mistake(R"({"messages": "hi"})"), "`messages` is 'hi', expected an array");
  EXPECT_EQ(MistakeOfMessage("3"), "`messages[0]` is 3, expected an object");
  EXPECT_EQ(MistakeOfMessage("{}"),
            "`messages[0].role` is missing, expected system, developer, user, assistant or tool");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "bot", "content": ""})"),
            "`messages[0].role` is 'bot', expected system, developer, user, assistant, tool or "
            "function");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user"})"),
            "`messages[0].content` is missing, expected a text");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": null})"),
            "`messages[0].content` is null, expected a text");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": 3})"),
            "`messages[0].content` is 3, expected a text or a list of parts");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "text", "text": "a"},
                                 {"type": "image_url", "image_url": {"url": "data:x"}}]})"),
            "`messages[0].content[1]` is not supported here: it is of type 'image_url', and models "
            "read text only");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "input_audio"}]})"),
            "`messages[0].content[0]` is not supported here: it is of type 'input_audio', and "
            "models read text only");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"text": "a"}]})"),
            "`messages[0].content[0].type` is missing, expected the type of a part");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "user", "content": [{"type": "text"}]})"),
            "`messages[0].content[0].text` is missing, expected a text");
  EXPECT_EQ(
      MistakeOfMessage(R"({"role": "assistant", "tool_calls": [{"function": {}}]})"),
      "`messages[0].tool_calls[0].function.name` is missing, expected the name of a function");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "assistant", "tool_calls": [{"id": "1"}]})"),
            "`messages[0].tool_calls[0].function` is missing, expected an object");
  EXPECT_EQ(MistakeOfMessage(R"({"role": "assistant", "tool_calls": [{"type": "custom"}]})"),
            "`messages[0].tool_calls[0].type` is 'custom', expected function");
  EXPECT_EQ(MistakeOf(R"("tools": [{"type": "web_search"}])"),
            "`tools[0].type` is 'web_search', expected function");
  EXPECT_EQ(MistakeOf(R"("tools": [{"type": "function", "function": {"name": 3}}])"),
            "`tools[0].function.name` is 3, expected a text");
  EXPECT_EQ(MistakeOf(R"("tools": [{"type": "function", "function": {"name": "f",
                          "parameters": []}}])"),
            "`tools[0].function.parameters` is an array of 0, expected an object");
  EXPECT_EQ(MistakeOf(R"("tool_choice": "any")"),
            "`tool_choice` is 'any', expected none, auto, required or an object that names a "
            "function");
  EXPECT_EQ(MistakeOf(R"("tool_choice": "required")"),
            "`tool_choice` demands a call, but there are no tools, expected some");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "function", "function": {"name": "f"}})"),
            "`tool_choice` names the tool 'f', expected one of the tools");
  EXPECT_EQ(MistakeOf(R"("tool_choice": {"type": "allowed_tools"})"),
            "`tool_choice.type` is 'allowed_tools', expected function");
  EXPECT_EQ(MistakeOf(R"("response_format": {"type": "xml"})"),
            "`response_format.type` is 'xml', expected text, json_object or json_schema");
  EXPECT_EQ(MistakeOf(R"("response_format": {"type": "json_schema"})"),
            "`response_format.json_schema` is missing, expected an object");
  EXPECT_EQ(MistakeOf(R"("response_format": {"type": "json_schema", "json_schema": {}})"),
            "`response_format.json_schema.schema` is missing, expected an object");
  EXPECT_EQ(MistakeOf(R"("top_logprobs": 3)"),
            "`top_logprobs` is 3, expected logprobs to be true beside it");
  EXPECT_EQ(MistakeOf(R"("logprobs": 3)"), "`logprobs` is 3, expected true or false");
  EXPECT_EQ(
      MistakeOf(R"("reasoning_effort": "lots")"),
      "`reasoning_effort` is 'lots', expected none, minimal, low, medium, high, xhigh or max");
  EXPECT_EQ(MistakeOf(R"("continue_final_message": true)"),
            "`continue_final_message` is true, expected a last message of the role assistant "
            "beside it");
  EXPECT_EQ(MistakeOf(R"("chat_template_kwargs": [])"),
            "`chat_template_kwargs` is an array of 0, expected an object");
  EXPECT_EQ(MistakeOf(R"("max_completion_tokens": 1.5)"),
            "`max_completion_tokens` is 1.5, expected a whole number from 0, or -1 for no limit");
}

Question Asked(bool stream) {
  Question q;
  q.messages = J(R"([{"role": "user", "content": "u"}])");
  q.tools = J(kTools);
  q.stream = stream;
  return q;
}

Json Usages() {
  return J(R"({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
               "prompt_tokens_details": {"cached_tokens": 2}})");
}

TEST(Chat, WholeBody) {
  Question q = Asked(false);
  q.n = 3;
  q.top_logprobs = 1;
  const auto answer = AnswerChat(q, TestReply(), {});
  EXPECT_EQ(answer->Begin(), "");
  EXPECT_EQ(answer->Progress(1, 2, 0), "");
  EXPECT_EQ(answer->Add(0, {"<think>th</think>He", {Token("He", -0.5, {{"He", -0.5}})}}), "");
  EXPECT_EQ(answer->Add(0, {"llo", {Token("\xC3", -1)}}), "");
  answer->Add(1, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"z\": 1}}</tool_call>", {}});
  answer->Add(2, {"I see.\n<tool_call>{\"name\": \"now\"}</tool_call>", {}});
  EXPECT_EQ(answer->End(0, FinishReason::kLength), "");
  answer->End(1, FinishReason::kStop);
  answer->End(2, FinishReason::kLength);
  EXPECT_EQ(Pretty(J(answer->Close({3, 2, 4}, J(R"({"timings": 1})")))), Pretty(J(R"({
      "id": "chatcmpl-77", "object": "chat.completion", "created": 5, "model": "m", "choices": [
       {"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null,
          "reasoning": "th", "reasoning_content": "th"},
        "logprobs": {"content": [
          {"token": "He", "logprob": -0.5, "bytes": [72, 101],
           "top_logprobs": [{"token": "He", "logprob": -0.5, "bytes": [72, 101]}]},
          {"token": "\ufffd", "logprob": -1.0, "bytes": [195], "top_logprobs": []}],
          "refusal": null},
        "finish_reason": "length"},
       {"index": 1, "message": {"role": "assistant", "content": null, "refusal": null,
          "tool_calls": [{"id": "call_77_1_0", "type": "function",
                          "function": {"name": "now", "arguments": "{\"z\":1}"}}]},
        "logprobs": {"content": [], "refusal": null}, "finish_reason": "tool_calls"},
       {"index": 2, "message": {"role": "assistant", "content": "I see.", "refusal": null,
          "tool_calls": [{"id": "call_77_2_0", "type": "function",
                          "function": {"name": "now", "arguments": "{}"}}]},
        "logprobs": {"content": [], "refusal": null}, "finish_reason": "length"}],
      "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2}},
      "timings": 1})")));
}

// Chunks with the head that all have, and "usage": null where `usage`.
Json Chunks(const std::vector<std::string>& choices, bool usage) {
  Json chunks = Json::array();
  for (const std::string& choice : choices) {
    Json chunk = J(R"({"id": "chatcmpl-77", "object": "chat.completion.chunk", "created": 5,
                       "model": "m", "choices": []})");
    chunk["choices"].push_back(J(choice));
    if (usage) chunk["usage"] = Json();
    chunks.push_back(chunk);
  }
  return chunks;
}

TEST(Chat, Stream) {
  Question q = Asked(true);
  q.stream_usage = true;
  q.n = 2;
  const auto answer = AnswerChat(q, TestReply(), {});
  std::string out = answer->Begin();
  out += answer->Progress(6, 8, 2);  // not asked for
  out += answer->Add(0, {"<think>th", {}});
  out += answer->Add(0, {"</think>Let me", {}});
  out += answer->Add(0, {" see.\n<tool", {}});
  out += answer->Add(1, {"b", {}});
  out += answer->Add(0, {"_call>{\"name\": \"now\", \"arguments\": {\"z\": 1}}", {}});
  out += answer->Add(0, {"</tool_call><tool_call>{\"name\": \"now\"}</tool_call>", {}});
  out += answer->Add(0, {"", {}});
  out += answer->End(0, FinishReason::kStop);
  out += answer->Add(1, {" <tool", {}});
  out += answer->End(1, FinishReason::kStop);
  out += answer->Close({3, 2, 4}, Json());
  Json expected = Chunks(
      {R"({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
           "finish_reason": null})",
       R"({"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
           "finish_reason": null})",
       R"({"index": 0, "delta": {"reasoning": "th", "reasoning_content": "th"},
           "logprobs": null, "finish_reason": null})",
       R"({"index": 0, "delta": {"content": "Let me"}, "logprobs": null, "finish_reason": null})",
       R"({"index": 0, "delta": {"content": " see."}, "logprobs": null, "finish_reason": null})",
       R"({"index": 1, "delta": {"content": "b"}, "logprobs": null, "finish_reason": null})",
       R"({"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_77_0_0",
           "type": "function", "function": {"name": "now", "arguments": "{\"z\":1}"}}]},
           "logprobs": null, "finish_reason": null})",
       R"({"index": 0, "delta": {"tool_calls": [{"index": 1, "id": "call_77_0_1",
           "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
           "logprobs": null, "finish_reason": null})",
       R"({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "tool_calls"})",
       R"({"index": 1, "delta": {"content": " <tool"}, "logprobs": null, "finish_reason": null})",
       R"({"index": 1, "delta": {}, "logprobs": null, "finish_reason": "stop"})"},
      true);
  Json last = J(R"({"id": "chatcmpl-77", "object": "chat.completion.chunk", "created": 5,
                    "model": "m", "choices": []})");
  last["usage"] = Usages();
  expected.push_back(last);
  expected.push_back("[DONE]");
  EXPECT_EQ(Pretty(Events(out)), Pretty(expected));
}

TEST(Chat, StreamOfArguments) {
  for (const bool stream : {true, false}) {
    const auto answer = AnswerChat(Asked(stream), TestReply(), {.stream_calls = true});
    std::string out;
    out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {\"z\"", {}});
    out += answer->Add(0, {": 1}}</tool_call>", {}});
    out += answer->Add(0, {"<tool_call>{\"name\": \"now\", \"arguments\": {}}", {}});
    out += answer->End(0, FinishReason::kStop);
    if (!stream) {
      EXPECT_EQ(out, "");
      EXPECT_EQ(Pretty(J(answer->Close({}, Json()))["choices"][0]["message"]["tool_calls"]),
                Pretty(J(R"([
          {"id": "call_77_0_0", "type": "function",
           "function": {"name": "now", "arguments": "{\"z\": 1}"}},
          {"id": "call_77_0_1", "type": "function",
           "function": {"name": "now", "arguments": "{}"}}])")));
      continue;
    }
    Json deltas = Json::array();
    for (const Json& chunk : Events(out)) deltas.push_back(chunk["choices"][0]["delta"]);
    EXPECT_EQ(Pretty(deltas), Pretty(J(R"([
        {"tool_calls": [{"index": 0, "id": "call_77_0_0", "type": "function",
          "function": {"name": "now", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{\"z\""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_77_0_1", "type": "function",
          "function": {"name": "now", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {}])")));
  }
}

TEST(Chat, ReadsAreAskedForInTheBodyOrInOmnikv) {
  const auto bins = [](const std::string& more) {
    const auto q =
        ParseChat(J(R"({"messages": [{"role": "user", "content": "a"}], )" + more + "}"));
    EXPECT_TRUE(q.ok()) << q.status().message();
    return q.ok() ? q->read_bins : -1;
  };
  EXPECT_EQ(bins(R"("stream": true)"), 0);
  EXPECT_EQ(bins(R"("return_reads": false)"), 0);
  EXPECT_EQ(bins(R"("return_reads": true)"), 128);
  EXPECT_EQ(bins(R"("return_reads": 512)"), 512);
  EXPECT_EQ(bins(R"("omnikv": {"policy": "full", "return_reads": true})"), 128);
  const auto q = ParseChat(J(R"({"messages": [{"role": "user", "content": "a"}],
                                 "omnikv": {"budget": 8, "return_reads": true}})"));
  ASSERT_TRUE(q.ok());
  EXPECT_EQ(q->settings.size(), 1u);  // it is none of the policy's
  for (const std::string wrong : {"0", "1025", "\"yes\"", "[]"}) {
    const auto refused = ParseChat(
        J(R"({"messages": [{"role": "user", "content": "a"}], "return_reads": )" + wrong + "}"));
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_NE(refused.status().message().find("true, false or a whole number from 1 to 1024"),
              std::string::npos)
        << refused.status().message();
  }
}

TEST(Chat, StreamOfReads) {
  const Json reads = J(R"({"layers": 1, "read": [[1.0, 0.5]]})");
  const auto answer = AnswerChat(Asked(true), TestReply(), {});
  const std::string out = answer->Reads(reads);
  ASSERT_TRUE(out.starts_with("data: ")) << out;
  const Json chunk = J(out.substr(6));
  EXPECT_EQ(chunk["omnikv_reads"], reads);
  EXPECT_EQ(chunk["choices"][0]["delta"], Json::object());
  EXPECT_EQ(AnswerChat(Asked(false), TestReply(), {})->Reads(reads), "");
}

TEST(Chat, StreamOfLogprobsAndProgress) {
  Question q = Asked(true);
  q.stream_progress = true;
  q.top_logprobs = 0;
  Reply reply = TestReply();
  int64_t clock = 40;
  reply.now_ms = [&clock] { return clock; };
  const auto answer = AnswerChat(q, reply, {});
  std::string out = answer->Begin();
  clock = 65;
  out += answer->Progress(6, 8, 2);
  out += answer->Add(0, {"", {Token("a", -1)}});
  out += answer->Add(0, {"ab", {Token("b", -2)}});
  out += answer->Add(0, {"", {Token("c", -3)}});
  out += answer->End(0, FinishReason::kStop);
  out += answer->Close({}, J(R"({"timings": 1})"));
  Json expected =
      Chunks({R"({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
           "finish_reason": null})",
              R"({"index": 0, "delta": {}, "logprobs": null, "finish_reason": null})",
              R"({"index": 0, "delta": {"content": "ab"}, "logprobs": {"content": [
             {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []},
             {"token": "b", "logprob": -2.0, "bytes": [98], "top_logprobs": []}]},
           "finish_reason": null})",
              R"({"index": 0, "delta": {}, "logprobs": {"content": [
             {"token": "c", "logprob": -3.0, "bytes": [99], "top_logprobs": []}]},
           "finish_reason": "stop"})"},
             false);
  expected[1]["prompt_progress"] = J(R"({"total": 8, "cache": 2, "processed": 6, "time_ms": 25})");
  expected.push_back(J(R"({"id": "chatcmpl-77", "object": "chat.completion.chunk", "created": 5,
                           "model": "m", "choices": [], "timings": 1})"));
  expected.push_back("[DONE]");
  EXPECT_EQ(Pretty(Events(out)), Pretty(expected));
}

TEST(Chat, ErrorsInTheMiddle) {
  const Json error = J(R"({"error": {"message": "`n` is wrong", "type": "invalid_request_error",
                           "param": "n", "code": null}})");
  const Status status = InvalidArgument("`n` is wrong");
  EXPECT_EQ(Pretty(J(AnswerChat(Asked(false), TestReply(), {})->Error(status))), Pretty(error));
  EXPECT_EQ(Pretty(Events(AnswerChat(Asked(true), TestReply(), {})->Error(status))),
            Pretty(Json::array({error, "[DONE]"})));
}

}  // namespace
}  // namespace omnikv::server::chat_test
