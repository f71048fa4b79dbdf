#include "backend/cpu/merge_states.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace omnikv {
namespace {

constexpr int64_t kGrain = 16 << 10;  // values read that are worth a thread's start
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

void MergeHead(const MergeStatesArgs& a, int64_t row_head) {
  const auto n = static_cast<size_t>(a.n_parts);
  const int64_t dv = a.dv;
  std::array<float, kMaxStates> weight{};
  float top = kNegInf;
  for (size_t i = 0; i < n; ++i) top = std::max(top, a.parts[i].lse[row_head]);
  float sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const float lse = a.parts[i].lse[row_head];
    weight[i] = lse == kNegInf ? 0.0f : std::exp(lse - top);
    sum += weight[i];
  }
  float* o = a.o + row_head * dv;
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  // A few values at a time, all parts of them, since o may be that of a part.
  constexpr int64_t kValues = 16;
  for (int64_t first = 0; first < dv; first += kValues) {
    const int64_t m = std::min(kValues, dv - first);
    std::array<float, kValues> total{};
    for (size_t i = 0; i < n; ++i) {
      if (a.parts[i].lse[row_head] == kNegInf) continue;
      const float* from = a.parts[i].o + row_head * dv + first;
      for (int64_t d = 0; d < m; ++d) total[static_cast<size_t>(d)] += weight[i] * from[d];
    }
    for (int64_t d = 0; d < m; ++d) o[first + d] = total[static_cast<size_t>(d)] * inverse;
  }
  if (a.lse != nullptr) a.lse[row_head] = sum > 0 ? top + std::log(sum) : kNegInf;
}

}  // namespace

void CpuMergeStates(const MergeStatesArgs& a, ThreadPool& pool) {
  const int64_t values = int64_t{a.n_parts} * a.dv;
  pool.ParallelFor(int64_t{a.n_rows} * a.n_heads,
                   std::max<int64_t>(1, kGrain / std::max<int64_t>(values, 1)),
                   [&](int64_t begin, int64_t end, int) {
                     for (int64_t i = begin; i < end; ++i) MergeHead(a, i);
                   });
}

void CpuPickHeads(const PickHeadsArgs& a, ThreadPool& pool) {
  const int32_t named = a.Named();
  const int64_t row = int64_t{named} * a.width;
  pool.ParallelFor(a.n_rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(row, 1)),
                   [&](int64_t begin, int64_t end, int) {
                     for (auto r = static_cast<int32_t>(begin); r < end; ++r) {
                       for (int32_t n = 0; n < named; ++n) {
                         std::copy_n(a.from + a.From(r, n, named), a.width,
                                     a.to + a.To(r, n, named));
                       }
                     }
                   });
}

}  // namespace omnikv
