// Transfers that are late: what the side lanes do is held up by random times, and every token and
// logit is what it is without. On a card; where there is none the test says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "engine/core.h"
#include "engine/placement.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv::delays_test {
namespace {

#ifdef OMNIKV_HAVE_CUDA
constexpr int64_t kPrompt = 3000;
constexpr int64_t kSteps = 500;
constexpr int64_t kAtOnce = 25;   // steps that follow one another without the host
constexpr uint32_t kDelay = 300;  // microseconds

// The shipped model with the K/V of its sparse layers on the host, working sets as small as can be,
// and a prompt that passes through in chunks.
Result<std::unique_ptr<Engine>> Load(const CudaOptions& cuda) {
  const char* model = std::getenv("OMNIKV_MODEL");
  EngineOptions options{
      .model = model != nullptr ? model : OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf",
      .context = kPrompt + kSteps + 100,
      .place = "host",
      .policy = {.name = "omnikv", .settings = {{"dense_below", "0"}, {"budget", "128"}}},
      .prefill_chunk = 512};
  OKV_ASSIGN_OR_RETURN(auto engine, LoadEngine(options, [&] { return MakeCudaBackend(cuda); }));
  CoreOf(*engine).plan.working_set = 0;  // no wider than the budget
  return engine;
}

struct Decoded {
  std::vector<int32_t> tokens;
  std::vector<std::vector<float>> logits;  // after the prompt and after each kAtOnce steps
  size_t transferred = 0;                  // bytes a step
  double hit_rate = 0;
};

Result<Decoded> Decode(const CudaOptions& cuda) {
  OKV_ASSIGN_OR_RETURN(const auto engine, Load(cuda));
  OKV_ASSIGN_OR_RETURN(const auto session,
                       engine->NewSession({.name = "omnikv",
                                           .settings = {{"dense_below", "0"}, {"budget", "128"}}}));
  std::vector<int32_t> prompt(static_cast<size_t>(kPrompt));
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = 100 + static_cast<int32_t>((i * i * 31 + i * 7919) % 7000);
  }
  Decoded run;
  const auto keep = [&] {
    run.logits.emplace_back(session->logits(), session->logits() + engine->vocab());
  };
  OKV_RETURN_IF_ERROR(session->Prompt(prompt));
  keep();
  while (static_cast<int64_t>(run.tokens.size()) < kSteps) {
    OKV_ASSIGN_OR_RETURN(const GenerateResult piece,
                         session->Generate({.max_tokens = kAtOnce, .ignore_eos = true}));
    run.tokens.insert(run.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    keep();
  }
  const SessionStats stats = session->stats();
  run.transferred = stats.transfer_bytes_per_step;
  run.hit_rate = stats.hit_rate.value_or(1);
  return run;
}
#endif

TEST(Delays, FiveHundredStepsAreTheSameToTheBit) {
#ifdef OMNIKV_HAVE_CUDA
  if (const auto backend = MakeCudaBackend({}); !backend.ok()) {
    GTEST_SKIP() << backend.status().message();
  }
  const auto expected = Decode({});
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_EQ(expected->tokens.size(), static_cast<size_t>(kSteps));
  EXPECT_GT(expected->transferred, 0u) << "nothing came from the host";
  EXPECT_LT(expected->hit_rate, 0.999);
  const auto undelayed = Decode({});
  ASSERT_TRUE(undelayed.ok()) << undelayed.status().message();
  EXPECT_EQ(undelayed->tokens, expected->tokens) << "two runs without delays differ";
  for (const uint64_t seed : {1, 2, 3}) {
    const auto delayed = Decode({.lane_delay_us = kDelay, .lane_delay_seed = seed});
    ASSERT_TRUE(delayed.ok()) << delayed.status().message();
    EXPECT_EQ(delayed->tokens, expected->tokens) << "seed " << seed;
    for (size_t i = 0; i < expected->logits.size(); ++i) {
      ASSERT_TRUE(delayed->logits[i] == expected->logits[i])
          << "seed " << seed << ", logits after " << i * kAtOnce << " steps";
    }
  }
  fmt::print(
      "{} steps after {} tokens, three seeds: the same; {} bytes a step from the host, "
      "{:.0f} % hits\n",
      kSteps, kPrompt, expected->transferred, 100 * expected->hit_rate);
#else
  GTEST_SKIP() << "this build has no CUDA";
#endif
}

}  // namespace
}  // namespace omnikv::delays_test
