// Sessions of engines that are loaded from files, and what they answer.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "omnikv/engine.h"

namespace omnikv {

using Logits = std::vector<std::vector<float>>;

// On the CPU unless another device is asked for.
inline std::unique_ptr<Engine> Load(EngineOptions options) {
  if (options.device == "auto") options.device = "cpu";
  options.threads = 2;
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(*engine);
}

inline std::unique_ptr<Session> Take(Result<std::unique_ptr<Session>> session) {
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(*session);
}

// Of a vocabulary of 128.
inline std::vector<int32_t> Numbers(size_t n, int32_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<int32_t>((i * 37 + static_cast<size_t>(seed)) % 125) + 3;
  }
  return tokens;
}

// The logits now, and after each of some steps.
inline Logits Decode(const Engine& engine, Session& session, int steps, int32_t seed = 0) {
  Logits logits;
  const auto add = [&] {
    logits.emplace_back(session.logits(), session.logits() + engine.vocab());
  };
  add();
  for (int32_t i = 0; i < steps; ++i) {
    EXPECT_TRUE(session.Step(3 + (i * 7 + seed) % 120).ok());
    add();
  }
  return logits;
}

}  // namespace omnikv
