#include "engine/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace omnikv {
namespace {

Status CheckRange(const char* flag, double value, double low, double high, const char* expected) {
  if (value >= low && value <= high) return {};  // false for NaN
  return InvalidArgument(fmt::format("{} is {}, expected {}", flag, value, expected));
}

}  // namespace

Status CheckSampling(const SamplingOptions& o) {
  OKV_RETURN_IF_ERROR(CheckRange("--temp", o.temperature, 0, 100, "0 (greedy) to 100"));
  OKV_RETURN_IF_ERROR(CheckRange("--top-k", o.top_k, 0, 1e9, "0 (off) or more"));
  OKV_RETURN_IF_ERROR(CheckRange("--top-p", o.top_p, 1e-9, 1, "more than 0, up to 1 (off)"));
  OKV_RETURN_IF_ERROR(CheckRange("--min-p", o.min_p, 0, 1, "0 (off) to 1"));
  return CheckRange("--repeat-penalty", o.repeat_penalty, 0.01, 100, "0.01 to 100, 1 is off");
}

Status CheckGenerate(const GenerateOptions& o) {
  OKV_RETURN_IF_ERROR(CheckSampling(o.sampling));
  if (o.max_tokens >= 0) return {};
  return InvalidArgument(fmt::format("-n is {}, expected 0 or more", o.max_tokens));
}

Sampler::Sampler(const SamplingOptions& options, int32_t vocab)
    : options_(options), seen_(static_cast<size_t>(vocab), false), state_(options.seed) {
  candidates_.reserve(seen_.size());
}

double Sampler::Uniform() {  // SplitMix64 (Steele et al. 2014), 53 bits
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

size_t Sampler::SortMore(size_t sorted) {
  const size_t to = std::min(std::max<size_t>(64, 4 * sorted), candidates_.size());
  const auto first = candidates_.begin() + static_cast<ptrdiff_t>(sorted);
  const auto last = candidates_.begin() + static_cast<ptrdiff_t>(to);
  if (last != candidates_.end()) std::nth_element(first, last, candidates_.end(), Before);
  std::sort(first, last, Before);
  return to;
}

int32_t Sampler::Sample(const float* logits) {
  candidates_.clear();
  const auto penalty = static_cast<float>(options_.repeat_penalty);
  for (size_t t = 0; t < seen_.size(); ++t) {
    float logit = logits[t];
    if (std::isnan(logit)) continue;  // never chosen
    if (seen_[t] && penalty != 1) logit = logit > 0 ? logit / penalty : logit * penalty;
    candidates_.push_back({logit, static_cast<int32_t>(t), 1});
  }
  if (candidates_.empty()) return 0;
  const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), Before);
  if (options_.temperature == 0) return best.token;
  if (options_.top_k > 0 && static_cast<size_t>(options_.top_k) < candidates_.size()) {
    const auto k = candidates_.begin() + options_.top_k;
    std::nth_element(candidates_.begin(), k, candidates_.end(), Before);
    candidates_.erase(k, candidates_.end());
  }
  double total = 0;
  for (Candidate& c : candidates_) {
    if (c.logit != best.logit) {  // so that equal infinities weigh 1
      c.weight = std::exp((static_cast<double>(c.logit) - best.logit) / options_.temperature);
    }
    total += c.weight;
  }
  // top-p keeps the fewest tokens whose probabilities reach p; min-p those at least min_p times as
  // likely as the first. The first is always kept. Only as many are put in order as are looked at.
  if (options_.min_p > 0) {
    std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < options_.min_p; });
  }
  size_t sorted = 0;
  size_t kept = candidates_.size();
  double kept_weight = 0;
  if (options_.top_p < 1) {
    for (kept = 0;
         kept < candidates_.size() && (kept == 0 || kept_weight < options_.top_p * total);) {
      if (kept == sorted) sorted = SortMore(sorted);
      kept_weight += candidates_[kept++].weight;
    }
  } else {
    for (const Candidate& c : candidates_) kept_weight += c.weight;
  }
  double at = Uniform() * kept_weight;
  for (size_t i = 0; i < kept; ++i) {
    if (i == sorted) sorted = SortMore(sorted);
    at -= candidates_[i].weight;
    if (at < 0) return candidates_[i].token;
  }
  return best.token;  // rounding left nothing else
}

}  // namespace omnikv
