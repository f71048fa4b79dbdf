// Long documents with facts hidden in them, and a question with its answer for each fact: what the
// quickstart and `omnikv eval` give a model to read. The prose around the facts is our own
// (document_prose.h), so a document may be shipped, printed and made anywhere.
//
// The facts ("needles") are put in the words that the default model was trained on. They are asked
// one at a time:
//   passkey  "The pass key is 48213. Remember it. 48213 is the pass key."
//            "What is the pass key?" -> "The pass key is 48213." A document has at most four: then
//            come a secret number, an access code and a password.
//   magic    "One of the special magic numbers for Paris is: 713045."
//   uuid     the same with 36 characters: "4f6a1b2c-90de-43aa-8c11-5d2e7f00b6a9", an answer that is
//            longer than a small budget
//   best     "The best thing to do in Paris is walk along the river at sunset."
//   person   "Alice lives in Paris."
// No two needles of a document share a city, a person, a thing to do or a number, and the prose
// holds no digit and none of those cities and people, so an answer stands nowhere else.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"

namespace omnikv {

struct Needle {
  std::string kind;      // of NeedleKinds()
  double depth = 0;      // as asked for: the share of the prose that stands before it, 0..1
  std::string sentence;  // as it stands in the text, once
  std::string question;
  std::string answer;  // the whole sentence that the default model answers with
  std::string value;   // the part of the answer that cannot be known without the sentence
};

struct Document {
  std::string preface;          // of the user message: says what to look for
  std::string text;             // paragraphs with blank lines between them, needles included
  std::vector<Needle> needles;  // in the order of DocumentSpec::depths
};

struct DocumentSpec {
  uint64_t seed = 0;
  int64_t target_tokens = 0;  // of Document::text, at least 256 beside the needles
  std::function<int64_t(std::string_view)> count_tokens;  // REQUIRES not null; no special tokens
  std::vector<double> depths;      // one needle each, in any order; empty: plain prose
  std::vector<std::string> kinds;  // needle i is of kinds[i % kinds.size()]
};

std::vector<std::string> NeedleKinds();

// The same spec gives the same document on every platform. Its size and the needles' depths are
// within a few tokens of what was asked for. kInvalidArgument: a depth
// outside 0..1, an unknown kind, more needles of a kind than it has, a target that is too small.
Result<Document> MakeDocument(const DocumentSpec& spec);

// What the user says to be asked about needle `needle`: preface, text and question. Messages about
// one document differ in the question only, so they share all K/V but the question's.
// REQUIRES needle < doc.needles.size().
std::string UserMessage(const Document& doc, size_t needle);

// Whether `reply` tells the needle's value, as a word or words of its own ("7130451" does not tell
// 713045). Lenient about the sentence around it, so that it can judge any model.
bool IsAnswered(const Needle& needle, std::string_view reply);
// The same of a value. REQUIRES one that is not empty.
bool IsAnswered(std::string_view value, std::string_view reply);

}  // namespace omnikv
