// Anthropic's POST /v1/messages and /v1/messages/count_tokens.
//
// Fields: those of sampling.h, and
// - max_tokens: required, from 1.
// - system: a text or text blocks. A first block that begins with x-anthropic-billing-header is
//   left out: Claude Code writes it anew for each call, and no prefix would ever be found again.
// - messages: roles user, assistant, system; blocks text, thinking (becomes reasoning_content),
//   redacted_thinking (left out), tool_use, tool_result. A last message of the assistant, where it
//   has no calls, is continued.
// - stop_sequences: at most 16.
// - tools: those with an input_schema; the others are tools of Anthropic's servers and left out.
// - tool_choice: auto, any, none, tool; disable_parallel_tool_use.
// - thinking: its type sets enable_thinking of the template: false for disabled, else true.
// - output_config: effort, see SetEffort; format, a JSON schema.
// - chat_template_kwargs: variables of the template; they come before the two above.
// Other fields are passed over.
//
// **Events**: message_start; for each block content_block_start, content_block_delta and
// content_block_stop; message_delta with stop_reason and usage; message_stop; ping while the prompt
// is read. input_tokens are those of the prompt that were not there already.
#pragma once

#include <memory>
#include <string>

#include "server/protocol/answer_parser.h"
#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

Result<Question> ParseMessages(const Json& body);
// The same without max_tokens. Of the question, what makes the prompt counts.
Result<Question> ParseCountTokens(const Json& body);
std::string CountTokensBody(int64_t tokens);

std::unique_ptr<Answering> AnswerMessages(const Question& question, Reply reply,
                                          const AnswerForm& form);

// {"type": "error", "error": {type, message}}
Json AnthropicError(const Status& status);

}  // namespace omnikv::server
