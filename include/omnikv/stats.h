// What a session did and what it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace omnikv {

struct SessionStats {
  std::string device;    // what ran: "cpu", ...
  std::string policy;    // name
  std::string settings;  // "key=value ...", every setting, as resolved

  int64_t context_tokens = 0;  // in the bank now
  int64_t prefill_tokens = 0;  // of the last Prompt(), those that were not there before
  double prefill_seconds = 0;  // of the last Prompt()
  int64_t decode_tokens = 0;   // decode steps of the last Generate()
  double decode_seconds = 0;

  double attended_tokens = 0;  // tokens read in the last decode step, mean over layers
  int64_t budget_tokens = 0;   // the policy's budget at this length; 0: none
  // The K/V that a step reads as a fraction of all there is, mean over global-attention layers,
  // dense ones included: the measure to compare policies at.
  double mem_fraction = 1;
  // Of all open sessions: blocks of K/V, those that forks share once, and what policies keep.
  size_t device_bytes = 0;
  size_t host_bytes = 0;
  size_t disk_bytes = 0;

  // Of the decode steps since the prompt, a mean; of streamed layers, the last step's. Nothing
  // crosses a bus on the CPU: 0, and no hit rate.
  size_t transfer_bytes_per_step = 0;  // K/V brought to the device
  std::optional<double> hit_rate;      // share of the K/V read that was there already
};

}  // namespace omnikv
