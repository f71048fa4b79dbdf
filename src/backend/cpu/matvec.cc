#include "backend/cpu/matvec.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/matvec.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <type_traits>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace omnikv {
namespace HWY_NAMESPACE {

// Rows of weights read side by side. They lie far apart, each the head of a stream of its own:
// neighbouring rows would end a stream, and what the prefetchers learnt, with every row (Zen 5, one
// core, bf16: 26 GB/s side by side, 36 as streams, 41 for reading alone).
constexpr int kTileRows = 4;
// Rows of activations that a tile of any format takes at most. Beyond kRegisterRows the sums of all
// kTileRows have no room in registers, so that a tile takes half of the weights after the other:
// each weight is still read and decoded once for all rows.
constexpr int kTileInputs = 2 * kRegisterRows + (kRegisterRows == 4 ? 1 : 0);
constexpr int64_t kPrefetchAhead = 1536;    // bytes within a stream, and for the
constexpr int64_t kPrefetchAheadQ8 = 2048;  // denser format, whose steps take longer

// Prefetches for a step of `bytes` at p.
template <size_t bytes>
HWY_INLINE void PrefetchStep(const std::byte* p, int64_t offset) {
  if (bytes < 64 && offset % 64 >= static_cast<int64_t>(bytes)) return;  // once a line
  for (size_t i = 0; i < bytes; i += 64) hwy::Prefetch(p + offset + kPrefetchAhead + i);
}

// out[i][r] = the sum of the lanes of sum[r][i]: the same additions for any R and M.
template <int R, int M>
HWY_INLINE void StoreSums(const VF (&sum)[R][M], float (*out)[kTileRows]) {
  static_assert(R == kTileRows || R == kTileRows / 2);
  if constexpr (R == kTileRows) {
    for (int m = 0; m < M; ++m) Sum4(sum[0][m], sum[1][m], sum[2][m], sum[3][m], out[m]);
  } else {
    for (int m = 0; m < M; m += 2) {
      const int other = m + 1 < M ? m + 1 : m;
      float sums[4];
      Sum4(sum[0][m], sum[1][m], sum[0][other], sum[1][other], sums);
      std::memcpy(out[m], sums, sizeof(float) * R);
      std::memcpy(out[other], sums + (other - m) * R, sizeof(float) * R);
    }
  }
}

// out[i][r] = w[r] · x[i] for R rows of weights and M of activations. With kAlone the last of these
// has the sums of a row that is computed alone, whose order is another.
template <DType kType, int R, int M, bool kAlone>
HWY_INLINE void Dot(const std::byte* const* w, int64_t n_in, const float* x, int64_t ldx,
                    float (*out)[kTileRows]) {
  using E = Elements<kType>;
  const DF d;
  VF sum[R][M];
  // Two sums for a row alone: one chain of FMAs is slower than memory.
  VF second[kAlone ? R : 1];
  std::fill_n(second, kAlone ? R : 1, hn::Zero(d));
  for (int r = 0; r < R; ++r) std::fill_n(sum[r], M, hn::Zero(d));
  const auto add = [&](int64_t i, const VF(&a)[R], const VF(&b)[R]) HWY_ATTR {
    for (int m = 0; m < M; ++m) {
      VF x0 = hn::LoadU(d, x + m * ldx + i);
      VF x1 = hn::LoadU(d, x + m * ldx + i + kLanes);
      KeepInRegister(x0);  // one load for all rows of weights
      KeepInRegister(x1);
      for (int r = 0; r < R; ++r) {
        sum[r][m] = hn::MulAdd(a[r], x0, sum[r][m]);
        VF& to = kAlone && m == M - 1 ? second[r] : sum[r][m];
        to = hn::MulAdd(b[r], x1, to);
      }
    }
  };
  constexpr auto kStepInt = static_cast<int64_t>(kStep);
  const int64_t full = n_in - n_in % kStepInt;
  int64_t offset = 0;
  VF a[R];
  VF b[R];
  for (int64_t i = 0; i < full; i += kStepInt, offset += E::kStepBytes) {
    for (int r = 0; r < R; ++r) {
      PrefetchStep<E::kStepBytes>(w[r], offset);
      E::LoadStep(w[r] + offset, a[r], b[r]);
    }
    add(i, a, b);
  }
  if (full < n_in) {
    for (int r = 0; r < R; ++r) {
      E::LoadTail(w[r] + offset, static_cast<size_t>(n_in - full), a[r], b[r]);
    }
    add(full, a, b);
  }
  if constexpr (kAlone) {
    for (int r = 0; r < R; ++r) sum[r][M - 1] = hn::Add(sum[r][M - 1], second[r]);
  }
  StoreSums(sum, out);
}

// The scale of the block of Q8_0 at p, in every lane.
HWY_INLINE VF BlockScale(const std::byte* p) {
  const DF d;
#if OKV_SAFE_MASKED_LOAD  // the targets with F16C
  // With the bytes behind it, which are the block's: so the conversion reads memory by itself.
  const hn::FixedTag<float, 4> d4;
  const hn::Rebind<hwy::float16_t, decltype(d4)> d16;
  const auto* from = reinterpret_cast<const hwy::float16_t*>(p);
  return hn::Set(d, hn::GetLane(hn::PromoteTo(d4, hn::LoadU(d16, from))));
#else
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return hn::Set(d, F32FromF16(bits));
#endif
}

// The same for Q8_0. The products of a row alone are summed block by block before they are scaled;
// for other rows the weights are scaled once for all.
template <int R, int M, bool kAlone>
HWY_INLINE void DotQ8(const std::byte* const* w, int64_t n_in, const float* x, int64_t ldx,
                      float (*out)[kTileRows]) {
  const DF d;
  const DI di;
  const hn::Rebind<int8_t, DF> d8;
  VF sum[R][M];
  for (int r = 0; r < R; ++r) std::fill_n(sum[r], M, hn::Zero(d));
  int64_t offset = 0;
  for (int64_t i = 0; i < n_in; i += kQ8Block, offset += kQ8BlockBytes) {
    VF scale[R];
    VF block[R];  // of the row alone
    for (int r = 0; r < R; ++r) {
      hwy::Prefetch(w[r] + offset + kPrefetchAheadQ8);
      scale[r] = BlockScale(w[r] + offset);
      block[r] = hn::Zero(d);
    }
    for (size_t j = 0; j < kQ8Block; j += kLanes) {
      VF v[R];
      VF scaled[R];
      for (int r = 0; r < R; ++r) {
        const auto* q = reinterpret_cast<const int8_t*>(w[r] + offset + 2);
        v[r] = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, q + j)));
        scaled[r] = hn::Mul(v[r], scale[r]);
      }
      for (int m = 0; m < M; ++m) {
        VF xv = hn::LoadU(d, x + m * ldx + i + static_cast<int64_t>(j));
        KeepInRegister(xv);  // one load for all rows of weights
        for (int r = 0; r < R; ++r) {
          if (kAlone && m == M - 1) {
            block[r] = hn::MulAdd(v[r], xv, block[r]);
          } else {
            sum[r][m] = hn::MulAdd(scaled[r], xv, sum[r][m]);
          }
        }
      }
    }
    if constexpr (kAlone) {
      for (int r = 0; r < R; ++r) sum[r][M - 1] = hn::MulAdd(block[r], scale[r], sum[r][M - 1]);
    }
  }
  StoreSums(sum, out);
}

// Half of a tile's weights after the other where the sums of all have no room in registers.
template <DType kType, int M>
HWY_INLINE void TileIn(const std::byte* const* w, int64_t n_in, const float* x, int64_t ldx,
                       float (*out)[kTileRows]) {
  constexpr bool kAlone = M % kRegisterRows == 1;
  constexpr int R = M > kRegisterRows ? kTileRows / 2 : kTileRows;
  for (int r = 0; r < kTileRows; r += R) {
    auto* part = reinterpret_cast<float(*)[kTileRows]>(out[0] + r);
    if constexpr (kType == DType::kQ8_0) {
      DotQ8<R, M, kAlone>(w + r, n_in, x, ldx, part);
    } else {
      Dot<kType, R, M, kAlone>(w + r, n_in, x, ldx, part);
    }
  }
}

template <int M>
HWY_NOINLINE void TileOf(DType format, const std::byte* const* w, int64_t n_in, const float* x,
                         int64_t ldx, float (*out)[kTileRows]) {
  switch (format) {
    case DType::kF32:
      return TileIn<DType::kF32, M>(w, n_in, x, ldx, out);
    case DType::kF16:
      return TileIn<DType::kF16, M>(w, n_in, x, ldx, out);
    case DType::kBF16:
      return TileIn<DType::kBF16, M>(w, n_in, x, ldx, out);
    case DType::kQ8_0:
      return TileIn<DType::kQ8_0, M>(w, n_in, x, ldx, out);
    case DType::kQ4_0:
      return;  // no format of weights
  }
}

// out[i][r] = w[r] · x[first + i] for i < m, m <= kTileInputs.
HWY_INLINE void Tile(DType format, const std::byte* const* w, int64_t n_in, const PackedRows& x,
                     int first, int m, float (*out)[kTileRows]) {
  const float* xm = x.x + first * x.ld;
  const auto of = [&](auto rows) {
    constexpr int M = decltype(rows)::value;
    if constexpr (M <= kTileInputs) TileOf<M>(format, w, n_in, xm, x.ld, out);
  };
  switch (m) {
    case 1:
      return of(std::integral_constant<int, 1>());
    case 2:
      return of(std::integral_constant<int, 2>());
    case 3:
      return of(std::integral_constant<int, 3>());
    case 4:
      return of(std::integral_constant<int, 4>());
    case 5:
      return of(std::integral_constant<int, 5>());
    case 6:
      return of(std::integral_constant<int, 6>());
    case 7:
      return of(std::integral_constant<int, 7>());
    case 8:
      return of(std::integral_constant<int, 8>());
    default:
      return of(std::integral_constant<int, 9>());
  }
}

// The rows of activations that a tile takes at most. Formats that are decoded in an instruction or
// two gain nothing from more than kRegisterRows where all those have room beside kTileRows: every
// row of activations is then read twice as often.
HWY_INLINE int MostInputs(DType format) {
  return format == DType::kQ8_0 || kRegisterRows < kTileRows ? kTileInputs : kRegisterRows;
}

// The rows of activations of the next tile when `left` are left. Tiles other than the last are
// multiples of kRegisterRows: a row over those is always the last of its tile, and has the sums of
// a row alone, however tiles are cut.
HWY_INLINE int InputTile(int left, int most) {
  return left <= most ? left : most / kRegisterRows * kRegisterRows;
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
  const int most = MostInputs(w.format);
  // Stream r is rows begin + r * stride + [0, stride); a few rows may be left for a last tile.
  const auto run = [&](int64_t row, int64_t stride, int n) HWY_ATTR {
    const std::byte* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = w.Row(row + std::min(r, n - 1) * stride);
    for (int first = 0, m = 0; first < x.m; first += m) {
      m = InputTile(x.m - first, most);
      float tile[kTileInputs][kTileRows];
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
  const int most = std::min(MostInputs(a.gate.format), MostInputs(a.up.format));
  const int64_t stride = (end - begin + kStreams - 1) / kStreams;
  for (int64_t o = begin; o < begin + stride; o += kBlock) {
    const auto n = static_cast<int>(std::min<int64_t>(kBlock, begin + stride - o));
    for (int first = 0, m = 0; first < x_gate.m; first += m) {
      m = InputTile(x_gate.m - first, most);
      alignas(64) float gate[kTileInputs][kStreams][kBlock];
      alignas(64) float up[kTileInputs][kStreams][kBlock];
      for (int j = 0; j < n; ++j) {
        // The last rows of the last stream may be past the end: any row stands in for them.
        int64_t row[kStreams];
        const std::byte* rows[kTileRows];
        for (int s = 0; s < kStreams; ++s) {
          row[s] = std::min(o + j + s * stride, end - 1);
          rows[s] = a.gate.Row(row[s]);
          rows[kStreams + s] = a.up.Row(row[s]);
        }
        float tile[2][kTileInputs][kTileRows];
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
