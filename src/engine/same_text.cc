#include "engine/same_text.h"

#include <algorithm>
#include <string>

#include "engine/kept_contexts.h"

namespace omnikv {

SameText BeginningOf(const TokenTexts& texts, std::span<const int32_t> kept,
                     std::span<const int32_t> prompt) {
  // What one side has written behind the place where both have the same.
  std::string of_kept, of_prompt;
  SameText at;
  at.kept = at.prompt = CommonTokens(kept, prompt);
  SameText same = at;
  const auto take = [&](std::span<const int32_t> tokens, int64_t& i, std::string& text) {
    if (i == std::ssize(tokens)) return false;
    const std::string more = texts[tokens[static_cast<size_t>(i++)]];
    text += more;
    return !more.empty();
  };
  while (true) {
    if (of_kept.empty() && of_prompt.empty()) {
      const int64_t equal = CommonTokens(kept.subspan(static_cast<size_t>(at.kept)),
                                         prompt.subspan(static_cast<size_t>(at.prompt)));
      at.kept += equal;
      at.prompt += equal;
      same = at;
    }
    const bool more = of_kept.size() <= of_prompt.size() ? take(kept, at.kept, of_kept)
                                                         : take(prompt, at.prompt, of_prompt);
    if (!more) return same;
    const size_t common = std::min(of_kept.size(), of_prompt.size());
    if (of_kept.compare(0, common, of_prompt, 0, common) != 0) return same;
    of_kept.erase(0, common);
    of_prompt.erase(0, common);
  }
}

}  // namespace omnikv
