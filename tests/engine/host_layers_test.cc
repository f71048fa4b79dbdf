// Where K/V live changes no token and no bit: sessions with layers on the host against the same
// with everything on the device. On a device made of the host, whose lanes run in any order that is
// allowed, and on a card where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>

#include "../made_up_model.h"
#include "backend/ref/ref_backend.h"
#include "batch_as_sessions.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "lanes_backend.h"
#include "model/generated.h"
#include "on_device.h"
#include "two_groups.h"

namespace omnikv::host_layers_test {
namespace {

constexpr int64_t kContext = 640;

std::vector<int32_t> Tokens(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed) % 251);
  return tokens;
}

struct Case {
  const char* name;
  PolicyOptions policy;
  const char* place = "auto";
  const char* host_reads = "auto";
};

// A window of 40 tokens, so that most of a text is far, and copies of three blocks beside it.
const PolicyOptions kInfllm{.name = "infllm",
                            .settings = {{"budget", "32"},
                                         {"block", "16"},
                                         {"sinks", "16"},
                                         {"recent", "40"},
                                         {"representatives", "2"},
                                         {"chunk", "24"},
                                         {"cache", "3"}}};

// Units of 16 tokens, so that four are in a block, and choices that three layers share.
const PolicyOptions kUnits{.name = "blocks",
                           .settings = {{"block", "16"},
                                        {"budget", "80"},
                                        {"sinks", "16"},
                                        {"recent", "16"},
                                        {"dense_layers", "1"},
                                        {"layer_step", "3"}},
                           .force_indices = true};

// Layers on the host of which the device has the last rows: these alone, or with slots beside them.
struct LastRowsCase {
  PolicyOptions policy;
  const char* host_reads;
};
const LastRowsCase kWithLastRows[] = {{kInfllm, "auto"}, {kUnits, "fetch"}};

// Whose host layers lie by head, in an engine that attends to them there.
const PolicyOptions kByHead = {.name = "blocks",
                               .settings = {{"block", "8"},
                                            {"budget", "64"},
                                            {"sinks", "8"},
                                            {"recent", "24"},
                                            {"dense_layers", "0"},
                                            {"lists", "per_kv_head"}}};

// All layers choose among candidates, at every step or beyond some length, and no other layer reads
// their choice.
PolicyOptions Candidates(const SettingList& more, bool force_indices = true) {
  PolicyOptions policy{.name = "omnikv",
                       .settings = {{"filters", "1,3"},
                                    {"select_every_layer", "1"},
                                    {"dense", "indexed"},
                                    {"budget", "10"}},
                       .force_indices = force_indices};
  policy.settings.insert(policy.settings.end(), more.begin(), more.end());
  return policy;
}

class HostLayers : public OnDevice {
 protected:
  static bool on_card() { return GetParam() == "cuda"; }
  std::unique_ptr<Engine> Open(const PolicyOptions& policy, const std::string& place,
                               uint32_t seed = 0, const std::string& host_reads = "auto",
                               int32_t max_sessions = 3, int64_t working_set = 0,
                               const std::string& kv_dtype = "auto") const {
    auto core = std::make_unique<EngineCore>();
    core->options.context = kContext;
    core->options.prefill_chunk = 48;
    core->options.max_sessions = max_sessions;
    core->options.place = place;
    core->options.host_reads = host_reads;
    core->options.working_set = working_set;
    core->options.kv_dtype = host_reads == "attend" ? "f32" : kv_dtype;
    core->options.policy = policy;
    core->config = SmallLlama(
        {.head_dim = 64, .ffn = 128, .vocab = 256, .max_context = kContext, .attn_scale = 0.5f});
    core->backend = on_card()
                        ? *MakeBackend({.device = "cuda"})
                        : std::make_unique<LanesBackend>(MakeRefBackend(), size_t{1} << 30, seed);
    const size_t bytes = GeneratedWeightBytes(core->config, DType::kBF16);
    const auto plan = PlanMemory(core->options, core->config, bytes, DType::kBF16, *core->backend);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->host_layers > 0 || plan->values_away, place != "device");
    core->weights = *GenerateWeights(*core->backend, core->config, DType::kBF16);
    auto engine = MakeEngine(std::move(core), *plan, 0);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  }
  std::vector<Case> Cases() const {
    return {
        {"all of them", {.name = "brutal_offload"}, "host"},
        {"one ahead", {.name = "brutal_offload", .settings = {{"layers", "5"}, {"ahead", "1"}}}},
        {"two ahead", {.name = "brutal_offload", .settings = {{"layers", "5"}, {"ahead", "2"}}}},
        {"as many stages", {.name = "brutal_offload", .settings = {{"layers", "4"}}}},
        {"one layer", {.name = "brutal_offload", .settings = {{"layers", "1"}}}},
        {"working sets",
         {.name = "omnikv",
          .settings = {{"filters", "1,3"}, {"budget", "40"}, {"dense_after_filter", "0"}},
          .force_indices = true},
         "host"},
        {"candidates",
         {.name = "omnikv",
          .settings = {{"filters", "1,3"},
                       {"budget", "40"},
                       {"dense", "indexed"},
                       {"dense_after_filter", "0"}},
          .force_indices = true},
         "host"},
        {"V alone", {.name = "kcache", .settings = {{"budget", "24"}}}, "auto", "fetch"},
        {"the last rows", kInfllm, "host"}};
  }
};

// What sessions of an engine answer that go on, go back, part, and take turns.
std::vector<std::vector<float>> Play(Engine& engine, const PolicyOptions& policy) {
  std::vector<std::vector<float>> seen;
  const auto open = [&] { return std::move(*engine.NewSession(policy)); };
  const auto see = [&](const Session& session) {
    seen.emplace_back(session.logits(), session.logits() + engine.vocab());
  };
  const auto generate = [&](Session& session, int64_t n, float temperature = 0) {
    const auto answer = session.Generate(
        {.max_tokens = n, .sampling = {.temperature = temperature, .seed = 5}, .ignore_eos = true});
    EXPECT_TRUE(answer.ok()) << answer.status().message();
    seen.emplace_back(answer->tokens.begin(), answer->tokens.end());
    see(session);
  };
  const auto first = open();
  EXPECT_TRUE(first->Prompt(Tokens(130, 1)).ok());
  see(*first);
  generate(*first, 9);
  generate(*first, 5, 1);  // sampled
  std::vector<int32_t> again = Tokens(100, 1);
  for (const int32_t t : Tokens(80, 9)) again.push_back(t);
  EXPECT_TRUE(first->Prompt(again).ok());  // keeps 100 tokens, writes the others anew
  generate(*first, 7);
  const auto fork = *first->Fork();
  generate(*first, 6);
  EXPECT_TRUE(fork->Step(77).ok());
  generate(*fork, 6);
  {
    const auto other = open();
    EXPECT_TRUE(other->Prompt(Tokens(90, 4)).ok());
    generate(*other, 5);
    EXPECT_TRUE(first->Step(3).ok());
    see(*first);
    generate(*other, 5);
  }
  const auto other = open();  // where the one before was
  EXPECT_TRUE(other->Prompt(Tokens(90, 6)).ok());
  generate(*other, 5);
  generate(*first, 5);
  return seen;
}

TEST_P(HostLayers, ChangeNothing) {
  for (const Case& c : Cases()) {
    // A card's kernels cut a choice into other pieces than its slots: host_tier_test.cc compares
    // slots with slots.
    if (on_card() && c.policy.name == "omnikv") continue;
    const PolicyOptions same =
        c.policy.name == "brutal_offload" ? PolicyOptions{.name = "full"} : c.policy;
    const auto expected = Play(*Open(same, "device"), same);
    for (uint32_t seed = 1; seed <= (on_card() ? 1u : 4u); ++seed) {
      const auto host = Open(c.policy, c.place, seed, c.host_reads);
      EXPECT_EQ(Play(*host, c.policy), expected) << c.name << ", seed " << seed;
    }
  }
}

// The host attends to what was selected, the device to the last tokens: as attention in one piece
// but for the rounding of a sum of two.
TEST_P(HostLayers, AttentionOnTheHostIsAttention) {
  const std::vector<PolicyOptions> policies = {
      {.name = "blocks",
       .settings = {{"block", "8"},
                    {"budget", "64"},
                    {"sinks", "8"},
                    {"recent", "24"},
                    {"lists", "per_kv_head"},
                    {"layer_step", "2"}},
       .force_indices = true},
      {.name = "blocks",
       .settings = {{"block", "128"},
                    {"budget", "384"},
                    {"sinks", "0"},
                    {"recent", "128"},
                    {"dense_layers", "0"}}},
      {.name = "quest", .settings = {{"budget", "64"}}, .force_indices = true},
      {.name = "kcache", .settings = {{"budget", "24"}}},
      {.name = "kcache", .settings = {{"budget", "7"}, {"renormalise", "on"}}},
      {.name = "omnikv",
       .settings = {{"filters", "1,3"}, {"budget", "40"}, {"tail", "4"}, {"dense_below", "160"}}},
      // Beside layers that the device reads in place.
      {.name = "omnikv",
       .settings = {{"filters", "1,3"},
                    {"budget", "40"},
                    {"tail", "4"},
                    {"dense", "indexed"},
                    {"lists", "per_kv_head"}},
       .force_indices = true}};
  for (const PolicyOptions& policy : policies) {
    const auto expected = Play(*Open(policy, "device", 0, "attend"), policy);
    for (uint32_t seed = 1; seed <= (on_card() ? 1u : 4u); ++seed) {
      const auto host = Open(policy, "host", seed, "attend");
      const auto got = Play(*host, policy);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_THAT(got[i],
                    testing::Pointwise(testing::FloatNear(on_card() ? 1e-3f : 1e-5f), expected[i]))
            << policy.name << ", seed " << seed << ", part " << i;
      }
    }
  }
}

// Prompts that gather rows find them where each KV head has rows of its own.
TEST_P(HostLayers, SparsePromptsGatherRowsThatLieByHead) {
  const PolicyOptions policies[] = {
      {.name = "omnikv",
       .settings = {{"filters", "1,3"}, {"budget", "40"}, {"prefill", "sparse"}, {"r", "1"}},
       .force_indices = true},
      {.name = "kascade",
       .settings = {{"anchors", "0,2"}, {"least", "24"}, {"prefill", "sparse"}, {"tile", "16"}}}};
  for (const PolicyOptions& policy : policies) {
    const auto expected = Play(*Open(kByHead, "device", 0, "attend"), policy);
    const auto host = Open(kByHead, "host", 1, "attend");
    const KvView view = CoreOf(*host).bank->View(CoreOf(*host).bank->n_layers() - 1);
    EXPECT_TRUE(view.ByHead());
    const auto got = Play(*host, policy);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_THAT(got[i],
                  testing::Pointwise(testing::FloatNear(on_card() ? 1e-3f : 1e-5f), expected[i]))
          << policy.name << ", part " << i;
    }
  }
}

// A file has the K/V of all heads of a token side by side, so it goes on where they lie so, and
// where they lie by head.
TEST_P(HostLayers, FilesGoFromRowsByHeadToOthersAndBack) {
  const auto host = Open(kByHead, "host", 2, "attend");
  const auto near = Open(kByHead, "device", 0, "attend");
  const std::string file = testing::TempDir() + "by_head_" + GetParam() + ".ctx";
  std::vector<int32_t> turn = Tokens(230, 5);
  for (const int32_t t : Tokens(30, 8)) turn.push_back(t);
  const auto logits_of = [&](Engine& engine, Session& session) {
    EXPECT_TRUE(session.Prompt(turn).ok());
    EXPECT_EQ(session.stats().recomputed_tokens, 0);
    EXPECT_TRUE(session.Step(9).ok());
    return std::vector<float>(session.logits(), session.logits() + engine.vocab());
  };
  for (const auto& [from, to] : {std::pair{host.get(), near.get()}, {near.get(), host.get()}}) {
    const auto session = *from->NewSession(kByHead);
    EXPECT_TRUE(session->Prompt(Tokens(230, 5)).ok());
    EXPECT_TRUE(session->Save(file).ok());
    const auto again = to->Restore(file);
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_THAT(logits_of(*to, **again),
                testing::Pointwise(testing::FloatNear(on_card() ? 1e-3f : 1e-5f),
                                   logits_of(*from, *session)));
    std::remove(file.c_str());
  }
}

// What a plan lists comes to slots, and the last rows stay: the same rows in the same order, so the
// same bits. The smallest sets have to give up units that later steps read again.
TEST_P(HostLayers, ListedUnitsComeToSlots) {
  const auto blocks = [](SettingList more, bool force_indices = true) {
    PolicyOptions policy{
        .name = "blocks",
        .settings = {{"block", "8"}, {"budget", "64"}, {"sinks", "8"}, {"recent", "24"}},
        .force_indices = force_indices};
    policy.settings.insert(policy.settings.end(), more.begin(), more.end());
    return policy;
  };
  struct Sets {
    PolicyOptions policy;
    int64_t tokens = 0;  // 0: as many as there is room for
    const char* kv_dtype = "auto";
  };
  const std::vector<Sets> cases = {
      {blocks({}), 64},
      {blocks({{"dense_layers", "0"}, {"layer_step", "2"}, {"representative", "quest"}}), 72},
      {blocks({{"token_step", "3"}}, /*force_indices=*/false), 64},
      {blocks({{"token_step", "4"}, {"layer_step", "4"}, {"representative", "max"}}, false), 0},
      {blocks({{"representative", "dynamic"}, {"queries", "16"}, {"preselect", "9"}}), 64},
      {blocks({{"compat", "kt"}, {"queries", "4"}, {"token_step", "2"}}, false), 64},
      {kUnits, 80},
      {kUnits, 80, "q8_0"},
      {blocks({}), 64, "q4_0"},
      {{.name = "quest",
        .settings = {{"budget", "40"}, {"page", "4"}, {"score", "mean_std"}},
        .force_indices = true},
       40}};
  for (const auto& [policy, tokens, kv_dtype] : cases) {
    const auto expected = Play(*Open(policy, "device", 0, "auto", 3, 0, kv_dtype), policy);
    for (uint32_t seed = 1; seed <= (on_card() ? 1u : 4u); ++seed) {
      const auto host = Open(policy, "host", seed, "fetch", 3, tokens, kv_dtype);
      if (tokens > 0) {
        EXPECT_EQ(CoreOf(*host).plan.working_set, tokens);
      }
      EXPECT_EQ(Play(*host, policy), expected)
          << policy.name << ", sets of " << tokens << ", " << kv_dtype << ", seed " << seed;
    }
  }
}

// What a layer lists before it chooses comes to slots: the exact weights and what is read are of
// the same rows, so the bits are the same. There are fewer slots than tokens, and the last rows,
// three blocks of 64, are not all that a dense step reads.
TEST_P(HostLayers, CandidatesComeToSlots) {
  PolicyOptions share = Candidates({{"tail", "2"}, {"mem", "0.05"}});
  std::erase(share.settings, SettingList::value_type("budget", "10"));
  const std::vector<PolicyOptions> policies = {
      Candidates({{"tail", "4"}}), Candidates({{"tail", "1"}, {"rescore", "1"}}),
      Candidates({{"tail", "4"}, {"dense_below", "196"}}, /*force_indices=*/false), share};
  for (const PolicyOptions& policy : policies) {
    for (const char* kv_dtype : {"auto", "q8_0"}) {
      const auto expected = Play(*Open(policy, "device", 0, "auto", 3, 0, kv_dtype), policy);
      for (uint32_t seed = 1; seed <= (on_card() ? 1u : 2u); ++seed) {
        const auto host = Open(policy, "host", seed, "auto", 3, 0, kv_dtype);
        const EngineCore& core = CoreOf(*host);
        EXPECT_LT(core.plan.working_sets - Bank::StageBytes(core.bank->config()),
                  3 * kContext * core.plan.kv_per_token);  // of three sessions
        EXPECT_EQ(Play(*host, policy), expected) << kv_dtype << ", seed " << seed;
      }
    }
  }
}

// A step that ran ahead and is forgotten lists every unit that is whole by then, and its row is
// written anew by another token.
TEST_P(HostLayers, UnitsOfForgottenStepsChangeNothing) {
  const PolicyOptions blocks{
      .name = "blocks",
      .settings = {{"block", "4"}, {"budget", "640"}, {"sinks", "0"}, {"recent", "0"}},
      .force_indices = true};
  const auto play = [&](const PolicyOptions& policy, const char* place, const char* host_reads,
                        uint32_t seed) {
    const auto engine = Open(policy, place, seed, host_reads);
    std::vector<int32_t>& ends = CoreOf(*engine).config.eos_ids;
    ends.resize(static_cast<size_t>(engine->vocab()));
    std::iota(ends.begin(), ends.end(), 0);
    const auto session = *engine->NewSession(policy);
    EXPECT_TRUE(session->Prompt(Tokens(90, 3)).ok());
    std::vector<float> seen;
    for (int32_t turn = 0; turn < 30; ++turn) {
      EXPECT_TRUE(session->Generate({.max_tokens = turn % 3 + 1, .ignore_eos = true}).ok());
      // Any token ends it, so the step after it, which is under way, is forgotten.
      EXPECT_EQ(session->Generate({.max_tokens = 8})->tokens.size(), 1u);
      EXPECT_TRUE(session->Step(turn * 11 % 251).ok());
      seen.insert(seen.end(), session->logits(), session->logits() + engine->vocab());
    }
    return seen;
  };
  for (const PolicyOptions& policy : {blocks, Candidates({{"tail", "1"}, {"rescore", "50"}})}) {
    const auto expected = play(policy, "device", "auto", 0);
    for (uint32_t seed = 1; seed <= (on_card() ? 1u : 4u); ++seed) {
      EXPECT_EQ(play(policy, "host", "fetch", seed), expected) << policy.name << ", seed " << seed;
    }
  }
}

// A choice that stands is fetched once; the fewer slots, the more crosses the bus.
TEST_P(HostLayers, WhatUnitsMissIsCounted) {
  constexpr size_t kSteps = 40;
  const auto stats = [&](const char* token_step, int64_t working_set) {
    PolicyOptions policy{.name = "blocks",
                         .settings = {{"block", "8"},
                                      {"budget", "64"},
                                      {"sinks", "8"},
                                      {"recent", "24"},
                                      {"token_step", token_step}}};
    const auto engine = Open(policy, "host", 3, "fetch", 1, working_set);
    const auto session = *engine->NewSession(policy);
    EXPECT_TRUE(session->Prompt(Tokens(300, 1)).ok());
    for (size_t i = 0; i < kSteps; ++i) {
      EXPECT_TRUE(session->Step(static_cast<int32_t>(i * 53 % 251)).ok());
    }
    const EngineCore& core = CoreOf(*engine);
    EXPECT_EQ(core.set_bytes, core.plan.working_sets - Bank::StageBytes(core.bank->config()));
    return session->stats();
  };
  const size_t row = 2 * 2 * 64 * 2;  // K and V of two heads of 64 in f16
  // Eight blocks, of which four are the last ones, in each of four layers.
  const SessionStats once = stats("1000", 64);
  EXPECT_EQ(once.transfer_bytes_per_step, 4 * 32 * row / kSteps);
  EXPECT_DOUBLE_EQ(*once.hit_rate, 1 - 1.0 / kSteps);
  const SessionStats few = stats("1", 64);
  const SessionStats all = stats("1", kContext);
  EXPECT_LT(*few.hit_rate, *all.hit_rate);
  EXPECT_LT(*all.hit_rate, *once.hit_rate);
  EXPECT_GT(few.transfer_bytes_per_step, all.transfer_bytes_per_step);
  EXPECT_GT(all.transfer_bytes_per_step, once.transfer_bytes_per_step);
}

// Where all tokens are candidates, each is fetched once.
TEST_P(HostLayers, WhatCandidatesMissIsCounted) {
  constexpr size_t kSteps = 40;
  const PolicyOptions policy = Candidates({{"tail", "4"}, {"rescore", "60"}});
  const auto engine = Open(policy, "host", 3, "auto", 1);
  const auto session = *engine->NewSession(policy);
  EXPECT_TRUE(session->Prompt(Tokens(300, 1)).ok());
  for (size_t i = 0; i < kSteps; ++i) {
    EXPECT_TRUE(session->Step(static_cast<int32_t>(i * 53 % 251)).ok());
  }
  const size_t row = 2 * 2 * 64 * 2;  // K and V of two heads of 64 in f16
  const SessionStats stats = session->stats();
  EXPECT_EQ(stats.transfer_bytes_per_step, 6 * (300 + kSteps - 4) * row / kSteps);
  EXPECT_EQ(stats.hit_rate, std::nullopt) << "no layer has a selection";
  const EngineCore& core = CoreOf(*engine);
  EXPECT_EQ(core.set_bytes, core.plan.working_sets - Bank::StageBytes(core.bank->config()));
}

TEST_P(HostLayers, FiveHundredSteps) {
  const auto run = [&](const PolicyOptions& policy, const char* place,
                       const char* host_reads = "auto") {
    const auto engine = Open(policy, place, 7, host_reads);
    const auto session = std::move(*engine->NewSession(policy));
    EXPECT_TRUE(session->Prompt(Tokens(60, 1)).ok());
    return session->Generate({.max_tokens = 500, .ignore_eos = true})->tokens;
  };
  const auto expected = run({.name = "full"}, "device");
  EXPECT_EQ(expected.size(), 500u);
  EXPECT_EQ(run({.name = "brutal_offload", .settings = {{"layers", "5"}, {"ahead", "1"}}}, "auto"),
            expected);
  EXPECT_EQ(run(kInfllm, "host"), run(kInfllm, "device"));
  // Units of two blocks each, of which three are read of up to five.
  const PolicyOptions large{
      .name = "blocks",
      .settings = {{"block", "128"}, {"budget", "384"}, {"sinks", "0"}, {"recent", "0"}},
      .force_indices = true};
  EXPECT_EQ(run(large, "host", "fetch"), run(large, "device"));
}

// Sequences of other lengths in one batch, each with rows of its own, and one from a file, of which
// the device has none at first.
TEST_P(HostLayers, TheLastRowsOfABatchAndOfAFile) {
  for (const auto& [policy, host_reads] : kWithLastRows) {
    const auto host = Open(policy, "host", 3, host_reads);
    const auto near = Open(policy, "device");
    const std::string file = testing::TempDir() + "last_rows_" + GetParam() + ".ctx";
    const auto together = [&](Engine& engine) {
      const auto batch = *Batch::Open(CoreOf(engine), policy, 2);
      std::vector<Batch::Next> next;
      for (const size_t n : {150, 260}) {
        next.push_back({.member = *batch->Join(Tokens(n, n)), .token = 7});
      }
      return *batch->Generate(next, 70);
    };
    EXPECT_EQ(together(*host), together(*near)) << policy.name;

    const auto go_on = [&](Engine& engine) {
      const auto session = *engine.NewSession(policy);
      EXPECT_TRUE(session->Prompt(Tokens(230, 5)).ok());
      EXPECT_TRUE(session->Save(file).ok());
      const auto again = *engine.Restore(file);
      std::vector<int32_t> turn = Tokens(230, 5);
      for (const int32_t t : Tokens(30, 8)) turn.push_back(t);
      EXPECT_TRUE(again->Prompt(turn).ok());  // goes on
      EXPECT_EQ(again->stats().recomputed_tokens, 0);
      return again->Generate({.max_tokens = 20, .ignore_eos = true})->tokens;
    };
    EXPECT_EQ(go_on(*host), go_on(*near)) << policy.name;
    std::remove(file.c_str());
  }
}

// New rows of two groups are computed in one place; each group has last rows of its own.
TEST_P(HostLayers, TheLastRowsInStepsOfTwoGroups) {
  for (const auto& [one, host_reads] : kWithLastRows) {
    PolicyOptions policy = one;
    PolicyOptions other = one;
    for (auto* options : {&policy, &other}) {
      for (auto& [key, value] : options->settings) {
        if (key == "chunk") value = "40";
        if (key == "budget" && options == &other) value = one.name == "blocks" ? "64" : "16";
      }
    }
    const auto near =
        LogitsOfTwoGroups(*Open(policy, "device", 5, "auto", /*max_sessions=*/8), policy, other);
    const auto away = LogitsOfTwoGroups(*Open(policy, "host", 5, host_reads, 8), policy, other);
    ASSERT_EQ(near.size(), away.size());
    for (size_t i = 0; i < near.size(); ++i) {
      ASSERT_EQ(near[i], away[i]) << one.name << ", logits " << i;
    }
  }
}

// Of layers on the host, the device has the last rows and what the policy keeps, and no stage.
TEST_P(HostLayers, TheLastRowsAreAllThatTheDeviceHolds) {
  const auto engine = Open(kInfllm, "host");
  const EngineCore& core = CoreOf(*engine);
  const auto session = *engine->NewSession(kInfllm);
  ASSERT_TRUE(session->Prompt(Tokens(500, 1)).ok());
  ASSERT_TRUE(session->Generate({.max_tokens = 9, .ignore_eos = true}).ok());
  const size_t row = core.bank->config().RowBytes(0);
  // 63 tokens are in the window of a chunk's rows: one block, and two more.
  EXPECT_EQ(core.plan.working_set, 3 * 64);
  const auto table = static_cast<size_t>(core.bank->config().Rows().table_entries) * 4;
  EXPECT_EQ(core.set_bytes, 6 * 3 * 64 * row + table);
  EXPECT_EQ(core.plan.working_sets, 3 * 6 * 3 * 64 * row + table) << "of three sessions";
  EXPECT_EQ(core.plan.policy, core.policy_bytes);
  EXPECT_EQ(core.bank->DeviceBytes(), 0u);
  const SessionStats stats = session->stats();
  EXPECT_EQ(stats.held_bytes.device, core.set_bytes + core.policy_bytes);
  EXPECT_EQ(stats.held_bytes.host, 6 * 8 * 64 * row);  // eight blocks
}

// A step brings the past of each host layer, whole, once.
TEST_P(HostLayers, StepsBringTheWholePast) {
  const PolicyOptions policy{.name = "brutal_offload",
                             .settings = {{"layers", "4"}, {"ahead", "1"}}};
  const auto engine = Open(policy, "auto");
  const auto session = std::move(*engine->NewSession(policy));
  ASSERT_TRUE(session->FillContext(300).ok());
  EXPECT_EQ(session->stats().transfer_bytes_per_step, 0u);
  ASSERT_TRUE(session->Generate({.max_tokens = 9, .ignore_eos = true}).ok());
  const SessionStats stats = session->stats();
  const size_t row = 2 * 2 * 64 * 2;  // K and V of two heads of 64 in f16
  // 308 tokens; the first layer's go ahead to the next step, with that of this one.
  EXPECT_EQ(stats.context_tokens, 308);
  EXPECT_EQ(stats.transfer_bytes_per_step, (4 * 307 + 1) * row);
  EXPECT_FALSE(stats.hit_rate.has_value());
  EXPECT_EQ(stats.held_bytes.host, 4 * 5 * 64 * row);  // five blocks
  // Two layers, and stages of one for two.
  const size_t stages = Bank::StageBytes(CoreOf(*engine).bank->config());
  EXPECT_EQ(stats.held_bytes.device, 2 * 5 * 64 * row + stages);
  EXPECT_DOUBLE_EQ(stats.held_fraction, static_cast<double>(stats.held_bytes.device) /
                                            static_cast<double>(6 * 308 * row));
}

INSTANTIATE_TEST_SUITE_P(Devices, HostLayers, testing::Values("lanes", "cuda"), NameOf);

// The shape of Llama-3-8B with 24 layers on the host: eight sequences of other lengths in one batch
// get the tokens that each gets alone.
class HostLayersOf8B : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, HostLayersOf8B, testing::Values("cuda"), NameOf);

TEST_P(HostLayersOf8B, ABatchGivesWhatSessionsGive) {
  const PolicyOptions policy{.name = "omnikv",
                             .settings = {{"filters", "2,8,18"}, {"budget", "512"}}};
  auto core = std::make_unique<EngineCore>();
  core->options = {.context = 4096, .place = "host", .max_sessions = 9};
  core->options.policy = policy;
  core->config = *GeometryConfig("llama3-8b");
  core->backend = *MakeBackend({.device = "cuda"});
  const size_t bytes = GeneratedWeightBytes(core->config, DType::kBF16);
  if (core->backend->AvailableMemory() < bytes + (size_t{8} << 30)) {
    GTEST_SKIP() << "the card has no room for the weights";
  }
  const auto plan = PlanMemory(core->options, core->config, bytes, DType::kBF16, *core->backend);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->host_layers, 24);
  core->weights = *GenerateWeights(*core->backend, core->config, DType::kBF16);
  const auto engine = MakeEngine(std::move(core), *plan, 0);
  ASSERT_TRUE(engine.ok()) << engine.status().message();

  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < 8; ++i) prompts.push_back(Tokens(1000 + 399 * i, i));
  ExpectABatchGivesWhatSessionsGive(**engine, policy, prompts);
}

}  // namespace
}  // namespace omnikv::host_layers_test
