// Products through oneDNN's bf16 matrix multiplication: the engine of PrefillGemm on CPUs with AMX.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/cpu/prefill/gemm_product.h"
#include "backend/cpu/prefill/kernels.h"
#include "backend/cpu/prefill/onednn.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "omnikv/status.h"

namespace omnikv::prefill {

class OneDnnGemm {
 public:
  explicit OneDnnGemm(ThreadPool& pool);

  Status Reserve(int64_t max_rows, const WeightRef& w);

  // Opens the library the first time. False, and nothing done, where it cannot be used.
  bool Run(const float* x, int64_t m, int64_t ldx, std::span<const GemmProduct> products);

 private:
  void RunTask(const TaskGrid::Task& task, int64_t window, int thread);

  ThreadPool& pool_;
  const VectorKernels& vector_;
  bool tried_ = false;
  std::unique_ptr<OneDnn> library_;  // null: not opened, or not there
  Pages packed_;   // the window of x in bf16, padded with rows of zeros: [kWindowRows, n_in]
  Pages scratch_;  // [threads, scratch_bytes_]
  size_t scratch_bytes_ = 0;
};

}  // namespace omnikv::prefill
