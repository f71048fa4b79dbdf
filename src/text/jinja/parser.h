// Template source as a tree.
#pragma once

#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace omnikv::jinja {

// From the tokens of Tokenize. Throws SyntaxError.
Block Parse(std::vector<Token> tokens);

}  // namespace omnikv::jinja
