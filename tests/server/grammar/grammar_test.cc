// Masks of grammars: random walks over the allowed tokens give answers that fit.
#include "server/grammar/grammar.h"

#include <gmock/gmock.h>

#include <functional>
#include <map>
#include <regex>
#include <set>
#include <thread>

#include "random_schema.h"
#include "text/tokenizer/byte_level.h"
#include "walker.h"

namespace omnikv::server::grammar_test {
namespace {

using ::testing::HasSubstr;

// Whether a text is JSON but for numbers that no double holds.
bool IsJsonButForNumbers(const std::string& text) {
  try {
    return !nlohmann::json::parse(text).is_discarded();
  } catch (const nlohmann::json::exception& e) {
    return e.id == 406;
  }
}

// Walks, and values of the schema written out, for so many random schemas.
void WalkSchemas(Walker& walker, int n, uint64_t seed) {
  RandomSchemas schemas(seed);
  std::mt19937_64 random(seed);
  double compile_us = 0, most_us = 0;
  int values = 0;
  for (int i = 0; i < n; ++i) {
    const Json schema = schemas.Root();
    const auto start = Clock::now();
    auto grammar = walker.Compile(JsonSchema{schema.dump()});
    const double took = Microseconds(start);
    ASSERT_TRUE(grammar.ok()) << schema.dump() << "\n" << grammar.status().message();
    compile_us += took;
    most_us = std::max(most_us, took);
    Matcher matcher(*grammar);
    // A tree ends by chance.
    const auto text = walker.Walk(matcher, random, 6000, /*in_haste=*/i % 2 == 1);
    ASSERT_TRUE(text.has_value()) << schema.dump() << "\n" << walker.LastText().substr(0, 2000);
    const Json value = Json::parse(*text, nullptr, false);
    ASSERT_FALSE(value.is_discarded()) << schema.dump() << "\n" << *text;
    ASSERT_EQ(Misfit(schema, value, schema), "") << schema.dump() << "\n" << *text;
    const Json fitting = schemas.Value(schema, schema);
    if (fitting.is_discarded()) continue;
    ++values;
    const std::string compact = fitting.dump();
    Matcher again(*grammar);
    ASSERT_TRUE(walker.Accepts(again, compact)) << schema.dump() << "\n" << compact;
  }
  fmt::print(
      "{}; {} schemas, compiled in {:.2f} ms on average, {:.1f} ms at most; {} values written\n",
      walker.Figures(), n, compile_us / 1000 / n, most_us / 1000, values);
}

TEST(Grammar, RandomSchemasFit) {
  Walker walker = Walker::Shipped({}, /*extra=*/5);
  WalkSchemas(walker, 1000, 1);
}

TEST(Grammar, RandomSchemasFitWithOtherTokenizers) {
  for (const auto& [name, end] : std::map<std::string, std::string>{{"llama2", "</s>"},
                                                                    {"gemma", "</s>"},
                                                                    {"qwen2", "<|end|>"},
                                                                    {"metaspace_first", "</s>"}}) {
    SCOPED_TRACE(name);
    Walker walker = Walker::File(name, end);
    WalkSchemas(walker, 100, 2);
  }
}

// Regular expressions, of schemas and alone, against the standard library's.
TEST(Grammar, RandomPatterns) {
  Walker walker = Walker::Shipped();
  std::mt19937_64 random(4);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  const std::function<std::string(int)> make = [&](int depth) -> std::string {
    static const char* const kUnits[] = {"a", "b", "[ab]", "[^a]", "\\d", "c", "[b-d]"};
    static const char* const kCounts[] = {"", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "{0,2}"};
    std::string text;
    for (int n = 1 + pick(3); n > 0; --n) {
      std::string unit = kUnits[pick(7)];
      if (depth > 0 && pick(2) == 0) {
        unit = fmt::format("({}{})", make(depth - 1),
                           pick(2) == 0 ? fmt::format("|{}", make(depth - 1)) : "");
      }
      text += unit + kCounts[pick(9)];
    }
    return text;
  };
  int fitting = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string pattern = make(2);
    SCOPED_TRACE(pattern);
    // Its backtracking takes minutes for some.
    const std::regex expected(pattern, std::regex::ECMAScript | std::regex_constants::__polynomial);
    const Constraint schema = JsonSchema{Json{{"type", "string"}, {"pattern", pattern}}.dump()};
    const Constraint alone = Regex{pattern};
    auto compiled = walker.Compile(schema);
    ASSERT_TRUE(compiled.ok()) << compiled.status().message();
    auto regex = walker.Compile(alone);
    ASSERT_TRUE(regex.ok()) << regex.status().message();
    for (int j = 0; j < 40; ++j) {
      std::string text;
      for (int n = pick(8); n > 0; --n) text += "abcd17"[pick(6)];
      const bool fits = std::regex_match(text, expected);
      fitting += fits ? 1 : 0;
      Matcher in_json(*compiled);
      ASSERT_EQ(walker.Accepts(in_json, fmt::format("\"{}\"", text)), fits) << text;
      Matcher plain(*regex);
      ASSERT_EQ(walker.Accepts(plain, text), fits) << text;
    }
  }
  EXPECT_GT(fitting, 1000);
}

TEST(Grammar, PatternsThatRepeatOften) {
  Walker walker = Walker::Shipped();
  for (const char* pattern : {"(a|b[a-z]){0,300}", "^[ab]{200,250}$", "a{3,150}(b+|a){0,200}"}) {
    SCOPED_TRACE(pattern);
    const JsonSchema schema{Json{{"type", "string"}, {"pattern", pattern}}.dump()};
    for (const size_t size : {2u, 100u, 220u, 251u, 301u}) {
      const std::string text(size, 'a');
      const bool fits = std::regex_match(text, std::regex(pattern));
      EXPECT_EQ(walker.Accepts(schema, fmt::format("\"{}\"", text)), fits) << size;
      EXPECT_EQ(walker.Accepts(Regex{pattern}, text), fits) << size;
    }
  }
}

TEST(Grammar, DatesThatClientsRead) {
  Walker walker = Walker::Shipped();
  for (const char* year : {"0001", "0010", "0099", "0100", "0999", "1000", "2024", "9999"}) {
    const std::string day = fmt::format("\"{}-02-28", year);
    EXPECT_TRUE(walker.Accepts(JsonSchema{R"({"type": "string", "format": "date"})"}, day + '"'));
    EXPECT_TRUE(walker.Accepts(JsonSchema{R"({"type": "string", "format": "date-time"})"},
                               day + "T23:59:59Z\""));
  }
  for (const char* bad : {"0000-02-28", "2024-02-30", "2024-00-01", "2024-13-01", "2024-01-00",
                          "2024-1-1", "02024-01-01"}) {
    EXPECT_FALSE(walker.Accepts(JsonSchema{R"({"type": "string", "format": "date"})"},
                                fmt::format("\"{}\"", bad)))
        << bad;
  }
}

TEST(Grammar, AnyObjectIsJson) {
  Walker walker = Walker::Shipped();
  std::mt19937_64 random(5);
  int ended = 0;
  for (int i = 0; i < 100; ++i) {
    Matcher matcher = walker.MatcherOf(JsonObject{});
    const auto text = walker.Walk(matcher, random, 400, /*in_haste=*/true);
    if (!text) continue;
    ++ended;
    // A number may be too large for a double, but then nothing else is wrong.
    nlohmann::json value = nlohmann::json::parse(*text, nullptr, false);
    if (value.is_discarded()) {
      EXPECT_TRUE(IsJsonButForNumbers(*text)) << *text;
    } else {
      EXPECT_TRUE(value.is_object()) << *text;
    }
  }
  EXPECT_GT(ended, 50);
  EXPECT_TRUE(walker.Accepts(JsonObject{},
                             R"({"a": [1, -2.5e3, true, null, {"b": {}}], "c": "\"\u00e9"})"));
  EXPECT_TRUE(walker.Accepts(JsonObject{}, R"({"a":[1,{}]})"));
  for (const char* bad : {"[]", " {}", "{} ", "{  }", R"({"a":  1})", R"({"a":"\ud800"})",
                          "{\"a\":\"\t\"}", "{\"a\":\"\x7f\xff\"}", "{\"a\":\"\xed\xa0\x80\"}"}) {
    EXPECT_FALSE(walker.Accepts(JsonObject{}, bad)) << bad;
  }
}

TEST(Grammar, AdditionalProperties) {
  Walker walker = Walker::Shipped();
  const JsonSchema schema{R"({"properties": {"name": {"type": "integer"}, "na": {"type": "null"}},
                              "required": ["name", "more"], "additionalProperties": {"type": "boolean"}})"};
  EXPECT_TRUE(walker.Accepts(schema, R"({"name": 1, "na": null, "more": true, "x": false})"));
  EXPECT_TRUE(
      walker.Accepts(schema, R"({"name": 1, "more": true, "nam": true, "names": true, "": true})"));
  EXPECT_TRUE(
      walker.Accepts(schema, R"({"name": 1, "more": true, "x\u0041": true, "name\n": false})"));
  EXPECT_FALSE(walker.Accepts(schema, R"({"name": 1})"));  // more is missing
  EXPECT_FALSE(walker.Accepts(schema, R"({"name": 1, "more": true, "na": true})"));  // not null
  EXPECT_FALSE(walker.Accepts(schema, R"({"name": 1, "more": true, "n\u0061": true})"));  // na, too
  EXPECT_FALSE(walker.Accepts(schema, R"({"name": 1, "more": true, "x": 1})"));
}

// xgrammar takes schemas for the same that differ in a property with the name of an annotation.
TEST(Grammar, PropertiesNamedLikeAnnotations) {
  Walker walker = Walker::Shipped();
  const JsonSchema schema{R"({"properties": {
      "a": {"properties": {"title": {"type": "integer"}}, "required": ["title"]},
      "b": {"properties": {"title": {"type": "string"}}, "required": ["title"]},
      "c": {"const": {"default": 1}}, "d": {"const": {"default": 2}}}, "required": ["a", "b"]})"};
  EXPECT_TRUE(walker.Accepts(
      schema, R"({"a":{"title":1},"b":{"title":"x"},"c":{"default":1},"d":{"default":2}})"));
  EXPECT_FALSE(walker.Accepts(schema, R"({"a":{"title":1},"b":{"title":1}})"));
  EXPECT_FALSE(walker.Accepts(schema, R"({"a":{"title":1},"b":{"title":"x"},"d":{"default":1}})"));
}

TEST(Grammar, Ebnf) {
  Walker walker = Walker::Shipped();
  const Ebnf grammar{"root ::= sum\nsum ::= n (\"+\" n)*\nn ::= [0-9]+ | \"(\" sum \")\""};
  EXPECT_TRUE(walker.Accepts(grammar, "1+(23+4)"));
  EXPECT_FALSE(walker.Accepts(grammar, "1+(23+4"));
  EXPECT_THAT(walker.Refused(Ebnf{"root ::= missing"}).message(),
              HasSubstr("the grammar cannot be used"));
  EXPECT_EQ(walker.Refused(Ebnf{"root ::= ("}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(walker.Refused(Ebnf{"other ::= \"a\""}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(walker.Refused(Ebnf{""}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(walker.Refused(Ebnf{fmt::format("root ::= {}", std::string(5000, '('))}).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(walker.Refused(Ebnf{std::string(70'000, ' ')}).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(walker.Refused(Regex{"(?=a)b"}).code(), StatusCode::kUnsupported);
  EXPECT_EQ(walker.Refused(Regex{"a)"}).code(), StatusCode::kInvalidArgument);
}

// A grammar without a way on gives the ends, and nothing hangs.
TEST(Grammar, DeadEndsEnd) {
  Walker walker = Walker::Shipped();
  Matcher matcher = walker.MatcherOf(Ebnf{"root ::= \"a\" root"});
  ASSERT_TRUE(matcher.Accept(*walker.tokenizer().TokenToId("a")));
  EXPECT_FALSE(matcher.Done());
  EXPECT_FALSE(matcher.Accept(walker.end()));
  // No character is none: after "a" nothing may come.
  Matcher stuck = walker.MatcherOf(Ebnf{"root ::= \"a\" [^\\x00-\\U0010ffff]"});
  const std::vector<int32_t> first = walker.Allowed(stuck);
  ASSERT_FALSE(first.empty());
  if (stuck.Accept(*walker.tokenizer().TokenToId("a"))) {
    const std::vector<int32_t> allowed = walker.Allowed(stuck);
    ASSERT_FALSE(allowed.empty());
    for (const int32_t token : allowed) EXPECT_TRUE(walker.IsEnd(token));
    EXPECT_TRUE(stuck.Accept(walker.end()));
    EXPECT_TRUE(stuck.Done());
    stuck.Rollback(1);
    EXPECT_FALSE(stuck.Accept(*walker.tokenizer().TokenToId("a")));
  }
}

TEST(Grammar, CallsOfTools) {
  Walker walker = Walker::Shipped();
  Calls calls{
      .forms = {
          {"<tool_call>{\"name\": \"add\", \"arguments\": ",
           R"({"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]})",
           "}</tool_call>"},
          {"<tool_call>{\"name\": \"now\", \"arguments\": ", R"({"properties": {}})",
           "}</tool_call>"}}};
  const std::string add = R"(<tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>)";
  const std::string now = R"(<tool_call>{"name": "now", "arguments": {}}</tool_call>)";
  EXPECT_TRUE(walker.Accepts(calls, add));
  EXPECT_TRUE(walker.Accepts(calls, now));
  EXPECT_FALSE(walker.Accepts(calls, add + now));
  EXPECT_FALSE(walker.Accepts(calls, R"(<tool_call>{"name": "add", "arguments": {}}</tool_call>)"));
  EXPECT_FALSE(walker.Accepts(calls, "Hello"));
  std::mt19937_64 random(6);
  for (int i = 0; i < 50; ++i) {
    Matcher matcher = walker.MatcherOf(calls);
    const auto text = walker.Walk(matcher, random);
    ASSERT_TRUE(text.has_value());
    EXPECT_TRUE(text->starts_with("<tool_call>{\"name\"") && text->ends_with("}</tool_call>"))
        << *text;
  }
  calls.several = true;
  calls.separator = "\n";
  EXPECT_TRUE(walker.Accepts(calls, add));
  EXPECT_TRUE(walker.Accepts(calls, add + "\n" + now + "\n" + add));
  EXPECT_FALSE(walker.Accepts(calls, add + now));
  calls.trigger = "<tool_call>";
  EXPECT_TRUE(walker.Accepts(calls, "Hello"));
  EXPECT_TRUE(walker.Accepts(calls, "Let me see. " + add + " and " + now));
  EXPECT_FALSE(walker.Accepts(calls, "<tool_call>no"));
  for (int i = 0; i < 20; ++i) {
    Matcher matcher = walker.MatcherOf(calls);
    walker.Walk(matcher, random, 100);  // no special tokens
  }
  calls.forms[0].prefix = "other";
  EXPECT_EQ(walker.Refused(calls).code(), StatusCode::kInvalidArgument);
  calls.forms.clear();
  EXPECT_EQ(walker.Refused(calls).code(), StatusCode::kInvalidArgument);
}

// Formats with special tokens: these come as tokens, never as letters.
TEST(Grammar, CallsWithSpecialTokens) {
  Walker walker = Walker::Shipped();
  walker.MayHaveSpecials();
  std::optional<int32_t> id;
  for (int32_t token = 0; token < walker.vocab() && !id; ++token) {
    if (walker.tokenizer().IsSpecial(token) && !walker.IsEnd(token)) id = token;
  }
  ASSERT_TRUE(id.has_value());
  const std::string special(walker.tokenizer().IdToToken(*id));
  Calls calls{.forms = {{special + "f", R"({"properties": {}})", ""}}};
  const auto accepts = [&](const std::string& before, const std::string& after) {
    Matcher matcher = walker.MatcherOf(calls);
    const auto tokens = walker.tokenizer().Encode(before, {.add_special = false});
    for (const int32_t token : *tokens) {
      if (!matcher.Accept(token)) return false;
    }
    return matcher.Accept(*id) && walker.Accepts(matcher, after);
  };
  EXPECT_TRUE(accepts("", "f{}"));
  EXPECT_FALSE(accepts("", "g{}"));
  {
    Matcher matcher = walker.MatcherOf(calls);
    EXPECT_EQ(walker.Allowed(matcher), std::vector<int32_t>{*id});
  }
  calls.trigger = special;
  EXPECT_TRUE(accepts("Hello ", "f{}"));
  EXPECT_TRUE(walker.Accepts(calls, "Hello"));
  std::mt19937_64 random(7);
  Matcher matcher = walker.MatcherOf(calls);
  for (int i = 0; i < 200; ++i) {
    const std::vector<int32_t> allowed = walker.Allowed(matcher);
    for (const int32_t token : allowed) {
      EXPECT_TRUE(!walker.tokenizer().IsSpecial(token) || walker.IsEnd(token) || token == *id);
    }
    int32_t token = allowed[random() % allowed.size()];
    if (walker.IsEnd(token)) break;
    ASSERT_TRUE(matcher.Accept(token));
  }
}

TEST(Grammar, CacheKeepsTheLastUsed) {
  GrammarOptions options;
  options.cached = 2;
  Walker walker = Walker::Shipped(options);
  const auto regex = [](const char* text) { return Regex{text}; };
  const auto first = *walker.Compile(regex("a"));
  EXPECT_EQ(*walker.Compile(regex("a")), first);
  EXPECT_TRUE(walker.Compile(regex("b")).ok());
  EXPECT_EQ(*walker.Compile(regex("a")), first);
  EXPECT_TRUE(walker.Compile(regex("c")).ok());  // b goes
  EXPECT_EQ(*walker.Compile(regex("a")), first);
  const GrammarStats stats = walker.engine().stats();
  EXPECT_EQ(stats.compiled, 3);
  EXPECT_EQ(stats.found, 3);
  EXPECT_EQ(stats.cached, 2u);
  EXPECT_GT(stats.cached_bytes, 0u);
  EXPECT_NE(*walker.Compile(JsonSchema{"{\"const\": \"a\"}"}), first);
}

TEST(Grammar, CompiledBytesAreLimited) {
  GrammarOptions options;
  options.compiled_bytes = 50'000;
  options.schema_bytes = 100;
  Walker walker = Walker::Shipped(options);
  EXPECT_THAT(walker.Refused(JsonSchema{R"({"type": "string", "maxLength": 1000})"}).message(),
              HasSubstr("the compiled grammar takes"));
  EXPECT_EQ(walker.Refused(JsonSchema{std::string(101, ' ')}).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(walker.engine().stats().refused, 2);
}

TEST(Grammar, ManyThreads) {
  Walker walker = Walker::Shipped();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string schema = Json{{"type", "string"}, {"maxLength", (t + i) % 7 + 1}}.dump();
        auto grammar = walker.engine().Compile(JsonSchema{schema});
        ASSERT_TRUE(grammar.ok());
        Matcher matcher(*grammar);
        std::vector<uint32_t> mask((static_cast<size_t>(walker.vocab()) + 31) / 32);
        matcher.FillMask(mask);
        EXPECT_TRUE(matcher.Accept(*walker.tokenizer().TokenToId("\"")));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Grammar, EnginesNeedEnds) {
  auto text = LoadTextAlone(kModel);
  ASSERT_TRUE(text.ok());
  const int32_t vocab = text->tokenizer->vocab_size();
  EXPECT_EQ(GrammarEngine::Create(*text->tokenizer, vocab, {}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(GrammarEngine::Create(*text->tokenizer, vocab, {vocab}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(GrammarEngine::Create(*text->tokenizer, vocab - 1, {0}).status().code(),
            StatusCode::kInvalidArgument);
}

// Each token of a text writes its bytes: joined, they are the text.
TEST(Grammar, BytesOfTokens) {
  const std::string text = "Hello  world, na\u00efve \U0001F600 \u4f60\n\t{\"a\": 1}";
  for (const auto& [name, bytes_first] : std::map<std::string, bool>{{"gpt2", false},
                                                                     {"llama3", false},
                                                                     {"qwen2", false},
                                                                     {"o200k", false},
                                                                     {"llama2", true},
                                                                     {"gemma", false}}) {
    SCOPED_TRACE(name);
    std::ifstream file(kTokenizers + name + ".tokenizer.json");
    const std::string json((std::istreambuf_iterator<char>(file)), {});
    auto tokenizer = Tokenizer::FromJson(json, name);
    ASSERT_TRUE(tokenizer.ok());
    const auto bytes = TokenTexts::Of(**tokenizer);
    ASSERT_TRUE(bytes.ok());
    std::string joined;
    const auto tokens = (*tokenizer)->Encode(text, {.add_special = false, .parse_special = false});
    for (const int32_t token : *tokens) {
      joined += (*bytes)[token];
    }
    EXPECT_EQ(joined, bytes_first ? fmt::format(" {}", text) : text);
  }
}

// As many tokens as large models have, made up: of all bytes, and of letters and signs.
Walker LargeVocabulary() {
  std::mt19937_64 random(8);
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string spelling;
    tok::AppendByteChars(std::string(1, static_cast<char>(byte)), &spelling);
    vocab.push_back({spelling, byte});
  }
  std::set<std::string> made;
  while (made.size() < 128'000) {
    std::string text(random() % 3 == 0 ? 1 : 0, ' ');
    for (uint64_t n = 2 + random() % 8; n > 0; --n) {
      text += "etaoinshrdlucmfwypvbgkjqxz0123456789ABCDEFGH\"{}[],:._-\\\n"[random() % 57];
    }
    std::string spelling;
    tok::AppendByteChars(text, &spelling);
    if (made.insert(spelling).second) vocab.push_back({spelling, vocab.size()});
  }
  const Json file = {{"version", "1.0"},
                     {"normalizer", nullptr},
                     {"post_processor", nullptr},
                     {"added_tokens",
                      {{{"id", vocab.size()},
                        {"content", "<end>"},
                        {"special", true},
                        {"single_word", false},
                        {"lstrip", false},
                        {"rstrip", false},
                        {"normalized", false}}}},
                     {"pre_tokenizer",
                      {{"type", "ByteLevel"},
                       {"add_prefix_space", false},
                       {"trim_offsets", true},
                       {"use_regex", true}}},
                     {"decoder",
                      {{"type", "ByteLevel"},
                       {"add_prefix_space", false},
                       {"trim_offsets", true},
                       {"use_regex", true}}},
                     {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
  auto tokenizer = Tokenizer::FromJson(file.dump(), "made up");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const int32_t end = *(*tokenizer)->TokenToId("<end>");
  return Walker(std::move(*tokenizer), {end});
}

// What masks and compilations take, printed.
void PrintFigures(Walker walker) {
  const std::vector<std::pair<std::string, Constraint>> cases = {
      {"any object", JsonObject{}},
      {"free string",
       JsonSchema{
           R"({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})"}},
      {"string of 1000",
       JsonSchema{
           R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 1000}}, "required": ["a"]})"}},
      {"string of 10",
       JsonSchema{
           R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 10}}, "required": ["a"]})"}},
      {"pattern", JsonSchema{R"({"type": "string", "pattern": "[a-z]{3,9}@[a-z]+"})"}},
      {"integer", JsonSchema{R"({"type": "integer", "minimum": -5, "maximum": 123456})"}},
      {"enum", JsonSchema{R"({"enum": ["red", "green", "blue"]})"}},
      {"longest string", JsonSchema{R"({"type": "string", "maxLength": 100000})"}},
      {"at least so long", JsonSchema{R"({"type": "string", "minLength": 50000})"}},
      {"1000 integers",
       JsonSchema{R"({"type": "array", "items": {"type": "integer"}, "maxItems": 1000})"}},
      {"1000 strings",
       JsonSchema{R"({"type": "array", "items": {"type": "string"}, "maxItems": 1000})"}},
      {"1000 of any", JsonSchema{R"({"type": "array", "maxItems": 1000})"}},
      {"1000 of two",
       JsonSchema{
           R"({"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 100}, {"type": "null"}]}, "maxItems": 1000})"}},
      {"1000 objects",
       JsonSchema{
           R"({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}, "maxItems": 1000})"}},
      {"map of 1000",
       JsonSchema{
           R"({"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1000})"}},
      {"string of 64", JsonSchema{R"({"type": "string", "maxLength": 64})"}},
      {"repeated pattern", JsonSchema{R"({"type": "string", "pattern": "(a|b[a-z]){0,300}"})"}},
      {"grammar", Ebnf{R"(root ::= ("a" | "b" [a-z]){0,300})"}},
      {"regex", Regex{R"((a|b[a-z]){0,300})"}}};
  for (const auto& [name, constraint] : cases) {
    auto start = Clock::now();
    auto grammar = walker.Compile(constraint);
    ASSERT_TRUE(grammar.ok()) << name << grammar.status().message();
    const double compile_us = Microseconds(start);
    std::mt19937_64 random(3);
    walker.ResetFigures();
    for (int i = 0; i < 5; ++i) {
      Matcher matcher(*grammar);
      walker.Walk(matcher, random, 60);
    }
    fmt::print("{}: compiled in {:.1f} ms, {} bytes; {}\n", name, compile_us / 1000,
               (*grammar)->bytes(), walker.Figures());
  }
}

TEST(Grammar, Figures) {
  PrintFigures(Walker::Shipped());
}
// Takes a minute: --gtest_also_run_disabled_tests.
TEST(Grammar, DISABLED_FiguresOfALargeVocabulary) {
  PrintFigures(LargeVocabulary());
}

}  // namespace
}  // namespace omnikv::server::grammar_test
