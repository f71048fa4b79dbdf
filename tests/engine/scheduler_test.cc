// Requests that share an engine get what each gets alone, whoever comes and goes meanwhile, and
// none waits for ever.
#include "engine/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>
#include <thread>

#include "../policy_settings.h"
#include "../test_data.h"
#include "as_device.h"
#include "backend/ref/ref_backend.h"
#include "on_device.h"

namespace omnikv::scheduler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kModel = TestData("tests/golden/policy_model");  // 8 layers, vocabulary 128

std::vector<int32_t> Numbers(size_t n, size_t seed) {
  std::vector<int32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = static_cast<int32_t>((i * 37 + seed * 11) % 125) + 3;
  return tokens;
}

EngineOptions Options(const std::string& device, int32_t sessions) {
  return {.model = kModel,
          .device = device,
          .threads = 2,
          .context = 1024,
          .kv_dtype = "f32",
          .precision = "full",
          .max_sessions = sessions};
}

std::unique_ptr<Engine> Load(const EngineOptions& options) {
  auto engine = Engine::Load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

// A request, and what became of it.
struct Asked {
  Request request;
  Scheduler::Id id = 0;
  std::vector<int32_t> tokens = {};
  std::vector<int64_t> progress = {};
  std::vector<double> logprobs = {};
  std::optional<Result<RequestEnd>> end = {};

  const RequestEnd& Ended() const {
    EXPECT_TRUE(end.has_value() && end->ok())
        << (end ? end->status().message() : "it has not ended");
    static const RequestEnd none{};
    return end && end->ok() ? **end : none;
  }
};

Request Make(std::vector<int32_t> prompt, int64_t n, PolicyOptions policy = {.name = "full"}) {
  Request request;
  request.prompt = std::move(prompt);
  request.policy = std::move(policy);
  request.generate = {.max_tokens = n, .ignore_eos = true};
  return request;
}

// A scheduler and what was asked of it; addresses of what was asked stay.
class House {
 public:
  House(Engine& engine, const SchedulerOptions& options) {
    auto made = Scheduler::Create(CoreOf(engine), options);
    EXPECT_TRUE(made.ok()) << made.status().message();
    scheduler_ = std::move(*made);
  }
  Asked& Ask(Request request) {
    Asked& asked = asked_.emplace_back(Asked{.request = request});
    request.on_piece = [&asked](const AnswerPiece& piece) {
      asked.tokens.push_back(piece.token);
      if (!piece.top.empty()) asked.logprobs.push_back(piece.logprob);
    };
    request.on_progress = [&asked](int64_t done, int64_t, int64_t) {
      asked.progress.push_back(done);
    };
    request.on_end = [&asked](const Result<RequestEnd>& end) {
      EXPECT_FALSE(asked.end.has_value()) << "it has ended twice";
      asked.end.emplace(end);
    };
    asked.id = scheduler_->Submit(std::move(request));
    return asked;
  }
  void Turns(int n) {
    while (n-- > 0) scheduler_->Turn();
  }
  void RunDry() {
    for (int i = 0; i < 100'000 && scheduler_->Turn(); ++i) {
    }
    for (const Asked& asked : asked_) EXPECT_TRUE(asked.end.has_value()) << asked.id;
  }
  Scheduler& operator*() { return *scheduler_; }
  Scheduler* operator->() { return scheduler_.get(); }

 private:
  std::deque<Asked> asked_;
  std::unique_ptr<Scheduler> scheduler_;
};

// The tokens that a session by itself gives.
std::vector<int32_t> Alone(Engine& engine, const Request& request) {
  auto session = engine.NewSession(request.policy);
  EXPECT_TRUE(session.ok()) << session.status().message();
  if (!session.ok()) return {};
  EXPECT_TRUE((*session)->Prompt(request.prompt).ok());
  auto answer = (*session)->Generate(request.generate);
  EXPECT_TRUE(answer.ok()) << answer.status().message();
  return answer.ok() ? answer->tokens : std::vector<int32_t>();
}

std::vector<PolicyOptions> EveryPolicy() {
  std::vector<PolicyOptions> all = {
      {.name = "full"},
      {.name = "omnikv",
       .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}, {"tail", "4"}}},
      {.name = "streaming", .settings = {{"budget", "24"}}}};
  for (const PolicyInfo& info : AllPolicies()) {
    if (info.test_settings.empty()) continue;
    all.push_back({.name = info.name, .settings = WithFiles(info, info.test_settings[0], 8, 2)});
  }
  return all;
}

class SchedulerTest : public OnDevice {};

TEST_P(SchedulerTest, AFullHouseGivesWhatEachGetsAlone) {
  const auto engine = Load(Options(GetParam(), 16));
  const auto quiet = Load(Options(GetParam(), 1));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 6, .token_ms = 0});
  const std::vector<PolicyOptions> policies = EveryPolicy();
  std::vector<Asked*> asked;
  std::vector<Asked*> cancelled;
  for (size_t i = 0; i < 3 * policies.size(); ++i) {
    Request request = Make(Numbers(20 + (i * 53) % 300, i % 7), 16 + static_cast<int64_t>(i % 9),
                           policies[i % policies.size()]);
    if (i % 4 == 1) {
      request.generate.sampling = {.temperature = 0.8, .top_p = 0.9, .seed = i};
    }
    if (i % 8 == 3) {
      request.generate.sampling = {.presence_penalty = 1, .logit_bias = {{5, 2.0f}}};
    }
    request.priority = static_cast<int32_t>(i % 3);
    asked.push_back(&house.Ask(std::move(request)));
    if (i % 6 == 5) cancelled.push_back(&house.Ask(Make(Numbers(200, i), 400)));
    house.Turns(static_cast<int>(i % 2));
    if (cancelled.size() > 1) {
      house->Cancel(cancelled.front()->id);
      cancelled.erase(cancelled.begin());
    }
  }
  for (Asked* one : cancelled) house->Cancel(one->id);
  house.RunDry();
  int64_t cached = 0;
  for (const Asked* one : asked) {
    SCOPED_TRACE(one->request.policy.name + " " + std::to_string(one->request.prompt.size()));
    EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
    EXPECT_EQ(one->Ended().stats.answer_tokens, one->request.generate.max_tokens);
    cached += one->Ended().stats.cached_tokens;
  }
  EXPECT_GT(cached, 0);
  const SchedulerStats stats = house->stats();
  EXPECT_EQ(stats.finished, std::ssize(asked));
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_GT(2 * stats.step_rows, 3 * stats.steps);  // they did share steps
}

// An engine that is laid out for a policy: rows that are dropped, kept, of heads apart, by layer.
TEST_P(SchedulerTest, OnEnginesOfPolicies) {
  for (const PolicyInfo& info : AllPolicies()) {
    if (info.test_settings.empty()) continue;
    const PolicyOptions policy{.name = info.name,
                               .settings = WithFiles(info, info.test_settings[0], 8, 2)};
    SCOPED_TRACE(info.name);
    EngineOptions options = Options(GetParam(), 4);
    options.policy = policy;
    options.prefill_chunk = 64;
    const auto engine = Load(options);
    options.max_sessions = 1;
    const auto quiet = Load(options);
    if (engine == nullptr || quiet == nullptr) continue;
    House house(*engine, {.seats = 3, .token_ms = 0});
    std::vector<Asked*> asked;
    for (size_t i = 0; i < 5; ++i) {
      asked.push_back(&house.Ask(Make(Numbers(90 + 60 * i, i % 2), 9, policy)));
      Asked& cancelled = house.Ask(Make(Numbers(400, i), 100, policy));
      house.Turns(static_cast<int>(i) + 2);
      house->Cancel(cancelled.id);
      house.Turns(1);
      EXPECT_EQ(cancelled.Ended().reason, FinishReason::kCancelled);
    }
    house.RunDry();
    for (const Asked* one : asked) EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
  }
}

TEST_P(SchedulerTest, PromptsShareTheRowsOfOthers) {
  const auto engine = Load(Options(GetParam(), 8));
  const auto quiet = Load(Options(GetParam(), 1));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 4});
  const std::vector<int32_t> text = Numbers(400, 1);
  const auto with = [&](std::vector<int32_t> more) {
    std::vector<int32_t> prompt = text;
    prompt.insert(prompt.end(), more.begin(), more.end());
    return prompt;
  };
  const PolicyOptions sparse{
      .name = "omnikv", .settings = {{"dense_below", "0"}, {"filters", "1,4"}, {"budget", "24"}}};
  const Asked& first = house.Ask(Make(with({7, 8, 9}), 4));
  house.RunDry();
  EXPECT_EQ(first.Ended().stats.cached_tokens, 0);
  EXPECT_EQ(house->stats().kept_contexts, 1);
  // Of a context that nobody has any more, by another policy; and of one that runs.
  const Asked& second = house.Ask(Make(with({11, 12}), 60, sparse));
  house.Turns(3);
  const Asked& third = house.Ask(Make(with({11, 12, 13, 14}), 4));
  // Nothing of the first 400 tokens: those of a policy whose prompts are not dense.
  const Asked& apart =
      house.Ask(Make(with({11, 12}), 4, {.name = "streaming", .settings = {{"budget", "24"}}}));
  house.RunDry();
  EXPECT_EQ(second.Ended().stats.cached_tokens, 400);
  EXPECT_EQ(third.Ended().stats.cached_tokens, 402);
  EXPECT_EQ(apart.Ended().stats.cached_tokens, 0);
  // A later turn has the rows of its own answer, under the policy and the settings that made them.
  std::vector<int32_t> turn = with({11, 12});
  turn.insert(turn.end(), second.tokens.begin(), second.tokens.end());
  turn.push_back(20);
  const Asked& again = house.Ask(Make(turn, 4, sparse));
  const Asked& other = house.Ask(Make(turn, 4));
  house.RunDry();
  EXPECT_EQ(again.Ended().stats.cached_tokens, std::ssize(turn) - 2);
  EXPECT_EQ(other.Ended().stats.cached_tokens, 402);
  for (const Asked* one : {&first, &second, &third, &apart, &other}) {
    EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
  }
}

TEST_P(SchedulerTest, EqualPromptsAreReadOnce) {
  const auto engine = Load(Options(GetParam(), 8));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 4});
  std::vector<Asked*> asked;
  for (int i = 0; i < 4; ++i) asked.push_back(&house.Ask(Make(Numbers(700, 3), 5)));
  const Asked& unlike = house.Ask(Make(Numbers(30, 4), 5));
  house.Turns(1);
  EXPECT_EQ(house->stats().running, 2);  // it does not wait with those that wait for rows
  house.RunDry();
  for (size_t i = 0; i < asked.size(); ++i) {
    const int64_t cached = asked[i]->Ended().stats.cached_tokens;
    EXPECT_GE(cached, i == 0 ? 0 : 699 - 64);
    EXPECT_LE(cached, i == 0 ? 0 : 699);
    EXPECT_EQ(asked[i]->tokens, asked[0]->tokens);
  }
  EXPECT_EQ(unlike.Ended().stats.cached_tokens, 0);
}

TEST_P(SchedulerTest, RefusesWhatCanNeverRun) {
  const auto engine = Load(Options(GetParam(), 2));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 2, .max_waiting = 2});
  const auto sentence = [&](Request request) {
    const Asked& asked = house.Ask(std::move(request));
    house.Turns(1);
    EXPECT_TRUE(asked.end.has_value() && !asked.end->ok());
    return asked.end && !asked.end->ok() ? asked.end->status().message() : "";
  };
  EXPECT_THAT(sentence(Make({}, 4)), HasSubstr("the prompt is empty"));
  EXPECT_THAT(sentence(Make(Numbers(1025, 1), 4)),
              HasSubstr("the prompt has 1025 tokens, but the context holds 1024"));
  EXPECT_THAT(sentence(Make({128}, 4)), HasSubstr("token 128 is not in the vocabulary"));
  EXPECT_THAT(sentence(Make({5}, 4, {.name = "ful"})), HasSubstr("ful"));
  EXPECT_THAT(sentence(Make({5}, 4, {.name = "full", .settings = {{"budget", "3"}}})),
              HasSubstr("budget"));
  Request biased = Make({5}, 4);
  biased.generate.sampling.logit_bias = {{128, 1.0f}};
  EXPECT_THAT(sentence(biased), HasSubstr("`logit_bias` names token 128, expected 0 to 127"));
  biased.generate.sampling = {.temperature = -1};
  EXPECT_THAT(sentence(biased), HasSubstr("`temperature` is -1"));
  EXPECT_EQ(house->stats().refused, 7);
  // Two run, two wait; the fifth is one too many.
  for (int i = 0; i < 4; ++i) {
    house.Ask(Make(Numbers(10, 1), 500));
    house.Turns(1);
  }
  const Asked& late = house.Ask(Make(Numbers(10, 1), 5));
  house.Turns(1);
  ASSERT_TRUE(late.end.has_value() && !late.end->ok());
  EXPECT_EQ(late.end->status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(late.end->status().message(),
              HasSubstr("2 requests are waiting, expected at most 2"));
  house.RunDry();
}

TEST_P(SchedulerTest, PrioritiesDeadlinesAndCancels) {
  const auto engine = Load(Options(GetParam(), 1));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 1});
  std::vector<int> order;
  const auto ask = [&](int name, Request request) -> Asked& {
    Asked& asked = house.Ask(std::move(request));
    static_cast<void>(name);
    return asked;
  };
  Asked& running = ask(0, Make(Numbers(20, 1), 30));
  house.Turns(2);
  Asked& last = ask(1, Make(Numbers(20, 2), 3));
  Request urgent = Make(Numbers(20, 3), 3);
  urgent.priority = 1;
  Asked& first = ask(2, urgent);
  Request late = Make(Numbers(20, 4), 3);
  late.deadline = Scheduler::Clock::now();
  Asked& over = ask(3, late);
  Asked& dropped = ask(4, Make(Numbers(20, 5), 3));
  house->Cancel(dropped.id);
  house.Turns(1);
  EXPECT_EQ(over.Ended().reason, FinishReason::kCancelled);
  EXPECT_EQ(dropped.Ended().reason, FinishReason::kCancelled);
  EXPECT_FALSE(running.end.has_value());
  house->Cancel(running.id);
  house->Cancel(running.id);  // once more does nothing
  house.Turns(1);
  EXPECT_EQ(running.Ended().reason, FinishReason::kCancelled);
  EXPECT_GT(running.tokens.size(), 0u);
  while (!first.end) house.Turns(1);
  EXPECT_FALSE(last.end.has_value());
  house.RunDry();
  EXPECT_EQ(last.Ended().reason, FinishReason::kLength);
  EXPECT_EQ(house->stats().cancelled, 3);
  EXPECT_EQ(house->stats().finished, 2);
  // A prompt that is cancelled on its way leaves its rows to the next.
  EngineOptions small = Options(GetParam(), 2);
  small.prefill_chunk = 64;
  const auto other = Load(small);
  House second(*other, {.seats = 1});
  Asked& cut = second.Ask(Make(Numbers(900, 6), 3));
  second.Turns(3);
  second->Cancel(cut.id);
  second.Turns(1);
  EXPECT_EQ(cut.Ended().reason, FinishReason::kCancelled);
  Asked& next = second.Ask(Make(Numbers(900, 6), 3));
  second.RunDry();
  EXPECT_EQ(next.Ended().stats.cached_tokens, 192);
  EXPECT_EQ(next.tokens, Alone(*Load(Options(GetParam(), 1)), next.request));
}

TEST_P(SchedulerTest, AShortPromptDoesNotWaitForALongOne) {
  EngineOptions options = Options(GetParam(), 4);
  options.prefill_chunk = 64;
  const auto engine = Load(options);
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 4, .token_ms = 0});
  Asked& decodes = house.Ask(Make(Numbers(40, 1), 200));
  house.Turns(2);
  Asked& longer = house.Ask(Make(Numbers(960, 2), 3));
  house.Turns(2);
  Asked& shorter = house.Ask(Make(Numbers(100, 3), 3));
  const size_t before = decodes.tokens.size();
  while (shorter.tokens.empty()) house.Turns(1);
  EXPECT_TRUE(longer.tokens.empty());
  EXPECT_FALSE(longer.progress.empty());
  EXPECT_GT(decodes.tokens.size(), before + 1);  // which goes on meanwhile
  house.RunDry();
}

TEST_P(SchedulerTest, NewerPromptsDoNotKeepAnOlderOneWaiting) {
  EngineOptions options = Options(GetParam(), 3);
  options.prefill_chunk = 64;
  const auto engine = Load(options);
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 3, .token_ms = 0});
  const Asked& older = house.Ask(Make(Numbers(900, 1), 1));
  house.Turns(2);
  // Each is read in one chunk, and is gone when the next one comes.
  for (size_t i = 0; i < 60 && older.tokens.empty(); ++i) {
    house.Ask(Make(Numbers(50, i + 2), 1));
    house.Turns(1);
  }
  EXPECT_FALSE(older.tokens.empty());
  house.RunDry();
}

TEST_P(SchedulerTest, WaitsForMemoryAndUsesIt) {
  // Room for two contexts and a little: the bank's blocks are those of max_sessions contexts.
  const auto engine = Load(Options(GetParam(), 2));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 2});
  const Asked& big = house.Ask(Make(Numbers(900, 1), 100));
  const Asked& also = house.Ask(Make(Numbers(900, 2), 100));
  house.RunDry();
  EXPECT_EQ(big.Ended().reason, FinishReason::kLength);
  EXPECT_EQ(also.Ended().reason, FinishReason::kLength);
  // What they left goes where new ones need it.
  const Asked& next = house.Ask(Make(Numbers(1000, 3), 20));
  const Asked& last = house.Ask(Make(Numbers(1000, 4), 20));
  house.RunDry();
  EXPECT_EQ(next.Ended().reason, FinishReason::kLength);
  EXPECT_EQ(last.Ended().reason, FinishReason::kLength);
  EXPECT_LE(house->stats().blocks_used, house->stats().blocks_total);
}

// More than fits, with answers that grow: requests are swapped out and resumed, in memory or in a
// file, and get what each gets alone.
TEST_P(SchedulerTest, RequestsMakeRoomForOthers) {
  const auto quiet = Load(Options(GetParam(), 1));
  for (const std::string& folder : {std::string(), ::testing::TempDir()}) {
    if (GetParam() == "ref" && folder.empty()) continue;  // it is slow
    EngineOptions options = Options(GetParam(), 12);
    options.kv_tokens = 1024;
    const auto engine = Load(options);
    ASSERT_NE(engine, nullptr);
    House house(
        *engine,
        {.seats = 8, .token_ms = 0, .swap_bytes = uint64_t{1} << 30, .swap_folder = folder});
    const std::vector<PolicyOptions> policies = EveryPolicy();
    std::vector<Asked*> asked;
    for (size_t i = 0; i < 2 * policies.size(); ++i) {
      Request request =
          Make(Numbers(20 + (i * 53) % 200, i % 7),
               i % 3 == 0 ? 420 : 40 + static_cast<int64_t>(i % 9), policies[i % policies.size()]);
      if (i % 4 == 1) request.generate.sampling = {.temperature = 0.8, .top_p = 0.9, .seed = i};
      request.priority = static_cast<int32_t>(i % 5 == 4);
      asked.push_back(&house.Ask(std::move(request)));
      house.Turns(static_cast<int>(i * 7 % 40));
    }
    house.RunDry();
    std::set<std::string> swapped;
    for (const Asked* one : asked) {
      SCOPED_TRACE(one->request.policy.name + " " + std::to_string(one->request.prompt.size()));
      EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
      if (one->Ended().stats.preemptions > 0) swapped.insert(one->request.policy.name);
    }
    EXPECT_GT(std::ssize(swapped), 5) << "policies whose requests were preempted";
    const SchedulerStats stats = house->stats();
    EXPECT_EQ(stats.finished, std::ssize(asked));
    EXPECT_EQ(stats.swapped + stats.running + stats.waiting, 0);
    EXPECT_EQ(stats.swap_bytes, 0u);
  }
}

// All answers outgrow what they were promised first, and together they outgrow the bank.
TEST_P(SchedulerTest, AnswersThatAllGrow) {
  EngineOptions options = Options(GetParam(), 4);
  options.kv_tokens = 1024;
  const auto engine = Load(options);
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 4, .token_ms = 0, .swap_bytes = uint64_t{1} << 30});
  std::vector<Asked*> asked;
  for (size_t i = 0; i < 4; ++i) asked.push_back(&house.Ask(Make(Numbers(40, i), 450)));
  house.Turns(10);
  EXPECT_GT(house->stats().running, 2);  // by the worst case two have room
  house.RunDry();
  const auto quiet = Load(Options(GetParam(), 1));
  for (const Asked* one : asked) EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
  EXPECT_GT(house->stats().preemptions, 0);
}

// The state of every policy leaves and comes back, in the engine that is laid out for it; with two
// at a time, so that the second one's is not that of number 0. On `ref`, which is slow, with the
// first settings of each alone.
TEST_P(SchedulerTest, EveryPolicyIsResumed) {
  for (const PolicyInfo& info : AllPolicies()) {
    for (const auto& settings : info.test_settings) {
      if (GetParam() == "ref" && &settings != info.test_settings.data()) break;
      const PolicyOptions policy{.name = info.name, .settings = WithFiles(info, settings, 8, 2)};
      SCOPED_TRACE(info.name);
      EngineOptions options = Options(GetParam(), 4);
      options.policy = policy;
      options.prefill_chunk = 64;
      const auto engine = Load(options);
      options.max_sessions = 1;
      const auto quiet = Load(options);
      if (engine == nullptr || quiet == nullptr) continue;
      House house(*engine, {.seats = 2, .token_ms = 0, .swap_bytes = uint64_t{1} << 30});
      const Asked& first = house.Ask(Make(Numbers(150, 1), 60, policy));
      const Asked& second = house.Ask(Make(Numbers(210, 2), 60, policy));
      while (second.tokens.size() < 7) house.Turns(1);
      Request urgent = Make(Numbers(180, 3), 30, policy);
      urgent.priority = 1;
      const Asked& third = house.Ask(urgent);
      while (third.tokens.empty()) house.Turns(1);
      EXPECT_LT(second.tokens.size(), 60u);
      const Asked& fourth = house.Ask(urgent);
      house.RunDry();
      EXPECT_GT(second.Ended().stats.preemptions, 0);
      EXPECT_GT(first.Ended().stats.preemptions, 0);
      for (const Asked* one : {&first, &second, &third, &fourth}) {
        EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
      }
    }
  }
}

TEST_P(SchedulerTest, AnUrgentRequestNeedNotWait) {
  for (const bool may_leave : {true, false}) {
    const auto engine = Load(Options(GetParam(), 2));
    House house(*engine, {.seats = 1, .swap_bytes = may_leave ? uint64_t{1} << 30 : 0});
    const Asked& running = house.Ask(Make(Numbers(40, 1), 30));
    while (running.tokens.size() < 3) house.Turns(1);
    const Asked& equal = house.Ask(Make(Numbers(30, 2), 5));
    Request request = Make(Numbers(20, 3), 5);
    request.priority = 1;
    const Asked& urgent = house.Ask(request);
    while (!urgent.end) house.Turns(1);
    EXPECT_EQ(running.end.has_value(), !may_leave);
    EXPECT_FALSE(equal.end.has_value());
    house.Turns(1);
    EXPECT_EQ(house->stats().swapped, 0);
    house.RunDry();
    EXPECT_EQ(running.Ended().stats.preemptions, may_leave ? 1 : 0);
    EXPECT_EQ(house->stats().preemptions, may_leave ? 1 : 0);
    EXPECT_EQ(running.tokens, Alone(*engine, running.request));
  }
  // One that is swapped out can be cancelled, and its room is free then.
  const auto engine = Load(Options(GetParam(), 2));
  const auto quiet = Load(Options(GetParam(), 1));
  // More than rows of 70 tokens take, and less than those of 440.
  const BankConfig& bank = CoreOf(*engine).bank->config();
  const uint64_t room = 5 * static_cast<uint64_t>(bank.block_tokens) * Bank::BytesPerToken(bank);
  House house(*engine, {.seats = 1, .swap_bytes = room});
  for (int i = 0; i < 2; ++i) {
    const Asked& swapped = house.Ask(Make(Numbers(40, 1), 30));
    while (swapped.tokens.size() < 3) house.Turns(1);
    Request request = Make(Numbers(20, 3), 20);
    request.priority = 1;
    const Asked& urgent = house.Ask(request);
    while (urgent.tokens.empty()) house.Turns(1);
    EXPECT_EQ(house->stats().swapped, 1);
    house->Cancel(swapped.id);
    house.Turns(1);
    EXPECT_EQ(swapped.Ended().reason, FinishReason::kCancelled);
    EXPECT_EQ(swapped.Ended().stats.answer_tokens, std::ssize(swapped.tokens));
    house.RunDry();
  }
  // Where there is no such room, it stays. A policy needs room for what it keeps.
  for (const bool keeps_all : {true, false}) {
    PolicyOptions policy{.name = "full"};
    if (!keeps_all) policy = {.name = "streaming", .settings = {{"budget", "16"}}};
    const Asked& first = house.Ask(Make(Numbers(40, 1), 400, policy));
    while (first.tokens.size() < 3) house.Turns(1);
    Request request = Make(Numbers(20, 3), 5);
    request.priority = 1;
    house.Ask(request);
    house.RunDry();
    EXPECT_EQ(first.Ended().stats.preemptions, keeps_all ? 0 : 1);
    EXPECT_EQ(first.tokens, Alone(*quiet, first.request));
  }
  auto refused = Scheduler::Create(CoreOf(*engine), {.seats = 1, .swap_folder = "/no/folder"});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("/no/folder"));
}

// A request that preempts others in vain does not keep them out.
TEST_P(SchedulerTest, WhatCannotRunBesidePinnedContextsIsRefused) {
  EngineOptions options = Options(GetParam(), 3);
  options.kv_tokens = 1024;
  options.kept_contexts = 2;
  const auto engine = Load(options);
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 2, .swap_bytes = uint64_t{1} << 30});
  house.Ask(Make(Numbers(400, 1), 3));
  house.RunDry();
  const std::vector<ListedContext> kept = house->Contexts();
  ASSERT_EQ(kept.size(), 1u);
  ASSERT_TRUE(house->PinContext(kept.front().id, true).ok());
  const Asked& running = house.Ask(Make(Numbers(300, 2), 40));
  while (running.tokens.size() < 3) house.Turns(1);
  Request request = Make(Numbers(800, 3), 5);
  request.priority = 1;
  const Asked& urgent = house.Ask(request);
  house.RunDry();
  ASSERT_TRUE(urgent.end.has_value() && !urgent.end->ok());
  EXPECT_EQ(urgent.end->status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(urgent.end->status().message(), HasSubstr("1 pinned contexts among it"));
  EXPECT_EQ(running.Ended().stats.preemptions, 1);
  EXPECT_EQ(running.tokens, Alone(*Load(Options(GetParam(), 1)), running.request));
}

TEST_P(SchedulerTest, ManyPoliciesTakeTurnsInTheMemoryOfGroups) {
  const auto engine = Load(Options(GetParam(), 4));
  const auto quiet = Load(Options(GetParam(), 1));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 4});
  std::vector<Asked*> asked;
  for (int budget = 20; budget < 60; ++budget) {  // each is a group of its own
    asked.push_back(&house.Ask(
        Make(Numbers(120, 2), 3,
             {.name = "omnikv",
              .settings = {
                  {"dense_below", "0"}, {"filters", "1,4"}, {"budget", std::to_string(budget)}}})));
  }
  house.RunDry();
  for (const Asked* one : asked) EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
}

TEST_P(SchedulerTest, LogProbabilitiesSumToOne) {
  const auto engine = Load(Options(GetParam(), 2));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 2});
  Request request = Make(Numbers(50, 1), 4);
  request.top_logprobs = 128;
  std::vector<AnswerPiece> pieces;
  request.on_piece = [&](const AnswerPiece& piece) { pieces.push_back(piece); };
  request.on_end = [](const Result<RequestEnd>& end) { EXPECT_TRUE(end.ok()); };
  house->Submit(request);
  house.RunDry();
  ASSERT_EQ(pieces.size(), 4u);
  for (const AnswerPiece& piece : pieces) {
    ASSERT_EQ(piece.top.size(), 128u);
    EXPECT_EQ(piece.top[0].token, piece.token);  // greedy
    EXPECT_EQ(piece.top[0].logprob, piece.logprob);
    double sum = 0;
    for (const ScoredToken& t : piece.top) sum += std::exp(t.logprob);
    EXPECT_NEAR(sum, 1, 1e-6);
    EXPECT_TRUE(std::is_sorted(piece.top.begin(), piece.top.end(),
                               [](auto& a, auto& b) { return a.logprob > b.logprob; }));
  }
}

// Of three tokens, another one each time.
class InTurns : public TokenFilter {
 public:
  void Allowed(std::span<uint32_t> bits) override {
    std::fill(bits.begin(), bits.end(), 0);
    const auto next = static_cast<size_t>(40 + taken.size() % 3);
    bits[next / 32] |= 1u << (next % 32);
  }
  void Take(int32_t token) override { taken.push_back(token); }
  std::vector<int32_t> taken;
};

TEST_P(SchedulerTest, AFilterSaysWhichTokensMayCome) {
  const auto engine = Load(Options(GetParam(), 2));
  ASSERT_NE(engine, nullptr);
  House house(*engine, {.seats = 2});
  Request request = Make(Numbers(50, 1), 7);
  const auto filter = std::make_shared<InTurns>();
  request.filter = filter;
  request.generate.sampling.temperature = 1;
  const Asked& filtered = house.Ask(request);
  const Asked& free = house.Ask(Make(Numbers(50, 1), 7));
  house.RunDry();
  EXPECT_THAT(filtered.tokens, ElementsAre(40, 41, 42, 40, 41, 42, 40));
  EXPECT_EQ(filter->taken, filtered.tokens);
  EXPECT_EQ(free.tokens, Alone(*Load(Options(GetParam(), 1)), free.request));
}

TEST_P(SchedulerTest, RunsOnAThreadOfItsOwnUntilItStops) {
  const auto engine = Load(Options(GetParam(), 4));
  ASSERT_NE(engine, nullptr);
  auto scheduler = Scheduler::Create(CoreOf(*engine), {.seats = 4});
  ASSERT_TRUE(scheduler.ok());
  std::thread runs([&] { (*scheduler)->Run(); });
  std::atomic<int> ended = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 5; ++i) {
        Request request = Make(Numbers(30 + static_cast<size_t>(7 * c + i), 1), 6);
        request.on_end = [&](const Result<RequestEnd>& end) {
          EXPECT_TRUE(end.ok());
          ++ended;
        };
        const Scheduler::Id id = (*scheduler)->Submit(std::move(request));
        if (i == 3) (*scheduler)->Cancel(id);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  (*scheduler)->Stop(/*drain=*/true);
  runs.join();
  EXPECT_EQ(ended, 20);
}

INSTANTIATE_TEST_SUITE_P(On, SchedulerTest, testing::Values("ref", "cpu", "cuda"), NameOf);

TEST(SchedulerAhead, StepsOfADeviceRunAhead) {
  EngineOptions options = Options("ref", 8);
  const auto engine = LoadEngine(options, [&]() -> Result<std::unique_ptr<Backend>> {
    return std::unique_ptr<Backend>(std::make_unique<AsDevice>(MakeRefBackend()));
  });
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const auto quiet = Load(Options("ref", 1));
  House house(**engine, {.seats = 4});
  std::vector<Asked*> asked;
  for (size_t i = 0; i < 9; ++i) {
    Request request = Make(Numbers(30 + 40 * i, i), 4 + 7 * static_cast<int64_t>(i % 3));
    if (i % 3 == 1) request.generate.sampling = {.temperature = 1, .seed = i};
    if (i == 5) request.top_logprobs = 2;  // the host draws
    asked.push_back(&house.Ask(std::move(request)));
    house.Turns(2);
  }
  house.RunDry();
  for (const Asked* one : asked) EXPECT_EQ(one->tokens, Alone(*quiet, one->request));
}

TEST(SchedulerOptions, AreChecked) {
  const auto engine = Load(Options("ref", 2));
  const auto sentence = [&](const SchedulerOptions& options) {
    return Scheduler::Create(CoreOf(*engine), options).status().message();
  };
  EXPECT_THAT(sentence({.seats = 3}), HasSubstr("`seats` is 3, expected 1 to 2"));
  EXPECT_THAT(sentence({.seats = 0}), HasSubstr("`seats` is 0"));
  EXPECT_THAT(sentence({.seats = 1, .max_waiting = 0}), HasSubstr("`max_waiting` is 0"));
  EXPECT_THAT(sentence({.seats = 1, .token_ms = std::nan("")}), HasSubstr("`token_ms` is nan"));
}

}  // namespace
}  // namespace omnikv::scheduler_test
