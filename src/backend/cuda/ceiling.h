// What a card and its bus can do at best, measured: what benchmarks hold kernels against.
#pragma once

#include <cstddef>

#include "omnikv/status.h"

namespace omnikv {

struct CudaCeiling {
  double read_gb_s = 0;  // device memory, each byte read once
  double copy_gb_s = 0;  // device to device, bytes read and written
  double gemm_bf16 = 0;  // floating-point operations a second; 0: no library
  double gemm_f32 = 0;
  double h2d_gb_s = 0;  // pinned host memory to the device, by the copy engine
  double d2h_gb_s = 0;
  double gather_gb_s = 0;  // rows of 4 KiB read from pinned host memory by a kernel
};

// Of card `device`, which is left as it was. Takes up to 4 GiB of its memory and 1 GiB of the
// host's meanwhile, less where there is less or `cap`, of the process on the card, allows less.
Result<CudaCeiling> MeasureCudaCeiling(int device, size_t cap = 0);

}  // namespace omnikv
