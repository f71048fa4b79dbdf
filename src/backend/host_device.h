// Marks functions that kernels of a card call too.
#pragma once

#ifdef __CUDACC__
#define OMNIKV_HOST_DEVICE __host__ __device__
#else
#define OMNIKV_HOST_DEVICE
#endif
