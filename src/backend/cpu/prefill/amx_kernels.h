// Prefill attention on the machine's AMX tiles (amx_attend.h).
#pragma once

#include <cstdint>

#include "backend/cpu/prefill/kernels.h"

namespace omnikv::prefill {

// Null where the CPU, the system or the build lacks AMX-BF16. The first call asks the system for
// the tiles, for the whole process.
const AttendKernels* AmxAttendKernels();

// Whether this CPU multiplies bf16 in AMX tiles and the system lets this process use them.
bool AmxBf16Usable();

// `n` rounds of tile products that touch no memory, kAmxSpinFlops each: what the matrix unit can do
// at most. REQUIRES AmxBf16Usable.
void AmxSpin(int64_t n);
inline constexpr double kAmxSpinFlops = 4 * 2 * 16 * 16 * 32;

inline constexpr int64_t kAmxSide = 16;  // rows of a tile, and words of 4 bytes in a row
inline constexpr int64_t kAmxMostValues =
    1024;  // the largest head size of V; multiples of kAmxSide

}  // namespace omnikv::prefill
