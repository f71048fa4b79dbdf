#include "policy/omnikv/top_p.h"

#include <array>
#include <atomic>
#include <numeric>
#include <vector>

#include "base/thread_pool.h"

namespace omnikv {
namespace {

constexpr int64_t kGrain = 16 << 10;  // tokens that one thread adds up

// By the words: everything in order, then one walk.
void TopPRef(const void* args) {
  const auto& a = *static_cast<const TopPArgs*>(args);
  for (int64_t list = 0; list < int64_t{a.n_seqs} * a.lists; ++list) {
    uint64_t total = 0;
    for (int32_t t = 0; t < a.n_candidates[list / a.lists]; ++t) {
      total += MassOf(CombinedScore(a, list, t));
    }
    const uint64_t wanted = MassWanted(std::bit_cast<double>(a.share), total);
    int32_t* const index = a.index + list * a.capacity;
    std::vector<int32_t> order(index, index + a.count[list]);
    const auto score = [&](int32_t t) {
      const float s = CombinedScore(a, list, t);
      return std::isnan(s) ? -std::numeric_limits<float>::infinity() : s;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return score(x) > score(y); });
    uint64_t sum = 0;
    size_t stay = 0;
    while (stay < order.size() && (sum < wanted || score(order[stay]) >= kChosenFirst)) {
      sum += MassOf(score(order[stay++]));
    }
    std::sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(stay));
    std::copy_n(order.begin(), stay, index);
    a.count[list] = static_cast<int32_t>(stay);
  }
}

// Leaves those of a list whose order is above the one at which `wanted` is reached, and as many of
// the first that are equal to it as that takes.
void Cut(const TopPArgs& a, int64_t list, uint64_t wanted) {
  int32_t* const index = a.index + list * a.capacity;
  const int32_t n = a.count[list];
  const auto score = [&](int32_t i) { return CombinedScore(a, list, index[i]); };
  const auto order = [](float s) { return OrderOf(std::bit_cast<uint32_t>(s)); };
  uint32_t found = wanted == 0 ? order(kChosenFirst) - 1 : 0;
  uint64_t before = 0;  // of all that are above it
  for (int shift = 24; wanted > 0 && shift >= 0; shift -= 8) {
    std::array<uint64_t, 256> bins{};
    for (int32_t i = 0; i < n; ++i) {
      const float s = score(i);
      const uint32_t key = order(s);
      if (shift == 24 || (key ^ found) >> (shift + 8) == 0) {
        bins[(key >> shift) % 256] += MassOf(s);
      }
    }
    uint32_t bin = 256;
    while (bin > 0 && before + bins[bin - 1] < wanted) before += bins[--bin];
    if (bin == 0) return;  // all of them together do not reach it
    found |= (bin - 1) << shift;
  }
  int32_t stay = 0;
  for (int32_t i = 0; i < n; ++i) {
    const float s = score(i);
    const uint32_t key = order(s);
    if (key < found || (key == found && before >= wanted)) continue;
    if (key == found) before += MassOf(s);
    index[stay++] = index[i];
  }
  a.count[list] = stay;
}

void TopPCpu(const void* args, ThreadPool& pool) {
  const auto& a = *static_cast<const TopPArgs*>(args);
  for (int64_t list = 0; list < int64_t{a.n_seqs} * a.lists; ++list) {
    std::atomic<uint64_t> total = 0;
    pool.ParallelFor(a.n_candidates[list / a.lists], kGrain, [&](int64_t begin, int64_t end, int) {
      uint64_t sum = 0;
      for (int64_t t = begin; t < end; ++t) {
        sum += MassOf(CombinedScore(a, list, static_cast<int32_t>(t)));
      }
      total += sum;
    });
    Cut(a, list, MassWanted(std::bit_cast<double>(a.share), total));
  }
}

// Lengths lie on the device: of full rows.
Cost TopPCost(const void* args, HostArrays&) {
  const auto& a = *static_cast<const TopPArgs*>(args);
  const auto lists = static_cast<uint64_t>(a.n_seqs) * static_cast<uint64_t>(a.lists);
  const auto window = static_cast<uint64_t>(a.window);
  return {.bytes_read = 4 * lists * window * static_cast<uint64_t>(a.stride),
          .bytes_written = 4 * lists * static_cast<uint64_t>(a.capacity)};
}

}  // namespace

const CustomKernels kTopP = {.name = "TopP",
                             .ref = TopPRef,
                             .cpu = TopPCpu,
#ifdef OMNIKV_HAVE_CUDA
                             .cuda = TopPCuda,
#else
                             .cuda = nullptr,
#endif
                             .cost = TopPCost};

}  // namespace omnikv
