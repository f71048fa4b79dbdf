// Contexts that went through a file: they go on as if they had not, and what is no whole file of
// this model is refused.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "../policy_settings.h"
#include "../test_data.h"
#include "golden_data.h"
#include "io/checked_file.h"
#include "omnikv/engine.h"
#include "on_device.h"
#include "policy/policy.h"
#include "sessions.h"

namespace omnikv::save_test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kRandom = TestData("tests/golden/policy_model");  // vocabulary 128
const std::string kSmall = TestData("tests/golden/models/llama_f32");
const std::string kWindows = TestData("tests/golden/models/gemma3");
const std::string kRotates = TestData("tests/golden/models/llama_dynamic");  // by the length

// Every policy with all settings that its house tests run with.
std::vector<PolicyOptions> Policies() {
  std::vector<PolicyOptions> policies;
  for (const PolicyInfo& info : AllPolicies()) {
    policies.push_back({info.name, WithFiles(info, {}, 8, 2)});
    for (const SettingList& settings : info.test_settings) {
      policies.push_back({info.name, WithFiles(info, settings, 8, 2)});
    }
  }
  return policies;
}

std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

class SaveOn : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::path(testing::TempDir()) /
              (std::string("omnikv_save_") + std::to_string(::getpid()) + GetParam());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string File(const std::string& name) const { return folder_ / name; }

  fs::path folder_;
};

// A prompt that leaves the old one in its midst, after steps: what is left of the context is as if
// nothing else had been there. What a policy has forgotten is computed anew, and counted.
TEST_P(SaveOn, CutsLeaveNoTrace) {
  const auto engine = Load({.model = kRandom,
                            .device = GetParam(),
                            .context = 512,
                            .prefill_chunk = 48,
                            .max_sessions = 2});
  int forgot = 0;
  for (const PolicyOptions& policy : Policies()) {
    if (!engine->CheckPolicy(policy).ok()) continue;
    const auto session = Take(engine->NewSession(policy));
    SCOPED_TRACE(policy.name + " " + session->stats().settings);
    ASSERT_TRUE(session->Prompt(Numbers(203, 1)).ok());
    Decode(*engine, *session, 10);
    std::vector<int32_t> other = Numbers(150, 1);
    const auto more = Numbers(50, 5);
    other.insert(other.end(), more.begin(), more.end());
    ASSERT_TRUE(session->Prompt(other).ok());
    const SessionStats stats = session->stats();
    EXPECT_EQ(stats.prefill_tokens, 50 + stats.recomputed_tokens);
    EXPECT_LE(stats.recomputed_tokens, 150);
    forgot += stats.recomputed_tokens == 150 ? 1 : 0;
    const auto fresh = Take(engine->NewSession(policy));
    ASSERT_TRUE(fresh->Prompt(other).ok());
    const Logits cut = Decode(*engine, *session, 10), whole = Decode(*engine, *fresh, 10);
    for (size_t i = 0; i < whole.size(); ++i) {
      ASSERT_THAT(cut[i], testing::Pointwise(testing::FloatNear(1e-4f), whole[i])) << i;
    }
  }
  EXPECT_GT(forgot, 15);
}

// After a prompt, after steps, and once more after a later turn.
TEST_P(SaveOn, GoesOnAsIfItHadStayedOpen) {
  for (const std::string& model : {kRandom, kWindows, kRotates}) {
    const auto engine = Load({.model = model,
                              .device = GetParam(),
                              .context = 512,
                              .prefill_chunk = 48,
                              .max_sessions = 3});
    for (const PolicyOptions& policy : Policies()) {
      if (!engine->CheckPolicy(policy).ok()) continue;  // of a model with fewer layers
      SCOPED_TRACE(model + " " + policy.name);
      const auto stays = Take(engine->NewSession(policy));
      SCOPED_TRACE(stays->stats().settings);
      ASSERT_TRUE(stays->Prompt(Numbers(203, 1)).ok());
      std::unique_ptr<Session> goes;
      const auto save_and_restore = [&](Session& session, const std::string& name) {
        const Status saved = session.Save(File(name));
        ASSERT_TRUE(saved.ok()) << saved.message();
        goes.reset();
        goes = Take(engine->Restore(File(name)));
        ASSERT_EQ(goes->tokens(), stays->tokens());
        // Nothing was lost on the way, and nothing of earlier sessions is in it.
        ASSERT_TRUE(goes->Save(File("again")).ok());
        EXPECT_EQ(ReadBytes(File("again")), ReadBytes(File(name)));
      };
      save_and_restore(*stays, "prompt");
      EXPECT_EQ(Decode(*engine, *goes, 30), Decode(*engine, *stays, 30));
      save_and_restore(*goes, "steps");
      EXPECT_EQ(Decode(*engine, *goes, 30), Decode(*engine, *stays, 30));
      save_and_restore(*goes, "more");
      std::vector<int32_t> turn = stays->tokens();
      const auto more = Numbers(61, 5);
      turn.insert(turn.end(), more.begin(), more.end());
      ASSERT_TRUE(stays->Prompt(turn).ok());
      ASSERT_TRUE(goes->Prompt(turn).ok());
      EXPECT_EQ(goes->stats().prefill_tokens, stays->stats().prefill_tokens);
      EXPECT_EQ(goes->stats().recomputed_tokens, stays->stats().recomputed_tokens);
      EXPECT_EQ(goes->stats().held_fraction, stays->stats().held_fraction);
      save_and_restore(*goes, "turn");
      EXPECT_EQ(Decode(*engine, *goes, 30), Decode(*engine, *stays, 30));
    }
  }
}

// Generation draws on, forks and cuts are possible, and another engine with room for more takes it.
TEST_P(SaveOn, IsASessionLikeOthers) {
  const PolicyOptions policy{
      .name = "omnikv",
      .settings = {
          {"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"selector", "exp"}}};
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 2});
  const GenerateOptions draw{
      .max_tokens = 12, .sampling = {.temperature = 1, .seed = 5}, .ignore_eos = true};
  const auto stays = Take(engine->NewSession(policy));
  ASSERT_TRUE(stays->Prompt(Numbers(90, 1)).ok());
  ASSERT_TRUE(stays->Generate(draw).ok());
  ASSERT_TRUE(stays->Save(File("a")).ok());
  const auto other =
      Load({.model = kRandom, .device = GetParam(), .context = 300, .max_sessions = 3});
  const auto goes = Take(other->Restore(File("a")));
  const auto fork = Take(goes->Fork());
  const auto expected = stays->Generate(draw);
  const auto got = goes->Generate(draw);
  ASSERT_TRUE(expected.ok() && got.ok());
  EXPECT_EQ((*got).tokens, (*expected).tokens);
  EXPECT_EQ((*fork->Generate(draw)).tokens, (*expected).tokens);
  const auto quest = Take(goes->Fork({.name = "quest", .settings = {{"budget", "32"}}}));
  EXPECT_EQ(quest->tokens(), goes->tokens());
  const auto small = Load({.model = kRandom, .device = GetParam(), .context = 64});
  const auto refused = small->Restore(File("a"));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(), HasSubstr("the context holds 64"));
  const auto full = other->Restore(File("a"));  // three are open
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.status().code(), StatusCode::kResourceExhausted);
}

TEST_P(SaveOn, EmptyAndCancelledContextsToo) {
  const auto engine =
      Load({.model = kRandom, .device = GetParam(), .prefill_chunk = 48, .max_sessions = 2});
  for (const char* name : {"full", "tova"}) {
    const auto stays = Take(engine->NewSession({.name = name}));
    ASSERT_TRUE(stays->Save(File("empty")).ok());
    {
      const auto goes = Take(engine->Restore(File("empty")));
      EXPECT_TRUE(goes->tokens().empty());
      EXPECT_FALSE(goes->Generate({}).ok());
      ASSERT_TRUE(goes->Prompt({4, 5}).ok());
    }
    const Status cancelled = stays->Prompt(Numbers(150, 1), [&](int64_t done, int64_t) {
      return done == 96 ? stays->Cancel() : void();
    });
    ASSERT_EQ(cancelled.code(), StatusCode::kCancelled);
    ASSERT_TRUE(stays->Save(File("part")).ok());
    const auto goes = Take(engine->Restore(File("part")));
    ASSERT_TRUE(goes->Step(9).ok());
    ASSERT_TRUE(stays->Step(9).ok());
    EXPECT_EQ(Decode(*engine, *goes, 9), Decode(*engine, *stays, 9));
  }
}

TEST_P(SaveOn, ForeignFilesAreRefused) {
  const auto engine = Load({.model = kRandom, .device = GetParam(), .max_sessions = 2});
  const auto session = Take(engine->NewSession({.name = "full"}));
  ASSERT_TRUE(session->Prompt(Numbers(20, 1)).ok());
  ASSERT_TRUE(session->Save(File("a")).ok());
  const auto expect_refused = [&](Engine& by, StatusCode code, const std::string& why) {
    const size_t held = session->stats().held_bytes.host + session->stats().held_bytes.device;
    const auto restored = by.Restore(File("a"));
    ASSERT_FALSE(restored.ok()) << why;
    EXPECT_EQ(restored.status().code(), code);
    EXPECT_THAT(restored.status().message(), HasSubstr(why));
    EXPECT_THAT(restored.status().message(), HasSubstr(File("a") + ": "));
    EXPECT_EQ(session->stats().held_bytes.host + session->stats().held_bytes.device, held);
  };
  const auto other_model = Load({.model = kSmall, .device = GetParam()});
  expect_refused(*other_model, StatusCode::kInvalidArgument, "another model");
  const auto other_kv = Load({.model = kRandom, .device = GetParam(), .kv_dtype = "bf16"});
  expect_refused(*other_kv, StatusCode::kInvalidArgument,
                 "its kv_dtype is '\"f32\"', here \"bf16\"");
  // Files whose checksum is right.
  const CheckedFile file = std::move(*CheckedFile::Open(
      std::move(*InputFile::Open(File("a"))), {.magic = "omnikvcx", .version = 1, .name = "it"}));
  std::string data(file.size(), '\0');
  ASSERT_TRUE(file.Read(0, data.size(), data.data()).ok());
  const auto rewrite = [&](const nlohmann::json& text, const std::string& bytes,
                           uint32_t version = 1) {
    const auto writer = std::move(*CheckedFileWriter::Create(
        File("a"), {.magic = "omnikvcx", .version = version, .name = "it"}, text.dump()));
    writer->Write(bytes.data(), bytes.size());
    ASSERT_TRUE(writer->Commit().ok());
  };
  const nlohmann::json text = nlohmann::json::parse(file.text());
  rewrite(text, data, 2);
  expect_refused(*engine, StatusCode::kUnsupported, "of version 2, expected 1");
  rewrite(text, data.substr(0, data.size() - 1));
  expect_refused(*engine, StatusCode::kCorrupt, "its K/V take");
  rewrite(text, data.substr(data.size() - 30));
  expect_refused(*engine, StatusCode::kCorrupt, "has no room for 20 tokens");
  std::string tokens = data;
  tokens[2] = 1;
  rewrite(text, tokens);
  expect_refused(*engine, StatusCode::kCorrupt, "is not in the vocabulary");
  const struct {
    const char* at;
    nlohmann::json value;
    StatusCode code;
    const char* why;
  } kCases[] = {
      {"/model/weights", "0123", StatusCode::kInvalidArgument, "its weights is '\"0123\"'"},
      {"/model", 1, StatusCode::kCorrupt, "'model' is missing"},
      {"/policy", "fulll", StatusCode::kInvalidArgument, "fulll"},
      {"/policy", "tova", StatusCode::kInvalidArgument, "but here it would have"},
      {"/settings", {{{"key", "budget"}, {"value", "1"}}}, StatusCode::kInvalidArgument, "budget"},
      {"/resolved", "a=b\n", StatusCode::kInvalidArgument, "had 'a=b\\x0a'"},
      {"/policy_bytes", 4, StatusCode::kCorrupt, "its K/V take"},
      {"/length", 21, StatusCode::kCorrupt, "is not in the vocabulary"},
      {"/length", int64_t{1} << 40, StatusCode::kCorrupt, "'length' is 1099511627776"},
      {"/prompt_length", 21, StatusCode::kCorrupt, "expected 0 to 20"},
      {"/pending", 128, StatusCode::kCorrupt, "goes on with token 128"},
      {"/tables", nlohmann::json::array(), StatusCode::kCorrupt, "0 tables"},
      {"/tables/0/gone", 4, StatusCode::kCorrupt, "policy full never loses"},
      {"/tables/0/most", 40, StatusCode::kCorrupt, "policy full never loses"},
      {"/tables/0/held", nlohmann::json::array(), StatusCode::kCorrupt, "its K/V take"},
      {"/tables/0/held/0/last", 2, StatusCode::kCorrupt, "1 blocks"},
      {"/tables/0/held/0/first", -1, StatusCode::kCorrupt, "'first'"},
      {"/streams",
       {{{"layer", 0}, {"unit", 1}, {"bytes", 4}, {"name", "x"}}},
       StatusCode::kCorrupt,
       "it has 4 bytes of 'x' per 1 tokens of layer 0, expected no more"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.at);
    nlohmann::json changed = text;
    changed[nlohmann::json::json_pointer(c.at)] = c.value;
    rewrite(changed, data);
    expect_refused(*engine, c.code, c.why);
  }
  rewrite(text, data);
  EXPECT_EQ(Decode(*engine, *Take(engine->Restore(File("a"))), 5), Decode(*engine, *session, 5));
}

INSTANTIATE_TEST_SUITE_P(Devices, SaveOn, testing::Values("ref", "cpu", "cuda"), NameOf);

class SaveTest : public SaveOn {};

// Every length that a file can be cut to, and every byte that can turn over.
TEST_P(SaveTest, TornFilesAreRefused) {
  const auto engine = Load({.model = kSmall, .device = GetParam(), .context = 64});
  {
    const auto session = Take(engine->NewSession({.name = "snapkv"}));
    ASSERT_TRUE(session->Prompt({7, 8, 9}).ok());
    ASSERT_TRUE(session->Save(File("a")).ok());
  }
  const std::string whole = ReadBytes(File("a"));
  ASSERT_GT(whole.size(), 2000u);
  const int fd = ::open(File("a").c_str(), O_RDWR | O_CLOEXEC);
  for (size_t i = 0; i < whole.size(); ++i) {
    const char turned = static_cast<char>(whole[i] ^ (1 << (i % 8)));
    ASSERT_EQ(::pwrite(fd, &turned, 1, static_cast<off_t>(i)), 1);
    const auto restored = engine->Restore(File("a"));
    ASSERT_FALSE(restored.ok()) << i;
    ASSERT_THAT(restored.status().message(), HasSubstr(File("a"))) << i;
    ASSERT_EQ(::pwrite(fd, &whole[i], 1, static_cast<off_t>(i)), 1);
  }
  EXPECT_TRUE(engine->Restore(File("a")).ok());
  WriteBytes(File("long"), whole + "x");
  EXPECT_FALSE(engine->Restore(File("long")).ok());
  for (size_t length = whole.size(); length-- > 0;) {
    ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(length)), 0);
    const auto restored = engine->Restore(File("a"));
    ASSERT_FALSE(restored.ok()) << length;
    ASSERT_EQ(restored.status().code(), StatusCode::kCorrupt) << length;
  }
  ::close(fd);
}

// What stood there stays until all is written; nothing else is left in the folder.
TEST_P(SaveTest, ReplacesFilesWhole) {
  const auto engine = Load({.model = kSmall, .device = GetParam(), .context = 64});
  const auto session = Take(engine->NewSession({.name = "full"}));
  ASSERT_TRUE(session->Prompt({7, 8, 9}).ok());
  fs::create_directories(File("folder"));
  EXPECT_EQ(session->Save(File("folder")).code(), StatusCode::kNotFound);
  EXPECT_EQ(session->Save(File("none/a")).code(), StatusCode::kNotFound);
  EXPECT_EQ(session->Save("/dev/null").code(), StatusCode::kNotFound);
  WriteBytes(File("a"), "before");
  fs::create_symlink(File("a"), File("link"));
  ASSERT_TRUE(session->Save(File("link")).ok());
  EXPECT_TRUE(fs::is_symlink(File("link")));
  struct stat info;
  ASSERT_EQ(::stat(File("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  {
    const auto unfinished = CheckedFileWriter::Create(
        File("a"), {.magic = "omnikvcx", .version = 1, .name = "it"}, "text");
    ASSERT_TRUE(unfinished.ok());
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 4);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 3);
  EXPECT_EQ(engine->Restore(File("none")).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(engine->Restore(File("folder")).ok());
}

INSTANTIATE_TEST_SUITE_P(Devices, SaveTest, testing::Values("cpu"), NameOf);

}  // namespace
}  // namespace omnikv::save_test
