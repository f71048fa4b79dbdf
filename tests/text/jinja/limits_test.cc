// Templates that want too much, and inputs that are wrong, end in one sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <pthread.h>

#include <string>
#include <thread>
#include <tuple>

#include "text/jinja/chat_template.h"

namespace omnikv::limits_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// Sanitizers' frames are several times as large.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kSmallStack = size_t{256} << 10;
#else
constexpr size_t kSmallStack = size_t{64} << 10;
#endif

ChatInput Input() {
  ChatInput input;
  input.messages = {{{"role", "user"}, {"content", "hello"}}};
  return input;
}

Status RenderStatus(const std::string& source, const ChatInput& input = Input(),
                    const RenderLimits& limits = {}) {
  const auto parsed = ChatTemplate::Parse(source, "m/tokenizer_config.json: chat_template");
  if (!parsed.ok()) return parsed.status();
  return parsed->Render(input, limits).status();
}

std::string Repeat(const std::string& text, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += text;
  return out;
}

TEST(Limits, MessagesNameTheTemplateAndTheLine) {
  const Status parse = RenderStatus("a\n\n{% if x %}\n{{ y + }}\n{% endif %}");
  EXPECT_EQ(parse.code(), StatusCode::kCorrupt);
  EXPECT_EQ(parse.message(),
            "m/tokenizer_config.json: chat_template, line 4: '}}' found, expected an expression");
  const Status render =
      RenderStatus("a\n{% for m in messages %}\n{{ m.content +\n 1 }}{% endfor %}");
  EXPECT_EQ(render.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(render.message(),
            "m/tokenizer_config.json: chat_template, line 3: '+' does not work on a string and an "
            "integer");
  const Status raised =
      RenderStatus("{% macro m() %}x{% endmacro %}\n\n{{ raise_exception('No ' ~ m()) }}");
  EXPECT_EQ(raised.message(),
            "m/tokenizer_config.json: chat_template, line 3: the template raised: No x");
}

// Text of a file neither forges lines nor commands the terminal, nor fills it.
TEST(Limits, MessagesAreEscapedAndCut) {
  const Status raised = RenderStatus(
      "{{ raise_exception('\x1b[31mred\nomnikv: a second sentence\u009b\u202e\u00e9') }}");
  EXPECT_EQ(raised.message(),
            "m/tokenizer_config.json: chat_template, line 1: the template raised: "
            "\\x1b[31mred\\x0aomnikv: a second sentence\\xc2\\x9b\\xe2\\x80\\xae\u00e9");
  EXPECT_THAT(RenderStatus("{{ \x1b }}").message(), HasSubstr("'\\x1b' is not expected here"));
  EXPECT_LT(RenderStatus("{{ raise_exception('x' * 1000000) }}").message().size(), 1200u);
}

TEST(Limits, EndlessWorkIsRefused) {
  for (const char* source : {
           "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
           "{% macro m(x) %}{{ x }}{{ m(x ~ x) }}{% endmacro %}{{ m('ab') }}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
           "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'xxxxxxxxxxxxxxxx' }}{% "
           "endfor %}{% endfor %}",
           "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ "
           "ns.s %}{% endfor %}",
           "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% "
           "endfor %}",
           "{{ 'a' * 9999999999999 }}",
           "{{ [1] * 9999999999999 }}",
           "{{ 'a'.center(9999999999999) }}",
           "{{ 'a' | indent(9999999999999) }}",
           "{{ [1] | tojson(indent=9999999999999) }}",
           "{% set ns = namespace(s=[1]) %}{% for i in range(150) %}{% set ns.s = [ns.s, ns.s] "
           "%}{% endfor %}{{ ns.s }}",
           "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(150) %}{% set ns.s = [ns.s, "
           "ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
           "{% set ns = namespace() %}{% set ns.self = ns %}{{ ns }}",
           "{% set ns = namespace(s='a') %}{% for i in range(22) %}{% set ns.s = ns.s ~ ns.s %}{% "
           "endfor %}{{ (ns.s ~ 'b') is in ns.s }}{{ ns.s.rsplit(ns.s ~ 'b') }}{{ ns.s.rfind('b' ~ "
           "ns.s[:999999]) }}",
       }) {
    RenderLimits limits;  // a tenth of the defaults, to be quick
    limits.max_work /= 10;
    limits.max_bytes /= 10;
    const Status status = RenderStatus(source, Input(), limits);
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << source << ": " << status.message();
    EXPECT_THAT(status.message(), HasSubstr("limit")) << source;
  }
}

TEST(Limits, DeepValuesAreRefused) {
  EXPECT_THAT(
      RenderStatus("{% set ns = namespace(s=[1]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] "
                   "%}{% endfor %}")
          .message(),
      HasSubstr("levels deep"));
  EXPECT_THAT(
      RenderStatus("{% set ns = namespace(s='a'.upper) %}{% for i in range(9999) %}{% set ns.s = "
                   "[ns.s].index %}{% endfor %}")
          .message(),
      HasSubstr("levels deep"));
  ChatInput input = Input();
  nlohmann::ordered_json deep = 1;
  for (int i = 0; i < 500; ++i) deep = nlohmann::ordered_json::array({std::move(deep)});
  input.messages[0]["x"] = std::move(deep);
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("levels deep"));
}

TEST(Limits, DeepSourceIsRefused) {
  for (const std::string& source : {
           "{{ " + Repeat("(", 5000) + "1" + Repeat(")", 5000) + " }}",
           "{{ " + Repeat("[", 5000) + Repeat("]", 5000) + " }}",
           "{{ " + Repeat("not ", 5000) + "1 }}",
           "{{ " + Repeat("-", 5000) + "1 }}",
           "{{ 1" + Repeat(" + 1", 5000) + " }}",
           "{{ a" + Repeat(".b", 5000) + " }}",
           "{{ a" + Repeat("|upper", 5000) + " }}",
           "{{ a" + Repeat(" if b", 5000) + " }}",
           "{{ 1" + Repeat(" if 1 else 1", 5000) + " }}",
           "{{ a" + Repeat("[1", 5000) + Repeat("]", 5000) + " }}",
           "{{ " + Repeat("f(", 5000) + Repeat(")", 5000) + " }}",
           "{{ a" + Repeat(" is b", 1) + Repeat(" and a", 5000) + " }}",
           Repeat("{% if a %}", 5000) + Repeat("{% endif %}", 5000),
           "{% for " + Repeat("(", 5000) + "a" + Repeat(")", 5000) + " in b %}{% endfor %}",
       }) {
    const Status status = RenderStatus(source);
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << source.substr(0, 40) << status.message();
    EXPECT_THAT(status.message(), HasSubstr("levels")) << source.substr(0, 40);
  }
}

// Whatever the stack of the caller: threads of a host program may have little.
TEST(Limits, SmallStacksAreEnough) {
  const auto deep = ChatTemplate::Parse(
      "{% macro m(a, b=1) %}{{ m(a, b=[m][0](1)) }}{% endmacro %}{{ m(1) }}", "test");
  ASSERT_TRUE(deep.ok());
  const std::string wide = "{{ 1" + Repeat(" + 1", 240) + " }}";
  std::vector<Status> statuses(2);
  const auto run = [](void* out) -> void* {
    auto& [macro, results, source] =
        *static_cast<std::tuple<const ChatTemplate*, std::vector<Status>*, std::string>*>(out);
    (*results)[0] = macro->Render(Input()).status();
    (*results)[1] = RenderStatus(Repeat("{% if 1 %}", 150) + source + Repeat("{% endif %}", 150));
    return nullptr;
  };
  std::tuple<const ChatTemplate*, std::vector<Status>*, std::string> arguments{&*deep, &statuses,
                                                                               wide};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, kSmallStack), 0);
  pthread_t thread{};
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &arguments), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(statuses[0].code(), StatusCode::kResourceExhausted) << statuses[0].message();
  EXPECT_TRUE(statuses[1].ok()) << statuses[1].message();
}

TEST(Limits, WideSourceIsFine) {
  const auto parsed = ChatTemplate::Parse("{% if 0 %}" + Repeat("{% elif 0 %}", 5000) +
                                              "{% endif %}{{ 'a'" + Repeat(" ~ 'a'", 5000) +
                                              " }}{{ [" + Repeat("1,", 5000) + "] | length }}",
                                          "test");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(*parsed->RenderText(Input()), Repeat("a", 5001) + "5000");
}

TEST(Limits, CallersSetThem) {
  const auto parsed = ChatTemplate::Parse("{% for i in range(100) %}{{ i }}{% endfor %}", "test");
  ASSERT_TRUE(parsed.ok());
  RenderLimits limits;
  limits.max_work = 3000;
  EXPECT_EQ(parsed->Render(Input(), limits).status().code(), StatusCode::kResourceExhausted);
  limits = RenderLimits();
  limits.max_bytes = 100;
  EXPECT_EQ(parsed->Render(Input(), limits).status().code(), StatusCode::kResourceExhausted);
  limits = RenderLimits();
  limits.max_depth = 2;
  EXPECT_EQ(parsed->Render(Input(), limits).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(parsed->Render(Input()).ok());
}

TEST(Limits, AMillionTokensOfTextAreFine) {
  const auto parsed = ChatTemplate::Parse(
      "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '\n' }}"
      "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif "
      "%}"
      "{% endfor %}",
      "test");
  ASSERT_TRUE(parsed.ok());
  ChatInput input;
  for (int i = 0; i < 1000; ++i) {
    input.messages.push_back({{"role", "user"}, {"content", Repeat("word ", 1000)}});
  }
  const auto text = parsed->RenderText(input);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text->size(), 1000 * (9U + 4999U));
}

TEST(Limits, IntegersDoNotWrap) {
  for (const char* expression :
       {"9223372036854775807 + 1", "-9223372036854775807 - 2", "9223372036854775807 * 2", "2 ** 63",
        "10 ** 19", "-(-9223372036854775807 - 1)", "(-9223372036854775807 - 1) // -1", "1e19 | int",
        "'9223372036854775808' | int", "(-9223372036854775807 - 1) | abs", "9223372036854775808",
        "[9223372036854775807, 1] | sum", "'%d' % 1e30"}) {
    const Status status = RenderStatus(std::string("{{ ") + expression + " }}");
    EXPECT_FALSE(status.ok()) << expression;
    EXPECT_THAT(status.message(), HasSubstr("64")) << expression;
  }
  const auto parsed = ChatTemplate::Parse("{{ (-9223372036854775807 - 1) % -1 }}", "test");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed->RenderText(Input()), "0");
}

TEST(Limits, WrongInputsAreNamed) {
  ChatInput input = Input();
  input.messages = "hi";
  EXPECT_THAT(RenderStatus("x", input).message(),
              HasSubstr("messages is string, expected an array"));
  input.messages = nullptr;
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("messages is missing"));
  input.messages = {"hi"};
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("messages[0] is a string"));
  input = Input();
  input.tools = {{"name", "x"}};
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("tools is object"));
  input = Input();
  input.extra = {{"messages", 1}};
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("'messages' is not free"));
  input = Input();
  input.extra = 5;
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("expected an object"));
  input = Input();
  input.messages[0]["n"] = 18446744073709551615U;
  EXPECT_THAT(RenderStatus("x", input).message(), HasSubstr("18446744073709551615"));
}

TEST(Limits, MalformedTextPassesThrough) {
  ChatInput input = Input();
  input.messages[0]["content"] = "a\xFF\xE2\x82z";
  const auto parsed = ChatTemplate::Parse(
      "{% set c = messages[0].content %}{{ c[::-1] }}{{ c | length }}\xC3{{ c | upper }}"
      "{{ c.casefold() }}",
      "test");
  ASSERT_TRUE(parsed.ok());
  const auto text = parsed->RenderText(input);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text,
            "z\x82\xE2\xFF"
            "a5\xC3"
            "A\xFF\xE2\x82Za\xFF\xE2\x82z");
}

TEST(Limits, WhatIsNotSupportedIsNamed) {
  for (const char* tag : {"include 'x'", "extends 'x'", "import 'x' as y", "from 'x' import y",
                          "block b", "autoescape true", "print 1"}) {
    const Status status = RenderStatus(std::string("{% ") + tag + " %}");
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr("is not supported"));
  }
  EXPECT_THAT(RenderStatus("{% for x in y recursive %}{% endfor %}").message(),
              HasSubstr("recursive loops are not supported"));
}

TEST(Limits, FromJsonIsThere) {
  ChatInput input = Input();
  input.messages[0]["content"] = R"({"b": [1, {"a": null}], "c": 2.0})";
  const auto parsed = ChatTemplate::Parse("{{ messages[0].content | from_json }}", "test");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed->RenderText(input), "{'b': [1, {'a': None}], 'c': 2.0}");
  EXPECT_THAT(RenderStatus("{{ 'x' | from_json }}").message(), HasSubstr("not JSON"));
}

TEST(Limits, TheClockIsTheDefaultTime) {
  const auto parsed = ChatTemplate::Parse("{{ strftime_now('%Y') }}", "test");
  ASSERT_TRUE(parsed.ok());
  const auto year = parsed->RenderText(Input());
  ASSERT_TRUE(year.ok());
  EXPECT_GE(std::stoi(*year), 2024);
}

TEST(Limits, OneTemplateRendersInManyThreads) {
  const auto parsed = ChatTemplate::Parse(
      "{% macro m(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(n=0) %}{% for m2 in messages * "
      "50 %}"
      "{% set ns.n = ns.n + 1 %}{{ m(m2.content) }}{% endfor %}{{ ns.n }}",
      "test");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  const std::string expected = Repeat("[hello]", 50) + "50";
  std::vector<std::thread> threads;
  std::vector<std::string> texts(4);
  for (std::string& text : texts) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        text = parsed->RenderText(Input()).ok() ? *parsed->RenderText(Input()) : "";
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : texts) EXPECT_EQ(text, expected);
}

}  // namespace
}  // namespace omnikv::limits_test
