#include "policy/kcache/union.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "base/thread_pool.h"

namespace omnikv {
namespace {

const int32_t* ListOf(const UnionArgs& a, int64_t list) {
  return a.index + list * a.capacity;
}

// By the words.
void UnionRef(const void* args) {
  const auto& a = *static_cast<const UnionArgs*>(args);
  for (int64_t to = 0; to < int64_t{a.n_seqs} * a.n_kv_heads; ++to) {
    if (a.seqs[to / a.n_kv_heads].q_len == 0) continue;
    std::set<int32_t> tokens;
    for (int64_t list = to * a.group; list < (to + 1) * a.group; ++list) {
      tokens.insert(ListOf(a, list), ListOf(a, list) + a.count[list]);
    }
    std::copy(tokens.begin(), tokens.end(), a.to_index + to * a.to_capacity);
    a.to_count[to] = static_cast<int32_t>(tokens.size());
  }
}

void UnionCpu(const void* args, ThreadPool& pool) {
  const auto& a = *static_cast<const UnionArgs*>(args);
  pool.ParallelFor(int64_t{a.n_seqs} * a.n_kv_heads, 1, [&](int64_t begin, int64_t end, int) {
    std::vector<int32_t> tokens, more;
    for (int64_t to = begin; to < end; ++to) {
      if (a.seqs[to / a.n_kv_heads].q_len == 0) continue;
      tokens.clear();
      for (int64_t list = to * a.group; list < (to + 1) * a.group; ++list) {
        more.clear();
        std::set_union(tokens.begin(), tokens.end(), ListOf(a, list),
                       ListOf(a, list) + a.count[list], std::back_inserter(more));
        tokens.swap(more);
      }
      std::copy(tokens.begin(), tokens.end(), a.to_index + to * a.to_capacity);
      a.to_count[to] = static_cast<int32_t>(tokens.size());
    }
  });
}

// Counts lie on the device: of full lists.
Cost UnionCost(const void* args, HostArrays&) {
  const auto& a = *static_cast<const UnionArgs*>(args);
  const auto heads = static_cast<uint64_t>(a.n_seqs) * static_cast<uint64_t>(a.n_kv_heads);
  const uint64_t read = heads * static_cast<uint64_t>(a.group) * static_cast<uint64_t>(a.capacity);
  return {.bytes_read = 4 * read,
          .bytes_written = 4 * heads * static_cast<uint64_t>(a.to_capacity)};
}

}  // namespace

const CustomKernels kUnion = {.name = "Union",
                              .ref = UnionRef,
                              .cpu = UnionCpu,
#ifdef OMNIKV_HAVE_CUDA
                              .cuda = UnionCuda,
#else
                              .cuda = nullptr,
#endif
                              .cost = UnionCost};

}  // namespace omnikv
