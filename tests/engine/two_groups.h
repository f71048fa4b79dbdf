// Steps that several groups share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine/core.h"
#include "engine/row_group.h"
#include "engine/stepper.h"

namespace omnikv {

// Of a vocabulary of 160.
inline std::vector<int32_t> Numbers(size_t n, size_t first) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((first + i) * 37 % 160);
  return tokens;
}

// Logits of decode rows of two groups, and beside some of them chunks of a prompt that joins the
// first group. The context has room for 160 tokens.
inline std::vector<std::vector<float>> LogitsOfTwoGroups(Engine& engine, const PolicyOptions& first,
                                                         const PolicyOptions& second) {
  Stepper stepper(CoreOf(engine));
  const auto a = *RowGroup::Open(CoreOf(engine), first, 4);
  const auto b = *RowGroup::Open(CoreOf(engine), second, 3);
  std::vector<DecodeRow> rows;
  for (size_t i = 0; i < 5; ++i) {
    RowGroup& group = i < 2 ? *a : *b;
    rows.push_back({.group = &group, .member = *group.Join(), .token = 5});
    const std::vector<int32_t> prompt = Numbers(40, i);
    for (int turn = 0; turn < 2; ++turn) {
      const PromptChunk chunk{
          .group = &group, .member = rows.back().member, .tokens = prompt, .prompt_end = 80};
      EXPECT_TRUE(stepper.Chunk(chunk).ok());
    }
  }
  std::vector<std::vector<float>> told;
  const auto step = [&](const PromptChunk* chunk) {
    std::vector<float*> logits;
    const size_t before = told.size();
    told.resize(before + rows.size(), std::vector<float>(static_cast<size_t>(engine.vocab())));
    for (size_t r = 0; r < rows.size(); ++r) logits.push_back(told[before + r].data());
    const Status status = stepper.Step(rows, logits, chunk);
    EXPECT_TRUE(status.ok()) << status.message();
    for (DecodeRow& row : rows) row.token = (row.token * 7 + 3) % 160;
  };
  for (int i = 0; i < 6; ++i) step(nullptr);
  const int32_t member = *a->Join();
  const std::vector<int32_t> tokens = Numbers(33, 50);
  for (int i = 0; i < 4; ++i) {
    const PromptChunk chunk{
        .group = a.get(), .member = member, .tokens = tokens, .prompt_end = 132};
    step(&chunk);
  }
  rows.insert(rows.begin() + 2, {.group = a.get(), .member = member, .token = 9});
  for (int i = 0; i < 12; ++i) step(nullptr);
  return told;
}

}  // namespace omnikv
