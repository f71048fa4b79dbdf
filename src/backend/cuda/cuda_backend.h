// An NVIDIA card as a device: own kernels for decode, attention and selection, products of many
// rows by cuBLASLt where it is installed. Recorded steps are CUDA graphs.
//
// Steps of up to 16 rows round nothing but the K/V. Larger ones (prompts) round what products and
// attention read to bf16 (K/V's own type in attention), as the CPU does, unless told not to.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace omnikv {

struct CudaOptions {
  int device = 0;               // ordinal of the card
  size_t memory = 0;            // bytes of device memory this process may take; 0: all that is free
  bool full_precision = false;  // of prefill: f32 throughout
};

// kUnsupported, with the reason in one clause, when there is no driver, no such card, or none that
// this build has code for.
Result<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options);

}  // namespace omnikv
