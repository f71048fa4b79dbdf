// What a policy's own decode steps make of texts that are given ("teacher forcing").
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/core.h"

namespace omnikv {

struct GivenText {
  std::vector<int32_t> tokens;
  int64_t prompt_tokens = 1;  // 1 to all: a prompt; each token after them is a decode step
};

// Takes the logits [vocab] after the token at `position` of texts[text], which are valid during the
// call. A failure ends the run.
using GivenTextSink = std::function<Status(size_t text, int64_t position, const float* logits)>;

// Hands out the logits after each text's prompt and after each of its further tokens, which are
// n_tokens - prompt_tokens + 1 rows a text, in the order of positions. Texts share decode steps
// (batch.h), up to `max_sessions` of the engine and kMaxBatch at a time; they run one after another
// where the policy, the model or the place of the K/V allows no batch. Needs as many free sessions.
// Returns the number of decode steps. kInvalidArgument names the text that cannot be run.
Result<int64_t> DecodeGivenTexts(EngineCore& core, const PolicyOptions& policy,
                                 std::span<const GivenText> texts, const GivenTextSink& sink);

}  // namespace omnikv
