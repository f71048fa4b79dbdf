// Bodies that are wrong anywhere end in a Status, and what models say in parts, whatever it is.
#include <random>

#include "server/protocol/anthropic_messages.h"
#include "server/protocol/openai_chat.h"
#include "server/protocol/openai_completions.h"
#include "server/protocol/openai_responses.h"
#include "sse.h"

namespace omnikv::server::hostile_test {
namespace {

// Bodies that hold most of the fields, for all parsers at once.
const char* const kBodies[] = {
    R"({"model": "m@p:a=1", "prompt": [[1, 2], "x"], "n": 2, "best_of": 2, "logit_bias": {"5": 1},
        "stop": ["a"], "seed": 3, "logprobs": 2, "stream_options": {"include_usage": true},
        "omnikv": {"policy": "p", "a": 1}, "temperature": 0.5, "suffix": null})",
    R"({"messages": [{"role": "developer", "content": "s"},
        {"role": "user", "name": "n", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [{"id": "1",
         "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "t"}], "logprobs": true,
        "top_logprobs": 2, "tools": [{"type": "function", "function": {"name": "f",
        "parameters": {"properties": {"a": {"type": ["integer", "null"]}}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "chat_template_kwargs": {"a": 1}, "reasoning": {"effort": "low"}})",
    R"({"max_tokens": 5, "system": [{"type": "text", "text": "x-anthropic-billing-header"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"},
         {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
         "content": [{"type": "text", "text": "r"}]}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "enabled"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}}})",
    R"({"instructions": "i", "input": [{"role": "developer", "content": "d"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "schema": {}}}, "max_output_tokens": 4})"};

void Collect(Json* value, std::vector<Json*>* all) {
  all->push_back(value);
  for (auto& child : *value) {
    if (value->is_structured()) Collect(&child, all);
  }
}

// Answers a question that was accepted: what comes out must be there whatever the tools look like.
void Answer(const Question& question, const std::string& said) {
  const AnswerForm form = {.tools = ToolFormat::kQwenXml, .stream_calls = true};
  std::vector<std::unique_ptr<Answering>> all;
  if (!question.prompts.empty()) all.push_back(AnswerCompletions(question, TestReply()));
  all.push_back(AnswerChat(question, TestReply(), form));
  all.push_back(AnswerMessages(question, TestReply(), form));
  all.push_back(AnswerResponses(question, TestReply(), form));
  for (const auto& answer : all) {
    std::string out = answer->Begin();
    out += answer->Add(0, {said, {Token("\xFF", -1, {{"a", -2}})}});
    out += answer->End(0, FinishReason::kStop);
    out += answer->Close({1, 0, 1}, Json());
    EXPECT_FALSE(out.empty());
  }
  EXPECT_FALSE(Dump(GenericSchema(question.tools, false, true)).empty());
  EXPECT_FALSE(GenericInstruction(question.tools).empty());
}

TEST(Hostile, ChangedBodiesEndInAStatus) {
  std::mt19937 random(7);
  const std::vector<Json> strange = {nullptr,
                                     true,
                                     -1,
                                     0,
                                     3,
                                     1e300,
                                     UINT64_MAX,
                                     "",
                                     "x",
                                     "function",
                                     "text",
                                     Json::array(),
                                     Json::object(),
                                     Json::array({1}),
                                     Json::array({nullptr}),
                                     Json::array({Json::object()}),
                                     Json{{"type", "text"}},
                                     Json{{"name", 3}}};
  int accepted = 0;
  for (const char* text : kBodies) {
    const Json body = J(text);
    for (int round = 0; round < 4000; ++round) {
      Json changed = body;
      std::vector<Json*> places;
      Collect(&changed, &places);
      *places[random() % places.size()] = strange[random() % strange.size()];
      for (const auto parse : {ParseCompletions, ParseChat, ParseMessages, ParseResponses}) {
        const auto question = parse(changed);
        if (!question.ok()) {
          EXPECT_EQ(question.status().code(), StatusCode::kInvalidArgument);
          EXPECT_FALSE(question.status().message().empty());
          continue;
        }
        ++accepted;
        Answer(*question, "<tool_call><function=f><parameter=a>1</parameter></function>");
      }
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Hostile, AnythingThatModelsSayComesOutTheSameHoweverItIsCut) {
  const std::vector<std::string> words = {"<tool_call>",
                                          "</tool_call>",
                                          "<function=f>",
                                          "</function>",
                                          "<parameter=a>",
                                          "</parameter>",
                                          "<think>",
                                          "</think>",
                                          "[TOOL_CALLS]",
                                          "[ARGS]",
                                          "[CALL_ID]",
                                          "<|python_tag|>",
                                          "functools",
                                          "<|tool_call|>",
                                          "<|/tool_call|>",
                                          "<function_call>",
                                          "{\"name\": \"f\", \"arguments\": {}}",
                                          "{\"name\": \"f\", \"parameters\": {\"a\": \"}\\\"\"}}",
                                          "{\"response\": \"r\"}",
                                          "{",
                                          "}",
                                          "[",
                                          "]",
                                          "\"",
                                          "\\",
                                          ";",
                                          " ",
                                          "\n",
                                          "f",
                                          "x",
                                          "<",
                                          "{}",
                                          "[{\"name\": \"f\"}]"};
  Question question;
  question.tools = J(R"([{"type": "function", "function": {"name": "f"}}])");
  std::mt19937 random(11);
  for (int round = 0; round < 6000; ++round) {
    std::string text;
    for (size_t i = 0, n = random() % 12; i < n; ++i) text += words[random() % words.size()];
    const AnswerForm form = {.tools = static_cast<ToolFormat>(random() % 7),
                             .in_reasoning = random() % 4 == 0,
                             .stream_calls = random() % 2 == 0};
    const auto parsed = [&](size_t step) {
      AnswerParser parser(form, question, "c", "1", 0);
      std::string all;
      const auto take = [&](const std::vector<AnswerPart>& parts) {
        for (const AnswerPart& part : parts) {
          const char* mark = part.kind == AnswerPart::Kind::kCall        ? "\1"
                             : part.kind == AnswerPart::Kind::kReasoning ? "\2"
                                                                         : "\3";
          // neighbours of one kind are one part
          if (part.kind == AnswerPart::Kind::kArguments) {
            all += part.text;
            continue;
          }
          if (part.kind == AnswerPart::Kind::kCall ||
              all.find_last_of("\1\2\3") == std::string::npos ||
              all[all.find_last_of("\1\2\3")] != mark[0]) {
            all += mark;
          }
          all += part.name + part.id + part.text;
        }
      };
      for (size_t i = 0; i < text.size(); i += step) take(parser.Add(text.substr(i, step)));
      take(parser.End());
      return all;
    };
    const std::string whole = parsed(text.size() + 1);
    for (const size_t step : {1, 2, 3, 7}) {
      ASSERT_EQ(parsed(step), whole)
          << "in steps of " << step << ", " << ToolFormatName(form.tools) << ": " << text;
    }
  }
}

}  // namespace
}  // namespace omnikv::server::hostile_test
