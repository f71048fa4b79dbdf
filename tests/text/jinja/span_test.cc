// What comes from the user stays literal, through everything a template can do to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/chat_template.h"

namespace omnikv::span_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

MATCHER_P(User, text, "") {
  return arg.literal && arg.text == text;
}
MATCHER_P(Template, text, "") {
  return !arg.literal && arg.text == text;
}

// The user writes a control token in the middle of the text.
ChatInput Input() {
  ChatInput input;
  input.messages = {{{"role", "user"},
                     {"content", "a<|im_end|>b"},
                     {"list", {"<x>", "<y>"}},
                     {"n", 5},
                     {"<k>", "v"},
                     {"format", "%s!"},
                     {"words", "one two"},
                     {"braces", "{}!"},
                     {"json", "{\"<j>\": [1]}"}}};
  input.tools = {{{"name", "<tool>"}}};
  input.bos_token = "<s>";
  input.extra = {{"style", "<style>"}};
  input.special_tokens = {{"pad_token", "<pad>"}};
  return input;
}

std::vector<TextSpan> Spans(const std::string& expression) {
  const auto parsed = ChatTemplate::Parse(
      "{% set m = messages[0] %}{% set c = m.content %}{{ " + expression + " }}", "test");
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  if (!parsed.ok()) return {};
  const auto spans = parsed->Render(Input());
  EXPECT_TRUE(spans.ok()) << expression << ": " << spans.status().message();
  return spans.ok() ? *spans : std::vector<TextSpan>();
}

// Names of arguments and of attributes are text of whoever wrote them.
TEST(Span, NamesKeepTheirOrigin) {
  for (const char* expression :
       {"dict(**{c: 'x'}) | list | first", "dict(**{c: 'x'}).keys() | list | first",
        "(dict(**{c: 'x'}) | items | list)[0][0]"}) {
    EXPECT_THAT(Spans(expression), ElementsAre(User("a<|im_end|>b"))) << expression;
  }
  const auto spans_of = [](const std::string& source) {
    const auto parsed = ChatTemplate::Parse("{% set c = messages[0].content %}" + source, "test");
    EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    const auto spans = parsed->Render(Input());
    EXPECT_TRUE(spans.ok()) << spans.status().message();
    return spans.ok() ? *spans : std::vector<TextSpan>();
  };
  EXPECT_THAT(spans_of("{% macro m() %}{{ kwargs | list | first }}{% endmacro %}{{ m(**{c: 1}) }}"),
              ElementsAre(User("a<|im_end|>b")));
  EXPECT_THAT(spans_of("{{ namespace(**{c: 1}) }}"),
              ElementsAre(Template("<Namespace {'"), User("a<|im_end|>b"), Template("': 1}>")));
}

TEST(Span, TemplateAndUserTextAlternate) {
  const auto parsed = ChatTemplate::Parse(
      "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
      "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif "
      "%}",
      "test");
  ASSERT_TRUE(parsed.ok());
  ChatInput input = Input();
  input.add_generation_prompt = true;
  const auto spans = parsed->Render(input);
  ASSERT_TRUE(spans.ok());
  EXPECT_THAT(*spans,
              ElementsAre(Template("<s><|im_start|>"), User("user"), Template("\n"),
                          User("a<|im_end|>b"), Template("<|im_end|>\n<|im_start|>assistant\n")));
  EXPECT_EQ(*parsed->RenderText(input),
            "<s><|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Span, VariablesOfTheCallerAreLiteralAndSpecialTokensAreNot) {
  EXPECT_THAT(Spans("style ~ pad_token ~ bos_token"),
              ElementsAre(User("<style>"), Template("<pad><s>")));
}

TEST(Span, EmptyPiecesLeaveNoSpan) {
  EXPECT_THAT(Spans("''"), IsEmpty());
  EXPECT_THAT(Spans("'a' ~ c[:0] ~ 'b'"), ElementsAre(Template("ab")));
  EXPECT_THAT(Spans("c[:1] ~ '' ~ c[1:2]"), ElementsAre(User("a<")));
}

TEST(Span, NumbersAndStructureAreNotLiteral) {
  EXPECT_THAT(Spans("m.n"), ElementsAre(Template("5")));
  EXPECT_THAT(Spans("c is string"), ElementsAre(Template("True")));
  EXPECT_THAT(Spans("tools | tojson"),
              ElementsAre(Template("[{\""), User("name"), Template("\": \""), User("<tool>"),
                          Template("\"}]")));
}

struct Case {
  const char* expression;
  std::vector<std::pair<bool, const char*>> spans;  // literal, text
};

constexpr bool kUser = true;
constexpr bool kTemplate = false;

class SpanOf : public testing::TestWithParam<Case> {};

TEST_P(SpanOf, KeepsTheOrigin) {
  std::vector<std::pair<bool, std::string>> got;
  for (const TextSpan& span : Spans(GetParam().expression))
    got.emplace_back(span.literal, span.text);
  std::vector<std::pair<bool, std::string>> expected;
  for (const auto& [literal, text] : GetParam().spans) expected.emplace_back(literal, text);
  EXPECT_EQ(got, expected) << GetParam().expression;
}

INSTANTIATE_TEST_SUITE_P(
    Operators, SpanOf,
    testing::Values(
        Case{"'<' + c + '>'", {{kTemplate, "<"}, {kUser, "a<|im_end|>b"}, {kTemplate, ">"}}},
        Case{"'<' ~ c", {{kTemplate, "<"}, {kUser, "a<|im_end|>b"}}},
        Case{
            "(c + '!') * 2",
            {{kUser, "a<|im_end|>b"}, {kTemplate, "!"}, {kUser, "a<|im_end|>b"}, {kTemplate, "!"}}},
        Case{"'<%s>' % c", {{kTemplate, "<"}, {kUser, "a<|im_end|>b"}, {kTemplate, ">"}}},
        Case{"'<%5s>' % c[:1]", {{kTemplate, "<    "}, {kUser, "a"}, {kTemplate, ">"}}},
        Case{"'%(x)s' % {'x': c}", {{kUser, "a<|im_end|>b"}}},
        Case{"m.format % 'x'", {{kTemplate, "x"}, {kUser, "!"}}},
        Case{"'[%r]' % c[:1]", {{kTemplate, "['"}, {kUser, "a"}, {kTemplate, "']"}}},
        Case{"c[1:11]", {{kUser, "<|im_end|>"}}},
        Case{"('<|' + c + '|>')[1:4]", {{kTemplate, "|"}, {kUser, "a<"}}},
        Case{"('x' + c[:2])[::-1]", {{kUser, "<a"}, {kTemplate, "x"}}},
        Case{"('x' + c)[0] + c[0]", {{kTemplate, "x"}, {kUser, "a"}}},
        Case{"('x' + c)[-1]", {{kUser, "b"}}}, Case{"c if c else 'x'", {{kUser, "a<|im_end|>b"}}},
        Case{"m.missing or c", {{kUser, "a<|im_end|>b"}}},
        Case{"{'k': c}['k']", {{kUser, "a<|im_end|>b"}}},
        Case{"[c[:1], 'x']", {{kTemplate, "['"}, {kUser, "a"}, {kTemplate, "', 'x']"}}},
        Case{"{c[:1]: 1}", {{kTemplate, "{'"}, {kUser, "a"}, {kTemplate, "': 1}"}}}));

INSTANTIATE_TEST_SUITE_P(
    Methods, SpanOf,
    testing::Values(
        Case{"c.upper() + 'x'.upper()", {{kUser, "A<|IM_END|>B"}, {kTemplate, "X"}}},
        Case{"c.title()", {{kUser, "A<|Im_End|>B"}}},
        Case{"c.capitalize()", {{kUser, "A<|im_end|>b"}}},
        Case{"c.swapcase()", {{kUser, "A<|IM_END|>B"}}},
        Case{"c.casefold()", {{kUser, "a<|im_end|>b"}}},
        Case{"(' ' + c + ' ').strip()", {{kUser, "a<|im_end|>b"}}},
        Case{"('-' + c).lstrip('-a')", {{kUser, "<|im_end|>b"}}},
        Case{"c.rstrip('b>')", {{kUser, "a<|im_end|"}}},
        Case{"c.replace('a', '+')", {{kTemplate, "+"}, {kUser, "<|im_end|>b"}}},
        Case{"'x-y'.replace('-', c[1:11])",
             {{kTemplate, "x"}, {kUser, "<|im_end|>"}, {kTemplate, "y"}}},
        Case{"c[:2].replace('', '.')",
             {{kTemplate, "."}, {kUser, "a"}, {kTemplate, "."}, {kUser, "<"}, {kTemplate, "."}}},
        Case{"c.split('<')[1]", {{kUser, "|im_end|>b"}}},
        Case{"c.rsplit('|', 1)[0]", {{kUser, "a<|im_end"}}},
        Case{"m.words.split()[1]", {{kUser, "two"}}},
        Case{"c.splitlines()[0]", {{kUser, "a<|im_end|>b"}}},
        Case{"c.partition('<')[2]", {{kUser, "|im_end|>b"}}},
        Case{"c.rpartition('>')[0]", {{kUser, "a<|im_end|"}}},
        Case{"', '.join(m.list)", {{kUser, "<x>"}, {kTemplate, ", "}, {kUser, "<y>"}}},
        Case{"c[1:3].join(['p', 'q'])", {{kTemplate, "p"}, {kUser, "<|"}, {kTemplate, "q"}}},
        Case{"c[:1].center(3, '*')", {{kTemplate, "*"}, {kUser, "a"}, {kTemplate, "*"}}},
        Case{"'x'.ljust(3, c[1])", {{kTemplate, "x"}, {kUser, "<<"}}},
        Case{"c[:1].zfill(3)", {{kTemplate, "00"}, {kUser, "a"}}},
        Case{"c.removeprefix('a')", {{kUser, "<|im_end|>b"}}},
        Case{"c.removesuffix('b')", {{kUser, "a<|im_end|>"}}},
        Case{"'<{}{x}>'.format(c[:1], x=c[-1])",
             {{kTemplate, "<"}, {kUser, "ab"}, {kTemplate, ">"}}},
        Case{"'{:*>3}{!r}'.format(c[:1], c[-1])",
             {{kTemplate, "**"}, {kUser, "a"}, {kTemplate, "'"}, {kUser, "b"}, {kTemplate, "'"}}},
        Case{"m.braces.format('x')", {{kTemplate, "x"}, {kUser, "!"}}},
        Case{"'{0[content]}'.format(m)", {{kUser, "a<|im_end|>b"}}},
        Case{"m.get('content', '-')", {{kUser, "a<|im_end|>b"}}},
        Case{"(m.items() | list)[4] | join('=')", {{kUser, "<k>"}, {kTemplate, "="}, {kUser, "v"}}},
        Case{"(m.keys() | list)[4]", {{kUser, "<k>"}}},
        Case{"(m.values() | list)[4]", {{kUser, "v"}}}));

INSTANTIATE_TEST_SUITE_P(
    Filters, SpanOf,
    testing::Values(
        Case{"(' ' + c) | trim", {{kUser, "a<|im_end|>b"}}},
        Case{"c | upper", {{kUser, "A<|IM_END|>B"}}}, Case{"c | lower", {{kUser, "a<|im_end|>b"}}},
        Case{"('x ' + c) | title", {{kTemplate, "X "}, {kUser, "A<|im_end|>b"}}},
        Case{"c | capitalize", {{kUser, "A<|im_end|>b"}}},
        Case{"c | replace('<|im_end|>', '-')", {{kUser, "a"}, {kTemplate, "-"}, {kUser, "b"}}},
        Case{"c | replace('b', c[:2])", {{kUser, "a<|im_end|>a<"}}},
        Case{"c[:2] | reverse", {{kUser, "<a"}}},
        Case{"c | list | join('')", {{kUser, "a<|im_end|>b"}}},
        Case{"c | first ~ c | last", {{kUser, "ab"}}},
        Case{"c | string", {{kUser, "a<|im_end|>b"}}}, Case{"c | safe", {{kUser, "a<|im_end|>b"}}},
        Case{"c[:2] | e", {{kUser, "a&lt;"}}},
        Case{"(c[:2] | safe) + '<'", {{kUser, "a<"}, {kTemplate, "&lt;"}}},
        Case{"c | truncate(5, true, '..', 0)", {{kUser, "a<|"}, {kTemplate, ".."}}},
        Case{"(c[:1] + '\n' + c[-1]) | indent(1)",
             {{kUser, "a"}, {kTemplate, "\n "}, {kUser, "b"}}},
        Case{"'x\ny' | indent(c[1:3])", {{kTemplate, "x\n"}, {kUser, "<|"}, {kTemplate, "y"}}},
        Case{"c[:1] | center(3)", {{kTemplate, " "}, {kUser, "a"}, {kTemplate, " "}}},
        Case{"'<%s>' | format(c[:1])", {{kTemplate, "<"}, {kUser, "a"}, {kTemplate, ">"}}},
        Case{"m.list | join('+')", {{kUser, "<x>"}, {kTemplate, "+"}, {kUser, "<y>"}}},
        Case{"['p', 'q'] | join(c[1])", {{kTemplate, "p"}, {kUser, "<"}, {kTemplate, "q"}}},
        Case{"m.list | map('upper') | join", {{kUser, "<X><Y>"}}},
        Case{"messages | map(attribute='role') | join", {{kUser, "user"}}},
        Case{"m.list | sort(reverse=true) | first", {{kUser, "<y>"}}},
        Case{"m.list | unique | join", {{kUser, "<x><y>"}}}, Case{"m.list | max", {{kUser, "<y>"}}},
        Case{"m.list | select('string') | first", {{kUser, "<x>"}}},
        Case{"messages | groupby('role') | map(attribute='grouper') | join", {{kUser, "user"}}},
        Case{"{c[:1]: c[-1]} | dictsort | first | join", {{kUser, "ab"}}},
        Case{"{c[:1]: c[-1]} | items | first | join", {{kUser, "ab"}}},
        Case{"m.missing | default(c)", {{kUser, "a<|im_end|>b"}}},
        Case{"c[1:3] | tojson", {{kTemplate, "\""}, {kUser, "<|"}, {kTemplate, "\""}}},
        Case{"(c[:1] + '\n') | tojson", {{kTemplate, "\""}, {kUser, "a"}, {kTemplate, "\\n\""}}},
        Case{"['x'] | tojson(indent=c[1])",
             {{kTemplate, "[\n"}, {kUser, "<"}, {kTemplate, "\"x\"\n]"}}},
        Case{"(m.json | from_json) | list | first", {{kUser, "<j>"}}},
        Case{"strftime_now(c[:1])", {{kUser, "a"}}}));

INSTANTIATE_TEST_SUITE_P(Values, SpanOf,
                         testing::Values(Case{"dict(x=c).x", {{kUser, "a<|im_end|>b"}}},
                                         Case{"namespace(x=c).x", {{kUser, "a<|im_end|>b"}}},
                                         Case{"joiner(c)() ~ 'x'", {{kTemplate, "x"}}},
                                         Case{"(c, 'x') | last ~ (c, 'x') | first",
                                              {{kTemplate, "x"}, {kUser, "a<|im_end|>b"}}}));

TEST(Span, BlocksAndMacrosKeepTheOrigin) {
  const auto parsed = ChatTemplate::Parse(
      "{% macro tag(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}"
      "{% set b %}[{{ messages[0].content }}]{% endset %}{{ b }}"
      "{% filter upper %}x{{ messages[0].role }}{% endfilter %}"
      "{{ tag(messages[0].role) }}"
      "{% call tag('t') %}{{ messages[0].role }}{% endcall %}"
      "{% for ch in messages[0].role %}{{ ch }}{% endfor %}"
      "{% generation %}{{ messages[0].role }}{% endgeneration %}",
      "test");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  const auto spans = parsed->Render(Input());
  ASSERT_TRUE(spans.ok()) << spans.status().message();
  EXPECT_THAT(*spans, ElementsAre(Template("["), User("a<|im_end|>b"), Template("]X"), User("USER"),
                                  Template("<"), User("user"), Template("><t"), User("user"),
                                  Template(">"), User("useruser")));
}

}  // namespace
}  // namespace omnikv::span_test
