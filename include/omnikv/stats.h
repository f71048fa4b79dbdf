// What a session did and what it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace omnikv {

// Bytes by where they lie.
struct TierBytes {
  size_t device = 0;  // a card's memory
  size_t host = 0;    // all that is kept in memory, on a machine without one
  size_t disk = 0;    // files of EngineOptions::kv_folder
};

struct SessionStats {
  std::string device;    // what ran: "cpu", ...
  std::string policy;    // name
  std::string settings;  // "key=value ...", every setting, as resolved
  // Whether rows of a prompt read everything before them, as full attention does.
  bool dense_prompts = true;

  int64_t context_tokens = 0;  // in the bank now
  int64_t prefill_tokens = 0;  // of the last Prompt(), those that were not there before
  // Of them, those that the context held, or that of the session it was forked from: rows that they
  // need were given back, or are another policy's, or turned otherwise. The last rows of a prompt,
  // which every Prompt() computes for the logits and the policy's state, do not count.
  int64_t recomputed_tokens = 0;
  double prefill_seconds = 0;  // of the last Prompt()
  int64_t decode_tokens = 0;   // decode steps of the last Generate()
  double decode_seconds = 0;

  double attended_tokens = 0;  // whose K/V the last decode step read, mean over layers
  // The policy's budget at this length, 0: none. What omnikv selects; its tail is read besides.
  int64_t budget_tokens = 0;
  // Two measures to compare policies at, both fractions of what full attention has at this length.
  // K/V bytes that a step reads, mean over global-attention layers, dense ones and passes for
  // scores alone included.
  double read_fraction = 1;
  // Bytes that the session keeps where it computes (the card's memory, the host's without one): its
  // blocks of K/V, working sets, stages and the policy's state, over the K/V of its tokens.
  double held_fraction = 0;
  // The same of all open sessions, in bytes of every tier; blocks that forks share count once.
  TierBytes held_bytes;

  // Of the decode steps since the prompt, a mean; of streamed layers, the last step's. Where all
  // K/V are in memory on the CPU, nothing moves: 0, and no hit rate.
  size_t transfer_bytes_per_step = 0;  // K/V brought to the device, or from a disk to memory
  std::optional<double> hit_rate;      // share of the K/V read that was there already
};

}  // namespace omnikv
