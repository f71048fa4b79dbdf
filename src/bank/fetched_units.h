// Layers on the host whose selections stand in their plans alone, as units of one list for all KV
// heads (DeclaredReads::unit): what a step lists comes to slots of the device, beside the rows of
// the last tokens, which stay there. One block table names both, so attention reads the plan as it
// is, row by row in the same order, and no sum changes (docs/decisions/074). Candidates are such
// units of one token, listed before the plan is made (DeclaredReads::max_candidates).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "bank/bank.h"
#include "bank/last_rows.h"
#include "bank/slots.h"
#include "bank/working_sets.h"

namespace omnikv {

// Enqueues at record time, like a policy. The arrays of SeqMeta that it takes are [n_seqs].
// Thread-compatible.
class FetchedUnits {
 public:
  // Whether some layer is on the host and reads such a selection. n_slots counts the last tokens
  // too.
  static bool AnyHeld(const BankConfig& bank, const WorkingSetConfig& config) {
    return LastRows::Any(LastRowsOf(bank, config));
  }
  // What holds the candidates of `reads`, as selections of their layers.
  static WorkingSetConfig OfCandidates(const BankConfig& bank, const DeclaredReads& reads,
                                       int32_t n_seqs);
  // REQUIRES AnyHeld.
  static Result<std::unique_ptr<FetchedUnits>> Create(Backend& backend, Bank& bank,
                                                      const WorkingSetConfig& config);
  // Bytes of the backend's memory that Create takes; 0 where no layer is held.
  static size_t Bytes(const BankConfig& bank, const WorkingSetConfig& config);

  int32_t n_selections() const { return config_.reads.n_selections; }
  // The selection that `layer` reads from slots; -1: none.
  int32_t SelectionOf(int32_t layer) const {
    return last_->Has(layer) ? config_.reads.selection_of[static_cast<size_t>(layer)] : -1;
  }
  // The rows of the last tokens, those of a decode step included. Prompts write others.
  LastRows& last() { return *last_; }
  // Forgets what is in slots of a sequence: after something other than a decode step wrote K/V.
  void Reset(int32_t seq);
  // Enqueues the choice of slots for what `plan` lists, of the first layer of a step that reads its
  // selection from here.
  void Select(int32_t layer, const AttnPlan& plan, const SeqMeta* seqs);
  // Enqueues the fetch of what `layer` misses, waits for it, and turns the attention to what is
  // here. After Select.
  void Resolve(int32_t layer, AttendArgs& attend);
  // The same of slots of one token, but that what reads K alone need not wait for V, which comes
  // behind it until AwaitValues.
  void ResolveKeys(int32_t layer, AttendArgs& attend);
  void AwaitValues() { backend_.Join(Lane::kMain, Lane::kIn); }

  // Rows of a layer each, of one sequence or of all (-1), since Create or Reset. Waits for the
  // backend.
  SlotCounters Count(int32_t seq = -1) const;

 private:
  // Tokens of a slot: a piece of a unit.
  static int32_t PieceOf(const BankConfig& bank, const DeclaredReads& reads) {
    return std::min(reads.unit, bank.block_tokens);  // powers of two
  }
  static SlotsConfig SlotsOf(const BankConfig& bank, const WorkingSetConfig& config);
  static LastRowsConfig LastRowsOf(const BankConfig& bank, const WorkingSetConfig& config);

  FetchedUnits(Backend& backend, Bank& bank, const WorkingSetConfig& config)
      : backend_(backend),
        bank_(bank),
        config_(config),
        piece_(PieceOf(bank.config(), config.reads)),
        slots_of_(SlotsOf(bank.config(), config)),
        slots_(backend) {}
  Status Allocate();
  void Redirect(int32_t layer, AttendArgs& attend) const;

  Backend& backend_;
  Bank& bank_;
  WorkingSetConfig config_;
  int32_t piece_;
  SlotsConfig slots_of_;            // in pieces
  Slots slots_;                     // groups by number of the selection
  std::unique_ptr<LastRows> last_;  // behind the slots, in the same memory
  // Of the selection that is read: the layers of one follow each other.
  Buffer index_, count_;        // int32 [n_seqs, pieces of a list], [n_seqs]
  Buffer by_piece_, by_table_;  // SeqMeta [n_seqs]
  Buffer table_;                // int32 [n_seqs, pieces of a context]
  Buffer nothing_;              // int32 [n_seqs, 2]: zeros, ranges of nothing
};

}  // namespace omnikv
