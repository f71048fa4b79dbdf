#include "engine/sampler.h"

#include <fmt/format.h>

namespace omnikv {
namespace {

Status CheckRange(const char* field, double value, double low, double high, const char* expected) {
  if (value >= low && value <= high) return {};  // false for NaN
  return InvalidArgument(fmt::format("{} is {}, expected {}", field, value, expected));
}

}  // namespace

Status CheckSampling(const SamplingOptions& o) {
  OKV_RETURN_IF_ERROR(CheckRange("`temperature`", o.temperature, 0, 100, "0 (greedy) to 100"));
  OKV_RETURN_IF_ERROR(CheckRange("`top_k`", o.top_k, 0, 1e9, "0 (off) or more"));
  OKV_RETURN_IF_ERROR(CheckRange("`top_p`", o.top_p, 1e-9, 1, "more than 0, up to 1 (off)"));
  OKV_RETURN_IF_ERROR(CheckRange("`min_p`", o.min_p, 0, 1, "0 (off) to 1"));
  OKV_RETURN_IF_ERROR(
      CheckRange("`presence_penalty`", o.presence_penalty, -2, 2, "-2 to 2, 0 is off"));
  OKV_RETURN_IF_ERROR(
      CheckRange("`frequency_penalty`", o.frequency_penalty, -2, 2, "-2 to 2, 0 is off"));
  for (const auto& [token, bias] : o.logit_bias) {
    OKV_RETURN_IF_ERROR(CheckRange("`logit_bias`", bias, -100, 100, "-100 to 100"));
  }
  return CheckRange("`repeat_penalty`", o.repeat_penalty, 0.01, 100, "0.01 to 100, 1 is off");
}

Status CheckGenerate(const GenerateOptions& o) {
  OKV_RETURN_IF_ERROR(CheckSampling(o.sampling));
  if (o.max_tokens >= 0) return {};
  return InvalidArgument(fmt::format("`max_tokens` is {}, expected 0 or more", o.max_tokens));
}

Sampler::Sampler(const SamplingOptions& options, int32_t vocab)
    : meta_{.temperature = options.temperature,
            .top_p = options.top_p,
            .min_p = options.min_p,
            .repeat_penalty = static_cast<float>(options.repeat_penalty),
            .top_k = options.top_k,
            .random = options.seed},
      vocab_(vocab),
      seen_(static_cast<size_t>(SeenWords(vocab)), 0),
      scratch_(static_cast<size_t>(vocab)),
      presence_penalty_(static_cast<float>(options.presence_penalty)),
      frequency_penalty_(static_cast<float>(options.frequency_penalty)),
      bias_(options.logit_bias) {}

void Sampler::Take(int32_t token) {
  TakeSample(token, meta_, seen_.data());
  if (presence_penalty_ != 0 || frequency_penalty_ != 0) ++drawn_[token];
}

int32_t Sampler::Sample(const float* logits) {
  if (ChangesLogits()) {
    changed_.assign(logits, logits + vocab_);
    for (const auto& [token, times] : drawn_) {
      changed_[static_cast<size_t>(token)] -=
          presence_penalty_ + frequency_penalty_ * static_cast<float>(times);
    }
    for (const auto& [token, bias] : bias_) changed_[static_cast<size_t>(token)] += bias;
    logits = changed_.data();
  }
  const int32_t token = SampleToken(logits, vocab_, meta_, seen_.data(), scratch_);
  Take(token);
  return token;
}

}  // namespace omnikv
