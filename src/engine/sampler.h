// From logits to a token, on the host.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "backend/sampling.h"
#include "omnikv/options.h"
#include "omnikv/status.h"

namespace omnikv {

// kInvalidArgument names the option, its value and its range.
Status CheckSampling(const SamplingOptions& options);
// Sampling and max_tokens.
Status CheckGenerate(const GenerateOptions& options);

// Draws tokens by repetition penalty, presence and frequency penalties and bias, then temperature,
// top-k, top-p and min-p in this order, as transformers' generate does (backend/sampling.h: exactly
// how). The same seed and logits give the same tokens everywhere.
class Sampler {
 public:
  // REQUIRES CheckSampling(options).ok().
  Sampler(const SamplingOptions& options, int32_t vocab);

  // A token was in the context: it counts for the repetition penalty.
  void See(int32_t token) { seen_[static_cast<size_t>(token / 32)] |= uint32_t{1} << (token % 32); }
  // Draws a token for `logits` [vocab], which counts as seen. The highest, and of equals the first,
  // when greedy.
  int32_t Sample(const float* logits);
  // NextToken drew this one, from `meta` and `seen`.
  void Take(int32_t token);

  // What NextToken goes on from. Its `random` is where the random numbers stand: a sampler with
  // this as its seed goes on with them.
  const SampleMeta& meta() const { return meta_; }
  const std::vector<uint32_t>& seen() const { return seen_; }
  // Whether its tokens are simply the highest.
  bool IsArgmax() const {
    return meta_.temperature == 0 && meta_.repeat_penalty == 1 && !ChangesLogits();
  }
  // Whether Sample alone can draw its tokens: NextToken knows no bias, and no penalty of a count.
  bool ChangesLogits() const {
    return !bias_.empty() || presence_penalty_ != 0 || frequency_penalty_ != 0;
  }

 private:
  SampleMeta meta_;
  int32_t vocab_;
  std::vector<uint32_t> seen_;            // [SeenWords(vocab)]
  std::vector<SampleCandidate> scratch_;  // [vocab]
  float presence_penalty_, frequency_penalty_;
  std::vector<std::pair<int32_t, float>> bias_;
  std::map<int32_t, int32_t> drawn_;  // how often, where a penalty asks for it
  std::vector<float> changed_;        // logits
};

}  // namespace omnikv
