// What is done with contexts by their ids, between two steps.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "base/printable.h"
#include "engine/placement.h"
#include "engine/scheduler.h"

namespace omnikv {
namespace {

constexpr std::string_view kInMemory = "ctx-";

// The number of an id of one in memory; 0: it is none.
uint64_t NumberOf(std::string_view id) {
  if (!id.starts_with(kInMemory)) return 0;
  id.remove_prefix(kInMemory.size());
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), number);
  return error == std::errc() && end == id.data() + id.size() ? number : 0;
}

std::vector<int32_t> HeadOf(std::span<const int32_t> tokens) {
  const auto head = tokens.first(std::min(tokens.size(), ListedContext::kHead));
  return {head.begin(), head.end()};
}

}  // namespace

std::string Scheduler::MemoryId(Id id) {
  return fmt::format("{}{}", kInMemory, id);
}

ListedContext ListedOf(const ContextStore& store, const StoredContext& context) {
  return {.id = context.id(),
          .where = ListedContext::Where::kStored,
          .pinned = store.Pinned(context),
          .made_by = context.made_by,
          .tokens = std::ssize(context.tokens),
          .bytes = store.BytesOf(context),
          .head = HeadOf(context.tokens)};
}

std::vector<ListedContext> Scheduler::Contexts() const {
  std::vector<ListedContext> contexts;
  const auto add = [&](const Sequence& s) {
    const int64_t prompt = std::ssize(s.request.prompt);
    contexts.push_back(
        {.id = MemoryId(s.id),
         .where = s.swapped ? ListedContext::Where::kSwapped : ListedContext::Where::kRunning,
         .request = s.id,
         .made_by = s.key,
         .tokens = std::ssize(s.tokens),
         .prompt_tokens = s.stats.prompt_tokens,
         .answer_tokens = std::ssize(s.answer.tokens()),
         .head = HeadOf(std::ssize(s.tokens) < prompt ? s.request.prompt : s.tokens)});
  };
  std::ranges::for_each(running_, add);
  std::ranges::for_each(swapped_, add);
  for (const KeptContext& c : kept_.All()) {
    contexts.push_back({.id = MemoryId(c.id),
                        .pinned = c.pinned,
                        .made_by = std::string(c.rows.made_by),
                        .tokens = std::ssize(c.rows.tokens),
                        .head = HeadOf(c.rows.tokens)});
  }
  if (store_ == nullptr) return contexts;
  store_->ForEach([&](const StoredContext& c) { contexts.push_back(ListedOf(*store_, c)); });
  return contexts;
}

Status Scheduler::NoContext(const std::string& id) const {
  const uint64_t number = NumberOf(id);
  const auto is = [&](const Sequence& s) { return s.id == number; };
  const bool runs = std::ranges::any_of(running_, is) || std::ranges::any_of(swapped_, is);
  if (!runs) return NotFound(fmt::format("there is no context {}", Printable(id)));
  return InvalidArgument(fmt::format(
      "context {} is of a request that runs, expected one whose request has ended", Printable(id)));
}

void Scheduler::SaveContext(const std::string& id, const ContextStore::Done& done) {
  const auto kept = kept_.Find(NumberOf(id));
  if (!kept) {
    const bool stored = store_ != nullptr && store_->Find(id);
    return stored ? done(id) : done(NoContext(id));
  }
  if (store_ == nullptr) {
    return done(InvalidArgument(fmt::format(
        "context {} cannot be saved: the server was started without a `store`", Printable(id))));
  }
  EndAhead();
  store_->Store(kept->rows.seq, {kept->rows.tokens.begin(), kept->rows.tokens.end()},
                kept->rows.dense_rows, std::string(kept->rows.made_by), done);
}

Status Scheduler::PinContext(const std::string& id, bool pinned) {
  const auto kept = kept_.Find(NumberOf(id));
  if (!kept) {
    const bool stored = store_ != nullptr && store_->Find(id);
    return stored ? store_->Pin(id, pinned) : NoContext(id);
  }
  // Each has a number of a sequence, and requests need those of theirs.
  if (pinned && !kept->pinned && kept_.pinned() >= core_.plan.kept) {
    return InvalidArgument(fmt::format(
        "context {} cannot be pinned: {} are, expected at most the {} of `kept_contexts`",
        Printable(id), kept_.pinned(), core_.plan.kept));
  }
  kept_.Pin(kept->id, pinned);
  return {};
}

Status Scheduler::DropContext(const std::string& id) {
  if (kept_.Drop(NumberOf(id))) return {};
  const bool stored = store_ != nullptr && store_->Find(id);
  if (!stored) return NoContext(id);
  if (bringing_ && bringing_->stored.id() == id) {
    EndBringing(NotFound(fmt::format("context {} was deleted", Printable(id))));
  }
  return store_->Delete(id);
}

}  // namespace omnikv
