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

Sampler::Sampler(const SamplingOptions& options, int32_t vocab)
    : options_(options), seen_(static_cast<size_t>(vocab), false), state_(options.seed) {
  candidates_.reserve(seen_.size());
  weights_.reserve(seen_.size());
}

double Sampler::Uniform() {  // SplitMix64 (Steele et al. 2014), 53 bits
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

int32_t Sampler::Sample(const float* logits) {
  candidates_.clear();
  const auto penalty = static_cast<float>(options_.repeat_penalty);
  for (size_t t = 0; t < seen_.size(); ++t) {
    float logit = logits[t];
    if (std::isnan(logit)) continue;  // never chosen
    if (seen_[t] && penalty != 1) logit = logit > 0 ? logit / penalty : logit * penalty;
    candidates_.push_back({logit, static_cast<int32_t>(t)});
  }
  if (candidates_.empty()) return 0;
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  if (options_.temperature == 0) {
    return std::min_element(candidates_.begin(), candidates_.end(), before)->token;
  }
  if (options_.top_k > 0 && static_cast<size_t>(options_.top_k) < candidates_.size()) {
    const auto k = candidates_.begin() + options_.top_k;
    std::nth_element(candidates_.begin(), k, candidates_.end(), before);
    candidates_.erase(k, candidates_.end());
  }
  std::sort(candidates_.begin(), candidates_.end(), before);
  weights_.clear();
  double total = 0;
  for (const Candidate& c : candidates_) {
    weights_.push_back(
        std::exp((static_cast<double>(c.logit) - candidates_[0].logit) / options_.temperature));
    total += weights_.back();
  }
  // top-p keeps the fewest tokens whose probabilities reach p; min-p those at least min_p times as
  // likely as the first. The first is always kept.
  size_t kept = 0;
  double kept_weight = 0;
  while (kept < weights_.size() && (kept == 0 || (kept_weight < options_.top_p * total &&
                                                  weights_[kept] >= options_.min_p))) {
    kept_weight += weights_[kept++];
  }
  double at = Uniform() * kept_weight;
  for (size_t i = 0; i < kept; ++i) {
    at -= weights_[i];
    if (at < 0) return candidates_[i].token;
  }
  return candidates_[kept - 1].token;
}

}  // namespace omnikv
