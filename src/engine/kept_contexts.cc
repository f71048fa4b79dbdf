#include "engine/kept_contexts.h"

#include <algorithm>
#include <utility>

#include "engine/context_store.h"

namespace omnikv {
namespace {

// For how long a context of a sequence stays; a pinned one does.
ContextStore::Hold HoldOf(const ContextStore* store, int32_t seq, bool pinned) {
  if (pinned) return ContextStore::Hold::kStays;
  return store == nullptr ? ContextStore::Hold::kNone : store->HoldOf(seq);
}

// Whether the group's states can be made of rows that others computed: where K/V lie on a disk
// beside a card, no op reaches them.
bool CanMakeStates(const EngineCore& core, const RowGroup& group) {
  const bool reaches = !core.backend->OnDevice() || Bank::ReservedOnDisk(core.bank->config()) == 0;
  return reaches || group.states().empty();
}

}  // namespace

bool TakesRows(const EngineCore& core, const RowGroup& to) {
  const Keeps keeps = to.policy().Kept();
  const bool by_layer = core.plan.by_layer && keeps.rows > 0;
  return !keeps.sums && to.policy().PromptStepRows() == 0 && !by_layer;
}

bool Covers(const SharedRows& one, const SharedRows& other) {
  const int64_t tokens = std::ssize(other.tokens);
  return other.dense_rows <= one.dense_rows &&
         (other.made_by == one.made_by || tokens <= one.dense_rows) &&
         CommonTokens(one.tokens, other.tokens) == tokens;
}

int64_t CommonTokens(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

int64_t UsableTokens(const EngineCore& core, const RowGroup& to, std::string_view key,
                     const SharedRows& from, std::span<const int32_t> prompt) {
  const Policy& policy = to.policy();
  const bool own = !key.empty() && from.made_by == key && policy.CutsBack();
  if (!TakesRows(core, to) || (!own && !to.DensePrompts())) return 0;
  if (from.group != to.id() && !CanMakeStates(core, to)) return 0;
  const int64_t common = CommonTokens(prompt, from.tokens);
  // The last rows are computed for the logits and for the policy's state.
  const int64_t warm = std::max<int64_t>({1, policy.WarmRows(), policy.LastRows()});
  int64_t usable = std::max<int64_t>(
      0, std::min<int64_t>({common, std::ssize(prompt) - warm, own ? common : from.dense_rows}));
  // The unit that the first new row is in has its states from the step of that row.
  for (const auto& stream : to.states()) usable -= usable % stream->spec.unit;
  return usable;
}

int64_t ShareableTokens(const EngineCore& core, const RowGroup& to, std::string_view key,
                        const SharedRows& from, std::span<const int32_t> prompt) {
  if (core.bank->LeastLength(from.seq) > 0) return 0;
  const int64_t shared = UsableTokens(core, to, key, from, prompt);
  return shared > 0 && CanGoOnFrom(core, to.policy(), from.seq, shared) ? shared : 0;
}

KeptContexts::~KeptContexts() {
  for (const Context& c : contexts_) Free(c.seq);
}

void KeptContexts::Free(int32_t seq) {
  if (store_ != nullptr) store_->GiveUp(seq);
  core_.bank->Free(seq);
}

void KeptContexts::Keep(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows,
                        std::string made_by, int64_t group, uint64_t id) {
  const SharedRows rows{.seq = seq, .tokens = tokens, .dense_rows = dense_rows, .made_by = made_by};
  std::erase_if(contexts_, [&](const Context& c) {
    const bool covered =
        Covers(rows, c.Rows()) && HoldOf(store_, c.seq, c.pinned) != ContextStore::Hold::kStays;
    if (covered) Free(c.seq);
    return covered;
  });
  contexts_.push_back(
      {id, /*pinned=*/false, seq, std::move(tokens), dense_rows, std::move(made_by), group});
}

bool KeptContexts::DropOldest(int32_t but) {
  auto oldest = contexts_.end();
  for (auto c = contexts_.begin(); c != contexts_.end(); ++c) {
    const ContextStore::Hold hold = HoldOf(store_, c->seq, c->pinned);
    if (c->seq == but || hold == ContextStore::Hold::kStays) continue;
    if (oldest == contexts_.end() || hold == ContextStore::Hold::kNone) oldest = c;
    if (hold == ContextStore::Hold::kNone) break;
  }
  if (oldest == contexts_.end()) return false;
  Free(oldest->seq);
  contexts_.erase(oldest);
  return true;
}

void KeptContexts::Touch(int32_t seq) {
  const auto used = std::find_if(contexts_.begin(), contexts_.end(),
                                 [&](const Context& c) { return c.seq == seq; });
  if (used != contexts_.end()) contexts_.splice(contexts_.end(), contexts_, used);
}

std::vector<KeptContext> KeptContexts::All() const {
  std::vector<KeptContext> all;
  for (const Context& c : contexts_) all.push_back({c.id, c.pinned, c.Rows()});
  return all;
}

std::optional<KeptContext> KeptContexts::Find(uint64_t id) const {
  for (const Context& c : contexts_) {
    if (c.id == id) return KeptContext{c.id, c.pinned, c.Rows()};
  }
  return {};
}

bool KeptContexts::Pin(uint64_t id, bool pinned) {
  const auto found = std::find_if(contexts_.begin(), contexts_.end(),
                                  [&](const Context& c) { return c.id == id; });
  if (found == contexts_.end()) return false;
  found->pinned = pinned;
  return true;
}

bool KeptContexts::Drop(uint64_t id) {
  const auto found = std::find_if(contexts_.begin(), contexts_.end(),
                                  [&](const Context& c) { return c.id == id; });
  if (found == contexts_.end()) return false;
  Free(found->seq);
  contexts_.erase(found);
  return true;
}

int64_t KeptContexts::pinned() const {
  return std::count_if(contexts_.begin(), contexts_.end(),
                       [](const Context& c) { return c.pinned; });
}

}  // namespace omnikv
