// What each token of a vocabulary writes, in bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "omnikv/status.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv {

// Of one tokenizer, which must outlive it. Any thread, several at once.
class TokenTexts {
 public:
  // kUnsupported where no token stands for itself, so that nothing can be told.
  static Result<TokenTexts> Of(const Tokenizer& tokenizer);

  // As the token stands after other text: the tokenizer's own decoder says it, and where that gives
  // part of a character, the spelling of byte-level BPE or of byte tokens does. Empty for special
  // tokens, for ids that do not exist and for tokens of which this cannot be told.
  std::string operator[](int32_t id) const;
  // Of the whole vocabulary, one a token.
  std::vector<std::string> All() const;

 private:
  TokenTexts(const Tokenizer& tokenizer, int32_t anchor)
      : tokenizer_(&tokenizer), anchor_(anchor) {}
  // nullopt where the anchor's text changes beside it.
  std::optional<std::string> AfterAnchor(int32_t id) const;

  const Tokenizer* tokenizer_;
  int32_t anchor_;           // a token that does not depend on what stands before it
  std::string before_ = {};  // its text
  bool byte_level_ = false;
};

}  // namespace omnikv
