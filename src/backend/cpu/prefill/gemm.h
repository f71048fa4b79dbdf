// Matrix products of many rows: the linear layers of prefill. f32 activations in and out, weights
// in any format, read as they are stored: a panel of them at a time is converted into a cache-sized
// scratch and used for up to kWindowRows rows, so no second copy of a weight is ever kept.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "backend/cpu/prefill/gemm_product.h"
#include "backend/cpu/prefill/kernels.h"
#include "backend/cpu/prefill/onednn_gemm.h"
#include "backend/ops.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "omnikv/status.h"

namespace omnikv {

// What a product of weights that are not f32 may round. f32 weights are always computed in f32.
enum class GemmPrecision {
  kFast,  // activations and weights to bf16 where the CPU multiplies bf16 faster; sums in f32
  kFull,  // nothing: every weight to f32, exactly
};

// Whether bf16 products go to oneDNN, which is opened when the first of them runs.
enum class GemmLibrary {
  kAuto,    // where the CPU has AMX, which only the library uses, and the library is installed
  kNever,   // our own kernels, always
  kAlways,  // wherever it is installed (tests, benchmarks)
};

// One product of a call: y[m, n_out] = x · wᵀ (+ bias).
struct LinearOut {
  WeightRef w;
  const float* bias = nullptr;  // [n_out]; null: none
  float* y = nullptr;           // [m, ldy]
  int64_t ldy = 0;              // values from one row of y to the next
};

// Owns the scratch of one backend; one caller at a time. Results do not depend on the number of
// threads, and with our own kernels not on m either: a row comes out the same whichever rows are
// beside it.
class PrefillGemm {
 public:
  explicit PrefillGemm(ThreadPool& pool, GemmPrecision precision = GemmPrecision::kFast,
                       GemmLibrary library = GemmLibrary::kAuto);

  // Takes the memory that products with `w` of up to `max_rows` rows need; outside of steps, since
  // no call below allocates. Fails with kResourceExhausted.
  Status Reserve(int64_t max_rows, const WeightRef& w);

  // Several products of one x[m, n_in], which is packed once for all of them.
  // REQUIRES Reserve for every weight; outputs do not overlap x.
  void Linear(const float* x, int64_t m, int64_t ldx, std::span<const LinearOut> outs);
  void Linear(const float* x, int64_t m, int64_t ldx, const WeightRef& w, const float* bias,
              float* y, int64_t ldy);

  // out[m, ffn] = act(x · gateᵀ + gate_bias) * (x · upᵀ + up_bias), without storing the factors.
  void GatedFfn(const float* x, int64_t m, int64_t ldx, const WeightRef& gate, const WeightRef& up,
                const float* gate_bias, const float* up_bias, Activation act, float* out,
                int64_t ldo);

  // What computes products with weights of a format: "AVX512 bf16", "f32 (AVX3)".
  std::string Describe(DType format) const;

 private:
  enum class Engine { kF32, kBf16, kLibrary };
  struct Window;

  Engine EngineFor(DType format) const;
  const prefill::GemmKernels& KernelsFor(Engine engine) const;
  void Run(Engine engine, const float* x, int64_t m, int64_t ldx,
           std::span<const prefill::GemmProduct> products);
  uint32_t* Packed(const Window& window, int64_t word, int64_t block_words, int64_t panel) const;
  void PackPanel(const Window& window, const float* x, int64_t ldx, int64_t n_in, int64_t panel,
                 int thread);
  void LoadWeights(const prefill::GemmKernels& kernels, const WeightRef& w, int64_t row, int64_t n,
                   int64_t first, int64_t values, float* f32, uint32_t* out) const;
  void RunTask(const Window& window, const prefill::TaskGrid::Task& task, int thread);

  ThreadPool& pool_;
  const GemmPrecision precision_;
  const prefill::VectorKernels& vector_;
  const prefill::GemmKernels* bf16_;              // null: the CPU has no fast bf16
  std::unique_ptr<prefill::OneDnnGemm> library_;  // null: not wanted, or found missing
  Pages packed_;   // the window of x as panels, shared by all threads
  Pages scratch_;  // [threads, kScratchBytes]
};

}  // namespace omnikv
