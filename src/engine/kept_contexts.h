// Rows of prompts that requests computed, kept for those that begin with the same tokens
// (docs/serving.md, "Prefixes").
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/row_group.h"

namespace omnikv {

// What a sequence of the bank has for others.
struct SharedRows {
  int32_t seq = -1;  // of the bank; -1: in a file
  std::span<const int32_t> tokens;
  int64_t dense_rows = 0;    // the first ones, each computed from all before it, in all layers
  std::string_view made_by;  // the key of the group that computed the others
  int64_t group = -1;        // RowGroup::id of the group whose states it has; -1: none
};

// Whether `one` has all rows that `other` has for others.
bool Covers(const SharedRows& one, const SharedRows& other);

// Tokens at the beginning of both.
int64_t CommonTokens(std::span<const int32_t> a, std::span<const int32_t> b);

// Whether members of `to` can take rows at all: none where a policy's choice is made of all rows of
// a prompt as they are computed.
bool TakesRows(const EngineCore& core, const RowGroup& to);

// How many of the first tokens of `prompt` a sequence in `to`, a group of key `key`, can have of
// those, if their rows are all there: of any policy those of a dense prompt, where `to` reads
// prompts densely, too, and all rows where `key` made them (empty: of no key that is known).
int64_t UsableTokens(const EngineCore& core, const RowGroup& to, std::string_view key,
                     const SharedRows& from, std::span<const int32_t> prompt);
// The same of a sequence of the bank: 0 where rows that the next token reads are not there.
int64_t ShareableTokens(const EngineCore& core, const RowGroup& to, std::string_view key,
                        const SharedRows& from, std::span<const int32_t> prompt);

// One of those below.
struct KeptContext {
  uint64_t id = 0;
  bool pinned = false;
  SharedRows rows;
};

class ContextStore;

// Sequences of the bank that no group has, the least recently used first. Those that `store` still
// copies are its, too (ContextStore::HoldOf); null: there is none. Thread-compatible.
class KeptContexts {
 public:
  explicit KeptContexts(EngineCore& core, ContextStore* store) : core_(core), store_(store) {}
  ~KeptContexts();

  // Takes the sequence over; no other has that `id`. One whose tokens all are the first ones of a
  // new one goes, unless it is pinned or has to be written.
  void Keep(int32_t seq, std::vector<int32_t> tokens, int64_t dense_rows, std::string made_by,
            int64_t group, uint64_t id);
  // Frees the one that was not used for longest, but for `but`, those that are pinned, and those
  // that have to be written; others that are being written go last. False: there is none.
  bool DropOldest(int32_t but = -1);
  // By their ids; false, and nothing: there is none of that id.
  std::optional<KeptContext> Find(uint64_t id) const;
  bool Pin(uint64_t id, bool pinned);
  bool Drop(uint64_t id);
  // It is used now.
  void Touch(int32_t seq);
  // Calls visit(rows) for each.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (const Context& c : contexts_) visit(c.Rows());
  }
  std::vector<KeptContext> All() const;
  size_t size() const { return contexts_.size(); }
  int64_t pinned() const;

 private:
  struct Context {
    uint64_t id;
    bool pinned;
    int32_t seq;
    std::vector<int32_t> tokens;
    int64_t dense_rows;
    std::string made_by;
    int64_t group;
    SharedRows Rows() const { return {seq, tokens, dense_rows, made_by, group}; }
  };

  void Free(int32_t seq);

  EngineCore& core_;
  ContextStore* store_;
  std::list<Context> contexts_;
};

}  // namespace omnikv
