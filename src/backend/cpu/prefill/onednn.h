// oneDNN, opened when it is first wanted (loading it with the program would cost every start some
// milliseconds) and called from our own threads with one of its own each. Used for bf16 products on
// CPUs with AMX tiles, and to measure what the machine can do.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/dtype.h"
#include "omnikv/status.h"

namespace omnikv::prefill {

// y[m, ldy] = x[m, ldx] · w[n, ldw]ᵀ with k values a row; x and w bf16 or f32, y f32.
struct OneDnnShape {
  DType type = DType::kBF16;
  bool packed_w = false;  // w in the layout the library likes best (for measuring; see WeightBytes)
  int64_t m = 0, n = 0, k = 0;
  int64_t ldx = 0, ldw = 0, ldy = 0;

  auto operator<=>(const OneDnnShape&) const = default;
};

class OneDnn {
 public:
  class Product;

  // For `n_threads` calling threads. Fails with kUnsupported when this build is without oneDNN, or
  // with what the system says when the library is missing.
  static Result<std::unique_ptr<OneDnn>> Open(int n_threads);
  ~OneDnn();

  // The compiled product, kept for the next time; null where the library cannot run it. Not
  // thread-safe; the first call for a shape takes milliseconds and memory.
  const Product* Prepare(const OneDnnShape& shape);

  // What Prepare gave for this shape, or null. Thread-safe while nobody prepares.
  const Product* Find(const OneDnnShape& shape) const;

  // Thread-safe for different `thread` < n_threads.
  void Run(const Product& product, int thread, const void* x, const void* w, float* y) const;

  static size_t WeightBytes(const Product& product);

 private:
  struct Library;
  explicit OneDnn(std::unique_ptr<Library> library);

  std::unique_ptr<Library> lib_;
};

}  // namespace omnikv::prefill
