// An NVIDIA card as a device: own kernels for decode, attention and selection, products of many
// rows by cuBLASLt where it is installed. Recorded steps are CUDA graphs.
//
// Steps of up to 16 rows round nothing but the K/V. Larger ones round what products read to bf16,
// and prompts what attention reads to K/V's own type, as the CPU does, unless told not to.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backend/backend.h"

namespace omnikv {

struct CudaOptions {
  int device = 0;               // ordinal of the card
  size_t memory = 0;            // bytes of device memory this process may take; 0: all that is free
  bool full_precision = false;  // of prefill: f32 throughout
  // Makes what runs the attention of Lane::kHost, before the first; null: there is none.
  std::function<Result<std::unique_ptr<Backend>>()> make_host;
  // Tests: all that the side lanes do is held up, each time anew, by a pseudo-random time of less
  // than so many microseconds, at most 4 seconds; 0: by none.
  uint32_t lane_delay_us = 0;
  uint64_t lane_delay_seed = 0;
  // Tests: asked before each allocation, of pinned memory too, whether to refuse it.
  std::function<bool()> refuse;
};

// kUnsupported, with the reason in one clause, when there is no driver, no such card, or none that
// this build has code for.
Result<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options);

// Bytes in use on that card as its driver says, by all processes; nothing without such a card.
// Takes a context there if this process has none. Any thread.
std::optional<size_t> CudaMemoryInUse(int device = 0);

}  // namespace omnikv
