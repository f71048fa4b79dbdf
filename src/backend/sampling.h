// How a token is drawn, the same to the last bit on every backend. Probabilities are whole numbers:
// sums of them depend on no order, and so on no number of threads or blocks.
//
// Of a row of logits (`ref` does it in these words):
//   1. A token that was seen has logit / penalty where that is above 0, else logit * penalty. NaN
//      is never chosen; a row of nothing else gives token 0.
//   2. Tokens in order: the highest logit first, of equals the lowest token. Temperature 0: the
//      first.
//   3. The first top_k of them stay. Each weighs SampleWeight; `total` is their sum.
//   4. Of those, the ones that weigh at least SampleMinWeight stay, and of these the fewest, from
//      the first on, that together weigh SampleTopWeight(total).
//   5. Of the weight that is left, `kept`, SampleRandom gives a place; the token that it falls on,
//      counted in order, is drawn.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "backend/host_device.h"

namespace omnikv {

// How a sequence's tokens are drawn. In device memory, one a sequence.
struct SampleMeta {
  double temperature = 0;    // 0: the likeliest
  double top_p = 1;          // 1: off
  double min_p = 0;          // 0: off
  float repeat_penalty = 1;  // 1: off
  int32_t top_k = 0;         // 0: off
  uint64_t random = 0;       // SplitMix64's state; each draw (temperature not 0) takes one number
};

inline constexpr uint64_t kRandomStep = 0x9e3779b97f4a7c15u;
inline constexpr uint64_t kWeightOne = uint64_t{1} << 40;  // of the likeliest token
inline constexpr int64_t kMaxSampleVocab = int64_t{1} << 21;

// Words of 32 bits, one bit a token, that say which tokens were seen: token t is bit t % 32 of word
// t / 32.
OMNIKV_HOST_DEVICE constexpr int64_t SeenWords(int64_t vocab) {
  return (vocab + 31) / 32;
}

// The high half of a * b.
OMNIKV_HOST_DEVICE constexpr uint32_t HighHalf(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

OMNIKV_HOST_DEVICE inline float Penalised(float logit, float penalty) {
  return logit > 0 ? logit / penalty : logit * penalty;
}

// What a distance of 1 from the likeliest logit halves the weight, in halvings * 2^32.
OMNIKV_HOST_DEVICE inline double SampleScale(double temperature) {
  return 1.4426950408889634 * 4294967296.0 / temperature;
}

// kWeightOne * exp((logit - best) / temperature), good to 1e-9 of itself or to 1, whichever is
// more. Whole numbers from the first product on: the same on every machine.
OMNIKV_HOST_DEVICE inline uint64_t SampleWeight(float logit, float best, double scale) {
  if (logit == best) return kWeightOne;  // infinities too
  const double halvings = (static_cast<double>(best) - static_cast<double>(logit)) * scale;
  if (!(halvings < 41.0 * 4294967296.0)) return 0;
  const auto fixed = static_cast<uint64_t>(halvings);
  const auto f = static_cast<uint32_t>(fixed);
  // 2^-f = sum of (-ln 2)^k / k! * f^k; every partial sum lies between 0 and its first term.
  uint32_t v = 30;
  v = 437 - HighHalf(f, v);
  v = 5676 - HighHalf(f, v);
  v = 65510 - HighHalf(f, v);
  v = 661577 - HighHalf(f, v);
  v = 5726720 - HighHalf(f, v);
  v = 41309550 - HighHalf(f, v);
  v = 238388332 - HighHalf(f, v);
  v = 1031764991 - HighHalf(f, v);
  v = 2977044472 - HighHalf(f, v);
  return ((uint64_t{1} << 32) - HighHalf(f, v)) << 8 >> (fixed >> 32);
}

// The least weight that min_p leaves.
OMNIKV_HOST_DEVICE inline uint64_t SampleMinWeight(double min_p) {
  return static_cast<uint64_t>(ceil(min_p * static_cast<double>(kWeightOne)));
}

// The weight that top_p asks for of `total` > 0: 1 to total.
OMNIKV_HOST_DEVICE inline uint64_t SampleTopWeight(double top_p, uint64_t total) {
  const double wanted = ceil(top_p * static_cast<double>(total));
  if (!(wanted < static_cast<double>(total))) return total;
  return wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
}

// A number in [0, kept), from the number that follows state `random`.
OMNIKV_HOST_DEVICE inline uint64_t SampleRandom(uint64_t random, uint64_t kept) {
  uint64_t z = random + kRandomStep;  // SplitMix64 (Steele et al. 2014)
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  // The high half of z * kept, 128 bits.
  const uint64_t low = (z & 0xffffffffu) * (kept & 0xffffffffu);
  const uint64_t a = (z >> 32) * (kept & 0xffffffffu) + (low >> 32);
  const uint64_t b = (z & 0xffffffffu) * (kept >> 32) + (a & 0xffffffffu);
  return (z >> 32) * (kept >> 32) + (a >> 32) + (b >> 32);
}

struct SampleCandidate {
  float logit;
  int32_t token;
  uint64_t weight;
};

// The token that `meta` gives for logits [vocab], where the tokens of seen [SeenWords(vocab)] were
// seen. On the host; puts in order only what it looks at. `scratch`: vocab. Takes no random number:
// that is TakeSample's.
int32_t SampleToken(const float* logits, int64_t vocab, const SampleMeta& meta,
                    const uint32_t* seen, std::span<SampleCandidate> scratch);

// Whether no logit of [vocab] is NaN or infinite. On the host; fast enough for every step.
bool AllFinite(const float* logits, int64_t vocab);

// What follows from `token` being chosen.
OMNIKV_HOST_DEVICE inline void TakeSample(int32_t token, SampleMeta& meta, uint32_t* seen) {
  seen[token / 32] |= 1u << (token % 32);
  if (meta.temperature != 0) meta.random += kRandomStep;
}

}  // namespace omnikv
