// What is really held under each policy, against what its method needs. Memory is counted where it
// is allocated, on a card as its driver says, or as pages of the process, and never as a policy or
// a plan says. What is needed stands here as formulas of their own. Two contexts and two numbers of
// sequences are compared, so weights and activations cancel.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>

#include "../made_up_model.h"
#include "../test_data.h"
#include "as_device.h"
#include "backend/ref/ref_backend.h"
#include "base/memory.h"
#include "counting_backend.h"
#include "engine/batch.h"
#include "engine/core.h"
#include "engine/devices.h"
#include "on_device.h"
#include "resources.h"
#include "sessions.h"

namespace omnikv::held_memory_test {
namespace {

constexpr double kTolerance = 0.03;  // of what a formula gives
constexpr double kMiB = 1 << 20;
// The attention of a model of 8B parameters (Llama-3-8B). All else of the model is narrow.
constexpr double kLayers = 32, kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr double kHeadRow = 2 * kDim * 2;     // bytes of K and V of a token in a KV head, in f16
constexpr double kRow = kKvHeads * kHeadRow;  // in all of them
constexpr double kKey = 4 * kKvHeads * kDim;  // bytes of an f32 key for each KV head
constexpr double kKeyOfHeads = 4 * kHeads * kDim;  // for each query head
constexpr int32_t kWidth = 64;                     // values of a residual
constexpr double kChunk = 64;                      // rows of a prefill step, and of an answer

ModelConfig Geometry(int32_t n_layers) {
  ModelConfig config = SmallLlama({.n_layers = n_layers,
                                   .d_model = kWidth,
                                   .head_dim = 128,
                                   .ffn = 64,
                                   .max_context = 1 << 17});
  config.n_heads = 32;
  config.n_kv_heads = 8;
  return config;
}

using Formula = std::function<double(double n)>;  // bytes of a sequence, for a context of n tokens

// A policy and what its method needs in the memory where it computes. Where it is known to reserve
// more there, how much more, and why.
struct Case {
  std::string name;
  PolicyOptions policy;
  Formula needs;
  Formula besides = nullptr;
  std::string why = {};
  int64_t working_set = 0;  // EngineOptions::working_set
  Formula once = nullptr;   // of besides: what one sequence at a time takes
  std::string host_reads = "auto";
};

double All(double n) {
  return kLayers * n * kRow;
}

// An int4 copy of K for each of four layers, with a scale of 16 bits for each KV head.
double IndexOfFour(double n) {
  return 4 * n * kKvHeads * (kDim / 2 + 2);
}

double TwoStages(double n) {
  return 2 * n * kRow;
}

// Of pyramidkv: what the budget is more than what a layer keeps of a long prompt, in all layers
// where it is.
double MoreOfShortPrompts(double budget) {
  const double mean = budget - 32;  // beside the window
  const double least = mean / 20;   // beta
  double rows = 0;
  for (double layer = 0; layer < kLayers; ++layer) {
    const double of_long = 2 * mean - least - layer * 2 * (mean - least) / (kLayers - 1);
    rows += std::max(0.0, mean - of_long);
  }
  return rows * kRow;
}

// What infllm has of its own: the first rows and copies of blocks of 128 tokens, the window and a
// chunk, on whatever device; and what it is known to keep besides.
struct InfllmShape {
  double cache, recent;

  double Copies() const { return kLayers * (128 + cache * 128) * kRow; }
  double Window() const { return kLayers * (recent + kChunk) * kRow; }
  double Besides(double n) const {
    const double weights = kLayers * (recent + 128 + kChunk) * 5 * kHeads * 4;
    return kLayers * n / 128 * kKeyOfHeads + weights + n * kHeads * 4;
  }
  PolicyOptions Policy() const {
    return {.name = "infllm",
            .settings = {{"budget", fmt::format("{}", cache * 128)},
                         {"cache", fmt::format("{}", cache)},
                         {"recent", fmt::format("{}", recent)}}};
  }
};
const std::string kOfInfllm =
    "a key of each block for each query head, weights of the window after each of five steps, and "
    "logits with room for the context";

// Where all K/V live in the memory in which the policy computes. `budget` in tokens.
std::vector<Case> Near(double budget) {
  const auto with = [&](SettingList more = {}) {
    more.emplace_back("budget", fmt::format("{}", budget));
    return more;
  };
  const auto with_room = [&](SettingList more = {}) {
    more.emplace_back("room", fmt::format("{}", kChunk));
    return with(std::move(more));
  };
  const Formula kept = [=](double) { return kLayers * (budget + kChunk) * kRow; };
  const Formula sums = [=](double) { return kLayers * (budget + kChunk) * 5 * kKvHeads * 4; };
  const std::string of_sums =
      "sums of weights after each of five steps, so that steps can be undone";
  const InfllmShape infllm{.cache = budget / 128, .recent = budget};
  return {
      {"full", {.name = "full"}, All},
      {"brutal_offload", {.name = "brutal_offload"}, All},
      {"streaming",
       {.name = "streaming", .settings = with()},
       [=](double) { return kLayers * (budget + 64) * kRow; }},
      {"strided", {.name = "strided", .settings = with_room()}, kept},
      {"tova", {.name = "tova", .settings = with_room()}, kept},
      {"h2o", {.name = "h2o", .settings = with_room()}, kept, sums, of_sums},
      {"h2o_chunked",
       {.name = "h2o", .settings = with_room({{"mode", "chunked"}, {"chunk", "64"}})},
       kept,
       sums,
       of_sums},
      {"h2o_observed", {.name = "h2o", .settings = with_room({{"mode", "observed"}})}, kept},
      {"snapkv", {.name = "snapkv", .settings = with_room()}, kept},
      {"knorm", {.name = "knorm", .settings = with_room()}, kept},
      {"keydiff", {.name = "keydiff", .settings = with_room()}, kept},
      {"expected_attention", {.name = "expected_attention", .settings = with_room()}, kept},
      {"pyramidkv",
       {.name = "pyramidkv", .settings = with_room()},
       kept,
       [=](double) { return MoreOfShortPrompts(budget); },
       "room for prompts hardly longer than the budget, of which the last layers keep more"},
      {"kvzip",
       {.name = "kvzip", .settings = {{"ratio", "0.25"}, {"room", fmt::format("{}", kChunk)}}},
       [](double n) { return 0.25 * All(n); },
       [](double n) { return 0.75 * All(n); },
       "room for one whole prompt, which stays until its passes are over",
       0,
       [](double n) { return 0.75 * All(n); }},
      {"duo",
       {.name = "duo",
        .settings = {{"gates", TestData("tests/golden/gates/32x8.tsv")},
                     {"sparsity", "0.5"},
                     {"sinks", "64"},
                     {"recent", fmt::format("{}", budget)}}},
       [=](double n) { return kLayers * kKvHeads / 2 * (n + 64 + budget + 64) * kHeadRow; }},
      {"omnikv_duo",
       {.name = "omnikv_duo",
        .settings = with({{"gates", TestData("tests/golden/gates/32x8.tsv")},
                          {"sparsity", "0.5"},
                          {"filters", "2,13"},
                          {"dense_after_filter", "0"},
                          {"stream_sinks", "64"},
                          {"stream_recent", fmt::format("{}", budget)}})},
       [=](double n) {
         return kLayers * kKvHeads / 2 * (n + 64 + budget + 64) * kHeadRow + 4 * n * 2;
       }},
      {"quest",
       {.name = "quest", .settings = with()},
       [](double n) { return All(n) + (kLayers - 2) * n / 16 * kKey; }},
      {"blocks",
       {.name = "blocks"},
       [](double n) { return All(n) + (kLayers - 2) * n / 128 * kKey; }},
      {"infllm", infllm.Policy(),
       [=](double n) { return All(n) + infllm.Copies() + kLayers * kChunk * kRow; },
       [=](double n) { return infllm.Besides(n); }, kOfInfllm},
      {"kcache", {.name = "kcache"}, All},
      {"kascade", {.name = "kascade"}, All},
      {"omnikv",
       {.name = "omnikv", .settings = with({{"filters", "2,13"}, {"dense_after_filter", "0"}})},
       [](double n) { return All(n) + 4 * n * 2; }},
      {"omnikv_indexed",
       {.name = "omnikv",
        .settings = with({{"filters", "2,13"}, {"dense_after_filter", "0"}, {"dense", "indexed"}})},
       [](double n) { return All(n) + IndexOfFour(n); }},
  };
}

// With all K/V in host memory that may be there: what the card holds.
std::vector<Case> OfCards() {
  const InfllmShape infllm{.cache = 64, .recent = 8192};
  return {
      {"blocks",
       {.name = "blocks", .settings = {{"recent", "8192"}, {"budget", "16384"}}},
       [](double n) { return 2 * n * kRow + (kLayers - 2) * (8192 * kRow + n / 128 * kKey); },
       [](double n) { return TwoStages(n) + (kLayers - 2) * n / 128 * kKey; },
       "two stages, through which layers of a prompt pass whole, and a second key of each block",
       0,
       TwoStages},
      {"blocks_fetched",
       {.name = "blocks", .settings = {{"recent", "8192"}, {"budget", "16384"}}},
       [](double n) { return 2 * n * kRow + (kLayers - 2) * (16384 * kRow + n / 128 * kKey); },
       [](double n) { return TwoStages(n) + (kLayers - 2) * n / 128 * kKey; },
       "two stages, through which layers of a prompt pass whole, and a second key of each block",
       16384,
       TwoStages,
       "fetch"},
      {"infllm", infllm.Policy(), [=](double) { return infllm.Copies() + infllm.Window(); },
       [=](double n) { return infllm.Besides(n); }, kOfInfllm},
      {"kcache",
       {.name = "kcache"},
       [](double n) { return (kLayers + 1) * n * kRow / 2; },
       [](double n) { return n * kRow; },
       "two stages of V, through which layers of a prompt pass whole"},
      {"omnikv_indexed",
       {.name = "omnikv",
        .settings = {{"filters", "2,13"},
                     {"dense_after_filter", "0"},
                     {"dense", "indexed"},
                     {"budget", "4096"}}},
       [](double n) { return (kLayers - 4) * 8192 * kRow + IndexOfFour(n); },
       [](double n) { return TwoStages(n) + 4 * std::min(n, 2.0 * 4 * 4096) * kRow; },
       "two stages, through which layers of a prompt pass whole, and in four layers places for "
       "twice the tokens that get exact scores",
       8192,
       TwoStages},
      {"quest",
       {.name = "quest", .settings = {{"budget", "4096"}}},
       [](double n) { return 2 * n * kRow + (kLayers - 2) * (n / 16 * kKey + 3 * 64 * kRow); },
       TwoStages,
       "two stages, through which layers of a prompt pass whole",
       0,
       TwoStages},
      {"omnikv",
       {.name = "omnikv",
        .settings = {{"filters", "2,13"}, {"dense_after_filter", "0"}, {"budget", "4096"}}},
       [](double n) { return 4 * n * kRow + (kLayers - 4) * 8192 * kRow + 4 * n * 2; },
       TwoStages,
       "two stages, through which layers of a prompt pass whole",
       8192,
       TwoStages},
  };
}

class HeldMemory : public testing::TestWithParam<std::tuple<Case, std::string>> {
 protected:
  const Case& of() const { return std::get<0>(GetParam()); }
  const std::string& device() const { return std::get<1>(GetParam()); }
  bool on_cuda() const { return device() == "cuda"; }

  void SetUp() override {
    if (!on_cuda()) return;
    if (const std::string reason = WhyNotOn("cuda"); !reason.empty()) GTEST_SKIP() << reason;
    if (of().name == "brutal_offload") {
      GTEST_SKIP() << "on a card its layers pass through stages, in steps of one sequence";
    }
  }

  // An engine for the policy, whose memory `counts_` counts. "card": the reference plays one.
  std::unique_ptr<Engine> Open(int32_t n_layers, double context, int32_t n_seqs,
                               const std::string& place = "auto") {
    const EngineOptions options{.device = on_cuda() ? "cuda" : "cpu",
                                .threads = 2,
                                .context = static_cast<int64_t>(context),
                                .place = place,
                                .host_reads = of().host_reads,
                                .working_set = of().working_set,
                                .policy = of().policy,
                                .kv_dtype = "f16",
                                .prefill_chunk = static_cast<int32_t>(kChunk),
                                .max_sessions = n_seqs};
    auto engine = LoadEngine(options, MadeUpModel(Geometry(n_layers), DType::kBF16),
                             [&]() -> Result<std::unique_ptr<Backend>> {
                               OKV_ASSIGN_OR_RETURN(auto inner, MakeBackend(options));
                               if (device() == "card") {
                                 inner = std::make_unique<AsDevice>(MakeRefBackend());
                               }
                               // More than any machine has: of the host's memory little is touched.
                               auto counting = std::make_unique<CountingBackend>(std::move(inner),
                                                                                 size_t{1} << 42);
                               counts_ = counting.get();
                               return std::unique_ptr<Backend>(std::move(counting));
                             });
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  CountingBackend* counts_ = nullptr;  // of the last engine
};

// --- What is reserved, by the context that sequences may grow to and by their number.

class Reserved : public HeldMemory {
 protected:
  static constexpr double kShort = 32768, kLong = 65536;  // tokens

  struct Held {
    double bytes = 0;
    std::map<std::string, size_t> by_name;  // what they are; of a driver, those it knows of
  };

  void Check(const std::string& place) {
    // A driver loads kernels when they are first needed, and keeps them.
    for (int32_t n_seqs = 1; on_cuda() && n_seqs <= 2; ++n_seqs) Measure(kShort, n_seqs, place);
    const Held few = Measure(kShort, 1, place);
    const Held more = Measure(kLong, 1, place);
    const Held two = Measure(kLong, 2, place);
    if (HasFailure()) return;
    const auto total = [&](double n) {
      return of().needs(n) + (of().besides ? of().besides(n) : 0);
    };
    if (of().besides) {
      const double needs = of().needs(kLong);
      std::cout << fmt::format("{} reserves more than it needs, {:.0f} MiB beside {:.0f}: {}\n",
                               of().name, of().besides(kLong) / kMiB, needs / kMiB, of().why);
      const double measured =
          of().once ? more.bytes - few.bytes + of().needs(kShort) : two.bytes - more.bytes;
      EXPECT_GT(std::abs(measured - needs), kTolerance * needs)
          << "what is known to be reserved besides is no more";
    }
    Compare(few, more, total(kLong) - total(kShort), "a longer context");
    Compare(more, two, total(kLong) - (of().once ? of().once(kLong) : 0), "another sequence");
  }

 private:
  // After a prompt and a step of each sequence; of a played card without.
  Held Measure(double context, int32_t n_seqs, const std::string& place) {
    const int64_t before = OfTheDriver();
    const auto engine = Open(32, context, n_seqs, place);
    if (engine == nullptr) return {};
    const auto batch = Batch::Open(CoreOf(*engine), of().policy, n_seqs);
    EXPECT_TRUE(batch.ok()) << batch.status().message();
    if (!batch.ok()) return {};
    std::vector<Batch::Next> next;
    for (int32_t i = 0; i < n_seqs; ++i) {
      const bool computes = device() != "card";
      const auto member = computes ? (*batch)->Join(Numbers(100, i)) : (*batch)->JoinMadeUp(100);
      EXPECT_TRUE(member.ok()) << member.status().message();
      if (member.ok() && computes) next.push_back({*member, 7});
    }
    if (!next.empty()) {
      EXPECT_TRUE((*batch)->Step(next).ok());
    }
    if (on_cuda()) {
      // A driver gives whole pages, and keeps 8 bytes for each 4 KiB of host memory that it maps.
      const size_t on_host = Bank::ReservedBytes(CoreOf(*engine).bank->config(), TierKind::kHost);
      const auto of_driver = static_cast<double>(counts_->padding() + on_host / 512);
      return {static_cast<double>(OfTheDriver() - before) - of_driver, counts_->held_by_name()};
    }
    return {static_cast<double>(counts_->held()), counts_->held_by_name()};
  }

  // Bytes in use on the card. Only there: to ask for them takes memory of a card.
  int64_t OfTheDriver() const { return on_cuda() ? Resources::Now().device : 0; }

  // What is as large for every context may differ by a share of what is held.
  void Compare(const Held& a, const Held& b, double expected, const char* what) const {
    const double room = kTolerance * (expected > 0 ? expected : of().needs(kLong));
    std::string parts;
    for (const auto& [name, bytes] : b.by_name) {
      const auto before = a.by_name.find(name);
      const size_t then = before == a.by_name.end() ? 0 : before->second;
      if (bytes == then) continue;
      parts += fmt::format("\n  {}: {:.3f} MiB", name, static_cast<double>(bytes - then) / kMiB);
    }
    EXPECT_NEAR((b.bytes - a.bytes) / kMiB, expected / kMiB, room / kMiB)
        << "MiB that " << what << " takes" << parts;
  }
};

class ReservedNear : public Reserved {};
class ReservedOfCards : public Reserved {};

TEST_P(ReservedNear, IsWhatTheMethodNeeds) {
  Check(on_cuda() ? "device" : "auto");
}
TEST_P(ReservedOfCards, IsWhatTheMethodNeeds) {
  Check("host");
}

// --- What a prompt takes while it is read, by its length.

class AtThePeak : public HeldMemory {
 protected:
  // Beside what is held before it.
  double Peak(size_t tokens) {
    const auto engine = Open(2, /*context=*/2048, 1, on_cuda() ? "device" : "auto");
    if (engine == nullptr) return 0;
    const auto session = Take(engine->NewSession(of().policy));
    const size_t before = counts_->held();
    EXPECT_TRUE(session->Prompt(Numbers(tokens, 1)).ok());
    EXPECT_EQ(counts_->held(), before) << "is not given back";
    return static_cast<double>(counts_->most() - before);
  }
};

// One layer, and the residual of its rows, where the prompt ends in a choice of rows; nothing where
// rows are dropped, or chosen chunk by chunk.
TEST_P(AtThePeak, OneLayerOfThePrompt) {
  const bool chunked = of().name == "h2o_chunked" || of().name == "streaming";
  const double expected = chunked ? 0 : 1024 * (kRow + kWidth * 4);
  const double room = kTolerance * 1024 * kRow;
  EXPECT_NEAR(Peak(1984) - Peak(960), expected, room);
}

// --- What a process holds on the CPU, by the tokens in context: made-up K/V, so without the passes
// of kvzip, which also touch what they give back.

class OfTheProcess : public HeldMemory {
 protected:
  double Resident(int64_t tokens) {
    const auto engine = Open(32, /*context=*/16384, 1);
    if (engine == nullptr) return 0;
    const double before = Pages();
    const auto session = Take(engine->NewSession(of().policy));
    const Status filled = session->FillContext(tokens);
    EXPECT_TRUE(filled.ok()) << filled.message();
    EXPECT_TRUE(session->Step(5).ok());
    return Pages() - before;
  }

 private:
  static double Pages() {
    malloc_trim(0);
    return static_cast<double>(ResidentMemory());
  }
};

TEST_P(OfTheProcess, IsWhatTheMethodNeeds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps freed memory for a while";
#endif
  // Whole huge pages would hide what is not touched.
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  const double expected = of().needs(3584) - of().needs(1536);
  const double room = kTolerance * (expected > 0 ? expected : of().needs(3584));
  EXPECT_NEAR((Resident(3584) - Resident(1536)) / kMiB, expected / kMiB, room / kMiB);
}

TEST(HeldMemoryCases, EveryPolicyHasOne) {
  const std::vector<Case> cases = Near(8192);
  for (const PolicyInfo& info : AllPolicies()) {
    if (info.facts.source.empty()) continue;  // of another folder than src/policy
    EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [&](const Case& c) {
      return c.policy.name == info.name;
    })) << info.name;
  }
}

std::vector<Case> Choosing() {
  std::vector<Case> cases = Near(256);
  std::erase_if(cases, [](const Case& c) {
    const PolicyInfo& info = **ResolvePolicy(c.policy.name, "", 1);
    return info.kind != PolicyKind::kForgets && info.kind != PolicyKind::kWindow;
  });
  std::erase_if(cases, [](const Case& c) { return c.name == "kvzip"; });  // keeps all until then
  return cases;
}

std::string CaseName(const testing::TestParamInfo<std::tuple<Case, std::string>>& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param);
}

const auto kOnCpu = testing::Values("cpu");
const auto kOnAll = testing::Values("cpu", "cuda");
const auto kOnCards = testing::Values("card", "cuda");
INSTANTIATE_TEST_SUITE_P(Policies, ReservedNear,
                         testing::Combine(testing::ValuesIn(Near(8192)), kOnAll), CaseName);
INSTANTIATE_TEST_SUITE_P(Policies, ReservedOfCards,
                         testing::Combine(testing::ValuesIn(OfCards()), kOnCards), CaseName);
INSTANTIATE_TEST_SUITE_P(Policies, AtThePeak,
                         testing::Combine(testing::ValuesIn(Choosing()), kOnAll), CaseName);
INSTANTIATE_TEST_SUITE_P(Policies, OfTheProcess,
                         testing::Combine(testing::ValuesIn(Near(512)), kOnCpu), CaseName);

}  // namespace
}  // namespace omnikv::held_memory_test
