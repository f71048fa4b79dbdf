// Which rows of host layers are in slots of the device, for the layers that read one selection and
// for each sequence. The slots' memory is their owner's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "bank/declared_reads.h"

namespace omnikv {

// Tokens may be pieces of several tokens each, which slots hold whole.
struct SlotsConfig {
  int32_t groups = 0;    // selections
  int32_t n_slots = 0;   // of a sequence, at least `capacity`
  int32_t capacity = 0;  // tokens of a selection, at most
  // Tokens whose rows come ahead of their turn, `n_slots - capacity` at most; 0: none.
  int32_t ahead = 0;
  int32_t max_tokens = 0;  // of a sequence
  int32_t n_seqs = 1;
};

// Rows of a layer each, of all sequences, since Create or Reset.
struct SlotCounters {
  uint64_t selected = 0;  // by steps
  uint64_t missed = 0;    // of them
  uint64_t missed_bytes = 0;
  uint64_t primed = 0;  // copied at the end of a prompt
  uint64_t ahead = 0;   // copied by steps that did not select them

  // Of what was selected since `before`; none where nothing was.
  std::optional<double> HitRate(const SlotCounters& before) const {
    if (selected == before.selected) return std::nullopt;
    return 1 - static_cast<double>(missed - before.missed) /
                   static_cast<double>(selected - before.selected);
  }
  SlotCounters& operator+=(const SlotCounters& more) {
    selected += more.selected;
    missed += more.missed;
    missed_bytes += more.missed_bytes;
    primed += more.primed;
    ahead += more.ahead;
    return *this;
  }
  // Of a layer whose group has these, with slots of `tokens` rows of `row_bytes`.
  void Add(const SlotCounters& group, uint64_t tokens, size_t row_bytes) {
    selected += group.selected * tokens;
    missed += group.missed * tokens;
    missed_bytes += group.missed * tokens * row_bytes;
    primed += group.primed * tokens;
    ahead += group.ahead * tokens;
  }
};

// Enqueues at record time, like a policy. Thread-compatible.
class Slots {
 public:
  // What a selection is for.
  enum class Use {
    kStep,    // the layers of a decode step
    kPrompt,  // the first step after a prompt that ends
  };
  static constexpr size_t kUses = 2;

  // Of the layers that read one selection, and what an Update says of it.
  struct Group {
    Buffer slots, miss_row, miss_slot, n_miss, own, own_row, n_own, span, slot_seqs;
    Buffer slot_of, owner, used, clock;
    Buffer average, ahead, ahead_row, ahead_slot, n_ahead;  // empty: none come ahead
    Buffer counters;  // uint64 [kUses][n_seqs][3: selected, missed, ahead]
  };

  explicit Slots(Backend& backend) : backend_(backend) {}
  Status Allocate(const SlotsConfig& config);
  // Bytes of the backend's memory that Allocate takes.
  static size_t Bytes(const SlotsConfig& config);

  const Group& group(size_t i) const { return groups_[i]; }
  size_t n_groups() const { return groups_.size(); }
  // Forgets all rows of a sequence.
  void Reset(int32_t seq);
  // Enqueues `selection`, of which the caller says what is selected, and of which tokens and block
  // table. With `scores`, of the same step, tokens keep their slots by them, and others get some
  // ahead of their turn.
  void Update(size_t group, WorkingSetArgs selection, Use use, const StepScores& scores = {});
  // Enqueues `copy` of what is missing to the slots of a layer; it says which part of which rows,
  // one for each token. `ahead`: of what comes ahead instead.
  void Fetch(size_t group, FetchRowsArgs copy, Lane lane, bool ahead = false) const;
  // Enqueues the copy of the rows that a decode step has made from the slots of a layer to its home
  // in the bank, on Lane::kOut.
  void SendHome(size_t group, const std::byte* from, const KvView& home) const;
  // Of each group, without bytes: of one sequence, or of all (-1). Waits for the backend.
  std::vector<SlotCounters> Count(int32_t seq) const;

 private:
  Backend& backend_;
  SlotsConfig config_;
  std::vector<Group> groups_;
};

}  // namespace omnikv
