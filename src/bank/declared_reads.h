// What the layers of a model read in decode steps, as a policy declares it before any step. From
// this the bank decides where K/V lie and how they come near (bank/residency.h).
#pragma once

#include <cstdint>
#include <vector>

#include "backend/attn_plan.h"

namespace omnikv {

// Layers that steps read whole although their K/V may live away from the device: each comes whole
// for every step. What crosses the bus grows with the context, so such steps are not recorded.
struct StreamedLayers {
  int32_t layers = 0;     // the last so many may live away
  bool always = false;    // and do, though the device had room for them
  int32_t min_ahead = 1;  // layers that are on their way before their turn:
  int32_t max_ahead = 1;  // as many of these as there is room for
};

// Layers that read one selection of tokens can keep what they read together.
struct DeclaredReads {
  // The selection that each layer reads, below n_selections; -1: everything, or ranges of tokens.
  std::vector<int32_t> selection_of;
  int32_t n_selections = 0;
  int64_t max_tokens = 0;   // that a layer reads by a selection in one step, at most
  StreamedLayers streamed;  // where there are no selections
};

// A selection as one step made it: a list of single tokens, then a range by bounds. It is the plan
// that the layers which read it get in that step.
struct Selection {
  int32_t number = 0;
  AttnPlan plan;
};

}  // namespace omnikv
