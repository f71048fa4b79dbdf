// The instruction sets that the kernels were compiled for, and which of them this CPU has. A
// backend picks one when it is made; every kernel table is then looked up once with its index.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace omnikv {

struct Isa {
  std::string_view name;  // "avx512", "avx2", "sse4", "neon", "scalar"
  size_t index = 0;       // entry of Highway's dispatch tables
};

// Whether prefetches of K/V rows had better stop at the second level of the cache. Rows lie 2 or 4
// KB apart, so a head's part of all of them falls into a few sets of the first level. One of 32 KB
// holds 8 rows there, and loses those that come before they are read. (One of 48 KB holds 12.)
bool PrefetchesToSecondLevel();

// What this CPU runs, best first.
std::vector<Isa> AvailableIsas();

// The one of that name; the best for "". REQUIRES that it is available.
Isa FindIsa(std::string_view name);

// The entry of a table that HWY_EXPORT made (of one element where only one target is compiled).
template <typename Function, size_t n>
Function* IsaEntry(Function* const (&table)[n], const Isa& isa) {
  return table[n == 1 ? 0 : isa.index];
}

}  // namespace omnikv
