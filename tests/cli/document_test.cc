// Documents with facts in them: the same everywhere, of the size asked for, each fact once and
// where it was asked for, its answer nowhere else, and bad requests refused in one sentence.
#include "eval/document.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <set>

#include "eval/questions.h"

namespace omnikv::document_test {
namespace {

using ::testing::HasSubstr;
using SV = std::string_view;

// A stand-in for a tokenizer: words, and marks that are not letters, count one each.
int64_t CountWords(SV text) {
  int64_t n = 0;
  bool in_word = false;
  for (const char c : text) {
    const bool letter = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (letter ? !in_word : c != ' ') ++n;
    in_word = letter;
  }
  return n;
}

// Counts the whole as less than the sum of its parts, as tokenizers that mark a text's begin do.
int64_t CountWithBegin(SV text) {
  return CountWords(text) + 1;
}

DocumentSpec Spec(uint64_t seed, int64_t tokens) {
  return {.seed = seed,
          .target_tokens = tokens,
          .count_tokens = CountWords,
          .depths = {0.1, 0.35, 0.6, 0.9},
          .kinds = {"passkey", "magic", "best", "person"}};
}

Document Make(const DocumentSpec& spec) {
  Result<Document> doc = MakeDocument(spec);
  EXPECT_TRUE(doc.ok()) << doc.status().message();
  return doc.ok() ? *doc : Document{};
}

size_t Occurrences(SV text, SV part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != SV::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

std::string Without(std::string text, const std::vector<Needle>& needles) {
  for (const Needle& needle : needles) {
    const size_t at = text.find(needle.sentence);
    EXPECT_NE(at, std::string::npos) << needle.sentence;
    if (at != std::string::npos) text.erase(at, needle.sentence.size());
  }
  return text;
}

std::vector<std::string> Sentences(SV text) {
  std::vector<std::string> out(1);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') {
      if (!out.back().empty()) out.emplace_back();
      continue;
    }
    out.back() += text[i];
    const bool quote = text[i] == '"';
    const char mark = quote && i > 0 ? text[i - 1] : text[i];
    if (mark != '.' && mark != '!' && mark != '?') continue;
    if (i + 2 >= text.size() || text[i + 1] != ' ') continue;
    const char next = text[i + 2];
    if (next != '"' && std::isupper(static_cast<unsigned char>(next)) == 0) continue;
    out.emplace_back();
    ++i;
  }
  if (out.back().empty()) out.pop_back();
  return out;
}

uint64_t Fnv1a(SV text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return h;
}

TEST(Document, IsTheSameEverywhere) {
  const Document doc = Make(Spec(7, 4000));
  EXPECT_EQ(doc.text, Make(Spec(7, 4000)).text);
  EXPECT_NE(doc.text, Make(Spec(8, 4000)).text);
  // Whoever changes words or templates changes this, and the shipped quickstart document with it.
  EXPECT_EQ(Fnv1a(doc.text), 0xefe3246b5ede4f59u) << std::hex << Fnv1a(doc.text);
}

TEST(Document, HasTheSizeAskedFor) {
  for (const int64_t tokens : {500, 2000, 8000, 24000, 30000}) {
    for (const auto count : {CountWords, CountWithBegin}) {
      DocumentSpec spec = Spec(static_cast<uint64_t>(tokens), tokens);
      spec.count_tokens = count;
      const auto size = static_cast<double>(count(Make(spec).text));
      EXPECT_NEAR(size, static_cast<double>(tokens), 0.01 * static_cast<double>(tokens));
    }
  }
}

TEST(Document, PutsNeedlesAtTheirDepths) {
  for (const int64_t tokens : {1000, 4000, 24000}) {
    DocumentSpec spec = Spec(3, tokens);
    spec.depths = {0.9, 0.25, 0.005, 0.5, 0.501, 0.0, 1.0};  // in any order
    const Document doc = Make(spec);
    const auto prose = static_cast<double>(CountWords(Without(doc.text, doc.needles)));
    ASSERT_EQ(doc.needles.size(), spec.depths.size());
    for (size_t i = 0; i < spec.depths.size(); ++i) {
      EXPECT_EQ(doc.needles[i].depth, spec.depths[i]);
      std::vector<Needle> earlier;
      for (const Needle& n : doc.needles) {
        if (n.depth < spec.depths[i]) earlier.push_back(n);
      }
      const std::string before = doc.text.substr(0, doc.text.find(doc.needles[i].sentence));
      const auto at = static_cast<double>(CountWords(Without(before, earlier)));
      EXPECT_NEAR(at / prose, spec.depths[i], 0.005) << doc.needles[i].sentence;
    }
    EXPECT_TRUE(doc.text.starts_with(doc.needles[5].sentence));
    EXPECT_TRUE(doc.text.ends_with(doc.needles[6].sentence));
  }
}

TEST(Document, TellsEachFactOnceAndItsAnswerNowhereElse) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    DocumentSpec spec = Spec(seed, 6000);
    spec.depths.assign(12, 0);
    for (size_t i = 0; i < 12; ++i) spec.depths[i] = static_cast<double>(i) / 11;
    const Document doc = Make(spec);
    const std::string prose = Without(doc.text, doc.needles);
    std::set<std::string> values;
    for (const Needle& needle : doc.needles) {
      EXPECT_EQ(Occurrences(doc.text, needle.sentence), 1u) << needle.sentence;
      EXPECT_EQ(Occurrences(prose, needle.value), 0u) << needle.value;
      EXPECT_EQ(Occurrences(needle.question, needle.value), 0u) << needle.question;
      EXPECT_TRUE(IsAnswered(needle, needle.answer)) << needle.answer;
      for (const Needle& other : doc.needles) {
        if (&other == &needle) continue;
        EXPECT_EQ(Occurrences(other.sentence, needle.value), 0u) << other.sentence;
        EXPECT_FALSE(IsAnswered(needle, other.answer)) << other.answer;
      }
      values.insert(needle.value);
    }
    EXPECT_EQ(values.size(), doc.needles.size());
    EXPECT_TRUE(
        std::none_of(prose.begin(), prose.end(), [](char c) { return c >= '0' && c <= '9'; }));
  }
}

// No prose mentions a subject of any needle, even of one that another document has.
TEST(Document, ProseNamesNoSubject) {
  std::set<std::string> subjects;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    DocumentSpec spec = Spec(seed, 2000);
    spec.kinds = {"person"};
    for (const Needle& needle : Make(spec).needles) {
      subjects.insert(needle.value);
      subjects.insert(needle.sentence.substr(0, needle.sentence.find(' ')));
    }
  }
  EXPECT_GT(subjects.size(), 70u);
  DocumentSpec plain = Spec(1, 60000);
  plain.depths.clear();
  const Document doc = Make(plain);
  EXPECT_TRUE(doc.needles.empty());
  for (const std::string& subject : subjects) {
    EXPECT_FALSE(IsAnswered({.value = subject}, doc.text)) << subject;
  }
}

TEST(Document, SeldomRepeatsASentence) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    DocumentSpec spec = Spec(seed, 24000);
    const std::vector<std::string> all = Sentences(Make(spec).text);
    const std::set<std::string> distinct(all.begin(), all.end());
    EXPECT_GT(all.size(), 1000u);
    const double share = static_cast<double>(distinct.size()) / static_cast<double>(all.size());
    EXPECT_GE(share, 0.99) << all.size() << " sentences";
    RecordProperty("sentences", static_cast<int>(all.size()));
    RecordProperty("distinct", static_cast<int>(distinct.size()));
  }
}

// Long enough for every template to be filled in: no slot is left over, and articles are right.
TEST(Document, ReadsAsText) {
  DocumentSpec spec = Spec(5, 150000);
  spec.depths.clear();
  const std::string text = Make(spec).text;
  for (const SV bad : {"{", "}", "  ", " \n", "\n\n\n", "..", " .", " ,", " a a ", " the the "}) {
    EXPECT_EQ(Occurrences(text, bad), 0u) << "'" << bad << "'";
  }
  for (size_t at = text.find(" a "); at != std::string::npos; at = text.find(" a ", at + 1)) {
    EXPECT_EQ(SV("aeiou").find(text[at + 3]), SV::npos) << text.substr(at, 30);
  }
  for (const std::string& sentence : Sentences(text)) {
    const char first = sentence[sentence[0] == '"' ? 1 : 0];
    EXPECT_TRUE(std::isupper(static_cast<unsigned char>(first))) << sentence;
    EXPECT_EQ(Occurrences(sentence, "\"") % 2, 0u) << sentence;
  }
}

TEST(Document, MessageIsPrefaceTextAndQuestion) {
  DocumentSpec spec = Spec(1, 1000);
  const Document mixed = Make(spec);
  EXPECT_EQ(mixed.preface, "Read the text below and answer the question.\n\n");
  for (size_t i = 0; i < mixed.needles.size(); ++i) {
    EXPECT_EQ(UserMessage(mixed, i),
              mixed.preface + mixed.text + "\n\n" + mixed.needles[i].question);
  }
  spec.kinds = {"magic"};
  EXPECT_THAT(Make(spec).preface, HasSubstr("special magic numbers are hidden"));
  spec.kinds = {"passkey"};
  EXPECT_THAT(Make(spec).preface, HasSubstr("an important info hidden"));
}

TEST(Document, JudgesReplies) {
  const Needle number{.value = "713045"};
  EXPECT_TRUE(IsAnswered(number, "713045"));
  EXPECT_TRUE(IsAnswered(number, "I think it was 713045."));
  EXPECT_TRUE(IsAnswered(number, "Not 7130451, but 713045"));
  EXPECT_FALSE(IsAnswered(number, "7130451"));
  EXPECT_FALSE(IsAnswered(number, "9713045."));
  EXPECT_FALSE(IsAnswered(number, "71304"));
  EXPECT_FALSE(IsAnswered(number, ""));
  const Needle city{.value = "Rome"};
  EXPECT_TRUE(IsAnswered(city, "Alice lives in Rome."));
  EXPECT_FALSE(IsAnswered(city, "Alice lives in Romeo's house."));
}

std::string Refusal(const DocumentSpec& spec) {
  const Result<Document> doc = MakeDocument(spec);
  EXPECT_FALSE(doc.ok());
  EXPECT_EQ(doc.status().code(), StatusCode::kInvalidArgument);
  return doc.status().message();
}

TEST(Document, RefusesBadSpecs) {
  DocumentSpec spec = Spec(1, 4000);
  spec.depths = {0.5, 1.25};
  EXPECT_EQ(Refusal(spec), "depth is 1.25, expected 0 to 1");
  spec.depths = {-0.5};
  EXPECT_EQ(Refusal(spec), "depth is -0.5, expected 0 to 1");
  spec.depths = {std::numeric_limits<double>::quiet_NaN()};
  EXPECT_EQ(Refusal(spec), "depth is nan, expected 0 to 1");

  spec = Spec(1, 4000);
  spec.kinds = {"magic", "pasky"};
  EXPECT_EQ(Refusal(spec), "kind is 'pasky', expected one of passkey, magic, uuid, best, person");
  spec.kinds = {};
  EXPECT_EQ(Refusal(spec),
            "no kinds are given for 4 depths, expected some of passkey, magic, uuid, best, person");
  spec.kinds = {"best"};
  spec.depths.assign(16, 0.5);
  EXPECT_EQ(Refusal(spec), "16 needles of kind 'best' are asked for, expected at most 15");
  spec.kinds = {"magic", "person"};
  spec.depths.assign(60, 0.5);
  EXPECT_EQ(Refusal(spec), "60 needles about cities are asked for, expected at most 44");

  spec = Spec(1, 200);
  EXPECT_THAT(Refusal(spec),
              HasSubstr("a document of 200 tokens is asked for, expected at least 3"));
  spec.target_tokens = -1;
  EXPECT_THAT(Refusal(spec),
              HasSubstr("a document of -1 tokens is asked for, expected at least 3"));
}

TEST(Questions, OfADocumentAreItsNeedles) {
  const Document doc = Make(Spec(1, 4000));
  const std::vector<Question> questions = QuestionsOf(doc);
  ASSERT_EQ(questions.size(), doc.needles.size());
  for (size_t i = 0; i < questions.size(); ++i) {
    EXPECT_EQ(questions[i].message, UserMessage(doc, i));
    EXPECT_EQ(questions[i].kind, doc.needles[i].kind);
    EXPECT_EQ(questions[i].depth, doc.needles[i].depth);
    EXPECT_EQ(questions[i].value, doc.needles[i].value);
  }
}

TEST(Questions, TasksOfAFile) {
  const auto tasks =
      ParseTasks("tasks.jsonl",
                 "{\"prompt\": \"a\\n\\nWhich?\", \"answer\": \"The value is \\\"x\\\".\"}\n"
                 "\n"
                 "{\"prompt\": \"b\", \"answer\": \"It is 12.\", \"value\": \"12\", \"kind\": "
                 "\"sum\", \"depth\": 0.25}");
  ASSERT_TRUE(tasks.ok()) << tasks.status().message();
  ASSERT_EQ(tasks->size(), 2u);
  const Question& first = tasks->front();
  EXPECT_EQ(first.message, "a\n\nWhich?");
  EXPECT_EQ(first.question, "Which?");
  EXPECT_EQ(first.kind, "task");
  EXPECT_LT(first.depth, 0);
  EXPECT_TRUE(IsAnswered(first.value, "The value is \"x\"."));
  EXPECT_FALSE(IsAnswered(first.value, "The value is \"xy\"."));
  const Question& second = tasks->back();
  EXPECT_EQ(second.kind, "sum");
  EXPECT_EQ(second.depth, 0.25);
  EXPECT_TRUE(IsAnswered(second.value, "12, I think"));
  EXPECT_FALSE(IsAnswered(second.value, "It is 123."));
}

TEST(Questions, WhatIsNoTaskIsNamedByItsLine) {
  const auto refusal = [](SV lines) {
    const auto tasks = ParseTasks("t", lines);
    EXPECT_FALSE(tasks.ok());
    return tasks.ok() ? std::string() : tasks.status().message();
  };
  EXPECT_EQ(refusal(""), "t has no tasks, expected a JSON object with prompt and answer a line");
  const std::string good = "{\"prompt\": \"a\", \"answer\": \"b\"}\n";
  EXPECT_THAT(refusal(good + "{"), HasSubstr("t: line 2 is not JSON"));
  for (const char* const line : {"[]", "{\"prompt\": \"a\"}", "{\"prompt\": 1, \"answer\": \"b\"}",
                                 "{\"prompt\": \"\", \"answer\": \"b\"}"}) {
    EXPECT_EQ(refusal(good + line),
              "t: line 2 is no task, expected an object with the texts `prompt` and `answer`");
  }
  EXPECT_EQ(refusal("{\"prompt\": \"a\", \"answer\": \"b\", \"depth\": 2}"),
            "t: line 1 has the depth '2', expected a number from 0 to 1");
}

TEST(Questions, LossesAreCountedWhereTheFirstPolicyIsRight) {
  Losses losses;
  const Question magic{.kind = "magic", .depth = 0.1};
  const Question key{.kind = "passkey", .depth = 0.9};
  losses.Add(magic, true, true);
  losses.Add(magic, true, false);
  losses.Add(magic, false, false);
  losses.Add(key, true, true);
  losses.Add(key, false, true);
  EXPECT_EQ(losses.asked(), 5);
  EXPECT_EQ(losses.right(), 3);
  EXPECT_EQ(losses.all().asked, 3);
  EXPECT_EQ(losses.all().lost, 1);
  EXPECT_EQ(losses.by_kind().at("magic").asked, 2);
  EXPECT_EQ(losses.by_depth().at(0.9).lost, 0);
  EXPECT_EQ(losses.Where(), "magic 1 of 2, at 10 % 1 of 2");
}

}  // namespace
}  // namespace omnikv::document_test
