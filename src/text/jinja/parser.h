// Template source as a tree.
#pragma once

#include <string_view>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace omnikv::jinja {

// Throws SyntaxError.
Block Parse(std::string_view source);

}  // namespace omnikv::jinja
