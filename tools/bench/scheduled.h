// omnikv bench --scheduler: the same sequences as requests, which the scheduler serves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bench/cases.h"

namespace omnikv::tools {

struct ScheduledCase {
  std::string policy, settings;
  int64_t context = 0;     // tokens of each prompt
  int32_t requests = 0;    // submitted
  int32_t together = 0;    // of them, those that decoded at a time
  double prompts_s = 0;    // from the first request until all of these decode
  double ms_per_step = 0;  // while they do, a token of each
  double p95_ms = 0;       // 95th percentile of the time between two tokens of a request
  TierBytes held;          // by all of them
  std::optional<double> hit_rate;
  uint64_t fetched_bytes = 0;  // a step
  // A prompt that came meanwhile: its tokens, how long it took alone and beside the others, and
  // the 95th percentile of the time between the others' tokens until it was read.
  int64_t beside = 0;
  double alone_s = 0, beside_s = 0, beside_p95_ms = 0;
};

// `requests` prompts of `context` random tokens come at once. Those that the engine holds at a time
// decode `steps` tokens together. Then, unless `beside` is 0, a prompt of so many tokens comes.
// `token_ms`: SchedulerOptions. kFailed where a request fails; one that can never run is refused
// with its sentence.
Result<ScheduledCase> MeasureScheduled(BenchEngine& bench, const PolicyOptions& policy,
                                       int64_t context, int32_t requests, int steps, int64_t beside,
                                       double token_ms);

}  // namespace omnikv::tools
