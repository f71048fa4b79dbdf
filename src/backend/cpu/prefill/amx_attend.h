// Prefill attention on AMX tiles, which multiply 16 rows by 16 columns by 32 values of bf16 at a
// time. Rows of K, and values of V over tokens, are the left operand; the queries and the softmax
// weights have the layout of the right one already (pairs of values, one query a lane).
//
// The tiles and the vector registers are two units that work side by side only while instructions
// of both are in the core's window. So the products of the next block of tokens and the values of
// the panel before are cut into steps, and the steps are spread over the softmax of this block.
//
// What it costs on a quiet Sapphire Rapids core, in cycles for 16 logits with heads of 64 (128):
// the products 4.1 (8.2), at 16 a product of tiles; the softmax 6.7, of them 2 for the polynomial,
// on two ports of which a product holds one; tiles of logits stored 1.1, at 17 a tile; sums of
// values loaded and stored 0.8 (1.6); K and V converted 1 (2). Loads of tiles, 8 from the
// first-level cache and 21 from the second, go beside the products. That is 14 (20), or 30 % (41 %)
// of the products' own rate, if nothing else shares the core.
//
// A template over the tiles: the machine's, or an emulation of them in tests. Needs AVX512-BF16.
#pragma once

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own intrinsics trip these (GCC bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backend/cpu/prefill/amx_kernels.h"
#include "backend/cpu/prefill/bf16_kernels.h"
#include "backend/cpu/prefill/kernels.h"

#define OKV_AMX_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,avx2")))

namespace omnikv::prefill {

inline constexpr int64_t kAmxLanes = 32;                   // queries of a panel: two tiles
inline constexpr int64_t kAmxWords = kAmxSide * kAmxSide;  // of a tile
inline constexpr int64_t kAmxBlock = 32;  // tokens between two looks at the maximum

inline constexpr int64_t kAmxTokens = 128;  // of a tile of K and V
// AttendTile::logits: two blocks of logits, two panels of weights.
inline constexpr int64_t kAmxScratch = (2 * kAmxBlock + kAmxTokens) * kAmxLanes;

// c[32, 32] (+)= the product of `steps` pairs of tiles.
struct AmxProduct {
  const uint32_t* left = nullptr;   // [steps, 2] tiles: rows [0, 16) and [16, 32)
  bool both = true;                 // false: only 16 rows
  const uint32_t* right = nullptr;  // [16 * steps, kAmxLanes]
  float* c = nullptr;               // [32, kAmxLanes]
  int32_t steps = 0;
  bool add = false;
};

// Products in the order they came, run step by step.
template <class Tiles>
class AmxQueue {
 public:
  explicit AmxQueue(Tiles& tiles) : tiles_(tiles) {}

  void Push(const AmxProduct& product) {
    products_[n_++] = product;
    left_ += product.steps;
  }

  int32_t left() const { return left_; }  // steps

  void Run(int32_t steps) {
    for (int32_t i = 0; i < steps; ++i) Step();
  }

  void Drain() {
    Run(left_);
    n_ = at_ = 0;
  }

 private:
  static constexpr int64_t kLine = kAmxLanes * sizeof(float);
  static constexpr int64_t kTileLine = kAmxSide * sizeof(uint32_t);

  void Step() {
    const AmxProduct& p = products_[at_];
    float* below = p.c + kAmxSide * kAmxLanes;
    if (step_ == 0) Start(p, below);
    const uint32_t* right = p.right + step_ * kAmxSide * kAmxLanes;
    const uint32_t* left = p.left + step_ * 2 * kAmxWords;
    tiles_.template Load<6>(right, kLine);
    tiles_.template Load<7>(right + kAmxSide, kLine);
    tiles_.template Load<4>(left, kTileLine);
    Fetch(left + 2 * kAmxWords);
    tiles_.template Dot<0, 4, 6>();
    tiles_.template Dot<1, 4, 7>();
    if (p.both) {
      tiles_.template Load<5>(left + kAmxWords, kTileLine);
      Fetch(left + 3 * kAmxWords);
      tiles_.template Dot<2, 5, 6>();
      tiles_.template Dot<3, 5, 7>();
    }
    --left_;
    if (++step_ < p.steps) return;
    tiles_.template Store<0>(p.c, kLine);
    tiles_.template Store<1>(p.c + kAmxSide, kLine);
    if (p.both) {
      tiles_.template Store<2>(below, kLine);
      tiles_.template Store<3>(below + kAmxSide, kLine);
    }
    step_ = 0;
    ++at_;
  }

  void Start(const AmxProduct& p, const float* below) {
    if (!p.add) {
      tiles_.template Zero<0>();
      tiles_.template Zero<1>();
      tiles_.template Zero<2>();
      tiles_.template Zero<3>();
      return;
    }
    tiles_.template Load<0>(p.c, kLine);
    tiles_.template Load<1>(p.c + kAmxSide, kLine);
    if (p.both) {
      tiles_.template Load<2>(below, kLine);
      tiles_.template Load<3>(below + kAmxSide, kLine);
    }
  }

  static void Fetch(const uint32_t* tile) {
    for (int64_t r = 0; r < kAmxSide; ++r) __builtin_prefetch(tile + r * kAmxSide, 0, 3);
  }

  static constexpr int kMost = 1 + kAmxMostValues / 32;  // a block's logits, a panel's values
  Tiles& tiles_;
  AmxProduct products_[kMost];
  int32_t n_ = 0;
  int32_t at_ = 0;    // the product under way
  int32_t step_ = 0;  // of products_[at_]
  int32_t left_ = 0;
};

OKV_AMX_TARGET inline __m256i AmxLoad16(const std::byte* values) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
}

// AttendKernels::pack_rows. K's tiles: [tokens / 32, dk / 32, 2], a tile 16 tokens of 32 values;
// V's: [dv / 32, tokens / 32, 2], a tile 16 values of 32 tokens. What pads them is zero in V.
OKV_AMX_TARGET inline void AmxPack(const AttendRows& rows, int64_t first, uint32_t* k,
                                   uint32_t* v) {
  k += first / 32 * ((rows.dk + 31) / 32) * 2 * kAmxWords;
  v += first / 32 * 2 * kAmxWords;
  for (int64_t j = 0; j < rows.n; ++j) {
    uint32_t* to = k + j * kAmxSide;
    for (int64_t i = 0; i < rows.dk; i += 32, to += 2 * kAmxWords) {
      const auto mask = static_cast<__mmask32>(rows.dk - i >= 32 ? ~0u : (1u << (rows.dk - i)) - 1);
      const __m512i halves = _mm512_maskz_loadu_epi16(mask, rows.k[j] + 2 * i);
      if (rows.dtype == DType::kBF16) {
        _mm512_store_si512(to, halves);
        continue;
      }
      const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
      _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
  }
  alignas(64) static constexpr int16_t kZip[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                   21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                   11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i zip = _mm512_load_si512(kZip);
  alignas(64) uint32_t pairs[kAmxWords];  // [pair of tokens, value]
  for (int64_t i = 0; i < rows.dv; i += kAmxSide) {
    for (int64_t j = 0; j < kAmxSide; ++j) {
      __m512i pair = _mm512_setzero_si512();
      if (2 * j < rows.n) {
        const std::byte* even = rows.v[2 * j] + 2 * i;
        const std::byte* odd = 2 * j + 1 < rows.n ? rows.v[2 * j + 1] + 2 * i : nullptr;
        if (rows.dtype == DType::kBF16) {
          pair = _mm512_cvtepu16_epi32(AmxLoad16(even));
          if (odd != nullptr)
            pair =
                _mm512_or_si512(pair, _mm512_slli_epi32(_mm512_cvtepu16_epi32(AmxLoad16(odd)), 16));
        } else {
          const __m512 high =
              odd != nullptr ? _mm512_cvtph_ps(AmxLoad16(odd)) : _mm512_setzero_ps();
          pair = _mm512_permutexvar_epi16(zip, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                                   high, _mm512_cvtph_ps(AmxLoad16(even)))));
        }
      }
      _mm512_store_si512(pairs + j * kAmxSide, pair);
    }
    BestVectorKernels().transpose(
        pairs, kAmxSide, kAmxSide, kAmxSide,
        v + (i / 32 * (kAmxTokens / kAmxBlock) * 2 + i / 16 % 2) * kAmxWords, kAmxSide);
  }
}

template <class Tiles>
class AmxAttention {
 public:
  static constexpr int64_t kVec = 16;
  static constexpr int32_t kParts = 9;  // of a block's softmax: its maximum, then its weights
  // A logit may exceed the running maximum by this (to base 2) before the maximum moves, which is
  // rare then. Weights up to 2^8 lose nothing: they are rounded relative to themselves.
  static constexpr float kSlack = 8;

  // AttendKernels::attend of K and V in tiles (AmxPack).
  OKV_AMX_TARGET static void Run(Tiles& tiles, const AttendTile* panels, int64_t n,
                                 const FunctionRef<void(int64_t)>& before) {
    AmxAttention attention(tiles, panels[0].logits);
    attention.Panels(panels, n, before);
  }

 private:
  AmxAttention(Tiles& tiles, float* scratch)
      : queue_(tiles),
        logits_{scratch, scratch + kAmxBlock * kAmxLanes},
        weights_{reinterpret_cast<uint32_t*>(scratch) + 2 * kAmxBlock * kAmxLanes,
                 reinterpret_cast<uint32_t*>(scratch) + 2 * kAmxBlock * kAmxLanes +
                     kAmxTokens / 2 * kAmxLanes} {}

  static int64_t Blocks(const AttendTile& t) { return (t.tokens + kAmxBlock - 1) / kAmxBlock; }

  OKV_AMX_TARGET void Panels(const AttendTile* panels, int64_t n,
                             const FunctionRef<void(int64_t)>& before) {
    PushLogits(panels[0], 0);
    queue_.Drain();
    for (int64_t p = 0; p < n; ++p) {
      before(p);
      const AttendTile& t = panels[p];
      const int64_t blocks = Blocks(t);
      const int64_t values = p > 0 ? (t.dv + 31) / 32 : 0;  // products of the panel before
      for (int64_t b = 0; b < blocks; ++b) {
        turn_ ^= 1;
        if (b + 1 < blocks) {
          PushLogits(t, b + 1);
        } else if (p + 1 < n) {
          PushLogits(panels[p + 1], 0);
        }
        for (int64_t i = values * b / blocks; i < values * (b + 1) / blocks; ++i) {
          PushValues(panels[p - 1], (p - 1) % 2, i);
        }
        Softmax(t, b, logits_[turn_ ^ 1], weights_[p % 2]);
      }
    }
    for (int64_t i = 0; i < (panels[0].dv + 31) / 32; ++i) {
      PushValues(panels[n - 1], (n - 1) % 2, i);
    }
    queue_.Drain();
  }

  // Into logits_[turn_].
  void PushLogits(const AttendTile& t, int64_t block) {
    const int64_t steps = (t.dk / 2 + kAmxSide - 1) / kAmxSide;
    queue_.Push({.left = t.k + block * steps * 2 * kAmxWords,
                 .right = t.q,
                 .c = logits_[turn_],
                 .steps = static_cast<int32_t>(steps)});
  }

  void PushValues(const AttendTile& t, int64_t which, int64_t i) {
    const int64_t tiles = t.dv / kAmxSide;
    queue_.Push({.left = t.v + i * (kAmxTokens / kAmxBlock) * 2 * kAmxWords,
                 .both = 2 * i + 1 < tiles,
                 .right = weights_[which],
                 .c = t.o + i * 32 * kAmxLanes,
                 .steps = static_cast<int32_t>(Blocks(t)),
                 .add = true});
  }

  // 2^x, relative error below 3e-6: finer than the bf16 its results are rounded to. 2^-inf is 0.
  OKV_AMX_TARGET static inline __m512 Exp2(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // [0, 1)
    __m512 p = _mm512_set1_ps(1.353416791e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.201146062e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.414427569e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.930038345e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.000002593f));
    return _mm512_scalef_ps(p, x);  // by 2^floor(x)
  }

  // Raises the running maxima of queries to `most` where that exceeds them by more than the slack,
  // to a whole power of 2: what was summed before is scaled without a rounding.
  OKV_AMX_TARGET __attribute__((noinline)) static void Raise(const AttendTile& t,
                                                             const __m512 (&most)[2], int64_t block,
                                                             uint32_t* weights) {
    __m512 decay[2];
    for (int v = 0; v < 2; ++v) {
      const __m512 old = _mm512_load_ps(t.top + v * kVec);
      const __mmask16 above =
          _mm512_cmp_ps_mask(most[v], _mm512_add_ps(old, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
      const __m512 top =
          _mm512_mask_roundscale_ps(old, above, most[v], _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
      decay[v] = _mm512_scalef_ps(_mm512_set1_ps(1.0f), _mm512_sub_ps(old, top));
      _mm512_store_ps(t.top + v * kVec, top);
      for (float* of : {t.sum + v * kVec, t.norm + v * kVec}) {
        _mm512_store_ps(of, _mm512_mul_ps(_mm512_load_ps(of), decay[v]));
      }
    }
    for (int64_t i = 0; i < t.dv * kAmxLanes; i += kVec) {
      _mm512_store_ps(t.o + i, _mm512_mul_ps(_mm512_load_ps(t.o + i), decay[i / kVec % 2]));
    }
    for (int64_t i = 0; i < block * kAmxBlock / 2 * kAmxLanes; i += kVec) {
      const __m512i pair = _mm512_load_si512(weights + i);
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      const __m512 scale = decay[i / kVec % 2];
      const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), scale);
      const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, high)), scale);
      _mm512_store_si512(weights + i,
                         _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                         _mm512_and_si512(_mm512_castps_si512(odd), high)));
    }
  }

  // To bf16 in the upper half: to nearest, ties away from zero.
  OKV_AMX_TARGET static inline __m512i Round(__m512 x) {
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  }

  // Pairs of weights of tokens 2 i and 2 i + 1, for all queries.
  template <bool kSum>
  OKV_AMX_TARGET static inline void Pair(const float* logits, int64_t i, const __m512 (&top)[2],
                                         __m512 (&sum)[2], __m512 (&norm)[2], uint32_t* weights) {
    const float* at = logits + i * 2 * kAmxLanes;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512 even = Exp2(_mm512_sub_ps(_mm512_load_ps(at + v * kVec), top[v]));
      const __m512 odd = Exp2(_mm512_sub_ps(_mm512_load_ps(at + kAmxLanes + v * kVec), top[v]));
      if (kSum) sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(even, odd));
      const __m512i low = Round(even);
      const __m512i high = Round(odd);
      norm[v] = _mm512_add_ps(norm[v],
                              _mm512_add_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)));
      const __m512i pair = _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
      _mm512_store_si512(weights + i * kAmxLanes + v * kVec, pair);
    }
  }

  OKV_AMX_TARGET inline void Softmax(const AttendTile& t, int64_t block, float* logits,
                                     uint32_t* weights) {
    const auto n = static_cast<int32_t>(std::min(kAmxBlock, t.tokens - block * kAmxBlock));
    if (t.masked || t.cap > 0 || n < kAmxBlock) {
      AttendTile part = t;
      part.first += static_cast<int32_t>(block * kAmxBlock);
      part.tokens = n;
      part.logits = logits;
      Bf16CapAndMask(part);
      std::fill(logits + n * kAmxLanes, logits + kAmxBlock * kAmxLanes,
                -std::numeric_limits<float>::infinity());
    }
    const int32_t steps = queue_.left();
    queue_.Run(Due(steps, 0));
    __m512 most[2][4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) most[v][i] = _mm512_load_ps(logits + i * kAmxLanes + v * kVec);
    }
    for (int64_t j = 4; j < kAmxBlock; j += 4) {
      const float* at = logits + j * kAmxLanes;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          most[v][i] = _mm512_max_ps(most[v][i], _mm512_load_ps(at + i * kAmxLanes + v * kVec));
        }
      }
    }
    __m512 top[2];
    __m512 highest[2];
    unsigned above = 0;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      highest[v] = _mm512_max_ps(_mm512_max_ps(most[v][0], most[v][1]),
                                 _mm512_max_ps(most[v][2], most[v][3]));
      top[v] = _mm512_load_ps(t.top + v * kVec);
      above |=
          _mm512_cmp_ps_mask(highest[v], _mm512_add_ps(top[v], _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
    }
    if (__builtin_expect(above != 0, 0)) {
      Raise(t, highest, block, weights);
      for (int v = 0; v < 2; ++v) top[v] = _mm512_load_ps(t.top + v * kVec);
    }
    uint32_t* out = weights + block * kAmxBlock / 2 * kAmxLanes;
    if (t.lse) {
      Weigh<true>(t, logits, top, out, steps);
    } else {
      Weigh<false>(t, logits, top, out, steps);
    }
    queue_.Drain();
  }

  // Of `steps`, those that stand before part `part` of kParts of a block's softmax.
  static int32_t Due(int32_t steps, int32_t part) {
    return steps * (part + 1) / kParts - steps * part / kParts;
  }

  template <bool kSum>
  OKV_AMX_TARGET inline void Weigh(const AttendTile& t, const float* logits, const __m512 (&top)[2],
                                   uint32_t* out, int32_t steps) {
    __m512 sum[2] = {_mm512_load_ps(t.sum), _mm512_load_ps(t.sum + kVec)};
    __m512 norm[2] = {_mm512_load_ps(t.norm), _mm512_load_ps(t.norm + kVec)};
    for (int32_t g = 1; g < kParts; ++g) {
      queue_.Run(Due(steps, g));
      Pair<kSum>(logits, 2 * g - 2, top, sum, norm, out);
      Pair<kSum>(logits, 2 * g - 1, top, sum, norm, out);
    }
    _mm512_store_ps(t.sum, sum[0]);
    _mm512_store_ps(t.sum + kVec, sum[1]);
    _mm512_store_ps(t.norm, norm[0]);
    _mm512_store_ps(t.norm + kVec, norm[1]);
  }

  AmxQueue<Tiles> queue_;
  float* const logits_[2];      // [kAmxBlock, kAmxLanes]
  uint32_t* const weights_[2];  // [tokens / 2, kAmxLanes]
  int turn_ = 0;
};

}  // namespace omnikv::prefill

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
