// The copies that infllm keeps: which blocks its LRU holds, and that it copies no other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "backend/forwarding_backend.h"
#include "backend/ref/ref_backend.h"
#include "policy/infllm/far_ops.h"
#include "step_fixture.h"

namespace omnikv::infllm_test {
namespace {

constexpr size_t kLayers = 6;

// What KeepBlocks left, each time that it ran.
struct Kept {
  int32_t before = 0;  // tokens before the step
  std::vector<int32_t> chosen;
  std::vector<int32_t> missed;
  std::set<int32_t> held;
};

class KeepProbe : public ForwardingBackend {
 public:
  explicit KeepProbe(Backend& inner) : ForwardingBackend(inner) {}

  double TimeAlone(const Op& op) override {
    const double seconds = ForwardingBackend::TimeAlone(op);
    const auto* custom = std::get_if<CustomArgs>(&op);
    if (custom == nullptr || OpName(op) != "InfllmKeepBlocks") return seconds;
    KeepBlocksArgs a;
    std::memcpy(&a, custom->args.data(), sizeof(a));
    Kept& kept = steps.emplace_back();
    kept.before = a.seqs[0].kv_len - a.seqs[0].q_len;
    kept.chosen.assign(a.index, a.index + a.count[0]);
    for (int32_t i = 0; i < a.n_miss[0]; ++i) kept.missed.push_back(a.miss[2 * i]);
    for (int32_t i = 0; i < a.shape.cache; ++i) {
      if (a.owner[i] >= 0) kept.held.insert(a.owner[i]);
    }
    return seconds;
  }

  std::vector<Kept> steps;  // of the layers in turn
};

TEST(Infllm, ItsCacheHoldsTheBlocksThatWereChosenLast) {
  size_t hits = 0;
  size_t misses = 0;
  for (const size_t cache : {2u, 3u, 5u, 30u}) {
    SCOPED_TRACE(cache);
    const auto backend = MakeRefBackend();
    KeepProbe probe(*backend);
    StepFixture fixture(probe, "infllm",
                        {{"budget", "8"},
                         {"block", "4"},
                         {"sinks", "4"},
                         {"recent", "20"},
                         {"representatives", "2"},
                         {"chunk", "12"},
                         {"cache", std::to_string(cache)}});
    fixture.Prompt(100);
    for (int i = 0; i < 60; ++i) fixture.Decode();
    ASSERT_GT(probe.steps.size(), 60 * kLayers);
    ASSERT_EQ(probe.steps.size() % kLayers, 0u);
    std::vector<std::map<int32_t, size_t>> held(kLayers);  // block -> the step of its last choice
    for (size_t i = 0; i < probe.steps.size(); ++i) {
      const Kept& kept = probe.steps[i];
      std::map<int32_t, size_t>& own = held[i % kLayers];
      // As the published rule has it, a block is there once it has left the window whole.
      ASSERT_EQ(kept.chosen.size(),
                static_cast<size_t>(std::clamp((kept.before - 4 - 20) / 4, 0, 2)));
      std::vector<int32_t> missed;
      for (const int32_t block : kept.chosen) {
        if (own.count(block) == 0) missed.push_back(block);
        own[block] = i;
      }
      EXPECT_EQ(kept.missed, missed) << "step " << i;
      hits += kept.chosen.size() - missed.size();
      misses += missed.size();
      while (own.size() > cache) {
        const auto oldest =
            std::min_element(own.begin(), own.end(), [](const auto& a, const auto& b) {
              return a.second < b.second;  // of equals the first, which is the lower block
            });
        own.erase(oldest);
      }
      std::set<int32_t> expected;
      for (const auto& [block, step] : own) expected.insert(block);
      ASSERT_EQ(kept.held, expected) << "step " << i;
    }
  }
  EXPECT_GT(hits, 200u);
  EXPECT_GT(misses, 200u);
}

// Copies are what was read of the rows themselves: how many are kept changes no bit.
TEST(Infllm, ItsCacheChangesNothing) {
  std::vector<std::vector<float>> expected;
  for (const char* cache : {"2", "3", "30"}) {
    const auto backend = MakeRefBackend();
    StepFixture fixture(*backend, "infllm",
                        {{"budget", "8"},
                         {"block", "4"},
                         {"sinks", "4"},
                         {"recent", "20"},
                         {"representatives", "2"},
                         {"chunk", "12"},
                         {"cache", cache}});
    std::vector<std::vector<float>> logits = {fixture.Prompt(100)};
    for (int i = 0; i < 60; ++i) logits.push_back(fixture.Decode());
    if (expected.empty()) expected = logits;
    EXPECT_EQ(logits, expected) << cache;
  }
}

TEST(Infllm, RefusesSettingsThatContradictEachOther) {
  const auto message = [](const SettingList& given) {
    const PolicyInfo& info = **FindPolicy("infllm");
    auto settings = *PolicySettings::Parse(info.name, info.settings, given);
    return info.make()
        ->Prepare({.n_layers = 6, .n_heads = 4, .n_kv_heads = 2, .dk = 16, .max_context = 256},
                  settings)
        .message();
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({{"budget", "127"}}),
            "policy infllm: budget is 127, expected a block of 128 tokens at least");
  EXPECT_EQ(message({{"sinks", "100"}}),
            "policy infllm: sinks is 100, expected whole blocks of 128 tokens");
  EXPECT_EQ(message({{"cache", "15"}}),
            "policy infllm: cache is 15, expected at least 16, the blocks of the budget");
  EXPECT_EQ(message({{"representatives", "129"}}),
            "policy infllm: representatives is 129, expected at most 128, the tokens of a block");
  EXPECT_EQ(message({{"chunk", "513"}, {"recent", "512"}}),
            "policy infllm: chunk is 513, expected at most the 512 of recent");
}

}  // namespace
}  // namespace omnikv::infllm_test
