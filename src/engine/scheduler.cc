// Who runs: what comes in, what is admitted, what ends. The steps of those that run are in
// scheduler_steps.cc.
#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/placement.h"

namespace omnikv {
namespace {

// Rows that are worth keeping: a block of them.
constexpr int64_t kLeastKept = 64;
// A request waits for the rows of a prompt that is being read if it can have so many more of them.
constexpr int64_t kWorthWaiting = 64;

Status Stopping() {
  return ResourceExhausted("no more requests are taken: the engine is stopping");
}

Status Cancelled() {
  return {StatusCode::kCancelled, "the request was cancelled"};
}

}  // namespace

Result<std::unique_ptr<Scheduler>> Scheduler::Create(EngineCore& core,
                                                     const SchedulerOptions& options,
                                                     ContextStore* store) {
  const int32_t most = std::min(kMaxBatch, core.options.max_sessions);
  if (options.seats < 1 || options.seats > most) {
    return InvalidArgument(fmt::format("`seats` is {}, expected 1 to {}", options.seats, most));
  }
  if (options.max_waiting < 1) {
    return InvalidArgument(
        fmt::format("`max_waiting` is {}, expected 1 or more", options.max_waiting));
  }
  if (!(options.token_ms >= 0)) {
    return InvalidArgument(fmt::format("`token_ms` is {}, expected 0 or more", options.token_ms));
  }
  if (const Status made = Scratch::Create(options.swap_folder).status(); !made.ok()) {
    return InvalidArgument(made.message());
  }
  std::unique_ptr<Scheduler> scheduler(new Scheduler(core, options, store));
  if (store != nullptr) {
    store->set_ready([raw = scheduler.get()] { raw->StoreIsReady(); });
  }
  return scheduler;
}

Scheduler::~Scheduler() {
  TakeIncoming();
  EndAhead();
  if (bringing_) EndBringing(Stopping());
  for (const Load& load : loads_) load.done(Stopping());
  for (Sequence& s : running_) End(s, {}, FinishReason::kCancelled);
  for (Sequence& s : swapped_) End(s, {}, FinishReason::kCancelled);
  for (const Waiting& w : waiting_) {
    w.request.on_end(RequestEnd{.reason = FinishReason::kCancelled});
  }
  if (store_ == nullptr) return;
  store_->Flush();  // before the sequences go that it has rows of
  store_->set_ready({});
}

Scheduler::Id Scheduler::Submit(Request request) {
  const std::lock_guard lock(mutex_);
  const Id id = next_id_++;
  incoming_.push_back(
      {.id = id, .request = std::move(request), .arrived = Clock::now(), .late = stopped_});
  wake_.notify_one();
  return id;
}

void Scheduler::Cancel(Id id) {
  const std::lock_guard lock(mutex_);
  cancels_.push_back(id);
  wake_.notify_one();
}

void Scheduler::Call(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
  wake_.notify_one();
}

void Scheduler::RunCalls() {
  decltype(calls_) calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(calls_);
  }
  for (const auto& call : calls) call();
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Scheduler::Stop(bool drain) {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  drains_ = drain;
  wake_.notify_one();
}

void Scheduler::Run() {
  while (true) {
    const bool busy = Turn();
    std::unique_lock lock(mutex_);
    if (stopped_ && (!drains_ || !busy)) return;
    if (!busy) {
      wake_.wait(lock, [&] {
        return stopped_ || !incoming_.empty() || !cancels_.empty() || !calls_.empty();
      });
    }
  }
}

bool Scheduler::Turn() {
  TakeIncoming();
  EndCancelled();
  RunCalls();
  ServeStore();
  Admit();
  KeepPromises();
  const bool steps = !running_.empty();
  if (steps) {
    Sequence* const prompt = NextPrompt();
    Sequences together;
    Sequences alone;
    Decoding(prompt, together, alone);
    if (prompt == nullptr && alone.empty() && DeviceDraws(together)) {
      if (const Status ran = StepAhead(together); !ran.ok()) Apart(together, nullptr, ran);
    } else {
      EndAhead();
      if (!together.empty() || prompt != nullptr) Together(together, prompt);
      for (Sequence* s : alone) Together({s}, nullptr);
    }
  }
  RemoveEnded();
  // Those that wait may run in the next turn where the last one of this ended.
  if (!steps && (bringing_ || StoreWrites())) AwaitStore();
  Holdings holdings = HoldingsOf(core_);
  const std::lock_guard lock(mutex_);
  stats_.running = static_cast<int64_t>(running_.size());
  stats_.waiting = static_cast<int64_t>(waiting_.size());
  stats_.swapped = static_cast<int64_t>(swapped_.size());
  stats_.swap_bytes = 0;
  for (const Sequence& s : swapped_) stats_.swap_bytes += s.swapped->bytes();
  stats_.kept_contexts = static_cast<int64_t>(kept_.size());
  stats_.pinned_contexts = kept_.pinned();
  stats_.holdings = std::move(holdings);
  stats_.blocks_total = core_.bank->TotalBlocks(0);
  stats_.blocks_used = stats_.blocks_total - core_.bank->FreeBlocks(0);
  return !running_.empty() || !swapped_.empty() || !waiting_.empty() || !incoming_.empty() ||
         bringing_ || !loads_.empty() || StoreWrites();
}

void Scheduler::TakeIncoming() {
  std::vector<Waiting> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(incoming_);
  }
  for (Waiting& w : taken) {
    if (w.late) {
      Refuse(w, Stopping());
    } else if (static_cast<int32_t>(waiting_.size()) >= options_.max_waiting) {
      Refuse(w, ResourceExhausted(fmt::format("{} requests are waiting, expected at most {}",
                                              waiting_.size(), options_.max_waiting)));
    } else if (const Status can_run = Check(w); !can_run.ok()) {
      Refuse(w, can_run);
    } else {
      waiting_.push_back(std::move(w));
    }
  }
  std::ranges::sort(waiting_, {}, [](const Waiting& w) { return RankOf(w); });
}

int64_t Scheduler::TotalTokens(const Request& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t context = core_.bank->config().max_tokens;
  return std::min(context, request.generate.max_tokens > context
                               ? context
                               : prompt + request.generate.max_tokens);
}

Status Scheduler::Check(Waiting& waiting) const {
  const Request& request = waiting.request;
  OKV_RETURN_IF_ERROR(CheckTokens(core_, request.prompt));
  OKV_RETURN_IF_ERROR(CheckGenerate(request.generate));
  OKV_ASSIGN_OR_RETURN(waiting.key, GroupPool::KeyOf(core_, request.policy));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Policy> policy,
                       PolicyFor(request.policy, core_.config, core_.bank->config().max_tokens,
                                 core_.bank->config().dtype, core_.plan.host_layers > 0));
  OKV_RETURN_IF_ERROR(CheckLayout(core_, request.policy.name, *policy));
  const int64_t total = TotalTokens(request);
  return CheckBlocks(
      core_, MostBlocks(core_, *policy, static_cast<int64_t>(request.prompt.size()), total), total);
}

void Scheduler::Refuse(const Waiting& waiting, const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    ++stats_.refused;
  }
  waiting.request.on_end(status);
}

void Scheduler::EndCancelled() {
  std::vector<Id> ids;
  {
    const std::lock_guard lock(mutex_);
    ids.swap(cancels_);
  }
  const auto now = Clock::now();
  const auto over = [&](Id id, const Request& request) {
    return std::find(ids.begin(), ids.end(), id) != ids.end() ||
           (request.deadline && *request.deadline <= now);
  };
  for (std::list<Sequence>* all : {&running_, &swapped_}) {
    for (Sequence& s : *all) {
      if (over(s.id, s.request)) End(s, {}, FinishReason::kCancelled);
    }
  }
  RemoveEnded();
  std::erase_if(waiting_, [&](const Waiting& w) {
    if (!over(w.id, w.request)) return false;
    w.request.on_end(RequestEnd{.reason = FinishReason::kCancelled});
    if (IsBroughtFor(w.id)) EndBringing(Cancelled());
    const std::lock_guard lock(mutex_);
    ++stats_.cancelled;
    return true;
  });
}

void Scheduler::Admit() {
  for (size_t i = 0; i < waiting_.size() || !swapped_.empty();) {
    const bool returns = !swapped_.empty() &&
                         (i == waiting_.size() || RankOf(swapped_.front()) < RankOf(waiting_[i]));
    if (!returns && IsBroughtFor(waiting_[i].id)) {
      ++i;
      continue;
    }
    const Rank rank = returns ? RankOf(swapped_.front()) : RankOf(waiting_[i]);
    // The one for which rows come from the store has its seat.
    const int32_t taken = bringing_ && bringing_->request != 0 ? 1 : 0;
    const bool full = static_cast<int32_t>(running_.size()) + taken >= options_.seats;
    if (full && !PreemptBelow(rank.priority)) return;
    switch (returns ? TryResume(swapped_.front()) : TryAdmit(waiting_[i])) {
      case Admission::kWaits:
        return;  // those behind it wait, too: it is not overtaken for ever
      case Admission::kWaitsForRows:
        ++i;
        break;
      case Admission::kRuns:
      case Admission::kRefused:
        if (!returns) waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
        break;
    }
  }
}

SharedRows Scheduler::RowsOf(const Sequence& s) const {
  return {.seq = s.group->rows->seq(s.member),
          .tokens = s.tokens,
          .dense_rows = s.dense_rows,
          .made_by = s.key,
          .group = s.group->rows->id()};
}

void Scheduler::Respell(const Group& group, Request& request) {
  const Tokenizer* const tokenizer = core_.text.tokenizer.get();
  if (!request.any_spelling || tokenizer == nullptr || !OneRotation(core_.config)) return;
  if (!token_texts_) {
    auto texts = TokenTexts::Of(*tokenizer);
    if (!texts.ok()) return;
    token_texts_.emplace(std::move(*texts));
  }
  int64_t most = 0;
  std::vector<int32_t> best;
  const auto offer = [&](const SharedRows& rows) {
    const std::vector<int32_t>& prompt = request.prompt;
    const auto usable = [&](std::span<const int32_t> of) {
      return UsableTokens(core_, *group.rows, group.key, rows, of);
    };
    const SameText same = BeginningOf(*token_texts_, rows.tokens, prompt);
    const bool others = same.kept > CommonTokens(rows.tokens, prompt);
    const int64_t length = std::ssize(prompt) - same.prompt + same.kept;
    if (!others || length > core_.bank->config().max_tokens) return;
    std::vector<int32_t> spelled(rows.tokens.begin(), rows.tokens.begin() + same.kept);
    spelled.insert(spelled.end(), prompt.begin() + same.prompt, prompt.end());
    const int64_t gain = usable(spelled) - usable(prompt);
    if (gain <= most) return;
    most = gain;
    best = std::move(spelled);
  };
  kept_.ForEach(offer);
  if (store_ != nullptr) store_->ForEach([&](const StoredContext& c) { offer(c.Rows()); });
  if (best.empty()) return;
  // One that could run could still not, with more tokens.
  const auto total =
      std::min<int64_t>(core_.bank->config().max_tokens,
                        TotalTokens(request) + std::ssize(best) - std::ssize(request.prompt));
  const BlockCounts blocks = MostBlocks(core_, group.rows->policy(), std::ssize(best), total);
  if (CheckBlocks(core_, blocks, total).ok()) request.prompt = std::move(best);
}

Scheduler::Best Scheduler::BestRows(const Group& group, std::span<const int32_t> prompt) const {
  const RowGroup& to = *group.rows;
  Best best;
  const auto offer = [&](const SharedRows& rows) {
    const int64_t tokens = ShareableTokens(core_, to, group.key, rows, prompt);
    if (tokens <= best.tokens) return;
    best.rows = rows;
    best.tokens = tokens;
  };
  if (!OneRotation(core_.config) || !TakesRows(core_, to)) return best;
  kept_.ForEach(offer);
  for (const Sequence& s : running_) {
    if (s.ended) continue;
    offer(RowsOf(s));
    const RowGroup& rows = *s.group->rows;
    if (s.read || !rows.DensePrompts() || !to.DensePrompts() || !TakesRows(core_, rows)) continue;
    best.to_come = std::max(best.to_come, CommonTokens(prompt, s.request.prompt));
  }
  return best;
}

Result<int32_t> Scheduler::Join(Group& group, std::span<const int32_t> prompt, Best& best) {
  RowGroup& rows = *group.rows;
  while (true) {
    auto member = best.tokens > 0 ? rows.JoinPrefix(best.rows.seq, best.tokens) : rows.Join();
    if (member.ok() || kept_.size() == 0) return member;
    if (kept_.DropOldest(best.rows.seq)) continue;
    if (!kept_.DropOldest()) return member;  // that one, whose number is needed
    best = BestRows(group, prompt);
  }
}

Scheduler::Admission Scheduler::TryAdmit(Waiting& waiting) {
  Request& request = waiting.request;
  const auto refuse = [&](const Status& status) {
    Refuse(waiting, status);
    return Admission::kRefused;
  };
  const auto wait_or_refuse = [&](const Status& status) {
    const bool later = status.code() == StatusCode::kResourceExhausted && OthersGoOn();
    return later ? Admission::kWaits : refuse(status);
  };
  auto found = groups_.Get(waiting.key, request.policy);
  while (found.status().code() == StatusCode::kResourceExhausted &&
         PreemptBelow(request.priority)) {
    found = groups_.Get(waiting.key, request.policy);
  }
  if (!found.ok()) return wait_or_refuse(found.status());
  Group& group = **found;
  RowGroup& rows = *group.rows;
  Respell(group, request);
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  Best best = BestRows(group, request.prompt);
  if (best.to_come >= best.tokens + kWorthWaiting) return Admission::kWaitsForRows;
  if (WaitsForStore(waiting, group, best)) return Admission::kWaitsForRows;
  const int64_t total = TotalTokens(request);
  const uint64_t swap_most = SwapMost(rows, prompt, total);
  const std::vector<Promise> promises =
      Promises(rows.policy(), prompt, prompt, total, HasSwapRoom(swap_most));
  // Rows that move, or of which some stay, become the sequence's own.
  const auto shared = [&] { return rows.policy().Kept().rows > 0 ? 0 : best.tokens; };
  const auto fits = [&](const Promise& promise) { return Fits(promise.blocks, shared()); };
  auto promise = promises.begin();
  while ((promise = std::ranges::find_if(promises, fits)) == promises.end()) {
    if (kept_.DropOldest(best.rows.seq)) continue;
    if (kept_.DropOldest()) {  // that one, whose rows take more than they save
      best = BestRows(group, request.prompt);
      continue;
    }
    if (PreemptBelow(request.priority)) {
      best = BestRows(group, request.prompt);
      continue;
    }
    return wait_or_refuse(ResourceExhausted(fmt::format(
        "{} tokens of prompt and answer under policy {} do not fit beside what is in use{}", total,
        rows.policy_name(),
        kept_.pinned() > 0 ? fmt::format(", {} pinned contexts among it", kept_.pinned()) : "")));
  }
  auto answer = Answer::Begin(core_, request.generate, request.prompt);
  if (!answer.ok()) return refuse(answer.status());
  EndAhead();
  const auto member = Join(group, request.prompt, best);
  if (!member.ok()) return wait_or_refuse(member.status());
  const auto brought = kept_.Find(waiting.brought);
  const bool from_store = best.tokens > 0 && brought && brought->rows.seq == best.rows.seq;
  kept_.Touch(best.rows.seq);
  ++group.used;
  Sequence& s = running_.emplace_back(Sequence{.id = waiting.id,
                                               .request = std::move(request),
                                               .group = &group,
                                               .key = group.key,
                                               .member = *member,
                                               .answer = std::move(*answer),
                                               .admitted = Clock::now(),
                                               .stats = {}});
  s.tokens.assign(s.request.prompt.begin(), s.request.prompt.begin() + best.tokens);
  s.dense_rows = std::min(best.rows.dense_rows, best.tokens);
  s.logits.resize(static_cast<size_t>(core_.config.vocab));
  s.turn = ++turns_;
  s.total = total;
  s.swap_most = swap_most;
  Give(s, *promise);
  s.stats = {.policy = rows.policy_name(),
             .settings = rows.settings().ToString(),
             .prompt_tokens = prompt,
             .cached_tokens = best.tokens,
             .stored_tokens = from_store ? best.tokens : 0,
             .queue_seconds = Seconds(waiting.arrived, s.admitted)};
  if (best.tokens > 0 && best.rows.group != rows.id()) {
    if (const Status made = stepper_.MakeStates(rows, s.member); !made.ok()) End(s, made);
  }
  if (rows.max_seqs() == 1) rows.ropes().Choose(*core_.backend, core_.config, prompt);
  return Admission::kRuns;
}

void Scheduler::End(Sequence& s, const Status& status, FinishReason reason) {
  EndAhead();
  s.ended = true;
  const auto now = Clock::now();
  Result<std::string> rest = std::string();
  if (status.ok()) rest = s.answer.Flush();
  s.stats.answer_tokens = static_cast<int64_t>(s.answer.tokens().size());
  s.stats.prefill_seconds = Seconds(s.admitted, s.read ? s.read_at : now);
  s.stats.decode_seconds = s.read ? Seconds(s.read_at, now) : 0;
  if (!s.swapped) TakeReads(s);
  {
    const std::lock_guard lock(mutex_);
    const bool good = status.ok() && rest.ok();
    ++(!good                                ? stats_.failed
       : reason == FinishReason::kCancelled ? stats_.cancelled
                                            : stats_.finished);
    stats_.prompt_tokens += s.stats.prompt_tokens;
    stats_.cached_tokens += s.stats.cached_tokens;
    stats_.stored_tokens += s.stats.stored_tokens;
    stats_.answer_tokens += s.stats.answer_tokens;
  }
  ReleaseSwap(s);
  if (!s.swapped) Leave(s);
  if (!status.ok() || !rest.ok()) return s.request.on_end(status.ok() ? rest.status() : status);
  s.request.on_end(
      RequestEnd{.reason = reason, .text = *rest, .stop = s.answer.stop(), .stats = s.stats});
}

void Scheduler::TakeReads(Sequence& s) {
  const RowGroup& rows = *s.group->rows;
  if (rows.length(s.member) == 0) return;
  if (const auto slots = rows.residency().CountBytes(s.member)) {
    s.slots += *slots;
    s.stats.hit_rate = s.slots.HitRate({});
    s.stats.fetched_bytes = s.slots.missed_bytes;
    const std::lock_guard lock(mutex_);
    stats_.slots += *slots;
  }
  const Bank& bank = *core_.bank;
  const int32_t seq = rows.seq(s.member);
  s.stats.held = BytesByTier(core_, bank.DeviceBytes(seq, rows.AllStates()), bank.HostBytes(seq),
                             bank.DiskBytes(seq));
  const SeqLength at = rows.lengths(s.member);
  s.stats.read_fraction = ReadFraction(core_, rows.policy(), s.member, at);
  s.stats.attended_tokens = AttendedTokens(core_.config, rows.policy(), s.member, at);
}

void Scheduler::Leave(Sequence& s) {
  RowGroup& rows = *s.group->rows;
  s.prompt.reset();  // which may leave less than was computed
  --s.group->used;
  const int64_t length = rows.length(s.member);
  s.tokens.resize(static_cast<size_t>(std::min<int64_t>(length, std::ssize(s.tokens))));
  const bool for_others = s.dense_rows >= kLeastKept;
  const bool for_itself = rows.policy().CutsBack() && TakesRows(core_, rows);
  if (length < kLeastKept || std::ssize(s.tokens) != length || rows.least_length(s.member) > 0 ||
      !OneRotation(core_.config) || !(for_others || for_itself)) {
    return rows.Leave(s.member);
  }
  const int32_t seq = rows.Detach(s.member);
  const int64_t dense = std::min(s.dense_rows, length);
  if (store_ != nullptr) store_->Put(seq, s.tokens, dense, s.key);
  kept_.Keep(seq, std::move(s.tokens), dense, s.key, rows.id(), s.id);
}

void Scheduler::RemoveEnded() {
  const auto ended = [](const Sequence& s) { return s.ended; };
  running_.remove_if(ended);
  swapped_.remove_if(ended);
}

}  // namespace omnikv
