#include "policy/kascade/map_lists.h"

#include <algorithm>

namespace omnikv {
namespace {

void MapListsOnHost(const void* raw) {
  const auto& a = *static_cast<const MapListsArgs*>(raw);
  for (int64_t list = 0; list < int64_t{a.n_seqs} * a.lists; ++list) {
    const int64_t from = list / a.lists * a.lists + a.list_of[list % a.lists];
    std::copy_n(a.index + from * a.capacity, a.count[list], a.out + list * a.capacity);
  }
}

// At most: the counts are the device's.
Cost MapListsCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const MapListsArgs*>(raw);
  const auto bytes = sizeof(int32_t) * static_cast<uint64_t>(a.n_seqs) *
                     static_cast<uint64_t>(a.lists) * static_cast<uint64_t>(a.capacity);
  return {.bytes_read = bytes, .bytes_written = bytes};
}

constexpr CustomKernels kMapLists = {
    .name = "KascadeMapLists",
    .ref = MapListsOnHost,
    .cpu = [](const void* args, ThreadPool&) { MapListsOnHost(args); },
#ifdef OMNIKV_HAVE_CUDA
    .cuda = MapListsCuda,
#else
    .cuda = nullptr,
#endif
    .cost = MapListsCost};

}  // namespace

CustomArgs MapLists(const MapListsArgs& args) {
  return MakeCustomArgs(kMapLists, args);
}

}  // namespace omnikv
