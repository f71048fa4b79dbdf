// What the tests of the CUDA backend share. Where there is no card they say so, and are skipped.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "backend/cuda/cuda_backend.h"

namespace omnikv {

inline constexpr size_t kMiB = size_t{1} << 20;

inline int Cards() {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
  static_cast<void>(cudaGetLastError());
  return n;
}

inline size_t FreeMemory() {
  size_t free = 0;
  size_t total = 0;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

inline std::unique_ptr<Backend> Make(const CudaOptions& options = {}) {
  auto backend = MakeCudaBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return backend.ok() ? std::move(*backend) : nullptr;
}

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    if (Cards() == 0) GTEST_SKIP() << MakeCudaBackend({}).status().message();
  }
};

// A row of `bytes` from one place to another, as an op.
struct CopyOp {
  CopyOp(Backend& backend, size_t bytes) : row_bytes(static_cast<int64_t>(bytes)) {
    auto zeros = backend.AllocateShared(8, "test");
    EXPECT_TRUE(zeros.ok());
    numbers = std::move(*zeros);
    numbers.as<int32_t>()[1] = 1;
  }
  Op operator()(const void* from, void* to) const {
    return FetchRowsArgs{.from = static_cast<const std::byte*>(from),
                         .to = static_cast<std::byte*>(to),
                         .row_bytes = row_bytes,
                         .from_row = numbers.as<int32_t>(),
                         .to_row = numbers.as<int32_t>(),
                         .n = numbers.as<int32_t>() + 1,
                         .capacity = 1};
  }

  int64_t row_bytes;
  Buffer numbers;  // 0, 1
};

}  // namespace omnikv
