// From logits to a token, on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv {

// kInvalidArgument names the option, its value and its range.
Status CheckSampling(const SamplingOptions& options);

// Draws tokens by repetition penalty, then temperature, top-k, top-p and min-p in this order, as
// transformers' generate does. The same seed and logits give the same tokens on every machine.
class Sampler {
 public:
  // REQUIRES CheckSampling(options).ok().
  Sampler(const SamplingOptions& options, int32_t vocab);

  // A token was in the context: it counts for the repetition penalty.
  void See(int32_t token) { seen_[static_cast<size_t>(token)] = true; }

  // A token for `logits` [vocab]. The highest, and of equals the first, when greedy.
  int32_t Sample(const float* logits);

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };
  double Uniform();  // in [0, 1)

  SamplingOptions options_;
  std::vector<bool> seen_;             // [vocab]
  std::vector<Candidate> candidates_;  // scratch, [vocab]
  std::vector<double> weights_;        // scratch, [vocab]
  uint64_t state_;
};

}  // namespace omnikv
