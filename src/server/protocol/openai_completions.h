// OpenAI's POST /v1/completions: a prompt as it is, without a chat template.
//
// Fields: those of sampling.h, and
// - prompt: a text, a list of texts, a list of tokens, or a list of lists of tokens.
// - max_tokens: absent or -1: what the context holds (OpenAI's default is 16).
// - n: answers to each prompt, at most 128; best_of must equal it.
// - logprobs: 0 to 20 alternatives of each token.
// - echo: the prompt comes first, with its log-probabilities where those are asked for.
// - stop, stream_options.include_usage.
// - suffix: refused.
// Other fields are passed over.
#pragma once

#include <memory>

#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

inline constexpr size_t kMaxPrompts = 1024;

Result<Question> ParseCompletions(const Json& body);

// Events are chunks of the body's form: text as it comes, then one with finish_reason, one with the
// usage where that is asked for, and [DONE]. A token that is not whole UTF-8 is named
// "bytes:\xNN\xNN" in logprobs, as OpenAI names it; text_offset counts characters.
std::unique_ptr<Answering> AnswerCompletions(const Question& question, Reply reply);

// What both of OpenAI's older protocols write.
Json OpenAiUsage(const Usage& usage);
// How a stream of either ends: a chunk of `head`, without choices, that has the usage where it is
// asked for (`usage` is not null) and the members of `extra`, where there is any of these; [DONE].
std::string LastChunks(Json head, const Usage* usage, const Json& extra);
// A failure, in the middle of a stream or as the body.
std::string OpenAiErrorReply(const Status& status, bool stream);
// {total, cache, processed, time_ms}
Json PromptProgress(int64_t done, int64_t total, int64_t cached, int64_t time_ms);
// A number for JSON: NaN becomes null, and -infinity -9999, because JSON has neither.
Json LogprobJson(double logprob);
// "stop", "length" or "tool_calls". OpenAI has no word for an answer that was cancelled or ran past
// its deadline: it was cut short, so it is "length" too.
const char* OpenAiFinishReason(FinishReason reason, bool called_tools);
// reply.now_ms(), or the process's clock.
int64_t NowMs(const Reply& reply);

}  // namespace omnikv::server
