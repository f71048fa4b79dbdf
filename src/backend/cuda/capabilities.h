// What the CUDA backend says of itself before any op: which ops it takes, and what they need.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/launch.h"

namespace omnikv::cuda {

// The card of that number, which is this thread's current one from now on. kUnsupported, with the
// reason in one clause, as MakeCudaBackend.
Result<NamedDevice> FindDevice(int ordinal);

// Backend::Supports, WorkBytes and SelectionBytes on a card.
Support SupportsOp(const Op& op, const Device& device);
size_t BytesToWork(const StepLimits& limits, const Device& device, bool full_precision);
size_t BytesOfSelection(const Device& device);

}  // namespace omnikv::cuda
