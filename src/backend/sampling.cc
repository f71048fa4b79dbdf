#include "backend/sampling.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace omnikv {
namespace {

bool Before(const SampleCandidate& a, const SampleCandidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Candidates of which the first `sorted` are in order.
class Ordered {
 public:
  explicit Ordered(std::span<SampleCandidate> all) : all_(all) {}

  const SampleCandidate& operator[](size_t i) {
    if (i >= sorted_) SortMore();
    return all_[i];
  }

 private:
  void SortMore() {
    const size_t to = std::min(std::max<size_t>(64, 4 * sorted_), all_.size());
    const auto first = all_.begin() + static_cast<ptrdiff_t>(sorted_);
    const auto last = all_.begin() + static_cast<ptrdiff_t>(to);
    if (last != all_.end()) std::nth_element(first, last, all_.end(), Before);
    std::sort(first, last, Before);
    sorted_ = to;
  }

  std::span<SampleCandidate> all_;
  size_t sorted_ = 0;
};

// Whole numbers in the order of the floats, -0 as 0, and NaN before all: maxima of these run on
// vectors.
int32_t OrderOf(float logit) {
  constexpr int32_t kUnsigned = 0x7fffffff;
  const auto bits = std::bit_cast<int32_t>(logit);
  const int32_t order = bits < 0 ? -(bits & kUnsigned) : bits;
  return (bits & kUnsigned) > 0x7f800000 ? std::numeric_limits<int32_t>::min() : order;
}

// The highest, of equals the first; NaN is none. 0 where there is nothing else.
int32_t HighestOf(const float* logits, int64_t vocab) {
  int32_t most = std::numeric_limits<int32_t>::min();
  for (int64_t t = 0; t < vocab; ++t) most = std::max(most, OrderOf(logits[t]));
  int64_t first = 0;
  while (first < vocab && OrderOf(logits[first]) != most) ++first;
  return static_cast<int32_t>(first);
}

}  // namespace

bool AllFinite(const float* logits, int64_t vocab) {
  // Of the numbers without their signs, infinity is the first that is not finite. Whole numbers
  // have a maximum in any order, so that this runs on vectors.
  int32_t highest = 0;
  for (int64_t t = 0; t < vocab; ++t) {
    highest = std::max(highest, std::bit_cast<int32_t>(logits[t]) & 0x7fffffff);
  }
  return highest < 0x7f800000;
}

int32_t SampleToken(const float* logits, int64_t vocab, const SampleMeta& meta,
                    const uint32_t* seen, std::span<SampleCandidate> scratch) {
  if (meta.temperature == 0 && meta.repeat_penalty == 1) return HighestOf(logits, vocab);
  size_t n = 0;
  SampleCandidate best{0, 0, 0};
  for (int32_t t = 0; t < vocab; ++t) {
    float logit = logits[t];
    if (std::isnan(logit)) continue;
    if ((seen[t / 32] >> (t % 32) & 1) != 0) logit = Penalised(logit, meta.repeat_penalty);
    scratch[n] = {logit, t, 0};
    if (n == 0 || logit > best.logit) best = scratch[n];
    ++n;
  }
  if (n == 0 || meta.temperature == 0) return best.token;
  std::span<SampleCandidate> all = scratch.first(n);
  if (meta.top_k > 0 && static_cast<size_t>(meta.top_k) < n) {
    std::nth_element(all.begin(), all.begin() + meta.top_k, all.end(), Before);
    all = all.first(static_cast<size_t>(meta.top_k));
  }
  const double scale = SampleScale(meta.temperature);
  const uint64_t least = SampleMinWeight(meta.min_p);
  uint64_t total = 0;
  uint64_t kept = 0;
  n = 0;
  for (SampleCandidate& c : all) {
    c.weight = SampleWeight(c.logit, best.logit, scale);
    total += c.weight;
    if (c.weight < least) continue;
    kept += c.weight;
    all[n++] = c;
  }
  Ordered order(all.first(n));
  if (meta.top_p < 1) {
    const uint64_t wanted = std::min(SampleTopWeight(meta.top_p, total), kept);
    kept = 0;
    for (size_t i = 0; kept < wanted; ++i) kept += order[i].weight;
  }
  const uint64_t place = SampleRandom(meta.random, kept);
  uint64_t passed = 0;
  for (size_t i = 0;; ++i) {
    passed += order[i].weight;
    if (passed > place) return order[i].token;
  }
}

}  // namespace omnikv
