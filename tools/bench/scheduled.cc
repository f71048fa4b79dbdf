#include "bench/scheduled.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "engine/scheduler.h"

namespace omnikv::tools {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// A request, and when its tokens came.
struct Asked {
  Scheduler::Id id = 0;
  Clock::time_point submitted;
  std::vector<Clock::time_point> tokens;
  std::optional<Result<RequestEnd>> end;
};

class Requests {
 public:
  Requests(Scheduler& scheduler, const PolicyOptions& policy, int32_t vocab)
      : scheduler_(scheduler), policy_(policy), vocab_(vocab) {}

  Asked& Submit(int64_t tokens, int64_t answer) {
    Asked& asked = asked_.emplace_back();
    Request request{.prompt = {},
                    .policy = policy_,
                    .generate = {.max_tokens = answer, .ignore_eos = true},
                    .deadline = {},
                    .on_end = {}};
    for (int64_t i = 0; i < tokens; ++i) request.prompt.push_back(NextToken());
    request.on_piece = [&asked](const AnswerPiece&) { asked.tokens.push_back(Clock::now()); };
    request.on_end = [&asked](const Result<RequestEnd>& end) { asked.end.emplace(end); };
    asked.submitted = Clock::now();
    asked.id = scheduler_.Submit(std::move(request));
    return asked;
  }
  // Turns until done() or nothing is left to do. The first failure of a request, if there is one.
  template <typename Done>
  Status RunUntil(const Done& done) {
    while (!done()) {
      const bool busy = scheduler_.Turn();
      for (const Asked& asked : asked_) {
        if (asked.end && !asked.end->ok()) return asked.end->status();
      }
      if (!busy) break;
    }
    return {};
  }
  Status End() {
    for (const Asked& asked : asked_) {
      if (!asked.end) scheduler_.Cancel(asked.id);
    }
    return RunUntil([] { return false; });
  }

 private:
  int32_t NextToken() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state_ >> 33) % static_cast<uint64_t>(vocab_));
  }

  Scheduler& scheduler_;
  const PolicyOptions& policy_;
  int32_t vocab_;
  uint64_t state_ = 1;
  std::deque<Asked> asked_;
};

// Of the times between two tokens of one request from `from` on, in milliseconds.
double P95Between(const std::vector<Asked*>& asked, Clock::time_point from) {
  std::vector<double> ms;
  for (const Asked* a : asked) {
    for (size_t i = 1; i < a->tokens.size(); ++i) {
      if (a->tokens[i - 1] >= from) ms.push_back(1e3 * Seconds(a->tokens[i - 1], a->tokens[i]));
    }
  }
  if (ms.empty()) return 0;
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() * 95 / 100];
}

}  // namespace

Result<ScheduledCase> MeasureScheduled(BenchEngine& bench, const PolicyOptions& policy,
                                       int64_t context, int32_t requests, int steps, int64_t beside,
                                       double token_ms) {
  EngineCore& core = CoreOf(*bench.engine);
  OKV_ASSIGN_OR_RETURN(
      const auto scheduler,
      Scheduler::Create(core, {.seats = core.options.max_sessions, .token_ms = token_ms}));
  ScheduledCase result{.context = context, .requests = requests, .beside = beside};
  Requests all(*scheduler, policy, bench.vocab);
  const auto has_token = [](const Asked& asked) { return !asked.tokens.empty(); };
  // Answers go on until they are cancelled.
  const int64_t room = core.bank->config().max_tokens;
  if (beside > 0) {
    for (int i = 0; i < 2; ++i) {  // the first one warms up
      const Asked& alone = all.Submit(beside, 1);
      OKV_RETURN_IF_ERROR(all.RunUntil([&] { return alone.end.has_value(); }));
      result.alone_s = Seconds(alone.submitted, alone.tokens.front());
    }
  }
  std::vector<Asked*> asked;
  for (int32_t i = 0; i < requests; ++i) asked.push_back(&all.Submit(context, room - context));
  const auto decode = [&] {
    return std::count_if(asked.begin(), asked.end(), [&](const Asked* a) { return has_token(*a); });
  };
  // Until nobody who was admitted is without a token.
  OKV_RETURN_IF_ERROR(all.RunUntil([&] {
    const SchedulerStats now = scheduler->stats();
    return now.running > 0 && decode() == now.running;
  }));
  result.together = static_cast<int32_t>(decode());
  if (result.together == 0) return Failed("no request came to decode");
  std::erase_if(asked, [&](const Asked* a) { return !has_token(*a); });
  result.prompts_s = Seconds(asked.front()->submitted, asked.back()->tokens.front());
  const auto run = [&](int n) {
    const size_t until = asked.front()->tokens.size() + static_cast<size_t>(n);
    return all.RunUntil([&] { return asked.front()->tokens.size() >= until; });
  };
  OKV_RETURN_IF_ERROR(run(16));  // records, warms up
  const auto start = Clock::now();
  const size_t had = asked.front()->tokens.size();
  OKV_RETURN_IF_ERROR(run(steps));
  result.ms_per_step =
      1e3 * Seconds(start, Clock::now()) / static_cast<double>(asked.front()->tokens.size() - had);
  result.p95_ms = P95Between(asked, start);
  result.held = scheduler->stats().holdings.bytes;
  if (beside > 0) {
    const auto came = Clock::now();
    const Asked& prompt = all.Submit(beside, 1);
    OKV_RETURN_IF_ERROR(all.RunUntil([&] { return prompt.end.has_value(); }));
    if (prompt.tokens.empty()) return Failed("the prompt beside the others was not read");
    result.beside_s = Seconds(prompt.submitted, prompt.tokens.front());
    result.beside_p95_ms = P95Between(asked, came);
  }
  OKV_RETURN_IF_ERROR(all.End());
  SlotCounters slots = scheduler->stats().slots;
  result.hit_rate = slots.HitRate({});
  const int64_t n_steps = std::max<int64_t>(1, scheduler->stats().steps);
  result.fetched_bytes = slots.missed_bytes / static_cast<uint64_t>(n_steps);
  const RequestStats& stats = (*asked.front()->end)->stats;
  result.policy = stats.policy;
  result.settings = stats.settings;
  return result;
}

}  // namespace omnikv::tools
