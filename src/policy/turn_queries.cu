#include "backend/cuda/kernels/common.cuh"
#include "policy/turn_queries.h"

namespace omnikv {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 4 * kThreads;  // of a row, a block

// Grid: x rows; y shares the values of a row.
__global__ void __launch_bounds__(kThreads) TurnKernel(const TurnQueriesArgs a) {
  extern __shared__ double2 turns[];  // [n_freq]: cos, sin
  cuda::GridTrigger();
  cuda::GridWait();
  const int64_t row = blockIdx.x;
  const int from = a.rows[row].pos;
  const int to = min(max(from, a.least), a.most);
  const int n_freq = a.inv_freq != nullptr ? a.n_freq : 0;
  for (int i = static_cast<int>(threadIdx.x); i < n_freq; i += kThreads) {
    // The two angles as RopeTable makes them (f32 products), their difference exactly.
    const double angle = static_cast<double>(__fmul_rn(static_cast<float>(to), a.inv_freq[i])) -
                         static_cast<double>(__fmul_rn(static_cast<float>(from), a.inv_freq[i]));
    double s;
    double c;
    sincos(angle, &s, &c);
    turns[i] = make_double2(c, s);
  }
  __syncthreads();
  const float* __restrict__ q = a.q + row * a.n_heads * a.dk;
  float* __restrict__ out = a.out + row * a.n_heads * a.dk;
  const int begin = static_cast<int>(blockIdx.y) * kValues;
  const int end = min(begin + kValues, a.n_heads * a.dk);
#pragma unroll 4
  for (int at = begin + static_cast<int>(threadIdx.x); at < end; at += kThreads) {
    const int i = at % a.dk;
    float v = q[at];
    if (i < 2 * n_freq) {
      const bool low = i < n_freq;
      const double2 turn = turns[low ? i : i - n_freq];
      const double partner = q[low ? at + n_freq : at - n_freq];
      v = static_cast<float>(v * turn.x + partner * (low ? -turn.y : turn.y));
    }
    out[at] = v;
  }
}

}  // namespace

void TurnQueriesCuda(const void* args, const cuda::Launch& launch) {
  const auto& a = *static_cast<const TurnQueriesArgs*>(args);
  if (a.n_rows == 0) return;
  const dim3 grid(static_cast<uint32_t>(a.n_rows),
                  static_cast<uint32_t>((a.n_heads * a.dk + kValues - 1) / kValues));
  cuda::LaunchKernel(TurnKernel, launch, grid, kThreads,
                     sizeof(double2) * static_cast<size_t>(a.n_freq), a);
}

}  // namespace omnikv
