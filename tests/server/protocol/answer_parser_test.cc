// What models write is split into reasoning, content and calls, however the text was cut.
#include "server/protocol/answer_parser.h"

#include <algorithm>

#include "sse.h"

namespace omnikv::server::answer_parser_test {
namespace {

const char kTools[] = R"([
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
      "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                     "exact": {"type": "boolean"}, "note": {"type": ["string", "null"]},
                     "where": {"type": "object"}, "any": {}}}}},
    {"type": "function", "function": {"name": "now"}}])";

Question WithTools() {
  Question question;
  question.tools = J(kTools);
  return question;
}

AnswerForm Form(ToolFormat format, bool in_reasoning = false) {
  return {.tools = format, .in_reasoning = in_reasoning};
}

// Neighbours of one kind are one part: only where they were cut differs. Written as
// ["content", TEXT], ["reasoning", TEXT] and ["call", ID, NAME, ARGUMENTS].
Json Merged(const std::vector<AnswerPart>& parts) {
  Json merged = Json::array();
  for (const AnswerPart& part : parts) {
    if (part.kind == AnswerPart::Kind::kCall) {
      merged.push_back(Json::array({"call", part.id, part.name, part.text}));
      continue;
    }
    if (part.kind == AnswerPart::Kind::kArguments) {
      EXPECT_EQ(merged.back()[0], "call");
      merged.back()[3] = merged.back()[3].get<std::string>() + part.text;
      continue;
    }
    const char* kind = part.kind == AnswerPart::Kind::kContent ? "content" : "reasoning";
    EXPECT_FALSE(part.text.empty());
    if (!merged.empty() && merged.back()[0] == kind) {
      merged.back()[1] = merged.back()[1].get<std::string>() + part.text;
    } else {
      merged.push_back(Json::array({kind, part.text}));
    }
  }
  return merged;
}

Json Parsed(const AnswerForm& form, const Question& question,
            const std::vector<std::string_view>& pieces) {
  AnswerParser parser(form, question, "call_", "77", 0);
  std::vector<AnswerPart> all;
  const auto take = [&](std::vector<AnswerPart> parts) {
    all.insert(all.end(), parts.begin(), parts.end());
  };
  for (const std::string_view piece : pieces) take(parser.Add(piece));
  take(parser.End());
  return Merged(all);
}

Json Cut(const AnswerForm& form, const Question& question, std::string_view text) {
  const Json whole = Parsed(form, question, {text});
  for (size_t i = 0; i <= text.size(); ++i) {
    const Json cut = Parsed(form, question, {text.substr(0, i), text.substr(i)});
    EXPECT_EQ(cut, whole) << "cut at byte " << i << " of " << text;
    if (cut != whole) break;
  }
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < text.size(); ++i) bytes.push_back(text.substr(i, 1));
  EXPECT_EQ(Parsed(form, question, bytes), whole) << "byte by byte: " << text;
  return whole;
}

// The parts of `text`, after a look at all ways to cut it in two, and at single bytes. Calls that
// come out while they are written are the same where they are well-formed, but for white space.
Json Split(AnswerForm form, const Question& question, std::string_view text) {
  const Json whole = Cut(form, question, text);
  form.stream_calls = true;
  Json streamed = Cut(form, question, text);
  for (Json& part : streamed) {
    Json arguments;
    if (part[0] == "call" && ParseText(part[3].get<std::string>(), &arguments)) {
      part[3] = Dump(arguments);
    }
  }
  const auto called = [](const Json& parts) {
    return std::count_if(parts.begin(), parts.end(),
                         [](const Json& part) { return part[0] == "call"; });
  };
  // a malformed call may be a call there
  if (called(streamed) == called(whole)) {
    EXPECT_EQ(streamed, whole) << text;
  } else {
    EXPECT_GT(called(streamed), called(whole)) << text;
  }
  return whole;
}

Json Split(ToolFormat format, std::string_view text) {
  return Split(Form(format), WithTools(), text);
}

Json Content(const std::string& text) {
  return Json::array({Json::array({"content", text})});
}

constexpr ToolFormat kAll[] = {ToolFormat::kHermes,  ToolFormat::kQwenXml, ToolFormat::kLlama,
                               ToolFormat::kMistral, ToolFormat::kGranite, ToolFormat::kPhi,
                               ToolFormat::kGeneric};

TEST(AnswerParser, PlainTextStaysInEveryFormat) {
  for (const ToolFormat format : kAll) {
    for (const std::string text : {"Hello, world.\n\nBye. ", " \n", "", "a < b and <tool", "[TOOL",
                                   "func", "<|", "x {\"a\": 1}", "<tool_call", "{", "{}", "[1, 2]",
                                   "{\"name\": \"Bob\", \"parameters\": {}}", "é\xE2\x82\xAC <",
                                   "<think", "a <think>b</think> c"}) {
      SCOPED_TRACE(ToolFormatName(format));
      EXPECT_EQ(Split(format, text), text.empty() ? Json::array() : Content(text));
    }
  }
}

TEST(AnswerParser, TextComesAtOnceButForWhatMayBeAMarker) {
  const Question question = WithTools();
  AnswerParser parser(Form(ToolFormat::kHermes), question, "call_", "77", 0);
  EXPECT_EQ(Merged(parser.Add("Hello")), Content("Hello"));
  EXPECT_EQ(Merged(parser.Add(" ")), Json::array());
  EXPECT_EQ(Merged(parser.Add("you <tool_")), Content(" you"));
  EXPECT_EQ(Merged(parser.Add("box")), Content(" <tool_box"));
  EXPECT_EQ(Merged(parser.End()), Json::array());
}

TEST(AnswerParser, AnswersInJsonAreNotHeldBack) {
  const Question question = WithTools();
  for (const ToolFormat format : {ToolFormat::kLlama, ToolFormat::kGeneric}) {
    AnswerParser parser(Form(format), question, "call_", "77", 0);
    EXPECT_EQ(Merged(parser.Add("{ \"t")), Json::array());
    EXPECT_EQ(Merged(parser.Add("itle\": ")), Content("{ \"title\":"));
  }
}

TEST(AnswerParser, Reasoning) {
  const Json both = J(R"([["reasoning", "a\n b"], ["content", "c d\n"]])");
  EXPECT_EQ(Split(ToolFormat::kHermes, "<think>\na\n b\n</think>\n\nc d\n"), both);
  EXPECT_EQ(Split(ToolFormat::kHermes, "\n<think>a\n b</think>c d\n"), both);
  EXPECT_EQ(Split(Form(ToolFormat::kHermes, true), {}, "a\n b\n</think>\n\nc d\n"), both);
  EXPECT_EQ(Split(Form(ToolFormat::kHermes, true), {}, "<think>\na\n b</think>c d\n"), both);
  EXPECT_EQ(Split(ToolFormat::kHermes, "<think>\n\n</think>\n\nc"), Content("c"));
  EXPECT_EQ(Split(ToolFormat::kHermes, "<think>"), Json::array());
  EXPECT_EQ(Split(ToolFormat::kHermes, "<think>a </thin"), J(R"([["reasoning", "a </thin"]])"));
  // a call in the reasoning is a thought
  EXPECT_EQ(
      Split(ToolFormat::kHermes, "<think><tool_call>{\"name\": \"now\"}</tool_call></think>x"),
      J(R"([["reasoning", "<tool_call>{\"name\": \"now\"}</tool_call>"], ["content", "x"]])"));
  AnswerForm mistral = Form(ToolFormat::kMistral);
  mistral.reasoning_open = "[THINK]";
  mistral.reasoning_close = "[/THINK]";
  EXPECT_EQ(Split(mistral, {}, "[THINK]a\n b[/THINK]c d\n"), both);
}

TEST(AnswerParser, Hermes) {
  EXPECT_EQ(Split(ToolFormat::kHermes,
                  "<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"get_weather\", "
                  "\"arguments\": {\"city\": \"</tool_call> \\\"}{\", \"days\": 2}}\n</tool_call>\n"
                  "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n"),
            J(R"([["reasoning", "hm"], ["content", "I look."],
                  ["call", "call_77_0_0", "get_weather",
                   "{\"city\":\"</tool_call> \\\"}{\",\"days\":2}"],
                  ["call", "call_77_0_1", "now", "{}"]])"));
  const Json now = J(R"([["call", "call_77_0_0", "now", "{\"a\":1}"]])");
  for (const char* text :
       {"<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}",
        "<tool_call>{\"name\": \"now\", \"arguments\": \"{\\\"a\\\":1}\"}</tool_call>",
        "\n\n<tool_call>{\"name\": \"now\", \"parameters\": {\"a\": 1}}</tool_call>  ",
        "<tool_call>{\"function\": {\"name\": \"now\", \"arguments\": {\"a\": 1}}}</tool_call>"}) {
    EXPECT_EQ(Split(ToolFormat::kHermes, text), now);
  }
  EXPECT_EQ(Split(ToolFormat::kHermes, "<tool_call>{\"name\": \"now\"}</tool_call> and more"),
            J(R"([["call", "call_77_0_0", "now", "{}"], ["content", "and more"]])"));
}

TEST(AnswerParser, MalformedCallsAreContent) {
  for (const std::string text :
       {"<tool_call>", "<tool_call>\n", "x\n<tool_call>{\"name\": \"now\"",
        "<tool_call>now()</tool_call>", "<tool_call>{\"name\": 3}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": \"x\"}</tool_call>",
        "<tool_call>{'name': 'now'}</tool_call> y", "<tool_call>[]</tool_call>",
        "<tool_call>{\"name\": \"now\",}</tool_call>"}) {
    EXPECT_EQ(Split(ToolFormat::kHermes, text), Content(text));
  }
  EXPECT_EQ(Split(ToolFormat::kHermes, "a <tool_call>b <tool_call>{\"name\": \"now\"}</tool_call>"),
            J(R"([["content", "a <tool_call>b"], ["call", "call_77_0_0", "now", "{}"]])"));
}

TEST(AnswerParser, QwenXml) {
  const std::string call =
      "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
      "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
      "<parameter=where>\n{\"x\": [1]}\n</parameter>\n<parameter=any>\n7\n</parameter>\n"
      "<parameter=other>\ntwo\nlines\n</parameter>\n</function>";
  const Json expected =
      J(R"([["content", "Well."],
      ["call", "call_77_0_0", "get_weather", "{\"city\":\"Paris\",\"days\":3,\"exact\":true,)"
        R"(\"note\":null,\"where\":{\"x\":[1]},\"any\":\"7\",\"other\":\"two\\nlines\"}"]])");
  EXPECT_EQ(Split(ToolFormat::kQwenXml, "Well.\n\n<tool_call>\n" + call + "\n</tool_call>\n"),
            expected);
  EXPECT_EQ(Split(ToolFormat::kQwenXml, "Well.\n" + call + "\n</tool_call>"), expected);
  EXPECT_EQ(Split(ToolFormat::kQwenXml, "Well.\n" + call), expected);
  EXPECT_EQ(Split(ToolFormat::kQwenXml, "Well.\n<tool_call>" + call), expected);
  // markers within a value, and a value that its type does not allow
  EXPECT_EQ(Split(ToolFormat::kQwenXml,
                  "<tool_call><function=get_weather><parameter=city>a</parameter> b</function> "
                  "c</parameter><parameter=days>many</parameter></function></tool_call>"),
            J(R"([["call", "call_77_0_0", "get_weather",
                   "{\"city\":\"a</parameter> b</function> c\",\"days\":\"many\"}"]])"));
  EXPECT_EQ(Split(ToolFormat::kQwenXml,
                  "<tool_call><function=now></function></tool_call>\n<tool_call>\n<function=now>\n"
                  "</function>\n</tool_call>"),
            J(R"([["call", "call_77_0_0", "now", "{}"], ["call", "call_77_0_1", "now", "{}"]])"));
  EXPECT_EQ(Split(ToolFormat::kQwenXml, "<tool_call>{\"name\": \"now\"}</tool_call>"),
            J(R"([["call", "call_77_0_0", "now", "{}"]])"));
  for (const std::string text :
       {"<tool_call><function=now>", "<function=>x</function>", "<function=now\n></function>",
        "<tool_call><function=now>text</function></tool_call>",
        "<tool_call><function=now><parameter=x>1</function></tool_call>"}) {
    EXPECT_EQ(Split(ToolFormat::kQwenXml, text), Content(text));
  }
}

TEST(AnswerParser, Llama) {
  const Json two = J(R"([["call", "call_77_0_0", "get_weather", "{\"city\":\"Paris\"}"],
                         ["call", "call_77_0_1", "now", "{}"]])");
  const std::string first = R"({"name": "get_weather", "parameters": {"city": "Paris"}})";
  const std::string second = R"({"type": "function", "name": "now", "parameters": {}})";
  EXPECT_EQ(Split(ToolFormat::kLlama, first + "; " + second), two);
  EXPECT_EQ(Split(ToolFormat::kLlama, "\n" + first + "\n" + second + "\n"), two);
  EXPECT_EQ(Split(ToolFormat::kLlama, "<|python_tag|>" + first + ";" + second), two);
  EXPECT_EQ(Split(ToolFormat::kLlama, "<|python_tag|>" + first + "<|python_tag|>" + second), two);
  EXPECT_EQ(Split(ToolFormat::kLlama, second + ";; x"),
            J(R"([["call", "call_77_0_0", "now", "{}"], ["content", "; x"]])"));
  // JSON that is no call of a tool that there is; JSON within an answer
  for (const std::string& text :
       {std::string(R"({"name": "nobody", "parameters": {}})"), "See: " + first,
        std::string(R"({"name": "now")"), std::string("<|python_tag|>print(1)"),
        std::string(R"([{"name": "now"}])")}) {
    EXPECT_EQ(Split(ToolFormat::kLlama, text), Content(text));
  }
}

TEST(AnswerParser, Mistral) {
  Json two = Split(ToolFormat::kMistral,
                   R"([TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}},)"
                   R"({"name": "now", "arguments": {}, "id": "123456789"}])");
  ASSERT_EQ(two.size(), 2U);
  // the templates refuse ids that are not nine letters and digits
  const auto id = two[0][1].get<std::string>();
  EXPECT_EQ(id.size(), 9U);
  EXPECT_EQ(id.find_first_not_of("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
            std::string::npos);
  EXPECT_NE(two[0][1], two[1][1]);
  Json expected = J(R"([["call", "", "get_weather", "{\"city\":\"Paris\"}"],
                        ["call", "", "now", "{}"]])");
  expected[0][1] = two[0][1];
  expected[1][1] = two[1][1];
  EXPECT_EQ(two, expected);
  for (const char* text :
       {"[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]get_weather{\"city\": \"Paris\"}[TOOL_CALLS]now{}",
        "[TOOL_CALLS] get_weather[CALL_ID]aB3[ARGS] {\"city\": \"Paris\"}\n[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}"
        "[TOOL_CALLS]now[ARGS]{}"}) {
    EXPECT_EQ(Split(ToolFormat::kMistral, text), expected);
  }
  for (const std::string text :
       {"[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]x", "[TOOL_CALLS]now[AR]{}",
        "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]now[ARGS]{\"a\": }", "[TOOL_CALLS][1]"}) {
    EXPECT_EQ(Split(ToolFormat::kMistral, text), Content(text));
  }
}

TEST(AnswerParser, GraniteAndPhi) {
  const Json two = J(R"([["content", "Well."],
                         ["call", "call_77_0_0", "get_weather", "{\"city\":\"Paris\"}"],
                         ["call", "call_77_0_1", "now", "{}"]])");
  const std::string list = R"([{"name": "get_weather", "arguments": {"city": "Paris"}},
                               {"name": "now", "arguments": {}}])";
  EXPECT_EQ(Split(ToolFormat::kGranite, "Well.\n<|tool_call|>" + list), two);
  EXPECT_EQ(Split(ToolFormat::kGranite, "Well. <tool_call>" + list), two);
  EXPECT_EQ(Split(ToolFormat::kGranite, "<function_call> {\"name\": \"now\", \"arguments\": {}}"),
            J(R"([["call", "call_77_0_0", "now", "{}"]])"));
  EXPECT_EQ(
      Split(ToolFormat::kGranite,
            "<|tool_call|>{\"type\": \"function\", \"function\": \"now\", \"arguments\": {}}"),
      J(R"([["call", "call_77_0_0", "now", "{}"]])"));
  EXPECT_EQ(Split(ToolFormat::kPhi, "Well.\nfunctools" + list), two);
  EXPECT_EQ(Split(ToolFormat::kPhi, "Well.\n<|tool_call|>" + list + "<|/tool_call|>"), two);
  for (const std::string text : {"functools[1]", "functools[0].cache", "import functools"}) {
    EXPECT_EQ(Split(ToolFormat::kPhi, text), Content(text));
  }
}

TEST(AnswerParser, Generic) {
  EXPECT_EQ(Split(ToolFormat::kGeneric,
                  R"({"tool_calls": [{"name": "now", "arguments": {"a": 1}}, {"name": "now"}]})"),
            J(R"([["call", "call_77_0_0", "now", "{\"a\":1}"],
                  ["call", "call_77_0_1", "now", "{}"]])"));
  EXPECT_EQ(Split(ToolFormat::kGeneric, R"( {"tool_call": {"name": "now"}} )"),
            J(R"([["call", "call_77_0_0", "now", "{}"]])"));
  EXPECT_EQ(Split(ToolFormat::kGeneric, R"({"response": "A\nb \u00e9"})"), Content("A\nb é"));
  EXPECT_EQ(Split(ToolFormat::kGeneric, R"({"response": ""})"), Json::array());
  for (const std::string text : {R"({"other": 1})", R"({"tool_calls": []})", R"({"response)"}) {
    EXPECT_EQ(Split(ToolFormat::kGeneric, text), Content(text));
  }
  EXPECT_EQ(Dump(GenericSchema(J(R"([{"type": "function", "function": {"name": "f",
                                      "parameters": {"type": "object", "x": 1}}}])"),
                               false, false)),
            R"({"anyOf":[{"type":"object","properties":{"tool_calls":{"type":"array","minItems":1,)"
            R"("maxItems":1,"items":{"anyOf":[{"type":"object","properties":{"name":{"const":"f"},)"
            R"("arguments":{"type":"object","x":1}},"required":["name","arguments"],)"
            R"("additionalProperties":false}]}}},"required":["tool_calls"],)"
            R"("additionalProperties":false},{"type":"object","properties":{"response":)"
            R"({"type":"string"}},"required":["response"],"additionalProperties":false}]})");
  EXPECT_EQ(GenericSchema(J(kTools), true, true)["required"], Json::array({"tool_calls"}));
  EXPECT_NE(GenericInstruction(J(kTools)).find("{\"name\":\"now\"}\n"), std::string::npos);
}

TEST(AnswerParser, CallsAreLookedForWhereTheQuestionAllowsThem) {
  const std::string text = "<tool_call>{\"name\": \"now\"}</tool_call>";
  EXPECT_EQ(Split(Form(ToolFormat::kHermes), {}, text), Content(text));
  Question none = WithTools();
  none.tool_choice.kind = ToolChoice::Kind::kNone;
  EXPECT_EQ(Split(Form(ToolFormat::kHermes), none, text), Content(text));
  Question one = WithTools();
  one.parallel_tool_calls = false;
  EXPECT_EQ(Split(Form(ToolFormat::kHermes), one, text + text),
            J(R"([["call", "call_77_0_0", "now", "{}"]])"));
}

TEST(AnswerParser, LongArgumentsAreReadOnce) {
  std::string text = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"";
  text += std::string(4'000'000, 'x') + "\"}}</tool_call>";
  const Question question = WithTools();
  AnswerParser parser(Form(ToolFormat::kHermes), question, "call_", "77", 0);
  size_t calls = 0;
  for (size_t i = 0; i < text.size(); i += 4) {
    calls += parser.Add(std::string_view(text).substr(i, 4)).size();
  }
  EXPECT_EQ(calls + parser.End().size(), 1U);
}

// The parts, one after the other, of pieces that are added one by one.
Json Streamed(AnswerForm form, const Question& question, const std::vector<std::string>& pieces) {
  form.stream_calls = true;
  AnswerParser parser(form, question, "call_", "77", 0);
  Json all = Json::array();
  const auto take = [&](const std::vector<AnswerPart>& parts) {
    for (const AnswerPart& part : parts) {
      all.push_back(part.kind == AnswerPart::Kind::kCall        ? "call " + part.name + part.text
                    : part.kind == AnswerPart::Kind::kArguments ? "+" + part.text
                                                                : part.text);
    }
  };
  for (const std::string& piece : pieces) take(parser.Add(piece));
  all.push_back("END");
  take(parser.End());
  return all;
}

TEST(AnswerParser, CallsMayComeOutWhileTheyAreWritten) {
  const Question tools = WithTools();
  EXPECT_EQ(Streamed(Form(ToolFormat::kHermes), tools,
                     {"I look.\n<tool_call>\n{\"name\": \"no", "w\", \"arguments\"", ": {",
                      "\"a\": ", "\"}\"", "}", "}\n</tool", "_call>", "\n", "So."}),
            J(R"(["I look.", "call now", "+{", "+\"a\": ", "+\"}\"", "+}", "So.", "END"])"));
  EXPECT_EQ(
      Streamed(Form(ToolFormat::kMistral), tools, {"[TOOL_CALLS]now[ARGS]{", "\"a\": 1", "} "}),
      J(R"(["call now", "+{", "+\"a\": 1", "+}", "END"])"));
  EXPECT_EQ(
      Streamed(Form(ToolFormat::kLlama), tools,
               {"{\"type\": \"function\", \"name\": \"now\", \"parameters\": {\"a\"", ": 1}}"}),
      J(R"(["call now", "+{\"a\"", "+: 1}", "END"])"));
  // what is not well-formed after the head stays in the call
  const auto hermes = [&](const std::string& rest) {
    return Streamed(Form(ToolFormat::kHermes), tools,
                    {"<tool_call>{\"name\": \"now\", \"arguments\": " + rest});
  };
  EXPECT_EQ(hermes("{\"a\": \"cut"), J(R"(["call now", "+{\"a\": \"cut", "END"])"));
  EXPECT_EQ(hermes("{'a'}}</tool_call>"), J(R"(["call now", "+{'a'}", "END"])"));
  EXPECT_EQ(hermes("{}</tool_call>\nSo."), J(R"(["call now", "+{}", "So.", "END"])"));
  EXPECT_EQ(hermes("{}, \"x\": [1]}</tool_call>\nSo."), J(R"(["call now", "+{}", "So.", "END"])"));
  EXPECT_EQ(hermes("{}, x"), J(R"(["call now", "+{}", "END", ", x"])"));
  EXPECT_EQ(hermes("{}"), J(R"(["call now", "+{}", "END"])"));
  // others are read whole
  EXPECT_EQ(hermes("\"{\\\"a\\\": 1}\"}"), J(R"(["END", "call now{\"a\": 1}"])"));
  EXPECT_EQ(Streamed(Form(ToolFormat::kHermes), tools,
                     {"<tool_call>{\"name\": \"n\\u006fw\", \"arguments\": {}}</tool_call>"}),
            J(R"(["call now{}", "END"])"));
  // without a marker it must name a tool
  EXPECT_EQ(
      Streamed(Form(ToolFormat::kLlama), tools, {"{\"name\": \"nobody\", \"parameters\": {}}"}),
      J(R"(["{\"name\": \"nobody\", \"parameters\": {}}", "END"])"));
  Question one = WithTools();
  one.parallel_tool_calls = false;
  EXPECT_EQ(Streamed(Form(ToolFormat::kMistral), one, {"[TOOL_CALLS]now{", "}[TOOL_CALLS]now{}x"}),
            J(R"(["call now", "+{", "+}", "x", "END"])"));
}

TEST(AnswerParser, FormatsAreSeenInTheTemplate) {
  const auto detect = [](std::string_view text) {
    return std::string(ToolFormatName(DetectToolFormat(text)));
  };
  EXPECT_EQ(detect("return a json object within <tool_call></tool_call> XML tags"), "hermes");
  EXPECT_EQ(detect("<tool_call>\n<function=example>\n<parameter=a>"), "qwen_xml");
  EXPECT_EQ(detect("Respond in the format {\"name\": function name, \"parameters\": dictionary of "
                   "argument name and its value}."),
            "llama");
  EXPECT_EQ(detect(std::string_view("a\0<|python_tag|>", 16)), "llama");
  EXPECT_EQ(detect("[AVAILABLE_TOOLS] [TOOL_CALLS]"), "mistral");
  EXPECT_EQ(detect("<|start_of_role|>respond with <|tool_call|> followed by a JSON list"),
            "granite");
  EXPECT_EQ(detect("<|start_of_role|> <tool_call>{\"name\"}</tool_call>"), "hermes");
  EXPECT_EQ(detect("<|tool|> <|/tool|>"), "phi");
  EXPECT_EQ(detect("<tool_call>{name}\n<arg_key>"), "generic");
  EXPECT_EQ(detect("<|im_start|>"), "generic");
  EXPECT_EQ(DetectAnswerForm("[THINK]").reasoning_close, "[/THINK]");
  EXPECT_TRUE(EndsInReasoning("<|im_start|>assistant\n<think>\n", {}));
  EXPECT_FALSE(EndsInReasoning("<think>\n\n</think>\n\n", {}));
}

}  // namespace
}  // namespace omnikv::server::answer_parser_test
