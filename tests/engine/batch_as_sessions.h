// Batches beside sessions of the same engine.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/core.h"

namespace omnikv {

// A batch of a sequence for each prompt gives each of them what a session gives: 40 tokens, after
// one that is the same for all.
inline void ExpectABatchGivesWhatSessionsGive(Engine& engine, const PolicyOptions& policy,
                                              const std::vector<std::vector<int32_t>>& prompts) {
  constexpr int64_t kSteps = 40;
  constexpr int32_t kFirst = 7;
  const auto batch = *Batch::Open(CoreOf(engine), policy, static_cast<int32_t>(prompts.size()));
  std::vector<Batch::Next> next;
  std::vector<std::vector<int32_t>> alone;
  for (const std::vector<int32_t>& prompt : prompts) {
    next.push_back({.member = *batch->Join(prompt), .token = kFirst});
    const auto session = engine.NewSession(policy);
    ASSERT_TRUE(session.ok()) << session.status().message();
    ASSERT_TRUE((*session)->Prompt(prompt).ok());
    ASSERT_TRUE((*session)->Step(kFirst).ok());
    const auto answer = (*session)->Generate({.max_tokens = kSteps, .ignore_eos = true});
    ASSERT_TRUE(answer.ok()) << answer.status().message();
    alone.push_back(answer->tokens);
  }
  const auto together = batch->Generate(next, kSteps);
  ASSERT_TRUE(together.ok()) << together.status().message();
  EXPECT_EQ(*together, alone);
}

}  // namespace omnikv
