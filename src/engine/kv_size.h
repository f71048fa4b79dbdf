// What K/V of a memory plan take, by the token of one session.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bank/bank.h"
#include "engine/placement.h"
#include "model/config.h"

namespace omnikv {

// Of the residual of a prompt's rows.
size_t ResidualBytes(const ModelConfig& config, int64_t tokens);

// Bytes of the rows of one layer of a prompt that passes layer by layer, and of its residual, which
// is in the host's memory where passes follow.
size_t PromptBytes(const ModelConfig& config, const BankConfig& bank, int64_t tokens);

// Bytes of the K/V of `plan` in all sessions, what is on the host left out: of layers that keep
// every token, by the token of one session; of the others, whatever the context. And the bytes of
// states and of stages by token.
struct KvSize {
  KvSize(const ModelConfig& config, const MemoryPlan& plan, int32_t sessions);
  size_t Of(size_t tokens, size_t sessions) const { return fixed + tokens * per_token * sessions; }
  // With what a prompt of those takes, and stages.
  size_t Most(size_t tokens, size_t sessions) const {
    return Of(tokens, sessions) + tokens * (prompt_per_token + stages_per_token * sessions);
  }
  // Tokens of every session that fit in `room` bytes.
  size_t Fits(size_t room, size_t sessions) const;
  // Of one token of one session.
  size_t InSession() const { return per_token + states_per_token + stages_per_token; }

  size_t per_token = 0;
  size_t states_per_token = 0;
  size_t stages_per_token = 0;
  size_t prompt_per_token = 0;
  size_t fixed = 0;
};

}  // namespace omnikv
