// From logits to a token, on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv {

// kInvalidArgument names the option, its value and its range.
Status CheckSampling(const SamplingOptions& options);
// Sampling and max_tokens.
Status CheckGenerate(const GenerateOptions& options);

// Draws tokens by repetition penalty, then temperature, top-k, top-p and min-p in this order, as
// transformers' generate does. The same seed and logits give the same tokens, but for the last bit
// of exp, in which C libraries differ.
class Sampler {
 public:
  // REQUIRES CheckSampling(options).ok().
  Sampler(const SamplingOptions& options, int32_t vocab);

  // A token was in the context: it counts for the repetition penalty.
  void See(int32_t token) { seen_[static_cast<size_t>(token)] = true; }

  // A token for `logits` [vocab]. The highest, and of equals the first, when greedy.
  int32_t Sample(const float* logits);

  // Where its random numbers stand: a sampler with this as its seed goes on with them.
  uint64_t state() const { return state_; }

 private:
  struct Candidate {
    float logit;
    int32_t token;
    double weight;  // its probability, relative to the likeliest token's
  };
  static bool Before(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  }
  double Uniform();  // in [0, 1)
  // Of the candidates the first `sorted` are in order: puts more there, returns how many then are.
  size_t SortMore(size_t sorted);

  SamplingOptions options_;
  std::vector<bool> seen_;             // [vocab]
  std::vector<Candidate> candidates_;  // scratch, [vocab]
  uint64_t state_;
};

}  // namespace omnikv
