// The fields that several protocols have in common, read in one place.
//
// - model: may hold a policy, see model_name.h.
// - omnikv: {policy: NAME, SETTING: VALUE, ...}; before those in the name of the model.
// - temperature: 0 (greedy) to 100; absent: 1, as OpenAI and Anthropic document it.
// - top_p, min_p: 0 to 1. top_k: 0 or -1: off.
// - repetition_penalty, repeat_penalty: vLLM's and llama-server's names of the same.
// - presence_penalty, frequency_penalty: -2 to 2.
// - logit_bias: an object with numbers of tokens as keys, and -100 to 100.
// - seed: a whole number; -1 (llama-server): none.
// - stop: a text or at most 16; empty ones are left out.
// - ignore_eos, priority, stream.
// - return_progress (llama-server's): events while the prompt is read.
// - return_reads, also of omnikv: true, or a number of bins: events of what each layer reads.
// - json_schema, structured_outputs.json: llama-server's and vLLM's schema of the answer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/protocol/fields.h"
#include "server/protocol/protocol.h"

namespace omnikv::server {

inline constexpr size_t kMaxStops = 16;
inline constexpr int32_t kMaxTopLogprobs = 20;
inline constexpr int32_t kMaxChoices = 128;
inline constexpr int32_t kReadBins = 128;  // where return_reads is true
inline constexpr int32_t kMaxReadBins = 1024;

// The list above but for stop, which protocols name differently. Refuses fields of other servers
// that would change the answer if they were passed over: min_tokens, stop_token_ids, grammar, and
// what else structured_outputs may hold.
void ReadCommon(FieldReader* body, Question* question);

// A text or a list of texts.
void ReadStop(FieldReader* body, std::string_view field, std::vector<std::string>* stop);

// The most tokens of the answer: a whole number from 0. -1 (llama-server): no limit.
void ReadMaxTokens(FieldReader* body, std::string_view field, Question* question);

// stream_options.include_usage, and n with best_of.
void ReadStreamOptions(FieldReader* body, Question* question);
void ReadChoices(FieldReader* body, Question* question);

}  // namespace omnikv::server
