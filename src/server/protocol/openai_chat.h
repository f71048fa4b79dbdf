// OpenAI's POST /v1/chat/completions.
//
// Fields: those of sampling.h, and
// - messages: roles system, developer (becomes system), user, assistant, tool, function (becomes
//   tool). Content is a text or text parts. reasoning_content or reasoning of an assistant reaches
//   the template as reasoning_content.
// - max_completion_tokens, max_tokens: the first counts; absent or -1: what the context holds.
// - n, stop, stream_options.include_usage.
// - logprobs, top_logprobs: true, and 0 to 20 alternatives.
// - tools, tool_choice, parallel_tool_calls: functions only; none, auto, required or a function.
// - response_format: text, json_object, json_schema.
// - reasoning_effort, reasoning.effort: variables of the template, see SetEffort.
// - chat_template_kwargs: variables of the template; they come before reasoning_effort.
// - continue_final_message (vLLM's): the answer goes on where the last message ends, which is an
//   assistant's.
// Other fields are passed over.
//
// **The answer.** AnswerParser splits the model's text. Reasoning goes out as `reasoning` and as
// `reasoning_content`, because clients read one or the other. A stream begins with a chunk of the
// role for each choice; then come content, reasoning and calls, a chunk with finish_reason for each
// choice, one with the usage where that is asked for, and [DONE].
#pragma once

#include <memory>

#include "server/protocol/answer_parser.h"
#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

Result<Question> ParseChat(const Json& body);

std::unique_ptr<Answering> AnswerChat(const Question& question, Reply reply,
                                      const AnswerForm& form);

}  // namespace omnikv::server
