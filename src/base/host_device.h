// Functions that kernels of a card call too.
#pragma once

#ifdef __CUDACC__
#define OMNIKV_HOST_DEVICE __host__ __device__
#else
#define OMNIKV_HOST_DEVICE
#endif

// Ahead of a loop: a kernel's compiler is not to unroll it (backend/cuda/kernels/common.cuh, why).
#ifdef __CUDA_ARCH__
#define OMNIKV_ROLLED _Pragma("unroll 1")
#else
#define OMNIKV_ROLLED
#endif
