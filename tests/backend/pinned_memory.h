// Memory of the host that a CUDA kernel reads and writes by the same pointer. Linking
// pinned_memory.cc replaces the global operator new and delete: from UsePinnedMemory on, whatever
// the program allocates comes from one pinned region, so that cases that keep their data in
// std::vector run on a card as they are.
#pragma once

#include <cstddef>
#include <string>

namespace omnikv {

// Every byte of a fresh allocation, and of the guard behind it: NaN in every float format.
inline constexpr unsigned char kFreshByte = 0xff;

// Pins a region of `bytes` and allocates from it from now on; called once. Empty, or the reason why
// it cannot. When the region is used up the program ends with a message.
std::string UsePinnedMemory(size_t bytes);

// Called for a block whose guard was found overwritten when it was deleted: something wrote past
// the end of its `bytes`.
void OnOverrun(void (*handler)(size_t bytes));

size_t PinnedBytesUsed();  // the most of the region that was ever in use

}  // namespace omnikv
