// What the two sides of attention by FlashInfer's Hopper kernel share: prefill_hopper.cu, which is
// compiled as the other kernels are, and its instances, a file for each type of K/V. These see the
// library's headers (prefill_hopper.cuh), which take most of their compilation, and are compiled
// for sm_90a only.
#pragma once

#include <cuda_runtime.h>

#include "backend/ops.h"

namespace omnikv::cuda {

// Tokens of a block of K/V: a power of two, from this on. Less would be many small copies.
inline constexpr int kLeastHopperBlock = 16;
// Queries of one head that a block of threads takes.
constexpr int HopperRows(int head_dim) {
  return head_dim <= 64 ? 192 : 128;
}
// Tokens that are multiplied at a time: as many as shared memory has room for.
constexpr int HopperTokens(int head_dim) {
  return head_dim <= 128 ? 128 : 64;
}

// Parts that the tokens of a sequence are dealt to, of at most so many. Each then has more tiles of
// tokens than the diagonal touches, so that every query reads some of each part.
__host__ __device__ constexpr int HopperPartsOf(int past, int at_most) {
  constexpr int kLeastTokens = 1024;
  const int most = past / kLeastTokens;
  return most < 1 ? 1 : most < at_most ? most : at_most;
}

// What the kernel reads in place of AttendArgs' own.
struct HopperInputs {
  const void* q = nullptr;  // [n_rows, n_heads, dk], rounded to the type of K/V
  // [n_seqs, HopperTokens(dk), K: n_kv_heads x dk | V: n_kv_heads x dv], in the type of K/V: the
  // tokens of each sequence after the last that is a multiple of HopperTokens(dk), then zeros.
  // Heads are in the places that they have in the view's planes.
  const std::byte* tails = nullptr;
  void* o_bf16 = nullptr;  // [n_rows, n_heads, dv]: where o goes instead of AttendArgs::o
  // Where the parts of a sequence that has several leave what they found.
  int parts = 1;              // at most
  float* part_o = nullptr;    // [parts, n_rows, Heads(), dv]: of the heads that take part
  float* part_lse = nullptr;  // [parts, n_rows, Heads()]
};

using HopperKernel = cudaError_t(const AttendArgs& args, const HopperInputs& inputs,
                                 cudaStream_t stream);
// By the type of K/V; null where there is none for the size of the heads.
HopperKernel* HopperKernelBf16(int32_t head_dim);
HopperKernel* HopperKernelF16(int32_t head_dim);

}  // namespace omnikv::cuda
