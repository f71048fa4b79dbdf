// K/V on a disk beside a card change no token and no bit: sessions against the same with those
// layers in the host's memory. On a device made of the host, whose lanes run in any order that is
// allowed and whose ops reach no disk, and on a card where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "../made_up_model.h"
#include "../own_folder.h"
#include "backend/ref/ref_backend.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "engine/holdings.h"
#include "engine/kept_contexts.h"
#include "engine/stepper.h"
#include "engine/swapped_member.h"
#include "lanes_backend.h"
#include "model/generated.h"
#include "on_device.h"
#include "play.h"

namespace omnikv::disk_beside_card_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kContext = 640;

std::vector<int32_t> Tokens(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed) % 251);
  return tokens;
}

PolicyOptions Omnikv(const SettingList& more = {}) {
  PolicyOptions policy{
      .name = "omnikv",
      .settings = {{"filters", "1,3"}, {"budget", "40"}, {"dense_after_filter", "0"}},
      .force_indices = true};
  policy.settings.insert(policy.settings.end(), more.begin(), more.end());
  return policy;
}
const PolicyOptions kUnits{.name = "blocks",
                           .settings = {{"block", "16"},
                                        {"budget", "80"},
                                        {"sinks", "16"},
                                        {"recent", "16"},
                                        {"dense_layers", "1"},
                                        {"layer_step", "3"}},
                           .force_indices = true};
const PolicyOptions kQuest{.name = "quest",
                           .settings = {{"budget", "40"}, {"page", "4"}, {"score", "mean_std"}},
                           .force_indices = true};
const PolicyOptions kInfllm{.name = "infllm",
                            .settings = {{"budget", "32"},
                                         {"block", "16"},
                                         {"sinks", "16"},
                                         {"recent", "40"},
                                         {"representatives", "2"},
                                         {"chunk", "24"},
                                         {"cache", "3"}}};
const PolicyOptions kStreams{.name = "brutal_offload",
                             .settings = {{"layers", "5"}, {"ahead", "2"}}};

// Where the layers lie that leave the card.
enum class Where { kHost, kDisk, kBoth };

class DiskBesideCard : public OnDevice {
 protected:
  static bool on_card() { return GetParam() == "cuda"; }
  static Result<std::unique_ptr<Engine>> TryOpen(const PolicyOptions& policy, Where where,
                                                 int64_t working_set = 0, uint32_t seed = 0,
                                                 const std::string& host_reads = "fetch") {
    auto core = std::make_unique<EngineCore>();
    core->options.context = kContext;
    core->options.prefill_chunk = 48;
    core->options.max_sessions = 3;
    core->options.place = where == Where::kHost ? "host" : "disk";
    core->options.host_reads = host_reads;
    core->options.working_set = working_set;
    core->options.policy = policy;
    if (where != Where::kHost) core->options.kv_folder = OwnFolder();
    core->config = SmallLlama(
        {.head_dim = 64, .ffn = 128, .vocab = 256, .max_context = kContext, .attn_scale = 0.5f});
    if (on_card()) {
      OKV_ASSIGN_OR_RETURN(core->backend,
                           MakeBackend({.device = "cuda", .kv_folder = core->options.kv_folder}));
    } else {
      core->backend = std::make_unique<LanesBackend>(MakeRefBackend(), size_t{1} << 30, seed);
    }
    const size_t bytes = GeneratedWeightBytes(core->config, DType::kBF16);
    OKV_ASSIGN_OR_RETURN(MemoryPlan plan, PlanMemory(core->options, core->config, bytes,
                                                     DType::kBF16, *core->backend));
    EXPECT_EQ(plan.on_disk, where != Where::kHost);
    for (size_t layer = 0; layer < plan.disk_layers.size(); ++layer) {
      if (where == Where::kBoth && layer % 2 == 1) plan.disk_layers[layer] = false;
    }
    core->weights = *GenerateWeights(*core->backend, core->config, DType::kBF16);
    return MakeEngine(std::move(core), plan, 0);
  }
  static std::unique_ptr<Engine> Open(const PolicyOptions& policy, Where where,
                                      int64_t working_set = 0, uint32_t seed = 0) {
    auto engine = TryOpen(policy, where, working_set, seed);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, DiskBesideCard, testing::Values("lanes", "cuda"), NameOf);

std::vector<std::vector<float>> Play(Engine& engine, const PolicyOptions& policy) {
  return PlaySessions(engine, policy, Tokens, 180, 17);
}

TEST_P(DiskBesideCard, ChangesNothing) {
  struct Case {
    PolicyOptions policy;
    int64_t working_set = 0;
  };
  const std::vector<Case> cases = {{Omnikv({{"tail", "8"}}), 48},
                                   {Omnikv({{"tail", "1"}, {"fetch", "ahead"}})},
                                   {kUnits, 80},
                                   {kQuest, 40},
                                   {kStreams}};
  for (const auto& [policy, working_set] : cases) {
    if (policy.name == "quest" && !on_card()) continue;  // slow
    const bool fetches = policy.name != "brutal_offload";
    const auto expected = Play(*Open(policy, Where::kHost, fetches ? working_set : 0), policy);
    uint32_t seed = 0;
    for (const Where where : {Where::kDisk, Where::kBoth}) {
      if (where == Where::kDisk && !on_card()) continue;  // slow
      const auto disk = Open(policy, where, fetches ? working_set : 0, ++seed);
      ASSERT_NE(disk, nullptr);
      EXPECT_EQ(Play(*disk, policy), expected) << policy.name << ", " << static_cast<int>(where);
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(OwnFolder())) << "its files have no names";
}

// Sequences of other lengths in one batch, each with rows of its own.
TEST_P(DiskBesideCard, BatchesGiveTheSameTokens) {
  for (const PolicyOptions& policy : {Omnikv({{"tail", "8"}}), kUnits}) {
    std::vector<std::vector<std::vector<int32_t>>> told;
    for (const Where where : {Where::kHost, Where::kDisk}) {
      const auto engine = Open(policy, where, policy.name == "omnikv" ? 56 : 80, 3);
      const auto batch = *Batch::Open(CoreOf(*engine), policy, 2);
      std::vector<Batch::Next> next;
      for (const size_t n : {150, 260}) {
        next.push_back({.member = *batch->Join(Tokens(n, n)), .token = 7});
      }
      const auto answers = batch->Generate(next, 40);
      ASSERT_TRUE(answers.ok()) << answers.status().message();
      told.push_back(*answers);
    }
    EXPECT_EQ(told[0], told[1]) << policy.name;
  }
}

// A sequence that leaves its seat and comes back goes on as one that stayed.
TEST_P(DiskBesideCard, ASequenceIsSwappedOut) {
  for (const PolicyOptions& policy : {Omnikv({{"tail", "8"}}), kUnits}) {
    const auto engine = Open(policy, Where::kDisk, policy.name == "omnikv" ? 56 : 80);
    EngineCore& core = CoreOf(*engine);
    const auto rows = *RowGroup::Open(core, policy, 2);
    Stepper stepper(core);
    const std::vector<int32_t> prompt = Tokens(200, 5);
    const auto generate = [&](int32_t member, int64_t n) {
      StepsAhead ahead(stepper, {{rows.get(), member, 7}}, {nullptr});
      std::vector<int32_t> tokens;
      for (; n > 0; --n) {
        const auto read = ahead.Read(n);
        EXPECT_TRUE(read.ok()) << read.status().message();
        if (!read.ok()) break;
        tokens.push_back(read->front().token);
      }
      ahead.End();
      return tokens;
    };
    std::vector<std::vector<int32_t>> told;
    for (const bool leaves : {false, true}) {
      int32_t member = *rows->Join();
      PromptSteps steps = *PromptSteps::Begin(stepper, *rows, member, prompt, /*all_logits=*/false);
      while (!steps.done()) ASSERT_TRUE(steps.Advance().ok());
      generate(member, 20);
      if (leaves) {
        const auto swapped = SwappedMember::Of(core, *rows, member, "");
        ASSERT_TRUE(swapped.ok()) << swapped.status().message();
        rows->Leave(member);
        const auto back = swapped->Resume(core, *rows);
        ASSERT_TRUE(back.ok()) << back.status().message();
        member = *back;
      }
      told.push_back(generate(member, 30));
      rows->Leave(member);
    }
    EXPECT_EQ(told[0], told[1]) << policy.name;
  }
}

TEST_P(DiskBesideCard, StatisticsTellTheTiersApart) {
  const PolicyOptions policy = Omnikv({{"tail", "8"}});
  const auto engine = Open(policy, Where::kBoth, 56);
  const auto session = *engine->NewSession(policy);
  ASSERT_TRUE(session->Prompt(Tokens(150, 1)).ok());
  ASSERT_TRUE(session->Generate({.max_tokens = 10, .ignore_eos = true}).ok());
  const SessionStats stats = session->stats();
  const EngineCore& core = CoreOf(*engine);
  const size_t layer = size_t{3} * 64 * core.bank->config().RowBytes(0);  // three blocks
  // Layers 2, 4 and 5 leave the card; the one with an odd number stays in memory.
  EXPECT_EQ(stats.held_bytes.disk, 2 * layer);
  EXPECT_EQ(stats.held_bytes.host, layer);
  EXPECT_GT(stats.held_bytes.device, 0u);
  EXPECT_GT(stats.transfer_bytes_per_step, 0u);
  EXPECT_LT(*stats.hit_rate, 1);
  const MemoryNeeds needs = NeedsOf(core.plan, *core.backend);
  EXPECT_EQ(needs.host_layers, (std::vector<int32_t>{2, 4, 5}));
  if (!on_card()) return;
  // Misses of two layers of three.
  EXPECT_GE(3 * core.backend->BytesFromDisk(), 2 * 9 * stats.transfer_bytes_per_step);
}

// What would read there in place is told so before a step.
TEST_P(DiskBesideCard, PoliciesThatReadInPlaceAreRefused) {
  const auto engine = Open(Omnikv({{"tail", "8"}}), Where::kDisk, 56);
  PolicyOptions short_ones = Omnikv({{"tail", "8"}, {"dense_below", "100"}});
  short_ones.force_indices = false;
  for (const PolicyOptions& policy : {PolicyOptions{.name = "full"}, kQuest,
                                      PolicyOptions{.name = "streaming"}, short_ones, kInfllm}) {
    const auto session = engine->NewSession(policy);
    ASSERT_FALSE(session.ok()) << policy.name;
    EXPECT_EQ(session.status().code(), StatusCode::kUnsupported);
    EXPECT_THAT(session.status().message(), HasSubstr("disk")) << policy.name;
  }
  // Nor can an engine be opened for them.
  const PolicyOptions by_head{.name = "blocks", .settings = {{"lists", "per_kv_head"}}};
  for (const PolicyOptions& policy : {by_head, kInfllm, PolicyOptions{.name = "kcache"}}) {
    const auto refused = TryOpen(policy, Where::kDisk, 0, 0, "auto");
    ASSERT_FALSE(refused.ok()) << policy.name;
    EXPECT_THAT(refused.status().message(),
                HasSubstr("`place` is disk, but `policy` " + policy.name));
  }
  EXPECT_THAT(TryOpen(kUnits, Where::kDisk, 0, 0, "attend").status().message(),
              HasSubstr("with `host_reads` attend reads K/V where they are"));
}

// A fork that another policy goes on from has states that are made of K/V in place.
TEST_P(DiskBesideCard, ForksUnderOtherPoliciesAreRefused) {
  const PolicyOptions policy = Omnikv({{"tail", "8"}});
  const auto engine = Open(policy, Where::kDisk, 56);
  const auto session = *engine->NewSession(policy);
  ASSERT_TRUE(session->Prompt(Tokens(150, 1)).ok());
  const auto fork = session->Fork(kQuest);
  ASSERT_FALSE(fork.ok());
  EXPECT_THAT(fork.status().message(), HasSubstr("disk"));
  EXPECT_TRUE(session->Generate({.max_tokens = 3, .ignore_eos = true}).ok());
}

// Nor does a group take rows of another one for which it would have to make states.
TEST_P(DiskBesideCard, StatesAreNotMadeOfRowsOnADisk) {
  PolicyOptions other = kQuest;
  other.settings[0].second = "36";
  const std::vector<int32_t> prompt = Tokens(150, 1);
  for (const Where where : {Where::kHost, Where::kDisk}) {
    const auto engine = Open(kQuest, where, 40);
    const EngineCore& core = CoreOf(*engine);
    const auto rows = *RowGroup::Open(CoreOf(*engine), kQuest, 1);
    const auto others = *RowGroup::Open(CoreOf(*engine), other, 1);
    Stepper stepper(CoreOf(*engine));
    const int32_t member = *rows->Join();
    PromptSteps steps = *PromptSteps::Begin(stepper, *rows, member, prompt, /*all_logits=*/false);
    while (!steps.done()) ASSERT_TRUE(steps.Advance().ok());
    const SharedRows shared{.seq = rows->seq(member),
                            .tokens = prompt,
                            .dense_rows = std::ssize(prompt),
                            .made_by = "",
                            .group = rows->id()};
    EXPECT_GT(ShareableTokens(core, *rows, "", shared, prompt), 100);
    const int64_t tokens = ShareableTokens(core, *others, "", shared, prompt);
    EXPECT_EQ(tokens > 0, where == Where::kHost) << tokens;
  }
}

// As if the disk had lost the ends of its files: the step says so, and the next ones run again once
// the disk does.
TEST_P(DiskBesideCard, ADiskThatFailsEndsInASentence) {
  if (!on_card()) GTEST_SKIP() << "the lanes' disk is memory";
  for (const PolicyOptions& policy : {Omnikv({{"tail", "8"}}), kStreams}) {
    const auto engine = Open(policy, Where::kDisk, policy.name == "omnikv" ? 48 : 0);
    const auto session = *engine->NewSession(policy);
    ASSERT_TRUE(session->Prompt(Tokens(300, 1)).ok());
    ASSERT_TRUE(session->Generate({.max_tokens = 5, .ignore_eos = true}).ok());
    std::vector<std::string> files;
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const std::string target = std::filesystem::read_symlink(file.path(), error);
      if (target.find("/omnikv_test_") != std::string::npos) files.push_back(file.path());
    }
    ASSERT_FALSE(files.empty());
    std::vector<uintmax_t> sizes;
    for (const std::string& file : files) {
      sizes.push_back(std::filesystem::file_size(file));
      ASSERT_EQ(truncate(file.c_str(), 0), 0);
    }
    const auto answer = session->Generate({.max_tokens = 20, .ignore_eos = true});
    ASSERT_FALSE(answer.ok()) << policy.name;
    EXPECT_THAT(answer.status().message(), HasSubstr("K/V cannot be read there"));
    for (size_t i = 0; i < files.size(); ++i) {
      ASSERT_EQ(truncate(files[i].c_str(), static_cast<off_t>(sizes[i])), 0);
    }
    const Status again = session->Prompt(Tokens(200, 4));
    ASSERT_TRUE(again.ok()) << policy.name << ": " << again.message();
    EXPECT_TRUE(session->Generate({.max_tokens = 5, .ignore_eos = true}).ok());
  }
}

}  // namespace
}  // namespace omnikv::disk_beside_card_test
