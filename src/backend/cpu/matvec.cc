#include "backend/cpu/matvec.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/matvec.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

// Rows of weights read side by side. They lie far apart, each the head of a stream of its own:
// neighbouring rows would end a stream, and what the prefetchers learnt, with every row (Zen 5, one
// core, bf16: 26 GB/s side by side, 36 as streams, 41 for reading alone).
constexpr int kTileRows = 4;
constexpr int64_t kPrefetchAhead = 1536;    // bytes within a stream, and for the
constexpr int64_t kPrefetchAheadQ8 = 2048;  // denser format, whose steps take longer

// Prefetches for a step of `bytes` at p.
template <size_t bytes>
HWY_INLINE void PrefetchStep(const std::byte* p, int64_t offset) {
  if (bytes < 64 && offset % 64 >= static_cast<int64_t>(bytes)) return;  // once a line
  for (size_t i = 0; i < bytes; i += 64) hwy::Prefetch(p + offset + kPrefetchAhead + i);
}

// out[i][r] = w[r] · x[i] for M rows of activations.
template <DType kType, int M>
HWY_INLINE void Dot(const std::byte* const* w, int64_t n_in, const float* x, int64_t ldx,
                    float (*out)[kTileRows]) {
  using E = Elements<kType>;
  const DF d;
  VF sum[kTileRows][M];
  // Two sums a row where there are registers to spare: one chain of FMAs is slower than memory.
  VF second[M == 1 ? kTileRows : 1];
  std::fill_n(second, M == 1 ? kTileRows : 1, hn::Zero(d));
  for (int r = 0; r < kTileRows; ++r) std::fill_n(sum[r], M, hn::Zero(d));
  const auto add = [&](int64_t i, int r, VF a, VF b) HWY_ATTR {
    for (int m = 0; m < M; ++m) {
      const float* xi = x + m * ldx + i;
      sum[r][m] = hn::MulAdd(a, hn::LoadU(d, xi), sum[r][m]);
      VF& to = M == 1 ? second[r] : sum[r][m];
      to = hn::MulAdd(b, hn::LoadU(d, xi + kLanes), to);
    }
  };
  constexpr auto kStepInt = static_cast<int64_t>(kStep);
  const int64_t full = n_in - n_in % kStepInt;
  int64_t offset = 0;
  for (int64_t i = 0; i < full; i += kStepInt, offset += E::kStepBytes) {
    for (int r = 0; r < kTileRows; ++r) {
      PrefetchStep<E::kStepBytes>(w[r], offset);
      VF a;
      VF b;
      E::LoadStep(w[r] + offset, a, b);
      add(i, r, a, b);
    }
  }
  if (full < n_in) {
    for (int r = 0; r < kTileRows; ++r) {
      VF a;
      VF b;
      E::LoadTail(w[r] + offset, static_cast<size_t>(n_in - full), a, b);
      add(full, r, a, b);
    }
  }
  if constexpr (M == 1) {
    for (int r = 0; r < kTileRows; ++r) sum[r][0] = hn::Add(sum[r][0], second[r]);
  }
  for (int m = 0; m < M; ++m) Sum4(sum[0][m], sum[1][m], sum[2][m], sum[3][m], out[m]);
}

// The f16 at p in every lane.
HWY_INLINE VF BroadcastF16(const std::byte* p) {
  const DF d;
  uint16_t bits;
  std::memcpy(&bits, p, 2);
#if OKV_SAFE_MASKED_LOAD  // the targets with F16C
  const hn::Rebind<uint16_t, DF> d16;
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), hn::Set(d16, bits)));
#else
  return hn::Set(d, F32FromF16(bits));
#endif
}

// The same for Q8_0. With one row of activations a block's products are summed before they are
// scaled; with more, the weights are scaled once for all.
template <int M>
HWY_INLINE void DotQ8(const std::byte* const* w, int64_t n_in, const float* x, int64_t ldx,
                      float (*out)[kTileRows]) {
  const DF d;
  const DI di;
  const hn::Rebind<int8_t, DF> d8;
  VF sum[kTileRows][M];
  for (int r = 0; r < kTileRows; ++r) std::fill_n(sum[r], M, hn::Zero(d));
  int64_t offset = 0;
  for (int64_t i = 0; i < n_in; i += kQ8Block, offset += kQ8BlockBytes) {
    for (int r = 0; r < kTileRows; ++r) {
      hwy::Prefetch(w[r] + offset + kPrefetchAheadQ8);
      const VF scale = BroadcastF16(w[r] + offset);
      const auto* q = reinterpret_cast<const int8_t*>(w[r] + offset + 2);
      VF block = hn::Zero(d);
      for (size_t j = 0; j < kQ8Block; j += kLanes) {
        VF v = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, q + j)));
        if constexpr (M > 1) v = hn::Mul(v, scale);
        for (int m = 0; m < M; ++m) {
          const VF xv = hn::LoadU(d, x + m * ldx + i + static_cast<int64_t>(j));
          VF& to = M > 1 ? sum[r][m] : block;
          to = hn::MulAdd(v, xv, to);
        }
      }
      if constexpr (M == 1) sum[r][0] = hn::MulAdd(block, scale, sum[r][0]);
    }
  }
  for (int m = 0; m < M; ++m) Sum4(sum[0][m], sum[1][m], sum[2][m], sum[3][m], out[m]);
}

template <int M>
HWY_NOINLINE void TileOf(DType format, const std::byte* const* w, int64_t n_in, const float* x,
                         int64_t ldx, float (*out)[kTileRows]) {
  switch (format) {
    case DType::kF32:
      return Dot<DType::kF32, M>(w, n_in, x, ldx, out);
    case DType::kF16:
      return Dot<DType::kF16, M>(w, n_in, x, ldx, out);
    case DType::kBF16:
      return Dot<DType::kBF16, M>(w, n_in, x, ldx, out);
    case DType::kQ8_0:
      return DotQ8<M>(w, n_in, x, ldx, out);
    case DType::kQ4_0:
      return;  // no format of weights
  }
}

// out[i][r] = w[r] · x[first + i] for i < m, m <= kRegisterRows.
HWY_INLINE void Tile(DType format, const std::byte* const* w, int64_t n_in, const PackedRows& x,
                     int first, int m, float (*out)[kTileRows]) {
  const float* xm = x.x + first * x.ld;
  if (m == 1) return TileOf<1>(format, w, n_in, xm, x.ld, out);
  if (m == 2) return TileOf<2>(format, w, n_in, xm, x.ld, out);
  if constexpr (kRegisterRows == 4) {
    if (m == 3) return TileOf<3>(format, w, n_in, xm, x.ld, out);
    return TileOf<4>(format, w, n_in, xm, x.ld, out);
  }
}

void PackRow(DType format, const float* x, int64_t n, int64_t padded, float* out) {
  if (format == DType::kBF16) {
    Pack<DType::kBF16>(x, static_cast<size_t>(n), static_cast<size_t>(padded), out);
  } else {
    Pack<DType::kF32>(x, static_cast<size_t>(n), static_cast<size_t>(padded), out);
  }
}

void MatvecRows(const WeightRef& w, const PackedRows& x, const float* bias, int64_t begin,
                int64_t end, float* y, int64_t ldy) {
  // Stream r is rows begin + r * stride + [0, stride); a few rows may be left for a last tile.
  const auto run = [&](int64_t row, int64_t stride, int n) HWY_ATTR {
    const std::byte* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = w.Row(row + std::min(r, n - 1) * stride);
    for (int first = 0; first < x.m; first += kRegisterRows) {
      const int m = std::min(kRegisterRows, x.m - first);
      float tile[kRegisterRows][kTileRows];
      Tile(w.format, rows, w.n_in, x, first, m, tile);
      for (int i = 0; i < m; ++i) {
        float* out = y + (first + i) * ldy + row;
        for (int r = 0; r < n; ++r) {
          out[r * stride] = tile[i][r] + (bias != nullptr ? bias[row + r * stride] : 0.0f);
        }
      }
    }
  };
  const int64_t stride = (end - begin) / kTileRows;
  for (int64_t o = begin; o < begin + stride; ++o) run(o, stride, kTileRows);
  const int64_t done = begin + stride * kTileRows;
  if (done < end) run(done, 1, static_cast<int>(end - done));
}

HWY_INLINE VF Activate(Activation act, VF v) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  VF z = v;
  if (act == Activation::kGeluTanh) {  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u))
    const VF cubic = hn::Mul(hn::Mul(v, v), v);
    z = hn::Mul(hn::Set(d, 2 * 0.7978845608f), hn::MulAdd(hn::Set(d, 0.044715f), cubic, v));
  }
  return hn::Div(v, hn::Add(one, Exp(hn::Neg(z))));
}

void GatedRows(const NormGatedFfnArgs& a, const PackedRows& x_gate, const PackedRows& x_up,
               int64_t begin, int64_t end) {
  const DF d;
  constexpr int kStreams = kTileRows / 2;  // of each matrix
  constexpr int kBlock = 16;               // outputs of a stream activated together
  const int64_t stride = (end - begin + kStreams - 1) / kStreams;
  for (int64_t o = begin; o < begin + stride; o += kBlock) {
    const auto n = static_cast<int>(std::min<int64_t>(kBlock, begin + stride - o));
    for (int first = 0; first < x_gate.m; first += kRegisterRows) {
      const int m = std::min(kRegisterRows, x_gate.m - first);
      alignas(64) float gate[kRegisterRows][kStreams][kBlock];
      alignas(64) float up[kRegisterRows][kStreams][kBlock];
      for (int j = 0; j < n; ++j) {
        // The last rows of the last stream may be past the end: any row stands in for them.
        int64_t row[kStreams];
        const std::byte* rows[kTileRows];
        for (int s = 0; s < kStreams; ++s) {
          row[s] = std::min(o + j + s * stride, end - 1);
          rows[s] = a.gate.Row(row[s]);
          rows[kStreams + s] = a.up.Row(row[s]);
        }
        float tile[2][kRegisterRows][kTileRows];
        const bool same = a.gate.format == a.up.format;
        Tile(a.gate.format, rows, a.gate.n_in, x_gate, first, m, tile[0]);
        if (!same) Tile(a.up.format, rows, a.up.n_in, x_up, first, m, tile[1]);
        for (int i = 0; i < m; ++i) {
          for (int s = 0; s < kStreams; ++s) {
            gate[i][s][j] = tile[0][i][s] + (a.gate_bias != nullptr ? a.gate_bias[row[s]] : 0.0f);
            up[i][s][j] = tile[same ? 0 : 1][i][kStreams + s] +
                          (a.up_bias != nullptr ? a.up_bias[row[s]] : 0.0f);
          }
        }
      }
      for (int i = 0; i < m; ++i) {
        for (int s = 0; s < kStreams; ++s) {
          const int64_t row = o + s * stride;
          const auto valid = static_cast<int>(std::min<int64_t>(n, end - row));
          float* out = a.out + (first + i) * a.gate.n_out + row;
          for (int r = 0; r < valid; r += static_cast<int>(kLanes)) {
            const VF v = Activate(a.act, hn::LoadU(d, gate[i][s] + r));
            StoreFloats(hn::Mul(v, hn::LoadU(d, up[i][s] + r)), out + r,
                        static_cast<size_t>(valid - r));
          }
        }
      }
    }
  }
}

const MatvecKernels* MatvecTable() {
  static constexpr MatvecKernels kTable = {PackRow, MatvecRows, GatedRows};
  return &kTable;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace omnikv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace omnikv {
HWY_EXPORT(MatvecTable);
const MatvecKernels& GetMatvecKernels(const Isa& isa) {
  return *IsaEntry(HWY_DISPATCH_TABLE(MatvecTable), isa)();
}
}  // namespace omnikv
#endif  // HWY_ONCE
