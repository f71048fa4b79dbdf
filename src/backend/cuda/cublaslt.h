// Products of many rows with a weight matrix by cuBLASLt. The library is loaded when it is asked
// for, so that the binary starts, and decodes, where there is none.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/dtype.h"
#include "omnikv/status.h"

namespace omnikv::cuda {

// Y[n_rows, n_out] = X[n_rows, n_in] W[n_out, n_in]^T (+ bias) (+ Y), all row-major in device
// memory, summed in f32 (no TF32).
struct Gemm {
  DType in = DType::kBF16;  // of X and W: f32, f16 or bf16
  DType out = DType::kF32;  // of Y: f32, or bf16 when X and W are
  const void* x = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  const float* bias = nullptr;  // [n_out]; null: none. REQUIRES CublasLt::TakesBias
  bool accumulate = false;      // adds to Y
  int64_t n_rows = 0;
  int64_t n_out = 0;
  int64_t n_in = 0;
  int64_t x_pitch = 0;  // values from one row to the next
  int64_t w_pitch = 0;
  int64_t y_pitch = 0;
};

// Device memory that the library makes good use of on the largest cards.
inline constexpr size_t kGemmWorkspaceBytes = size_t{32} << 20;

// Of one device: the one that is current when it is opened and used. Not thread-safe.
class CublasLt {
 public:
  // `workspace`: device memory, 256-byte aligned, for products of one stream; outlives this. Hopper
  // makes use of 32 MiB.
  static Result<std::unique_ptr<CublasLt>> Open(void* workspace, size_t workspace_bytes);
  ~CublasLt();

  // Whether a bias can be added by the product itself.
  static bool TakesBias(const Gemm& gemm) { return gemm.out == DType::kF32; }

  // Chooses the algorithm for products of this shape, these pitches and alignments, once.
  // kUnsupported when the library has none.
  Status Prepare(const Gemm& gemm);

  // Enqueues the product. Aborts where Prepare would fail; allocates only when it has not run.
  void Multiply(const Gemm& gemm, cudaStream_t stream);

 private:
  struct Library;
  struct Key;
  struct Product;
  explicit CublasLt(std::unique_ptr<Library> library);

  Status Find(const Gemm& gemm, Product** product);

  std::unique_ptr<Library> lib_;
};

}  // namespace omnikv::cuda
