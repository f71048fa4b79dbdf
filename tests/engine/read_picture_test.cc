// Pictures of what layers read, against what their attention got, what policies say that they read,
// and what each policy is known to do.
#include "engine/read_picture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>

#include "../made_up_model.h"
#include "../policy_settings.h"
#include "../test_data.h"
#include "as_device.h"
#include "backend/forwarding_backend.h"
#include "backend/kv_format.h"
#include "backend/ref/ref_backend.h"
#include "backend/resolve_plan.h"
#include "engine/scheduler.h"
#include "model/generated.h"
#include "on_device.h"

namespace omnikv::read_picture_test {
namespace {

constexpr int32_t kLayers = 8;
constexpr int32_t kKvHeads = 2;

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

// The shares of every token that one attention after another got, counted by ResolvePlan: of steps
// of one row.
class Probe : public ForwardingBackend {
 public:
  explicit Probe(std::unique_ptr<Backend> backend)
      : ForwardingBackend(*backend), own_(std::move(backend)) {}

  void Enqueue(const Op& op, Lane lane = Lane::kMain) override {
    if (std::holds_alternative<EmbedArgs>(op)) layers.clear();
    if (std::holds_alternative<NormQkvRopeAppendArgs>(op)) layers.emplace_back(512);
    ForwardingBackend::Enqueue(op, lane);
    const auto* attend = std::get_if<AttendArgs>(&op);
    if (attend == nullptr || attend->o == nullptr || !on) return;
    for (const std::vector<int32_t>& of_head : ResolvePlan(inner(), *attend)) {
      for (const int32_t token : of_head) {
        layers.back().at(static_cast<size_t>(token)) +=
            1.0f / static_cast<float>(kKvHeads * attend->kv.HeadRepeats());
      }
    }
  }

  bool on = false;
  std::vector<std::vector<float>> layers;  // [n_layers][tokens]

 private:
  std::unique_ptr<Backend> own_;
};

struct House {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Scheduler> scheduler;
};

// `place`: of K/V. `window`: of the first layer, which has none where it is 0.
House Make(std::unique_ptr<Backend> backend, const PolicyOptions& policy,
           const std::string& place = "device", int32_t window = 0) {
  auto core = std::make_unique<EngineCore>();
  const bool on_device = backend->OnDevice();
  const bool card = on_device && backend->Describe().find("ref") == std::string::npos;
  core->backend = std::move(backend);
  core->options = {.context = 400, .max_sessions = 8};
  if (on_device) core->options.place = place;
  core->options.policy = policy;
  core->options.kv_dtype = card ? "f16" : "f32";
  core->options.prefill_chunk = 48;
  SmallShape shape{.n_layers = kLayers, .max_context = 400};
  if (card) shape.d_model = 128, shape.head_dim = 64, shape.ffn = 256;
  ModelConfig& config = core->config = SmallLlama(shape);
  config.layers[0].window = window;
  auto weights = GenerateWeights(*core->backend, config, card ? DType::kBF16 : DType::kF32);
  EXPECT_TRUE(weights.ok());
  core->weights = std::move(*weights);
  auto plan = PlanMemory(core->options, config, core->weights.bytes,
                         card ? DType::kBF16 : DType::kF32, *core->backend);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (place == "host") plan->working_set = 40;  // some rows must leave
  EXPECT_EQ(plan->host_layers > 0, place == "host" && on_device);
  auto engine = MakeEngine(std::move(core), *plan, 0);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  House house{.engine = std::move(*engine), .scheduler = {}};
  auto scheduler = Scheduler::Create(CoreOf(*house.engine), {.seats = 4, .token_ms = 0});
  EXPECT_TRUE(scheduler.ok()) << scheduler.status().message();
  house.scheduler = std::move(*scheduler);
  return house;
}

// A request, what it got, and the pictures of its steps.
struct Asked {
  std::vector<int32_t> tokens;
  std::vector<ReadPicture> pictures;
  RequestStats stats;
};

Request Make(std::vector<int32_t> prompt, int64_t n, const PolicyOptions& policy, Asked& asked) {
  Request request{.prompt = std::move(prompt),
                  .policy = policy,
                  .generate = {.max_tokens = n, .ignore_eos = true},
                  .deadline = {},
                  .on_end = {}};
  request.on_piece = [&asked](const AnswerPiece& piece) { asked.tokens.push_back(piece.token); };
  request.on_end = [&asked](const Result<RequestEnd>& end) {
    ASSERT_TRUE(end.ok()) << end.status().message();
    asked.stats = end->stats;
  };
  return request;
}

// With a picture of every step, a bin for each token.
void AskForReads(Request& request, Asked& asked, int32_t bins = 512) {
  request.read_bins = bins;
  request.reads_seconds = 0;
  request.on_reads = [&asked](const ReadPicture& picture) { asked.pictures.push_back(picture); };
}

void RunDry(Scheduler& scheduler) {
  for (int i = 0; i < 100'000 && scheduler.Turn(); ++i) {
  }
}

std::vector<PolicyOptions> Policies() {
  std::vector<PolicyOptions> all = {
      {.name = "full"},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}}};
  for (const PolicyInfo& info : AllPolicies()) {
    if (info.name == "kvzip" || info.test_settings.empty()) continue;  // kvzip needs a tokenizer
    for (const SettingList& settings : info.test_settings) {
      all.push_back({.name = info.name, .settings = WithFiles(info, settings, kLayers, kKvHeads)});
    }
  }
  all.push_back({.name = "h2o", .settings = {{"budget", "40"}}});
  all.push_back({.name = "streaming", .settings = {{"budget", "40"}}});
  all.push_back({.name = "blocks", .settings = SmallDefaults(**FindPolicy("blocks"))});
  return all;
}

class ReadPictureTest : public OnDevice {};

// What the picture says is what attention got, whatever policy planned it; and what the statistics
// of the request say of its last step.
TEST_P(ReadPictureTest, CountsWhatEachLayersAttentionGot) {
  for (const PolicyOptions& policy : Policies()) {
    SCOPED_TRACE(policy.name + " " + (policy.settings.empty() ? "" : policy.settings[0].second));
    auto backend = std::make_unique<Probe>(*MakeBackend({.device = GetParam()}));
    Probe& probe = *backend;
    const House house = Make(std::move(backend), policy);
    Asked asked;
    Request request = Make(Numbers(150, 1), 12, policy, asked);
    AskForReads(request, asked);
    request.on_reads = [&, keep = request.on_reads](const ReadPicture& picture) {
      keep(picture);
      ASSERT_EQ(picture.shares.size(), static_cast<size_t>(kLayers));
      ASSERT_EQ(probe.layers.size(), static_cast<size_t>(kLayers));
      for (size_t layer = 0; layer < picture.shares.size(); ++layer) {
        // It attends to copies of its far blocks by ops of its own, of which no plan tells.
        if (policy.name == "infllm") {
          ASSERT_TRUE(picture.shares[layer].empty());
          continue;
        }
        std::vector<float> got = probe.layers[layer];
        got.resize(static_cast<size_t>(picture.tokens));
        ASSERT_EQ(picture.shares[layer], got) << "layer " << layer << " of " << picture.tokens;
      }
    };
    probe.on = true;
    house.scheduler->Submit(std::move(request));
    RunDry(*house.scheduler);
    ASSERT_EQ(asked.tokens.size(), 12u);
    ASSERT_EQ(asked.pictures.size(), 11u);
    const ReadPicture& last = asked.pictures.back();
    EXPECT_EQ(last.tokens, 161);
    EXPECT_EQ(last.bin_tokens, 1);
    const double attended = std::accumulate(last.attended.begin(), last.attended.end(), 0.0);
    EXPECT_NEAR(attended / kLayers, asked.stats.attended_tokens, 1e-9);
    const uint64_t all = KvBytes(CoreOf(*house.engine).bank->View(0), 161 * kKvHeads * kLayers,
                                 /*values=*/true);
    EXPECT_NEAR(static_cast<double>(last.bytes) / static_cast<double>(all),
                asked.stats.read_fraction, 1e-9);
  }
}

// Bins are means of their tokens, and sum up to what the layer read.
TEST_P(ReadPictureTest, BinsAreMeansOfTheirTokens) {
  for (const PolicyOptions& policy : Policies()) {
    SCOPED_TRACE(policy.name);
    std::deque<Asked> asked(2);
    for (size_t i = 0; i < asked.size(); ++i) {
      const House house = Make(*MakeBackend({.device = GetParam()}), policy);
      Request request = Make(Numbers(150, 1), 4, policy, asked[i]);
      AskForReads(request, asked[i], i == 0 ? 512 : 16);
      house.scheduler->Submit(std::move(request));
      RunDry(*house.scheduler);
    }
    ASSERT_EQ(asked[0].pictures.size(), asked[1].pictures.size());
    for (size_t p = 0; p < asked[0].pictures.size(); ++p) {
      const ReadPicture& fine = asked[0].pictures[p];
      const ReadPicture& coarse = asked[1].pictures[p];
      EXPECT_EQ(coarse.bin_tokens, 10);
      for (size_t layer = 0; layer < kLayers && policy.name != "infllm"; ++layer) {
        double sum = 0;
        ASSERT_EQ(coarse.shares[layer].size(), 16u);
        for (size_t b = 0; b < 16; ++b) {
          const size_t begin = b * 10;
          const size_t end = std::min<size_t>(begin + 10, fine.shares[layer].size());
          double mean = 0;
          for (size_t t = begin; t < end; ++t) mean += fine.shares[layer][t];
          EXPECT_NEAR(coarse.shares[layer][b], mean / static_cast<double>(end - begin), 1e-6);
          sum += coarse.shares[layer][b] * static_cast<double>(end - begin);
        }
        EXPECT_NEAR(sum, coarse.attended[layer], 1e-3);
      }
    }
  }
}

// Whoever shares the steps: the same tokens as without pictures, and the same pictures as alone.
// Not on a card, where the order of sums, and so what is chosen, depends on the rows beside.
class ReadPictureCompany : public ReadPictureTest {};
TEST_P(ReadPictureCompany, ChangesNoPicture) {
  const std::vector<PolicyOptions> policies = Policies();
  const House house = Make(*MakeBackend({.device = GetParam()}), {.name = "full"});
  for (size_t i = 0; i + 1 < policies.size(); i += 2) {
    SCOPED_TRACE(policies[i].name + ", " + policies[i + 1].name);
    std::deque<Asked> together(4), alone(4);
    const auto make = [&](size_t k, std::deque<Asked>& asked) {
      Request request = Make(Numbers(90 + 20 * k, k), 6, policies[i + k / 2], asked[k]);
      if (k != 1) AskForReads(request, asked[k]);
      return request;
    };
    for (size_t k = 0; k < 4; ++k) house.scheduler->Submit(make(k, together));
    RunDry(*house.scheduler);
    for (size_t k = 0; k < 4; ++k) {
      const House quiet = Make(*MakeBackend({.device = GetParam()}), {.name = "full"});
      Request request = make(k, alone);
      if (k % 2 == 0) quiet.scheduler->Submit(Request(request));
      Asked plain;
      Request other = Make(request.prompt, 6, request.policy, plain);
      if (k % 2 == 1) quiet.scheduler->Submit(std::move(request));
      RunDry(*quiet.scheduler);
      quiet.scheduler->Submit(std::move(other));
      RunDry(*quiet.scheduler);
      EXPECT_EQ(together[k].tokens, plain.tokens) << k;
      ASSERT_EQ(together[k].pictures.size(), k == 1 ? 0u : 5u);
      for (size_t p = 0; p < together[k].pictures.size(); ++p) {
        EXPECT_EQ(together[k].pictures[p].shares, alone[k].pictures[p].shares) << k << ", " << p;
      }
    }
  }
}

Asked PicturesOf(const std::string& device, const PolicyOptions& policy, int64_t n = 8,
                 int32_t window = 0) {
  Asked asked;
  const House house = Make(*MakeBackend({.device = device}), policy, "device", window);
  Request request = Make(Numbers(150, 1), n, policy, asked);
  AskForReads(request, asked);
  house.scheduler->Submit(std::move(request));
  RunDry(*house.scheduler);
  EXPECT_EQ(std::ssize(asked.pictures), n - 1);
  return asked;
}

// The tokens of which anything is read.
std::vector<int64_t> Read(const std::vector<float>& shares) {
  std::vector<int64_t> tokens;
  for (size_t t = 0; t < shares.size(); ++t) {
    if (shares[t] > 0) tokens.push_back(static_cast<int64_t>(t));
  }
  return tokens;
}

TEST_P(ReadPictureTest, FullReadsEverythingAndWindowsTheirLastTokens) {
  const Asked asked = PicturesOf(GetParam(), {.name = "full"}, 8, /*window=*/24);
  for (const ReadPicture& picture : asked.pictures) {
    for (size_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t t = 0; t < picture.tokens; ++t) {
        const bool in_window = layer > 0 || t >= picture.tokens - 24;
        ASSERT_EQ(picture.shares[layer][static_cast<size_t>(t)], in_window ? 1 : 0) << layer;
      }
    }
  }
}

TEST_P(ReadPictureTest, StreamingReadsSinksAndRecentTokens) {
  const Asked asked =
      PicturesOf(GetParam(), {.name = "streaming", .settings = {{"budget", "40"}, {"sinks", "4"}}});
  for (const ReadPicture& picture : asked.pictures) {
    std::vector<int64_t> expected = {0, 1, 2, 3};
    for (int64_t t = picture.tokens - 36; t < picture.tokens; ++t) expected.push_back(t);
    for (size_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(Read(picture.shares[layer]), expected);
    }
  }
}

TEST_P(ReadPictureTest, OmnikvsFilterLayersReadAllAndTheOthersTheirBudget) {
  const Asked asked = PicturesOf(
      GetParam(),
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}});
  for (const ReadPicture& picture : asked.pictures) {
    int sparse = 0;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const auto& shares = picture.shares[layer];
      const bool all = std::all_of(shares.begin(), shares.end(), [](float s) { return s == 1; });
      if (layer <= 1 || layer == 4) {
        EXPECT_TRUE(all) << layer;
      }
      if (all) continue;
      ++sparse;
      EXPECT_EQ(std::ssize(Read(shares)), std::llround(picture.attended[layer])) << layer;
      EXPECT_LE(picture.attended[layer], 24 + 4) << layer;
      EXPECT_EQ(shares.back(), 1);  // the row's own
      const size_t before = layer < 4 ? 2 : 5;
      if (layer > before + 1) {
        EXPECT_EQ(shares, picture.shares[layer - 1]) << layer;
      }
    }
    EXPECT_GE(sparse, 3);
  }
}

TEST_P(ReadPictureTest, QuestReadsPagesByHead) {
  const Asked asked = PicturesOf(
      GetParam(),
      {.name = "quest", .settings = {{"budget", "32"}, {"page", "8"}, {"dense_layers", "2"}}});
  bool differ = false;
  for (const ReadPicture& picture : asked.pictures) {
    for (size_t layer = 2; layer < kLayers; ++layer) {
      const auto& shares = picture.shares[layer];
      EXPECT_LE(picture.attended[layer], 32);
      for (size_t t = 0; t + 8 < shares.size(); ++t) {
        EXPECT_EQ(shares[t], shares[t / 8 * 8]) << "a page comes whole";
        differ |= shares[t] == 0.5f;
      }
    }
    EXPECT_EQ(picture.attended[0], static_cast<double>(picture.tokens));
  }
  EXPECT_TRUE(differ) << "heads choose by themselves";
}

TEST_P(ReadPictureTest, BlocksComeWhole) {
  const Asked asked =
      PicturesOf(GetParam(), {.name = "blocks", .settings = SmallDefaults(**FindPolicy("blocks"))});
  for (const ReadPicture& picture : asked.pictures) {
    int whole = 0;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      whole += picture.attended[layer] == static_cast<double>(picture.tokens) ? 1 : 0;
      if (picture.attended[layer] == static_cast<double>(picture.tokens)) continue;
      EXPECT_LE(picture.attended[layer], 40 + 8);
      for (size_t t = 0; t < 8; ++t) EXPECT_EQ(picture.shares[layer][t], 1);
      EXPECT_EQ(picture.shares[layer].back(), 1);
    }
    EXPECT_EQ(whole, 2);  // the first layers
  }
}

// What was given up is never read again.
TEST_P(ReadPictureTest, H2oDoesNotReadWhatIsGone) {
  const Asked asked = PicturesOf(GetParam(), {.name = "h2o", .settings = {{"budget", "40"}}}, 16);
  std::vector<std::vector<float>> before(kLayers);
  bool moves = false;
  for (const ReadPicture& picture : asked.pictures) {
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const auto& shares = picture.shares[layer];
      EXPECT_LE(picture.attended[layer], 41);
      for (size_t t = 0; t < before[layer].size(); ++t) {
        EXPECT_LE(shares[t], before[layer][t]) << "layer " << layer << ", token " << t;
        moves |= shares[t] < before[layer][t];
      }
      before[layer] = shares;
    }
  }
  EXPECT_TRUE(moves);
}

INSTANTIATE_TEST_SUITE_P(On, ReadPictureTest, testing::Values("cpu", "cuda"), NameOf);
INSTANTIATE_TEST_SUITE_P(On, ReadPictureCompany, testing::Values("cpu"), NameOf);

// K/V that come to working sets: the same picture, and how much of it was there.
TEST(ReadPictures, NameTokensWhereverTheirRowsAre) {
  const PolicyOptions policy{
      .name = "omnikv",
      .settings = {
          {"filters", "1,3"}, {"dense_after_filter", "0"}, {"tail", "8"}, {"budget", "24"}}};
  std::deque<Asked> asked(2);
  for (size_t i = 0; i < 2; ++i) {
    const House house =
        Make(std::make_unique<AsDevice>(MakeRefBackend()), policy, i == 0 ? "device" : "host");
    Request request = Make(Numbers(150, 1), 20, policy, asked[i]);
    AskForReads(request, asked[i]);
    house.scheduler->Submit(std::move(request));
    RunDry(*house.scheduler);
    ASSERT_EQ(asked[i].pictures.size(), 19u);
  }
  EXPECT_EQ(asked[0].tokens, asked[1].tokens);
  std::vector<double> hits;
  for (size_t p = 0; p < 19; ++p) {
    EXPECT_EQ(asked[0].pictures[p].shares, asked[1].pictures[p].shares) << p;
    EXPECT_FALSE(asked[0].pictures[p].hit_rate.has_value());
    ASSERT_TRUE(asked[1].pictures[p].hit_rate.has_value());
    EXPECT_GE(*asked[1].pictures[p].hit_rate, 0);
    EXPECT_LE(*asked[1].pictures[p].hit_rate, 1);
    hits.push_back(*asked[1].pictures[p].hit_rate);
  }
  const auto [least, most] = std::ranges::minmax(hits);
  EXPECT_GT(most, 0);
  // The request's own statistics are of all its steps.
  EXPECT_FALSE(asked[0].stats.hit_rate.has_value());
  EXPECT_EQ(asked[0].stats.held.host, 0u);
  ASSERT_TRUE(asked[1].stats.hit_rate.has_value());
  EXPECT_GT(*asked[1].stats.hit_rate, least);
  EXPECT_LT(*asked[1].stats.hit_rate, most);
  EXPECT_GT(asked[1].stats.fetched_bytes, 0u);
  EXPECT_GT(asked[1].stats.held.host, asked[1].stats.held.device)
      << "five layers of eight are away";
  EXPECT_EQ(asked[0].stats.held.device, asked[1].stats.held.device + asked[1].stats.held.host);
}

// On a card steps run ahead, but for those who want pictures. Between the first step and the last
// one they come as often as was asked for.
TEST(ReadPictures, ComeAsOftenAsAskedFor) {
  const House house = Make(std::make_unique<AsDevice>(MakeRefBackend()), {.name = "full"});
  Asked asked;
  Request request = Make(Numbers(60, 1), 20, {.name = "full"}, asked);
  AskForReads(request, asked);
  request.reads_seconds = 1e9;
  house.scheduler->Submit(std::move(request));
  RunDry(*house.scheduler);
  ASSERT_EQ(asked.tokens.size(), 20u);
  ASSERT_EQ(asked.pictures.size(), 2u);
  EXPECT_EQ(asked.pictures[0].tokens, 61);
  EXPECT_EQ(asked.pictures[1].tokens, 79);
}

// Steps count once each, whether they ran ahead or not.
TEST(ReadPictures, StepsAreCountedWhoeverWatches) {
  for (const bool watched : {false, true}) {
    const House house = Make(std::make_unique<AsDevice>(MakeRefBackend()), {.name = "full"});
    std::deque<Asked> asked(2);
    for (size_t i = 0; i < 2; ++i) {
      Request request = Make(Numbers(60, i), 20, {.name = "full"}, asked[i]);
      if (watched) AskForReads(request, asked[i]);
      house.scheduler->Submit(std::move(request));
    }
    RunDry(*house.scheduler);
    const SchedulerStats stats = house.scheduler->stats();
    EXPECT_EQ(stats.step_rows, 2 * 19) << watched;
    EXPECT_GE(stats.steps, 19) << watched;
    EXPECT_LE(stats.steps, 21) << watched;
  }
}

}  // namespace
}  // namespace omnikv::read_picture_test
