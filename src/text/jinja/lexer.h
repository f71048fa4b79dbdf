// Template source as tokens, with white space already handled the way transformers configures
// jinja2: trim_blocks, lstrip_blocks, and no newline at the very end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "omnikv/status.h"

namespace omnikv::jinja {

enum class TokenKind {
  kData,        // text between tags, and what {% raw %} protects
  kPrintBegin,  // {{
  kPrintEnd,    // }}
  kBlockBegin,  // {%
  kBlockEnd,    // %}
  kName,
  kString,  // unescaped
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  int line = 1;
  std::string text;  // of data, names, strings and operators
  int64_t integer = 0;
  double real = 0;

  bool Is(TokenKind k, std::string_view t) const { return kind == k && text == t; }
};

// A place in the source where it stops being a template, or one that we can run.
struct SyntaxError {
  int line;
  std::string message;
  StatusCode code = StatusCode::kCorrupt;
};

// The tokens of `source`, kEnd last. Throws SyntaxError.
std::vector<Token> Tokenize(std::string_view source);

}  // namespace omnikv::jinja
