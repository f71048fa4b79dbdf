// Tests of a policy's own op run it on every backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#ifdef OMNIKV_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace omnikv {

// The parameter is ref, cpu or cuda.
class OnBackend : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "ref") backend_ = MakeRefBackend();
    if (GetParam() == "cpu") backend_ = MakeCpuBackend({.threads = 2});
#ifdef OMNIKV_HAVE_CUDA
    if (GetParam() == "cuda") {
      auto made = MakeCudaBackend({});
      if (!made.ok()) GTEST_SKIP() << made.status().message();
      backend_ = std::move(*made);
    }
#endif
    if (backend_ == nullptr) GTEST_SKIP() << "this build has no CUDA";
  }

  // A copy of `values` in the backend's memory, until buffers_ is cleared.
  template <typename T>
  T* OnDevice(const std::vector<T>& values) {
    auto buffer = backend_->Allocate(std::max<size_t>(1, values.size()) * sizeof(T), "a test");
    EXPECT_TRUE(buffer.ok());
    backend_->Upload(buffer->as(), values.data(), values.size() * sizeof(T));
    buffers_.push_back(std::move(*buffer));
    return buffers_.back().as<T>();
  }

  std::unique_ptr<Backend> backend_;
  std::vector<Buffer> buffers_;
};

}  // namespace omnikv
