// What a backend cannot run is refused before a step needs it.
#pragma once

#include <cstdint>

#include "engine/core.h"

namespace omnikv {

// Ok when the backend of `core` takes every op that steps of a group of `max_seqs` sequences under
// `policy` enqueue. Else kUnsupported with the op and the backend's reason, or what RowGroup::Open
// refuses. Takes no memory of the backend, and runs nothing. Weights need not be there.
Status CheckSupported(const EngineCore& core, const PolicyOptions& policy, int32_t max_seqs,
                      const PolicyInfo* own = nullptr);

}  // namespace omnikv
