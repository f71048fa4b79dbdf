// What goes together and what does not is what the tables say: every pair of policies, and every
// policy with every format, place and use of a context. What runs is run, and each refusal has its
// sentence.
#include "engine/compositions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>

#include "../made_up_model.h"
#include "../policy_settings.h"
#include "backend/ref/ref_backend.h"
#include "backend/trace/trace_backend.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/group_pool.h"
#include "engine/row_group.h"
#include "engine/stepper.h"
#include "model/generated.h"
#include "policy/combinations.h"
#include "sessions.h"

namespace omnikv::compositions_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int32_t kLayers = 6;
constexpr int kSteps = 3;

struct Inner {
  std::unique_ptr<Backend> ref = MakeRefBackend();
};

// Takes itself for a card, so that K/V may live on the host.
class Card : private Inner, public TraceBackend {
 public:
  Card() : TraceBackend(*ref) { set_logging(false); }
  bool OnDevice() const override { return true; }
};

PolicyOptions Small(const PolicyInfo& info) {
  PolicyOptions policy{.name = info.name,
                       .settings = WithFiles(info, FirstSettings(info), kLayers, 2)};
  if (info.name == "omnikv") {
    policy.settings = {
        {"filters", "1,3"}, {"dense_after_filter", "0"}, {"tail", "8"}, {"budget", "24"}};
  }
  return policy;
}

ModelConfig Model() {
  ModelConfig config = SmallLlama({.n_layers = kLayers, .head_dim = 32, .max_context = 300});
  config.name = "small";
  return config;
}

// An engine that is opened with `policy`, on a card or what passes for one.
Result<std::unique_ptr<Engine>> Open(const PolicyOptions& policy, const std::string& place,
                                     const std::string& kv_dtype = "f32") {
  EngineOptions options;
  options.context = 300;
  options.kv_dtype = kv_dtype;
  options.prefill_chunk = 48;
  options.max_sessions = 4;
  options.place = place;
  options.policy = policy;
  return LoadEngine(options, MadeUpModel(Model(), DType::kF32),
                    [] { return Result<std::unique_ptr<Backend>>(std::make_unique<Card>()); });
}

std::vector<int32_t> Prompt() {
  return Numbers(100, 1);
}

bool Contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

bool Finite(const Logits& logits) {
  return std::ranges::all_of(logits, [](const std::vector<float>& row) {
    return std::ranges::all_of(row, [](float x) { return std::isfinite(x); });
  });
}

// The logits of a prompt and of some steps, in a session that must run.
Logits RunSession(Engine& engine, const PolicyOptions& policy) {
  const auto session = Take(engine.NewSession(policy));
  EXPECT_TRUE(session->Prompt(Prompt()).ok());
  Logits logits = Decode(engine, *session, kSteps);
  EXPECT_TRUE(Finite(logits));
  return logits;
}

// The sentence of a rule, as it is said of a policy.
template <typename... Args>
std::string Sentence(Use use, const std::string& name, const Args&... args) {
  return fmt::format(fmt::runtime(RuleOf(use).sentence), name, args...);
}

// Of a step that sequences of two groups share.
Status SharedStep(Engine& engine, const PolicyOptions& policy) {
  Stepper stepper(CoreOf(engine));
  const auto a = *RowGroup::Open(CoreOf(engine), policy, 1);
  const auto b = *RowGroup::Open(CoreOf(engine), policy, 1);
  const DecodeRow rows[] = {{.group = a.get(), .member = *a->Join(), .token = 5},
                            {.group = b.get(), .member = *b->Join(), .token = 6}};
  std::vector<float> told(2 * static_cast<size_t>(engine.vocab()));
  float* const logits[] = {told.data(), told.data() + engine.vocab()};
  return stepper.Step(rows, logits, nullptr);
}

std::unique_ptr<Policy> Prepared(const PolicyOptions& options) {
  auto policy = PolicyFor(options, Model(), 300, DType::kF16, /*fetches=*/false);
  EXPECT_TRUE(policy.ok()) << policy.status().message();
  return std::move(*policy);
}

TEST(Compositions, TheTablesHaveEveryRowOnce) {
  std::set<std::pair<PolicyKind, PolicyKind>> pairs;
  std::set<PolicyKind> kinds;
  for (const KindPair& pair : KindPairs()) {
    EXPECT_TRUE(pairs.insert(std::minmax(pair.a, pair.b)).second);
    kinds.insert({pair.a, pair.b});
    EXPECT_FALSE(pair.why.empty());
  }
  EXPECT_EQ(pairs.size(), kinds.size() * (kinds.size() + 1) / 2);
  std::set<Use> uses;
  for (const UseRule& rule : UseRules()) EXPECT_TRUE(uses.insert(rule.use).second);
  EXPECT_EQ(uses.size(), 9u);
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    EXPECT_EQ(kinds.count(info.kind), 1u);
    EXPECT_EQ(KindOf(*Prepared(Small(info)), kLayers), info.kind);
  }
}

// No session has two policies, and each pair of them has its reason.
TEST(Compositions, TwoPoliciesInOneSession) {
  const auto engine = *Open({.name = "full"}, "device");
  for (const PolicyInfo& a : AllPolicies()) {
    for (const PolicyInfo& b : AllPolicies()) {
      const std::string name = a.name + "+" + b.name;
      SCOPED_TRACE(name);
      std::string why;
      for (const KindPair& pair : KindPairs()) {
        if (pair.a == a.kind && pair.b == b.kind) {
          why = fmt::format(fmt::runtime(pair.why), a.name, b.name);
        } else if (pair.a == b.kind && pair.b == a.kind) {
          why = fmt::format(fmt::runtime(pair.why), b.name, a.name);
        }
      }
      for (const PolicyInfo& info : AllPolicies()) {
        if (a.name != b.name && Contains(info.combines, a.name) &&
            Contains(info.combines, b.name)) {
          why = a.name + " and " + b.name + " together are " + info.name;
        }
      }
      const std::string expected = "a session has one policy, not '" + name + "': " + why;
      for (const Status& status :
           {engine->NewSession({.name = name}).status(), engine->CheckPolicy({.name = name}),
            Open({.name = name}, "device").status()}) {
        EXPECT_EQ(status.code(), StatusCode::kUnsupported);
        EXPECT_EQ(status.message(), expected);
      }
    }
  }
  EXPECT_EQ(FindPolicy("duo+omnikv").status().message(),
            "a session has one policy, not 'duo+omnikv': duo and omnikv together are omnikv_duo");
  EXPECT_THAT(FindPolicy("duo+quest").status().message(), HasSubstr("which is not built"));
  EXPECT_THAT(FindPolicy("tova+snapkv").status().message(),
              HasSubstr("tova and snapkv both give tokens of a layer up"));
  EXPECT_THAT(FindPolicy("tova+tovo").status().message(), StartsWith("there is no policy 'tovo'"));
}

// K/V in blocks, a saved context, a batch, and a fork under every policy.
TEST(Compositions, FormatsSavedContextsBatchesAndForks) {
  const std::string file = testing::TempDir() + "omnikv_pair_" + std::to_string(::getpid());
  for (const char* const dtype : {"f32", "q8_0", "q4_0"}) {
    const auto engine = *Open({.name = "full"}, "device", dtype);
    std::vector<std::pair<PolicyOptions, Logits>> alone;
    for (const PolicyInfo& info : AllPolicies()) {
      SCOPED_TRACE(info.name + " " + dtype);
      const PolicyOptions policy = Small(info);
      alone.emplace_back(policy, RunSession(*engine, policy));
      const Logits& expected = alone.back().second;
      const auto session = Take(engine->NewSession(policy));
      ASSERT_TRUE(session->Prompt(Prompt()).ok());
      ASSERT_TRUE(session->Save(file).ok());
      const auto restored = engine->Restore(file);
      ASSERT_TRUE(restored.ok()) << restored.status().message();
      EXPECT_EQ(Decode(*engine, **restored, kSteps), expected);
      auto batch = Batch::Open(CoreOf(*engine), policy, 2);
      ASSERT_TRUE(batch.ok()) << batch.status().message();
      const auto member = (*batch)->Join(Prompt());
      ASSERT_TRUE(member.ok()) << member.status().message();
      const float* logits = (*batch)->logits(*member);
      EXPECT_EQ(std::vector<float>(logits, logits + engine->vocab()), expected.front());
    }
    for (const auto& [parent_policy, unused] : alone) {
      const auto parent = Take(engine->NewSession(parent_policy));
      ASSERT_TRUE(parent->Prompt(Prompt()).ok());
      for (const auto& [policy, expected] : alone) {
        SCOPED_TRACE(parent_policy.name + " to " + policy.name + " " + dtype);
        const auto fork = parent->Fork(policy);
        ASSERT_TRUE(fork.ok()) << fork.status().message();
        EXPECT_EQ(Decode(*engine, **fork, kSteps), expected);
      }
    }
  }
  std::remove(file.c_str());
}

// Engines whose own layers live on the host, with every policy's sessions and batches.
class HostTier : public ::testing::TestWithParam<std::string> {};

TEST_P(HostTier, EveryPolicyBesideEveryOther) {
  const auto near = *Open({.name = "full"}, "device", GetParam());
  int opened = 0;
  for (const PolicyInfo& info : AllPolicies()) {
    const PolicyOptions own = Small(info);
    SCOPED_TRACE("opened with " + info.name);
    const auto engine = Open(own, "host", GetParam());
    const bool refused = RuleOf(Use::kPlacedOnHost).refuses(*Prepared(own));
    if (refused) {
      EXPECT_EQ(engine.status().code(), StatusCode::kUnsupported);
      EXPECT_THAT(engine.status().message(),
                  StartsWith(Sentence(Use::kPlacedOnHost, info.name, "", "host")));
      continue;
    }
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    ++opened;
    for (const PolicyInfo& other : AllPolicies()) {
      SCOPED_TRACE(other.name);
      const PolicyOptions policy = Small(other);
      const auto prepared = Prepared(policy);
      const auto session = (*engine)->NewSession(policy);
      EXPECT_EQ(RuleOf(Use::kBesideHostKv).refuses(*prepared), other.kind == PolicyKind::kForgets);
      if (RuleOf(Use::kBesideHostKv).refuses(*prepared)) {
        EXPECT_EQ(session.status().code(), StatusCode::kUnsupported);
        EXPECT_EQ(session.status().message(), Sentence(Use::kBesideHostKv, other.name));
        continue;
      }
      if (!CoreOf(**engine).bank->HasStages() && RuleOf(Use::kBesideLastRows).refuses(*prepared)) {
        EXPECT_EQ(session.status().code(), StatusCode::kUnsupported);
        EXPECT_EQ(session.status().message(),
                  Sentence(Use::kBesideLastRows, other.name, info.name));
        continue;
      }
      ASSERT_TRUE(session.ok()) << session.status().message();
      const auto away = RunSession(**engine, policy);
      const auto here = RunSession(*near, policy);
      if (GroupOf(**session).residency().AttendsAway()) {  // a sum of two attentions is rounded
        ASSERT_EQ(away.size(), here.size());
        for (size_t i = 0; i < here.size(); ++i) {
          EXPECT_THAT(away[i], testing::Pointwise(testing::FloatNear(1e-5f), here[i]));
        }
      } else {
        EXPECT_EQ(away, here);
      }
      const bool streamed = !GroupOf(**session).residency().CanRecord();
      const auto batch = Batch::Open(CoreOf(**engine), policy, 2);
      EXPECT_EQ(batch.ok(), !streamed) << batch.status().message();
      if (!streamed) continue;
      EXPECT_EQ(batch.status().code(), StatusCode::kUnsupported);
      EXPECT_EQ(batch.status().message(), Sentence(Use::kStreamedBatch, other.name, 2));
      EXPECT_EQ(SharedStep(**engine, policy).message(), Sentence(Use::kStreamedStep, other.name));
    }
  }
  // omnikv, brutal_offload, kcache, whose V alone go, blocks and quest, which are attended to away,
  // and infllm.
  EXPECT_EQ(opened, 6);
}

INSTANTIATE_TEST_SUITE_P(Formats, HostTier, ::testing::Values("f32", "q8_0"),
                         [](const auto& of) { return of.param; });

// Layers with a sliding window lose rows as passes over a prompt go on.
TEST(Compositions, ModelsWithWindows) {
  ModelConfig config = Model();
  for (const size_t layer : {0, 2, 3, 5}) config.layers[layer].window = 32;
  EngineOptions options;
  options.context = 300;
  options.prefill_chunk = 48;
  options.max_sessions = 2;
  options.policy = {.name = "full"};
  const auto engine = *LoadEngine(options, MadeUpModel(config, DType::kF32), [] {
    return Result<std::unique_ptr<Backend>>(std::make_unique<Card>());
  });
  int refused = 0, run = 0;
  const Logits full = RunSession(*engine, {.name = "full"});
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    const PolicyOptions policy = Small(info);
    const auto session = engine->NewSession(policy);
    if (RuleOf(Use::kWindowLayers).refuses(*Prepared(policy))) {
      ++refused;
      EXPECT_EQ(session.status().code(), StatusCode::kUnsupported);
      EXPECT_EQ(session.status().message(),
                Sentence(Use::kWindowLayers, info.name, "small", "full"));
      continue;
    }
    if (!session.ok()) {  // settings of layers that are not global here
      EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(session.status().message(), StartsWith("policy " + info.name + ": "));
      continue;
    }
    ++run;
    const Logits logits = RunSession(*engine, policy);
    if (Prepared(policy)->DensePrompts()) {
      EXPECT_EQ(logits[0], full[0]);
    }
  }
  EXPECT_EQ(refused, 1);  // kvzip
  EXPECT_GE(run, 14);
}

// K and V apart, as kcache has them: what gathers rows of a prompt is refused, all else runs.
TEST(Compositions, ValuesApartFromKeys) {
  const auto engine = *Open({.name = "kcache", .settings = {{"budget", "16"}}}, "device");
  const auto with = [](const PolicyInfo& info, SettingList more) {
    PolicyOptions policy = Small(info);
    policy.settings.insert(policy.settings.end(), more.begin(), more.end());
    return policy;
  };
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    EXPECT_EQ(RunSession(*engine, Small(info)).size(), size_t{kSteps} + 1);
    if (info.name != "omnikv" && info.name != "kascade") continue;
    const PolicyOptions sparse =
        info.name == "omnikv" ? with(info, {{"prefill", "sparse"}, {"r", "1"}, {"chunk", "16"}})
                              : with(info, {{"prefill", "sparse"}, {"share", "0.1"}});
    const Status status = engine->NewSession(sparse).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_EQ(status.message(), Sentence(Use::kValuesApart, info.name, "kcache"));
  }
}

// An engine that gives tokens of some KV heads back serves policies that divide heads as its own.
TEST(Compositions, HeadsThatAnotherPolicyGivesBack) {
  const auto divides = [](PolicyKind kind) {
    return kind == PolicyKind::kHeads || kind == PolicyKind::kHeadsSelect;
  };
  int opened = 0;
  for (const PolicyInfo& own : AllPolicies()) {
    if (!divides(own.kind)) continue;
    ++opened;
    const auto engine = *Open(Small(own), "device");
    for (const PolicyInfo& info : AllPolicies()) {
      SCOPED_TRACE(info.name + " on " + own.name);
      const PolicyOptions policy = Small(info);
      if (divides(info.kind)) {
        EXPECT_TRUE(Finite(RunSession(*engine, policy)));
        continue;
      }
      const Status status = engine->NewSession(policy).status();
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);
      std::vector<std::string> sentences;  // of any head and layer
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (const int32_t head : {0, 1}) {
          sentences.push_back(Sentence(Use::kOthersHeads, info.name, own.name, head, layer));
        }
      }
      EXPECT_THAT(sentences, testing::Contains(status.message()));
      EXPECT_EQ(engine->CheckPolicy(policy).message(), status.message());
    }
  }
  EXPECT_EQ(opened, 2);  // duo and omnikv_duo
}

// And so does one that has rows of their own for the KV heads.
TEST(Compositions, HeadsThatAnotherPolicyHasApart) {
  const auto engine = *Open(Small(**FindPolicy("kvzip")), "device");
  int run = 0;
  for (const PolicyInfo& info : AllPolicies()) {
    SCOPED_TRACE(info.name);
    const PolicyOptions policy = Small(info);
    if (!RuleOf(Use::kHeadsApart).refuses(*Prepared(policy))) {
      ++run;
      EXPECT_TRUE(Finite(RunSession(*engine, policy)));
      continue;
    }
    const Status status = engine->NewSession(policy).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_EQ(status.message(), Sentence(Use::kHeadsApart, info.name, "kvzip"));
    EXPECT_EQ(engine->CheckPolicy(policy).message(), status.message());
  }
  EXPECT_EQ(run, 1);  // kvzip
}

// Steps that complete no block leave its keys out. Where indices are forced, every step makes what
// there is to make: both choose the same, blocks of generated tokens among them.
TEST(Compositions, GeneratedBlocksAreSeen) {
  const auto engine = *Open({.name = "full"}, "device");
  for (const PolicyOptions& policy :
       {PolicyOptions{.name = "quest",
       .settings = {{"budget", "24"}, {"page", "4"}, {"dense_layers", "0"}}},
        PolicyOptions{.name = "quest",
        .settings = {{"budget", "32"}, {"page", "8"}, {"score", "mean_std"}}},
        PolicyOptions{.name = "blocks",
        .settings = {{"budget", "40"}, {"block", "8"}, {"sinks", "8"}, {"recent", "8"}}}}) {
    SCOPED_TRACE(policy.name);
    PolicyOptions forced = policy;
    forced.force_indices = true;
    const auto a = Take(engine->NewSession(policy)), b = Take(engine->NewSession(forced));
    ASSERT_TRUE(a->Prompt(Prompt()).ok());
    ASSERT_TRUE(b->Prompt(Prompt()).ok());
    EXPECT_EQ(Decode(*engine, *a, 90), Decode(*engine, *b, 90));
  }
}

// What a file says is part of a group's key, under whatever name: kept and stored rows are of it.
TEST(Compositions, FilesArePartOfKeys) {
  const auto engine = *Open({.name = "full"}, "device");
  const std::string file = testing::TempDir() + "/gates_" + std::to_string(::getpid()) + ".tsv";
  const auto key = [&](const char* line) {
    std::ofstream out(file);
    for (int layer = 0; layer < kLayers; ++layer) out << line << "\n";
    out.close();
    return *GroupPool::KeyOf(CoreOf(*engine), {.name = "duo", .settings = {{"gates", file}}});
  };
  const std::string first = key("0\t1");
  EXPECT_NE(first, key("1\t0"));
  EXPECT_EQ(first, key("0\t1"));
  std::remove(file.c_str());
}

}  // namespace
}  // namespace omnikv::compositions_test
