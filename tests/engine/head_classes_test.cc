// Policies that tell KV heads apart, on an engine whose bank does too: heads that forget give
// memory back, whatever a session does, and sessions that would miss it are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "../made_up_model.h"
#include "../test_data.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "golden_data.h"
#include "omnikv/engine.h"
#include "on_device.h"
#include "sessions.h"

namespace omnikv::head_classes_test {
namespace {

using ::testing::HasSubstr;

const std::string kRandom = TestData("tests/golden/policy_model");  // 8 layers, 2 KV heads of 16
const std::string kShipped = TestData("models/omnikv-tiny-q8_0.gguf");  // 16 layers, 2 of 64
const std::string kGates = TestData("tests/golden/gates/8x2.tsv");

PolicyOptions Duo(const std::string& sinks, const std::string& recent,
                  const std::string& sparsity = "0.5", const std::string& gates = kGates) {
  return {
      .name = "duo",
      .settings = {{"gates", gates}, {"sinks", sinks}, {"recent", recent}, {"sparsity", sparsity}}};
}

// omnikv among the heads that retrieve.
PolicyOptions OmnikvDuo(SettingList settings, const std::string& sparsity = "0.5") {
  const SettingList small = {{"gates", kGates},       {"filters", "1,5"},    {"budget", "24"},
                             {"tail", "4"},           {"dense_below", "0"},  {"stream_sinks", "4"},
                             {"stream_recent", "16"}, {"sparsity", sparsity}};
  settings.insert(settings.end(), small.begin(), small.end());
  return {.name = "omnikv_duo", .settings = std::move(settings)};
}

class HeadClassesOn : public OnDevice {
 protected:
  // An engine opened with `policy`.
  static std::unique_ptr<Engine> LoadFor(const PolicyOptions& policy) {
    return Load({.model = kRandom,
                 .device = GetParam(),
                 .context = 448,
                 .policy = policy,
                 .prefill_chunk = 48,
                 .max_sessions = 4});
  }
  // The same bits on ref; elsewhere prompts came in other pieces.
  static void ExpectSame(const Logits& got, const Logits& expected) {
    ASSERT_EQ(got.size(), expected.size());
    if (GetParam() == "ref") {
      EXPECT_EQ(got, expected);
      return;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LE(Error(got[i].data(), expected[i]), F32Tolerance(GetParam())) << i;
    }
  }
};

const PolicyOptions kPolicies[] = {Duo("4", "16"), Duo("0", "70", "0.25"), Duo("70", "8", "0.75"),
                                   Duo("4", "16", "1"), Duo("4", "16", "0")};
const PolicyOptions kSelecting[] = {
    OmnikvDuo({}), OmnikvDuo({{"score", "raw"}}, "0.25"), OmnikvDuo({{"top_p", "0.5"}}),
    OmnikvDuo({{"selector", "exp"}, {"window", "4"}}), OmnikvDuo({}, "0")};
// With state of their own, or without.
const PolicyOptions kBoth[] = {Duo("4", "16"),
                               OmnikvDuo({{"selector", "uniform"}, {"window", "4"}})};

TEST_P(HeadClassesOn, OneTableOrTwoAreTheSame) {
  const auto other = LoadFor({.name = "full"});
  std::vector<PolicyOptions> policies(std::begin(kPolicies), std::end(kPolicies));
  policies.insert(policies.end(), std::begin(kSelecting), std::end(kSelecting));
  for (const PolicyOptions& policy : policies) {
    const auto engine = LoadFor(policy);
    Logits logits[2];
    const Engine* engines[] = {engine.get(), other.get()};
    for (int i = 0; i < 2; ++i) {
      const auto session = Take(const_cast<Engine*>(engines[i])->NewSession(policy));
      SCOPED_TRACE(session->stats().settings);
      ASSERT_TRUE(session->Prompt(Numbers(203, 1)).ok());
      logits[i] = Decode(*engines[i], *session, 80);
    }
    ExpectSame(logits[0], logits[1]);
  }
}

// Turns, forks and cuts, near and far, give what a session gives that knew nothing of them. What
// others write in between goes to memory that was given back.
TEST_P(HeadClassesOn, TurnsForksAndCuts) {
  for (const PolicyOptions& policy : kPolicies) {
    const auto engine = LoadFor(policy);
    const auto session = Take(engine->NewSession(policy));
    SCOPED_TRACE(session->stats().settings);
    const auto expect_fresh = [&](Session& got) {
      const auto fresh = Take(engine->NewSession(policy));
      ASSERT_TRUE(fresh->Prompt(got.tokens()).ok());
      ExpectSame(Decode(*engine, got, 12), Decode(*engine, *fresh, 12));
    };
    ASSERT_TRUE(session->Prompt(Numbers(190, 1)).ok());
    const auto fork = Take(session->Fork());
    Decode(*engine, *session, 30);
    std::vector<int32_t> turn = session->tokens();
    for (const int32_t t : Numbers(61, 5)) turn.push_back(t);
    ASSERT_TRUE(session->Prompt(turn).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 61);
    expect_fresh(*session);
    expect_fresh(*fork);
    // A cut of a few tokens; a cut to where streaming heads have lost what they would read.
    turn = fork->tokens();
    turn.resize(turn.size() - 3);
    turn.push_back(77);
    ASSERT_TRUE(fork->Prompt(turn).ok());
    EXPECT_LT(fork->stats().prefill_tokens, 10);
    expect_fresh(*fork);
    ASSERT_TRUE(session->Prompt(Numbers(150, 1)).ok());
    const bool streams = policy.settings.back().second != "0";
    EXPECT_EQ(session->stats().prefill_tokens, streams ? 150 : 1);
    expect_fresh(*session);
  }
}

// The same of policies whose decode steps choose, against sessions with the same steps.
TEST_P(HeadClassesOn, TurnsForksAndCutsOfSelections) {
  for (const PolicyOptions& policy : kSelecting) {
    const auto engine = LoadFor(policy);
    const auto session = Take(engine->NewSession(policy));
    SCOPED_TRACE(session->stats().settings);
    ASSERT_TRUE(session->Prompt(Numbers(190, 1)).ok());
    const auto fork = Take(session->Fork());
    const Logits steps = Decode(*engine, *session, 30);
    std::vector<int32_t> turn = session->tokens();
    for (const int32_t t : Numbers(61, 5)) turn.push_back(t);
    std::vector<int32_t> cut = fork->tokens();
    cut.resize(cut.size() - 3);
    cut.push_back(77);
    ASSERT_TRUE(fork->Prompt(cut).ok());
    EXPECT_LT(fork->stats().prefill_tokens, 10);
    ASSERT_TRUE(session->Prompt(turn).ok());
    EXPECT_EQ(session->stats().prefill_tokens, 61);
    {
      const auto fresh = Take(engine->NewSession(policy));
      ASSERT_TRUE(fresh->Prompt(cut).ok());
      ExpectSame(Decode(*engine, *fork, 12), Decode(*engine, *fresh, 12));
    }
    const auto again = Take(engine->NewSession(policy));
    ASSERT_TRUE(again->Prompt(Numbers(190, 1)).ok());
    ExpectSame(Decode(*engine, *again, 30), steps);
    ASSERT_TRUE(again->Prompt(turn).ok());
    ExpectSame(Decode(*engine, *session, 12), Decode(*engine, *again, 12));
    // To where streaming heads have lost what they would read.
    ASSERT_TRUE(session->Prompt(Numbers(150, 1)).ok());
    const bool streams = policy.settings.back().second != "0";
    EXPECT_EQ(session->stats().prefill_tokens == 150, streams);
    const auto first = Take(engine->NewSession(policy));
    ASSERT_TRUE(first->Prompt(Numbers(150, 1)).ok());
    ExpectSame(Decode(*engine, *session, 12), Decode(*engine, *first, 12));
  }
}

TEST_P(HeadClassesOn, BatchesAreSessions) {
  for (const PolicyOptions& policy : kBoth) {
    SCOPED_TRACE(policy.name);
    const auto engine = LoadFor(policy);
    const auto batch = *Batch::Open(CoreOf(*engine), policy, 2);
    std::vector<std::unique_ptr<Session>> alone;
    std::vector<Batch::Next> next;
    for (const size_t length : {150, 40}) {
      alone.push_back(Take(engine->NewSession(policy)));
      ASSERT_TRUE(alone.back()->Prompt(Numbers(length, 2)).ok());
      next.push_back({*batch->Join(Numbers(length, 2)), 5});
    }
    for (int step = 0; step < 60; ++step) {
      ASSERT_TRUE(batch->Step(next).ok());
      for (size_t i = 0; i < alone.size(); ++i) {
        ASSERT_TRUE(alone[i]->Step(next[i].token).ok());
        const float* got = batch->logits(next[i].member);
        ExpectSame({{got, got + engine->vocab()}},
                   {{alone[i]->logits(), alone[i]->logits() + engine->vocab()}});
        next[i].token = (next[i].token * 7 + 5) % engine->vocab();
      }
    }
  }
}

TEST_P(HeadClassesOn, SavedContextsComeBack) {
  const std::string path = testing::TempDir() + "omnikv_duo_" + std::to_string(::getpid());
  for (const PolicyOptions& policy : kBoth) {
    SCOPED_TRACE(policy.name);
    const auto engine = LoadFor(policy);
    const auto stays = Take(engine->NewSession(policy));
    ASSERT_TRUE(stays->Prompt(Numbers(230, 3)).ok());
    Decode(*engine, *stays, 9);
    ASSERT_TRUE(stays->Save(path).ok());
    {
      const auto other = LoadFor(policy);
      const auto goes = Take(other->Restore(path));
      EXPECT_EQ(goes->stats().held_fraction, stays->stats().held_fraction);
      EXPECT_EQ(Decode(*other, *goes, 40), Decode(*engine, *stays, 40));
    }
    for (const PolicyOptions& of_other :
         {PolicyOptions{.name = "full"}, Duo("4", "16", "0.25"), OmnikvDuo({}, "0.25")}) {
      const auto other = LoadFor(of_other);
      const auto refused = other->Restore(path);
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument)
          << refused.status().message();
    }
  }
  std::remove(path.c_str());
}

TEST_P(HeadClassesOn, RefuseWhoWouldReadWhatIsGivenBack) {
  const auto engine = LoadFor(Duo("4", "16"));
  const auto expect_refused = [](const Result<std::unique_ptr<Session>>& session,
                                 const std::string& name) {
    ASSERT_FALSE(session.ok());
    EXPECT_EQ(session.status().code(), StatusCode::kUnsupported);
    EXPECT_EQ(session.status().message(),
              "policy " + name +
                  " reads what policy duo, with which the engine was opened, gives back of KV head "
                  "0 in layer 1");
  };
  for (const char* name : {"full", "streaming", "omnikv", "tova"}) {
    expect_refused(engine->NewSession({.name = name}), name);
  }
  expect_refused(engine->NewSession(Duo("4", "16", "0")), "duo");
  expect_refused(engine->NewSession(OmnikvDuo({}, "0")), "omnikv_duo");
  EXPECT_TRUE(engine->NewSession(Duo("4", "16", "0.75")).ok());  // has these heads stream too
  EXPECT_TRUE(engine->NewSession(OmnikvDuo({})).ok());
  const auto session = Take(engine->NewSession(Duo("4", "16")));
  ASSERT_TRUE(session->Prompt(Numbers(30, 1)).ok());
  expect_refused(session->Fork({.name = "full"}), "full");
}

INSTANTIATE_TEST_SUITE_P(Devices, HeadClassesOn, testing::Values("ref", "cpu", "cuda"), NameOf);

// Of two lengths, streaming heads take the same, and the others a row a token.
TEST(HeadClasses, StreamingHeadsTakeTheSameAtAnyLength) {
  const std::string gates = TestData("tests/golden/gates/16x2.tsv");
  const PolicyOptions policy = Duo("4", "100", "0.5", gates);
  const auto engine = Load(
      {.model = kShipped, .device = "cpu", .context = 16384, .policy = policy, .kv_dtype = "f16"});
  constexpr size_t kHeadRow = 2 * 64 * 2;  // bytes: K and V of a head
  constexpr size_t kRetrieving = 16, kStreaming = 16;
  const auto held = [&](int64_t tokens) {
    const auto session = Take(engine->NewSession(policy));
    EXPECT_TRUE(session->FillContext(tokens).ok());
    return session->stats().held_bytes.host;
  };
  const size_t low = held(2048);
  EXPECT_EQ(held(12032) - low, (12032 - 2048) * kRetrieving * kHeadRow);
  // Sinks, and the last 100 tokens in three blocks.
  EXPECT_EQ(low, (2048 * kRetrieving + (64 + 128) * kStreaming) * kHeadRow);
  const BankConfig& bank = CoreOf(*engine).bank->config();
  EXPECT_LT(Bank::ReservedBytes(bank, TierKind::kDevice),
            (16384 + 128) * kRetrieving * kHeadRow + 4096 * kStreaming * kHeadRow);
}

PolicyOptions OnHeads(const std::string& gates, const SettingList& given) {
  SettingList settings = {{"gates", gates},        {"filters", "1,3"},   {"budget", "24"},
                          {"tail", "4"},           {"dense_below", "0"}, {"stream_sinks", "4"},
                          {"stream_recent", "16"}, {"threshold", "0.5"}};
  settings.insert(settings.end(), given.begin(), given.end());
  return {.name = "omnikv_duo", .settings = std::move(settings)};
}

// Heads of a class are the same where they have a table of their own, where they share one with
// others, and where another policy has some of those that stream among its retrieval heads.
TEST(HeadClasses, HeadsOfAClassMayLieAnywhere) {
  const std::string gates = testing::TempDir() + "omnikv_heads_" + std::to_string(::getpid());
  std::ofstream(gates) << "1\t0\t1\t0.3\t1\t1\n"
                          "0.3\t1\t0\t0\t1\t1\n"  // a filter
                          "1\t1\t0\t1\t0.3\t0\n"
                          "1\t0\t1\t1\t0.3\t1\n"  // a filter
                          "0\t0\t0.3\t0\t0\t0.3\n"
                          "0\t1\t0.3\t1\t0\t1\n";
  ModelConfig config = SmallLlama({.max_context = 300});
  config.n_heads = 12;
  config.n_kv_heads = 6;
  const auto open = [&](const std::string& device, const PolicyOptions& policy) {
    const EngineOptions options{.device = device,
                                .threads = 2,
                                .context = 300,
                                .policy = policy,
                                .precision = "full",
                                .prefill_chunk = 48,
                                .max_sessions = 2};
    auto engine =
        LoadEngine(options, MadeUpModel(config, DType::kF32), [&] { return MakeBackend(options); });
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return std::move(*engine);
  };
  for (const std::string device : {"ref", "cpu", "cuda"}) {
    if (const std::string reason = WhyNotOn(device); !reason.empty()) {
      std::printf("%s\n", reason.c_str());
      continue;
    }
    Logits last;
    for (const SettingList& settings :
         {SettingList{}, SettingList{{"score", "raw"}}, SettingList{{"dense_after_filter", "0"}},
          SettingList{{"selector", "uniform"}, {"window", "5"}}, SettingList{{"top_p", "0.5"}},
          SettingList{{"select_every_layer", "1"}, {"filters", "5"}}}) {
      const PolicyOptions policy = OnHeads(gates, settings);
      Logits logits[3];
      const SettingList fewer = {
          {"gates", gates}, {"threshold", "0.2"}, {"sinks", "4"}, {"recent", "16"}};
      const PolicyOptions of_engines[] = {
          policy, {.name = "full"}, {.name = "duo", .settings = fewer}};
      for (int i = 0; i < 3; ++i) {
        const auto engine = open(device, of_engines[i]);
        const auto session = Take(engine->NewSession(policy));
        SCOPED_TRACE(device + " " + session->stats().settings);
        ASSERT_TRUE(session->Prompt(Numbers(150, 1)).ok());
        logits[i] = Decode(*engine, *session, 40);
      }
      for (const Logits& others : {logits[1], logits[2]}) {
        ASSERT_EQ(logits[0].size(), others.size());
        for (size_t i = 0; i < logits[0].size(); ++i) {
          const double error = Error(logits[0][i].data(), others[i]);
          ASSERT_LE(error, device == "ref" ? 0 : F32Tolerance(device)) << i;
        }
      }
      EXPECT_NE(logits[0], last);
      last = logits[0];
    }
  }
  std::remove(gates.c_str());
}

// Without a name, gates are those beside the model, wherever the model is.
TEST(HeadClasses, GatesAreFoundBesideTheModel) {
  namespace fs = std::filesystem;
  const fs::path folder = testing::TempDir() + "omnikv_beside_" + std::to_string(::getpid());
  for (const char* place : {"a", "b"}) {
    fs::create_directories(folder / place);
    for (const char* name : {"config.json", "model.safetensors"}) {
      fs::copy_file(fs::path(kRandom) / name, folder / place / name);
    }
    fs::copy_file(kGates, folder / place / "duo.tsv");
  }
  const auto load = [&](const char* place) {
    return Load({.model = folder / place, .device = "cpu", .context = 256, .max_sessions = 2});
  };
  const auto engine = load("a");
  const PolicyOptions unnamed{.name = "duo", .settings = {{"sinks", "4"}, {"recent", "16"}}};
  const auto session = Take(engine->NewSession(unnamed));
  EXPECT_THAT(session->stats().settings, HasSubstr(" gates=duo.tsv "));
  const auto named = Take(engine->NewSession(Duo("4", "16")));
  ASSERT_TRUE(session->Prompt(Numbers(120, 1)).ok());
  ASSERT_TRUE(named->Prompt(Numbers(120, 1)).ok());
  EXPECT_EQ(Decode(*engine, *session, 5), Decode(*engine, *named, 5));
  const std::string saved = folder / "context";
  ASSERT_TRUE(session->Save(saved).ok());
  const auto moved = load("b");
  EXPECT_EQ(Take(moved->Restore(saved))->tokens(), session->tokens());
  // Not other gates: sessions of these read otherwise.
  std::string reversed;
  for (int layer = 0; layer < 8; ++layer) reversed += layer < 4 ? "0.9\t0.9\n" : "0.1\t0.1\n";
  std::ofstream(folder / "b" / "duo.tsv", std::ios::trunc) << reversed;
  EXPECT_EQ(moved->Restore(saved).status().code(), StatusCode::kCorrupt);
  std::ofstream(folder / "b" / "duo.tsv", std::ios::trunc) << "0.5\t2\n";
  EXPECT_THAT(moved->NewSession(unnamed).status().message(),
              HasSubstr("b/duo.tsv: line 1 has '2', expected numbers from 0 to 1"));
  fs::remove_all(folder);
}

TEST(HeadClasses, WhatSelectionsAmongHeadsCannotHave) {
  const auto engine = Load({.model = kRandom, .device = "cpu", .context = 256});
  const auto refusal = [&](const SettingList& settings) {
    return std::string(engine->NewSession(OnHeads(kGates, settings)).status().message());
  };
  EXPECT_EQ(refusal({{"filters", "1,3"}}),
            "policy omnikv_duo: filters is 1,3, but all KV heads of layer 3 stream by its gates, "
            "expected one that retrieves, to choose by");
  EXPECT_EQ(refusal({{"filters", "1"}, {"select_every_layer", "1"}}),
            "policy omnikv_duo: select_every_layer is 1, but all KV heads of layer 3 stream by its "
            "gates, expected one that retrieves, to choose by");
  EXPECT_THAT(refusal({{"filters", "1,5"}, {"lists", "per_kv_head"}}),
              HasSubstr("policy omnikv_duo: lists is per_kv_head, expected one: a KV head"));
  EXPECT_THAT(refusal({{"filters", "1,5"}, {"dense", "indexed"}}),
              HasSubstr("policy omnikv_duo: dense is indexed, expected exact: "));
  EXPECT_THAT(refusal({{"filters", "1,5"}, {"prefill", "sparse"}}),
              HasSubstr("policy omnikv_duo: prefill is sparse, expected dense: "));
  // What the parts say is said of the whole.
  EXPECT_EQ(refusal({{"filters", "1,9"}}),
            "policy omnikv_duo: filters names layer 9, but the model's 8 global-attention layers "
            "are 0 to 7");
  EXPECT_EQ(refusal({{"filters", "1,5"}, {"sparsity", "0.5"}}),
            "policy omnikv_duo: threshold and sparsity are both set, expected one");
  EXPECT_EQ(refusal({{"filters", "1,5"}}), "");
}

TEST(HeadClasses, MistakesInAFileOfGatesAreSentences) {
  const auto engine = Load({.model = kRandom, .device = "cpu", .context = 256});
  const std::string path = testing::TempDir() + "omnikv_gates_" + std::to_string(::getpid());
  const auto expect_refused = [&](const PolicyOptions& policy, const std::string& sentence) {
    const auto session = engine->NewSession(policy);
    ASSERT_FALSE(session.ok());
    EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session.status().message(), sentence);
  };
  const auto with_file = [&](const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
    return Duo("4", "16", "0.5", path);
  };
  const auto lines = [](size_t n, const std::string& line) {
    std::string text;
    for (size_t i = 0; i < n; ++i) text += line;
    return text;
  };
  const std::string of_file = "policy duo: gates: " + path + ": ";
  expect_refused({.name = "duo"},
                 "policy duo: gates is not set and there is no " + kRandom +
                     "/duo.tsv, expected the path of a file of gates, a line for each layer");
  expect_refused(Duo("4", "16", "0.5", path + ".none"),
                 "policy duo: gates: " + path + ".none: no such file");
  expect_refused(with_file(lines(7, "0.5\t1\n")),
                 of_file +
                     "has 7 lines, expected 8, one for each layer of the model that attends to all "
                     "tokens");
  expect_refused(with_file(lines(2, "0.5\t1\n") + "0.5\n"),
                 of_file + "line 3 has 1 numbers, expected 2, one for each KV head of the model");
  for (const char* wrong : {"1.5", "-0.1", "nan", "x", ""}) {
    expect_refused(with_file("0.5\t1\n" + std::string(wrong) + "\t0.5\n"),
                   of_file + "line 2 has '" + wrong + "', expected numbers from 0 to 1");
  }
  PolicyOptions both = with_file(lines(8, "0.5\t1\r\n"));
  EXPECT_TRUE(engine->NewSession(both).ok());
  both.settings.emplace_back("threshold", "0.3");
  expect_refused(both, "policy duo: threshold and sparsity are both set, expected one");
  std::remove(path.c_str());
}

}  // namespace
}  // namespace omnikv::head_classes_test
