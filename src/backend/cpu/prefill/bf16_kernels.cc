#include "backend/cpu/prefill/bf16_kernels.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own intrinsics trip these (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <limits>
#endif

namespace omnikv::prefill {

#if defined(__x86_64__)
namespace {

#define OKV_BF16_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,avx2")))

constexpr int64_t kVec = 16;
constexpr int64_t kLanes = 2 * kVec;
constexpr int kRows = 12;

constexpr int kWideRows = 8;  // divides every head size

enum class Start { kZero, kLoad, kScaled };

// c[r, 0..V vectors) = start + sum over i < k of pairs a[r * row_step + i * k_step] · b[i, ...].
// Start::kScaled multiplies what c holds by scale[lane].
template <int R, int V, Start kStart>
OKV_BF16_TARGET inline void MultiplyTile(const uint32_t* __restrict a, int64_t row_step,
                                         int64_t k_step, const uint32_t* __restrict b, int64_t k,
                                         const __m512* scale, float* __restrict c, int64_t ldc) {
  __m512 acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      if constexpr (kStart == Start::kZero) {
        acc[r][v] = _mm512_setzero_ps();
      } else {
        acc[r][v] = _mm512_load_ps(c + r * ldc + v * kVec);
        if constexpr (kStart == Start::kScaled) acc[r][v] = _mm512_mul_ps(acc[r][v], scale[v]);
      }
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    __m512bh x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      x[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + i * kLanes + v * kVec));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto w = reinterpret_cast<__m512bh>(
          _mm512_set1_epi32(static_cast<int>(a[r * row_step + i * k_step])));
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], w, x[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) _mm512_store_ps(c + r * ldc + v * kVec, acc[r][v]);
  }
}

OKV_BF16_TARGET void Multiply(const uint32_t* w, int64_t ld_w, int64_t n, const uint32_t* panel,
                              int64_t rows, int64_t k, const Ahead* ahead, float* acc,
                              int64_t ld_acc) {
  for (int64_t i = 0; i < n; i += kRows) {
    for (int f = 0; f < 2; ++f) ahead[f].Fetch(i / kRows, n / kRows);
    if (rows > kVec) {
      MultiplyTile<kRows, 2, Start::kLoad>(w + i * ld_w, ld_w, 1, panel, k, nullptr,
                                           acc + i * ld_acc, ld_acc);
    } else {
      MultiplyTile<kRows, 1, Start::kLoad>(w + i * ld_w, ld_w, 1, panel, k, nullptr,
                                           acc + i * ld_acc, ld_acc);
    }
  }
}

// 2^x for x <= 0, relative error below 4e-6: finer than the bf16 its results are rounded to.
// 2^-inf is 0.
OKV_BF16_TARGET inline __m512 Exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(9.58279314e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59064438e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40241001e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93124191e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, f));
}

}  // namespace

OKV_BF16_TARGET void Bf16CapAndMask(const AttendTile& t) {
  const __m512 cap = _mm512_set1_ps(t.cap);
  const __m512 two = _mm512_set1_ps(2.0f);
  for (int64_t lane = 0; lane < kLanes; lane += kVec) {
    const __m512i pos = _mm512_loadu_si512(t.pos + lane);
    const __m512i low =
        t.window > 0 ? _mm512_sub_epi32(pos, _mm512_set1_epi32(t.window)) : _mm512_set1_epi32(-1);
    for (int32_t j = 0; j < t.tokens; ++j) {
      float* at = t.logits + j * kLanes + lane;
      __m512 s = _mm512_load_ps(at);
      if (t.cap > 0) {  // cap tanh(s / cap), tanh(|y|) = (1 - e^-2|y|) / (1 + e^-2|y|)
        const __m512 y = _mm512_abs_ps(_mm512_div_ps(s, cap));
        const __m512 e = Exp2(_mm512_mul_ps(y, _mm512_set1_ps(-2.8853901f)));
        const __m512 one_plus = _mm512_add_ps(_mm512_set1_ps(1.0f), e);
        const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(two, one_plus), one_plus);
        const __m512 capped = _mm512_mul_ps(_mm512_mul_ps(cap, tanh), _mm512_set1_ps(1.44269504f));
        s = _mm512_mask_sub_ps(capped, _mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_LT_OQ),
                               _mm512_setzero_ps(), capped);
      }
      if (t.masked) {
        const __m512i token = _mm512_set1_epi32(t.first + j);
        const __mmask16 read =
            _mm512_cmpgt_epi32_mask(token, low) & _mm512_cmple_epi32_mask(token, pos);
        s = _mm512_mask_mov_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), read, s);
      }
      _mm512_store_ps(at, s);
    }
  }
}

namespace {

// Turns logits [tokens, lanes] into pairs of weights [tokens / 2, lanes], in place: weights of
// tokens 2j and 2j + 1 in a word, as bf16, zero for a token that is not there. True when the sums
// of values must be scaled by `decay` first: some maximum is a new one. Two tokens of both halves
// of the lanes at a time, so that no chain of additions or maxima waits for its own latency.
OKV_BF16_TARGET inline bool Weights(const AttendTile& t, __m512 (&decay)[2]) {
  alignas(64) static constexpr int16_t kZip[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                   21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                   11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i zip = _mm512_load_si512(kZip);
  const int32_t pairs = t.tokens / 2;
  __m512 top[2];
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  bool moved = false;
  {
    __m512 even[2];
    __m512 odd[2];
    for (int v = 0; v < 2; ++v) even[v] = odd[v] = _mm512_load_ps(t.top + v * kVec);
    for (int32_t j = 0; j < pairs; ++j) {
      const float* at = t.logits + j * 2 * kLanes;
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        even[v] = _mm512_max_ps(even[v], _mm512_load_ps(at + v * kVec));
        odd[v] = _mm512_max_ps(odd[v], _mm512_load_ps(at + kLanes + v * kVec));
      }
    }
    for (int v = 0; v < 2; ++v) {
      const __m512 old = _mm512_load_ps(t.top + v * kVec);
      top[v] = _mm512_max_ps(even[v], odd[v]);
      if (t.tokens % 2 != 0) {
        top[v] = _mm512_max_ps(
            top[v], _mm512_load_ps(t.logits + int64_t{t.tokens - 1} * kLanes + v * kVec));
      }
      decay[v] = Exp2(_mm512_sub_ps(old, top[v]));
      moved |= _mm512_cmp_ps_mask(top[v], old, _CMP_NEQ_UQ) != 0;
      _mm512_store_ps(t.top + v * kVec, top[v]);
    }
  }
  const auto store = [&](int32_t pair, int v, __m512 even, __m512 odd) OKV_BF16_TARGET {
    const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_store_si512(t.logits + pair * kLanes + v * kVec, _mm512_permutexvar_epi16(zip, halves));
  };
  for (int32_t j = 0; j < pairs; ++j) {
    const float* at = t.logits + j * 2 * kLanes;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512 even = Exp2(_mm512_sub_ps(_mm512_load_ps(at + v * kVec), top[v]));
      const __m512 odd = Exp2(_mm512_sub_ps(_mm512_load_ps(at + kLanes + v * kVec), top[v]));
      sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(even, odd));
      store(j, v, even, odd);
    }
  }
  for (int v = 0; v < 2; ++v) {
    if (t.tokens % 2 != 0) {
      const float* at = t.logits + int64_t{t.tokens - 1} * kLanes + v * kVec;
      const __m512 last = Exp2(_mm512_sub_ps(_mm512_load_ps(at), top[v]));
      sum[v] = _mm512_add_ps(sum[v], last);
      store(pairs, v, last, _mm512_setzero_ps());
    }
    const __m512 before = _mm512_load_ps(t.sum + v * kVec);
    _mm512_store_ps(t.sum + v * kVec, _mm512_fmadd_ps(before, decay[v], sum[v]));
  }
  return moved;
}

OKV_BF16_TARGET void AttendPanel(const AttendTile& t) {
  for (int32_t j = 0; j < t.tokens; j += kRows) {
    MultiplyTile<kRows, 2, Start::kZero>(t.k + j * t.ld_k, t.ld_k, 1, t.q, t.dk / 2, nullptr,
                                         t.logits + j * kLanes, kLanes);
  }
  if (t.masked || t.cap > 0) Bf16CapAndMask(t);
  __m512 decay[2];
  const bool moved = Weights(t, decay);
  const auto* weights = reinterpret_cast<const uint32_t*>(t.logits);
  const int64_t pairs = (t.tokens + 1) / 2;
  for (int32_t i = 0; i < t.dv; i += kWideRows) {
    float* o = t.o + i * kLanes;
    if (moved) {
      MultiplyTile<kWideRows, 2, Start::kScaled>(t.v + i, 1, t.ld_v, weights, pairs, decay, o,
                                                 kLanes);
    } else {
      MultiplyTile<kWideRows, 2, Start::kLoad>(t.v + i, 1, t.ld_v, weights, pairs, nullptr, o,
                                               kLanes);
    }
  }
}

void Attend(const AttendTile* panels, int64_t n, FunctionRef<void(int64_t)> before) {
  for (int64_t i = 0; i < n; ++i) {
    before(i);
    AttendPanel(panels[i]);
  }
}

bool CpuHasBf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

const GemmKernels* Bf16GemmKernels() {
  static constexpr GemmKernels kKernels = {
      .name = "AVX512 bf16", .lanes = kLanes, .pack = 2, .multiply = Multiply};
  return CpuHasBf16() ? &kKernels : nullptr;
}

const AttendKernels* Bf16AttendKernels() {
  static constexpr AttendKernels kKernels = {
      .name = "AVX512 bf16", .lanes = kLanes, .pack = 2, .attend = Attend};
  return CpuHasBf16() ? &kKernels : nullptr;
}

#else

const GemmKernels* Bf16GemmKernels() {
  return nullptr;
}
const AttendKernels* Bf16AttendKernels() {
  return nullptr;
}
void Bf16CapAndMask(const AttendTile&) {}

#endif

}  // namespace omnikv::prefill
