// What the sessions of an engine answer in turns, to compare engines whose K/V lie elsewhere.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../own_folder.h"
#include "omnikv/engine.h"

namespace omnikv {

// Tokens and logits of sessions that go on, go back, part, take turns, are saved and come back.
// Prompts are `tokens(n, seed)`; the second one keeps 100 tokens of the first, and has `more`
// others behind them, and an answer of `n`.
template <typename Tokens>
std::vector<std::vector<float>> PlaySessions(Engine& engine, const PolicyOptions& policy,
                                             const Tokens& tokens, size_t more, int64_t n) {
  std::vector<std::vector<float>> seen;
  const auto see = [&](const Session& session) {
    seen.emplace_back(session.logits(), session.logits() + engine.vocab());
  };
  const auto generate = [&](Session& session, int64_t max_tokens) {
    const auto answer = session.Generate({.max_tokens = max_tokens, .ignore_eos = true});
    ASSERT_TRUE(answer.ok()) << answer.status().message();
    seen.emplace_back(answer->tokens.begin(), answer->tokens.end());
    see(session);
  };
  auto opened = engine.NewSession(policy);
  EXPECT_TRUE(opened.ok()) << opened.status().message();
  if (!opened.ok()) return seen;
  const auto first = std::move(*opened);
  EXPECT_TRUE(first->Prompt(tokens(130, 1)).ok());
  see(*first);
  generate(*first, 9);
  std::vector<int32_t> again = tokens(100, 1);
  for (const int32_t t : tokens(more, 9)) again.push_back(t);
  EXPECT_TRUE(first->Prompt(again).ok());
  generate(*first, n);
  {
    const auto fork = *first->Fork();
    generate(*first, 6);
    EXPECT_TRUE(fork->Step(77).ok());
    generate(*fork, 6);
  }
  const std::string file = OwnFolder() + "/saved.okv";
  const Status saved = first->Save(file);
  EXPECT_TRUE(saved.ok()) << saved.message();
  auto back = engine.Restore(file);
  EXPECT_TRUE(back.ok()) << back.status().message();
  std::filesystem::remove(file);
  generate(*first, 5);
  if (back.ok()) generate(**back, 5);
  return seen;
}

}  // namespace omnikv
