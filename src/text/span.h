// A piece of a prompt: what the chat template wrote, or what came from the user.
#pragma once

#include <string>

namespace omnikv {

struct TextSpan {
  std::string text;      // UTF-8
  bool literal = false;  // true: text of a user; special tokens in it are not parsed
};

}  // namespace omnikv
