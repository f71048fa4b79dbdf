// What comes from the store for requests and for LoadContext, and what goes there, while the steps
// of others go on (docs/serving.md, "The store").
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/placement.h"
#include "engine/scheduler.h"

namespace omnikv {
namespace {

// What the store has is read where it has so many more of a prompt than is there.
constexpr int64_t kWorthReading = 256;
// How long the engine waits at most before it looks at deadlines again.
constexpr std::chrono::milliseconds kLook{20};

}  // namespace

std::optional<StoredContext> Scheduler::LookInStore(const Group& to,
                                                    std::span<const int32_t> prompt,
                                                    const Best& best) const {
  if (!OneRotation(core_.config)) return {};
  int64_t most = best.tokens + kWorthReading - 1;
  std::string id;
  store_->ForEach([&](const StoredContext& c) {
    const int64_t tokens = UsableTokens(core_, *to.rows, to.key, c.Rows(), prompt);
    if (tokens <= most) return;
    most = tokens;
    id = c.id();
  });
  return id.empty() ? std::nullopt : store_->Find(id);
}

bool Scheduler::WaitsForStore(Waiting& waiting, Group& group, const Best& best) {
  if (store_ == nullptr || waiting.looked) return false;
  const Request& request = waiting.request;
  const auto stored = LookInStore(group, request.prompt, best);
  if (!stored) {
    waiting.looked = true;
    return false;
  }
  if (bringing_) return true;
  const Policy& policy = group.rows->policy();
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t total = TotalTokens(request);
  const int64_t usable =
      UsableTokens(core_, *group.rows, group.key, stored->Rows(), request.prompt);
  // Rows that move, or of which some stay, become the sequence's own.
  const int64_t shared = policy.Kept().rows > 0 ? 0 : usable;
  const BankConfig& bank = core_.bank->config();
  // What it is promised at least.
  BlockCounts most = std::move(
      Promises(policy, prompt, prompt, total, HasSwapRoom(SwapMost(*group.rows, prompt, total)))
          .front()
          .blocks);
  for (size_t t = 0; t < most.size(); ++t) {
    if (bank.tables[t].window > 0) continue;
    most[t] = std::max<int64_t>(0, most[t] - shared / bank.block_tokens);
  }
  const Status begun = Bring({.stored = *stored,
                              .tokens = store_->TokensToRead(*stored, usable),
                              .file = nullptr,
                              .own = {},
                              .most = std::move(most),
                              .request = waiting.id,
                              .group = &group},
                             best.rows.seq);
  if (!begun.ok()) return false;
  waiting.looked = true;
  ++group.used;
  return true;
}

Status Scheduler::Bring(Bringing bringing, int32_t but) {
  const StoredContext& stored = bringing.stored;
  const int64_t length = bringing.tokens;
  // Files have the rows of all tokens.
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Policy> full,
                       PolicyFor({.name = "full"}, core_.config, core_.bank->config().max_tokens,
                                 core_.bank->config().dtype, core_.plan.host_layers > 0));
  bringing.own = MostBlocks(core_, *full, length, length);
  bringing.most.resize(bringing.own.size());
  BlockCounts all = bringing.own;
  for (size_t t = 0; t < all.size(); ++t) all[t] += bringing.most[t];
  const auto too_many = [&] {
    return ResourceExhausted(fmt::format(
        "the {} tokens of context {} do not fit beside what is in use", length, stored.id()));
  };
  for (size_t t = 0; t < all.size(); ++t) {  // whatever is dropped for it
    if (all[t] > core_.bank->config().PoolBlocks(static_cast<int32_t>(t))) return too_many();
  }
  while (!Fits(all, 0)) {
    if (!kept_.DropOldest(but)) return too_many();
  }
  bringing.file = store_->Read(stored, length, [this] { StoreIsReady(); });
  bringing_ = std::move(bringing);
  return {};
}

void Scheduler::StoreIsReady() {
  const std::lock_guard lock(mutex_);
  has_come_ = true;
  wake_.notify_one();
}

void Scheduler::ServeStore() {
  if (store_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    has_come_ = false;
  }
  TakeFromStore();
  store_->Advance();
}

void Scheduler::TakeFromStore() {
  if (!bringing_) BeginLoads();
  if (!bringing_) return;
  ContextReading& file = *bringing_->file;
  if (!file.placed()) EndAhead();  // the bank may get a new sequence
  Result<bool> there = file.Advance();
  while (there.status().code() == StatusCode::kResourceExhausted && file.AwaitsRoom() &&
         kept_.DropOldest()) {
    there = file.Advance();
  }
  if (!there.ok()) {
    EndBringing(there.status());
  } else if (*there) {
    EndBringing({});
  }
}

void Scheduler::EndBringing(const Status& status) {
  Bringing ended = std::move(*bringing_);
  bringing_.reset();
  if (ended.group != nullptr) --ended.group->used;
  store_->Ended(ended.stored, *ended.file, status);
  if (!status.ok()) {
    if (ended.done) ended.done(status);
    return;
  }
  Id id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = next_id_++;
  }
  StoredContext& stored = ended.stored;
  const int64_t length = ended.file->length();
  stored.tokens.resize(static_cast<size_t>(length));
  kept_.Keep(ended.file->TakeSequence(), std::move(stored.tokens),
             std::min(stored.dense_rows, length), std::move(stored.made_by), /*group=*/-1, id);
  for (Waiting& w : waiting_) {
    if (w.id == ended.request) w.brought = id;
  }
  if (!ended.done) return;
  const Status& damage = ended.file->damage();
  damage.ok() ? ended.done(MemoryId(id)) : ended.done(damage);
}

void Scheduler::LoadContext(const std::string& id, ContextStore::Done done) {
  const auto stored = store_ != nullptr ? store_->Find(id) : std::nullopt;
  if (stored) {
    loads_.push_back({.stored = *stored, .done = std::move(done)});
    return;
  }
  const bool kept =
      std::ranges::any_of(kept_.All(), [&](const KeptContext& c) { return MemoryId(c.id) == id; });
  kept ? done(id) : done(NoContext(id));
}

void Scheduler::BeginLoads() {
  while (!bringing_ && !loads_.empty()) {
    const Load load = std::move(loads_.front());
    loads_.pop_front();
    const std::vector<KeptContext> all = kept_.All();
    const auto covers = std::ranges::find_if(
        all, [&](const KeptContext& c) { return Covers(c.rows, load.stored.Rows()); });
    if (covers != all.end()) {
      kept_.Touch(covers->rows.seq);
      load.done(MemoryId(covers->id));
      continue;
    }
    const Status begun = Bring({.stored = load.stored,
                                .tokens = std::ssize(load.stored.tokens),
                                .file = nullptr,
                                .own = {},
                                .most = {},
                                .request = 0,
                                .group = nullptr,
                                .done = load.done},
                               /*but=*/-1);
    if (!begun.ok()) load.done(begun);
  }
}

void Scheduler::AwaitStore() {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, kLook, [&] {
    return has_come_ || (stopped_ && !drains_) || !incoming_.empty() || !cancels_.empty() ||
           !calls_.empty();
  });
}

}  // namespace omnikv
