// From a question to the tokens of its prompts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

// Any thread, several at once: templates and tokenizers do not change.

// The conversation of a question as the model's chat template writes it. kUnsupported where the
// model has none, kInvalidArgument where it refuses the conversation, or where the answer is to go
// on with a message whose end the template does not show.
Result<std::vector<TextSpan>> RenderQuestion(const EngineCore& core, const Question& question);

struct Prompts {
  std::vector<std::vector<int32_t>> tokens;  // of each prompt
  bool of_text = false;                      // all of them, not given as tokens
  std::string end;                           // the last of a conversation's text, up to kEndBytes
  static constexpr size_t kEndBytes = 256;
};
Result<Prompts> PromptsOf(const EngineCore& core, const Question& question);

}  // namespace omnikv::server
