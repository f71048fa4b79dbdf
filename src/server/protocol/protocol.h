// What the protocols have in common: a question in no protocol's form, and what a model says to it.
// Each protocol is a file with a function that makes a Question of a body, and an Answering that
// makes replies of what the model says.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv::server {

// How the answer must look.
struct AnswerFormat {
  enum class Kind { kText, kJsonObject, kJsonSchema };
  Kind kind = Kind::kText;
  nlohmann::ordered_json schema;  // of kJsonSchema
};

struct ToolChoice {
  enum class Kind { kAuto, kNone, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;  // of kNamed
};

// A text, or tokens.
using PlainPrompt = std::variant<std::string, std::vector<int32_t>>;

struct Question {
  std::string model;  // as the client names it; empty: not named
  // A conversation: an array of objects as chat templates take them (ChatInput). Null: `prompts`.
  nlohmann::ordered_json messages;
  nlohmann::ordered_json tools;               // an array as chat templates take it, or null
  nlohmann::ordered_json template_arguments;  // more variables for the template, or null
  bool continue_last = false;  // the answer goes on where the last message, an assistant's, ends
  ToolChoice tool_choice;
  bool parallel_tool_calls = true;
  AnswerFormat format;
  std::vector<PlainPrompt> prompts;

  GenerateOptions generate;
  bool limited = false;       // the client gave generate.max_tokens; else the context is the limit
  bool seeded = false;        // and sampling.seed
  int32_t n = 1;              // answers to each prompt
  int32_t top_logprobs = -1;  // -1: no log-probabilities, else how many alternatives of each token
  bool echo = false;          // the prompt comes before the answer's text
  int32_t priority = 0;       // higher goes first

  bool stream = false;
  bool stream_usage = false;     // a last chunk has the usage
  bool stream_progress = false;  // events while the prompt is read
  // Events of what each layer reads while the answer comes, by so many bins of positions; 0: none.
  int32_t read_bins = 0;

  std::string policy;  // empty: the server's
  std::vector<std::pair<std::string, std::string>> settings;
};

struct TokenLogprob {
  std::string text;    // bytes, which may be part of a character
  double logprob = 0;  // NaN: none, as of the first token of an echoed prompt
};

// New text of one choice. Text that may belong to a stop string comes later than its tokens. An
// echoed prompt (Question::echo) is the first piece of its choice.
struct Piece {
  std::string text;  // whole UTF-8 characters
  // Of the tokens that came with it, where the question asks for them.
  struct Token {
    TokenLogprob chosen;
    std::vector<TokenLogprob> top;  // Question::top_logprobs, best first
  };
  std::vector<Token> tokens;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of them, those that were there already
  int64_t completion_tokens = 0;
};

// How a choice ends. Made of a FinishReason alone where no stop text ended it.
struct Ending {
  Ending(FinishReason r) : reason(r) {}  // NOLINT: implicit
  Ending(FinishReason r, std::string s) : reason(r), stop(std::move(s)) {}

  FinishReason reason;
  std::string stop;  // which of GenerateOptions::stop ended it: Anthropic's form names it
};

// One reply in the making. Each call returns what goes out now, as bytes of server-sent events
// where the question asks for a stream. Where it does not, all but Close and Error return "", and
// Close returns the whole body. Choices are numbered prompt by prompt: n of the first, n of the
// second.
class Answering {
 public:
  virtual ~Answering() = default;
  virtual std::string Begin() = 0;
  // Tokens of the prompt that are there by now, of all, and of them those that were there already.
  virtual std::string Progress(int64_t done, int64_t total, int64_t cached) = 0;
  // What the last step of the first choice read, an object. Protocols without a form for it are
  // silent.
  virtual std::string Reads(const nlohmann::ordered_json& reads) {
    static_cast<void>(reads);
    return "";
  }
  virtual std::string Add(int32_t choice, const Piece& piece) = 0;
  virtual std::string End(int32_t choice, const Ending& ending) = 0;
  // `extra`: members that the body, or the last event, has besides (timings, omnikv).
  virtual std::string Close(const Usage& usage, const nlohmann::ordered_json& extra) = 0;
  // Instead of the rest: a failure in the middle of a stream, or the body that says it.
  virtual std::string Error(const Status& status) = 0;
};

// What replies of one server have in common.
struct Reply {
  std::string id;       // without a prefix: "b1946ac92492d234"
  std::string model;    // its name
  int64_t created = 0;  // seconds since 1970
  // Tokens of the prompt, where they are counted before Begin: Anthropic's first event says them.
  int64_t prompt_tokens = 0;
  // Milliseconds of a steady clock, for events of progress. Empty: the process's.
  std::function<int64_t()> now_ms;
};

}  // namespace omnikv::server
