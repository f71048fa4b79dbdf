// What a sequence keeps in the backend's memory of the layers that live on the host: for the layers
// that read one selection of a policy, slots for the rows that were selected lately.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bank/bank.h"
#include "bank/declared_reads.h"

namespace omnikv {

struct WorkingSetConfig {
  DeclaredReads reads;        // by layer of the bank
  int32_t n_slots = 0;        // rows of each layer, at least reads.max_tokens
  float simulated_hits = -1;  // WorkingSetArgs
};

// Of one sequence. Enqueues at record time, like a policy. Thread-compatible.
class WorkingSets {
 public:
  static Result<std::unique_ptr<WorkingSets>> Create(Backend& backend, const Bank& bank,
                                                     WorkingSetConfig config);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const WorkingSetConfig& config);
  size_t Bytes() const { return Bytes(bank_.config(), config_); }

  // A step begins, which has selected nothing yet.
  void BeginStep() { selected_.assign(groups_.size(), false); }
  // Whether `layer` is read through a working set in this step: it lives on the host, and what it
  // reads is selected.
  bool HasSelection(int32_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return rows_[i].size() != 0 && selected_[static_cast<size_t>(config_.reads.selection_of[i])];
  }

  // Forgets all rows: after something other than a decode step wrote K/V.
  void Reset();
  // Enqueues a selection. From here on the missing rows travel. `primes`: at the end of a prompt,
  // for the steps to come.
  void Select(const Selection& selection, const SeqMeta* seq, bool primes);
  // Enqueues the copy of what `layer` misses from `kv`, where all its rows are: a prompt's stage.
  // After a Select that primes.
  void Prime(int32_t layer, const KvView& kv);
  // Where a step's own row of `layer` goes instead of its home. After Select.
  KvSlot OwnRow(int32_t layer) const;
  // Enqueues the way home of the step's own rows, on Lane::kOut: at the end of a step, when nothing
  // waits for it. Layers without a selection forget that row: it went home without them.
  void WriteBack(const SeqMeta* seq);
  // Enqueues the fetch of what `layer` misses, waits for it, and turns an attention over the
  // selection into one over the slots: the same rows in the same order.
  void Resolve(int32_t layer, AttendArgs& attend);

  // Rows of a layer each, since Create or Reset. Waits for the backend.
  struct Counters {
    uint64_t selected = 0;  // by steps
    uint64_t missed = 0;    // of them
    uint64_t missed_bytes = 0;
    uint64_t primed = 0;  // copied at the end of a prompt
  };
  Counters Count() const;

 private:
  // Of the layers that read one selection.
  struct Group {
    Buffer slot_of, owner, used, clock, cursor;
    Buffer slots, miss_row, miss_slot, n_miss, own, own_row, n_own, span, slot_seq;
  };
  // What a group counts, in a row of counters_: the rows of its steps, and of its priming.
  struct Counted {
    uint64_t selected, missed, primed_selected, primed;
  };

  WorkingSets(Backend& backend, const Bank& bank, WorkingSetConfig config)
      : backend_(backend), bank_(bank), config_(std::move(config)) {}
  Status Allocate();
  // Enqueues WorkingSetArgs: `count` and `bounds` as there, `index` any where *count is 0.
  void Update(int32_t group, const int32_t* index, const int32_t* count, const int32_t* bounds,
              const SeqMeta* seq, uint64_t* counters);
  // Enqueues the copy of rows from `from` to the slots of `layer`.
  void Fetch(int32_t layer, const std::byte* from, Lane lane);
  const Group& GroupOf(int32_t layer) const {
    return groups_[static_cast<size_t>(config_.reads.selection_of[static_cast<size_t>(layer)])];
  }

  Backend& backend_;
  const Bank& bank_;
  WorkingSetConfig config_;
  std::vector<Group> groups_;   // by number of the selection
  Buffer counters_;             // Counted [groups]
  Buffer nothing_;              // int32 [2]: zeros, a selection of nothing
  std::vector<bool> selected_;  // [groups], in this step
  // [layers]: [n_slots] rows; empty where the layer is not on the host or reads no selection.
  std::vector<Buffer> rows_;
};

}  // namespace omnikv
