// DESIGN §2 rule 6 on a real model: decoding allocates nothing, and neither does repeating a
// prompt's step. In a binary of its own: it counts every allocation of the process.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "omnikv/engine.h"

namespace {
std::atomic<int64_t> g_allocations{0};
}  // namespace

// Not inlined: compilers would take one of a pair for a mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes != 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

namespace omnikv {
namespace {

class Allocations : public ::testing::TestWithParam<const char*> {};

TEST_P(Allocations, NoneInAStep) {
  const auto engine = Engine::Load({.model = OMNIKV_SOURCE_DIR "/models/omnikv-tiny-q8_0.gguf",
                                    .device = "cpu",
                                    .threads = 2,
                                    .context = 2048});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  PolicyOptions policy{.name = GetParam(), .settings = {}};
  if (policy.name != "full") policy.settings = {{"budget", "64"}};
  const auto session = (*engine)->NewSession(policy);
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->Prompt(std::vector<int32_t>(300, 40)).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE((*session)->Step(50 + i).ok());  // the first one records
  const int64_t before = g_allocations.load();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE((*session)->Step(60 + i).ok());
  EXPECT_EQ(g_allocations.load() - before, 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, Allocations, ::testing::Values("full", "omnikv", "streaming"));

}  // namespace
}  // namespace omnikv
