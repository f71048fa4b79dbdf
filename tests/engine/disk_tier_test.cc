// Sessions whose sparse layers live on a disk, against sessions that have all in memory: the same
// tokens, and the same logits bit by bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "../made_up_model.h"
#include "../own_folder.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "engine/holdings.h"
#include "engine/placement.h"
#include "model/generated.h"
#include "on_device.h"
#include "play.h"

namespace omnikv::disk_tier_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kContext = 400;
constexpr const char* kMemory = "";  // instead of `place`: no folder

std::vector<int32_t> Tokens(size_t n, int32_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) {
    tokens[i] = (seed * 37 + static_cast<int32_t>(i * i % 91) * 5 + static_cast<int32_t>(i)) % 256;
  }
  return tokens;
}

const PolicyOptions kOmnikv{
    .name = "omnikv",
    .settings = {{"filters", "1,3"}, {"budget", "40"}, {"dense_after_filter", "0"}, {"tail", "8"}},
    .force_indices = true};
const PolicyOptions kAhead{.name = "omnikv",
                           .settings = {{"filters", "1,3"},
                                        {"budget", "40"},
                                        {"dense_after_filter", "0"},
                                        {"tail", "8"},
                                        {"fetch", "ahead"}},
                           .force_indices = true};
// Heads that share a list of units, which come to slots.
const PolicyOptions kUnits{.name = "blocks",
                           .settings = {{"block", "8"},
                                        {"budget", "64"},
                                        {"sinks", "8"},
                                        {"recent", "24"},
                                        {"lists", "one"},
                                        {"dense_layers", "1"},
                                        {"layer_step", "3"}},
                           .force_indices = true};
const PolicyOptions kQuest{.name = "quest", .settings = {{"budget", "64"}}, .force_indices = true};
const PolicyOptions kInfllm{.name = "infllm",
                            .settings = {{"budget", "32"},
                                         {"block", "16"},
                                         {"sinks", "16"},
                                         {"recent", "40"},
                                         {"representatives", "2"},
                                         {"chunk", "24"},
                                         {"cache", "3"}}};

class DiskTier : public OnDevice {
 protected:
  static bool on_ref() { return GetParam() == "ref"; }
  Result<std::unique_ptr<Engine>> TryOpen(const PolicyOptions& policy, const std::string& place,
                                          const std::string& kv_dtype = "f16",
                                          int64_t working_set = 0) const {
    auto core = std::make_unique<EngineCore>();
    core->options.device = GetParam();
    core->options.threads = 2;
    core->options.context = kContext;
    core->options.prefill_chunk = 48;
    core->options.max_sessions = 4;
    if (place != kMemory) {
      core->options.place = place;
      core->options.kv_folder = OwnFolder();
      core->options.working_set = working_set;
    }
    core->options.kv_dtype = kv_dtype;
    core->options.policy = policy;
    core->config = SmallLlama(
        {.head_dim = 32, .ffn = 128, .vocab = 256, .max_context = kContext, .attn_scale = 0.5f});
    OKV_ASSIGN_OR_RETURN(core->backend, MakeBackend(core->options));
    const size_t bytes = GeneratedWeightBytes(core->config, DType::kF32);
    OKV_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(core->options, core->config, bytes,
                                                           DType::kBF16, *core->backend));
    EXPECT_EQ(plan.host_layers > 0 || plan.values_away, place == "disk");
    core->weights = *GenerateWeights(*core->backend, core->config, DType::kF32);
    return MakeEngine(std::move(core), plan, 0);
  }
  std::unique_ptr<Engine> Open(const PolicyOptions& policy, const std::string& place,
                               const std::string& kv_dtype = "f16", int64_t working_set = 0) const {
    auto engine = TryOpen(policy, place, kv_dtype, working_set);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
};

INSTANTIATE_TEST_SUITE_P(On, DiskTier, ::testing::Values("ref", "cpu"), NameOf);

std::vector<std::vector<float>> Play(Engine& engine, const PolicyOptions& policy) {
  return PlaySessions(engine, policy, Tokens, 80, 7);
}

// Whether two plays give the same tokens, and logits that differ by no more than `most`.
void ExpectNear(const std::vector<std::vector<float>>& got,
                const std::vector<std::vector<float>>& expected, float most) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), expected[i].size());
    for (size_t j = 0; j < got[i].size(); ++j) ASSERT_NEAR(got[i][j], expected[i][j], most);
  }
}

TEST_P(DiskTier, ChangesNothing) {
  struct Case {
    PolicyOptions policy;
    int64_t working_set = 0;
  };
  const std::vector<Case> cases = {
      {kUnits, 160}, {{.name = "kcache", .settings = {{"budget", "24"}}}}, {kInfllm}};
  for (const auto& [policy, working_set] : cases) {
    const auto expected = Play(*Open(policy, kMemory), policy);
    const auto disk = Open(policy, "disk", "f16", working_set);
    EXPECT_EQ(Play(*disk, policy), expected) << policy.name;
    if (on_ref()) break;  // slow
  }
  // Layers that pass through stages at every step.
  const PolicyOptions streams{.name = "brutal_offload"};
  EXPECT_EQ(Play(*Open(streams, "disk"), streams),
            Play(*Open({.name = "full"}, kMemory), {.name = "full"}));
  EXPECT_TRUE(std::filesystem::is_empty(OwnFolder())) << "its files have no names";
}

// Working sets of single tokens: to `ref` every place is the same. The kernels of `cpu` cut a
// choice into other pieces than the slots that stand in for it, and rounds sums of these.
TEST_P(DiskTier, WorkingSetsChangeNothing) {
  for (const PolicyOptions& policy : {kOmnikv, kAhead}) {
    for (const char* dtype : {"f16", "f32", "q8_0"}) {
      const int64_t least = policy.settings.size() > 4 ? 88 : 48;
      const auto few = Play(*Open(policy, "disk", dtype, least), policy);
      const auto memory = Play(*Open(policy, kMemory, dtype), policy);
      if (on_ref()) {
        ASSERT_EQ(few, memory) << dtype;
        break;
      }
      EXPECT_EQ(few, Play(*Open(policy, "disk", dtype), policy)) << dtype;  // nothing must leave
      ExpectNear(few, memory, dtype == std::string("f32") ? 2e-5f : 2e-3f);
    }
  }
}

// Policies beside that of the engine read what lies on the disk where it is.
TEST_P(DiskTier, OtherPoliciesRunBesideIt) {
  const auto memory = Open(kOmnikv, kMemory);
  const auto disk = Open(kOmnikv, "disk", "f16", 56);
  for (const PolicyOptions& policy :
       {PolicyOptions{.name = "full"}, PolicyOptions{.name = "streaming"}, kQuest, kUnits}) {
    EXPECT_EQ(Play(*disk, policy), Play(*memory, policy)) << policy.name;
    if (on_ref()) break;  // slow
  }
  const auto forgets = disk->NewSession({.name = "tova"});
  ASSERT_FALSE(forgets.ok());
  EXPECT_THAT(forgets.status().message(), HasSubstr("forgets rows"));
}

// Attention over what lies on the disk, and over the last tokens in memory, is attention but for
// the rounding of a sum of two.
TEST_P(DiskTier, AttentionInPlaceIsAttention) {
  const auto memory = Open(kQuest, kMemory, "f32");
  const auto disk = Open(kQuest, "disk", "f32");
  const auto expected = Play(*memory, kQuest);
  const auto got = Play(*disk, kQuest);
  ExpectNear(got, expected, 1e-4f);
}

TEST_P(DiskTier, BatchesGiveTheSameTokens) {
  std::vector<std::vector<std::vector<int32_t>>> told;
  for (const char* place : {kMemory, "disk"}) {
    const auto engine = Open(kOmnikv, place, "f16", place == kMemory ? 0 : 56);
    const auto batch = *Batch::Open(CoreOf(*engine), kOmnikv, 2);
    std::vector<Batch::Next> next;
    for (const size_t n : {150, 90}) {
      const auto member = batch->Join(Tokens(n, static_cast<int32_t>(n)));
      ASSERT_TRUE(member.ok()) << member.status().message();
      next.push_back({.member = *member, .token = 5});
    }
    const auto answers = batch->Generate(next, 12);
    ASSERT_TRUE(answers.ok()) << answers.status().message();
    told.push_back(*answers);
  }
  EXPECT_EQ(told[0], told[1]);
}

TEST_P(DiskTier, StatisticsCountWhatIsThere) {
  const auto engine = Open(kOmnikv, "disk", "f16", 56);
  const auto session = *engine->NewSession(kOmnikv);
  ASSERT_TRUE(session->Prompt(Tokens(150, 1)).ok());
  ASSERT_TRUE(session->Generate({.max_tokens = 10, .ignore_eos = true}).ok());
  const SessionStats stats = session->stats();
  // Three layers of three blocks of 64 rows of 2 * 2 * 32 halves.
  EXPECT_EQ(stats.held_bytes.disk, 3u * 3 * 64 * 256);
  EXPECT_EQ(stats.held_bytes.device, 0u);
  EXPECT_GT(stats.held_bytes.host, stats.held_bytes.disk);
  ASSERT_TRUE(stats.hit_rate.has_value());
  EXPECT_GT(*stats.hit_rate, 0);
  EXPECT_LT(*stats.hit_rate, 1);
  EXPECT_GT(stats.transfer_bytes_per_step, 0u);
  EXPECT_EQ(HoldingsOf(CoreOf(*engine)).bytes.disk, stats.held_bytes.disk);
  EXPECT_GE(CoreOf(*engine).backend->BytesFromDisk(), 9 * stats.transfer_bytes_per_step);
}

TEST_P(DiskTier, AFolderThatTakesNoFilesIsAMistake) {
  const std::string file = OwnFolder() + "/file";
  std::ofstream(file) << "x";
  for (const std::string& folder : {std::string("/no/such/folder"), file, std::string("/proc")}) {
    const auto backend = MakeBackend({.device = GetParam(), .kv_folder = folder});
    ASSERT_FALSE(backend.ok()) << folder;
    EXPECT_EQ(backend.status().code(), StatusCode::kInvalidArgument) << folder;
    EXPECT_THAT(backend.status().message(), HasSubstr("`kv_folder`")) << folder;
    EXPECT_THAT(backend.status().message(), HasSubstr(folder));
    EXPECT_THAT(backend.status().message(), HasSubstr("no file can be made there"));
  }
  std::filesystem::remove(file);
}

// What was free when the plan was made may be gone when the room is taken.
TEST_P(DiskTier, ADiskThatBecameFullEndsInASentence) {
  const auto backend = *MakeBackend({.device = GetParam(), .kv_folder = OwnFolder()});
  const auto buffer = backend->AllocateOnDisk(size_t{1} << 60, "K/V");
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(buffer.status().message(), HasSubstr("no room for a file of 1048576.00 TiB"));
  EXPECT_THAT(buffer.status().message(), HasSubstr("K/V on the disk"));
}

TEST_P(DiskTier, PoliciesThatReadNothingSparselyAreRefusedThere) {
  const auto engine = TryOpen({.name = "full"}, "disk");
  ASSERT_FALSE(engine.ok());
  EXPECT_THAT(engine.status().message(),
              HasSubstr("`place` is disk, but policy full reads no layer sparsely"));
}

}  // namespace
}  // namespace omnikv::disk_tier_test
