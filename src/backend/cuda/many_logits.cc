#include "backend/cuda/many_logits.h"

#include <algorithm>

namespace omnikv::cuda {

bool CanMultiplyLogits(const NormLogitsArgs& args) {
  return args.head.format == DType::kBF16 && args.head.row_bytes % 2 == 0;
}

void MultiplyLogits(const NormLogitsArgs& args, CublasLt& gemm, GrowingBuffer& rows,
                    GrowingBuffer& products, const Launch& launch) {
  const WeightRef& head = args.head;
  for (int32_t first = 0; first < args.n_out; first += kLogitsRows) {
    const int32_t n_rows = std::min(kLogitsRows, args.n_out - first);
    std::byte* const halves =
        rows.Get(size_t{4} * static_cast<size_t>(n_rows) * static_cast<size_t>(head.n_in));
    SplitNormed(args, first, n_rows, halves, launch);
    for (int64_t out = 0; out < head.n_out; out += kLogitsBand) {
      const LogitsBand band{first, n_rows, out, std::min(kLogitsBand, head.n_out - out)};
      const size_t bytes =
          size_t{8} * static_cast<size_t>(n_rows) * static_cast<size_t>(band.n_out);
      auto* const y = reinterpret_cast<float*>(products.Get(bytes));
      gemm.Multiply({.in = DType::kBF16,
                     .out = DType::kF32,
                     .x = halves,
                     .w = static_cast<const std::byte*>(head.data) + out * head.row_bytes,
                     .y = y,
                     .n_rows = 2 * n_rows,
                     .n_out = band.n_out,
                     .n_in = head.n_in,
                     .x_pitch = head.n_in,
                     .w_pitch = head.row_bytes / 2,
                     .y_pitch = band.n_out},
                    launch.stream);
      FinishLogits(args, band, y, launch);
    }
  }
}

}  // namespace omnikv::cuda
