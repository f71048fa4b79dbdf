// The ceiling of prefill: the highest rate of large matrix products on this machine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/thread_pool.h"

namespace omnikv {

struct GemmRate {
  double flops = 0;  // floating-point operations a second, all threads together
  std::string by;    // what reached it: "oneDNN bf16", "OpenBLAS f32", "omnikv AVX512 bf16"
};

// Multiplies large matrices, every thread its own, with PrefillGemm's kernels and with each library
// that is installed. Opens libraries and takes some tens of MiB: for benchmarks.
class GemmMeter {
 public:
  // `type` is kF32, or kBF16: what multiplies bf16; f32 where nothing here does.
  GemmMeter(ThreadPool& pool, DType type);
  ~GemmMeter();

  // One product with each, some milliseconds: in turns with what is to be compared with it.
  void Round();

  // The best rate of each so far, the highest first. Never empty.
  std::vector<GemmRate> Rates() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The highest rate of rounds for about `seconds`.
GemmRate MeasureGemmPeak(ThreadPool& pool, DType type, double seconds = 0.5);

// What the AMX tiles of all threads multiply in bf16 without touching memory; 0 where the CPU has
// none.
double MeasureAmxPeak(ThreadPool& pool);

// A clock to time work of `n_threads` threads with, in seconds: the CPU time of a lone thread,
// which other programs do not disturb, else the wall clock.
double BenchSeconds(int n_threads);

}  // namespace omnikv
