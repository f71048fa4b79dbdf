#include "policy/kvzip/repeat_text.h"

#include <algorithm>

namespace omnikv {

Result<RepeatText> RepeatText::Of(const PolicyContext& context) {
  RepeatText text;
  if (context.tokenize == nullptr) return text;
  OKV_ASSIGN_OR_RETURN(text.first_, context.tokenize("\n\nRepeat the previous context exactly."));
  OKV_ASSIGN_OR_RETURN(
      text.later_,
      context.tokenize("\n\nRepeat the part of the previous context exactly, starting with "));
  text.end_ = context.turn_end();
  return text;
}

std::vector<int32_t> RepeatText::Before(std::span<const int32_t> before) const {
  constexpr size_t kQuoted = 8;  // tokens that say where the part begins
  std::vector<int32_t> tokens = before.empty() ? first_ : later_;
  if (!before.empty() && !later_.empty()) {
    const auto quoted = before.last(std::min(before.size(), kQuoted));
    tokens.insert(tokens.end(), quoted.begin(), quoted.end());
  }
  tokens.insert(tokens.end(), end_.begin(), end_.end());
  return tokens;
}

}  // namespace omnikv
