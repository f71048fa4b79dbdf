#include "policy/turn_queries.h"

#include <algorithm>
#include <cmath>

namespace omnikv {
namespace {

void Turn(const void* raw) {
  const auto& a = *static_cast<const TurnQueriesArgs*>(raw);
  const int32_t n_freq = a.inv_freq != nullptr ? a.n_freq : 0;
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const int32_t from = a.rows[r].pos;
    const int32_t to = std::clamp(from, a.least, a.most);
    for (int32_t i = 0; i < a.dk; ++i) {
      const bool rotated = i < 2 * n_freq;
      const int32_t f = i < n_freq ? i : i - n_freq;
      // The two angles as RopeTable makes them (f32 products), their difference exactly.
      const double angle = rotated
                               ? static_cast<double>(static_cast<float>(to) * a.inv_freq[f]) -
                                     static_cast<double>(static_cast<float>(from) * a.inv_freq[f])
                               : 0;
      const double c = std::cos(angle);
      const double s = i < n_freq ? -std::sin(angle) : std::sin(angle);
      const int32_t partner = i < n_freq ? i + n_freq : i - n_freq;
      for (int32_t h = 0; h < a.n_heads; ++h) {
        const int64_t at = (static_cast<int64_t>(r) * a.n_heads + h) * a.dk;
        a.out[at + i] =
            rotated ? static_cast<float>(a.q[at + i] * c + a.q[at + partner] * s) : a.q[at + i];
      }
    }
  }
}

Cost TurnCost(const void* raw, HostArrays&) {
  const auto& a = *static_cast<const TurnQueriesArgs*>(raw);
  const auto n = static_cast<uint64_t>(a.n_rows) * static_cast<uint64_t>(a.n_heads * a.dk);
  return {.bytes_read = 4 * n, .bytes_written = 4 * n, .flops = 4 * n};
}

constexpr CustomKernels kTurn = {.name = "TurnQueries",
                                 .ref = Turn,
                                 .cpu = [](const void* args, ThreadPool&) { Turn(args); },
#ifdef OMNIKV_HAVE_CUDA
                                 .cuda = TurnQueriesCuda,
#endif
                                 .cost = TurnCost};

}  // namespace

CustomArgs TurnQueries(const TurnQueriesArgs& args) {
  return MakeCustomArgs(kTurn, args);
}

}  // namespace omnikv
