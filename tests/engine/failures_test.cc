// What goes wrong ends in one sentence and leaves nothing behind: memory refused at every place in
// turn where a run asks for some, and the failures that users meet, fifty times in one process. On
// the CPU, on the reference as a card beside which layers live on the host, and on a card where
// there is one.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "../policy_settings.h"
#include "../test_data.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/log.h"
#include "engine/core.h"
#include "refusing_backend.h"
#include "resources.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv::failures_test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kRoot = TestData("");
constexpr int kRepeats = 50;
constexpr size_t kMiB = size_t{1} << 20;
constexpr int64_t kPrompt = 60;  // tokens

// Where a run takes place, and where its K/V lie.
struct Where {
  std::string device;  // cpu, ref, "ref as a card", cuda
  std::string place = "auto";

  bool cuda() const { return device == "cuda"; }
};

std::ostream& operator<<(std::ostream& out, const Where& where) {
  return out << where.device << ", K/V " << where.place;
}

Result<std::unique_ptr<Backend>> Make(const Where& where, const EngineOptions& options,
                                      Fault& fault) {
  if (where.cuda()) {
#ifdef OMNIKV_HAVE_CUDA
    const auto make_host = [threads = options.threads]() -> Result<std::unique_ptr<Backend>> {
      return std::unique_ptr<Backend>(MakeCpuBackend({.threads = threads}));
    };
    return MakeCudaBackend({.memory = options.gpu_memory,
                            .make_host = make_host,
                            .refuse = [&fault] { return fault.Next(); }});
#else
    return Unsupported("this build has no CUDA");
#endif
  }
  auto inner =
      where.device == "cpu" ? MakeCpuBackend({.threads = options.threads}) : MakeRefBackend();
  const bool card = where.device == "ref as a card";
  return std::unique_ptr<Backend>(std::make_unique<RefusingBackend>(std::move(inner), fault, card));
}

class FailuresOn : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (!GetParam().cuda()) return;
    Fault none;
    const auto backend = Make(GetParam(), {}, none);
    if (!backend.ok()) GTEST_SKIP() << backend.status().message();
  }

  // A random model of eight layers whose policy chooses among kPrompt tokens.
  EngineOptions Options() const {
    return {.model = kRoot / "tests/golden/policy_model",
            .threads = 2,
            .context = 256,
            .place = GetParam().place,
            .policy = Policy(),
            .prefill_chunk = 25};
  }
  static PolicyOptions Policy() {
    return {
        .name = "omnikv",
        .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}};
  }
  Result<std::unique_ptr<Engine>> Load(const EngineOptions& options, Fault& fault) const {
    return LoadEngine(options, [&] { return Make(GetParam(), options, fault); });
  }
  Result<std::unique_ptr<Engine>> Load(Fault& fault) const { return Load(Options(), fault); }
  // A `stride`: the slow reference sees the places that the CPU, and a card, see one by one.
  int64_t Apart() const { return GetParam().device == "ref" ? 3 : 1; }
  // Load, prompt and three steps, with memory refused at each `stride`-th place where it is asked
  // for, one after the other; on a card, which asks at few, at all of them. What is there after a
  // failure goes on to be used. `most` > 0: at so many places at most, evenly spread, which may
  // spare one of the parts.
  void RefuseAnywhere(const PolicyOptions& policy, int64_t stride, int64_t most = 0);
};

std::vector<int32_t> Numbers(int64_t n) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 125) + 3;
  return tokens;
}

void ExpectOneSentence(const Status& status) {
  ASSERT_FALSE(status.ok());
  EXPECT_FALSE(status.message().empty());
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
  bool operator==(const Answer&) const = default;
};

// A prompt of three chunks and three steps after it.
Result<Answer> Ask(const Engine& engine, Session& session) {
  OKV_RETURN_IF_ERROR(session.Prompt(Numbers(kPrompt)));
  OKV_ASSIGN_OR_RETURN(const GenerateResult result,
                       session.Generate({.max_tokens = 4, .ignore_eos = true}));
  return Answer{result.tokens, {session.logits(), session.logits() + engine.vocab()}};
}

Result<Answer> AskAnew(Engine& engine, const PolicyOptions& policy) {
  OKV_ASSIGN_OR_RETURN(const auto session, engine.NewSession(policy));
  return Ask(engine, *session);
}

void FailuresOn::RefuseAnywhere(const PolicyOptions& policy, int64_t stride, int64_t most) {
  EngineOptions options = Options();
  options.policy = policy;
  if (options.place == "host" && policy.name != Policy().name) options.place = "auto";
  Fault fault;
  Answer expected;
  {
    const auto engine = Load(options, fault);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    const auto answer = AskAnew(**engine, policy);
    ASSERT_TRUE(answer.ok()) << answer.status().message();
    expected = *answer;
  }
  const int64_t places = fault.seen;
  if (GetParam().cuda()) stride = 1;
  if (most > 0) stride = std::max(stride, (places + most - 1) / most);
  std::vector<int> failed(4);  // in load, opening a session, its prompt, its steps
  const Resources before = Resources::Now();
  for (int64_t at = 0; at < places; at += stride) {
    SCOPED_TRACE(fmt::format("place {} of {}", at, places));
    fault = {.at = at};
    auto engine = Load(options, fault);
    if (!engine.ok()) {
      ExpectOneSentence(engine.status());
      EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted)
          << engine.status().message();
      ++failed[0];
      engine = Load(options, fault);
      ASSERT_TRUE(engine.ok()) << engine.status().message();
    }
    auto session = (*engine)->NewSession(policy);
    if (!session.ok()) {
      ExpectOneSentence(session.status());
      EXPECT_EQ(session.status().code(), StatusCode::kResourceExhausted);
      ++failed[1];
      session = (*engine)->NewSession(policy);
      ASSERT_TRUE(session.ok()) << session.status().message();
    }
    Status prompted = (*session)->Prompt(Numbers(kPrompt));
    if (!prompted.ok()) {
      ExpectOneSentence(prompted);
      EXPECT_EQ(prompted.code(), StatusCode::kResourceExhausted);
      EXPECT_FALSE((*session)->Generate({}).ok());  // there is nothing to go on from
      ++failed[2];
      prompted = (*session)->Prompt(Numbers(kPrompt));
      ASSERT_TRUE(prompted.ok()) << prompted.message();
    }
    const auto generated = (*session)->Generate({.max_tokens = 4, .ignore_eos = true});
    std::vector<int32_t> tokens;
    if (generated.ok()) {
      tokens = generated->tokens;
    } else {
      // The tokens before the failure are in context; it goes on behind them.
      ExpectOneSentence(generated.status());
      EXPECT_EQ(generated.status().code(), StatusCode::kResourceExhausted);
      ++failed[3];
      const auto rest = (*session)->Generate({.max_tokens = 8, .ignore_eos = true});
      ASSERT_TRUE(rest.ok()) << rest.status().message();
      tokens.assign((*session)->tokens().begin() + kPrompt, (*session)->tokens().end());
      ASSERT_GE(tokens.size(), 4u);
      tokens.resize(4);
    }
    EXPECT_EQ(tokens, expected.tokens);
    EXPECT_GT(fault.seen, at) << "nothing was refused";
    session->reset();
    const auto again = AskAnew(**engine, policy);
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(*again, expected);
  }
  fmt::print("{}, {} places: refused in load {}, opening {}, prompt {}, steps {}\n", policy.name,
             places, failed[0], failed[1], failed[2], failed[3]);
  for (size_t i = 0; i < failed.size() && most == 0; ++i) EXPECT_GT(failed[i], 0) << "part " << i;
  ExpectNoLeak(before, static_cast<int>(places / stride));
}

TEST_P(FailuresOn, MemoryRefusedAnywhere) {
  RefuseAnywhere(Policy(), Apart());
}

// Of policies that move rows: what a step that failed had moved is where it was.
TEST_P(FailuresOn, MemoryRefusedWhereRowsMove) {
  RefuseAnywhere({.name = "tova", .settings = {{"budget", "24"}}}, Apart());
  RefuseAnywhere({.name = "snapkv", .settings = {{"budget", "24"}, {"window", "8"}}}, 2 * Apart());
  RefuseAnywhere({.name = "kvzip", .settings = {{"chunk", "64"}}},
                 3 * Apart());  // in its passes, too
}

TEST_P(FailuresOn, MemoryRefusedUnderEveryPolicy) {
  const int64_t most = GetParam().device == "cpu" ? kRepeats : 12;
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    RefuseAnywhere({.name = info.name, .settings = WithFiles(info, FirstSettings(info), 8, 2)},
                   /*stride=*/1, most);
  }
}

// Runs `attempt`, which fails with `code` and a sentence that has all of `parts`.
void Repeat(const std::function<Status()>& attempt, StatusCode code,
            const std::vector<std::string>& parts) {
  for (int i = 0; i < 3; ++i) static_cast<void>(attempt());  // what libraries keep
  const Resources before = Resources::Now();
  for (int i = 0; i < kRepeats; ++i) {
    const Status status = attempt();
    ExpectOneSentence(status);
    ASSERT_EQ(status.code(), code) << status.message();
    for (const std::string& part : parts) ASSERT_THAT(status.message(), HasSubstr(part));
  }
  ExpectNoLeak(before, kRepeats);
}

TEST_P(FailuresOn, ACapTooSmall) {
  Fault none;
  EngineOptions options = Options();
  const bool card = GetParam().place != "auto";
  const size_t cap = GetParam().cuda() ? 2048 * kMiB : kMiB;
  (card ? options.gpu_memory : options.host_memory) = cap;
  options.context = static_cast<int64_t>(cap / 256);  // a layer's alone are more
  Repeat([&] { return Load(options, none).status(); }, StatusCode::kResourceExhausted,
         {card ? "`gpu_memory`" : "`host_memory`", HumanBytes(cap),
          fmt::format("a context of {} tokens does not fit", options.context), "K/V"});
  if (!GetParam().cuda()) return;
  options.gpu_memory = kMiB;  // less than the driver takes
  Repeat([&] { return Load(options, none).status(); }, StatusCode::kResourceExhausted,
         {"`gpu_memory` is 1.00 MiB", "expected"});
}

// Where K/V live beside the device.
class FailuresBeside : public FailuresOn {};

TEST_P(FailuresBeside, HostMemoryRefused) {
  Fault none;
  EngineOptions options = Options();
  options.host_memory = 16 << 10;
  Repeat([&] { return Load(options, none).status(); }, StatusCode::kResourceExhausted,
         {"`host_memory` 16.00 KiB", "layers", "host"});
}

TEST(Failures, NoSuchCard) {
  Repeat(
      [] {
        return Engine::Load({.model = kRoot / "tests/golden/policy_model", .device = "cuda:99"})
            .status();
      },
      StatusCode::kUnsupported, {"`device` is 'cuda:99'", "CUDA"});
}

TEST(Failures, AHeadOfABadSize) {
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("omnikv_failures_{}", static_cast<long>(getpid()));
  fs::create_directories(folder);
  fs::copy_file(kRoot / "tests/golden/policy_model/model.safetensors", folder / "model.safetensors",
                fs::copy_options::overwrite_existing);
  std::ifstream file(kRoot / "tests/golden/policy_model/config.json");
  auto config = nlohmann::json::parse(file);
  const auto refused = [&](int head_dim, StatusCode code, const std::string& expected) {
    config["head_dim"] = head_dim;
    std::ofstream(folder / "config.json") << config.dump();
    Repeat([&] { return Engine::Load({.model = folder, .device = "cpu"}).status(); }, code,
           {"config.json: head_dim is " + std::to_string(head_dim), "expected", expected});
  };
  refused(15, StatusCode::kUnsupported, "heads of an even size");
  refused(4096, StatusCode::kCorrupt, "1024");
  fs::remove_all(folder);
}

TEST_P(FailuresOn, CancelledInPrefill) {
  Fault none;
  auto engine = Load(none);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto expected = AskAnew(**engine, Policy());
  ASSERT_TRUE(expected.ok());
  const auto cancel = [&](Session& session) {
    return session.Prompt(Numbers(kPrompt), [&](int64_t done, int64_t) {
      if (done >= 25) session.Cancel();
    });
  };
  // Everything anew each time, then sessions of one engine, then one session.
  Repeat(
      [&] {
        engine = Load(none);
        const auto session = (*engine)->NewSession(Policy());
        return cancel(**session);
      },
      StatusCode::kCancelled, {"after 25 of 60 tokens"});
  Repeat(
      [&] {
        const auto session = (*engine)->NewSession(Policy());
        return cancel(**session);
      },
      StatusCode::kCancelled, {"after 25 of 60 tokens"});
  {
    const auto session = (*engine)->NewSession(Policy());
    ASSERT_TRUE(session.ok());
    Repeat(
        [&] {
          OKV_RETURN_IF_ERROR((*session)->Prompt({5, 6}));
          return cancel(**session);
        },
        StatusCode::kCancelled, {"after 25 of 60 tokens"});
  }
  const auto again = AskAnew(**engine, Policy());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(*again, *expected);
}

TEST_P(FailuresOn, SessionsThatDoNotFit) {
  Fault none;
  EngineOptions options = Options();
  options.max_sessions = 2;
  const auto engine = Load(options, none);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto one = (*engine)->NewSession(Policy());
  const auto two = (*engine)->NewSession(Policy());
  ASSERT_TRUE(one.ok() && two.ok());
  Repeat([&] { return (*engine)->NewSession(Policy()).status(); }, StatusCode::kResourceExhausted,
         {"2 sequences"});
  Repeat([&] { return (*one)->Fork().status(); }, StatusCode::kResourceExhausted, {"2 sequences"});
  Repeat([&] { return (*one)->Prompt(Numbers(300)); }, StatusCode::kInvalidArgument,
         {"300 tokens", "256", "`context`"});
}

std::string NameOf(const testing::TestParamInfo<Where>& where) {
  std::string name = where.param.device + "_" + where.param.place;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(On, FailuresOn,
                         testing::Values(Where{"cpu"}, Where{"ref"},
                                         Where{"ref as a card", "device"},
                                         Where{"ref as a card", "host"}, Where{"cuda", "device"},
                                         Where{"cuda", "host"}),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(On, FailuresBeside,
                         testing::Values(Where{"ref as a card", "host"}, Where{"cuda", "host"}),
                         NameOf);

}  // namespace
}  // namespace omnikv::failures_test
