// What each token of a vocabulary writes, in bytes.
#pragma once

#include <string>
#include <vector>

#include "omnikv/status.h"
#include "text/tokenizer/tokenizer.h"

namespace omnikv::server {

// One a token, as it stands after other text: the tokenizer's own decoder says it, and where that
// gives part of a character, the spelling of byte-level BPE or of byte tokens does. Empty for
// special tokens, for ids that do not exist and for tokens of which this cannot be told.
// kUnsupported where no token stands for itself, so that nothing can be told.
Result<std::vector<std::string>> TokenBytes(const Tokenizer& tokenizer);

}  // namespace omnikv::server
