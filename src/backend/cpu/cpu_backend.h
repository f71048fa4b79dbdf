// The CPU as a device: Highway kernels for decode, matrix products and blocked attention for
// prefill (prefill/), and a pool of threads. Nothing allocates after an op was enqueued or
// recorded once; results depend on the number of threads, never on their timing.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/cpu/prefill/gemm.h"
#include "base/thread_pool.h"

namespace omnikv {

struct CpuOptions {
  int threads = 0;  // 0: one a physical core (PhysicalCores())
  bool pin = true;  // each worker to a core of its own
  // How long workers look for the next op before they park.
  std::chrono::microseconds spin = ThreadPool::kSpin;
  std::string isa;  // the instruction set to use, one of CpuIsas(); "": the best
  // Of steps of many rows; decode rounds nothing.
  GemmPrecision precision = GemmPrecision::kFast;
};

class CpuBackend : public HostBackend {
 public:
  explicit CpuBackend(const CpuOptions& options);
  ~CpuBackend() override;

  std::string_view Name() const override { return "cpu"; }
  std::string Describe() const override;
  Support Supports(const Op& op) const override;

  // The backend's threads, for work between ops: loading, benchmarks.
  ThreadPool& pool();

 protected:
  void Run(const Op& op) override;
  Status Reserve(const Op& op) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::unique_ptr<Backend> MakeCpuBackend(const CpuOptions& options = {});

// The instruction sets that this CPU runs, best first.
std::vector<std::string> CpuIsas();

}  // namespace omnikv
