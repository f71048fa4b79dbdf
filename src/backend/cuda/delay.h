// Lateness, for tests (kernels/delay.cu).
#pragma once

#include "backend/cuda/launch.h"

namespace omnikv::cuda {

// Holds the stream up for a pseudo-random time of less than `max_us` microseconds, another at each
// run, replays included: `state` (device memory, of one stream) goes on.
void Delay(uint64_t* state, uint32_t max_us, const Launch& launch);

}  // namespace omnikv::cuda
