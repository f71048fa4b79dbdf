// What working sets of other sizes than the real ones would have found there, by the selections
// of steps that ran: no K/V move, and no device is needed.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "bank/declared_reads.h"
#include "bank/slots.h"

namespace omnikv {

// A selection of tokens, read back after its step: `index`, ascending, and those in `bounds`, of a
// sequence of `kv_len` tokens.
struct SelectionOnHost {
  std::vector<int32_t> index;
  int32_t bounds[2] = {0, 0};
  int32_t kv_len = 0;
  std::vector<float> scores;  // Selection::scores of its first tokens, or empty
};
// The plan is one list of single tokens and one range by bounds, for the sequence `seq`, all in the
// backend's memory. `with_scores` REQUIRES some. Waits for the backend.
SelectionOnHost ReadSelection(Backend& backend, const Selection& selection, const SeqMeta* seq,
                              bool with_scores);

// One group's working set, from nothing on. Thread-compatible.
class SetSimulation {
 public:
  // For contexts of at most `max_tokens` tokens, in `n_slots` rows. `reads` are those of the layers
  // that would have it. `reference` has the host's memory and outlives this.
  // REQUIRES n_slots >= reads.LeastSlots().
  SetSimulation(Backend& reference, const DeclaredReads& reads, int64_t max_tokens,
                int32_t n_slots);

  // REQUIRES scores where reads.max_ahead > 0.
  void Step(const SelectionOnHost& selection);

  // Tokens selected and missed so far, and rows that came ahead, as WorkingSets counts them for one
  // layer.
  SlotCounters Count() const { return slots_.Count(0)[0]; }

 private:
  int32_t max_tokens_;
  bool ahead_;
  Slots slots_;
};

}  // namespace omnikv
