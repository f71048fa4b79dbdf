#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace omnikv {
namespace {

constexpr double kPi = std::numbers::pi;

// base^(2i / dim) for i < dim / 2; exponents are f32, as published implementations have them.
std::vector<float> PowersOf(double base, int32_t dim) {
  std::vector<float> powers(static_cast<size_t>(dim / 2));
  const auto b = static_cast<float>(base);
  for (size_t i = 0; i < powers.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    powers[i] = static_cast<float>(std::pow(static_cast<double>(b), static_cast<double>(exponent)));
  }
  return powers;
}

// NTK-aware scaling (https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr): past the trained length
// the base grows so that the slowest pair turns as far as it did in training.
double DynamicBase(const RopeConfig& rope, int64_t max_context, int64_t length) {
  if (length <= max_context) return rope.theta;
  const auto factor = static_cast<float>(rope.factor);
  const float stretch = factor * static_cast<float>(length) / static_cast<float>(max_context) -
                        static_cast<float>(rope.factor - 1);
  const double exponent = static_cast<double>(rope.dim) / (rope.dim - 2);
  const auto power = static_cast<float>(
      std::pow(static_cast<double>(stretch), static_cast<double>(static_cast<float>(exponent))));
  return static_cast<float>(rope.theta) * power;
}

// Llama 3.1 (https://arxiv.org/abs/2407.21783): long waves are stretched, short ones kept, and
// those between blended.
void ScaleLlama3(const RopeConfig& rope, std::vector<float>& inv_freq) {
  const auto context = static_cast<double>(rope.original_context);
  const auto low_wave = static_cast<float>(context / rope.low_freq_factor);
  const auto high_wave = static_cast<float>(context / rope.high_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto band = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  for (float& f : inv_freq) {
    const float wave = 1.0f / f * static_cast<float>(2 * kPi);
    if (wave < high_wave) continue;
    if (wave > low_wave) {
      f /= factor;
      continue;
    }
    const float smooth = (1.0f / wave * static_cast<float>(context) - low) / band;
    f = (1.0f - smooth) * f / factor + smooth * f;
  }
}

// YaRN (https://arxiv.org/abs/2309.00071), NTK by parts: pairs that turn often enough in training
// are kept, those that turn too little are stretched, with a ramp between.
void ScaleYarn(const RopeConfig& rope, const std::vector<float>& powers,
               std::vector<float>& inv_freq) {
  // The pair, as a real number, that turns so many times over the training context.
  const auto pair_of = [&](double turns) {
    const auto context = static_cast<double>(rope.original_context);
    return rope.dim * std::log(context / (turns * 2 * kPi)) / (2 * std::log(rope.theta));
  };
  double first = pair_of(rope.beta_fast);
  double last = pair_of(rope.beta_slow);
  if (rope.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(rope.dim - 1));
  if (first == last) last += 0.001;  // no ramp: a step
  const auto factor = static_cast<float>(rope.factor);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float at =
        (static_cast<float>(i) - static_cast<float>(first)) / static_cast<float>(last - first);
    const float kept = 1.0f - std::clamp(at, 0.0f, 1.0f);
    const float stretched = 1.0f / (factor * powers[i]);
    inv_freq[i] = stretched * (1.0f - kept) + inv_freq[i] * kept;
  }
}

// YaRN's temperature of attention.
double YarnMagnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double ImpliedMagnitude(const RopeConfig& rope) {
  if (rope.scaling == RopeScaling::kYarn) {
    if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
      return YarnMagnitude(rope.factor, rope.mscale) /
             YarnMagnitude(rope.factor, rope.mscale_all_dim);
    }
    return YarnMagnitude(rope.factor, 1);
  }
  if (rope.scaling == RopeScaling::kLongrope && rope.factor > 1) {
    const auto context = static_cast<double>(rope.original_context);
    return std::sqrt(1 + std::log(rope.factor) / std::log(context));
  }
  return 1;
}

}  // namespace

RopeFrequencies ComputeRope(const RopeConfig& rope, int64_t max_context, int64_t length) {
  OKV_CHECK(rope.dim >= 2 && rope.dim % 2 == 0, "{} rotated values", rope.dim);
  const bool dynamic = rope.scaling == RopeScaling::kDynamic;
  const std::vector<float> powers =
      PowersOf(dynamic ? DynamicBase(rope, max_context, length) : rope.theta, rope.dim);
  RopeFrequencies out;
  out.inv_freq.resize(powers.size());
  for (size_t i = 0; i < powers.size(); ++i) out.inv_freq[i] = 1.0f / powers[i];

  switch (rope.scaling) {
    case RopeScaling::kNone:
    case RopeScaling::kDynamic:
      break;
    case RopeScaling::kLinear:
      for (float& f : out.inv_freq) f /= static_cast<float>(rope.factor);
      break;
    case RopeScaling::kLlama3:
      ScaleLlama3(rope, out.inv_freq);
      break;
    case RopeScaling::kYarn:
      ScaleYarn(rope, powers, out.inv_freq);
      break;
    case RopeScaling::kLongrope: {  // https://arxiv.org/abs/2402.13753
      const auto& factors = length > rope.original_context ? rope.long_factor : rope.short_factor;
      OKV_CHECK(factors.size() == powers.size());
      for (size_t i = 0; i < powers.size(); ++i) out.inv_freq[i] = 1.0f / (factors[i] * powers[i]);
      break;
    }
  }
  if (!rope.freq_factor.empty()) {
    OKV_CHECK(rope.freq_factor.size() == powers.size());
    for (size_t i = 0; i < powers.size(); ++i) out.inv_freq[i] /= rope.freq_factor[i];
  }
  out.magnitude = static_cast<float>(rope.magnitude > 0 ? rope.magnitude : ImpliedMagnitude(rope));
  return out;
}

}  // namespace omnikv
