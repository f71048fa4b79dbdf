// What working sets of other sizes than the real ones would have found there, by the selections
// of steps that ran: no K/V move, and no device is needed.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "bank/declared_reads.h"

namespace omnikv {

// A selection of tokens, read back after its step: `index`, ascending, and those in `bounds`, of a
// sequence of `kv_len` tokens.
struct SelectionOnHost {
  std::vector<int32_t> index;
  int32_t bounds[2] = {0, 0};
  int32_t kv_len = 0;
  std::vector<int32_t> wider;  // Selection::wider, ascending; empty: none
  // Whether the rows of `wider`, and those in ahead_bounds, come ahead (Selection::ahead).
  bool ahead = false;
  int32_t ahead_bounds[2] = {0, 0};
};
// The plan is one list of single tokens and one range by bounds, for the sequence `seq`, all in the
// backend's memory. Waits for the backend.
SelectionOnHost ReadSelection(Backend& backend, const Selection& selection, const SeqMeta* seq);

// One group's working set of `n_slots` rows, from nothing on. Thread-compatible.
class SetSimulation {
 public:
  // For contexts of at most `max_tokens` tokens. `capacity`: DeclaredReads::LeastSlots().
  // `reference` runs WorkingSetArgs in the host's memory and outlives this.
  // REQUIRES n_slots >= capacity.
  SetSimulation(Backend& reference, int64_t max_tokens, int32_t capacity, int32_t n_slots);

  void Step(const SelectionOnHost& selection);

  // Tokens selected and missed so far, as WorkingSets counts them for one layer.
  uint64_t selected() const { return counters_[0]; }
  uint64_t missed() const { return counters_[1]; }
  uint64_t ahead() const { return ahead_counters_[1]; }  // rows that came ahead

 private:
  void Update(const WorkingSetArgs& selection, int32_t kv_len, uint64_t* counters);

  Backend& reference_;
  int32_t max_tokens_, n_slots_;
  std::vector<int32_t> slot_of_, owner_, slots_, miss_row_, miss_slot_;
  std::vector<uint32_t> used_;
  uint32_t clock_ = 0;
  uint64_t counters_[2] = {0, 0};  // selected, missed
  uint64_t ahead_counters_[2] = {0, 0};
};

}  // namespace omnikv
