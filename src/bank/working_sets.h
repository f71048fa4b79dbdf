// What sequences keep in the backend's memory of the layers that live on the host: for the layers
// that read one selection of a policy, slots for the rows that were selected lately.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bank/bank.h"
#include "bank/declared_reads.h"
#include "bank/slots.h"

namespace omnikv {

struct WorkingSetConfig {
  DeclaredReads reads;  // by layer of the bank
  int32_t n_slots = 0;  // rows of each layer per sequence, at least reads.LeastSlots()
  int32_t n_seqs = 1;   // sequences, numbered as SeqMeta is
};

// Enqueues at record time, like a policy. The arrays of SeqMeta that it takes are [n_seqs].
// Thread-compatible.
class WorkingSets {
 public:
  // Whether some layer is on the host and reads a selection.
  static bool AnyHeld(const BankConfig& bank, const WorkingSetConfig& config);
  // REQUIRES AnyHeld.
  static Result<std::unique_ptr<WorkingSets>> Create(Backend& backend, const Bank& bank,
                                                     WorkingSetConfig config);
  // Bytes of the backend's memory that Create takes.
  static size_t Bytes(const BankConfig& bank, const WorkingSetConfig& config);
  size_t Bytes() const { return Bytes(bank_.config(), config_); }

  int32_t n_selections() const { return config_.reads.n_selections; }
  // Whether rows travel on Lane::kIn for which no Resolve waits.
  bool FetchesAhead() const { return config_.reads.max_ahead > 0; }
  // The selection through whose working set `layer` can be read; -1: none, or the layer is near, or
  // it has several streams.
  int32_t SelectionOf(int32_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return rows_[i].size() != 0 ? config_.reads.selection_of[i] : -1;
  }

  // Forgets all rows of a sequence: after something other than a decode step wrote K/V.
  void Reset(int32_t seq);
  // Enqueues a selection. From here on the missing rows travel, and behind them those that come
  // ahead for the selection before it. `primes`: at the end of a prompt, for the steps to come.
  void Select(const Selection& selection, const SeqMeta* seqs, bool primes);
  // Enqueues the copy of what `layer` misses from `kv`, where all its rows are: a prompt's stage.
  // After a Select that primes.
  void Prime(int32_t layer, const KvView& kv);
  // Where a step's own rows of `layer` go instead of their homes. After Select.
  KvSlot OwnRows(int32_t layer) const;
  // Enqueues the way home of the step's own rows, on Lane::kOut: at the end of a step, when nothing
  // waits for it. Selections that are not in `selected` [n_selections] forget those rows, which
  // went home without them.
  void WriteBack(const SeqMeta* seqs, const std::vector<bool>& selected);
  // Enqueues the fetch of what `layer` misses, waits for it, and turns an attention over the
  // selection into one over the slots: the same rows in the same order.
  void Resolve(int32_t layer, AttendArgs& attend);

  // Of one sequence, or of all (-1). Waits for the backend.
  SlotCounters Count(int32_t seq = -1) const;

 private:
  WorkingSets(Backend& backend, const Bank& bank, WorkingSetConfig config)
      : backend_(backend), bank_(bank), config_(std::move(config)), slots_(backend) {}
  static SlotsConfig SlotsOf(const BankConfig& bank, const WorkingSetConfig& config);
  Status Allocate();
  // A selection of `seqs` whose list and bounds are still to be named.
  WorkingSetArgs Of(const SeqMeta* seqs, bool primes) const;
  // Enqueues the copy of rows from `from` to the slots of `layer`.
  void Fetch(int32_t layer, const KvView& from, Lane lane, bool ahead = false);
  // Enqueues what comes ahead for the last selection, whose layers are behind.
  void FetchAhead();
  // The slots of `layer` as rows. Their numbers stand in no block table of the bank.
  KvView SlotView(int32_t layer) const {
    return bank_.View(layer).MovedTo(rows_[static_cast<size_t>(layer)].as<std::byte>());
  }
  size_t GroupOf(int32_t layer) const {
    return static_cast<size_t>(config_.reads.selection_of[static_cast<size_t>(layer)]);
  }

  Backend& backend_;
  const Bank& bank_;
  WorkingSetConfig config_;
  Slots slots_;     // groups by number of the selection
  Buffer nothing_;  // int32 [n_seqs, 2]: zeros, selections of nothing
  // [layers]: [n_seqs, n_slots] rows; empty where the layer is not on the host or reads no
  // selection.
  std::vector<Buffer> rows_;
  int32_t first_layer_ = -1;  // with slots; all such layers share a table of the bank
  // The last selection of the step under way, if rows come ahead with it that are still to be
  // fetched.
  std::optional<int32_t> ahead_;
};

}  // namespace omnikv
