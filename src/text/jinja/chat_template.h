// Chat templates: a conversation as the prompt text that a model was trained on.
//
// Models publish their template as Jinja source (tokenizer_config.json, chat_template.jinja, the
// GGUF key tokenizer.chat_template). This is an interpreter for what such templates use, with the
// results that transformers' apply_chat_template gives (jinja2's sandbox with trim_blocks and
// lstrip_blocks, loop controls, {% generation %}, its tojson, raise_exception, strftime_now).
//
// Not supported, and refused when parsed: include, import, extends, block, autoescape, recursive
// loops. Integers have 64 bits; a result beyond them is an error. Filters that only make web pages
// (urlize, xmlattr, striptags, ...) do not exist.
//
// **Origin.** A template writes control tokens as plain text (`<|im_end|>`), and a user can type
// the same text. So the result is spans: every character that comes from a string of `messages`,
// `tools` or `extra`, role names and JSON keys included, is `literal`, through all string
// operations; the tokenizer must not parse special tokens in it. A span's edge is no token's edge:
// ordinary text is to be tokenized as if the spans were one string.
//
// **Trust.** Templates come with untrusted models. They reach nothing but their input; parsing and
// rendering are bounded in depth, work and memory, and end in a Status, whose sentence shows text
// of the template or of the input only escaped and cut. They run on a stack of their own, whatever
// that of the caller.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "omnikv/status.h"
#include "text/span.h"

namespace omnikv {

struct ChatInput {
  // An array of objects with `role` and `content`, and what else the template knows (tool_calls,
  // reasoning_content, ...). Order of keys is kept.
  nlohmann::ordered_json messages;
  nlohmann::ordered_json tools;  // an array of JSON schemas, or null
  bool add_generation_prompt = false;
  std::string bos_token;  // empty: undefined, as in a tokenizer without one
  std::string eos_token;
  // More variables for the template (enable_thinking, documents, ...): an object or null. Its
  // strings are literal.
  nlohmann::ordered_json extra;
  // More special tokens for the template, such as pad_token: an object of strings, or null. Not
  // literal: only what the model's own files say belongs here.
  nlohmann::ordered_json special_tokens;
  // What strftime_now formats; absent: the local time now.
  std::optional<std::tm> now;
};

// What one rendering may cost. The defaults are far above any published template on a million
// tokens of text, and end within about a second.
struct RenderLimits {
  int64_t max_work = 1'000'000'000;  // about a nanosecond each: see Budget in str.h
  int64_t max_bytes = 512 << 20;     // of all text and values made, not only of the result
  int max_depth = 1000;              // of nested evaluation, macros included
};

// A parsed template. Copies share the tree. Immutable: Render may run in many threads at once.
class ChatTemplate {
 public:
  // `what` names the origin of the source in messages, such as
  // "model/tokenizer_config.json: chat_template". Errors name the line: kCorrupt for what is no
  // template, kUnsupported for what is listed above.
  static Result<ChatTemplate> Parse(std::string source, const std::string& what);

  // The prompt: neighbours differ in `literal`, none is empty. Errors: kInvalidArgument when the
  // template refuses or cannot digest the input (raise_exception's message is the end of the
  // sentence "WHAT, line N: the template raised: MESSAGE"), kResourceExhausted past a limit.
  Result<std::vector<TextSpan>> Render(const ChatInput& input,
                                       const RenderLimits& limits = {}) const;

  // The spans of Render as one string, for display and for comparison.
  Result<std::string> RenderText(const ChatInput& input) const;

  // What the template itself can write out: its text outside of tags and its string constants, one
  // after the other with NUL between.
  const std::string& written() const;

 private:
  struct Tree;
  explicit ChatTemplate(std::shared_ptr<const Tree> tree) : tree_(std::move(tree)) {}

  std::shared_ptr<const Tree> tree_;
};

}  // namespace omnikv
