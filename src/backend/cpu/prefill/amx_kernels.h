// Prefill attention on AMX tiles: 16 tokens by 16 queries by 32 values of bf16 at a time. Rows of K
// are the left operand as they lie in the bank; the queries and the softmax weights have the layout
// of the right one already (pairs of values, one query a lane).
#pragma once

#include <cstdint>

#include "backend/cpu/prefill/bf16_kernels.h"
#include "backend/cpu/prefill/kernels.h"

namespace omnikv::prefill {

// Null where the CPU, the system or the build lacks AMX-BF16. The first call asks the system for
// the tiles, for the whole process.
const AttendKernels* AmxAttendKernels();

// Whether this CPU multiplies bf16 in AMX tiles and the system lets this process use them.
bool AmxBf16Usable();

// `n` rounds of tile products that touch no memory, kAmxSpinFlops each: what the matrix unit can do
// at most. REQUIRES AmxBf16Usable.
void AmxSpin(int64_t n);
inline constexpr double kAmxSpinFlops = 4 * 2 * 16 * 16 * 32;

inline constexpr int64_t kAmxLanes = 32;  // queries of a panel: two tiles
inline constexpr int64_t kAmxSide = 16;   // rows of a tile, and words of 4 bytes in a row

// c[rows, kAmxLanes] (+)= a[rows, ld_a] · b[words, kAmxLanes], rows and words multiples of
// kAmxSide. `Tiles` are the machine's, or an emulation of them in tests.
template <class Tiles>
void AmxProduct(Tiles& tiles, const uint32_t* a, int64_t ld_a, int64_t rows, const uint32_t* b,
                int64_t words, bool add, float* c) {
  constexpr int64_t kLine = kAmxLanes * sizeof(float);
  const int64_t a_line = ld_a * static_cast<int64_t>(sizeof(uint32_t));
  for (int64_t i = 0; i < rows; i += 2 * kAmxSide) {
    const bool both = rows - i > kAmxSide;
    float* at = c + i * kAmxLanes;
    float* below = at + kAmxSide * kAmxLanes;
    if (add) {
      tiles.template Load<0>(at, kLine);
      tiles.template Load<1>(at + kAmxSide, kLine);
      if (both) {
        tiles.template Load<2>(below, kLine);
        tiles.template Load<3>(below + kAmxSide, kLine);
      }
    } else {
      tiles.template Zero<0>();
      tiles.template Zero<1>();
      tiles.template Zero<2>();
      tiles.template Zero<3>();
    }
    for (int64_t w = 0; w < words; w += kAmxSide) {
      tiles.template Load<6>(b + w * kAmxLanes, kLine);
      tiles.template Load<7>(b + w * kAmxLanes + kAmxSide, kLine);
      tiles.template Load<4>(a + i * ld_a + w, a_line);
      tiles.template Dot<0, 4, 6>();
      tiles.template Dot<1, 4, 7>();
      if (both) {
        tiles.template Load<5>(a + (i + kAmxSide) * ld_a + w, a_line);
        tiles.template Dot<2, 5, 6>();
        tiles.template Dot<3, 5, 7>();
      }
    }
    tiles.template Store<0>(at, kLine);
    tiles.template Store<1>(at + kAmxSide, kLine);
    if (both) {
      tiles.template Store<2>(below, kLine);
      tiles.template Store<3>(below + kAmxSide, kLine);
    }
  }
}

// AttendKernels::attend with V by value (AttendKernels::v_by_value). REQUIRES t.dv % kAmxSide == 0
// and the instructions of Bf16AttendKernels.
template <class Tiles>
void AmxAttend(Tiles& tiles, const AttendTile& t) {
  const int64_t k_words = (t.dk / 2 + kAmxSide - 1) / kAmxSide * kAmxSide;
  const int64_t tokens = (t.tokens + kAmxSide - 1) / kAmxSide * kAmxSide;
  const int64_t pairs = (t.tokens + 1) / 2;
  const int64_t v_words = (pairs + kAmxSide - 1) / kAmxSide * kAmxSide;
  AmxProduct(tiles, t.k, t.ld_k, tokens, t.q, k_words, false, t.logits);
  Bf16Softmax(t);
  auto* weights = reinterpret_cast<uint32_t*>(t.logits);
  for (int64_t i = pairs * kAmxLanes; i < v_words * kAmxLanes; ++i) weights[i] = 0;
  AmxProduct(tiles, t.v, t.ld_v, t.dv, weights, v_words, true, t.o);
}

}  // namespace omnikv::prefill
