// Maps by which the bulk copy engine of Hopper cards finds pieces of an array.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace omnikv::cuda {

// Values of 16 bits that a row of a box has: 128 bytes, the width of the swizzle.
inline constexpr int kBoxValues = 64;

// An array of three dimensions, the innermost dense, and the boxes that are copied from it: rows of
// box_values (kBoxValues, or half of that), swizzled within 8 of them as wgmma reads them. What
// lies outside reads as zeros.
struct TensorShape {
  int64_t sizes[3];
  int64_t strides[2];  // bytes, of the second and third dimension
  int box[2];          // of the second and third dimension
  int box_values = kBoxValues;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
};

// The size of a map of a bank's rows, which does not know how many there are: more than any memory
// holds, none of which is read but where a block table points.
inline int64_t MostBankRows(int64_t row_bytes) {
  return std::min<int64_t>(std::numeric_limits<int32_t>::max(), (int64_t{1} << 40) / row_bytes);
}

inline cudaError_t EncodeTensorMap(CUtensorMap* map, CUtensorMapDataType type, const void* base,
                                   const TensorShape& shape) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorCallRequiresNewerDriver;
  cuuint64_t sizes[3];
  for (int i = 0; i < 3; ++i) sizes[i] = static_cast<cuuint64_t>(shape.sizes[i]);
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(shape.strides[0]),
                                static_cast<cuuint64_t>(shape.strides[1])};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(shape.box_values),
                            static_cast<cuuint32_t>(shape.box[0]),
                            static_cast<cuuint32_t>(shape.box[1])};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(
      map, type, 3, const_cast<void*>(base), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.box_values == kBoxValues ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      shape.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace omnikv::cuda
