// What requests are promised of the bank, and who is preempted for whom (docs/serving.md,
// "Preemption").
#include <algorithm>
#include <utility>

#include "engine/placement.h"
#include "engine/scheduler.h"

namespace omnikv {
namespace {

// Tokens that a request which can be preempted is promised at a time.
constexpr int64_t kPromised = 256;
// Tokens that steps ahead of the host append before their turn.
constexpr int64_t kAhead = StepsAhead::kMost + 1;

}  // namespace

std::vector<Scheduler::Promise> Scheduler::Promises(const Policy& policy, int64_t prompt,
                                                    int64_t length, int64_t total,
                                                    bool can_be_preempted) const {
  std::vector<Promise> promises;
  const int64_t some = std::max(prompt, length) + kPromised;
  if (can_be_preempted && some < total) promises.push_back(PromiseOf(policy, prompt, some));
  promises.push_back(PromiseOf(policy, prompt, total));
  return promises;
}

bool Scheduler::Fits(const BlockCounts& most, int64_t shared, const Sequence* of) const {
  const Bank& bank = *core_.bank;
  const int64_t there = shared / bank.config().block_tokens;
  for (size_t t = 0; t < most.size(); ++t) {
    if (most[t] == 0) continue;
    const auto table = static_cast<int32_t>(t);
    int64_t free = bank.FreeBlocks(table);
    for (const Sequence& s : running_) {
      if (s.ended) continue;
      const int64_t held = bank.HeldBlocks(s.group->rows->seq(s.member), table);
      free += &s == of ? held : -std::max<int64_t>(0, s.most[t] - held);
    }
    if (bringing_) free -= bringing_->most[t] + (bringing_->file->placed() ? 0 : bringing_->own[t]);
    if (free < most[t] - (bank.config().tables[t].window == 0 ? there : 0)) return false;
  }
  return true;
}

void Scheduler::Give(Sequence& s, Promise promise) {
  s.promised = promise.tokens;
  s.most = std::move(promise.blocks);
  ReleaseSwap(s);
  if (s.promised < s.total) ReserveSwap(s);
}

bool Scheduler::Preempt(const Rank& rank) {
  Sequence* last = nullptr;
  for (Sequence& s : running_) {
    const bool may = s.read && !s.ended && (s.swap_reserved > 0 || HasSwapRoom(s.swap_most));
    if (may && rank < RankOf(s) && (last == nullptr || RankOf(*last) < RankOf(s))) last = &s;
  }
  if (last == nullptr) return false;
  SwapOut(*last);
  return true;
}

void Scheduler::SwapOut(Sequence& s) {
  EndAhead();
  RowGroup& rows = *s.group->rows;
  auto swapped = SwappedMember::Of(core_, rows, s.member, options_.swap_folder);
  if (!swapped.ok()) {
    End(s, swapped.status());
    return RemoveEnded();
  }
  TakeReads(s);
  if (s.swap_reserved == 0) ReserveSwap(s);
  s.swapped.emplace(std::move(*swapped));
  rows.Leave(s.member);
  --s.group->used;
  s.group = nullptr;
  ++s.stats.preemptions;
  const auto after = std::ranges::find_if(
      swapped_, [&](const Sequence& other) { return RankOf(s) < RankOf(other); });
  const auto at = std::ranges::find_if(running_, [&](const Sequence& r) { return &r == &s; });
  swapped_.splice(after, running_, at);
  const std::lock_guard lock(mutex_);
  ++stats_.preemptions;
}

Scheduler::Admission Scheduler::TryResume(Sequence& s) {
  const int32_t priority = s.request.priority;
  // Once nothing else has the memory, it does not come back if it cannot now.
  const auto wait_or_end = [&](const Status& status) {
    if (status.code() == StatusCode::kResourceExhausted && OthersGoOn()) {
      return Admission::kWaits;
    }
    End(s, status);
    RemoveEnded();
    return Admission::kRefused;
  };
  const auto found = groups_.Get(s.key, s.request.policy);
  if (!found.ok()) return wait_or_end(found.status());
  Group& group = **found;
  RowGroup& rows = *group.rows;
  const int64_t prompt = s.stats.prompt_tokens;
  const std::vector<Promise> promises =
      Promises(rows.policy(), prompt, s.swapped->length(), s.total, /*can_be_preempted=*/true);
  const auto fits = [&](const Promise& promise) { return Fits(promise.blocks, 0); };
  auto promise = promises.begin();
  while ((promise = std::ranges::find_if(promises, fits)) == promises.end()) {
    if (kept_.DropOldest() || PreemptBelow(priority)) continue;
    return wait_or_end(
        ResourceExhausted("the request was preempted, and its K/V do not fit any more"));
  }
  EndAhead();
  auto member = s.swapped->Resume(core_, rows);
  while (member.status().code() == StatusCode::kResourceExhausted && kept_.DropOldest()) {
    member = s.swapped->Resume(core_, rows);
  }
  if (!member.ok()) return wait_or_end(member.status());
  s.swapped.reset();
  s.group = &group;
  s.member = *member;
  ++group.used;
  Give(s, *promise);
  if (rows.max_seqs() == 1) rows.ropes().Choose(*core_.backend, core_.config, prompt);
  running_.splice(running_.end(), swapped_, swapped_.begin());
  return Admission::kRuns;
}

void Scheduler::KeepPromises() {
  std::vector<Sequence*> due;
  for (Sequence& s : running_) {
    const bool near = std::ssize(s.tokens) + kAhead >= s.promised;
    if (s.read && !s.ended && s.promised < s.total && near) due.push_back(&s);
  }
  std::ranges::sort(due, {}, [](const Sequence* s) { return RankOf(*s); });
  for (Sequence* s : due) {
    const auto runs = [&](const Sequence& r) { return &r == s; };
    if (std::ranges::none_of(running_, runs)) continue;  // it was preempted for one before it
    const Policy& policy = s->group->rows->policy();
    const Promise next = PromiseOf(policy, s->stats.prompt_tokens,
                                   std::min(s->total, std::ssize(s->tokens) + kPromised));
    bool fits = false;
    while (!(fits = Fits(next.blocks, 0, s)) && (kept_.DropOldest() || Preempt(RankOf(*s)))) {
    }
    if (!fits) {
      SwapOut(*s);
      continue;
    }
    Give(*s, next);
  }
}

}  // namespace omnikv
