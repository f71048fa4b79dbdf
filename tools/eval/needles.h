// Documents with facts for a model, and what it answers under a policy when it is asked about them.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/document.h"
#include "eval/questions.h"
#include "omnikv/engine.h"

namespace omnikv::tools {

struct Answer {
  std::string text;
  bool right = false;
};

struct DocumentResult {
  std::vector<Answer> answers;  // as the questions
  int64_t prompt_tokens = 0;    // of the first question's message
  SessionStats stats;           // prefill of the whole document, decode of the last answer
  double held_fraction = 0;     // at the end of that prefill, as read_fraction
  double read_fraction = 0;
  double decode_ms = 0;  // a token, over all answers
};

// A document of spec.target_tokens, counted by what `encode` makes of a text, or by the tokenizer
// of the engine's model. As `encode`.
using Encode = std::function<Result<std::vector<int32_t>>(std::string_view text)>;
Result<Document> MakeDocumentFor(const Encode& encode, DocumentSpec spec);
Result<Document> MakeDocumentFor(const Engine& engine, const DocumentSpec& spec);

// For each fact of a document the tokens of the message that asks about it, and of its answer after
// that.
Result<std::vector<std::vector<int32_t>>> AnsweredQuestions(const Engine& engine,
                                                            const Document& document);

// A message of the user as a prompt: in the model's chat format, or as plain text where it has
// none.
Result<std::vector<int32_t>> PromptOf(const Engine& engine, const std::string& message);
inline constexpr int64_t kMostAnswer = 64;  // tokens

// Asks every question in one session: what its message shares with the one before stays in the
// context, so a document that all are about is read once, unless the policy gave up some of it.
Result<DocumentResult> AskAll(Engine& engine, const PolicyOptions& policy,
                              const std::vector<Question>& questions,
                              const Session::Progress& progress = {});

// Writes and reads a document and its facts: `<folder>/document.txt` and `<folder>/facts.json`.
Status SaveDocument(const Document& document, const std::string& folder);
Result<Document> LoadDocument(const std::string& folder);

}  // namespace omnikv::tools
