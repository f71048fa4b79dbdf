// Nothing in a template is free: whatever looks at text or at values pays for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "text/jinja/builtins.h"
#include "text/jinja/chat_template.h"

namespace omnikv::work_test {
namespace {

using jinja::Args;
using jinja::Runtime;
using jinja::Str;
using jinja::Value;
using testing::HasSubstr;

constexpr size_t kBytes = 50'000;
constexpr size_t kItems = 5'000;
constexpr int64_t kPlenty = int64_t{1} << 40;

// The work that fn takes, or nothing when the template's author would get an error.
std::optional<size_t> WorkOf(const std::function<void(Runtime&)>& fn) {
  Runtime rt(jinja::Budget(kPlenty, kPlenty), 1000, std::tm{});
  try {
    fn(rt);
  } catch (const jinja::Error& e) {
    EXPECT_NE(e.code, StatusCode::kResourceExhausted) << e.message;
    return std::nullopt;
  }
  return static_cast<size_t>(kPlenty) - rt.budget.work();
}

// A large value of each kind that can be large, and how much a look at all of it takes at least.
struct Large {
  const char* kind;
  std::function<Value(Runtime&)> make;
  size_t least;
};

const std::vector<Large>& Larges() {
  static const std::vector<Large> larges = {
      {"a string", [](Runtime& rt) { return rt.Text(std::string(kBytes, 'a')); }, kBytes},
      {"digits", [](Runtime& rt) { return rt.Text(std::string(kBytes, '0')); }, kBytes},
      {"JSON", [](Runtime& rt) { return rt.Text(std::string(kBytes, ' ') + "1"); }, kBytes},
      {"a list", [](Runtime& rt) { return rt.List(std::vector<Value>(kItems, Value(int64_t{1}))); },
       4 * kItems},
      {"a list of strings",
       [](Runtime& rt) { return rt.List(std::vector<Value>(kItems, Value(Str("a")))); },
       4 * kItems},
      {"a list of dicts",
       [](Runtime& rt) {
         jinja::DictBuilder dict(rt);
         dict.Set(Value(Str("a")), Value(int64_t{1}));
         return rt.List(std::vector<Value>(kItems, std::move(dict).Build()));
       },
       4 * kItems},
      {"a tuple",
       [](Runtime& rt) { return rt.Tuple(std::vector<Value>(kItems, Value(int64_t{1}))); },
       4 * kItems},
      {"a dict",
       [](Runtime& rt) {
         jinja::DictBuilder dict(rt);
         for (size_t i = 0; i < kItems; ++i) {
           dict.Set(rt.Text(std::to_string(i)), Value(int64_t{1}));
         }
         return std::move(dict).Build();
       },
       4 * kItems},
  };
  return larges;
}

std::vector<Args> SomeArgs() {
  const auto text = [](const char* t) { return Value(Str(t)); };
  const auto number = [](int64_t i) { return Value(i); };
  return {{},
          {{text("a")}, {}},
          {{number(1)}, {}},
          {{text("a"), text("b")}, {}},
          {{text("%Y")}, {}},
          {{text("lower")}, {}},
          {{text("a"), text("defined")}, {}},
          {{}, {{Str("attribute"), text("a")}}}};
}

// What looks at most at the kind of a value.
const std::set<std::string_view> kFree = {"boolean", "callable", "d",      "default",  "defined",
                                          "escaped", "false",    "float",  "integer",  "iterable",
                                          "mapping", "none",     "number", "sequence", "string",
                                          "true",    "undefined"};

void Sweep(jinja::BuiltinTable table, bool is_test, bool takes_self) {
  for (const jinja::NamedBuiltin& entry : table) {
    const bool free = entry.builtin.reads() == jinja::Builtin::Reads::kKind;
    EXPECT_TRUE(!free || kFree.contains(entry.name)) << entry.name << " says that it reads nothing";
    if (free) continue;
    int worked = 0;
    for (const Large& large : Larges()) {
      for (const Args& args : SomeArgs()) {
        std::optional<size_t> made;
        const auto work = WorkOf([&](Runtime& rt) {
          const Value value = large.make(rt);
          made = static_cast<size_t>(kPlenty) - rt.budget.work();
          if (takes_self) {
            entry.builtin(rt, value, args);
          } else {
            Args with_value = args;
            with_value.positional.insert(with_value.positional.begin(), value);
            entry.builtin(rt, Value(), with_value);
          }
        });
        if (!work) continue;
        ++worked;
        EXPECT_GE(*work - *made, large.least) << entry.name << " of " << large.kind;
      }
    }
    // Those that take numbers only, or that only fail, have nothing large to look at.
    static const std::set<std::string_view> kNumbers = {
        "abs",         "round",       "odd",    "even",
        "divisibleby", "range",       "joiner", "raise_exception",
        "sum",         "format",      "join",   "<",
        "<=",          ">",           ">=",     "ge",
        "gt",          "greaterthan", "le",     "lessthan",
        "lt",          "in",          "index",  "namespace",
        "partition",   "rpartition",  "rindex"};
    EXPECT_TRUE(worked > 0 || kNumbers.contains(entry.name))
        << entry.name << (is_test ? " (a test)" : "") << " took none of the arguments";
  }
}

TEST(Work, EveryFilterPays) {
  Sweep(jinja::ScalarFilters(), false, true);
  Sweep(jinja::SequenceFilters(), false, true);
}

TEST(Work, EveryTestPays) {
  Sweep(jinja::Tests(), true, true);
}

TEST(Work, EveryFunctionPays) {
  Sweep(jinja::Functions(), false, false);
}

TEST(Work, EveryMethodPays) {
  const auto methods = jinja::Methods();
  const std::vector<std::pair<size_t, Value (*)(Runtime&)>> selves = {
      {0, [](Runtime& rt) { return rt.Text(std::string(kBytes, 'a')); }},
      {1, [](Runtime& rt) { return rt.List(std::vector<Value>(kItems, Value(int64_t{1}))); }},
      {2, [](Runtime& rt) { return rt.Tuple(std::vector<Value>(kItems, Value(int64_t{1}))); }}};
  for (size_t kind = 0; kind < methods.size(); ++kind) {
    for (const jinja::NamedBuiltin& entry : methods[kind]) {
      EXPECT_EQ(entry.builtin.reads(), jinja::Builtin::Reads::kAll) << entry.name;
      int worked = 0;
      for (const Args& args : SomeArgs()) {
        size_t made = 0;
        const auto work = WorkOf([&](Runtime& rt) {
          const Value value = kind == 3 ? Larges().back().make(rt) : selves[kind].second(rt);
          made = static_cast<size_t>(kPlenty) - rt.budget.work();
          entry.builtin(rt, value, args);
        });
        if (!work) continue;
        ++worked;
        EXPECT_GE(*work - made, kind == 0 ? kBytes : 4 * kItems) << entry.name;
      }
      EXPECT_GT(worked, 0) << entry.name << " took none of the arguments";
    }
  }
}

// Expressions over large values: each takes work in proportion to what it touches, so that a loop
// of them is refused.
TEST(Work, OperatorsPay) {
  const std::string setup =
      "{% set s = 'a' * K %}{% set t = 'a' * (K - 1) ~ 'b' %}{% set d = {s: 1} %}"
      "{% set l = range(K // 50) | list %}{% set m = range(K // 50) | list %}"
      "{% set ns = namespace() %}{% macro f() %}{{ kwargs }}{{ varargs }}{% endmacro %}";
  const auto smallest = [&](const std::string& expression, int64_t k) {
    const auto source = "{% set K = " + std::to_string(k) + " %}" + setup + "{% if (" + expression +
                        ") %}{% endif %}";
    const auto parsed = ChatTemplate::Parse(source, "t");
    EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    ChatInput input;
    input.messages = nlohmann::ordered_json::array();
    int64_t low = 0;  // refused
    int64_t high = int64_t{1} << 30;
    EXPECT_TRUE(parsed->Render(input, {.max_work = high}).ok()) << expression;
    while (high - low > high / 256) {
      const int64_t middle = low + (high - low) / 2;
      (parsed->Render(input, {.max_work = middle}).ok() ? high : low) = middle;
    }
    return high;
  };
  const int64_t base = smallest("1", kBytes);
  for (const char* expression : {"s == t",
                                 "s != t",
                                 "s < t",
                                 "s >= t",
                                 "t in s",
                                 "t not in s",
                                 "s ~ t",
                                 "s + t",
                                 "s * 2",
                                 "s % ()",
                                 "s[-1]",
                                 "s[::2]",
                                 "s[7:]",
                                 "d[s]",
                                 "s in d",
                                 "d.get(t)",
                                 "{t: 1}",
                                 "l == m",
                                 "l < m",
                                 "l + m",
                                 "l * 2",
                                 "l[1:]",
                                 "-1 in l",
                                 "s | length > 1",
                                 "l ~ ''",
                                 "s is eq t",
                                 "f(*l)",
                                 "f(s, a=t)",
                                 "dict(**{s: 1})",
                                 "s.startswith(s)",
                                 "s.endswith((t, s))",
                                 "s is sameas t",
                                 "(s ~ '1') | int",
                                 "s.rfind('b')",
                                 "s.strip('a')",
                                 "s.zfill(1)"}) {
    EXPECT_GT(smallest(expression, kBytes) - base, static_cast<int64_t>(kBytes) / 50) << expression;
  }
}

// The defaults: a loop of anything over 4 MB ends.
TEST(Work, LoopsOverLargeTextAreRefused) {
  for (const char* expression :
       {"s == t", "s < t", "s | length", "s.startswith(s)", "s in d", "s.isascii()",
        "s | truncate(5)", "s.rstrip('a')", "s is lower", "s.startswith('b', 7)", "s | wordcount",
        "s | title", "s.splitlines()", "s | last", "s.rpartition('b')", "s is sameas t"}) {
    const auto parsed = ChatTemplate::Parse(
        std::string("{% set s = 'a' * 4000000 %}{% set t = 'a' * 3999999 ~ 'b' %}{% set d = {s: 1} "
                    "%}{% for i in range(99999) %}{% for j in range(400) %}{% if ") +
            expression + " %}{% endif %}{% endfor %}{% endfor %}",
        "t");
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    ChatInput input;
    input.messages = nlohmann::ordered_json::array();
    const Status status = parsed->Render(input).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << expression << status.message();
    EXPECT_THAT(status.message(), HasSubstr("limit")) << expression;
  }
}

TEST(Work, LongNamesAndManyParametersAreRefused) {
  const auto message = [](const std::string& source) {
    return ChatTemplate::Parse(source, "t").status().message();
  };
  EXPECT_THAT(message("{{ " + std::string(256, 'a') + " }}"), HasSubstr("a name has 256 bytes"));
  std::string macro = "{% macro m(";
  for (int i = 0; i < 256; ++i) macro.append("a").append(std::to_string(i)).append(",");
  EXPECT_THAT(message(macro + "b) %}{% endmacro %}"), HasSubstr("more than 255 parameters"));
}

}  // namespace
}  // namespace omnikv::work_test
