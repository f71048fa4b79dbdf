// Other tokens of the same text: a conversation that is rendered anew spells the model's own
// answers as the tokenizer does, not as the model did (docs/serving.md, "Prefixes").
#pragma once

#include <cstdint>
#include <span>

#include "text/tokenizer/token_texts.h"

namespace omnikv {

// How many tokens at the beginning of each have the same text.
struct SameText {
  int64_t kept = 0, prompt = 0;
};

// The most of them. Tokens without a text, such as special ones, are the same as themselves alone.
SameText BeginningOf(const TokenTexts& texts, std::span<const int32_t> kept,
                     std::span<const int32_t> prompt);

}  // namespace omnikv
