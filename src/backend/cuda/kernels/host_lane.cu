// The card's side of Lane::kHost (host_lane.h).
#include "backend/cuda/kernels/common.cuh"

namespace omnikv::cuda {
namespace {

constexpr int kPostThreads = 512;

template <typename Word>
__device__ void CopyPiece(const HostPost::Piece& piece) {
  const auto* const from = static_cast<const Word*>(piece.from);
  auto* const to = static_cast<Word*>(piece.to);
#pragma unroll 4
  for (size_t i = threadIdx.x; i < piece.bytes / sizeof(Word); i += kPostThreads) to[i] = from[i];
}

__global__ void __launch_bounds__(kPostThreads) PostKernel(const __grid_constant__ HostPost a) {
  GridTrigger();
  GridWait();
  for (int i = 0; i < a.n_pieces; ++i) {
    const HostPost::Piece& piece = a.pieces[i];
    const auto from = reinterpret_cast<uintptr_t>(piece.from);
    if ((from | piece.bytes) % sizeof(uint4) == 0) {
      CopyPiece<uint4>(piece);
    } else {
      CopyPiece<uint32_t>(piece);
    }
  }
  __threadfence_system();  // of each thread's own words, before the count
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint64_t count = ++*a.count;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(a.flag), "l"(count) : "memory");
}

__global__ void AwaitKernel(const uint64_t* count, const uint64_t* done) {
  GridTrigger();
  GridWait();
  const uint64_t wanted = *count;
  uint64_t seen = 0;
  for (;;) {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(done) : "memory");
    if (seen >= wanted) return;
    __nanosleep(100);
  }
}

}  // namespace

void PostToHost(const HostPost& post, const Launch& launch) {
  LaunchKernel(PostKernel, launch, dim3(1), dim3(kPostThreads), 0, post);
}

void AwaitHost(const uint64_t* count, const uint64_t* done, const Launch& launch) {
  LaunchKernel(AwaitKernel, launch, dim3(1), dim3(1), 0, count, done);
}

}  // namespace omnikv::cuda
