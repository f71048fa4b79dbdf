// OpenAI's POST /v1/responses, without memory: each question holds the whole conversation.
//
// Fields: those of sampling.h, and
// - input: a text, or items: messages (content is a text or text parts), function_call,
//   function_call_output, reasoning. Items of other types are left out, but for item_reference,
//   which is refused.
// - instructions: a system message before the others; those that begin the conversation become one.
// - tools: functions; tools of other types are left out, because Codex sends them always.
// - tool_choice, parallel_tool_calls: none, auto, required or a function.
// - max_output_tokens: absent: what the context holds.
// - stop: as elsewhere, though OpenAI has none here.
// - text.format: text, json_object, json_schema.
// - reasoning.effort, chat_template_kwargs: variables of the template, see SetEffort.
// - previous_response_id, conversation, background, prompt: refused.
// Other fields are passed over: store, include, prompt_cache_key, truncation, ... There are no
// log-probabilities.
//
// Assistant items that follow each other (reasoning, a message, calls) become one message, because
// the model wrote them as one.
//
// **Events**, each with its sequence_number: response.created, response.in_progress; for each item
// response.output_item.added and .done; within a message response.content_part.added,
// .output_text.delta, .output_text.done, .content_part.done; within reasoning the same with
// .reasoning_text; within a call .function_call_arguments.delta and .done; response.completed,
// .incomplete or .failed at the end. There is no [DONE].
#pragma once

#include <memory>

#include "server/protocol/answer_parser.h"
#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

Result<Question> ParseResponses(const Json& body);

// The response's `instructions` are null, reasoning_tokens 0, and the name of a schema is "answer":
// a Question does not hold them.
std::unique_ptr<Answering> AnswerResponses(const Question& question, Reply reply,
                                           const AnswerForm& form);

}  // namespace omnikv::server
